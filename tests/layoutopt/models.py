"""Models for the tests of the search: the examples in small, and random ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import Hardware
from costmodels.pricing.pricer import pricer
from examples.mlp import model as mlp
from examples.reformer_lm import model as reformer
from examples.transformer_lm import model as transformer
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.space.allow import found
from layoutopt.space.decisions import ANYTHING, Decisions, SearchSpace, decisions
from layoutopt.space.kind import Choice, Target
from layoutopt.space.splits import domains
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.optimizers import by_name

SMALL = {
    "layers": 3,
    "d_model": 16,
    "d_kv": 4,
    "heads": 4,
    "d_ff": 32,
    "vocab": 32,
    "batch": 8,
    "length": 16,
}


def everything(target: Target) -> SearchSpace:
    """All that the records of the kinds offer for a model on a mesh."""
    return SearchSpace(**found([target], everything=True))


def branching() -> mtf.Model:
    """A branch in a loop that stops early, with products on one side only; their course depends on weights,
    which parts of a batch have in common."""
    g = mtf.Graph("branching")
    batch, d, f = mtf.Dim("batch", 8), mtf.Dim("d", 16), mtf.Dim("f", 32)
    x = g.input("x", [batch, d], "float32")
    up, down = g.variable("up", [d, f], mtf.Normal(0.1)), g.variable("down", [f, d], mtf.Normal(0.1))

    def step(h: mtf.Tensor, so_far: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
        def wide() -> mtf.Tensor:
            return h + mtf.einsum([mtf.tanh(mtf.einsum([h, up], [batch, f])), down], [batch, d])

        chosen = mtf.cond(so_far > 0.0, wide, lambda: h * 2.0)
        assert isinstance(chosen, mtf.Tensor)
        return chosen, so_far + mtf.reduce_sum(down)

    start = mtf.stop_gradient(mtf.reduce_sum(up))
    y, _ = mtf.while_loop(lambda h, so_far: so_far < 9.0, step, [x, start], 3)
    halves = mtf.concat([mtf.slice_dim(y, d, 8, 8), mtf.slice_dim(y, d, 0, 8)], d)
    return mtf.Model(mtf.reduce_mean(mtf.square(halves * x)), mtf.Adam(0.01))


def strided() -> mtf.Model:
    """Windows that leave elements out: a device needs less than its piece."""
    g = mtf.Graph("strided")
    batch, h, c, more = (mtf.Dim(n, k) for n, k in (("batch", 4), ("height", 32), ("c", 8), ("more", 32)))
    x, tap = g.input("x", [batch, h, c], "float32"), mtf.Dim("tap", 2)
    w = g.variable("w", [tap, c, more], mtf.Normal(0.1))
    y = mtf.conv(x, w, [h], [tap], c, strides=4, pads="valid")
    return mtf.Model(mtf.reduce_mean(mtf.square(y)), mtf.Adam(0.01))


def towers(dtype: str) -> mtf.Model:
    """Two encoders whose outputs are told apart: every example of a batch against every other one's pair."""
    g = mtf.Graph("towers")
    batch, d, joint = mtf.Dim("batch", 8), mtf.Dim("d", 16), mtf.Dim("joint", 8)
    other = mtf.Dim("others", batch.size)

    def tower(name: str) -> mtf.Tensor:
        x = g.input(name, [batch, d], "float32").cast(dtype)
        w = g.variable(f"{name} w", [d, joint], mtf.Normal(0.1), activation_dtype=dtype)
        z = mtf.einsum([x, w], [batch, joint])
        return z * mtf.rsqrt(mtf.reduce_sum(mtf.square(z), joint) + 1e-6)

    scale = mtf.exp(g.variable("log scale", [], mtf.Constant(2.0))).cast(dtype)
    left, right = tower("left"), mtf.rename(tower("right"), batch=other.name)
    logits = mtf.einsum([left, right], [batch, other]) * scale
    losses = [
        mtf.softmax_cross_entropy(logits, mtf.mtf_range(g, of), over)
        for of, over in ((batch, other), (other, batch))
    ]
    loss = 0.5 * mtf.add_n([mtf.reduce_mean(each) for each in losses])
    return mtf.Model(loss, mtf.Adam(0.01), name="towers")


