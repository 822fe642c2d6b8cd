"""The facts of a plan's answer on terminals and pages: one function for each fact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from layoutopt.plan.covered import count_text
from layoutopt.plan.details import Robustness
from layoutopt.plan.schema import ModelInfo, PlanFile, Predicted, ProofStatus, SolverInfo
from layoutopt.plan.units import (
    bytes_text,
    duration_text,
    gap_text,
    percent,
    rate_text,
    seconds_text,
    shorten,
)
from reports.plan import rules

NAMED = 0.01
"""Share of the trained parameters from which untrained ones are named: statistics of norms are below it."""
LONGEST = 300
"""Digits of a number of layouts, which a float still holds."""


@dataclass(frozen=True)
class ProofWords:
    """The proof in words.

    Attributes:
      value: in a word or two; state: 'good', 'warn' or 'bad'.
      words: in a sentence; more: its conditions.
    """

    value: str
    state: str
    words: str
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.words} ({'; '.join(self.more)})" if self.more else self.words


def proof(plan: PlanFile, limits: str) -> ProofWords:
    """The solver's proof, and never more.

    Args:
      limits: choices outside the proof, in words.
    """
    s = plan.solver
    if s is None:
        return ProofWords("Not proven", "warn", "the plan does not record a search")
    among = plan.space.count if plan.space else considered(s.layouts_considered) or "all layouts searched"
    status = f"Not proven: {shorten(s.status.replace('_', ' ').lower(), 24)}"
    if s.status == ProofStatus.INFEASIBLE:
        least = f", and no layout needs less than {bytes_text(s.bound)}" if s.bound else ""
        words = f"proven: none of {among} fits{least}; this layout needs the least memory of those found"
        return ProofWords("Nothing fits", "bad", words, (limits,) if limits else ())
    if s.gap is None:
        return ProofWords(status, "warn", f"optimality was not examined (status {s.status})")
    spent = "" if s.wall_seconds is None else duration_text(s.wall_seconds)
    if s.proven:
        told = f", with {shorten(rules(plan), 80)}" if rules(plan) else ""
        more = tuple(filter(None, (", ".join(filter(None, ("gap 0%", spent))), limits)))
        return ProofWords("Proven", "good", f"optimal under this cost model, of {among}{told}", more)
    more = tuple(filter(None, (f"status {s.status}, among {among}", spent, limits)))
    if plan.frontier and s.gap == 0:
        return ProofWords(
            status, "warn", "the fastest layout is proven optimal, but the frontier is not complete", more
        )
    likely = "" if s.likely_gap is None else f", likely {gap_text(s.likely_gap)} (see the note)"
    words = f"not proven: another layout saves at most {gap_text(s.gap)} of this{likely}"
    words = words if s.bound else f"not proven: no lower bound is known{likely}"
    return ProofWords(status, "warn", words, more)


def searched(plan: PlanFile) -> list[tuple[str, str]]:
    """The best of the usual layouts, where the search went on from these; the choices that the proof is not
    about."""
    rows, space, usual = [], plan.space, plan.usual
    if usual is not None and usual.layouts_considered != "0" and plan.solver is not None:
        least = (asked := plan.details.search) is not None and asked.objective == "memory"
        rows.append(("usual", _usual(usual, plan.solver, bytes_text if least else seconds_text)))
    if space is not None and space.limits:
        rows.append(("not in proof", space.limits))
    return rows


def _usual(usual: SolverInfo, solver: SolverInfo, shown: Callable[[float], str]) -> str:
    """What everything gained over the usual layouts."""
    among = f"{considered(usual.layouts_considered)} of the usual kinds"
    if usual.objective is None:
        proven = usual.status == ProofStatus.INFEASIBLE
        return f"none of {among} fits" if proven else f"none of {among} was found to fit in the time"
    gap = "" if usual.proven else f", at most {gap_text(usual.gap or 0.0)} slower than the best"
    saved = usual.objective - (solver.objective or 0.0)
    nothing = "nothing" + " so far" * (not solver.proven)
    what = "further kinds save" if usual.proven else "searching on saves"  # a usual one may be better
    gained = f"{shown(saved)} ({percent(saved / usual.objective)})" if saved > 0 else nothing
    best = "is the best" if usual.proven else "is the best found"
    return f"{shown(usual.objective)} {best} of {among}{gap}; {what} {gained}"


def left(plan: PlanFile) -> list[tuple[str, str]]:
    """The share of the step that the framework leaves, as far as a search for it ended."""
    if plan.left is None or plan.space is None:
        return []
    if plan.unrestricted is None:
        return [("left", "nothing: no layout is faster that the framework cannot express")]
    here, there = ({"splits": plan_.layout, **plan_.listed()} for plan_ in (plan, plan.unrestricted))
    differs = ", ".join(name for name in here if here[name] != there[name]) or "mesh"
    return [("left", f"{100 * plan.left:.2g}% of the step: the unrestricted layout differs in {differs}")]


def considered(text: str) -> str:
    """'1,234' is a number of layouts; any other text is shown unchanged."""
    plain = text.replace(",", "").replace("_", "").strip()
    counted = plain.isdecimal() and len(plain) < LONGEST
    return f"{count_text(int(plain))} layouts" if counted else shorten(text, 60)


def model(info: ModelInfo) -> list[tuple[str, str]]:
    """The model, and what it reads in a step."""
    more = f" and {info.frozen:,} that are not trained" if info.frozen > NAMED * info.parameters else ""
    size = f"{info.name}, {info.parameters:,} parameters{more}"
    rows = [("model", size), ("per step", batch(info.batch))]
    return [(name, said) for name, said in rows if said]


def batch(sizes: Mapping[str, int]) -> str:
    """'batch 8, length 2,048'."""
    return ", ".join(f"{name} {size:,}" for name, size in sizes.items())


def step(p: Predicted) -> str:
    """'206 ms predicted = 178 ms compute + 27.9 ms exposed communication', after the host's if longer."""
    found, exposed = seconds_text(p.device_seconds), seconds_text(p.exposed_communication_seconds)
    found += f" predicted = {seconds_text(p.compute_seconds)} compute + {exposed} exposed communication"
    if p.host_seconds is None:
        return found
    return f"at least {seconds_text(p.host_seconds)} to launch its kernels, which take {found}"


