"""The answer and its alternatives, and the frontier with its knees."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layoutopt.plan.decided import Decided
from layoutopt.plan.schema import Alternative, PlanFile, Predicted
from reports.plan import answer_of, same_layout


def identity(of: Alternative | PlanFile, mesh: Mapping[str, int]) -> str:
    """The identity of a layout: equal for equivalent layouts. `mesh`: of those without their own."""
    splits = {dim: axes for dim, axes in of.layout.items() if axes}
    rest = {name: getattr(of, name) for name in Decided.model_fields}
    return json.dumps([of.mesh or dict(mesh), splits, rest], sort_keys=True)


def grouped(choices: Sequence[Alternative], mesh: Mapping[str, int]) -> list[list[Alternative]]:
    """Groups equal layouts, in the order of the first of each group; layouts without a prediction stay
    alone."""
    found: dict[str, list[Alternative]] = {}
    for at, choice in enumerate(choices):
        key = f"{at}" if choice.predicted is None else identity(choice, mesh)
        found.setdefault(key, []).append(choice)
    return [*found.values()]


@dataclass(frozen=True)
class Ranked:
    """A layout to compare with the answer.

    Attributes:
      ratio: its step time over the answer's; None when it has no price.
      others: its further names; of the answer, the names of alternatives with its layout.
    """

    choice: Alternative
    ratio: float | None
    is_answer: bool = False
    others: tuple[str, ...] = ()

    @property
    def names(self) -> str:
        """All its names."""
        return ", ".join((self.choice.name, *self.others))


def ranked(plan: PlanFile) -> tuple[Ranked, ...]:
    """The answer, then the alternatives: those that fit by time, those that do not, those without a price.

    A layout of several names is there once.
    """

    def order(choice: Alternative) -> tuple[int, float]:
        if choice.predicted is None:
            return 2, 0.0
        return (0 if choice.feasible else 1), choice.predicted.step_seconds

    own: list[str] = []
    rows: list[Ranked] = []
    for choice, *alike in grouped(sorted(_placed(plan, plan.alternatives), key=order), plan.mesh):
        others = tuple(each.name for each in alike)
        if same_layout(plan, choice):
            own += (choice.name, *others)
        else:
            rows.append(Ranked(choice, _ratio(choice.predicted, plan.predicted), others=others))
    return Ranked(answer_of(plan), 1.0, is_answer=True, others=tuple(own)), *rows


def _placed(plan: PlanFile, choices: Sequence[Alternative]) -> list[Alternative]:
    """Choices without a mesh of their own are on the plan's."""
    return [c if c.mesh else c.model_copy(update={"mesh": plan.mesh}) for c in choices]


def _ratio(one: Predicted | None, other: Predicted) -> float | None:
    return one.step_seconds / other.step_seconds if one is not None and other.step_seconds > 0 else None


def best_alternative(plan: PlanFile) -> Ranked | None:
    """The fastest alternative that fits and is not the answer itself."""
    usable = [r for r in ranked(plan) if not r.is_answer and r.choice.feasible and r.ratio is not None]
    return usable[0] if usable else None


@dataclass(frozen=True)
class OnFrontier:
    """A point of the frontier; `knee` where giving more of one buys little of the other."""

    choice: Alternative
    predicted: Predicted
    is_answer: bool = False
    knee: bool = False


def frontier(plan: PlanFile) -> tuple[OnFrontier, ...]:
    """Priced points that no other point beats in time and memory both, by memory, the answer among them.

    A knee is a local maximum of the distance below the straight line between the two ends, both scales made 0
    to 1 (Satopää et al., Finding a "Kneedle" in a Haystack, 2011);
    one less than half as deep as the deepest is none.
    """
    if not plan.frontier:
        return ()
    points = [c for c in _placed(plan, plan.frontier) if c.predicted is not None]
    if not any(same_layout(plan, c) for c in points):
        points.append(answer_of(plan))
    kept = _undominated(points, plan)
    depths = _depths([(p.peak_memory_bytes, p.step_seconds) for _, p in kept])
    deepest = max(depths, default=0.0)
    out = []
    for i, (choice, predicted) in enumerate(kept):
        around = depths[max(0, i - 1) : i + 2]
        knee = depths[i] > 0.02 and depths[i] == max(around) and depths[i] >= deepest / 2
        out.append(OnFrontier(choice, predicted, same_layout(plan, choice), knee))
    return tuple(out)


def _undominated(choices: Sequence[Alternative], plan: PlanFile) -> list[tuple[Alternative, Predicted]]:
    """Sorted by memory; the answer stays even where another point beats it, because it is the answer."""
    priced = [(c, c.predicted) for c in choices if c.predicted is not None]
    priced.sort(key=lambda x: (x[1].peak_memory_bytes, x[1].step_seconds))
    kept: list[tuple[Alternative, Predicted]] = []
    best = float("inf")
    for choice, predicted in priced:
        if predicted.step_seconds < best:
            best = predicted.step_seconds
            kept.append((choice, predicted))
        elif same_layout(plan, choice):
            kept.append((choice, predicted))
    return kept


def _depths(points: Sequence[tuple[float, float]]) -> list[float]:
    """How far each point lies below the line between the ends, in the unit square; 0 at the ends."""
    if len(points) < 3:
        return [0.0] * len(points)
    (x0, y0), (x1, y1) = points[0], points[-1]
    if x1 <= x0 or y0 <= y1:
        return [0.0] * len(points)
    return [max(0.0, 1.0 - (x - x0) / (x1 - x0) - (y - y1) / (y0 - y1)) for x, y in points]
