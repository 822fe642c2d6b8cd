"""Layouts as experts write them: every axis of a mesh has one use.

A *recipe* splits layers over stages, the batch, experts, sequences and weights over axes of their own, in
this order, experts over axes of the batch. Experts may lie over the axes of the weights too, and are then
whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from layoutopt.optimize.heuristics.baselines import NamedStrategy
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.optimize.problems.subproblems import SubproblemKey, listed
from layoutopt.space.decisions import Decisions
from layoutopt.space.mesh_shapes import of_shape
from layoutopt.space.parallelism import parallelism
from layoutopt.space.recompute import COUNT
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.splits import Split
from layoutopt.space.storage import Storage
from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.blocks import loop_dims
from mesh_tf_core.ir.dims import divisors
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.schedules import GPIPE
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.storage import STAGES

INNER = 16
"""The most devices of axes that split weights, or sequences."""
EXPERTS, SEQUENCE, WEIGHTS = "experts", "sequence", "weights"
"""Kinds of splits over the inner axes of a recipe, the innermost last."""
NOTHING: Policies = frozenset()
RecipeFamily = tuple[tuple[str, tuple[int, ...]], ...]


class Recipe(NamedTuple):
    """The use of a mesh.

    Attributes:
      stages: axes; none if all layers are on each device.
      splits: what else is split, and the axes of each; all others split the batch.
    """

    mesh: Mesh
    stages: Axes
    splits: tuple[tuple[str, Axes], ...] = ()

    @property
    def ways(self) -> int:
        """The number of stages."""
        return self.mesh.group_size(self.stages)

    @property
    def data(self) -> Axes:
        """The axes that split the batch."""
        taken = {*self.stages, *(a for kind, axes in self.splits if kind != EXPERTS for a in axes)}
        return tuple(a for a, n in self.mesh.axes if n > 1 and a not in taken)

    @property
    def family(self) -> RecipeFamily:
        """The key that it shares with recipes that differ in stages alone."""
        return tuple((kind, tuple(map(self.mesh.size, axes))) for kind, axes in self.splits)


class Step(NamedTuple):
    """A recipe with all that its layout leaves open.

    Attributes:
      storage: the stage of variables, if all that may have it do.
      again: what is recomputed.
      staged: False if the axes of stages do nothing.
    """

    recipe: Recipe
    storage: str
    microbatches: int
    again: Policies = NOTHING
    schedule: str = GPIPE
    staged: bool = True

    @property
    def stages(self) -> Axes:
        """The axes of stages that do something."""
        return self.recipe.stages if self.staged else ()


class Recipes:
    """The recipes of a request.

    Args:
      meshes: those that were given, or whose axes rules name; none: any of so many devices.
    """

    def __init__(self, request: Request, meshes: Sequence[Mesh], devices: int) -> None:
        self.request, self.meshes, self.devices = request, meshes, devices
        self.model, self.space, self.evaluator = request.model, request.allowed, request.evaluator
        self.dims, sizes = parallelism(self.model), self.model.graph.dims()
        loops = [n for n in loop_dims(self.model.graph) if n in sizes]
        self.dim = max(self.space.pipeline or loops, key=lambda name: max(sizes[name]), default="")
        inner = tuple(n for n in self.dims.inner if n not in self.dims.experts)
        # First what most variables have: heads, before the groups of queries of each.
        self.names = {EXPERTS: self.dims.experts, SEQUENCE: self.dims.sequence, WEIGHTS: inner[::-1]}
        self.layers = max(sizes[self.dim]) if self.dim else 1
        self.splits, self._decided = cache(self._splits), cache(self._decisions)

    def every(self) -> Iterator[Recipe]:
        """Every use of the meshes, those with the fewest kinds of splits and the fewest ways first."""
        kinds = [kind for kind, names in self.names.items() if names]
        found = self._given(kinds) if self.meshes else self._free(kinds)
        yield from sorted(found, key=lambda r: (len(r.splits), r.family, r.ways))

    def _given(self, kinds: Sequence[str]) -> Iterator[Recipe]:
        for mesh in self.meshes:
            axes = [axis for axis, size in mesh.axes if size > 1]
            staged = ("stages",) * bool(self.space.pipeline)
            for uses in itertools.product((*staged, "batch", *kinds), repeat=len(axes)):
                own = {
                    kind: tuple(a for a, use in zip(axes, uses, strict=True) if use == kind) for kind in uses
                }
                yield from self._with(mesh, own)

    def _free(self, kinds: Sequence[str]) -> Iterator[Recipe]:
        every = divisors(self.devices)
        choices = [[n for n in every if n <= INNER or kind == EXPERTS] for kind in kinds]
        for stages, *ways in itertools.product(every if self.space.pipeline else [1], *choices):
            inner = dict(zip(kinds, ways, strict=True))
            rest, left = divmod(self.devices, stages * math.prod(ways))
            if left == 0:
                sizes = {k: n for k, n in {"stages": stages, "batch": rest, **inner}.items() if n > 1}
                mesh = of_shape(tuple(sizes.values()) or (1,))
                yield from self._with(mesh, {k: (a,) for k, a in zip(sizes, mesh.names, strict=False)})

    def _with(self, mesh: Mesh, own: Mapping[str, Axes]) -> Iterator[Recipe]:
        """The recipe with these axes; and with experts over those of weights, too."""
        pinned = self.space.pins.get(self.dim)
        if pinned is not None and {*pinned} != {*own.get("stages", ())}:
            return
        splits = {kind: own[kind] for kind in self.names if own.get(kind)}
        yield Recipe(mesh, own.get("stages", ()), tuple(splits.items()))
        if WEIGHTS in splits and self.names[EXPERTS]:
            both = splits | {EXPERTS: (*splits.get(EXPERTS, ()), *splits[WEIGHTS])}
            ordered = tuple((kind, both[kind]) for kind in self.names if kind in both)
            yield Recipe(mesh, own.get("stages", ()), ordered)

    def evaluated(self, step: Step) -> EvaluatedLayout | None:
        """The price of a step; None if no such layout may be chosen."""
        mesh = step.recipe.mesh
        with suppress(LayoutError):
            if (found := self._written(step)) is not None:
                return EvaluatedLayout(mesh, *found, self.evaluator(mesh, *found), "a recipe")
        return None

    def _written(self, step: Step) -> tuple[Layout, Options] | None:
        counts = frozenset(each.only for each in step.again if each.only)
        key = step._replace(again=step.again if step.stages else NOTHING, storage="")
        if (decided := self._decided(key, counts)) is None:
            return None
        wanted, options = decided.read(self._stored(decided, step.storage))
        over = dict(step.recipe.splits).get(WEIGHTS, ())
        splits = (self.splits(step.recipe) or {}) | {name: over for name in decided.of(Elsewhere) if over}
        chosen = {n: axes for n, axes in splits.items() if axes in decided.options.get(n, ())}
        wanted = Layout({**wanted.written, **chosen})
        recompute = decided.least_memory.recompute if step.stages and step.again else step.again
        options = replace(options, recompute=recompute)
        idle = step.stages != step.recipe.stages
        return (wanted, options) if idle or decided.allows(wanted, options) else None

    def _decisions(self, step: Step, counts: frozenset[int]) -> Decisions | None:
        """The decisions about a recipe: each of its splits, or none."""
        mesh, stages = step.recipe.mesh, frozenset[tuple[str, Axes]]()
        again = (*self.space.recompute, *(f"{COUNT}{n}" for n in counts))
        space = self.space.but(microbatches=(step.microbatches,), recompute=again)
        if step.stages:
            space, stages = space.but(schedule=(step.schedule,)), frozenset({(self.dim, step.stages)})
        if idle := step.stages != step.recipe.stages:
            space = space.but(pins={n: axes for n, axes in space.pins.items() if n != self.dim})
        key = SubproblemKey(mesh, stages, step.schedule, step.again, step.microbatches)
        splits = self.splits(step.recipe)
        try:
            every = listed(self.model, [mesh], space, self.evaluator.near)
            here = next((each for each in every if each.key == key), None)
            if here is None or splits is None:
                return None
            decided = here.unrestricted
            names = [n for n in decided.of(Split) if n not in decided.stages]
            own = {n: [o for o in decided.options[n] if o in ((), splits.get(n))] for n in names}
            if not all(own.values()):
                return None
            # A step that is no answer only tells how long its parts take.
            decided = decided.within(own)
            return decided if idle else decided.under(space.restriction, mesh)
        except UserError:
            return None

    @staticmethod
    def _stored(decided: Decisions, stage: str) -> dict[str, tuple[str, ...]]:
        """Storage at a stage over as many axes as may be, else with the least memory."""
        found = {}
        for each in (d for d in decided.every if isinstance(d, Storage)):
            there = [o for o in each.options if (o[0] if o else STAGES[0]) == stage]
            found[each.name] = min(there, key=lambda o: (len(o) > 1, -len(o)), default=each.least_memory)
        return found

    def _splits(self, recipe: Recipe) -> dict[str, Axes] | None:
        """The splits of a recipe beside its stages; None if something cannot be split."""
        kinds, data = dict(recipe.splits), recipe.data
        found = self._of_kind(recipe.mesh, data, kinds.get(EXPERTS, ()), EXPERTS)
        for kind in (SEQUENCE, WEIGHTS):
            own = self._of_kind(recipe.mesh, (), axes, kind) if (axes := kinds.get(kind, ())) else {}
            if found is None or own is None:
                return None
            whole = {n for n in own if not self.dims.apart(n, self.dims.experts)} if EXPERTS in kinds else ()
            found |= {n: a for n, a in own.items() if a and not (n in whole and {*a} & {*kinds[EXPERTS]})}
        return found

    def _of_kind(self, mesh: Mesh, data: Axes, axes: Axes, kind: str) -> dict[str, Axes] | None:
        names = self.names[kind] if axes else ()
        also = tuple(n for n in self.dims.weights if kind == WEIGHTS and n not in self.dims.experts)
        plain = NamedStrategy(self.model, mesh, data, axes, names, also=also).plain()
        if plain is None or (axes and not any({*plain[0].axes(n)} == {*axes} for n in names)):
            return None  # over a part of the axes it is another recipe
        return dict(plain[0].written)