EXAMPLES: dict[str, Callable[[], mtf.Model]] = {
    "transformer": lambda: transformer(**SMALL),
    "transformer in bfloat16": lambda: transformer(
        **SMALL, kv_heads=2, gated=True, tied=True, dtype="bfloat16", optimizer="adafactor", dropout=0.1
    ),
    "transformer with more positions": lambda: transformer(
        **SMALL, kv_heads=1, positions="24", optimizer="sgd", dropout=0.2
    ),
    "transformer with fused attention": lambda: transformer(**SMALL, attention="fused"),
    "transformer with biased fused attention in bfloat16": lambda: transformer(
        **SMALL, kv_heads=2, positions="relative", dtype="bfloat16", dropout=0.1, attention="fused"
    ),
    "mlp": lambda: mlp(batch=8, hidden=16, layers=3),
    "branching": branching,
    "mlp in bfloat16": lambda: mlp(batch=8, hidden=16, dtype="bfloat16", optimizer="sgd"),
    "loops in loops": lambda: nested(False),
    "reversible": lambda: nested(True),
    "windows": lambda: windows("float32"),
    "windows in bfloat16": lambda: windows("bfloat16"),
    "strided": strided,
    "reformer": lambda: reformer(**{**SMALL, "length": 8}, chunk=4, ff_chunks=2, dropout=0.1),
}


def crossed(columns: Sequence[object], names: Iterable[str] = EXAMPLES, every: int = 1) -> list[Any]:
    """Every model with every column; by day one of `every` models, with one of the columns in turn."""
    by_night = pytest.mark.nightly
    return [
        pytest.param(
            name, column, marks=() if row % every == 0 and row // every % len(columns) == place else by_night
        )
        for row, name in enumerate(names)
        for place, column in enumerate(columns)
    ]


def windows(dtype: str) -> mtf.Model:
    """Convolutions with strides and back, pooling, a shift, a sum over all before, along split dimensions."""
    g = mtf.Graph("windows")
    batch, h, w, c = (mtf.Dim(n, k) for n, k in (("batch", 4), ("height", 16), ("width", 8), ("c", 4)))
    taps, more = [mtf.Dim("tap_h", 3), mtf.Dim("tap_w", 3)], mtf.Dim("more", 8)
    x = g.input("x", [batch, h, w, c], "float32").cast(dtype)

    def weight(name: str, *ends: mtf.Dim) -> mtf.Tensor:
        return g.variable(name, [*taps, *ends], mtf.Normal(0.1), activation_dtype=dtype)

    y = mtf.tanh(mtf.conv(x, weight("first", c, more), [h, w], taps, c))
    y = mtf.max_pool(y, [h, w], [3, 3], 1, "same") + mtf.avg_pool(y, [h], [3], 1, "same")
    small = mtf.conv(y, weight("down", more, c), [h, w], taps, more, strides=2)
    small = mtf.shift(mtf.tanh(small), 1, h.name) + mtf.cumsum(small, small.shape.dim(h.name))
    y = mtf.conv_transpose(mtf.tanh(small), weight("up", more, c), [h, w], taps, more, strides=2)
    return mtf.Model(mtf.reduce_mean(mtf.square(mtf.tanh(y)).cast("float32")), mtf.Adam(0.01))


