"""`explain --sensitivity`: what would be best under other conditions, as tables and for the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from layoutopt.cli.plans import Planned, asked_of
from layoutopt.cli.progress import Steps
from layoutopt.cli.terminal import Terminal, table
from layoutopt.clock import Clock
from layoutopt.plan.units import bytes_text, seconds_text, times_text

if TYPE_CHECKING:
    from layoutopt.analysis.certificate import Certificate
    from layoutopt.analysis.sensitivity import SensitivityCurve, SensitivityTrial
    from layoutopt.plan.build import Plan
    from layoutopt.plan.details import Proof, Robustness

SEARCHES = 6
"""Half and twice of three factors."""


@dataclass(frozen=True)
class Changed:
    """The curves of the best under other conditions, and how robust the answer is."""

    plan: Plan
    curves: list[SensitivityCurve]
    robust: Robustness

    def details(self) -> dict[str, Any]:
        """As a plan's details hold them."""
        from layoutopt.analysis.sensitivity import as_details

        return {"sensitivity": as_details(self.curves), "robustness": self.robust}

    def show(self, terminal: Terminal) -> None:
        rows = [_row(self.plan, curve, t) for curve in self.curves for t in curve.trials]
        columns = ("factor", "is", "best step", "of the plan's", "then the best is", "proven")
        terminal.show("", table("If the conditions were different", columns, rows, (1, 2, 3)))
        terminal.show("", robust_text(self.robust))


def _row(plan: Plan, curve: SensitivityCurve, t: SensitivityTrial) -> tuple[str, ...]:
    """A condition, what is best under it, and against the plan; where a search was stopped far from
    that, what it knows."""
    from layoutopt.analysis.sensitivity import answer_of

    about = (curve.factor, _value(curve.factor, t.value))
    if not t.settled:
        least = seconds_text(t.bound) if t.bound else "unknown"
        most = None if t.step_seconds is None else seconds_text(t.step_seconds)
        known = least if most is None else f"{least} to {most}" if t.bound else f"at most {most}"
        return (*about, known, "", "not settled: it needs more time", "no")
    if t.step_seconds is None:
        return (*about, "nothing fits", "", "", "yes")
    best = "; ".join(filter(None, (t.mesh, t.layout or "nothing is split", t.options)))
    best = "the same" if t.answer == answer_of(plan) else best.replace("; ", ";").replace(";", "; ")
    ratio = times_text(t.step_seconds, plan.predicted.step_seconds)
    return (*about, seconds_text(t.step_seconds), ratio, best, "yes" if t.proven else "no")


def robust_text(found: Robustness) -> str:
    """What the uncertainties of the hardware's numbers leave of the answer's lead."""
    if not found.draws:
        return (
            "No number of the hardware has an uncertainty, so nothing is known of how robust the answer is."
        )
    share = f"fastest on {found.wins} of {found.draws} machines drawn within {found.uncertain} uncertainties"
    if found.wins == found.draws:
        return f"Robust: {share}."
    worst = f"at worst {100 * found.worst:.1f}% slower than the best"
    tie = "A tie with" if found.wins < 0.8 * found.draws else "Nearly always before"
    return f"{tie} {found.runner_up!r}: {share}, {worst}."


def _value(factor: str, value: float) -> str:
    if factor == "memory":
        return bytes_text(value)
    return f"{value:g}" if factor == "devices" else f"{value:g}×"


def changed_conditions(terminal: Terminal, found: Planned, clock: Clock) -> Changed:
    """Searches under every changed condition, and prices the alternatives on varied hardware."""
    from layoutopt.analysis.sensitivity import robustness, sensitivity

    plan, model = found.plan, found.loaded.model
    done = iter(range(SEARCHES + 1))
    with Steps(terminal, "searching", SEARCHES + 1) as bar:

        def told(words: str) -> None:
            bar.update(next(done), words)

        curves = sensitivity(model, plan, found.hardware, found.limit, asked_of(plan), told, clock)
        told("uncertain hardware")
        robust = robustness(model, plan, found.hardware, clock=clock)
    return Changed(plan, curves, robust)


def with_found(plan: Plan, changed: Changed | None, proof: Certificate | None) -> Plan:
    """The same plan, with what was found out about it among its details."""
    return plan.with_details(
        **(changed.details() if changed else {}), **({"proof": proven(proof)} if proof else {})
    )


def proven(found: Certificate) -> Proof:
    """Every problem of the search and how it was ruled out."""
    from layoutopt.plan.details import Proof, RuledOut
    from layoutopt.space.recorded import allowed_text

    problems = tuple(RuledOut(**asdict(p)) for p in found.problems)
    return Proof(
        verified=found.verified,
        words=str(found),
        layouts=found.layouts,
        allowed=allowed_text(found.allowed),
        problems=problems,
    )
