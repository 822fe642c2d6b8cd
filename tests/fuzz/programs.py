"""Random models under random layouts: a step gives what the dense one gives.

A seed is a model: operations drawn from most of the public surface, in float64, with variables, loops,
branches, integers, and a loss of means and masked means with penalties. A pair is a model with a mesh, a
layout, and but for pair 0 storage, recomputation and microbatches. The dense run is one device of the
lockstep engine without any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from costmodels.liveness import memory
from mesh_tf_core.engines import open_engine
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.program import Loop, Program
from mesh_tf_core.lower.base import lower_base
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.placement import placement
from mesh_tf_core.lower.verify import verify

SIZES = {"batch": 8, "a": 4, "b": 4, "c": 8, "d": 4, "e": 8, "f": 4}
INPUTS = (("batch", "a"), ("batch", "b", "c"), ("batch",), ("batch", "a", "c"))
MESHES = ("x:2", "x:2", "x:4", "x:2;y:2", "x:2;y:2", "x:2;y:4")
TRIED = 12
"""Layouts that are drawn until one is legal."""


def dim(name: str) -> mtf.Dim:
    return mtf.Dim(name, SIZES[name])


class Pool:
    """A model under construction: the tensors so far, and the draws that go on with them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.g = mtf.Graph(f"random {seed}")
        self.random = False
        self.tensors = [self.g.input(f"in{i}", list(map(dim, n)), "float64") for i, n in enumerate(INPUTS)]
        self.valid = self.g.input("valid", [dim("batch"), dim("a")], "float64")
        self.ids = self.g.input("ids", [dim("batch"), dim("b")], "int32")

    def draw(self, n: int) -> int:
        return int(self.rng.integers(n))

    def pick(self) -> mtf.Tensor:
        """A tensor, rather a late one."""
        return self.tensors[-1 - self.draw(min(len(self.tensors), 5))]

    def wide(self) -> mtf.Tensor:
        """One with a dimension."""
        x = self.pick()
        return x if x.shape.size > 1 else self.tensors[self.draw(len(INPUTS))]

    def along(self) -> tuple[mtf.Tensor, mtf.Dim]:
        """A tensor and one of its dimensions, rather not the batch."""
        x = self.wide()
        wide = [d for d in x.shape if d.size > 1]
        inner = [d for d in wide if d.name != "batch"]
        dims = inner if inner and self.draw(8) else wide
        return x, dims[self.draw(len(dims))]

    def variable(self, dims: list[mtf.Dim]) -> mtf.Tensor:
        name = f"v{len(self.g.variables)}"
        return self.g.variable(name, dims, mtf.Normal(0.5), "float64")

    def free(self, x: mtf.Tensor, size: int) -> str | None:
        """A name of this size that x lacks."""
        names = [n for n, s in SIZES.items() if s == size and n not in x.shape.names and n != "batch"]
        return names[self.draw(len(names))] if names else None


Step = Callable[[Pool], mtf.Tensor]