def nested(reverse: bool) -> mtf.Model:
    """Groups of layers, in each of which a part of the batch's positions is taken at a time: three loops, one
    inside of the other. The layers may be reversible."""
    g = mtf.Graph("nested")
    b, s, d, f = (mtf.Dim(n, k) for n, k in (("batch", 8), ("length", 4), ("d", 8), ("hidden", 16)))
    x = g.input("x", [b, s, d], "float32").cast("bfloat16")

    def weight(name: str, dims: list[mtf.Dim]) -> mtf.Tensor:
        return g.variable(name, dims, mtf.Normal(0.1), activation_dtype="bfloat16")

    def mixed(h: mtf.Tensor) -> mtf.Tensor:
        y = mtf.layer_norm(h, d, weight("norm", [d]))
        return mtf.dropout(mtf.relu(mtf.einsum([y, weight("mix", [d, f])], [b, s, f])), 0.1)

    def first(h: mtf.Tensor) -> mtf.Tensor:
        return mtf.einsum([mixed(h), weight("out", [f, d])], [b, s, d])

    def second(h: mtf.Tensor) -> mtf.Tensor:
        w, back = weight("w", [d, f]), weight("back", [f, d])

        def part(total: mtf.Tensor, y: mtf.Tensor) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
            hidden = mtf.relu(mtf.einsum([y, w], [b, f]))
            return total + mtf.reduce_sum(hidden), [mtf.einsum([hidden, back], [b, d])]

        _, (ys,) = mtf.scan(part, mtf.reduce_sum(h) * 0.0, s, [h])
        return mtf.transpose(ys, h.shape)

    def layer(state: tuple[mtf.Tensor, mtf.Tensor]) -> tuple[mtf.Tensor, mtf.Tensor]:
        y1 = state[0] + first(state[1])
        return y1, state[1] + second(y1)

    def group(h: mtf.Tensor) -> mtf.Tensor:
        layers = mtf.Dim("layers", 2)
        if reverse:
            y1, y2 = mtf.reversible_scan(first, second, h, h, layers)
        else:
            y1, y2 = mtf.scan(layer, (h, h), layers)
        return y1 + y2

    y = mtf.scan(group, x, mtf.Dim("groups", 3))
    return mtf.Model(mtf.reduce_mean(mtf.square(y.cast("float32"))), by_name("adam", 0.1), name="nested")


# -- what shares or passes on values without work --


def _passing(name: str) -> tuple[mtf.Graph, mtf.Tensor, mtf.Tensor, Callable[[mtf.Tensor], mtf.Model]]:
    """A graph, its input, a scale, and what makes a model of its output."""
    g, b, d = mtf.Graph(name), mtf.Dim("batch", 8), mtf.Dim("d", 16)
    x, s = g.input("x", [b, d], "float32"), g.variable("s", [d], mtf.ONES)
    return g, x, s, lambda y: mtf.Model(mtf.reduce_mean(mtf.square(y * s)), mtf.Adam(0.01), name=name)


def branch_that_passes_on(outside: bool) -> mtf.Model:
    """Layers with a branch that gives what it is given: the layer's state, or (`outside`) what is made of it
    before the branch. Which side runs depends on weights, which parts of a batch have in common."""
    g, x, _, done = _passing("passes on")
    b, d = x.shape.dims
    up = g.variable("up", [d, mtf.Dim("f", 32)], mtf.Normal(0.1))

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        y = mtf.einsum([mtf.tanh(mtf.einsum([h, up], [b, up.shape.dims[1]])), up], [b, d])
        yes = (lambda: y) if outside else (lambda: h * mtf.tanh(y))
        chosen = mtf.cond(mtf.reduce_sum(up) > 0.0, yes, lambda: h)
        assert isinstance(chosen, mtf.Tensor)
        return chosen

    return done(mtf.scan(layer, x, mtf.Dim("layers", 3)))


