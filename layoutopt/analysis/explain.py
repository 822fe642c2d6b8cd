"""Why a plan's layout and not another: where two layouts differ, what every split is worth, what binds.

    worth of a split    best time of a search in which this dimension stays whole - the plan's time
    price of a limit    the plan's time - best time of a search without the memory limit
    price of a rule     best time of a search that must obey the rule - the plan's time
All of them are proven where the searches are. Of a plan for the least memory they are bytes, not seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from costmodels.hardware import Hardware
from costmodels.pricing.pricer import Cost
from layoutopt.clock import UNLIMITED, Clock
from layoutopt.evaluator import Evaluation
from layoutopt.plan.build import Plan
from layoutopt.problem import TOLERANCE
from layoutopt.space.kind import GATHER, STORED
from layoutopt.space.microbatches import USUAL
from layoutopt.space.splits import parse_rules
from mesh_tf_core.errors import InfeasibleError, LimitError
from mesh_tf_core.model import Model

AGREE = 1e-9
"""Relative difference up to which two predictions are the same."""


@dataclass(frozen=True)
class Difference:
    """Seconds of one kind of operation under two layouts; `where` is the mesh axes of a collective."""

    scope: str
    name: str
    phase: str
    where: str
    ours: float
    theirs: float

    @property
    def saved(self) -> float:
        """Seconds that ours saves (negative: costs)."""
        return self.theirs - self.ours


def differences(ours: Cost, theirs: Cost) -> list[Difference]:
    """The operations whose exposed time differs, the largest difference first."""
    keys: dict[tuple[str, str, str, str], list[float]] = {}
    for side, cost in enumerate((ours, theirs)):
        for x in cost.lines:
            key = (x.origin.scope, x.name, x.origin.phase, "+".join(x.axes))
            keys.setdefault(key, [0.0, 0.0])[side] += x.exposed * x.times
    found = [Difference(*key, *seconds) for key, seconds in keys.items()]
    return sorted((d for d in found if d.saved), key=lambda d: -abs(d.saved))


def disagreements(plan: Plan, evaluation: Evaluation) -> list[str]:
    """Where the plan's prediction is not what lowering and pricing its layout gives now."""
    said, found = plan.predicted.model_dump(), evaluation.predicted.model_dump()
    wrong = []
    for name, old in said.items():
        new = found[name]
        pairs = (
            [(old, new)]
            if not isinstance(old, dict)
            else [(old.get(a, 0), new.get(a, 0)) for a in {**old, **new}]
        )
        if any(abs(a - b) > AGREE * max(abs(a), abs(b)) for a, b in pairs):
            wrong.append(f"{name} is {new}, the plan says {old}")
    claim, least = plan.solver, (found["step_seconds"], found["peak_memory_bytes"])
    objective, bound = claim.objective or 0.0, claim.bound or 0.0
    if all(abs(objective - value) > AGREE * value for value in least):
        wrong.append(f"the objective is neither its seconds nor its bytes: the plan says {claim.objective}")
    if claim.status == "OPTIMAL" and abs(objective - bound) > TOLERANCE * abs(objective):
        wrong.append(f"the bound of a proven plan is its objective, the plan says {claim.bound}")
    return wrong


@dataclass(frozen=True)
class Answer:
    """What a search under another condition found; no `seconds` and `peak` if it found nothing: `reason` says
    why."""

    condition: str
    seconds: float | None
    peak: int | None
    layout: str
    proven: bool
    reason: str = ""


@dataclass(frozen=True)
class Asked:
    """What else was asked of the search that made a plan; others compare only under the same."""

    pins: str | None = None
    forbid: str | None = None
    storage: tuple[str, ...] = STORED
    recompute: tuple[bool | str, ...] = (False, True)
    microbatches: tuple[int, ...] = USUAL
    context: tuple[str, ...] = (GATHER,)
    elsewhere: tuple[str, ...] = ()

    def with_pins(self, more: str | None) -> Mapping[str, Any]:
        """As arguments of a search, with further pins; a dimension that is pinned anew loses its old pin."""
        rules = {**parse_rules(self.pins), **parse_rules(more)}
        return {**asdict(self), "pins": rules or None}


Find = Callable[[str, float | None, str | None, Clock], Answer]
"""find(condition in words, bytes of memory, further pins, the time for it)"""
NO_TIME = "there was no time"


def finder(model: Model, plan: Plan, hardware: Hardware, asked: Asked, objective: str = "time") -> Find:
    """Searches on the plan's mesh under other conditions, for the same `objective`."""
    from layoutopt import search

    def find(condition: str, memory: float | None, pins: str | None, clock: Clock = UNLIMITED) -> Answer:
        if clock.over:
            return Answer(condition, None, None, "", False, NO_TIME)
        more = {**asked.with_pins(pins), "objective": objective, "time_limit": clock.rest}
        try:
            found = search(model, mesh=plan.mesh, hardware=hardware, memory=memory, **more)
        except (InfeasibleError, LimitError) as error:
            return Answer(condition, None, None, "", isinstance(error, InfeasibleError), str(error))
        p, proven = found.predicted, found.solver.status == "OPTIMAL"
        return Answer(condition, p.step_seconds, p.peak_memory_bytes, str(found.layout), proven)

    return find


def split_rules(plan: Plan) -> list[tuple[str, str]]:
    """For every split of the plan, the rule as it is and the rule that undoes it."""
    return [(f"{name}:{'+'.join(axes)}", f"{name}:none") for name, axes in plan.layout.items()]
