"""Looks from outside for what a proof says does not exist: random layouts and decisions, priced as
`layoutopt.cost` prices them, beside the answer of a search.

Half of the settings are drawn from the records of the kinds (`KINDS`), whatever these are; the others change
fields of `Options` and rules of layouts without asking any kind. What is faster than a proven answer and fits
must have something that the search was not allowed to choose, and the plan must name its kind
(`PlanFile.space`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import mesh_tf_core as mtf
from costmodels.hardware import Hardware
from costmodels.pricing.pricer import pricer
from examples.moe_lm import model as mixture
from examples.transformer_lm import model as transformer
from layoutopt import search
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.optimize.problems import request
from layoutopt.optimize.problems.request import Request, space_of
from layoutopt.plan.covered import CoveredSpace
from layoutopt.runtime.clock import Clock
from layoutopt.space import decisions as space
from layoutopt.space.decisions import ARGUMENTS, Decisions, SearchSpace
from layoutopt.space.kind import Decision, Target
from layoutopt.space.microbatches import Microbatches, numbers
from layoutopt.space.parallelism import looped
from layoutopt.space.recompute import COUNT, Recompute
from layoutopt.space.schedule import ScheduleDecision
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.splits import Split
from layoutopt.space.stages import StageSplit, ways
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.nodes import crossed
from mesh_tf_core.lower.options import KINDS as HOSTED
from mesh_tf_core.lower.options import OPTIMIZER, WEIGHTS
from mesh_tf_core.lower.remat_policy import SETS, Recomputed, of_stages
from mesh_tf_core.lower.storage import Stage
from mesh_tf_core.ops.context import FORMS
from mesh_tf_core.optimizers import by_name
from mesh_tf_core.tracing.graph import Graph
from tests.layoutopt.models import everything, random_model, some_choices

AGREE = 1e-9
SECONDS = 60.0
"""For one search; an answer that is not proven by then is held against its bound."""
TINY = {
    "layers": 2,
    "d_model": 8,
    "d_kv": 4,
    "heads": 2,
    "d_ff": 12,
    "vocab": 16,
    "batch": 4,
    "length": 8,
}
MESHES = ("x:4", "x:2", "x:2;y:2", "x:6", "x:3")
PROVEN = ("OPTIMAL", "INFEASIBLE")
PLAIN = SearchSpace(context=("gather",), storage=("layout",), recompute=(False,), microbatches=(1,))


@dataclass(frozen=True)
class Price:
    """A setting that was priced; `fits` leaves the limit of a device's memory out."""

    layout: Layout
    options: Options
    seconds: float
    peak: int
    fits: bool


# -- settings --


def records(target: Target, wide: SearchSpace) -> list[Decisions]:
    """The decisions of all kinds, with each number of microbatches and in each way to have stages."""
    found = []
    for number in numbers(target.model, wide.microbatches):
        for way in ways(target.model, target.mesh, wide):
            with suppress(UserError):
                found.append(record(target, number, way))
    return found


def record(target: Target, number: int, way: SearchSpace) -> Decisions:
    """The decisions of all kinds with a number of microbatches, in one of the `ways` to have stages."""
    stages = {dim: target.mesh.group_size(axes) for dim, axes in way.stages.items()}
    graph = target.model.training_step(number, stages, way.schedule[0], way.again).graph
    return space.decisions(graph, target.mesh, replace(way, microbatches=(number,)))


def _stages(target: Target, graph: Graph, rng: random.Random) -> dict[str, int | Stage]:
    trained = [v.name for v in graph.variables.values() if v.trainable and len(v.shape)]
    some = rng.sample(target.axes, rng.randint(0, len(target.axes) - 1))  # all axes are the stage itself
    over = tuple(some) or None
    return {name: Stage(rng.randint(1, 3), over) for name in trained if rng.random() < 0.5}


