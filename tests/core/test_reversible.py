"""Reversible loops: the gradients of the plain loop, with memory that does not grow with depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.liveness import memory
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.lower.verify import verify

B, S, D, F = mtf.Dim("batch", 4), mtf.Dim("length", 4), mtf.Dim("d", 8), mtf.Dim("hidden", 16)
LAYOUTS = [
    ("one:1", ""),
    ("x:2;y:2", "batch:x;hidden:y"),
    ("x:2;y:2", "batch:x+y"),
    ("x:2;y:2", "d:x;batch:y"),
    ("x:4", "hidden:x"),
]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 4, 8))


def weight(g: mtf.Graph, name: str, dims: list[mtf.Dim]) -> mtf.Tensor:
    return g.variable(name, dims, mtf.Normal(0.3), "float64")


def mixed(h: mtf.Tensor, extra: mtf.Tensor, scale: mtf.Tensor) -> mtf.Tensor:
    """Reads the layer's variables, a tensor from outside, and the iteration's part of a stack."""
    g = h.graph
    with g.scope("mixed"):
        y = mtf.einsum([mtf.layer_norm(h, D, weight(g, "norm", [D])), weight(g, "w", [D, F])], [B, S, F])
        y = mtf.einsum([mtf.dropout(mtf.tanh(y), 0.3), weight(g, "o", [D, F])], [B, S, D])
        return y * scale + extra


def chunked(h: mtf.Tensor, extra: mtf.Tensor) -> mtf.Tensor:
    """A loop inside, with dropout and with variables from around it."""
    g = h.graph
    with g.scope("chunked"):
        w, o = weight(g, "w", [D, F]), weight(g, "o", [F, D])

        def part(total: mtf.Tensor, x: mtf.Tensor) -> Any:
            y = mtf.dropout(mtf.einsum([mtf.tanh(mtf.einsum([x, w], [B, F])), o], [B, D]), 0.2)
            return total + mtf.reduce_sum(y, D), [y]

        zero = mtf.reduce_sum(extra, [S, D]) * 0.0
        total, (ys,) = mtf.scan(part, zero, S, [h])
        return mtf.transpose(ys, [B, S, D]) + total * 0.01


def built(reverse: bool) -> tuple[mtf.Model, dict[str, mtf.Tensor]]:
    """A model, and all that its loop gives: values and gradients."""
    g, layers = mtf.Graph(), mtf.Dim("layers", 3)
    x, scales = g.input("x", [B, S, D], "float64"), weight(g, "scales", [D, layers])
    extra = mtf.einsum([x, weight(g, "outside", [D])], [B, S, D])

    def f(x2: mtf.Tensor, scale: mtf.Tensor) -> mtf.Tensor:
        return mixed(x2, extra, scale)

    def half(y1: mtf.Tensor, scale: mtf.Tensor) -> mtf.Tensor:
        return chunked(y1, extra)

    def plain(state: tuple[mtf.Tensor, mtf.Tensor], scale: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
        y1 = state[0] + f(state[1], scale)
        return y1, state[1] + half(y1, scale)

    if reverse:
        y1, y2 = mtf.reversible_scan(f, half, x, extra * 2.0, layers, [scales])
    else:
        y1, y2 = mtf.scan(plain, (x, extra * 2.0), layers, [scales])
    loss = mtf.reduce_sum(mtf.square(y1)) * 0.1 + mtf.reduce_sum(mtf.sin(y2))
    trained = {n: g.read(v) for n, v in g.variables.items() if v.trainable}
    assert len(trained) == 7
    found = mtf.gradients(loss, [x, *trained.values()])
    results = {f"d {n}": t for n, t in zip(["x", *trained], found, strict=True) if t is not None}
    assert len(results) == 8
    return mtf.Model(loss, mtf.SGD(0.1)), {"y1": y1, "y2": y2, **results}


def same(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert np.abs(value).max() > 1e-3 or name == "step", name
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("recompute", [frozenset(), frozenset({"length"})])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
@pytest.mark.one_in(3)
def test_gradients_are_those_of_the_plain_loop(mesh: str, layout: str, recompute: frozenset[str]) -> None:
    """Also with dropout in both halves, and where a loop in a half runs again once more."""

    def run(reverse: bool, mesh: str, layout: str, options: mtf.Options) -> Any:
        model, results = built(reverse)
        program = verify(mtf.lower(model.graph, mtf.Mesh(mesh), mtf.Layout(layout), results, options))
        return LockstepEngine(program).step({"x": X})

    same(run(True, mesh, layout, mtf.Options(recompute=recompute)), run(False, "one:1", "", mtf.Options()))


def trained(reverse: bool, layout: int, **options: Any) -> dict[str, Any]:
    """The variables after two steps."""
    mesh, rules = LAYOUTS[layout]
    program = verify(built(reverse)[0].lower(mtf.Mesh(mesh), mtf.Layout(rules), mtf.Options(**options)))
    engine = LockstepEngine(program)
    for _ in range(2):
        engine.step({"x": X.reshape(program.values[program.feeds["x"]].shape.sizes)})
        assert engine.communication_bytes == program.communication_bytes()
    return {name: engine.read(name) for name in program.variables}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_storage(stage: int) -> None:
    names = [v.name for v in built(True)[0].graph.variables.values() if v.trainable]
    same(trained(True, 1, storage=dict.fromkeys(names, stage)), trained(False, 0))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("at", [1, 4])
def test_microbatches(at: int) -> None:
    same(trained(True, at, microbatches=2), trained(False, 0, microbatches=2))


def test_inside_of_another_loop() -> None:
    """The loop around saves what the reversible one begins with: its results."""

    def run(scan: Callable[..., Any]) -> Any:
        g = mtf.Graph()
        x = g.input("x", [B, S, D], "float64")

        def outer(h: mtf.Tensor) -> mtf.Tensor:
            other = mtf.sin(h)
            bias = weight(g, "bias", [D])
            scale = bias + 1.0

            def f(x2: mtf.Tensor) -> mtf.Tensor:
                return mixed(x2, other, scale)

            def half(y1: mtf.Tensor) -> mtf.Tensor:
                with g.scope("second"):
                    return mixed(y1, bias, mtf.cos(scale))

            y1, y2 = scan(f, half, h, other, mtf.Dim("layers", 2))
            return y1 * 0.5 + y2

        y = mtf.scan(outer, x, mtf.Dim("groups", 3))
        loss = mtf.reduce_sum(mtf.square(y))
        wrt = {n: g.read(v) for n, v in g.variables.items() if v.trainable}
        found = mtf.gradients(loss, [x, *wrt.values()])
        results = {n: t for n, t in zip(["x", *wrt], found, strict=True) if t is not None}
        assert len(results) == 8
        layout = mtf.Layout("batch:x;hidden:y")
        program = verify(mtf.lower(g, mtf.Mesh("x:2;y:2"), layout, {**results, "y": y}))
        return LockstepEngine(program).step({"x": X})

    def plain(f: Any, half: Any, x1: mtf.Tensor, x2: mtf.Tensor, dim: mtf.Dim) -> Any:
        def layer(state: tuple[mtf.Tensor, mtf.Tensor]) -> tuple[mtf.Tensor, mtf.Tensor]:
            y1 = state[0] + f(state[1])
            return y1, state[1] + half(y1)

        return mtf.scan(layer, (x1, x2), dim)

    same(run(mtf.reversible_scan), run(plain))


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_alone(used: int) -> None:
    g = mtf.Graph()
    x, layers = g.input("x", [D], "float64"), mtf.Dim("layers", 2)
    pair = mtf.reversible_scan(mtf.sin, lambda y: mtf.square(y) * 0.1, x, x * 2.0, layers)
    state: Any = (x, x * 2.0)
    for _ in range(2):
        y1 = state[0] + mtf.sin(state[1])
        state = y1, state[1] + mtf.square(y1) * 0.1
    (got,) = mtf.gradients(mtf.reduce_sum(pair[used]), [x])
    (want,) = mtf.gradients(mtf.reduce_sum(state[used]), [x])
    assert got is not None and want is not None
    program = verify(mtf.lower(g, mtf.Mesh("m:1"), mtf.Layout(""), {"got": got, "want": want}))
    out = LockstepEngine(program).step({"x": X[0, 0]})
    np.testing.assert_allclose(out["got"], out["want"], rtol=1e-12)


def peak(layers: int, reverse: bool, recompute: frozenset[str] = frozenset()) -> int:
    """Peak memory of a training step, less the stacked variables and their gradients."""
    g, dim = mtf.Graph(), mtf.Dim("layers", layers)
    x = g.input("x", [mtf.Dim("batch", 512), D], "float32")

    def layer(name: str) -> Callable[[mtf.Tensor], mtf.Tensor]:
        def half(h: mtf.Tensor) -> mtf.Tensor:
            w = g.variable(f"{name}_in", [D, F], mtf.Normal(0.1))
            y = mtf.relu(mtf.einsum([h, w], [*h.shape.dims[:-1], F]))
            return mtf.einsum([y, g.variable(f"{name}_out", [F, D], mtf.Normal(0.1))], h.shape)

        return half

    f, half = layer("f"), layer("g")
    if reverse:
        y1, y2 = mtf.reversible_scan(f, half, x, x, dim)
    else:

        def both(state: tuple[mtf.Tensor, mtf.Tensor]) -> tuple[mtf.Tensor, mtf.Tensor]:
            y1 = state[0] + f(state[1])
            return y1, state[1] + half(y1)

        y1, y2 = mtf.scan(both, (x, x), dim)
    model = mtf.Model(mtf.reduce_sum(mtf.square(y1 + y2)), mtf.SGD(0.1))
    program = model.lower(mtf.Mesh("x:2;y:2"), mtf.Layout("batch:x"), mtf.Options(recompute=recompute))
    found = memory(program)
    return found.peak - 2 * found.variables


def test_memory_does_not_grow_with_depth() -> None:
    assert peak(4, True) == peak(48, True)
    states = 2 * 512 * 8 * 4 // 2
    """Bytes of a layer's two inputs on one device."""
    assert peak(48, False) - peak(4, False) > 44 * states
    assert peak(48, False, frozenset({"layers"})) - peak(4, False, frozenset({"layers"})) == 44 * states


