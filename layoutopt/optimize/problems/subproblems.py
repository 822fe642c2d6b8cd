"""The subproblems of a search: mesh shapes, and on each, pipeline stages and numbers of microbatches, and the
bounds of each. A subproblem has its graph and its decisions once it is opened; many are ruled out before.

Where a piece never costs less than its share of the whole (`Pricer.pieces_cost_more`), no layout takes less
with more microbatches: a bound on all layouts, or on those with one option, holds for every multiple of the
number that it was found for. Pipeline stages are idle less with more microbatches: with k M instead of M, P
stages run k M + P - 1 times, each for at least 1/k as long, so this part of a bound holds:

    (k M + P - 1) / (k (M + P - 1))

and in a circular schedule likewise with its ticks (`mesh_tf_core.ir.schedules`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from layoutopt.formulation.couplings import count_layouts
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.bounds import SLACK, BoundSource, ProvenBounds
from layoutopt.optimize.problems.subproblem import SubproblemSearch
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.space.argument import Space
from layoutopt.space.decisions import ANYTHING, Decisions, SearchSpace, decisions
from layoutopt.space.kind import HYBRID
from layoutopt.space.microbatches import dividing, numbers
from layoutopt.space.recompute import Recompute, check_named
from layoutopt.space.restriction import EVERYTHING, RestrictionError
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.splits import Split
from layoutopt.space.stages import ways, why_none
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.schedules import GPIPE, PipelineSchedule
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.remat_policy import Policies, of_stages
from mesh_tf_core.model import Model


class SubproblemKey(NamedTuple):
    """Distinguishes the subproblems of a search.

    Attributes:
      stages: dimensions of layers, each with its axes.
      again: recomputed parts of stages.
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
        again = of_stages(options.recompute, stages)
        split = frozenset((dim, layout.axes(dim)) for dim in stages)
        return cls(mesh, split, options.schedule, again, options.microbatches)


