"""Pipelines as experts write them, on meshes, in rounds and in numbers of microbatches that a search does not
list. They are priced, not searched; the best adds its own mesh, rounds and microbatches to the search.

In a *recipe* one axis of a mesh lies over stages, and the innermost one splits weights, experts or a
sequence; all others split the batch. One step of each, without stages, is priced in full. P stages that run
M microbatches in R rounds then take about

    slowest + (P - 1) / (M R) mean + gradients / P

where a stage takes P times its layers' share of that step, forward twice if they run again; the first and
the last also what is outside the layers, unless one program runs all stages. This decides in which order
recipes are lowered and priced as any layout, and nothing else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import NamedTuple

from layoutopt.optimize.baselines import NamedStrategy
from layoutopt.optimize.incumbents import decisions_of
from layoutopt.optimize.request import Request
from layoutopt.optimize.subproblem import EvaluatedLayout
from layoutopt.optimize.subproblems import SubproblemKey
from layoutopt.runtime.clock import Clock
from layoutopt.space.decisions import Decisions
from layoutopt.space.mesh_shapes import of_shape
from layoutopt.space.parallelism import parallelism
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.stages import runs_again
from layoutopt.space.undivided import stored_at
from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.dims import divisors
from mesh_tf_core.ir.instructions import GRADIENT
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import GPIPE, KINDS, kind_name, layer_order
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.remat_policy import Policies, Recomputed
from mesh_tf_core.lower.storage import STAGES
from mesh_tf_core.tracing.stage_layers import check_stages

INNER = 16
"""The most devices of an innermost axis that splits something other than experts."""
NEAR = 0.5
"""Least share of the bytes of an example that other recipes hold."""
BASES, FIRST_SHARE = 3, 0.6
"""Recipes in which other parts run again too; share of the time for what is priced before that."""
FAR = 1.1
"""Times the seconds of the best from which on guesses are not priced: they are off by less, mostly."""
BATCH, WEIGHTS, EXPERTS, SEQUENCE = "batch", "weights", "experts", "sequence"
"""Kinds of recipes; in the first, nothing else is split."""


class Recipe(NamedTuple):
    """The use of a mesh.

    Attributes:
      stages, inner: axes; `kind`: what the inner ones split.
    """

    mesh: Mesh
    stages: Axes
    inner: Axes
    kind: str

    @property
    def ways(self) -> int:
        """The number of stages."""
        return self.mesh.group_size(self.stages)

    @property
    def beside(self) -> Axes:
        """The inner axes, if they do not split the batch too."""
        return self.inner if self.kind in (WEIGHTS, SEQUENCE) else ()

    @property
    def family(self) -> tuple[str, int]:
        """The key that it shares with recipes that differ in stages alone."""
        return self.kind, self.mesh.group_size(self.inner)


class Guess(NamedTuple):
    """A recipe with all that makes its graph.

    Attributes:
      seconds: about what it takes.
      examples: of each rank in a microbatch.
      held: those that a stage holds at once, about, as a multiple of its layers, and of the ways in which
        their activations are split.
      fixed: bytes of variables and gradients, about.
    """

    seconds: float
    examples: int
    held: float
    fixed: float
    recipe: Recipe
    schedule: str
    microbatches: int
    again: Policies


class StepParts(NamedTuple):
    """Seconds of a step without stages.

    Attributes:
      layer, forward: of a layer, and of its forward alone.
      before, behind: of what is outside the layers.
      gradients: of messages about gradients.
    """

    layer: float
    forward: float
    before: float
    behind: float
    gradients: float

    def stages(self, counts: Sequence[int], again: bool, apart: bool) -> list[float]:
        """Seconds of each stage, by the number of its layers; `apart`: each is a program of its own."""
        ways, of_one = len(counts), self.layer + again * self.forward
        found = [ways * n * of_one + (0.0 if apart else self.before + self.behind) for n in counts]
        found[0] += apart * ways * self.before
        found[-1] += apart * ways * self.behind
        return found

    def balanced(self, layers: int, ways: int) -> list[int]:
        """The layers of stages that are about equally slow."""
        counts = [0] * ways
        for _ in range(layers):
            stages = self.stages(counts, again=False, apart=True)
            counts[stages.index(min(stages))] += 1
        return counts


class Probes:
    """The recipes of a request.

    Args:
      meshes: those that were given, or whose axes rules name; none: any of so many devices.
    """

    def __init__(self, request: Request, meshes: Sequence[Mesh], devices: int) -> None:
        self.request, self.meshes, self.devices = request, meshes, devices
        self.model, self.space, self.evaluator = request.model, request.allowed, request.evaluator
        self.dims, sizes = parallelism(self.model), self.model.graph.dims()
        self.dim = max(self.space.pipeline, key=lambda name: max(sizes[name]))
        self.inner = {WEIGHTS: self.dims.inner, EXPERTS: self.dims.experts, SEQUENCE: self.dims.sequence}
        self.splits = cache(self._splits)

    def fastest(self, clock: Clock, below: float, told: Callable[[int, int], None]) -> EvaluatedLayout | None:
        """The fastest recipe that fits and takes fewer seconds than `below`.

        Args:
          clock: of this; while nothing fits that is known, the time of the request.
          told: called with how many are looked at, of how many.
        """
        guesses, limit = [*self._guesses(clock)], self.request.limit
        count, ratios = len(guesses), defaultdict[tuple[str, int, int], list[float]](list)
        activations = defaultdict[bool, list[float]](list)  # bytes of an example, if layers run again or not
        fits, part = list[tuple[EvaluatedLayout, Guess]](), clock.part(FIRST_SHARE)

        def guessed(guess: Guess) -> float:
            return guess.seconds * fmean(ratios[*guess.recipe.family, guess.examples] or [1.0])

        while guesses and not (part.over if fits or below < math.inf else self.request.late):
            guess = min(guesses, key=guessed)
            if guessed(guess) >= FAR * below:
                break
            guesses.remove(guess)
            again = bool(guess.again)
            if guess.fixed + NEAR * guess.held * min(activations[again], default=0.0) > limit:
                continue
            told(count - len(guesses), count)
            if (found := self._priced(guess)) is None:
                continue
            ratios[*guess.recipe.family, guess.examples].append(found.seconds / guess.seconds)
            if found.seconds < FAR * below:
                activations[again].append(max(found.peak - guess.fixed, 0.0) / guess.held)
                if found.peak <= limit:
                    below = min(below, found.seconds)
                    fits.append((found, guess))
        # Full recomputation is dearest where little of it is needed: not only the best may gain.
        bases = dict[Recipe, Guess]()
        for _, guess in sorted(fits, key=lambda each: each[0].seconds):
            bases.setdefault(guess.recipe, guess)
        for guess in [*bases.values()][:BASES]:
            near = (each for each in self._near(guess) if not clock.over)
            fits += [(f, guess) for f in map(self._priced, near) if f is not None and f.peak <= limit]
        fastest = min((found for found, _ in fits), key=lambda found: found.seconds, default=None)
        return fastest if fastest is None or fastest.seconds <= below else None

    def _near(self, guess: Guess) -> Iterator[Guess]:
        """The same with other parts that run again than nothing, all layers or all stages."""
        stages, mesh = {self.dim: guess.recipe.stages}, guess.recipe.mesh
        for again in runs_again(self.model, stages, self.space, mesh, guess.schedule):
            if any(each.keep or each.only for each in again):
                yield guess._replace(again=again)

    def _recipes(self) -> Iterator[Recipe]:
        """Every use of a mesh; where that may be any, its first axis lies over stages."""
        kinds = [kind for kind, names in self.inner.items() if names]
        for mesh in self.meshes:
            axes = [axis for axis, size in mesh.axes if size > 1]
            for staged in axes:
                yield Recipe(mesh, (staged,), (), BATCH)
                for other in (axis for axis in axes if axis != staged):
                    yield from (Recipe(mesh, (staged,), (other,), kind) for kind in kinds)
        for ways in divisors(self.devices)[1:] if not self.meshes else ():
            for inner in divisors(self.devices // ways):
                rest = self.devices // ways // inner
                mesh = of_shape((ways, *(n for n in (rest, inner) if n > 1)))
                for kind in kinds if inner > 1 else [BATCH]:
                    if inner <= INNER or kind == EXPERTS:
                        yield Recipe(mesh, mesh.names[:1], mesh.names[-1:] if inner > 1 else (), kind)

    def _guesses(self, clock: Clock) -> Iterator[Guess]:
        parts = dict[tuple[str, int], StepParts | None]()
        layers, given = max(self.model.graph.dims()[self.dim]), self.space.given
        for recipe in self._recipes():
            ways, beside = recipe.ways, recipe.mesh.group_size(recipe.beside)
            examples, left = divmod(self.model.examples, recipe.mesh.devices // (ways * beside))
            if left or clock.over or not self._possible(ways):
                continue
            if recipe.family not in parts:
                parts[recipe.family] = self._parts(recipe)
            of, fixed = parts[recipe.family], self._fixed(recipe)
            if of is None or fixed > self.request.limit:
                continue
            for schedule in self._schedules(layers, ways, of):
                kind, order = KINDS[kind_name(schedule)], layer_order(schedule, ways)
                counts = order.of_stages(layers).sum(axis=1).tolist()
                flying = (1 + (ways - 1) / (ways * order.chunks) if order.chunks > 1 else 1.0) / beside
                for each in (n for n in divisors(examples) if n & (n - 1) == 0 or n == examples):
                    number = examples // each
                    if "microbatches" in given and number not in self.space.microbatches:
                        continue
                    idle = (ways - 1) / (number * order.chunks) * (0.5 if kind.split else 1.0)
                    for again in (a for a in (False, True) if a in self.space.recompute):
                        stages = of.stages(counts, again, self.evaluator.apart(recipe.mesh))
                        seconds = max(stages) + idle * fmean(stages) + of.gradients / ways
                        graph = schedule, number, frozenset({Recomputed(self.dim)} if again else ())
                        yield Guess(seconds, each, each * flying, fixed, recipe, *graph)

    def _possible(self, ways: int) -> bool:
        with suppress(UserError):
            check_stages(self.model.graph, self.dim, ways)
            return True
        return False

    def _fixed(self, recipe: Recipe) -> float:
        """Bytes of variables and gradients on a device, or fewer: what is updated is split over all, and what
        layers read and their gradients take as much together."""
        layout, mesh, total = self.splits(recipe), recipe.mesh, 0.0
        for each in self.model.graph.variables.values():
            lie = {n: recipe.stages if n == self.dim else layout.get(n, ()) for n in each.shape.names}
            ways = mesh.group_size({axis for axes in lie.values() for axis in axes})
            total += each.bytes / mesh.devices + (0 if each.slot_of else each.bytes / ways)
        return total

    def _schedules(self, layers: int, ways: int, of: StepParts) -> Iterator[str]:
        """The space's schedules; unless somebody said them, in as few and as many rounds as layers allow, and
        with as many layers on each stage as make them equally slow."""
        for name in self.space.restriction.among(self.space, "schedule"):
            kind = KINDS[word := kind_name(name)]
            if "schedule" in self.space.given or not kind.rounds:
                yield name
            elif layers % ways == 0:
                rounds = divisors(layers // ways)[1:]
                yield from (f"{word}:{n}" for n in sorted({*rounds[:1], *rounds[-1:]}))
            if kind.one_way and not kind.rounds and "schedule" not in self.space.given:
                equal, own = layer_order(name, ways).counts(layers).tolist(), of.balanced(layers, ways)
                times = (max(of.stages(counts, again=False, apart=True)) for counts in (equal, own))
                if next(times) > FAR * next(times):
                    yield f"{name}:layers={'+'.join(map(str, own))}"

    def _parts(self, recipe: Recipe) -> StepParts | None:
        """Of a step in which the axis of the stages does nothing; None if that is not legal."""
        key = SubproblemKey(recipe.mesh, frozenset(), GPIPE, frozenset(), 1)
        if (found := self._evaluated(recipe, key)) is None:
            return None
        graph, ways, lines = self.model.step_graph, recipe.ways, found.evaluation.cost.lines
        loops = {n.index for n, _ in graph.walk() if n.body is not None and n.body.dim.name == self.dim}
        nodes = loops | {n.index for b in graph.blocks if b.dim.name == self.dim for n, _ in b.walk()}
        first, layers = min(loops), max(graph.dims()[self.dim])
        inside = forward = outside = gradients = 0.0
        ends = [0.0, 0.0]  # forward before and behind the layers; backward is like it
        for line in lines:
            seconds = line.times * (line.exposed if line.is_communication else line.seconds) / ways
            early = seconds * (line.origin.phase == Phase.FORWARD)
            if line.is_communication and line.purpose == GRADIENT:
                gradients += seconds * ways
            elif line.origin.node in nodes:
                inside, forward = inside + seconds, forward + early
            elif line.origin.phase != Phase.UPDATE:
                outside += seconds
                ends[line.origin.node > first] += early
        before = outside * ends[0] / (sum(ends) or 1.0)
        return StepParts(inside / layers, forward / layers, before, outside - before, gradients)

    def _priced(self, guess: Guess) -> EvaluatedLayout | None:
        recipe, stages = guess.recipe, frozenset({(self.dim, guess.recipe.stages)})
        key = SubproblemKey(recipe.mesh, stages, guess.schedule, guess.again, guess.microbatches)
        return self._evaluated(recipe, key)

    def _evaluated(self, recipe: Recipe, key: SubproblemKey) -> EvaluatedLayout | None:
        if (found := self._written(recipe, key)) is None:
            return None
        try:
            return EvaluatedLayout(recipe.mesh, *found, self.evaluator(recipe.mesh, *found), "a recipe")
        except LayoutError:
            return None

    def _written(self, recipe: Recipe, key: SubproblemKey) -> tuple[Layout, Options] | None:
        """The layout of a recipe and its options, the optimizer's state split if that may be; None if no
        such layout may be chosen."""
        space = self.space.but(microbatches=(key.microbatches,))
        if key.stages:
            space = space.but(schedule=(key.schedule,))
        else:
            space = space.but(pins={n: axes for n, axes in space.pins.items() if n != self.dim})
        decided = decisions_of(key, space, self.model, self.evaluator.near)
        if decided is None:
            return None
        layout = self._layout(recipe, decided)
        options, least = decided.read({})[1], decided.least_memory
        options = replace(options, recompute=least.recompute) if key.again else options
        split = stored_at(self.model.graph.variables.values(), STAGES[1])
        every = (replace(options, storage=s) for s in (split, least.storage, options.storage))
        # Without stages it only tells about how long its parts take.
        legal = (how for how in every if not key.stages or decided.allows(layout, how))
        return next(((layout, how) for how in legal), None)

    def _layout(self, recipe: Recipe, decided: Decisions) -> Layout:
        further = decided.of(Elsewhere) if recipe.kind == WEIGHTS else ()
        wanted = {**self.splits(recipe), **dict.fromkeys(further, recipe.inner)}
        chosen = {n: axes for n, axes in wanted.items() if axes in decided.options.get(n, ())}
        return Layout({**decided.read({})[0].written, **chosen})

    def _splits(self, recipe: Recipe) -> Mapping[str, Axes]:
        """The splits of a recipe beside its stages."""
        also = self.dims.weights if recipe.kind == WEIGHTS else ()
        data = tuple(a for a, n in recipe.mesh.axes if n > 1 and a not in (*recipe.stages, *recipe.beside))
        # First what most variables have: heads, before the groups of queries of each.
        names = self.inner.get(recipe.kind, ())[::-1]
        plain = NamedStrategy(self.model, recipe.mesh, data, recipe.inner, names, also=also).plain()
        return {} if plain is None else plain[0].written