def own_gradients(count: int, looped: bool) -> mtf.Model:
    """Products with gradients of the model's own, one or two at a time, whose sums wait behind them."""
    g, x, _, done = _passing("own gradients")
    b, d = x.shape.dims
    f = mtf.Dim("f", 32)
    up, down = g.variable("up", [d, f], mtf.Normal(0.1)), g.variable("down", [f, d], mtf.Normal(0.1))

    def forward(a: mtf.Tensor, w: mtf.Tensor) -> object:
        made = [mtf.einsum([a, w], [b, f]), mtf.einsum([a, w * 2.0], [b, f])]
        return tuple(made) if count > 1 else made[0]

    def backward(dys: list[mtf.Tensor], xs: list[mtf.Tensor], ys: object) -> list[mtf.Tensor]:
        dy = mtf.add_n(dys)
        return [mtf.einsum([dy, xs[1]], [b, d]), mtf.einsum([dy, xs[0]], [d, f])]

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        made = mtf.custom_gradient(forward, backward, [h, up])
        hidden = made if isinstance(made, mtf.Tensor) else made[0] * 0.5 + made[1]
        return h + mtf.einsum([hidden, down], [b, d])

    return done(mtf.scan(layer, x, mtf.Dim("layers", 3)) if looped else layer(x))


def two_names() -> mtf.Model:
    """A kernel that reads one variable under two names."""
    _, x, s, done = _passing("two names")
    twice = mtf.custom_gradient(lambda a: a * 2.0, lambda dys, xs, ys: [mtf.reduce_sum(x, "batch")], [s])
    assert isinstance(twice, mtf.Tensor)
    return done(x * twice)


def made_before_layers() -> mtf.Model:
    """Layers that share what is made of a variable before them: in microbatches its gradient leaves two loops
    before backward goes on."""
    g, x, _, done = _passing("made before layers")
    table = mtf.tanh(g.variable("table", [x.shape.dims[1]], mtf.Normal(0.1)))
    return done(mtf.scan(lambda h: h + mtf.tanh(h + table), x, mtf.Dim("layers", 3)))


PASSING: dict[str, Callable[[], mtf.Model]] = {
    "a branch that gives the state": lambda: branch_that_passes_on(False),
    "a branch that gives what is outside": lambda: branch_that_passes_on(True),
    "an own gradient": lambda: own_gradients(1, False),
    "own gradients in layers": lambda: own_gradients(1, True),
    "two own gradients": lambda: own_gradients(2, True),
    "two names": two_names,
    "made before layers": made_before_layers,
}


HARDWARE = ("tpu-v3", "a100", "h100", "cpu-local", "tpu-v5e")


def some_choices(decided: Decisions, rng: random.Random) -> dict[str, Choice]:
    """Random choices, legal or not; half of them plain."""
    return {n: rng.choice(o) if rng.random() < 0.5 else o[0] for n, o in decided.options.items()}


# -- random models --


