"""A plan as people read it in a terminal: the answer, its proof, its alternatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from layoutopt.cli.terminal import DOUBT, FITS, GOOD, Terminal, facts
from layoutopt.details.of_machine import errors_known, sure
from layoutopt.plan.units import (
    bytes_text,
    duration_text,
    layout_text,
    rate_text,
    seconds_text,
    used_text,
)
from reports.tables.rows import frontier, layouts

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.plan.build import Plan
    from layoutopt.plan.decided import Decided
    from layoutopt.plan.schema import Alternative, PlanFile
    from mesh_tf_core.model import Model
    from reports.views.view import View

ANSWER = "the answer"
Fits = Callable[[float], str]
"""fits(peak memory) -> 'yes', 'barely' or 'no'."""


def show_plan(terminal: Terminal, plan: Plan, limit: int, machine: Hardware) -> None:
    """Prints a plan; `limit` is the memory of a device that it was searched for, on this machine."""
    known = errors_known(machine)
    fits = partial(known.fits, limit=limit)
    answer = facts(summary(plan, fits, limit, sure(machine)), verdicts(plan, fits))
    terminal.show(answer, "", alternatives_table(plan, fits))
    if plan.data.frontier:
        terminal.show("", frontier_table(plan.data, fits))
    reasons = [(a.name, a.reason) for a in plan.alternatives if a.reason is not None]
    if reasons:
        terminal.show("", facts(reasons))
    for note in plan.data.notes:
        terminal.show("", f"note: {note}")


def summary(plan: Plan, fits: Fits, limit: int, behind: str) -> list[tuple[str, str]]:
    """Names and values of the answer; `behind`: what stands behind its numbers."""
    info, p = plan.data.model, plan.predicted
    peak = p.peak_memory_bytes
    traffic = ", ".join(
        f"{axes} {bytes_text(n)}" for axes, n in p.communication_bytes_per_device.items() if n
    )
    return [
        ("model", f"{info.name}, {info.parameters:,} parameters"),
        ("mesh", f"{plan.mesh} ({plan.mesh.devices} devices)"),
        ("layout", rules_text(plan.data.layout)),
        *([("parallel", forms_text(plan.data.details.parallelism))] if plan.data.details.parallelism else []),
        *decided_rows(plan.data, plan.model),
        ("hardware", plan.data.hardware),
        (
            "step",
            f"{seconds_text(p.step_seconds)} predicted = {seconds_text(p.compute_seconds)} compute + "
            f"{seconds_text(p.exposed_communication_seconds)} exposed communication",
        ),
        *((name, said) for name, said in (("speed", p.speed), ("per chip", p.chip_speed)) if said),
        *([("training", plan.data.training.words)] if plan.data.training else []),
        ("work", f"{rate_text(p.flops_per_device, 'FLOP')} per device"),
        ("traffic", f"per device: {traffic}" if traffic else "none"),
        ("memory", f"{used_text(peak, limit)} per device{', barely fits' * (fits(peak) == 'barely')}"),
        *([("host", p.host)] if p.host else []),
        ("how sure", behind),
        ("proof", proof(plan)),
    ]


def verdicts(plan: Plan, fits: Fits) -> dict[str, str]:
    """The colours of what is proven and of whether it fits."""
    memory = FITS[fits(plan.predicted.peak_memory_bytes)]
    return {"proof": GOOD if plan.solver.proven else DOUBT, "memory": memory}


def proof(plan: Plan) -> str:
    """What is proven about the answer."""
    s = plan.solver
    if s.gap is None:
        return f"nothing is known of it ({s.status})"
    space = plan.data.space
    among = f"{s.layouts_considered} layouts" if space is None else space.count
    limits = "" if space is None else space.limits
    spent = f"gap {100 * s.gap:.2g}%, {duration_text(s.wall_seconds or 0)}"
    more = "; ".join(filter(None, (spent, limits)))
    if s.status == "OPTIMAL":
        return f"optimal under this cost model, of {among} ({more})"
    if plan.data.frontier and s.gap == 0:
        return f"the fastest is proven, the frontier is not complete ({s.status}, of {among}; {more})"
    likely = "" if s.likely_gap is None else f", likely {100 * s.likely_gap:.2g}% (see the note)"
    return f"not proven: at most {100 * s.gap:.1f}% from the best{likely} ({s.status}, of {among}; {more})"


def decided_rows(said: Decided, model: Model | None) -> list[tuple[str, str]]:
    """What is decided beside the layout, and which variables are stored as the layout says where others are
    not."""
    from layoutopt.space.undivided import few

    found = said.listed()
    trained = model.graph.variables.items() if model is not None and said.storage else ()
    whole = [name for name, v in trained if v.trainable and name not in said.storage]
    if whole:
        found["storage"] += f"; layout: {few(whole)}"
    return [(name, words) for name, words in found.items() if words]


def rules_text(layout: Mapping[str, Sequence[str]]) -> str:
    """A layout as `--layout` takes it, with room to break the line; says so if nothing is split."""
    return layout_text(layout).replace(";", "; ") or "nothing is split"


def forms_text(forms: Mapping[str, str]) -> str:
    """What the trade calls the axes: 'data: data (ZeRO-2); model: tensor'."""
    return "; ".join(f"{axis}: {form}" for axis, form in forms.items())


def alternatives_table(plan: Plan, fits: Fits = lambda peak: "yes") -> View:
    """The answer and every alternative on the same numbers, the best by what was asked for first."""
    return layouts(plan.data, _fits(fits), ANSWER, plan.question.objective == "memory")


def frontier_table(plan: PlanFile, fits: Fits = lambda peak: "yes") -> View:
    """Time against memory: what every byte less costs."""
    return frontier(plan, _fits(fits))


def _fits(fits: Fits) -> Callable[[Alternative], str]:
    return lambda a: fits(a.predicted.peak_memory_bytes) if a.predicted and a.feasible else "no"
