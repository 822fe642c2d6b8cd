"""The fastest recipes (`recipes`), which may have meshes, rounds, microbatches and numbers of recomputed layers
that a search does not list. They are priced, not searched; the best adds what only it has to the search.

One step of each way to use the inner axes, without stages, is priced with the smallest and the largest
microbatches, with and without recomputation. Seconds and bytes of an example are linear in one over the
examples of a microbatch. P stages that run M microbatches in R rounds then take about

    slowest + (P - 1) / (M R) mean + gradients / P

where a stage takes P times its layers' share of that step; the first and the last also what is outside the
layers, unless one program runs all stages. Memory is linear in the number of recomputed layers, so it tells
the least recomputation that fits. This decides in which order recipes are lowered and priced as any layout,
and nothing else; each price corrects the guesses of those like it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from layoutopt.optimize.recipes import EXPERTS, SEQUENCE, Family, Recipe, Recipes, Step
from layoutopt.optimize.subproblem import EvaluatedLayout
from layoutopt.runtime.clock import Clock
from layoutopt.space.recompute import SOME, kept_sets
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import divisors
from mesh_tf_core.ir.instructions import GRADIENT, PARAMETER
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import GPIPE, KINDS, PipelineSchedule, kind_name, layer_order
from mesh_tf_core.lower.recomputed import keep_sets
from mesh_tf_core.lower.remat_policy import Policies, Recomputed
from mesh_tf_core.lower.rematerialization import recomputable
from mesh_tf_core.lower.storage import STAGES
from mesh_tf_core.tracing.stage_layers import check_stages

FAR = 1.1
"""Times the seconds of the best from which on guesses are not priced: they are off by less, mostly."""
NEAR = 0.85
"""Times the bytes of a guess that its price may have."""
STAGED = STAGES[1]
"""The storage of variables in stages."""
LEAST = 0.8
"""Least seconds with experts apart as a multiple of those without splits."""
FIRST = 4
"""Families that are looked at before recipes are priced."""
BOTH = 3.0
"""Times the seconds of forward that it takes with backward."""
BASES = 3
"""Recipes of a family of which one has to be legal without stages."""
NOTHING: Policies = frozenset()


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
        """Of a step without stages."""
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
    """What is known of recipes that differ in stages alone, with one kind of storage.

    Attributes:
      most: examples of a rank without stages.
      ends: parts with microbatches of one example, and of all of them.
      bytes: the peak with microbatches of one example, if all layers are recomputed.
      saved: bytes of a layer that is not recomputed, for an example of a microbatch.
      carried: the same of one that is.
      slope: bytes of one more example in a microbatch, if all layers are recomputed.
      held: the bytes of variables, and of gradients, as a multiple of a guess.
    """

    most: float
    ends: tuple[StepParts, StepParts]
    bytes: float
    saved: float
    carried: float
    slope: float
    held: float

    def ideal(self, layers: int) -> float:
        """Seconds of a step without recomputation, waiting stages and messages about variables."""
        return min(each._replace(gradients=0.0).seconds(layers, self.most) for each in self.ends)

    def parts(self, each: int) -> StepParts:
        """Those with so many examples in a microbatch."""
        one, all_ = self.ends
        share = 0.0 if self.most == 1 else (1 / each - 1 / self.most) / (1 - 1 / self.most)
        return StepParts(*(max(0.0, b + (a - b) * share) for a, b in zip(one, all_, strict=True)))


class Again(NamedTuple):
    """A kind of recomputation, as shares of all of it: of its seconds, and of the bytes that it saves."""

    seconds: float
    bytes: float


NONE, ALL = Again(0.0, 0.0), Again(1.0, 1.0)


@dataclass(eq=False)
class Guess:
    """A recipe with all that makes its graph but what it recomputes.

    Attributes:
      seconds, more: about what it takes without recomputation, and what all of it adds.
      bytes, saved: about what it holds with all of it, and what is saved without any.
      layers: of a stage, of which some may be recomputed.
      tried: prices by what is recomputed.
    """

    recipe: Recipe
    storage: str
    schedule: str
    number: int
    seconds: float
    more: float
    bytes: float
    saved: float
    layers: int
    tried: dict[Policies, tuple[Again, EvaluatedLayout | None]] = field(default_factory=dict)
    chosen: tuple[tuple[int, int], Choice] | None = None

    def fits(self, limit: float) -> Iterator[float]:
        """Seconds of prices that hold at most so many bytes."""
        yield from (f.seconds for _, f in self.tried.values() if f is not None and f.peak <= limit)

    @property
    def key(self) -> tuple[Family, str, bool]:
        """What it shares with guesses that are off as much."""
        return self.recipe.family, self.storage, bool(self.recipe.stages)

    def corrected(self, seconds: float, size: float) -> Callable[[Again], tuple[float, float]]:
        """Seconds and bytes by what is recomputed, as its last price says, else so many times its own."""
        last = next(((a, f) for a, f in reversed(self.tried.values()) if f is not None), None)
        if last is None:
            return lambda a: (
                seconds * (self.seconds + a.seconds * self.more),
                size * (self.bytes + (1 - a.bytes) * self.saved),
            )
        known, found = last
        return lambda a: (
            found.seconds + (a.seconds - known.seconds) * self.more,
            found.peak + (known.bytes - a.bytes) * self.saved,
        )


Choice = tuple[float, Guess, Policies, Again]
"""Seconds of a guess with some recomputation."""


class Probes:
    """The search for the fastest of some recipes."""

    def __init__(self, recipes: Recipes, clock: Clock) -> None:
        self.recipes, self.clock = recipes, clock
        self.model, self.space, self.limit = recipes.model, recipes.space, recipes.request.limit
        self.dim, graph = recipes.dim, recipes.model.step_graph
        self.loops = [*recomputable(graph)]
        own = self.dim if self.dim in self.loops else ""
        self.keeps = keep_sets(graph, own, kept_sets(self.space.recompute)) if own else ()
        self.kinds = dict[tuple[str, ...], Again]()
        self.families = dict[Family, list[Recipe]]()
        for each in recipes.every():
            self.families.setdefault(each.family, []).append(each)
        self.known = dict[tuple[Family, str], FamilyCost | None]()
        self.guesses, self.prices, self.stale = list[Guess](), 0, True
        self.ratios = defaultdict[tuple[Family, str, bool], list[tuple[float, float]]](list)

    def better(self, below: float, told: Callable[[int, int], None]) -> Iterator[EvaluatedLayout]:
        """Recipes that fit and take fewer seconds than `below`, each faster than the one before.

        Args:
          told: called with how many are looked at, of how many.
        """
        waiting, ideal = [(f, stage) for f in self.families for stage in self._storages()], 0.0
        while not self.clock.over:
            if self.stale:
                waiting.sort(key=lambda own: (self._ideal(*own), len(own[0]), own[0]), reverse=True)
                ideal, self.stale = self._ideal(*waiting[-1]) if waiting else math.inf, False
            chosen = min(map(self._chosen, self.guesses), key=lambda c: c[0], default=(math.inf,))
            some = len(self.known) > FIRST + self.prices and chosen[0] < FAR * below  # of both
            if ideal < below and not some and ideal <= chosen[0]:
                self._look_at(*waiting.pop())
                continue
            if chosen[0] >= FAR * below or len(chosen) == 1:
                return
            told(len(self.known), len(self.known) + len(waiting))
            found = self._priced(*chosen[1:])
            if found is not None and found.peak <= self.limit and found.seconds < below:
                below = found.seconds
                yield found

    def _priced(self, guess: Guess, again: Policies, share: Again) -> EvaluatedLayout | None:
        self.prices += 1
        step = Step(guess.recipe, guess.storage, guess.number, again, guess.schedule)
        found = self.recipes.evaluated(step)
        if found is not None and not guess.tried:
            seconds, size = guess.corrected(1.0, 1.0)(share)
            self.ratios[guess.key].append((found.seconds / seconds, found.peak / size))
        guess.tried[again] = share, found
        return found

    def _storages(self) -> list[str]:
        known = [s for s in self.space.storage if s in STAGES]
        return [STAGED, *(stage for stage in known if STAGES.index(stage) > 1)]

    def _ideal(self, family: Family, storage: str) -> float:
        """Seconds of a family without recomputation, about, or fewer: what it splits adds what each of its
        splits does; 0 if that is not known."""
        if (family, STAGED) in self.known:
            known = self.known[family, STAGED]
            return math.inf if known is None else known.ideal(self.recipes.layers)
        if storage != STAGED:
            return math.inf  # first as in stages
        if not family:
            return 0.0
        none = self._ideal((), STAGED)
        none = none if math.isfinite(none) else 0.0
        if len(family) == 1:
            kind, ways = family[0]
            known = {own[0]: f for (own, _), f in self.known.items() if f and len(own) == 1}
            fewer = (f for (k, n), f in known.items() if k == kind and math.prod(n) < math.prod(ways))
            most = max((f.ideal(self.recipes.layers) for f in fewer), default=none)
            return LEAST * none if kind == EXPERTS else most
        each = (self._ideal((one,), STAGED) - none for one in family)
        return none + sum(max(0.0, more) for more in each if math.isfinite(more))

    def _look_at(self, family: Family, storage: str) -> None:
        """Prices steps of a family without stages, and guesses about all of its recipes."""
        recipes = [r for r in self.families[family] if storage == STAGED or not r.stages]
        cost = next(filter(None, (self._cost(each, storage) for each in recipes[:BASES])), None)
        self.known[family, storage], self.stale = cost, True
        for recipe in recipes if cost is not None else ():
            self.guesses += self._guesses(recipe, storage, cost)

    def _cost(self, base: Recipe, storage: str) -> FamilyCost | None:
        most, left = divmod(self.model.examples, base.mesh.group_size(base.data))
        if left or not most:
            return None
        whole = frozenset(Recomputed(name) for name in self.loops) if True in self.space.recompute else NOTHING
        small = len(base.splits) < 2 and (self._fixed(base) < self.limit or storage != STAGED)
        step = Step(base, storage, most, staged=False)
        plain = self.recipes.evaluated(step)
        again = self.recipes.evaluated(step._replace(again=whole)) if whole else plain
        every = self.recipes.evaluated(step._replace(microbatches=1)) if small and most > 1 else plain
        if plain is None or again is None or every is None:
            return None
        layers, graph = max(self.recipes.layers, 1), self.model.step_graph
        body = next((b for b in graph.blocks if b.dim.name == self.dim), graph.blocks[0])
        ways = math.prod(base.mesh.group_size(a) for kind, a in base.splits if kind != EXPERTS)
        ways = ways if plain.layout.elsewhere else base.mesh.group_size(dict(base.splits).get(SEQUENCE, ()))
        carried = sum(graph.tensor(t).type.bytes for t in body.carry_in) / self.model.examples / ways
        saved = max(0.0, (plain.peak - again.peak) / layers)
        more = max(0.0, again.seconds - plain.seconds) / layers / most
        ends = self._parts(plain, most, more), self._parts(every, most, more)
        slope = (every.peak - plain.peak) / max(most - 1, 1) - layers * saved
        slope = max(slope, layers * carried)
        held = (again.peak - slope) / self._fixed(base)
        for keep in self.keeps if not self.kinds and saved else ():
            policy = frozenset(Recomputed(name, keep) for name in self.loops)
            if (found := self.recipes.evaluated(step._replace(again=policy))) is not None:
                shares = [
                    (a - b) / ((c - b) or 1.0)
                    for a, b, c in (
                        (found.seconds, plain.seconds, again.seconds),
                        (found.peak, plain.peak, again.peak),
                    )
                ]
                self.kinds[keep] = Again(*shares)
        return FamilyCost(most, ends, again.peak, saved, carried, slope, held)

    def _parts(self, plain: EvaluatedLayout, examples: int, again: float) -> StepParts:
        """Of a step in which the axes of stages do nothing."""
        layers, graph = max(self.recipes.layers, 1), self.model.training_step(plain.options.microbatches).graph
        loops = {n.index for n, _ in graph.walk() if n.body is not None and n.body.dim.name == self.dim}
        nodes = loops | {n.index for b in graph.blocks if b.dim.name == self.dim for n, _ in b.walk()}
        first, every, once, ends = min(loops, default=0), 0.0, 0.0, [0.0, 0.0]
        lines = plain.evaluation.cost.lines
        scopes = {x.origin.scope.split("/")[0] for x in lines if x.origin.node in nodes}
        for line in lines:
            seconds = line.times * (line.exposed if line.is_communication else line.seconds)
            inside = line.origin.node in nodes or line.origin.scope.split("/")[0] in scopes
            if line.is_communication and (line.purpose == GRADIENT or (line.purpose == PARAMETER and line.times == 1)):
                once += seconds
            elif line.origin.phase != Phase.UPDATE:
                every += seconds
                if line.origin.phase == Phase.FORWARD and not inside:
                    ends[line.origin.node > first] += BOTH * seconds
        layer, before, behind = (n / examples for n in (max(0.0, every - sum(ends)) / layers, *ends))
        return StepParts(layer, again, before, behind, once)

    def _fixed(self, recipe: Recipe) -> float:
        """Bytes of variables and gradients on a device, about: what is updated is split over all, and what
        layers read and their gradients take as much together."""
        layout, mesh, total = self.recipes.splits(recipe) or {}, recipe.mesh, 1.0
        for each in self.model.graph.variables.values():
            lie = {n: recipe.stages if n == self.dim else layout.get(n, ()) for n in each.shape.names}
            ways = mesh.group_size({axis for axes in lie.values() for axis in axes})
            total += each.bytes / mesh.devices + (0 if each.slot_of else each.bytes / ways)
        return total

    def _guesses(self, recipe: Recipe, storage: str, cost: FamilyCost) -> Iterator[Guess]:
        examples, left = divmod(self.model.examples, recipe.mesh.group_size(recipe.data))
        if left or (recipe.stages and not self._possible(recipe.ways)):
            return
        layers, ways, given = self.recipes.layers, recipe.ways, "microbatches" in self.space.given
        apart, fixed = self.recipes.evaluator.apart(recipe.mesh), cost.held * self._fixed(recipe)
        for each in (n for n in divisors(examples) if n & (n - 1) == 0 or n == examples):
            if given and (number := examples // each) not in self.space.microbatches:
                continue
            number, of = examples // each, cost.parts(each)
            if not recipe.stages:
                seconds = of.seconds(layers, examples)
                more, saved = examples * layers * of.again, layers * cost.saved * each
                size = cost.bytes + cost.slope * (each - 1)
                yield Guess(recipe, storage, GPIPE, number, seconds, more, size, saved, layers)
                continue
            for schedule in self._schedules(layers, ways, of):
                plan = PipelineSchedule.named(schedule, ways, number)
                counts = plan.order.of_stages(layers).sum(axis=1).tolist()
                idle = (ways - 1) / (number * plan.chunks) * (0.5 if KINDS[plan.kind].split else 1.0)
                stages = of.stages(counts, apart)
                seconds = examples * (max(stages) + idle * fmean(stages)) + of.gradients / ways
                more = examples * (max(counts) + idle * fmean(counts)) * of.again
                most = max(self._flying(plan, stage) * n for stage, n in enumerate(counts))
                flying = most / plan.chunks * each
                working = max(0.0, cost.slope - layers * cost.carried) * each
                size = fixed + working + flying * cost.carried
                own = plan.order.size(layers) // ways * (plan.chunks == 1)
                yield Guess(
                    recipe, storage, schedule, number, seconds, more, size, flying * cost.saved, own
                )

    @staticmethod
    def _flying(plan: PipelineSchedule, stage: int) -> int:
        """Virtual stages of microbatches in flight, about where each stage has an order of its own."""
        one_way = KINDS[plan.kind].one_way
        return plan.in_flight_apart(stage) if one_way else min(plan.stages, plan.microbatches) * plan.chunks

    def _possible(self, ways: int) -> bool:
        with suppress(UserError):
            check_stages(self.model.graph, self.dim, ways)
            return True
        return False

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
                times = (max(of.stages(counts, apart=True)) for counts in (equal, own))
                if next(times) > FAR * next(times):
                    yield f"{name}:layers={'+'.join(map(str, own))}"

    def _chosen(self, guess: Guess) -> Choice:
        """The fastest recomputation of a guess that fits, about, and is not priced yet; inf: there is none."""
        ratios, tried = self.ratios[guess.key], guess.tried
        if guess.chosen is not None and guess.chosen[0] == (state := (len(ratios), len(tried))):
            return guess.chosen[1]
        state = len(ratios), len(tried)
        costs = guess.corrected(*(fmean(each) for each in zip(*(ratios or [(1.0, 1.0)]), strict=True)))
        near = self.limit if tried else self.limit / NEAR
        best, own = (math.inf, guess, NOTHING, NONE), min(guess.fits(self.limit), default=math.inf)
        for policy, share in self._policies(guess, costs):
            seconds, size = costs(share)
            if policy not in tried and size <= (near if share is ALL else self.limit):
                best = min(best, (seconds, guess, policy, share), key=lambda c: c[0])
        best = best if best[0] < own else (math.inf, *best[1:])
        guess.chosen = state, best
        return best

    def _policies(
        self, guess: Guess, costs: Callable[[Again], tuple[float, float]]
    ) -> Iterator[tuple[Policies, Again]]:
        loops = [self.dim] if guess.recipe.stages else self.loops
        if False in self.space.recompute:
            yield NOTHING, NONE
        if True not in self.space.recompute or not loops:
            return
        yield frozenset(map(Recomputed, loops)), ALL
        for keep, share in self.kinds.items():
            yield frozenset(Recomputed(name, keep) for name in loops), share
        if SOME in self.space.recompute and guess.layers > 1 and guess.saved > 0:
            size, own = costs(ALL)[1], guess.layers
            number = math.ceil(own * (1 - (self.limit - size) / guess.saved))
            tried = [
                (next(iter(p)).only, f is None or f.peak > self.limit)
                for p, (_, f) in guess.tried.items()
                if p and next(iter(p)).only
            ]
            number = max([number, *(n + 1 for n, over in tried if over)])
            if 0 < number < own:
                rest = {*map(Recomputed, loops)} - {Recomputed(self.dim)}
                yield frozenset({Recomputed(self.dim, (), number), *rest}), Again(number / own, number / own)
