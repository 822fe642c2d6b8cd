"""The fastest recipes (`recipes`), whose meshes, rounds, microbatches and numbers of recomputed layers no
search need list. They are priced, not searched; the best adds what only it has to the search.

A family, the recipes that differ in stages alone, is priced without stages: with the smallest and the largest
microbatches, with and without recomputation. Seconds and bytes of an example are linear in one over the
examples of a microbatch. P stages that run M microbatches in R rounds then take about

    slowest + (P - 1) / (M R) mean + gradients / P

where a stage takes P times its layers' share of that step; the first and the last also what is outside the
layers, unless one program runs all stages. Memory is linear in the number of recomputed layers, so it tells
the least recomputation that fits. These guesses only order the recipes that are lowered and priced as any
layout; each price corrects the guesses of those like it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from statistics import fmean

from layoutopt.optimize.heuristics.incumbents import Incumbents, WarmStart
from layoutopt.optimize.heuristics.recipe_costs import (
    ALL,
    NONE,
    STAGED,
    FamilyCost,
    FamilyCosts,
    RecomputedShare,
    StepParts,
)
from layoutopt.optimize.heuristics.recipes import EXPERTS, NOTHING, Recipe, RecipeFamily, Recipes, Step
from layoutopt.optimize.problems.question import SearchQuestion
from layoutopt.optimize.problems.request import SearchStatus
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.runtime.clock import Clock
from layoutopt.space import allow
from layoutopt.space.objective import Objective
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import divisors
from mesh_tf_core.ir.schedules import GPIPE, KINDS, PipelineSchedule, kind_name, layer_order
from mesh_tf_core.lower.remat_policy import Policies, Recomputed
from mesh_tf_core.lower.storage import STAGES
from mesh_tf_core.tracing.virtual_stages import check_stages

FAR = 1.1
"""Times the seconds of the best from which on guesses are not priced: they are off by less, mostly."""
NEAR = 0.85
"""Times the bytes of a guess that its price may have."""
LEAST = 0.8
"""Least seconds with experts apart as a multiple of those without splits."""
FIRST = 4
"""Families that are looked at before the first price, and then one for each price, while a guess is near."""
LARGE, VERY_LARGE = 1 / 64, 1 / 8
"""Parts of all memory that the variables of a large model fill, and of one that may fit by no name."""
PROBED_SHARE = 0.5
"""Part of the time for everything in which recipes are priced."""
BASES = 3
"""Recipes of a family of which one has to be legal without stages."""


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
    tried: dict[Policies, tuple[RecomputedShare, EvaluatedLayout | None]] = field(default_factory=dict)
    chosen: tuple[tuple[int, int], PricedGuess] | None = None

    @property
    def key(self) -> tuple[RecipeFamily, str, bool]:
        """The key that it shares with guesses that are off as much."""
        return self.recipe.family, self.storage, bool(self.recipe.stages)

    def corrected(self, seconds: float, size: float) -> Callable[[RecomputedShare], tuple[float, float]]:
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


PricedGuess = tuple[float, Guess, Policies, RecomputedShare]
"""Seconds of a guess with some recomputation."""


class Probes:
    """The search for the fastest of some recipes."""

    def __init__(self, recipes: Recipes, clock: Clock) -> None:
        self.recipes, self.clock = recipes, clock
        self.model, self.space, self.limit = recipes.model, recipes.space, recipes.request.limit
        self.dim, self.layers = recipes.dim, recipes.layers
        self.costs = FamilyCosts(recipes)
        self.families = {f: [*own] for f, own in groupby(recipes.every(), lambda r: r.family)}
        self.known = dict[tuple[RecipeFamily, str], FamilyCost | None]()
        self.guesses, self.prices, self.stale = list[Guess](), 0, True
        self.over = list[float]()  # prices that fit as multiples of the least of their families
        self.storages = [STAGED, *(s for s in self.space.storage if s in STAGES[2:])]
        self.possible = cache(self._possible)
        self.ratios = defaultdict[tuple[RecipeFamily, str, bool], list[tuple[float, float]]](list)

    def better(self, below: float, told: Callable[[int, int], None]) -> Iterator[EvaluatedLayout]:
        """Recipes that fit and take fewer seconds than `below`, each faster than the one before; `told` is
        called with the number of families that are looked at, of how many."""
        waiting = [(f, stage) for f in self.families for stage in self.storages]
        while not self.clock.over:
            if self.stale:
                waiting.sort(key=lambda own: (self._ideal(*own), len(own[0]), own[0]), reverse=True)
                ideal, self.stale = self._ideal(*waiting[-1]) if waiting else math.inf, False
            chosen = min(map(self._chosen, self.guesses), key=lambda c: c[0], default=(math.inf,))
            some = len(self.known) > FIRST + self.prices and chosen[0] < FAR * below
            promising = ideal < below and ideal * min(self.over, default=1.0) < FAR * below
            if promising and not some and ideal <= chosen[0]:
                self._look_at(*waiting.pop())
                continue
            if chosen[0] >= FAR * below or len(chosen) == 1:
                return
            told(len(self.known), len(self.known) + len(waiting))
            found = self._priced(*chosen[1:])
            if found is not None and found.peak <= self.limit and found.seconds < below:
                below = found.seconds
                yield found

    def _priced(self, guess: Guess, again: Policies, share: RecomputedShare) -> EvaluatedLayout | None:
        self.prices += 1
        step = Step(guess.recipe, guess.storage, guess.number, again, guess.schedule)
        found = self.recipes.evaluated(step)
        if found is not None and not guess.tried:
            seconds, size = guess.corrected(1.0, 1.0)(share)
            self.ratios[guess.key].append((found.seconds / seconds, found.peak / size))
        guess.tried[again] = share, found
        known = self.known[guess.recipe.family, guess.storage]
        if found is not None and known is not None and found.peak <= self.limit:
            self.over.append(found.seconds / known.ideal(self.layers))
        return found

    def _ideal(self, family: RecipeFamily, storage: str) -> float:
        """Seconds of a family without recomputation, idle stages and messages about variables, or fewer:
        what it splits adds what each of its splits does; 0 if that is not known."""
        if (family, STAGED) in self.known:
            known = self.known[family, STAGED]
            return math.inf if known is None else known.ideal(self.layers)
        if storage != STAGED:
            return math.inf  # first as in stages
        if not family:
            return 0.0
        none = 0.0 if math.isinf(none := self._ideal((), STAGED)) else none
        if len(family) == 1:
            kind, ways = family[0]
            single = {own[0]: f for (own, _), f in self.known.items() if f and len(own) == 1}
            fewer = (f for (k, n), f in single.items() if k == kind and math.prod(n) < math.prod(ways))
            most = max((f.ideal(self.layers) for f in fewer), default=none)
            return LEAST * none if kind == EXPERTS else most
        each = (self._ideal((one,), STAGED) - none for one in family)
        return none + sum(max(0.0, more) for more in each if math.isfinite(more))

    def _legal(self, family: RecipeFamily) -> list[Recipe]:
        """The recipes of a family that split all that they should."""
        own = (r for r in self.families[family] if not r.stages or self.possible(r.ways))
        whole = (r for r in own if self.model.examples % r.mesh.group_size(r.data) == 0)
        return [r for r in whole if self.recipes.splits(r) is not None]

    def _look_at(self, family: RecipeFamily, storage: str) -> None:
        """Prices steps of a family without stages, and guesses about all of its recipes."""
        recipes = [r for r in self._legal(family) if storage == STAGED or not r.stages]
        cost = next(filter(None, (self.costs.of(each, storage) for each in recipes[:BASES])), None)
        self.known[family, storage], self.stale = cost, True
        if cost is not None and (storage == STAGED or cost != self.known[family, STAGED]):
            self.guesses += (guess for each in recipes for guess in self._guesses(each, storage, cost))

    def _guesses(self, recipe: Recipe, storage: str, cost: FamilyCost) -> Iterator[Guess]:
        examples = self.model.examples // recipe.mesh.group_size(recipe.data)
        layers, ways, given = self.layers, recipe.ways, "microbatches" in self.space.given
        apart, fixed = self.recipes.evaluator.apart(recipe.mesh), cost.held * self.costs.fixed(recipe)
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
                try:
                    counts = plan.order.of_stages(layers).sum(axis=1).tolist()
                except UserError:  # the layers that somebody gave are those of other stages
                    continue
                idle = (ways - 1) / (number * plan.chunks) * (0.5 if KINDS[plan.kind].split else 1.0)
                stages = of.stages(counts, apart)
                seconds = examples * (max(stages) + idle * fmean(stages)) + of.gradients / ways
                more = examples * (max(counts) + idle * fmean(counts)) * of.again
                most = max(self._flying(plan, stage) * n for stage, n in enumerate(counts))
                flying = most / plan.chunks * each
                working = max(0.0, cost.slope - layers * cost.carried) * each
                size = fixed + working + flying * cost.carried
                own = plan.order.size(layers) // ways * (plan.chunks == 1)
                yield Guess(recipe, storage, schedule, number, seconds, more, size, flying * cost.saved, own)

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

    def _chosen(self, guess: Guess) -> PricedGuess:
        """The fastest recomputation of a guess that fits, about, and is not priced yet; inf: none is."""
        ratios, tried = self.ratios[guess.key], guess.tried
        state = len(ratios), len(tried)
        if guess.chosen is not None and guess.chosen[0] == state:
            return guess.chosen[1]
        costs = guess.corrected(*(fmean(each) for each in zip(*(ratios or [(1.0, 1.0)]), strict=True)))
        near = self.limit if tried else self.limit / NEAR
        fit = (f.seconds for _, f in tried.values() if f is not None and f.peak <= self.limit)
        best, own = (math.inf, guess, NOTHING, NONE), min(fit, default=math.inf)
        for policy, share in self._policies(guess, costs):
            seconds, size = costs(share)
            if policy not in tried and size <= (near if share is ALL else self.limit):
                best = min(best, (seconds, guess, policy, share), key=lambda c: c[0])
        best = best if best[0] < own else (math.inf, *best[1:])
        guess.chosen = state, best
        return best

    def _policies(
        self, guess: Guess, costs: Callable[[RecomputedShare], tuple[float, float]]
    ) -> Iterator[tuple[Policies, RecomputedShare]]:
        loops = [self.dim] if guess.recipe.stages else self.costs.loops
        if False in self.space.recompute:
            yield NOTHING, NONE
        if True not in self.space.recompute or not loops:
            return
        yield frozenset(map(Recomputed, loops)), ALL
        for keep, share in self.costs.kinds.items():
            yield frozenset(Recomputed(name, keep) for name in loops), share
        if self.costs.counts and guess.layers > 1 and guess.saved > 0:
            size, own = costs(ALL)[1], guess.layers
            number = math.ceil(own * (1 - (self.limit - size) / guess.saved))
            tried = [(next(iter(p)).only, f) for p, (_, f) in guess.tried.items() if p and next(iter(p)).only]
            number = max([number, *(n + 1 for n, f in tried if f is not None and f.peak > self.limit)])
            if 0 < number < own:
                rest = {*map(Recomputed, loops)} - {Recomputed(self.dim)}
                yield (
                    frozenset({Recomputed(self.dim, (), number), *rest}),
                    RecomputedShare(number / own, number / own),
                )


def first_recipes(question: SearchQuestion, start: WarmStart) -> Iterator[EvaluatedLayout]:
    """Recipes before any search, each faster than the one before: of everything, and of large models, whose
    usual layouts take long to search. If only these are searched, it is where none fits by name."""
    large, very_large = (_is_large(question, share) for share in (LARGE, VERY_LARGE))
    wider = bool(question.spaces[1:])
    if question.everything or (wider and large) or (very_large and _fits_by_no_name(question, start)):
        wide = question.request.wider(question.spaces[-1]) if wider else question.request
        known = Incumbents(wide, question.renames)
        for each in priced_recipes(question, known):
            yield each
            known.add(each)


def _is_large(question: SearchQuestion, share: float) -> bool:
    """True if variables fill a share of all memory."""
    request = question.request
    size = sum(v.bytes for v in request.model.graph.variables.values())
    return size >= share * request.limit * question.shapes[0].devices


def _fits_by_no_name(question: SearchQuestion, start: WarmStart) -> bool:
    """True if no named layout fits in the smallest pieces."""
    request = start.request.like(on_better=None)  # not an answer yet
    leanest = next((each for each in start.leanest_first() if not each.refused), None)
    if leanest is None:
        return False
    named = Incumbents(request, question.renames)
    named.know(start)
    named.price_on(leanest, lean=True, clock=request.clock)
    return not named.fitting(request.limit)


def priced_recipes(question: SearchQuestion, known: Incumbents) -> Iterator[EvaluatedLayout]:
    """Recipes that are faster than what is known, each faster than the one before."""
    request, called = known.request, allow.EVERYTHING if question.spaces[1:] else ""
    allowed, mesh = request.allowed, question.shapes[0]
    if request.objective != Objective.TIME or allowed.diloco is not None or mesh.devices == 1:
        return
    low = request.evaluator.alone() / mesh.devices

    def told(number: int, count: int) -> None:
        if request.on_progress is not None:
            looked = "recipes", number, count, known.seconds(request.limit)
            request.on_progress(SearchStatus(*looked, low, space=called))

    given = () if question.renames and not allowed.named else question.shapes
    probes = Probes(Recipes(request, given, mesh.devices), request.clock.part(PROBED_SHARE))
    yield from probes.better(known.seconds(request.limit), told)
