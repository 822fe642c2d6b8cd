"""`explain --sensitivity`: the best layouts under other conditions, as tables and for the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layoutopt.cli.terminal import Terminal
from layoutopt.plan.units import seconds_text
from reports.views import facts as told
from reports.views.curves import factor_value
from reports.views.view import FLAG, NUMBER, SECONDS, TIMES, Cell, Column, View, ViewRow

if TYPE_CHECKING:
    from layoutopt.analysis.sensitivity import SensitivityCurve, SensitivityTrial
    from layoutopt.api.explaining import Conditions
    from layoutopt.plan.build import Plan
    from layoutopt.plan.details import Robustness


def show_conditions(terminal: Terminal, plan: Plan, found: Conditions) -> None:
    """Prints the best under other conditions, and how robust the answer is."""
    columns = (
        Column("factor", "factor"),
        Column("value", "is", NUMBER),
        Column("step_seconds", "best step", SECONDS),
        Column("ratio", "of the plan's", TIMES),
        Column("layout", "best layout", rank=1),
        Column("proven", "proven", FLAG),
    )
    rows = [_row(plan, curve, t) for curve in found.curves for t in curve.trials]
    terminal.show("", View("Best layouts under other conditions", columns, rows))
    terminal.show("", robust_text(found.robust))


def _row(plan: Plan, curve: SensitivityCurve, t: SensitivityTrial) -> ViewRow:
    """A condition, what is best under it, and against the plan; where a search was stopped far from
    that, what it knows."""
    from layoutopt.analysis.sensitivity import answer_of

    about = (curve.factor, Cell(factor_value(curve.factor, t.value), value=t.value))
    if not t.settled:
        least = seconds_text(t.bound) if t.bound else "unknown"
        most = None if t.step_seconds is None else seconds_text(t.step_seconds)
        known = least if most is None else f"{least} to {most}" if t.bound else f"at most {most}"
        return *about, Cell(known), None, "undecided within the time limit", False
    if t.step_seconds is None:
        return *about, Cell("nothing fits"), None, None, True
    best = "; ".join(filter(None, (t.mesh, t.layout or "nothing is split", t.options)))
    best = "the same" if t.answer == answer_of(plan) else best.replace("; ", ";").replace(";", "; ")
    return *about, t.step_seconds, t.step_seconds / plan.predicted.step_seconds, best, t.proven


def robust_text(found: Robustness) -> str:
    """Describes how much of the answer's lead remains under the uncertainties of the hardware's numbers."""
    words = told.robust(found)
    nothing = "The numbers of this hardware have no uncertainties, so the robustness of the plan is unknown."
    return f"The answer is {words}." if words else nothing