def _loops(target: Target, graph: Graph, rng: random.Random) -> frozenset[str]:
    dims = looped(graph)
    keep: Sequence[tuple[str, ...]] = ((), (), *SETS)
    parts = Recompute.about(graph, target.mesh, SearchSpace(recompute=("some",)))
    some = {each.subject: [*(int(c[1][len(COUNT) :]) for c in each.options if c[1:]), 0, 0] for each in parts}
    asked = (Recomputed(dim, rng.choice(keep), rng.choice(some.get(dim, [0]))) for dim in sorted(dims))
    return frozenset(str(each) for each in asked if rng.random() < 0.6)


def _hosted(target: Target, graph: Graph, rng: random.Random) -> frozenset[tuple[str, str]]:
    names = [v.name for v in graph.variables.values() if v.trainable and len(v.shape)]
    assert {OPTIMIZER, WEIGHTS} < {*HOSTED}
    return frozenset((kind, name) for kind in (OPTIMIZER, WEIGHTS) for name in names if rng.random() < 0.3)


def _forms(target: Target, graph: Graph, rng: random.Random) -> frozenset[tuple[str, str]]:
    return frozenset((dim, rng.choice([*FORMS])) for dim in crossed(graph) if rng.random() < 0.7)


def _products(target: Target, graph: Graph, rng: random.Random) -> frozenset[str]:
    # What no axis can split has no message to overlap, so that no search needs to say that it left it out.
    return frozenset(dim for dim in everything(target).collective_matmul if rng.random() < 0.4)


CHANGES: dict[str, Callable[[Target, Graph, random.Random], Any] | None] = {
    "storage": _stages,
    "recompute": _loops,
    "context": _forms,
    "offload": _hosted,
    "collective_matmul": _products,
    "microbatches": None,  # they and the schedule make the graph: `of_kinds` has drawn them
    "schedule": None,
    "diloco": None,  # another step: replicas train alone
}
"""Field of `Options` -> any value that lowering may take."""


def changed(target: Target, layout: Layout, options: Options, rng: random.Random) -> tuple[Layout, Options]:
    """The same with other values of one or two fields of the options, or other rules of the layout."""
    graph = target.model.step_of(target.mesh, layout, options).graph
    makers = [name for name, make in CHANGES.items() if make is not None]
    for name in rng.sample([*makers, "layout"], rng.choice([1, 1, 2])):
        make = CHANGES.get(name)
        if make is not None:
            options = replace(options, **{name: make(target, graph, rng)})
        else:
            dim = rng.choice(sorted(graph.dims()))
            axes = tuple(rng.sample(target.axes, rng.randint(0, len(target.axes))))
            where = rng.choice(["", "", "@elsewhere", f"@{rng.choice([n.path for n, _ in graph.walk()])}"])
            layout = layout.with_rules({f"{dim}{where}": axes})
    return layout, options


def prices(target: Target, hardware: Hardware, rng: random.Random, many: int) -> Iterator[Price]:
    """So many different settings that `cost` accepts, or fewer where it refuses most."""
    known, priced = records(target, everything(target)), pricer(hardware, target.mesh)
    seen: set[Any] = set()
    for _ in range(6 * many):
        decided = rng.choice(known)
        drawn = decided.read(some_choices(decided, rng))
        try:
            if rng.random() < 0.5:
                drawn = changed(target, *drawn, rng)
            key = drawn[0], drawn[1].key
            if key in seen:
                continue
            seen.add(key)
            of = evaluate(target.model, target.mesh, drawn[0], hardware, drawn[1], priced, check=False)
        except UserError:
            continue
        yield Price(*drawn, of.cost.step_seconds, of.memory.peak, of.beyond_hosts is None)
        many -= 1
        if not many:
            return


# -- what a search covers --


