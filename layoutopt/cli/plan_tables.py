"""A plan as people read it in a terminal: the answer, its proof, its alternatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from layoutopt.cli.terminal import DOUBT, FITS, GOOD, Terminal, facts
from layoutopt.plan.machine_details import errors_known, sure
from layoutopt.plan.schema import ANSWER, Alternative
from layoutopt.plan.units import layout_text, used_text
from layoutopt.space.objective import Objective
from reports.views import facts as told
from reports.views.layouts import frontier, layouts
from reports.views.view import RULES

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.plan.build import Plan
    from layoutopt.plan.decided import Decided
    from mesh_tf_core.model import Model
    from reports.views.view import View

Fits = Callable[[float], str]
"""fits(peak memory) -> 'yes', 'barely' or 'no'."""
FitOf = Callable[[Alternative], str]


def show_plan(terminal: Terminal, plan: Plan, limit: int, machine: Hardware) -> None:
    """Prints a plan; `limit` is the memory of a device that it was searched for, on this machine."""
    assert plan.model is not None
    known = errors_known(machine, plan.model, plan.data.pipeline)
    fits = partial(known.fits, limit=limit, usable=machine.usable_memory_bytes)
    answer = facts(summary(plan, fits, limit, sure(machine, known)), verdicts(plan, fits))
    fit: FitOf = partial(Alternative.fit, known=known, limit=limit)
    terminal.show(answer, "", alternatives_table(plan, fit))
    if plan.data.frontier:
        terminal.show("", frontier(plan.data, fit))
    reasons = [(a.name, a.reason) for a in plan.alternatives if a.reason is not None]
    if reasons:
        terminal.show("", facts(reasons))
    for note in plan.data.notes:
        terminal.show("", f"note: {note}")


def summary(plan: Plan, fits: Fits, limit: int, behind: str) -> list[tuple[str, str]]:
    """Names and values of the answer; `behind`: the source of its numbers."""
    p = plan.predicted
    peak = p.peak_memory_bytes
    return [
        *told.model(plan.data.model),
        ("mesh", f"{plan.mesh} ({plan.mesh.devices} devices)"),
        ("layout", RULES.say(layout_text(plan.data.layout))),
        *([("parallel", told.forms(plan.data.details.parallelism))] if plan.data.details.parallelism else []),
        *decided_rows(plan.data, plan.model),
        ("hardware", plan.data.hardware),
        ("framework", plan.data.framework or "layoutopt"),
        *told.costs(plan.data),
        ("memory", f"{used_text(peak, limit)} per device{', barely fits' * (fits(peak) == 'barely')}"),
        *([("host", p.host)] if p.host else []),
        ("accuracy", behind),
        ("proof", str(told.proof(plan.data, ""))),
        *told.searched(plan.data),
        *told.left(plan.data),
    ]


def verdicts(plan: Plan, fits: Fits) -> dict[str, str]:
    """The colours of proven and feasible results."""
    memory = FITS[fits(plan.predicted.peak_memory_bytes)]
    return {"proof": GOOD if plan.solver.proven else DOUBT, "memory": memory}


def decided_rows(said: Decided, model: Model | None) -> list[tuple[str, str]]:
    """Rows of the decisions besides the layout, and of variables that keep the layout's storage although
    others do not."""
    from layoutopt.space.undivided import few

    found = said.listed()
    known = model.graph.variables.items() if model is not None and said.storage else ()
    whole = [name for name, v in known if (v.trainable or v.own_storage) and name not in said.storage]
    if whole:
        found["storage"] += f"; layout: {few(whole)}"
    return [(name, words) for name, words in found.items() if words]


def alternatives_table(plan: Plan, fit: FitOf | None = None) -> View:
    """The answer and every alternative with the same numbers, the best by the objective first."""
    return layouts(plan.data, fit, ANSWER, plan.question.objective == Objective.MEMORY)
