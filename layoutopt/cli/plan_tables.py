"""A plan as people read it in a terminal: the answer, its proof, its alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from rich.table import Table

from layoutopt.cli.plans import where_of
from layoutopt.cli.terminal import DOUBT, FITS, GOOD, Terminal, facts, table
from layoutopt.details.of_machine import errors_known, sure
from layoutopt.plan.units import (
    bytes_text,
    duration_text,
    layout_text,
    mesh_option,
    rate_text,
    seconds_text,
    share_text,
    times_text,
    used_text,
)

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.plan.build import Plan
    from layoutopt.plan.schema import Alternative, PlanFile, Predicted

ANSWER = "the answer"
Fits = Callable[[float], str]
"""fits(peak memory) -> 'yes', 'barely' or 'no'."""
WIDE = 120
"""Characters from which on a table has room for every column."""


def show_plan(terminal: Terminal, plan: Plan, limit: int, machine: Hardware) -> None:
    """Prints a plan; `limit` is the memory of a device that it was searched for, on this machine."""
    width = terminal.out.width
    known = errors_known(machine)
    fits = partial(known.fits, limit=limit)
    answer = facts(summary(plan, fits, limit, sure(machine)), verdicts(plan, fits))
    terminal.show(answer, "", alternatives_table(plan, width, fits))
    if plan.data.frontier:
        terminal.show("", frontier_table(plan.data, width, fits))
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
        *((name, words) for name, words in plan.data.listed().items() if words),
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


def rules_text(layout: Mapping[str, Sequence[str]]) -> str:
    """A layout as `--layout` takes it, with room to break the line; says so if nothing is split."""
    return layout_text(layout).replace(";", "; ") or "nothing is split"


def forms_text(forms: Mapping[str, str]) -> str:
    """What the trade calls the axes: 'data: data (ZeRO-2); model: tensor'."""
    return "; ".join(f"{axis}: {form}" for axis, form in forms.items())


@dataclass(frozen=True)
class _Row:
    name: str
    mesh: Mapping[str, int]
    layout: Mapping[str, Sequence[str]]
    decided: str
    predicted: Predicted | None
    fits: str

    @property
    def seconds(self) -> float:
        return self.predicted.step_seconds if self.predicted else math.inf

    @property
    def bytes(self) -> float:
        return self.predicted.peak_memory_bytes if self.predicted else math.inf


def alternatives_table(plan: Plan, width: int = WIDE, fits: Fits = lambda peak: "yes") -> Table:
    """The answer and every alternative on the same numbers, the best by what was asked for first."""
    own, alike = _alike(plan, fits)
    answer = _Row(
        f"{ANSWER}, {own}" if own else ANSWER,
        plan.data.mesh,
        plan.data.layout,
        plan.data.in_short(),
        plan.predicted,
        fits(plan.predicted.peak_memory_bytes),
    )
    lean = where_of(plan).objective == "memory"
    rows = sorted(alike, key=lambda row: row.bytes if lean else row.seconds)
    return _table("Alternatives", "layout", "of the answer's", [answer, *rows], width, strong=0, lean=lean)


def _alike(plan: Plan, fits: Fits) -> tuple[str, list[_Row]]:
    """Names of the answer itself, and a row for every other layout with all its names."""
    from layoutopt.plan.alike import grouped, identity

    mesh, own, rows = plan.data.mesh, "", []
    answer = identity(plan.data, mesh)
    for first, *others in grouped(plan.alternatives, mesh):
        names = ", ".join(each.name for each in (first, *others))
        if first.predicted is not None and identity(first, mesh) == answer:
            own = names
        else:
            rows.append(_row(first, fits, names))
    return own, rows


def frontier_table(plan: PlanFile, width: int = WIDE, fits: Fits = lambda peak: "yes") -> Table:
    """Time against memory: what every byte less costs; at a knee, more memory begins to buy little time."""
    from reports.views.choices import frontier

    knees = {p.predicted.peak_memory_bytes for p in frontier(plan) if p.knee}
    rows = [_row(a, fits) for a in plan.frontier or ()]
    marked = [replace(row, name=f"{row.name}, knee") if row.bytes in knees else row for row in rows]
    return _table("Frontier of time and memory", "point", "of the fastest", marked, width)


def _row(a: Alternative, fits: Fits, names: str = "") -> _Row:
    said = "not legal" if a.predicted is None else "no"
    if a.predicted is not None and a.feasible:
        said = fits(a.predicted.peak_memory_bytes)
    return _Row(names or a.name, a.mesh, a.layout, a.in_short(), a.predicted, said)


def _table(
    title: str,
    first: str,
    share: str,
    rows: Sequence[_Row],
    width: int,
    strong: int | None = None,
    lean: bool = False,
) -> Table:
    """Leaves out what all rows share, and on a narrow terminal what `cost` can tell; there what is decided
    stands beside the splits. `share` is of the first row's step, or of its memory."""
    wide = width >= WIDE
    same_mesh = len({tuple(row.mesh.items()) for row in rows}) == 1
    columns: list[tuple[str, Callable[[_Row], str]]] = [(first, lambda row: row.name)]
    if not same_mesh:
        columns.append(("mesh", lambda row: mesh_option(row.mesh).replace(";", "; ")))
    columns.append(("splits", lambda row: rules_text(row.layout) if wide else _briefly(row)))
    if wide and any(row.decided for row in rows):
        columns.append(("storage and recompute", lambda row: row.decided))
    texts = len(columns)
    columns.append(("step", _cell(lambda p: seconds_text(p.step_seconds))))
    if not lean:
        columns.append((share, _cell(lambda p: times_text(p.step_seconds, rows[0].seconds))))
    if wide:
        columns.append(("compute", _cell(lambda p: seconds_text(p.compute_seconds))))
        columns.append(("exposed", _cell(lambda p: seconds_text(p.exposed_communication_seconds))))
        if all(row.predicted is None or row.predicted.mfu is not None for row in rows):
            columns.append(("MFU", _cell(lambda p: share_text(p.mfu or 0.0, 1))))
    columns.append(("memory", _cell(lambda p: bytes_text(p.peak_memory_bytes))))
    if lean:
        columns.append((share, _cell(lambda p: times_text(p.peak_memory_bytes, rows[0].bytes))))
    numbers = range(texts, len(columns))
    if wide or any(row.fits != "yes" for row in rows):
        columns.append(("fits", lambda row: row.fits))
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return table(title, [name for name, _ in columns], cells, numbers, strong=strong)


def _briefly(row: _Row) -> str:
    """A layout with all that is decided beside it."""
    return "; ".join(filter(None, (layout_text(row.layout).replace(";", "; "), row.decided))) or "replicated"


def _cell(text: Callable[[Predicted], str]) -> Callable[[_Row], str]:
    return lambda row: text(row.predicted) if row.predicted else ""
