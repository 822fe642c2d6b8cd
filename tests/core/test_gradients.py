"""Gradients: of loops against the unrolled model, of values used in several places, and where there is
none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.lower.verify import verify

A, C, L = mtf.Dim("a", 4), mtf.Dim("c", 4), mtf.Dim("l", 3)
B = mtf.Dim("b", 2)
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(2, 4)),
    "w": RNG.normal(size=(3, 4, 4)),
    "v": RNG.normal(size=(4,)),
    "u": RNG.normal(size=(2, 4)),
}


class Setup:
    """A graph with the inputs of `BATCH`."""

    def __init__(self) -> None:
        self.g = mtf.Graph()
        self.x = self.g.input("x", [B, A], "float64")
        self.w = self.g.input("w", [L, A, C], "float64")
        self.v = self.g.input("v", [A], "float64")
        self.u = self.g.input("u", [B, A], "float64")

    def run(self, loss: mtf.Tensor, layout: str = "") -> dict[str, Any]:
        wrt = {"x": self.x, "w": self.w, "v": self.v, "u": self.u}
        found = mtf.gradients(loss, list(wrt.values()))
        results = {n: d for n, d in zip(wrt, found, strict=True) if d is not None} | {"loss": loss}
        program = verify(mtf.lower(self.g, mtf.Mesh("m:2"), mtf.Layout(layout), results))
        return LockstepEngine(program).step(BATCH)


def _layer(s: Setup, h: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
    """One layer that reads a tensor of outside twice, once before the loop's first use of it."""
    mixed = mtf.rename(mtf.einsum([h * s.v, w], [B, C]), c="a")
    return mtf.tanh(mixed + s.u) + h * s.v