@dataclass(eq=False)
class Subproblem:
    """A mesh shape with a number of microbatches, stages, a schedule and recomputed parts: a separate
    problem.

    Attributes:
      model, space: those of the search; the space has one use of pipelines.
      bounds: all that is proven of it.
      fewer: of a problem without stages: those with fewer microbatches, which divide its number.
      wholes: its integer programs with all options, by their tables, once they are needed.
      unstaged: of a problem with stages: the same without any.
      given: its decisions, where they do not follow from the space.
    """

    key: SubproblemKey
    model: Model | None = None
    space: Space = ANYTHING
    bounds: ProvenBounds = field(default_factory=ProvenBounds)
    fewer: tuple[Subproblem, ...] = ()
    wholes: dict[Evaluator, SubproblemSearch] = field(default_factory=dict)
    unstaged: Subproblem | None = None
    given: Decisions | None = None

    @classmethod
    def of(cls, mesh: Mesh, decided: Decisions) -> Subproblem:
        """The problem of some decisions."""
        stages, parts = frozenset(decided.stages.items()), decided.microbatches
        return cls(SubproblemKey(mesh, stages, decided.schedule, decided.again, parts), given=decided)

    @cached_property
    def decided(self) -> Decisions:
        """Its decisions.

        Raises:
          UserError: the model cannot be split like that, or pins or prohibitions do not suit it.
        """
        return self._decisions(self.space) if self.given is None else self.given

    @cached_property
    def unrestricted(self) -> Decisions:
        """Its decisions without a restriction."""
        return self._decisions(self.space.but(restriction=EVERYTHING))

    def _decisions(self, space: Space) -> Decisions:
        assert self.model is not None
        key = self.key
        graph = self.model.training_step(key.microbatches, self.stages, key.schedule, key.again).graph
        return decisions(graph, key.mesh, space)

    @cached_property
    def refused(self) -> UserError | None:
        """Why there is no such problem; None if there is one."""
        try:
            if self.unstaged is not None and self.space.restriction.relations:
                self._check_relations()
            _ = self.decided
        except UserError as error:
            return error
        return None

    def _check_relations(self) -> None:
        """Refuses stages that a restriction excludes in any graph, before one is made. In the graph without
        stages every dimension has the options that it has in stages, and more."""
        assert self.model is not None
        try:
            graph = self.model.training_step(self.microbatches).graph
            decisions(graph, self.mesh, self.space.but(again=frozenset(), recompute=(False,)))
        except RestrictionError:
            raise
        except UserError:  # only a graph with stages tells
            return

    @property
    def mesh(self) -> Mesh:
        """Its mesh."""
        return self.key.mesh

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.key.microbatches

    @property
    def stages(self) -> dict[str, int]:
        """Dimensions of layers -> number of stages."""
        return {dim: self.mesh.group_size(axes) for dim, axes in sorted(self.key.stages)}

    @property
    def plans(self) -> dict[str, PipelineSchedule]:
        """Dimensions of layers -> the schedule of their stages."""
        named = PipelineSchedule.named
        return {dim: named(self.key.schedule, n, self.microbatches) for dim, n in self.stages.items()}

    @cached_property
    def layouts(self) -> int:
        """Combinations of its options, legal or not; of a pipeline, without what its stages recompute."""
        if self.unstaged is None:
            return 0 if self.refused else count_layouts(self.decided)
        axes = frozenset(axis for _, axes in self.key.stages for axis in axes)
        if (known := self.unstaged._staged).get(axes) is None:
            known[axes] = self.unstaged._beside(axes)
        return known[axes]

    def _beside(self, axes: Collection[str]) -> int:
        """`layouts` of a pipeline over some axes, in any schedule; a restriction is about the other axes."""
        rest = Mesh([each for each in self.mesh.axes if each[0] not in axes])
        try:
            left = beside(self.unrestricted, axes).under(self.space.restriction, rest)
        except UserError:
            return 0
        return count_layouts(left.within({n: left.options[n][:1] for n in left.of(Recompute)}))

    @cached_property
    def _staged(self) -> dict[frozenset[str], int]:
        """The axes of stages -> `layouts` of a pipeline over them, in any schedule."""
        return {}

    def words(self, renames: bool, points: int) -> str:
        """Describes it; `renames`: a plan has other names of axes; `points`: found points of a frontier."""
        mesh, parts, stages = self.mesh, self.microbatches, self.stages.items()
        looked = f"mesh {'x'.join(map(str, mesh.shape)) if renames else mesh}"
        looked += f", {parts} microbatches" if parts > 1 else ""
        looked += "".join(f", {n} pipeline stages of {dim}" for dim, n in stages)
        looked += f", schedule {self.key.schedule}" if stages else ""
        looked += "".join(f", recompute {text}" for text in sorted(self.key.again))
        return looked + (f", point {points + 1} of the frontier" if points else "")

    @property
    def rank(self) -> tuple[float, int, int]:
        """The order of subproblems, least first: the most promising, then those that bound more microbatches,
        then small ones, whose answers larger meshes rarely beat."""
        highest = max(bound.value for bound in self.bounds.proven)
        return highest, self.microbatches, self.layouts

    @property
    def tabled(self) -> bool:
        """Some of its own tables bound it."""
        return any(bound.source in (BoundSource.TABLES, BoundSource.SOLVER) for bound in self.bounds.proven)

    def opened(self, evaluator: Evaluator, clock: Clock = UNLIMITED) -> SubproblemSearch:
        """Its integer program with all options, which bounds it."""
        if evaluator not in self.wholes:
            found = self.wholes[evaluator] = SubproblemSearch.whole(evaluator, self.mesh, self.decided)
            self.bounds.prove(found.relaxed(clock), BoundSource.TABLES)
        return self.wholes[evaluator]

    def bound_by_share(self, evaluator: Evaluator) -> None:
        """Proves that devices compute their share, waiting as long as stages do."""
        with suppress(UserError):  # layers that are given to stages may be too few
            self.bounds.prove(evaluator.least(self.mesh, self.plans), BoundSource.SHARE)

    def inherit(self, evaluator: Evaluator) -> None:
        """Proves bounds that follow from fewer microbatches."""
        # Infinity too: a layout that is legal with k M is legal with M. The step of M has the same nodes,
        # with parts k times as large (`tracing.microbatch`), and legality depends on names and on what
        # splits divide. A number that a model or a schedule refuses bounds nothing.
        for other in self.fewer if evaluator.prices(self.mesh).pieces_cost_more else ():
            known = (bound.value for bound in other.bounds.proven if bound.source is BoundSource.TABLES)
            self.bounds.prove(max(known, default=0.0), BoundSource.PIECES)

    def narrowed(self, seconds: float, evaluator: Evaluator) -> Subproblem | None:
        """The same with options of layouts that take at most `seconds`, by what is known of it and of fewer
        microbatches; None if there are none. Up to `seconds`, its bounds hold for this one."""
        options, most = dict(self.decided.options), seconds * (1 + SLACK)
        for other in (self, *(self.fewer if evaluator.prices(self.mesh).pieces_cost_more else ())):
            for name in (costs := other.bounds.costs).keys() & set(self.decided.free):
                options[name] = tuple(o for o in options[name] if costs[name].get(o, 0.0) <= most)
        return replace(self, given=self.decided.within(options)) if all(options.values()) else None


