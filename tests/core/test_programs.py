"""Random models under random layouts: losses, gradients and bytes are those of the dense run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.lower.base import Lowering, lower_base
from mesh_tf_core.lower.verify import verify
from mesh_tf_core.ops.reduce import sum_to

MESH = mtf.Mesh("x:2;y:2")
AXES = ("", "", "", "", "x", "y", "y+x")
SIZES = {"a": 4, "b": 4, "c": 8, "d": 4, "e": 4, "f": 8}
INPUTS = (("a", "b"), ("b", "c"), ("a", "c"), ("b",), ("a", "b", "c"))
Step = tuple[int, int, int]
Make = Callable[["Pool", int, int], mtf.Tensor]


class Pool:
    """The tensors so far; steps pick operands by number."""

    def __init__(self) -> None:
        self.g = mtf.Graph()
        self.tensors = [
            self.g.input(f"in{i}", [mtf.Dim(n, SIZES[n]) for n in names], "float64")
            for i, names in enumerate(INPUTS)
        ]
        self.inputs = list(self.tensors)

    def pick(self, i: int) -> mtf.Tensor:
        return self.tensors[-1 - i % min(len(self.tensors), 6)]

    def dim(self, x: mtf.Tensor, i: int) -> str:
        return x.shape.names[i % len(x.shape)]


def _join(p: Pool, i: int, j: int) -> mtf.Tensor:
    x, y = p.pick(i), p.pick(j)
    return mtf.tanh(x + y) if len({*x.shape.names, *y.shape.names}) <= 3 else x - sum_to(y, x.shape) * 0.1


def _einsum(p: Pool, i: int, j: int) -> mtf.Tensor:
    x, y = p.pick(i), p.pick(j)
    names = list(dict.fromkeys((*x.shape.names, *y.shape.names)))
    kept = [n for k, n in enumerate(names) if (i + j + k) % 3][:3]
    dims = [x.shape.dim(n) if n in x.shape.names else y.shape.dim(n) for n in kept]
    return mtf.einsum([x, y], dims) * 0.3


def _rename(p: Pool, i: int, j: int) -> mtf.Tensor:
    x = p.pick(i)
    if not len(x.shape):
        return x * 0.5
    old = p.dim(x, j)
    free = [n for n, s in SIZES.items() if s == x.dim(old).size and n not in x.shape.names]
    return mtf.rename(x, **{old: free[j % len(free)]}) if free else x * 0.5


def _along(make: Callable[[mtf.Tensor, str], mtf.Tensor]) -> Make:
    def step(p: Pool, i: int, j: int) -> mtf.Tensor:
        x = p.pick(i)
        return make(x, p.dim(x, j)) if len(x.shape) else x + 1.0

    return step


def _scan(p: Pool, i: int, j: int) -> mtf.Tensor:
    x, y = p.pick(i), p.pick(j)
    kept = [n for n in y.shape.names if n in x.shape.names]

    def body(h: mtf.Tensor) -> mtf.Tensor:
        mixed = mtf.einsum([h, y], [x.shape.dim(n) for n in kept]) * 0.1
        return mtf.tanh(h + mtf.broadcast(mixed, x.shape)) + mtf.cumsum(h, x.shape.names[0]) * 0.1

    if not len(x.shape) or len({*x.shape.names, *y.shape.names}) > 4:
        return x * 2.0
    return mtf.scan(body, x, mtf.Dim(f"steps{len(p.g.blocks)}", 2))


STEPS: Sequence[Make] = (
    _join,
    _einsum,
    _einsum,
    _rename,
    _rename,
    _scan,
    lambda p, i, j: mtf.tanh(p.pick(i)),
    lambda p, i, j: p.pick(i) * (0.5 + j % 3),
    lambda p, i, j: mtf.add_n([p.pick(i), p.pick(i), sum_to(p.pick(i), p.pick(i).shape)]),
    _along(mtf.reduce_sum),
    _along(mtf.reduce_max),
    _along(mtf.softmax),
    _along(mtf.layer_norm),
    _along(lambda x, d: mtf.cumsum(x, d) * 0.2),
    _along(lambda x, d: mtf.shift(x, 1, d)),
    _along(lambda x, d: mtf.slice_dim(mtf.concat([x, x], d), d, 1, x.dim(d).size)),
    _along(lambda x, d: mtf.stop_gradient(mtf.reduce_mean(x, d))),
)


def build(steps: Sequence[Step]) -> tuple[mtf.Graph, dict[str, mtf.Tensor]]:
    pool = Pool()
    for which, i, j in steps:
        pool.tensors.append(STEPS[which % len(STEPS)](pool, i, j))
    last = pool.tensors[-3:]
    loss = mtf.add_n([mtf.reduce_sum(mtf.square(t) * 0.01) for t in last])
    found = mtf.gradients(loss, pool.inputs)
    grads = {f"grad{i}": dx for i, dx in enumerate(found) if dx is not None}
    return pool.g, {"loss": loss, "last": last[-1], **grads}


NUMBERS = st.integers(0, 30)
BATCH = {
    f"in{i}": np.random.default_rng(i).normal(size=[SIZES[n] for n in names])
    for i, names in enumerate(INPUTS)
}


def run(
    graph: mtf.Graph, results: dict[str, mtf.Tensor], mesh: mtf.Mesh, layout: mtf.Layout, recompute: bool
):  # type: ignore[no-untyped-def]
    loops = frozenset(b.dim.name for b in graph.blocks if b.dim is not None) if recompute else frozenset()
    program = verify(mtf.lower(graph, mesh, layout, results, mtf.Options(recompute=loops)))
    engine = LockstepEngine(program)
    out = engine.step(BATCH)
    assert engine.communication_bytes == program.communication_bytes()
    return out


@settings(max_examples=150)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=8),
    st.fixed_dictionaries({name: st.sampled_from(AXES) for name in SIZES}),
    st.booleans(),
)
def test_random_models(steps: list[Step], axes: dict[str, str], recompute: bool) -> None:
    graph, results = build(steps)
    present = graph.dims()
    layout = mtf.Layout(";".join(f"{n}:{a}" for n, a in axes.items() if a and n in present))
    try:
        got = run(graph, results, MESH, layout, recompute)
    except mtf.LayoutError:
        assume(False)
        return
    base = lower_base(graph, MESH, layout, results)
    passed = mtf.lower(graph, MESH, layout, results)
    assert sum(passed.communication_bytes().values()) <= sum(base.communication_bytes().values())
    want = run(graph, results, mtf.Mesh("one:1"), mtf.Layout(), False)
    for name, value in want.items():
        scale = max(1.0, float(np.abs(value).max()))
        assert np.abs(got[name] - value).max() <= 1e-9 * scale, f"{name} under [{layout}]"


def test_a_lost_maximum_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails if devices keep the maximum of their own pieces."""
    joined = Lowering.joined

    def only_sums(self: Lowering, id: int, axes: tuple[str, ...], combine: str) -> int:
        return joined(self, id, axes, combine) if combine == "sum" else id

    monkeypatch.setattr(Lowering, "joined", only_sums)
    graph, results = build([(10, 0, 0), (7, 0, 0)])
    with pytest.raises(ValueError, match="disagrees with others about its part"):
        run(graph, results, MESH, mtf.Layout("a:x"), False)