def random_model(seed: int) -> mtf.Model:
    """A chain of a few random operations on two or three dimensions, sometimes with a loop."""
    rng = random.Random(seed)
    g = mtf.Graph(f"random {seed}")
    dtype = rng.choice(["float32", "float32", "bfloat16"])
    b = mtf.Dim("batch", rng.choice([4, 8]))
    spare = [mtf.Dim(n, rng.choice([2, 4, 6, 8, 32])) for n in "abcd"]
    x = g.input("x", [b, *([mtf.Dim("length", 4)] if rng.random() < 0.4 else []), spare[0]], "float32")
    x = x.cast(dtype)
    made = itertools.count()

    def weight(dims: list[mtf.Dim]) -> mtf.Tensor:
        return g.variable(f"w{next(made)}", dims, mtf.Normal(0.1), activation_dtype=dtype)

    def linear(x: mtf.Tensor, to: mtf.Dim) -> mtf.Tensor:
        here = x.shape.dims[-1]
        if here == to:
            return x + mtf.einsum([x, weight([to])], x.shape.dims)
        return mtf.einsum([x, weight([here, to])], [*x.shape.dims[:-1], to])

    def step(x: mtf.Tensor) -> mtf.Tensor:
        kind = rng.choice(["linear", "linear", "bias", "norm", "softmax", "unary", "twice"])
        last = x.shape.dims[-1]
        if kind == "linear":
            return linear(x, rng.choice(spare))
        if kind == "bias":
            return x + weight([last])
        if kind == "norm":
            return mtf.layer_norm(x, last, weight([last]))
        if kind == "softmax":
            return mtf.softmax(x, last)
        if kind == "unary":
            return rng.choice([mtf.relu, mtf.gelu, mtf.tanh])(x) * 0.5
        other = rng.choice(spare)
        w = weight([last] if last == other else [last, other])
        y = mtf.relu(mtf.einsum([x, w], [*x.shape.dims[:-1], other]))
        return y if last == other else mtf.einsum([y, w], x.shape.dims)

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        here, inner = x.shape.dims[-1], rng.choice([d for d in spare if d != x.shape.dims[-1]])
        hidden = mtf.relu(linear(mtf.layer_norm(x, here, weight([here])), inner))
        return x + linear(hidden, here)

    x = linear(x, rng.choice(spare))
    for _ in range(rng.randint(0, 2)):
        x = step(x)
    if rng.random() < 0.5:
        x = mtf.scan(layer, x, mtf.Dim("layers", rng.choice([2, 3])))
    for _ in range(rng.randint(0, 2)):
        x = step(x)
    last = x.shape.dims[-1]
    if rng.random() < 0.5:
        labels = g.input("labels", x.shape.dims[:-1])
        loss = mtf.reduce_mean(mtf.softmax_cross_entropy(x, labels, last))
    else:
        loss = mtf.reduce_mean(mtf.square(x.cast("float32")))
    optimizer = by_name(rng.choice(["sgd", "adam", "adafactor"]), 0.1, rng.choice([0.0, 1.0]))
    return mtf.Model(loss, optimizer, name=f"random {seed}")


@dataclass(frozen=True)
class Question:
    """What a search may choose, few enough to try all of it."""

    mesh: mtf.Mesh
    storage: tuple[str, ...]
    recompute: tuple[bool, ...]
    microbatches: tuple[int, ...]
    pins: dict[str, Axes]

    def decided(self, model: mtf.Model) -> Iterator[Decisions]:
        for parts in self.microbatches:
            graph = model.training_step(parts).graph
            yield decisions(
                graph,
                self.mesh,
                SearchSpace(
                    pins=self.pins, storage=self.storage, recompute=self.recompute, microbatches=(parts,)
                ),
            )


def random_question(model: mtf.Model, seed: int, most: int) -> Question:
    """A question about a model: dimensions are pinned until there are at most about `most` combinations."""
    rng = random.Random(seed)
    found = Question(
        mtf.Mesh(rng.choice(["x:2;y:2", "x:2;y:2", "x:4", "x:2"])),
        rng.choice([("layout",), ("layout", "zero3"), ("layout", "zero1"), ("layout", "zero2"), ("zero3",)]),
        rng.choice([(False,), (False, True), (True,)]),
        rng.choice([(1,), (1, 2), (2,)]),
        {},
    )
    free = sorted(d for d in model.graph.dims() if d != "layers")
    rng.shuffle(free)

    def count() -> int:
        return sum(math.prod(map(len, d.options.values())) for d in found.decided(model))

    while free and count() > most:
        name = free.pop()
        options = domains(model.training_step(max(found.microbatches)).graph, found.mesh, ANYTHING)[name]
        found.pins[name] = rng.choice(options) if rng.random() < 0.3 else ()
    if count() > most:
        found = replace(found, storage=found.storage[-1:])
    return found


@dataclass(frozen=True)
class Point:
    seconds: float
    peak: int


def all_points(model: mtf.Model, question: Question, hardware: Hardware) -> list[Point]:
    """The evaluator's answer about every legal combination."""
    prices = pricer(hardware, question.mesh)
    points = []
    for decided in question.decided(model):
        for picked in itertools.product(*decided.options.values()):
            layout, options = decided.read(dict(zip(decided.options, picked, strict=True)))
            try:
                found = evaluate(model, question.mesh, layout, hardware, options, prices)
            except mtf.LayoutError:
                continue
            points.append(Point(found.cost.step_seconds, found.memory.peak))
    return points