@pytest.mark.parametrize(
    ("f", "half", "message"),
    [
        (lambda x: mtf.reduce_sum(x), mtf.sin, r"layers:2: f must return float64\[d:8\], found Tensor"),
        (mtf.sin, lambda y: None, r"g must return float64\[d:8\], found None"),
        (lambda x: x.cast("float32"), mtf.sin, r"f must return float64\[d:8\], found"),
    ],
)
def test_halves_of_other_types(f: Any, half: Any, message: str) -> None:
    x = mtf.Graph().input("x", [D], "float64")
    with pytest.raises(mtf.UserError, match=message):
        mtf.reversible_scan(f, half, x, x, mtf.Dim("layers", 2))


def test_halves_share_nothing_inside() -> None:
    x = mtf.Graph().input("x", [D], "float64")
    kept: list[mtf.Tensor] = []

    def f(h: mtf.Tensor) -> mtf.Tensor:
        kept.append(mtf.sin(h))
        return kept[0]

    with pytest.raises(mtf.UserError, match=r"g reads Tensor.*, which is neither an argument of"):
        mtf.reversible_scan(f, lambda y: y * kept[0], x, x, mtf.Dim("layers", 2))


def test_integers_cannot_be_carried() -> None:
    x = mtf.Graph().input("x", [D])
    with pytest.raises(mtf.UserError, match="the carried tensors must have a float dtype, found"):
        mtf.reversible_scan(lambda h: h, lambda h: h, x, x, mtf.Dim("layers", 2))