def achieved(p: Predicted) -> list[tuple[str, str]]:
    """The speed of a step and of a chip, as far as known."""
    return [(name, said) for name, said in (("speed", p.speed), ("per chip", p.chip_speed)) if said]


def work(p: Predicted) -> str:
    """Floating-point operations of a step."""
    return f"{rate_text(p.flops_per_device, 'FLOP')} per device"


def traffic(p: Predicted) -> str:
    """The traffic of a device in a step, by mesh axis."""
    sent = ", ".join(f"{axes} {bytes_text(n)}" for axes, n in p.communication_bytes_per_device.items() if n)
    return f"per device: {sent}" if sent else "none"


def forms(parallelism: Mapping[str, str]) -> str:
    """The usual names for the axes: 'data: data (ZeRO-2); model: tensor'."""
    return "; ".join(f"{axis}: {form}" for axis, form in parallelism.items())


def robust(found: Robustness) -> str:
    """Number of machines within the uncertainties on which the answer stays the fastest; '' if none was
    drawn."""
    if not found.draws:
        return ""
    drawn = f"{found.draws} hardware variants drawn within the uncertainties"
    if found.wins == found.draws:
        return f"the fastest layout on all {drawn}"
    other = f" (mostly {shorten(found.runner_up, 36)})" if found.runner_up else ""
    behind = f"at most {percent(found.worst)} slower than the best on the rest{other}"
    return f"the fastest layout on {found.wins} of {drawn}, {behind}"


def costs(plan: PlanFile) -> list[tuple[str, str]]:
    """Names and values of the parts of a step, in display order."""
    p = plan.predicted
    return [
        ("step", step(p)),
        *achieved(p),
        *([("training", plan.training.words)] if plan.training else []),
        ("work", work(p)),
        ("traffic", traffic(p)),
    ]
