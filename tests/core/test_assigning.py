"""Variables that are changed, or stored in part, under split layouts."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.lower.verify import verify

A, B = mtf.Dim("a", 8), mtf.Dim("b", 4)


@pytest.mark.parametrize("layout", ["", "a:x", "a:x+y", "a:y;b:x"])
def test_changes(layout: str) -> None:
    g = mtf.Graph()
    for name in ("more", "less", "part"):
        g.variable(name, [A, B], mtf.ONES)
    x, part = g.input("x", [A, B], "float32"), g.input("part", [B, mtf.Dim("a", 4)], "float32")
    mtf.assign_add(g, g.lookup("more"), x)
    mtf.assign_sub(g, g.lookup("less"), x)
    mtf.assign_slice(g, g.lookup("part"), part, "a", 3)
    engine = LockstepEngine(verify(mtf.lower(g, mtf.Mesh("x:2;y:2"), mtf.Layout(layout))))
    rng = np.random.default_rng(0)
    batch = {n: rng.normal(size=s).astype(np.float32) for n, s in (("x", (8, 4)), ("part", (4, 4)))}
    for _ in range(2):
        engine.step(batch)
    np.testing.assert_allclose(engine.read("more"), 1 + 2 * batch["x"], 1e-6)
    np.testing.assert_allclose(engine.read("less"), 1 - 2 * batch["x"], 1e-5, 1e-6)
    want = np.ones((8, 4))
    want[3:7] = batch["part"].T
    np.testing.assert_allclose(engine.read("part"), want)


@pytest.mark.parametrize("layout", ["", "a:x;b:y"])
def test_inside_blocks_that_may_run_again(layout: str) -> None:
    """In a loop over layers: one value per layer, without a dimension of the block."""
    g, layers = mtf.Graph(), mtf.Dim("layers", 3)
    x = g.input("x", [A, B], "float32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        def inner(u: mtf.Tensor) -> mtf.Tensor:
            g.variable("last", [B], mtf.ZEROS, trainable=False)
            g.assign(g.lookup("last"), mtf.reduce_sum(u, A))
            return mtf.tanh(u) * 2.0

        out: mtf.Tensor = mtf.recomputable(inner, h)
        return out

    y = mtf.scan(layer, x, layers)
    engine = LockstepEngine(verify(mtf.lower(g, mtf.Mesh("x:2;y:2"), mtf.Layout(layout), {"y": y})))
    h = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    engine.step({"x": h})
    for found in engine.read("last"):
        np.testing.assert_allclose(found, h.sum(0), 1e-5, 1e-5)
        h = np.tanh(h) * 2


def test_errors() -> None:
    g = mtf.Graph()
    g.variable("w", [A, B], mtf.ONES)
    x = g.input("x", [mtf.Dim("a", 4), B], "float32")
    with pytest.raises(mtf.UserError, match="assign to variable 'w': elements 5 to"):
        mtf.assign_slice(g, g.lookup("w"), x, A, 5)