UNARY: tuple[Callable[[mtf.Tensor], mtf.Tensor], ...] = (
    mtf.tanh,
    mtf.sigmoid,
    mtf.gelu,
    mtf.silu,
    mtf.softplus,
    mtf.sin,
    mtf.erf,
    mtf.relu,
    mtf.square,
    mtf.abs,
    lambda x: mtf.exp(mtf.clip(x, -3.0, 1.0)),
    lambda x: mtf.sqrt(mtf.abs(x) + 0.5),
    lambda x: mtf.log1p(mtf.square(x)),
    lambda x: 1.0 / (1.5 + mtf.square(x)),
    lambda x: mtf.pow(mtf.abs(x) + 0.5, 1.5),
    lambda x: mtf.leaky_relu(x) - 0.3,
    lambda x: mtf.stop_gradient(x) * x,
    lambda x: x.cast("float32").cast("float64") * 0.0 + x,
)
BINARY: tuple[Callable[[mtf.Tensor, mtf.Tensor], mtf.Tensor], ...] = (
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    lambda x, y: x / (1.0 + mtf.square(y)),
    mtf.maximum,
    mtf.minimum,
    lambda x, y: mtf.where(x > y, x * 0.5, y + 1.0),
    lambda x, y: mtf.where((x > 0.0) & (y < 0.5), x, 0.25),
)
ALONG: tuple[Callable[[mtf.Tensor, mtf.Dim], mtf.Tensor], ...] = (
    mtf.reduce_sum,
    mtf.reduce_mean,
    mtf.reduce_max,
    mtf.reduce_min,
    mtf.logsumexp,
    mtf.softmax,
    mtf.log_softmax,
    mtf.layer_norm,
    mtf.cumsum,
    lambda x, d: mtf.cumsum(x, d, exclusive=True, reverse=True),
    lambda x, d: mtf.shift(x, 1, d),
    lambda x, d: mtf.shift(x, -1, d, wrap=True),
    lambda x, d: mtf.slice_dim(mtf.concat([x, x * 0.5], d), d, 1, d.size),
    lambda x, d: mtf.slice_dim(mtf.pad(x, d, 1, 1, 0.5), d, 0, d.size),
    lambda x, d: mtf.max_pool(mtf.concat([x, x], d), [mtf.Dim(d.name, 2 * d.size)], [2]),
    lambda x, d: mtf.avg_pool(x, [d], [3], 1, "same"),
    lambda x, d: mtf.sort(x, d),
    lambda x, d: mtf.nth_smallest(x, 1, d),
    lambda x, d: mtf.masked_softmax(x, x > 0.0, d),
    lambda x, d: x * mtf.one_hot(mtf.argmax(x, d), d, "float64"),
    lambda x, d: x * mtf.one_hot(mtf.argmin(x, d), d, "float64"),
    lambda x, d: mtf.reduce_sum(mtf.top_k(x, d, mtf.Dim("best", 2))[0], "best"),
    lambda x, d: x * mtf.mtf_range(x.graph, d, "float64") * 0.2,
    lambda x, d: mtf.reduce_sum(mtf.where(x > 0.0, 1, mtf.ones(x.graph, [], "int32")), d).cast("float64"),
)


def joined(p: Pool) -> mtf.Tensor:
    x, y = p.pick(), p.pick()
    if len({*x.shape.names, *y.shape.names}) > 3:
        y = mtf.reduce_mean(y)
    return BINARY[p.draw(len(BINARY))](x, y)


def dense(p: Pool) -> mtf.Tensor:
    """A contraction with a variable."""
    x, d = p.along()
    out = p.free(x, (4, 8)[p.draw(2)])
    if d.name == "batch" or out is None:
        return x * p.variable([])
    return mtf.einsum([x, p.variable([d, dim(out)])], [*x.shape.without(d.name), dim(out)])


def contracted(p: Pool) -> mtf.Tensor:
    x, y = p.wide(), p.wide()
    dims = {d.name: d for d in (*x.shape, *y.shape)}
    kept = [d for d in dims.values() if d.name == "batch" or p.draw(2)][:3]
    return mtf.einsum([x, y], kept) * 0.3


def renamed(p: Pool) -> mtf.Tensor:
    x, d = p.along()
    name = None if d.name == "batch" else p.free(x, d.size)
    return x * 0.5 if name is None else mtf.rename(x, **{d.name: name})


def reshaped(p: Pool) -> mtf.Tensor:
    """Two dimensions as one and back, in another order."""
    x = p.wide()
    inner = [d for d in x.shape if d.name != "batch"]
    if len(inner) < 2:
        return mtf.reshape(x, [*x.shape, mtf.Dim("one", 1)]) if "one" not in x.shape.names else x * 1.5
    first, second = inner[:2]
    rest = [d for d in x.shape if d not in (first, second)]
    flat = mtf.reshape(
        mtf.transpose(x, [*rest, first, second]), [*rest, mtf.Dim("flat", first.size * second.size)]
    )
    return mtf.reshape(mtf.tanh(flat), [*rest, first, second])


def looked_up(p: Pool) -> mtf.Tensor:
    width = dim(("d", "e")[p.draw(2)])
    return mtf.gather(p.variable([mtf.Dim("table", 8), width]), p.ids, "table")


def picked(p: Pool) -> mtf.Tensor:
    x, d = p.along()
    ids = mtf.argmax(mtf.cumsum(x, d), d)
    return mtf.pick(x, ids, d) if p.draw(2) else mtf.take_along(x, ids, d)