def beyond(target: Target, allowed: SearchSpace, price: Price) -> set[str]:
    """The kinds of which a setting has choices that a search was not allowed; none: it is in its space."""
    layout, options = price.layout, price.options
    stages = {dim: layout.axes(dim) for dim in target.model.stages(target.mesh, layout)}
    found = set() if options.microbatches in allowed.microbatches else {Microbatches.label}
    try:
        known = [*ways(target.model, target.mesh, allowed)]
    except UserError:
        known = []
    alike = [way for way in known if dict(way.stages) == stages]
    found |= set() if alike else {StageSplit.label}
    again = of_stages(options.recompute, stages)
    ordered = [way for way in alike if not stages or options.schedule in way.schedule]
    way = next((way for way in ordered if way.again == again), None)
    if alike and way is None:
        found.add(Recompute.label if ordered else ScheduleDecision.label)
    if found or way is None:
        return found
    way = replace(way, microbatches=(options.microbatches,))
    stages = {dim: target.mesh.group_size(axes) for dim, axes in way.stages.items()}
    graph = target.model.training_step(options.microbatches, stages, way.schedule[0], way.again).graph
    decided = space.decisions(graph, target.mesh, way)
    choices = decided.write(layout, options)
    for name, choice in choices.items():
        if choice not in decided.options[name]:
            found.add(decided.named[name].label)
    again = decided.read(
        {name: choice for name, choice in choices.items() if choice in decided.options[name]}
    )
    for kind in ALL_KINDS:
        said = kind.says
        both = [getattr(each, said.name) for each in (again[1], options)] if said and said.written else []
        if said and said.written and said.written(both[0]) != said.written(both[1]):
            found.add(kind.label)
    if (layout.rules, layout.refined) != (again[0].rules, again[0].refined):
        found.add(Split.label)
    if layout.elsewhere != again[0].elsewhere:
        found.add(Elsewhere.label)
    return found


def thin(seed: int) -> mtf.Model:
    """Layers of two products, so small that a setting is priced in 10 ms."""
    rng, g = random.Random(seed), mtf.Graph(f"thin {seed}")
    sizes = {"batch": [4, 6, 8], "d": [4, 6, 8, 16], "f": [4, 8, 12], "layers": [2, 2, 3, 4]}
    batch, d, f, layers = (mtf.Dim(name, rng.choice(some)) for name, some in sizes.items())
    alike = rng.random() < 0.5

    def layer(y: mtf.Tensor) -> mtf.Tensor:
        up, down = (
            g.variable(name, dims, mtf.Normal(0.1)) for name, dims in (("up", [f, d]), ("down", [d, f]))
        )
        return y + mtf.einsum([mtf.relu(mtf.einsum([y, up], [batch, d])), down], [batch, f])

    x = g.input("x", [batch, d], "float32")
    y = mtf.einsum([x, g.variable("in", [d, f], mtf.Normal(0.1))], [batch, f])
    y = mtf.scan(layer, y, layers) if rng.random() < 0.8 else layer(y)
    if alike:
        y = mtf.einsum([y, g.variable("out", [f, d], mtf.Normal(0.1))], [batch, d])
    optimizer = by_name(rng.choice(["sgd", "adam", "adafactor"]), 0.1, 0.0)
    return mtf.Model(mtf.reduce_mean(mtf.square(y)), optimizer, name=f"thin {seed}")


def setting(seed: int) -> tuple[mtf.Model, str]:
    """A model and a mesh; some models have attention, or experts."""
    mesh = MESHES[seed % len(MESHES)]
    if seed % 12 == 3:
        return transformer(**TINY, attention="fused", optimizer=("adam", "sgd")[seed % 4 == 1]), mesh
    if seed % 12 == 5:
        return mixture(**TINY, experts=2), mesh
    return (random_model(seed) if seed % 12 == 8 else thin(seed)), mesh


ALL_KINDS = space.KINDS
"""Of the hunt, also while a search is made to forget one."""


