"""Products in float8: their numbers are ml_dtypes', under every layout and engine; what they cost."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.kernels.compute import Quantity, compute_seconds
from mesh_tf_core import layers
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.lower import Options
from mesh_tf_core.ops.float8 import E4M3, E5M2, LARGEST, Quantize, quantized

B, D, F = mtf.Dim("batch", 8), mtf.Dim("d_model", 16), mtf.Dim("d_ff", 32)
RNG = np.random.default_rng(0)


def rounded(x: Any, format: str) -> Any:
    """A tensor as eight bits tell it: times the largest power of two that fits, rounded, and back."""
    dtype = getattr(ml_dtypes, format)
    most = np.abs(x).max()
    scale = 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(dtype).max) / most)) if most else 1.0
    return (np.asarray(x, np.float32) * np.float32(scale)).astype(dtype).astype(np.float64) / scale


def product(engine: str, layout: str) -> dict[str, Any]:
    """y, dx and dw of a product, on values of very different sizes."""
    g = mtf.Graph()
    x, slope = g.input("x", [B, D], "float32"), g.input("slope", [B, F], "float32")
    w = g.variable("w", [D, F], W)
    y = mtf.float8_einsum([x, w], [B, F])
    dx, dw = mtf.gradients(mtf.reduce_sum(y * slope), [x, w])
    program = mtf.lower(g, mtf.Mesh("x:2;y:2"), mtf.Layout(layout), {"y": y, "dx": dx, "dw": dw})
    if engine == "lockstep":
        return LockstepEngine(program).step({"x": X, "slope": SLOPE})
    from mesh_tf_core.engines import open_engine

    opened = open_engine(program, engine)
    opened.initialize()
    return opened.step({"x": X, "slope": SLOPE})


X = (RNG.normal(size=(8, 16)) * np.exp(3 * RNG.normal(size=(8, 16)))).astype(np.float32)
W = (RNG.normal(size=(16, 32)) / 300).astype(np.float32)
SLOPE = (RNG.normal(size=(8, 32)) * np.exp(4 * RNG.normal(size=(8, 32)))).astype(np.float32)


@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        ("lockstep", ""),
        ("lockstep", "batch:x;d_ff:y"),
        ("lockstep", "d_model:x+y"),
        ("local", "batch:x;d_model:y"),
    ],
)
def test_numbers(engine: str, layout: str) -> None:
    found = product(engine, layout)
    x, w, dy = rounded(X, E4M3), rounded(W, E4M3), rounded(SLOPE, E5M2)
    for name, want in (("y", x @ w), ("dx", dy @ w.T), ("dw", x.T @ dy)):
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-5 * np.abs(want).max(), err_msg=name)
    assert 0.002 < np.abs(found["y"] - X @ W).max() / np.abs(X @ W).max() < 0.1


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("most", [0.0, 1e-12, 1.0, 447.9, 448.0, 57344.0, 57345.0, 3e8])
def test_scales_fill_the_format(format: str, most: float) -> None:
    """The largest element is in the upper half of what the format has, and never above."""
    g = mtf.Graph()
    x8, scale = quantized(g.input("x", [B], "float32"), format)
    program = mtf.lower(g, mtf.Mesh("x:2"), mtf.Layout("batch:x"), {"x8": x8.cast("float32"), "scale": scale})
    x = np.linspace(-1, 0.5, 8, dtype=np.float32) * np.float32(most)
    found = LockstepEngine(program).step({"x": x})
    assert np.log2(found["scale"]) % 1 == 0
    np.testing.assert_array_equal(found["x8"] / found["scale"], rounded(x, format).astype(np.float32))
    if most:
        assert LARGEST[format] / 2 < most * found["scale"] <= LARGEST[format]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_seen(value: float) -> None:
    """A step that blew up shows in the loss, as in any other type."""
    g = mtf.Graph()
    x = g.input("x", [B, D], "float32")
    y = mtf.float8_einsum([x, g.variable("w", [D, F], W)], [B, F])
    bad = X.copy()
    bad[0, 0] = value
    engine = LockstepEngine(mtf.lower(g, mtf.Mesh("x:2"), mtf.Layout("batch:x"), {"y": y}))
    assert not np.isfinite(engine.step({"x": bad})["y"][0]).any()


def block(float8: bool, dtype: str = "bfloat16") -> mtf.Model:
    """Layers of a Transformer's feed-forward blocks."""
    g = mtf.Graph()
    x, target = (g.input(n, [B, mtf.Dim("length", 4), D], "float32") for n in ("x", "target"))

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        return h + layers.FeedForward(F, "silu", gated=True)(layers.RMSNorm()(h))

    def stack() -> mtf.Tensor:
        return mtf.scan(layer, x.cast(dtype), mtf.Dim("layers", 3))

    if float8:
        with g.float8():
            y = stack()
    else:
        y = stack()
    loss = mtf.reduce_mean(mtf.square(y.cast("float32") - target))
    return mtf.Model(loss, mtf.Adam(0.02))


