"""Arrays as constants of a graph: no parameters, split like any tensor, part of the fingerprint."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine

B, C = mtf.Dim("batch", 8), mtf.Dim("classes", 4)
WEIGHTS = np.array([0.5, 1.0, 2.0, 4.0])
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 4)).astype(np.float32), "y": RNG.integers(0, 4, 8).astype(np.int32)}


def weighted(weights: Any = WEIGHTS) -> mtf.Model:
    """Cross-entropy with a weight for each class."""
    g = mtf.Graph()
    x, y = g.input("x", [B, C], "float32"), g.input("y", [B])
    logits = x * g.variable("w", [C], mtf.ONES)
    each = mtf.softmax_cross_entropy(logits, y, C)
    counts = mtf.gather(mtf.constant(g, weights, [C]), y, C)
    return mtf.Model(mtf.reduce_sum(each * counts) / mtf.reduce_sum(counts), mtf.SGD(0.5))


def expected() -> float:
    logits = BATCH["x"].astype(np.float64)
    each = np.log(np.exp(logits).sum(-1)) - logits[np.arange(8), BATCH["y"]]
    return float(np.average(each, weights=WEIGHTS[BATCH["y"]]))


@pytest.mark.parametrize(
    ("engine", "mesh", "layout"),
    [
        ("lockstep", "x:2;y:2", "batch:x;classes:y"),
        ("lockstep", "x:4", "classes:x"),
        ("local", "x:2", "classes:x"),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_weights_of_classes(engine: str, mesh: str, layout: str, parts: int) -> None:
    run = mtf.Trainer(weighted(), mesh, layout, mtf.Options(microbatches=parts), engine)
    assert run.step(BATCH)["loss"] == pytest.approx(expected(), rel=1e-5)
    assert run.model.parameters == 4 and set(run.program.variables) == {"w", "step"}


def test_the_fingerprint_knows_its_elements() -> None:
    same, other = weighted(WEIGHTS.copy()), weighted(WEIGHTS * 1.5)
    assert weighted().fingerprint == same.fingerprint != other.fingerprint


def made(value: Any, dims: Any, dtype: str | None = None, layout: str = "batch:x") -> Any:
    g = mtf.Graph()
    x = mtf.constant(g, value, dims, dtype)
    return LockstepEngine(mtf.lower(g, mtf.Mesh("x:2"), mtf.Layout(layout), {"x": x})).step({})["x"]


@pytest.mark.parametrize(
    ("value", "dtype", "want"),
    [
        (np.arange(8) / 2, None, "float32"),
        ([1, 2, 3, 4, 5, 6, 7, 8], None, "int32"),
        (np.arange(8) + 2**40, None, "int64"),
        (np.arange(8) > 3, None, "bool"),
        (np.arange(8).astype(ml_dtypes.bfloat16), None, "bfloat16"),
        (np.arange(8) / 2, "float64", "float64"),
        (3, None, "float32"),
        (np.float64(2.5), "bfloat16", "bfloat16"),
    ],
)
def test_element_types(value: Any, dtype: str | None, want: str) -> None:
    found = made(value, [B], dtype)
    assert str(found.dtype) == want
    np.testing.assert_array_equal(found, np.broadcast_to(np.asarray(value), 8).astype(found.dtype))


def test_in_a_loop_and_its_backward() -> None:
    """A table that a loop's body reads is made again for backward, not kept."""
    g = mtf.Graph()
    x = g.input("x", [B, C], "float32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        return mtf.tanh(h * mtf.constant(g, WEIGHTS, [C]))

    y = mtf.scan(layer, x, mtf.Dim("n", 3))
    (dx,) = mtf.gradients(mtf.reduce_sum(y), [x])
    program = mtf.lower(g, mtf.Mesh("x:2"), mtf.Layout("classes:x"), {"y": y, "dx": dx})
    out = LockstepEngine(program).step({"x": BATCH["x"]})
    want, slope = BATCH["x"].astype(np.float64), 1.0
    for _ in range(3):
        want = np.tanh(want * WEIGHTS)
        slope = slope * WEIGHTS * (1 - want**2)
    np.testing.assert_allclose(out["y"], want, rtol=1e-5)
    np.testing.assert_allclose(out["dx"], slope, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: made(WEIGHTS, [B]),
            "need an array of shape",
        ),
        (lambda: made(WEIGHTS, []), "need an array of shape"),
        (
            lambda: made(np.arange(8) / 2, [B], "int32"),
            "int32 cannot represent 0.5; choose another dtype",
        ),
        (lambda: made(["a"] * 8, [B]), "expected an array of numbers, found dtype"),
        (lambda: made(np.zeros(8, complex), [B]), "expected an array of numbers, found dtype"),
        (lambda: made([None] * 8, [B]), "expected an array of numbers, found dtype"),
        (
            lambda: mtf.constant(mtf.Graph(), np.zeros(2**24 + 1, np.float32), [mtf.Dim("n", 2**24 + 1)]),
            "would add 64 MiB to every program, and the limit is 64 MiB",
        ),
    ],
)
def test_refused(call: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        call()