@dataclass
class Hunt:
    """What was seen.

    Attributes:
      prices: settings that were priced; proven: of these, beside a proven answer.
      status: what searches answered -> how often.
      outside: kind of what is faster than a proven answer, or fits where none does, as it was not looked at
        -> how often.
    """

    prices: int = 0
    proven: int = 0
    status: dict[str, int] = field(default_factory=dict)
    outside: dict[str, int] = field(default_factory=dict)

    def look(
        self,
        model: mtf.Model,
        mesh: str,
        hardware: Hardware,
        seed: int,
        many: int,
        forgets: type[Decision] | None = None,
    ) -> None:
        """Holds one search against so many prices; AssertionError where they contradict.

        Args:
          forgets: a kind of which it chooses nothing, and does not say so: a planted fault.
        """
        rng, target = random.Random(seed), Target(model, mtf.Mesh(mesh))
        target = replace(target, hosts=has_hosts(hardware))
        found = [*prices(target, hardware, rng, many)]
        if not found:
            return
        peaks = sorted({price.peak for price in found})
        limit = rng.choice([float("inf"), rng.choice(peaks), peaks[len(peaks) // 4], peaks[0], peaks[0] - 1])
        allowed = everything(target)
        if forgets is not None:
            limit = peaks[0]
            plain = {name: getattr(PLAIN, name) for name in forgets.everything(target)}
            allowed = replace(allowed, **plain)
        elif rng.random() < 0.4:
            allowed = fewer(allowed, rng)
        where = f"seed {seed}, {model.name} on {mesh}, {hardware.name}, {limit:.0f} bytes, {allowed}"
        with forgotten(forgets):
            status, bound, covered = answer(target, hardware, limit, allowed, where)
        if status not in PROVEN and forgets is None:  # there was no time for so much; of less there is
            allowed = fewer(allowed, rng)
            where = f"{where}, fewer: {allowed}"
            status, bound, covered = answer(target, hardware, limit, allowed, where)
        self.status[status] = self.status.get(status, 0) + 1
        self.proven += len(found) * (status in PROVEN)
        self.prices += len(found)
        named = {left.kind for left in covered.not_looked_at}
        for price in found:
            if not price.fits or price.peak > limit or price.seconds >= bound * (1 - AGREE):
                continue
            kinds = beyond(target, allowed, price)
            assert kinds and kinds <= named, (
                f"{where}: {status} {bound}, but {price}; outside: {kinds}, {named}"
            )
            for kind in kinds:
                self.outside[kind] = self.outside.get(kind, 0) + 1


@contextmanager
def forgotten(kind: type[Decision] | None) -> Iterator[None]:
    """What a search leaves out of one of the kinds is not said."""
    said = space.left_out
    try:
        if kind is not None:
            label = kind.label
            request.left_out = lambda *asked: [left for left in said(*asked) if left.kind != label]
        yield
    finally:
        request.left_out = said


def has_hosts(hardware: Hardware) -> bool:
    try:
        hardware.host_seconds(0.0)
    except UserError:
        return False
    return not hardware.is_host


def fewer(allowed: SearchSpace, rng: random.Random) -> SearchSpace:
    """What is plain in place of some of it."""
    names = [f.name for f in fields(SearchSpace) if getattr(allowed, f.name) != getattr(PLAIN, f.name)]
    some = rng.sample(names, rng.randint(0, len(names)))
    found = replace(allowed, **{name: getattr(PLAIN, name) for name in some})
    if not found.pipeline:
        found = replace(found, schedule=PLAIN.schedule)
    if not any(found.recompute):
        found = replace(found, offload=tuple(kind for kind in found.offload if kind in (OPTIMIZER, WEIGHTS)))
    return found


def answer(
    target: Target, hardware: Hardware, limit: float, allowed: SearchSpace, where: str
) -> tuple[str, float, CoveredSpace]:
    """The status of a search, seconds that nothing which fits is below, and what it looked at."""
    names = {*ARGUMENTS} - {"diloco"}
    asked = {name: getattr(allowed, name) for name in names}
    try:
        plan = search(
            target.model,
            target.mesh,
            hardware=hardware,
            memory=limit,
            alternatives=False,
            time_limit=SECONDS,
            **asked,
        )
    except InfeasibleError:
        asking = Request(target.model, hardware, limit, "time", allowed, 1, Clock(None), None, None)
        return "INFEASIBLE", float("inf"), space_of(asking, target.mesh, 0, None)
    except LimitError:
        return "LIMIT", 0.0, CoveredSpace(layouts=0)
    solver = plan.solver
    assert plan.predicted.peak_memory_bytes <= limit and solver.bound is not None, where
    assert plan.data.space is not None, where
    return solver.status, solver.bound, plan.data.space