def looped(p: Pool) -> mtf.Tensor:
    x = p.wide()
    count = mtf.Dim(f"steps{len(p.g.blocks)}", 2 + p.draw(2))
    inner = [d for d in x.shape if d.name != "batch"]
    d = inner[p.draw(len(inner))] if inner else None
    kind = p.draw(4)
    start = mtf.zeros(p.g, [], "float64")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        if d is None:
            return mtf.tanh(h * p.variable([]))
        out = mtf.Dim("wide", d.size)
        y = mtf.einsum([h, p.variable([d, out])], [*h.shape.without(d.name), out])
        return h + mtf.transpose(mtf.rename(mtf.tanh(y), wide=d.name), h.shape)

    if kind == 0:
        return mtf.scan(layer, x, count)
    if kind == 1:  # A sum over the examples is carried, too.

        def both(state: tuple[mtf.Tensor, mtf.Tensor]) -> tuple[mtf.Tensor, mtf.Tensor]:
            h = layer(state[0])
            return h, state[1] + mtf.reduce_mean(mtf.square(h)) * 0.1

        h, total = mtf.scan(both, (x, start), count)
        p.tensors.append(total)
        return h
    if kind == 2:  # What every iteration makes is kept.

        def stacked(h: mtf.Tensor) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
            y = layer(h)
            return y, [mtf.tanh(y)]

        h, (ys,) = mtf.scan(stacked, x, count)
        return h + mtf.reduce_sum(ys, count)
    return mtf.scan(
        lambda h: mtf.cond(mtf.reduce_sum(p.variable([])) > 0.0, lambda: layer(h), lambda: h), x, count
    )


def recomputable(p: Pool) -> mtf.Tensor:
    x = p.wide()
    return mtf.recomputable(lambda h: mtf.tanh(h * 1.5) * h, x, name=f"block{len(p.g.blocks)}")


def dropped(p: Pool) -> mtf.Tensor:
    p.random = True
    return mtf.dropout(p.wide(), 0.3)


STEPS: tuple[Step, ...] = (
    *[joined] * 4,
    *[dense] * 5,
    *[contracted] * 2,
    *[renamed] * 2,
    reshaped,
    looked_up,
    picked,
    *[looped] * 3,
    recomputable,
    dropped,
    *[lambda p: UNARY[p.draw(len(UNARY))](p.pick())] * 5,
    *[lambda p: ALONG[p.draw(len(ALONG))](*p.along())] * 10,
    lambda p: mtf.einsum([p.pick()], []) * 0.05,
    lambda p: mtf.broadcast(mtf.reduce_mean(p.pick()), [dim("batch"), dim("d")]),
)


def loss_of(p: Pool) -> mtf.Tensor:
    """A mean, a masked mean, or with penalties on the variables; it depends on all of them."""
    terms = []
    for t in p.tensors[-3:]:
        square = mtf.square(t) * 0.1
        if p.draw(2) and set(p.valid.shape.names) <= set(t.shape.names):
            terms.append(mtf.reduce_sum(square * p.valid) / mtf.reduce_sum(p.valid))
        elif p.draw(2) and "batch" in t.shape.names:
            weight = mtf.reduce_sum(p.valid, "a")
            each = mtf.reduce_mean(square, [n for n in t.shape.names if n != "batch"])
            terms.append(mtf.reduce_sum(each * weight) / mtf.reduce_sum(weight))
        else:
            terms.append(mtf.reduce_mean(square))
    variables = [p.g.read(v) for v in p.g.variables.values() if v.trainable]
    terms += [mtf.reduce_sum(mtf.square(v)) * 0.01 for v in variables]
    return mtf.add_n(terms) if len(terms) > 1 else terms[0]


@lru_cache(2)
def model(seed: int) -> tuple[mtf.Model, bool]:
    """The model of a seed, and whether it draws random numbers."""
    p = Pool(seed)
    p.tensors.append(dense(p))
    for _ in range(3 + p.draw(6)):
        made = STEPS[p.draw(len(STEPS))](p)
        if len(made.shape) <= 4 and made.shape.size <= 4096:
            p.tensors.append(mtf.tanh(made) if p.draw(3) == 0 else made * 0.7)
    last = mtf.reduce_mean(p.tensors[-1])
    optimizer = (mtf.SGD(0.1), mtf.Adam(0.01, epsilon=1e-2), mtf.SGD(0.1, clip_norm=1.0))[p.draw(3)]
    return mtf.Model(loss_of(p), optimizer, {"last": last, "tokens": mtf.reduce_sum(p.valid)}), p.random