@pytest.mark.parametrize("layout", ["", "b:m", "a:m", "c:m"])
def test_scan_equals_unrolled(layout: str) -> None:
    s = Setup()
    looped = s.run(mtf.reduce_sum(mtf.square(mtf.scan(lambda h, w: _layer(s, h, w), s.x, L, [s.w]))), layout)
    t = Setup()
    h = t.x
    for i in range(3):
        h = _layer(t, h, mtf.reshape(mtf.slice_dim(t.w, "l", i, 1), [A, C]))
    unrolled = t.run(mtf.reduce_sum(mtf.square(h)), layout)
    assert looped.keys() == unrolled.keys() == {"loss", "x", "w", "v", "u"}
    for name, value in unrolled.items():
        np.testing.assert_allclose(looped[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


def test_scan_with_stacked_results_equals_unrolled() -> None:
    s = Setup()

    def body(h: mtf.Tensor, w: mtf.Tensor) -> Any:
        h = _layer(s, h, w)
        return h, (h * s.u, mtf.reduce_sum(h, "a"))

    weights = mtf.mtf_range(s.g, L, "float64") + 1.0
    last, (ys, sums) = mtf.scan(body, s.x, L, [s.w])
    looped = s.run(mtf.einsum([ys, weights], []) + mtf.reduce_sum(sums) + mtf.reduce_sum(last))
    t = Setup()
    h, loss = t.x, []
    for i in range(3):
        h = _layer(t, h, mtf.reshape(mtf.slice_dim(t.w, "l", i, 1), [A, C]))
        loss += [mtf.reduce_sum(h * t.u) * (i + 1.0), mtf.reduce_sum(h)]
    unrolled = t.run(mtf.add_n([*loss, mtf.reduce_sum(h)]))
    for name, value in unrolled.items():
        np.testing.assert_allclose(looped[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


def test_a_value_used_inside_and_outside_of_a_loop() -> None:
    s = Setup()
    last = mtf.scan(lambda h: h * s.v, s.x, L)
    got = s.run(mtf.reduce_sum(last * s.v))
    v, x = BATCH["v"], BATCH["x"]
    np.testing.assert_allclose(got["v"], 4 * v**3 * x.sum(0), rtol=1e-12)
    np.testing.assert_allclose(got["x"], np.broadcast_to(v**4, (2, 4)), rtol=1e-12)


def test_only_what_the_loss_depends_on() -> None:
    s = Setup()
    got = s.run(mtf.reduce_sum(s.x * mtf.stop_gradient(s.u)))
    assert got.keys() == {"loss", "x"}
    np.testing.assert_allclose(got["x"], BATCH["u"])


def test_integers_have_none() -> None:
    s = Setup()
    ids = s.g.input("ids", [B])
    found = mtf.gradients(mtf.reduce_sum(s.x * ids.cast("float64")), [ids, s.x])
    assert found[0] is None and found[1] is not None


def test_repeated_operands_add_up() -> None:
    s = Setup()
    got = s.run(mtf.reduce_sum(s.x * s.x * s.x + s.x + s.x))
    np.testing.assert_allclose(got["x"], 3 * BATCH["x"] ** 2 + 2, rtol=1e-12)


def test_order_of_dimensions_is_the_tensors() -> None:
    s = Setup()
    other = s.g.input("other", [A, B], "float64")
    dx, dother = mtf.gradients(mtf.reduce_sum(s.x * other + other), [s.x, other])
    assert dx is not None and dother is not None
    assert (dx.shape.names, dother.shape.names) == (("b", "a"), ("a", "b"))


def test_the_loss_is_a_scalar_outside_of_loops() -> None:
    s = Setup()
    with pytest.raises(mtf.UserError, match="gradients: the loss must be a scalar that is computed outside"):
        mtf.gradients(s.x, [s.x])


def test_gradients_of_two_losses() -> None:
    """Each has its own backward loop over the same forward loop."""
    s = Setup()
    y = mtf.scan(lambda h, w: _layer(s, h, w), s.x, L, [s.w])
    one = mtf.gradients(mtf.reduce_sum(y), [s.x])[0]
    two = mtf.gradients(mtf.reduce_sum(y) * 3.0, [s.x])[0]
    assert one is not None and two is not None
    for recompute in (frozenset(), frozenset({"l"})):
        program = mtf.lower(
            s.g,
            mtf.Mesh("m:2"),
            mtf.Layout("a:m"),
            {"one": one, "two": two},
            mtf.Options(recompute=recompute),
        )
        got = LockstepEngine(verify(program)).step(BATCH)
        np.testing.assert_allclose(3 * got["one"], got["two"], rtol=1e-12)


@pytest.mark.parametrize("layout", ["", "a:x", "a:x;b:y", "a:x+y"])
def test_product_with_zeros(layout: str) -> None:
    """The gradient is the product of the others, whichever of them are zero."""
    g = mtf.Graph()
    x = g.input("x", [mtf.Dim("b", 4), mtf.Dim("a", 4)], "float64")
    (dx,) = mtf.gradients(mtf.reduce_sum(mtf.reduce_prod(x, "a")), [x])
    assert dx is not None
    program = verify(mtf.lower(g, mtf.Mesh("x:2;y:2"), mtf.Layout(layout), {"dx": dx}))
    rows = np.array([[2.0, 3, 5, 7], [0, 3, 5, 7], [2, 3, 0, 0], [2, -3, 5, 0]])
    want = [[np.delete(row, i).prod() for i in range(4)] for row in rows]
    np.testing.assert_array_equal(LockstepEngine(program).step({"x": rows})["dx"], want)


@pytest.mark.parametrize("layout", ["", "a:x+y", "b:x;a:y"])
def test_clipped_gradient_of_an_activation(layout: str) -> None:
    g = mtf.Graph()
    x, w = (g.input(n, [mtf.Dim("b", 4), mtf.Dim("a", 4)], "float64") for n in "xw")
    y = mtf.clip_activation_gradient(x * 2.0, 0.5)
    (dx,) = mtf.gradients(mtf.reduce_sum(y * w), [x])
    assert dx is not None
    engine = LockstepEngine(verify(mtf.lower(g, mtf.Mesh("x:2;y:2"), mtf.Layout(layout), {"dx": dx})))
    small, rng = np.full((4, 4), 0.25), np.random.default_rng(0)
    large = rng.normal(size=(4, 4)) * 7
    for batch, want in ((small, small), (large, large * 0.5 / np.sqrt((large**2).mean()))):
        got = engine.step({"x": rng.normal(size=(4, 4)), "w": batch})["dx"]
        np.testing.assert_allclose(got, 2 * want, 1e-12)
    with pytest.raises(mtf.UserError, match="clip_rms must be positive"):
        mtf.clip_activation_gradient(x, 0.0)
