"""Seconds and bytes of recipes that differ in stages alone, from a few prices without stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from layoutopt.optimize.heuristics.recipes import EXPERTS, SEQUENCE, Recipe, Recipes, Step
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.space.kind import ALL as ALIKE
from layoutopt.space.recompute import SOME, Recompute, kept_sets
from mesh_tf_core.ir.instructions import GRADIENT, PARAMETER
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.lower.recomputed import keep_sets
from mesh_tf_core.lower.remat_policy import Policies, Recomputed
from mesh_tf_core.lower.rematerialization import recomputable
from mesh_tf_core.lower.storage import STAGES

STAGED = STAGES[1]
"""The storage of variables in stages."""
BOTH = 3.0
"""Times the seconds of forward that it takes with backward."""


class StepParts(NamedTuple):
    """A step without stages, for an example of a rank in microbatches of some size.

    Attributes:
      layer, again: seconds of a layer with sums of its gradients, and of its recomputation.
      before, behind: seconds of what is outside the layers.
      gradients: seconds of messages about gradients and variables, of all examples.
    """

    layer: float
    again: float
    before: float
    behind: float
    gradients: float

    def seconds(self, layers: int, examples: float) -> float:
        """The seconds of a step without stages."""
        return examples * (layers * self.layer + self.before + self.behind) + self.gradients

    def stages(self, counts: Sequence[int], apart: bool) -> list[float]:
        """Seconds of each stage, by the number of its layers; `apart`: each is a program of its own."""
        ends = 0.0 if apart else self.before + self.behind
        found = [n * self.layer + ends for n in counts]
        found[0] += apart * self.before
        found[-1] += apart * self.behind
        return found

    def balanced(self, layers: int, ways: int) -> list[int]:
        """The layers of stages that are about equally slow."""
        counts = [0] * ways
        for _ in range(layers):
            stages = self.stages(counts, apart=True)
            counts[stages.index(min(stages))] += 1
        return counts


class FamilyCost(NamedTuple):
    """The costs of recipes that differ in stages alone, with one kind of storage.

    Attributes:
      most: examples of a rank.
      stages: ranks that all compute them in these prices, and would share the layers as stages.
      ends: parts with microbatches of one example, and of all of them.
      bytes: the peak with microbatches of one example, if all layers are recomputed.
      saved: bytes of a layer that is not recomputed, for an example of a microbatch.
      carried: the same of one that is.
      slope: bytes of one more example in a microbatch, if all layers are recomputed.
      held: the bytes of variables, and of gradients, as a multiple of a guess.
    """

    most: float
    stages: int
    ends: tuple[StepParts, StepParts]
    bytes: float
    saved: float
    carried: float
    slope: float
    held: float

    def ideal(self, layers: int) -> float:
        """Seconds of a step without recomputation, waiting stages and messages about variables."""
        whole = min(each._replace(gradients=0.0).seconds(layers, self.most) for each in self.ends)
        return whole / self.stages

    def parts(self, each: int) -> StepParts:
        """Those with so many examples in a microbatch."""
        one, all_ = self.ends
        share = 0.0 if self.most == 1 else (1 / each - 1 / self.most) / (1 - 1 / self.most)
        return StepParts(*(max(0.0, b + (a - b) * share) for a, b in zip(one, all_, strict=True)))


class RecomputedShare(NamedTuple):
    """A kind of recomputation, as shares of all of it: of its seconds, and of the bytes that it saves."""

    seconds: float
    bytes: float


NONE, ALL = RecomputedShare(0.0, 0.0), RecomputedShare(1.0, 1.0)


class FamilyCosts:
    """The costs of families of recipes.

    Attributes:
      loops: that may be recomputed.
      counts: True if a number of the layers may be.
      kinds: sets of values that they may keep, once these are priced.
    """

    def __init__(self, recipes: Recipes) -> None:
        self.recipes, self.model, self.limit = recipes, recipes.model, recipes.request.limit
        self.dim, self.layers, graph = recipes.dim, recipes.layers, recipes.model.step_graph
        self.loops, self.kinds = recomputable(graph), dict[tuple[str, ...], RecomputedShare]()
        again, granularity = recipes.space.recompute, recipes.space.restriction.granularity
        loops = self.loops if True in again else []
        # Loops that are recomputed alike have neither the same numbers of layers nor the same kept values.
        apart = loops == [self.dim] or (self.dim in loops and granularity.get(Recompute.granular) != ALIKE)
        self.counts = apart and SOME in again
        self.keeps = keep_sets(graph, self.dim, kept_sets(again)) if apart else ()
        # The peak is linear in the recomputed layers until something else holds most: half tells how.
        half = self.layers // 2 if self.counts and loops == [self.dim] else 0
        self.again: Policies = frozenset(Recomputed(name, (), half) for name in loops)
        self.counted = half or self.layers

    def of(self, base: Recipe, storage: str) -> FamilyCost | None:
        """Those of the family of a recipe, whose stages do nothing; None if that is not legal."""
        most = self.model.examples // base.mesh.group_size(base.data)
        step = Step(base, storage, most, staged=False)
        if (plain := self.recipes.evaluated(step)) is None:
            return None
        again = (self.again and self.recipes.evaluated(step._replace(again=self.again))) or plain
        large = len(base.splits) < 2 and again.peak <= self.limit
        every = (large and self.recipes.evaluated(step._replace(microbatches=1))) or plain
        graph, layers = self.model.step_graph, self.layers
        body = next((b for b in graph.blocks if b.dim.name == self.dim), graph.blocks[0])
        ways = math.prod(base.mesh.group_size(a) for kind, a in base.splits if kind != EXPERTS)
        ways = ways if plain.layout.elsewhere else base.mesh.group_size(dict(base.splits).get(SEQUENCE, ()))
        carried = sum(graph.tensor(t).type.bytes for t in body.carry_in) / self.model.examples / ways
        saved = max(0.0, (plain.peak - again.peak) / self.counted)
        more = max(0.0, again.seconds - plain.seconds) / self.counted
        ends = self._parts(plain, most, more / most), self._parts(every, most, more / most)
        slope = (every.peak - plain.peak) / max(most - 1, 1) - layers * saved
        slope = max(slope, layers * carried)
        size = plain.peak - layers * saved
        held = max(0.0, size - slope) / self.fixed(base._replace(stages=()))
        for keep in self.keeps if saved else ():
            policy = frozenset(Recomputed(name, keep) for name in self.loops)
            if (found := self.recipes.evaluated(step._replace(again=policy))) is not None:
                slower, less = found.seconds - plain.seconds, plain.peak - found.peak
                self.kinds[keep] = RecomputedShare(slower / (layers * more or 1.0), less / layers / saved)
        self.keeps = () if saved else self.keeps
        return FamilyCost(most, base.ways, ends, size, saved, carried, slope, held)

    def _parts(self, plain: EvaluatedLayout, examples: int, again: float) -> StepParts:
        """The parts of a step in which the axes of stages do nothing."""
        graph = self.model.training_step(plain.options.microbatches).graph
        loops = {n.index for n, _ in graph.walk() if n.body is not None and n.body.dim.name == self.dim}
        nodes = loops | {n.index for b in graph.blocks if b.dim.name == self.dim for n, _ in b.walk()}
        first, every, once, ends = min(loops, default=0), 0.0, 0.0, [0.0, 0.0]
        lines = plain.evaluation.cost.lines
        scopes = {x.origin.scope.split("/")[0] for x in lines if x.origin.node in nodes}
        for line in lines:
            seconds = line.times * (line.exposed if line.is_communication else line.seconds)
            inside = line.origin.node in nodes or line.origin.scope.split("/")[0] in scopes
            if line.is_communication and (
                line.purpose == GRADIENT or (line.purpose == PARAMETER and line.times == 1)
            ):
                once += seconds
            elif line.origin.phase != Phase.UPDATE:
                every += seconds
                if line.origin.phase == Phase.FORWARD and not inside:
                    ends[line.origin.node > first] += BOTH * seconds
        layer, before, behind = (n / examples for n in (max(0.0, every - sum(ends)) / self.layers, *ends))
        return StepParts(layer, again, before, behind, once)

    def fixed(self, recipe: Recipe) -> float:
        """Bytes of variables and gradients on a device, about: what is updated is split over all, and what
        layers read and their gradients take as much together."""
        layout, mesh, total = self.recipes.splits(recipe) or {}, recipe.mesh, 1.0
        for each in self.model.graph.variables.values():
            lie = {n: recipe.stages if n == self.dim else layout.get(n, ()) for n in each.shape.names}
            ways = mesh.group_size({axis for axes in lie.values() for axis in axes})
            total += each.bytes / mesh.devices + (0 if each.slot_of else each.bytes / ways)
        return total