BATCH = {n: RNG.normal(size=(8, 4, 16)).astype(np.float32) for n in ("x", "target")}


def losses(model: mtf.Model, layout: str, parts: int = 1, steps: int = 3, **more: Any) -> list[float]:
    run = mtf.Trainer(model, "x:2;y:2", layout, Options(microbatches=parts, **more), "lockstep")
    return [run.step(BATCH)["loss"] for _ in range(steps)]


def test_it_trains_as_bfloat16_does() -> None:
    narrow, wide = (losses(block(float8), "batch:x;d_ff:y", steps=8) for float8 in (True, False))
    assert narrow[-1] < 0.2 * narrow[0]
    np.testing.assert_allclose(narrow, wide, rtol=0.08)
    assert narrow != wide


def test_layouts_and_microbatches() -> None:
    """One step alike under layouts, ZeRO and recomputation; parts have scales of their own."""
    whole = losses(block(True, "float32"), "")
    zero3 = dict.fromkeys(["feed_forward/wi", "feed_forward/wg", "feed_forward/wo"], 3)
    for layout, more in (("batch:x;d_ff:y", {}), ("length:x;d_model:y", {}), ("batch:x", {"storage": zero3})):
        np.testing.assert_allclose(losses(block(True, "float32"), layout, **more), whole, rtol=2e-3)
    parts = losses(block(True, "float32"), "batch:x", 2)
    np.testing.assert_allclose(parts, whole, rtol=0.02)


def test_evaluation_takes_a_short_batch() -> None:
    run = mtf.Trainer(block(True), "x:2", "batch:x", engine="lockstep")
    found = run.evaluate([BATCH, {n: x[:3] for n, x in BATCH.items()}])["loss"]
    narrow = run.evaluate([BATCH])["loss"]
    assert np.isfinite(found) and 0.5 < found / narrow < 2


def seconds(chip: str, dtype: str) -> float:
    """Of a product of 8192 x 8192 x 8192."""
    flops, bytes = 2.0 * 8192**3, 3.0 * 8192**2
    return compute_seconds(
        load_hardware(chip), Quantity(flops, bytes, "matmul", dtype, (8192, 8192, 8192, 1))
    )


@pytest.mark.parametrize("chip", ["h100", "h200", "b200", "tpu-v7"])
def test_chips_that_have_it_are_faster(chip: str) -> None:
    for format in (E4M3, E5M2):
        assert 1.7 < seconds(chip, "bfloat16") / seconds(chip, format) < 2.3


@pytest.mark.parametrize("chip", ["a100", "tpu-v5p", "v100"])
def test_others_multiply_in_a_wider_type(chip: str) -> None:
    assert seconds(chip, E4M3) == seconds(chip, "bfloat16")


def test_a_tensor_is_made_a_factor_once() -> None:
    """The two products that share x, and the weight's gradients."""
    nodes = [node.op for node, _ in block(True).step_graph.walk()]
    formats = [op.format for op in nodes if isinstance(op, Quantize)]
    assert (formats.count(E4M3), formats.count(E5M2)) == (5, 3)


def test_backward_keeps_eight_bits() -> None:
    """Of the factors: a byte an element from forward to backward, not two."""

    def kept(float8: bool) -> set[str]:
        graph = block(float8).step_graph
        return {
            graph.tensor(o).dtype for b in graph.blocks for i, o in b.saved.items() if graph.tensor(i).shape
        }

    assert E4M3 in kept(True) and E4M3 not in kept(False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, ids: mtf.float8_einsum([x, ids], [B]),
            r"\], int32\[.*expected two operands of the same float dtype",
        ),
        (lambda x, ids: mtf.float8_einsum([x], [B]), "expected two operands of the same float dtype"),
        (lambda x, ids: mtf.float8_einsum([x, x], [F]), "no operand has the output dimension d_ff"),
        (lambda x, ids: x.cast(E4M3), "dtype 'float8_e4m3fn' is not supported; use bfloat16"),
        (lambda x, ids: x.graph.variable("v", [B], mtf.ZEROS, E4M3), "'float8_e4m3fn' is not supported"),
    ],
)
def test_refused(call: Any, message: str) -> None:
    g = mtf.Graph()
    with pytest.raises(mtf.UserError, match=message):
        call(g.input("x", [B, D], "float32"), g.input("ids", [B, D]))
