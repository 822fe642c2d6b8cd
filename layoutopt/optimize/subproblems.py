"""The subproblems of a search: mesh shapes, and on each, pipeline stages and numbers of microbatches, with
their decisions, and the bounds of each.

Where a piece never costs less than its share of the whole (`Pricer.pieces_cost_more`), no layout takes less
with more microbatches: a bound on all layouts, or on those with one option, holds for every multiple of the
number that it was found for. Pipeline stages are idle less with more microbatches: with k M instead of M, P
stages run k M + P - 1 times, each for at least 1/k as long, so this part of a bound holds:

    (k M + P - 1) / (k (M + P - 1))

and in a circular schedule likewise with its ticks (`mesh_tf_core.ir.schedules`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from layoutopt.formulation.couplings import count_layouts
from layoutopt.optimize.bounds import SLACK, ProvenBounds, Source
from layoutopt.optimize.evaluator import Evaluator
from layoutopt.optimize.subproblem import SubproblemSearch
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.space.argument import Space
from layoutopt.space.decisions import Decisions, SearchSpace, decisions
from layoutopt.space.kind import HYBRID
from layoutopt.space.microbatches import numbers
from layoutopt.space.recompute import check_named
from layoutopt.space.restriction import RestrictionError
from layoutopt.space.stages import count, ways, why_none
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.schedules import PipelineSchedule, alternates
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.remat_policy import Policies, of_stages
from mesh_tf_core.model import Model


class SubproblemKey(NamedTuple):
    """Distinguishes the subproblems of a search.

    Attributes:
      stages: dimensions of layers, each with its axes.
      again: recomputed parts of stages where that makes another graph.
    """

    mesh: Mesh
    stages: frozenset[tuple[str, Axes]]
    schedule: str
    again: Policies
    microbatches: int

    @classmethod
    def of(cls, model: Model, mesh: Mesh, layout: Layout, options: Options) -> SubproblemKey:
        """That of the problem which a layout is an answer of."""
        stages = model.stages(mesh, layout)
        again = of_stages(options.recompute, stages, alternates(options.schedule))
        split = frozenset((dim, layout.axes(dim)) for dim in stages)
        return cls(mesh, split, options.schedule, again, options.microbatches)


@dataclass(eq=False)
class Subproblem:
    """A mesh shape with a number of microbatches, stages, a schedule and recomputed parts: a separate
    problem.

    Attributes:
      bounds: all that is proven of it.
      fewer: the problems that differ from it only in fewer microbatches that divide its number.
      whole: its integer program with all options, once that is needed.
    """

    mesh: Mesh
    decided: Decisions
    bounds: ProvenBounds = field(default_factory=ProvenBounds)
    fewer: tuple[Subproblem, ...] = ()
    whole: SubproblemSearch | None = None

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.decided.microbatches

    def share(self, microbatches: int) -> float:
        """The fraction of a bound with fewer microbatches, which divide this number, that holds here, if
        pieces cost at least their share of the whole."""
        times, named = self.microbatches // microbatches, self.decided.schedule
        stages = self.decided.stages_on(self.mesh).values()
        both = self.microbatches, microbatches
        pairs = ((PipelineSchedule.named(named, n, m).ticks for m in both) for n in stages)
        return min((ticks / (times * fewer) for ticks, fewer in pairs), default=1.0)

    @property
    def key(self) -> SubproblemKey:
        """That of its layouts."""
        its = self.decided
        return SubproblemKey(
            self.mesh, frozenset(its.stages.items()), its.schedule, its.again, its.microbatches
        )

    @property
    def place(self) -> SubproblemKey:
        """The key that it shares with the same problem with other numbers of microbatches."""
        return self.key._replace(microbatches=0)

    @property
    def rank(self) -> tuple[float, int, int]:
        """The order of subproblems, least first: the most promising, then those that bound more microbatches,
        then small ones, whose answers larger meshes rarely beat."""
        highest = max(bound.value for bound in self.bounds.proven)
        return highest, self.microbatches, count_layouts(self.decided)

    def opened(self, evaluator: Evaluator, clock: Clock = UNLIMITED) -> SubproblemSearch:
        """Its integer program with all options, which bounds it."""
        if self.whole is None:
            self.whole = SubproblemSearch.whole(evaluator, self.mesh, self.decided)
            self.bounds.prove(self.whole.relaxed(clock), Source.TABLES)
        return self.whole

    def inherit(self, evaluator: Evaluator) -> None:
        """Proves bounds that follow from fewer microbatches."""
        # Infinity too: a layout that is legal with k M is legal with M. The step of M has the same nodes,
        # with parts k times as large (`tracing.copying.PartCopy`), and legality depends on names and on what
        # splits divide. A number that a model or a schedule refuses makes no problem, so bounds nothing.
        for other in self.fewer if evaluator.prices(self.mesh).pieces_cost_more else ():
            known = (bound.value for bound in other.bounds.proven if bound.source is Source.TABLES)
            self.bounds.prove(self.share(other.microbatches) * max(known, default=0.0), Source.PIECES)

    def narrowed(self, seconds: float, evaluator: Evaluator) -> Subproblem | None:
        """The same with options of layouts that take at most `seconds`, by the results for fewer
        microbatches; None if there are none. Up to `seconds`, its bounds hold for this one."""
        options, most = dict(self.decided.options), seconds * (1 + SLACK)
        for other in self.fewer if evaluator.prices(self.mesh).pieces_cost_more else ():
            part, costs = self.share(other.microbatches), other.bounds.costs
            for name in costs.keys() & set(self.decided.free):
                options[name] = tuple(o for o in options[name] if part * costs[name].get(o, 0.0) <= most)
        return replace(self, decided=self.decided.within(options)) if all(options.values()) else None


def related(problems: Iterable[Subproblem]) -> Iterator[Subproblem]:
    """Subproblems, the fewest microbatches first, each with its `fewer`."""
    known = defaultdict[SubproblemKey, list[Subproblem]](list)
    for each in problems:
        others = known[each.place]
        each.fewer = tuple(o for o in others if each.microbatches % o.microbatches == 0)
        others.append(each)
        yield each


@dataclass(frozen=True)
class SubproblemSpec:
    """A subproblem whose graph is not built yet.

    Attributes:
      allowed: the space, with one use of pipelines.
      near: axes of `HYBRID`.
    """

    mesh: Mesh
    allowed: Space
    microbatches: int
    near: Axes

    @property
    def stages(self) -> dict[str, int]:
        """Dimensions of layers -> number of stages."""
        return count(self.mesh, self.allowed)

    @property
    def key(self) -> SubproblemKey:
        """That of its subproblem."""
        stages, (schedule,) = frozenset(self.allowed.stages.items()), self.allowed.schedule
        return SubproblemKey(self.mesh, stages, schedule, self.allowed.again, self.microbatches)

    def made(self, model: Model) -> Subproblem:
        """The subproblem.

        Raises:
          UserError: the model cannot be split like that, or pins or prohibitions do not suit it.
        """
        number, (schedule,) = self.microbatches, self.allowed.schedule
        graph = model.training_step(number, self.stages, schedule, self.allowed.again).graph
        here = self.allowed.but(microbatches=(number,), near=self.near)
        return Subproblem(self.mesh, decisions(graph, self.mesh, here))


def specs(
    model: Model,
    shapes: Sequence[Mesh],
    allowed: SearchSpace,
    near: Callable[[Mesh], Axes],
    parts: Iterable[int],
) -> list[SubproblemSpec]:
    """The problems with these numbers of microbatches; other arguments as of `subproblems`."""
    inner = {mesh: near_axes(mesh, allowed, near) for mesh in shapes}
    each = [(mesh, way) for mesh in shapes for way in ways(model, mesh, allowed)]
    return [SubproblemSpec(mesh, way, number, inner[mesh]) for number in parts for mesh, way in each]


def subproblems(
    model: Model, shapes: Sequence[Mesh], allowed: SearchSpace, near: Callable[[Mesh], Axes] = lambda _: ()
) -> Iterator[Subproblem]:
    """Every problem of a search, the fewest microbatches of every mesh first.

    Numbers of microbatches are left out if the pins do not divide the smaller batch, and pipelines if the
    model cannot have them.

    Args:
      near: the axes of a mesh that lie inside nodes or slices, where others do not.

    Raises:
      UserError: the model cannot be split into any of these numbers, pins or prohibitions do not suit even
        the smallest, or pipelines are required and none is possible.
    """
    refused, piped, none, some = dict[str, str](), False, list[RestrictionError](), False
    parts = numbers(model, allowed.microbatches)
    check_named(model.step_graph, allowed.recompute)
    for spec in specs(model, shapes, allowed, near, parts):
        try:
            found = spec.made(model)
        except RestrictionError as error:
            none.append(error)
            continue
        except UserError as error:
            if spec.microbatches == parts[0] and not spec.stages:
                raise
            if spec.stages:
                refused.setdefault(spec.allowed.schedule[0], str(error))
            continue
        piped, some = piped or bool(spec.stages), True
        yield found
    if none and not some:
        raise none[0]
    dims = ",".join(dim for dim in allowed.pipeline if allowed.pins.get(dim) != ())
    if dims and not piped:
        raise UserError(
            f"--pipeline {dims} is not possible "
            f"({_reasons(refused) or why_none(model, shapes, allowed)}); choose another mesh, or "
            "remove --pipeline"
        )


def _reasons(refused: Mapping[str, str]) -> str:
    """Why no schedule is possible: one reason if that is all, else each schedule's first."""
    if len(every := dict.fromkeys(refused.values())) < 2:
        return next(iter(every), "")
    return "; ".join(f"{schedule}: {why}" for schedule, why in refused.items())


def near_axes(mesh: Mesh, allowed: SearchSpace, near: Callable[[Mesh], Axes]) -> Axes:
    """The near axes of `HYBRID`, among those of one replica; none if all of these are near, or it is not
    allowed."""
    if HYBRID not in allowed.storage:
        return ()
    own = {axis for axis, size in mesh.axes if size > 1 and axis not in allowed.apart}
    found = tuple(axis for axis in near(mesh) if axis in own)
    return found if len(found) < len(own) else ()