def beside(decided: Decisions, axes: Collection[str]) -> Decisions:
    """Decisions with the splits that use none of some axes."""
    splits = (*decided.of(Split), *decided.of(Elsewhere))
    return decided.within(
        {n: [o for o in decided.options[n] if {*o}.isdisjoint(axes)] or [()] for n in splits}
    )


def related(problems: Iterable[Subproblem]) -> Iterator[Subproblem]:
    """Subproblems, the fewest microbatches first, each with its `fewer`."""
    known = defaultdict[Mesh, list[Subproblem]](list)
    for each in problems:
        plain = each.unstaged or each
        if not plain.key.stages and plain not in (others := known[plain.mesh]):
            plain.fewer = tuple(o for o in others if plain.microbatches % o.microbatches == 0)
            others.append(plain)
        yield each


def listed(
    model: Model, shapes: Sequence[Mesh], allowed: SearchSpace, near: Callable[[Mesh], Axes] = lambda _: ()
) -> Iterator[Subproblem]:
    """Every problem of a search, the fewest microbatches of every mesh first, without any graph; the model
    may refuse some of them.

    Args:
      near: the axes of a mesh that lie inside nodes or slices, where others do not.
    """
    every = [(mesh, near_axes(mesh, allowed, near), [*ways(model, mesh, allowed)]) for mesh in shapes]
    for number, (mesh, inner, found) in itertools.product(dividing(model, allowed.microbatches), every):
        key = SubproblemKey(mesh, frozenset(), GPIPE, frozenset(), number)
        its = {"microbatches": (number,), "near": inner}
        plain = Subproblem(key, model, found[0].but(stages={}, schedule=(GPIPE,), again=frozenset(), **its))
        for way in found:
            if not way.stages:
                yield plain
                continue
            key = SubproblemKey(mesh, frozenset(way.stages.items()), way.schedule[0], way.again, number)
            yield Subproblem(key, model, way.but(**its), unstaged=plain)


def possible(
    model: Model, shapes: Sequence[Mesh], allowed: SearchSpace, problems: Iterable[Subproblem]
) -> Iterator[Subproblem]:
    """Those of the listed problems that are not known to be refused: of pipelines as many are opened as it
    takes to know one that is possible.

    Numbers of microbatches are left out if the pins do not divide the smaller batch.

    Raises:
      UserError: the model cannot be split into any of these numbers, pins or prohibitions do not suit even
        the smallest, or pipelines were asked for and none is possible.
    """
    parts, refused = numbers(model, allowed.microbatches), dict[Subproblem, UserError]()
    said = (allowed.restriction.says or {}).get("recompute") or ()  # not of every model
    check_named(model.step_graph, [each for each in allowed.recompute if each not in said])
    found, piped = [each for each in problems if each.microbatches in parts], False
    for each in found:
        if (piped and each.key.stages) or not each.refused:
            piped = piped or bool(each.key.stages)
        elif each.key.stages or each.microbatches > parts[0] or isinstance(each.refused, RestrictionError):
            refused[each] = each.refused
        else:
            raise each.refused
    none = (error for error in refused.values() if isinstance(error, RestrictionError))
    if len(refused) == len(found) and (first := next(none, None)):
        raise first
    dims = ",".join(dim for dim in allowed.pipeline if allowed.pins.get(dim) != ())
    if dims and not piped and "pipeline" in allowed.given:
        why = dict[str, str]()
        for each in (each for each in refused if each.key.stages):
            why.setdefault(each.key.schedule, str(refused[each]))
        raise UserError(
            f"--pipeline {dims} is not possible ({_reasons(why) or why_none(model, shapes, allowed)}); "
            "choose another mesh, or remove --pipeline"
        )
    yield from (each for each in found if each not in refused)


def subproblems(
    model: Model, shapes: Sequence[Mesh], allowed: SearchSpace, near: Callable[[Mesh], Axes] = lambda _: ()
) -> Iterator[Subproblem]:
    """The problems of a search: those `listed` that are `possible`."""
    return possible(model, shapes, allowed, related(listed(model, shapes, allowed, near)))


def _reasons(refused: Mapping[str, str]) -> str:
    """Why no schedule is possible: one reason if that is all, else each schedule's first."""
    if len(every := dict.fromkeys(refused.values())) < 2:
        return next(iter(every), "")
    return "; ".join(f"{schedule}: {why}" for schedule, why in refused.items())


def near_axes(mesh: Mesh, allowed: SearchSpace, near: Callable[[Mesh], Axes]) -> Axes:
    """The near axes of `HYBRID` in a replica; none if all of these are near, or it is not allowed."""
    if HYBRID not in allowed.storage:
        return ()
    own = {axis for axis, size in mesh.axes if size > 1 and axis not in allowed.apart}
    found = tuple(axis for axis in near(mesh) if axis in own)
    return found if len(found) < len(own) else ()
