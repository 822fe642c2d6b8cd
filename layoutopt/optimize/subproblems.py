"""The subproblems of a search: mesh shapes, and on each, stages of pipelines and numbers of microbatches,
with their decisions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from layoutopt.space.decisions import Decisions, SearchSpace, decisions
from layoutopt.space.kind import HYBRID
from layoutopt.space.microbatches import numbers
from layoutopt.space.recompute import check_named
from layoutopt.space.stages import count, ways
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.schedules import PipelineSchedule, alternates
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.remat_policy import of_stages
from mesh_tf_core.model import Model


@dataclass(frozen=True)
class Subproblem:
    """One mesh shape with one number of microbatches and the same stages in one schedule, of which the same
    runs again: a problem of its own."""

    mesh: Mesh
    decided: Decisions

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.decided.microbatches

    def share(self, microbatches: int) -> float:
        """The fraction of a bound with fewer microbatches, of which these are a multiple, that holds here, if
        pieces cost at least their share of the whole (`candidates`)."""
        times, named = self.microbatches // microbatches, self.decided.schedule
        stages = self.decided.stages_on(self.mesh).values()
        both = self.microbatches, microbatches
        pairs = ((PipelineSchedule.named(named, n, m).ticks for m in both) for n in stages)
        return min((ticks / (times * fewer) for ticks, fewer in pairs), default=1.0)

    @property
    def key(self) -> Hashable:
        """The key that distinguishes subproblems: `key_of` their layouts."""
        decided, stages = self.decided, frozenset(self.decided.stages.items())
        return self.mesh, self.microbatches, stages, decided.schedule, decided.again


def key_of(model: Model, mesh: Mesh, layout: Layout, options: Options) -> Hashable:
    """The `Subproblem.key` of the problem that a layout is an answer of."""
    stages = ((dim, layout.axes(dim)) for dim in model.stages(mesh, layout))
    again = of_stages(options.recompute, model.stages(mesh, layout), alternates(options.schedule))
    return mesh, options.microbatches, frozenset(stages), options.schedule, again


def subproblems(
    model: Model, shapes: Sequence[Mesh], allowed: SearchSpace, near: Callable[[Mesh], Axes] = lambda _: ()
) -> Iterator[Subproblem]:
    """Every problem of a search, the fewest microbatches of every mesh first.

    More microbatches are left out where what is pinned does not divide the smaller batch, and pipelines that
    the model cannot be.

    Args:
      near: the axes of a mesh that lie inside nodes or slices, where others do not.

    Raises:
      UserError: the model cannot be split into any of these numbers, or what is pinned or forbidden does not
        suit even the fewest; or pipelines were asked for, and none is possible.
    """
    parts = numbers(model, allowed.microbatches)
    check_named(model.step_graph, allowed.recompute)
    refused, piped = dict[str, str](), False
    for number in parts:
        for mesh in shapes:
            inner = near_axes(mesh, allowed, near)
            for way in ways(model, mesh, allowed):
                here = way.but(microbatches=(number,), near=inner)
                try:
                    graph = model.training_step(number, count(mesh, way), way.schedule[0], way.again).graph
                    found = Subproblem(mesh, decisions(graph, mesh, here))
                except UserError as error:
                    if number == parts[0] and not way.stages:
                        raise
                    if way.stages:
                        refused.setdefault(way.schedule[0], str(error))
                    continue
                piped = piped or bool(way.stages)
                yield found
    dims = ",".join(dim for dim in allowed.pipeline if allowed.pins.get(dim) != ())
    if dims and not piped:
        raise UserError(
            f"--pipeline {dims}: {_reasons(refused) or 'no axis has as few devices as these are'}; "
            "leave it out, or choose another mesh"
        )


def _reasons(refused: Mapping[str, str]) -> str:
    """Why no schedule is possible: one reason if that is all, else each schedule's first."""
    if len(every := dict.fromkeys(refused.values())) < 2:
        return next(iter(every), "")
    return "; ".join(f"{schedule}: {why}" for schedule, why in refused.items())


def near_axes(mesh: Mesh, allowed: SearchSpace, near: Callable[[Mesh], Axes]) -> Axes:
    """The near axes that `HYBRID` is over, of those that one replica lies over; none where all of these are
    near, or it is not allowed."""
    if HYBRID not in allowed.storage:
        return ()
    own = {axis for axis, size in mesh.axes if size > 1 and axis not in allowed.apart}
    found = tuple(axis for axis in near(mesh) if axis in own)
    return found if len(found) < len(own) else ()
