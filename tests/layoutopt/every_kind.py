"""Random small models, machines and questions in which every kind of decision is free at once.

`OPENED` says for each of `KINDS` what to allow so that it is decided; a kind without a row fails every test
that asks for a question, on its first day.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware, with_settings
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.bounds import ProvenBounds
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblems import Subproblem, SubproblemKey, subproblems
from layoutopt.runtime.clock import UNLIMITED
from layoutopt.space.collective_matmul import CollectiveMatmul
from layoutopt.space.context import Context
from layoutopt.space.decisions import KINDS, Decisions, SearchSpace
from layoutopt.space.diloco import Rarely
from layoutopt.space.kind import ALL, CLASS, HYBRID, VARIABLE, Choice, Decision
from layoutopt.space.microbatches import Microbatches
from layoutopt.space.offload import OptimizerOffload, Weights
from layoutopt.space.recompute import Recompute
from layoutopt.space.restriction import EVERYTHING, Coupling, DecisionRelation, DimRoles, Restriction
from layoutopt.space.schedule import ScheduleDecision
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.splits import Split
from layoutopt.space.stages import StageSplit
from layoutopt.space.storage import Storage
from mesh_tf_core.ir.instructions import HOST
from mesh_tf_core.ir.schedules import GPIPE, ONE_WAY
from mesh_tf_core.lower.storage import STAGES
from mesh_tf_core.optimizers import by_name

PIPED = [s for s in ONE_WAY if s != GPIPE]
MACHINES = ("tpu-v3", "a100-eager", "h100", "tpu-v4", "tpu-v5e")
Kinds = tuple[type[Decision], ...]


def whole_model(seed: int, times: int = 1) -> mtf.Model:
    """A model about which every kind has something to decide: layers of attention, products and a few random
    operations, and an optimizer that keeps state; `times` as wide."""
    rng = random.Random(seed)
    g = mtf.Graph(f"whole {seed}")
    dtype = rng.choice(["float32", "float32", "bfloat16"])
    b, s, d = mtf.Dim("batch", 4), mtf.Dim("length", 4), mtf.Dim("d", times * rng.choice([4, 8, 32]))
    f, keys = mtf.Dim("f", times * rng.choice([4, 8, 16, 64])), mtf.Dim("keys", s.size)
    made, causal, first, wide = itertools.count(), *(rng.random() < p for p in (0.5, 0.3, 0.6))
    heads = [mtf.Dim("heads", 2)] if rng.random() < 0.4 else []
    extra = [rng.choice(["bias", "norm", "unary", "softmax", *["none"] * 6]) for _ in range(3)]
    x = g.input("x", [b, s, d], "float32").cast(dtype)
    projected = {4: "values", 9: "none"}.get(seed % 10, "all")

    def weight(*dims: mtf.Dim) -> mtf.Tensor:
        return g.variable(f"w{next(made)}", [*dims], mtf.Normal(0.1), activation_dtype=dtype)

    def some(kind: str, x: mtf.Tensor) -> mtf.Tensor:
        if kind == "bias":
            return x + weight(d)
        if kind == "norm":
            return mtf.layer_norm(x, d, weight(d))
        if kind == "softmax":
            return mtf.softmax(x, d)
        return mtf.tanh(x) * 0.5 if kind == "unary" else x

    def renamed(x: mtf.Tensor) -> mtf.Tensor:
        """Attention to the tensor itself under another name; of its values, perhaps, a product."""
        key = mtf.rename(x, length=keys.name)
        value = key
        if projected == "values":
            value = mtf.rename(mtf.einsum([x, weight(d)], [b, s, d]), length=keys.name)
        return x + mtf.attention(x, key, value, s, keys, d, causal=causal)

    def attention(x: mtf.Tensor) -> mtf.Tensor:
        kv = mtf.Dim("kv", 4)
        q = mtf.einsum([x, weight(d, *heads, kv)], [b, s, *heads, kv])
        k = mtf.einsum([mtf.rename(x, length=keys.name), weight(d, *heads, kv)], [b, keys, *heads, kv])
        done = mtf.attention(q, k, k, s, keys, kv, causal=causal)
        return x + mtf.einsum([done, weight(*heads, kv, d)], [b, s, d])

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        y = some(extra[0], attention(x) if projected == "all" else renamed(x))
        hidden = mtf.relu(mtf.einsum([some(extra[1], y), weight(d, f)], [b, s, f]))
        return y + mtf.einsum([hidden, weight(f, d)], [b, s, d]) if wide else y + mtf.reduce_sum(hidden, f)

    x = mtf.einsum([x, weight(d)], [b, s, d]) if first else x
    x = some(extra[2], mtf.scan(layer, x, mtf.Dim("layers", 4)))
    clip = rng.choice([0.0, 0.0, 1.0])
    optimizer = rng.choice(
        [
            *[mtf.SGD(0.1, momentum=0.9, clip_norm=clip)] * 6,
            *[mtf.Adam(0.1, clip_norm=clip)] * 3,
            by_name("adafactor", 0.1),
        ]
    )
    return mtf.Model(mtf.reduce_mean(mtf.square(x.cast("float32"))), optimizer, name=f"whole {seed}")


Opens = Callable[[random.Random, mtf.Model], Mapping[str, Any]]
OPENED: dict[type[Decision], Opens] = {
    Split: lambda rng, _: {"orders": rng.choice(["mesh", "mesh", "all"])},
    StageSplit: lambda *_: {"pipeline": ("layers",)},
    ScheduleDecision: lambda rng, _: {"schedule": ("gpipe", *rng.sample(PIPED, rng.choice([1, 2])))},
    Elsewhere: lambda rng, _: {"elsewhere": (rng.choice(["length", "length", "d", "batch"]),)},
    Storage: lambda rng, _: {
        "storage": ("layout", *rng.sample([*STAGES[1:], "zero3@x", HYBRID], rng.choice([1, 2])))
    },
    OptimizerOffload: lambda *_: {"offload": ("optimizer", "weights", "activations")},
    Weights: lambda *_: {"offload": ("optimizer", "weights", "activations")},
    Recompute: lambda rng, _: {
        "recompute": rng.choice([(False, True), (False, "selective", True), (True, "selective", False)])
    },
    Context: lambda rng, _: {
        "context": ("gather", *rng.sample(["ring", "zigzag", "all_to_all"], rng.choice([1, 2])))
    },
    CollectiveMatmul: lambda rng, _: {"collective_matmul": rng.choice([("f",), ("d",), ("f", "d")])},
    Microbatches: lambda rng, _: {"microbatches": rng.choice([(1, 2), (1, 2), (2, 4)])},
    Rarely: lambda rng, model: {
        "diloco": mtf.DiLoCo("sites", rng.choice([2, 4]), fragments=_fragments(rng.choice([1, 2]), model))
    },
}
"""What to allow so that a kind is decided."""
APART = (Rarely,)
"""Those that are asked for in one question of `RARE`: replicas have no stages, and nothing on the hosts."""
OF_PROBLEMS = (StageSplit, ScheduleDecision, Microbatches)
"""Those with one option in each problem."""
RARE = 6


def _fragments(wanted: int, model: mtf.Model) -> int:
    """So many, or one where they do not divide the layers of a stack."""
    layers = (v.shape.sizes[0] for v in model.graph.variables.values() if v.stacked)
    return 1 if any(n >= wanted and n % wanted for n in layers) else wanted


def opened(rng: random.Random, model: mtf.Model, rarely: bool = False) -> SearchSpace:
    """Everything of every kind; DiLoCo replicas are a search of their own."""
    said: dict[str, Any] = {}
    for kind in KINDS:
        its = OPENED[kind](rng, model)
        said |= its if rarely or kind not in APART else {}
    if rarely:  # replicas have no stages, and nothing on the hosts
        said |= {"offload": (), "pipeline": (), "schedule": ("gpipe",)}
    return SearchSpace(**said)


@dataclass(frozen=True)
class Whole:
    """A question about a model: some options of every kind, few enough to try all of them.

    Attributes:
      allowed: what they are of.
    """

    model: mtf.Model
    mesh: mtf.Mesh
    hardware: Hardware
    allowed: SearchSpace
    problems: tuple[Subproblem, ...]

    @property
    def count(self) -> int:
        """How many combinations there are, legal or not."""
        return sum(math.prod(map(len, each.decided.options.values())) for each in self.problems)

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.model, self.hardware)

    def request(self, limit: float, objective: str = "time") -> Request:
        """The question under a memory limit; its layouts are evaluated once, whatever is asked."""
        found = Request(self.model, self.hardware, limit, objective, self.allowed, 1, UNLIMITED, None, None)
        vars(found)["evaluator"] = self.evaluator
        return found

    def chosen(self) -> Iterator[tuple[Subproblem, dict[str, Choice]]]:
        """All combinations."""
        for each in self.problems:
            for picked in itertools.product(*each.decided.options.values()):
                chosen = dict(zip(each.decided.options, picked, strict=True))
                if all(coupling.allows(chosen) for coupling in each.decided.couplings):
                    yield each, chosen

    def evaluated(self) -> Iterator[Evaluation]:
        """Every legal layout, as the evaluator sees it; what the hosts have no room for is none."""
        for each, chosen in self.chosen():
            try:
                found = self.evaluator(self.mesh, *each.decided.read(chosen))
            except mtf.LayoutError:
                continue
            if found.beyond_hosts is None:
                yield found

    @property
    def free(self) -> set[type[Decision]]:
        """The kinds of which more than one option is left, in one problem or over all of them; and those that
        are a search of their own, if this is one."""
        every = [d for each in self.problems for d in each.decided.every]
        found = {type(d) for d in every if len(d.options) > 1 or isinstance(d, APART)}
        for kind in KINDS:
            options = {
                tuple(d.options for d in each.decided.every if type(d) is kind) for each in self.problems
            }
            if len(options) > 1:
                found.add(kind)
        return found

    def taken(self, layout: mtf.Layout, options: mtf.Options) -> set[type[Decision]]:
        """The kinds that are free and of which a layout and options have something that is not plain."""
        for each in self.problems:
            choices = each.decided.write(layout, options)
            if all(choice in each.decided.options[name] for name, choice in choices.items()):
                plain = self.problems[0].decided.options
                return self.free & {
                    type(each.decided.named[name])
                    for name, choice in choices.items()
                    if (choice and choice != plain.get(name, ((),))[0])
                    or isinstance(each.decided.named[name], APART)
                }
        raise AssertionError(f"{layout}, {options}: in none of the problems")


@dataclass(frozen=True)
class Random(DecisionRelation):
    """Random combinations of options of random pairs of decisions, whatever their kinds."""

    seed: int

    def couplings(self, every: Mapping[str, Decision], roles: DimRoles, mesh: mtf.Mesh) -> Iterator[Coupling]:
        rng = random.Random(self.seed)
        free = [d for d in every.values() if len(d.options) > 1]
        for _ in range(3 if len(free) > 1 else 0):
            pair = rng.sample(free, 2)
            plain, *rows = itertools.product(*(d.options for d in pair))
            yield Coupling(
                tuple(d.name for d in pair), frozenset((plain, *(row for row in rows if rng.random() < 0.6)))
            )


def some_restriction(rng: random.Random) -> Restriction:
    """A random granularity of each field that has some, and random relations."""
    fields = dict.fromkeys(kind.granular for kind in KINDS if kind.granular)
    granularity = {name: rng.choice([ALL, ALL, CLASS, VARIABLE]) for name in fields}
    return Restriction("random", relations=(Random(rng.randrange(99)),), granularity=granularity)


def whole_question(
    seed: int, most: int, rarely: bool = False, restriction: Restriction = EVERYTHING
) -> Whole:
    """A random model and question with at most `most` combinations: options leave at random, but the last two
    of a kind stay as long as others have more."""
    rng, model = random.Random(seed), whole_model(seed)
    mesh = mtf.Mesh(rng.choice(["x:2;y:2", "x:2;y:2", "x:4", "x:2"]) + (";sites:2" if rarely else ""))
    hardware = some_machine(rng)
    allowed = replace(opened(rng, model, rarely), restriction=restriction.of(model))
    evaluator = Evaluator(model, hardware)
    found = [each for each in subproblems(model, [mesh], allowed, evaluator.near) if not each.refused]
    found = _some(found, rng)
    options: dict[str, list[Choice]] = {}
    kinds: dict[str, type[Decision]] = {}
    for each in found:
        for d in each.decided.every:
            kinds[d.name] = type(d)
            known = options.setdefault(d.name, [])
            known += [o for o in d.options if o not in known]

    def whole() -> Whole:
        return Whole(model, mesh, hardware, allowed, tuple(_left(each, options) for each in found))

    question = whole()
    while question.count > most:
        spare = [n for n, left in options.items() if len(left) > 1]
        of = {k: sum(kinds[n] is k for n in spare) for k in KINDS}
        spare = [n for n in spare if len(options[n]) > 2 or of[kinds[n]] > 1] or spare
        name = rng.choice(spare)
        left = options[name]
        plain = left[:1] if rng.random() < (0.9 if kinds[name] is Split else 0.7) else []
        gone = rng.choice([o for o in left if o not in plain])
        options[name] = [o for o in left if o != gone]
        question = whole()
    return replace(question, problems=tuple(_related(question.problems)))


def alone(kind: type[Decision], seed: int) -> Whole | None:
    """A question with all options of one kind, and one of each other decision, so that some layout is legal;
    None if nothing is left to decide or legal."""
    rng, model = random.Random(seed), whole_model(seed)
    mesh = mtf.Mesh(rng.choice(["x:4", "x:2"]) + (";sites:2" if kind in APART else ""))
    hardware, allowed = some_machine(rng), opened(rng, model, kind in APART)
    evaluator = Evaluator(model, hardware)
    each = next(subproblems(model, [mesh], allowed, evaluator.near))
    own, every = each.decided.of(kind), each.decided.options
    for _ in range(20 if any(len(every[name]) > 1 for name in own) else 0):
        others = {
            n: [o[0] if rng.random() < 0.5 else rng.choice(o)] for n, o in every.items() if n not in own
        }
        found = Subproblem.of(each.mesh, each.decided.within(others))
        with suppress(mtf.LayoutError):
            evaluator(mesh, *found.decided.read({name: rng.choice(every[name]) for name in own}))
            return Whole(model, mesh, hardware, allowed, (found,))
    return None


def forgotten(problems: Sequence[Subproblem], kind: type[Decision] | None) -> list[Subproblem]:
    """What is left of problems where a kind has its first option alone; replicas are not even known."""

    def plain(decided: Decisions) -> Decisions:
        if kind in APART:
            return Decisions(tuple(d for d in decided.every if type(d) is not kind))
        return decided.within({d.name: d.options[:1] for d in decided.every if type(d) is kind})

    def own(decided: Decisions) -> list[Decision]:
        return [d for d in plain(decided).every if type(d) is kind]

    known = own(problems[0].decided)
    alike = (each for each in problems if kind not in OF_PROBLEMS or own(each.decided) == known)
    return [Subproblem.of(each.mesh, plain(each.decided)) for each in alike]


def question_of(seed: int, most: int = 64) -> Whole:
    """The random question of a number; replicas meet rarely in one of `RARE`."""
    return whole_question(seed, most, rarely=seed % RARE == RARE - 1)


def waits(evaluation: Evaluation) -> bool:
    """Whether a step waits for the host link beside loops."""
    return any(x.exposed for x in evaluation.cost.lines if x.axes == (HOST,))


def _left(each: Subproblem, options: Mapping[str, list[Choice]]) -> Subproblem:
    """A problem with what is left of its options; where that is none of them, with its first."""
    decided = each.decided
    left = {
        n: tuple(o for o in found if o in options[n]) or found[:1] for n, found in decided.options.items()
    }
    return replace(each, given=decided.within(left), bounds=ProvenBounds(), fewer=())


def _related(problems: Sequence[Subproblem]) -> Iterator[Subproblem]:
    """Those whose options are also options with fewer microbatches, as in every search: these bound them."""
    known: list[Subproblem] = []

    def place(of: Subproblem) -> SubproblemKey:
        return of.key._replace(microbatches=0)

    for each in problems:
        own = {d.name: {*d.options} for d in each.decided.every if not isinstance(d, Microbatches)}
        fewer = (other.decided.options for other in known if place(other) == place(each))
        if all(own[name] <= {*options[name]} for options in fewer for name in own.keys() & options.keys()):
            known.append(each)
            yield each


def _some(found: list[Subproblem], rng: random.Random) -> list[Subproblem]:
    """A few of the problems: without stages, of one or two numbers of microbatches, and mostly one with
    stages."""
    plain = [each for each in found if not each.decided.stages]
    staged = [each for each in found if each.decided.stages]
    many = rng.choice([1, 1, 2])
    return plain[:many] + rng.sample(staged, min(rng.choice([0, 1, 1]), len(staged)))


def some_machine(rng: random.Random) -> Hardware:
    """With hosts, and links to them, so that what lies there has a price."""
    name = rng.choice(MACHINES)
    known = load_hardware(name)
    return known if known.host_memory_bytes else load_hardware(with_settings(name, ["host_memory=64GB"]))