def batch(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {f"in{i}": rng.normal(size=[SIZES[n] for n in d]) for i, d in enumerate(INPUTS)}
    found["valid"] = (rng.random((8, 4)) < 0.5).astype(float)
    found["valid"][: 1 + seed % 4] = 0.0
    found["ids"] = rng.integers(-1, 8, (8, 4))
    return found


def step(program: Program, seed: int, engine: str = "lockstep") -> dict[str, Any]:
    """Results of a step, and the variables after it; bytes sent and held are those of the program."""
    running = open_engine(program, engine)
    data = batch(seed)
    found = dict(
        running.step(
            {n: np.reshape(data[n], program.values[i].shape.sizes) for n, i in program.feeds.items()}
        )
    )
    branches = any(isinstance(i, Loop) and i.runs is not None for i, _ in program.walk())
    if not branches:
        assert running.communication_bytes == program.communication_bytes()
        if engine == "lockstep":
            assert running.peak_memory_bytes == memory(program).peak, "held and predicted bytes differ"
    found.update((f"variable {n}", running.read(n)) for n in program.variables)
    running.close()
    return found


def pair(seed: int, number: int) -> tuple[str, Program] | None:
    """A model under a mesh, a layout and options; None if no legal layout was found."""
    made, random = model(seed)
    rng = np.random.default_rng([seed, number])
    mesh = mtf.Mesh(MESHES[rng.integers(len(MESHES))])
    trained = [v.name for v in made.graph.variables.values() if v.trainable]
    blocks = [b.dim.name for b in made.step_graph.blocks[1:] if not b.branch]
    counts = {b.dim.name for b in made.step_graph.blocks[1:]}
    sizes = made.step_graph.dims()
    names = sorted(n for n, found in sizes.items() if n not in counts and not any(s % 2 for s in found))
    axes = [*mesh.names, "+".join(mesh.names), "+".join(reversed(mesh.names))]
    choices = [*[""] * 4, *axes]
    for _ in range(TRIED):
        plain = number == 0
        rules = ((n, choices[rng.integers(len(choices))]) for n in names)
        layout = mtf.Layout(";".join(f"{n}:{axes}" for n, axes in rules if axes))
        parts = 1 if random or plain else int(rng.choice([1, 1, 2, 4]))
        options = mtf.Options(
            {n: int(rng.integers(1, 4)) for n in trained if not plain and rng.random() < 0.3},
            frozenset(n for n in blocks if not plain and rng.random() < 0.3),
            parts,
        )
        try:
            program = made.lower(mesh, layout, options)
        except mtf.UserError:
            continue
        if plain:
            whole = made.training_step()
            base = lower_base(whole.graph, Oracle(placement(whole.graph, mesh, layout)), whole.results)
            sent, most = (sum(p.communication_bytes().values()) for p in (program, base))
            assert sent <= most, f"seed {seed}: passes send more, {sent} bytes for {most}"
        return f"seed {seed}, pair {number}: [{mesh}] [{layout}] {options}", verify(program)
    return None


@lru_cache(2)
def expected(seed: int) -> Mapping[str, Any]:
    made, _ = model(seed)
    return step(made.lower(mtf.Mesh("one:1"), mtf.Layout()), seed)


def check(seed: int, number: int, engine: str = "lockstep", tolerance: float = 1e-8) -> bool:
    """Whether there is such a pair; AssertionError if it gives something else than the dense run."""
    found = pair(seed, number)
    if found is None:
        return False
    where, program = found
    want = expected(seed)
    got = step(program, seed, engine)
    for name, value in want.items():
        if not is_float(str(np.asarray(value).dtype)):
            np.testing.assert_array_equal(got[name], value, f"{where}: {name}")
            continue
        scale = max(1.0, float(np.abs(value).max(initial=0.0)))
        error = float(np.abs(got[name] - value).max(initial=0.0))
        assert error <= tolerance * scale, f"{where}: {name} is {error:.3g} off"
    return True