def test_stacks_of_another_length() -> None:
    g = mtf.Graph()
    x, layers = g.input("x", [D], "float64"), mtf.Dim("layers", 2)
    stack = g.input("stack", [mtf.Dim("layers", 3), D], "float64")
    with pytest.raises(mtf.UserError, match=", one element for each iteration"):
        mtf.reversible_scan(lambda h, p: p, lambda h, p: p, x, x, layers, [stack])


def test_eager_steps() -> None:
    """Iteration by iteration and as one loop, the values of a program."""

    def build(x: mtf.Tensor) -> mtf.Tensor:
        def half(h: mtf.Tensor) -> mtf.Tensor:
            return mtf.tanh(h * x.graph.variable("w", [D], mtf.Normal(0.3), "float64"))

        y1, y2 = mtf.reversible_scan(half, mtf.sin, x, x * 2.0, mtf.Dim("layers", 3))
        return y1 * 3.0 + y2

    g = mtf.Graph()
    y = build(g.input("x", [B, S, D], "float64"))
    want = LockstepEngine(mtf.lower(g, mtf.Mesh("m:1"), mtf.Layout(""), {"y": y})).step({"x": X})["y"]
    for unroll in (True, False):
        with mtf.Eager("x:2", "batch:x", "lockstep").step(unroll=unroll) as step:
            found = build(step.constant(X, [B, S, D]))
            np.testing.assert_allclose(found.numpy(), want, rtol=1e-12)
