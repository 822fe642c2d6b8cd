"""Products in float8: their numbers are ml_dtypes', under every layout and engine; what they cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.kernels.compute import Quantity, compute_seconds
from examples.deepseek_lm import model as latent
from examples.moe_lm import model as mixture
from examples.resnet import model as resnet
from examples.transformer_lm import model as transformer
from layoutopt import cost
from mesh_tf_core import layers
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.program import AllGather
from mesh_tf_core.ir.schedules import ONE_WAY
from mesh_tf_core.layers.base import gated
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.remat_policy import policies
from mesh_tf_core.ops.float8 import AbsMax, Quantize, quantized
from mesh_tf_core.ops.float8_recipes import E4M3, E5M2, LARGEST, RECIPES
from tests.marks import by_day

B, D, F = mtf.Dim("batch", 8), mtf.Dim("d_model", 16), mtf.Dim("d_ff", 32)
WIDE, OUT = mtf.Dim("d_model", 512), mtf.Dim("d_ff", 256)
RNG = np.random.default_rng(0)


def rounded(x: Any, format: str, recipe: str = "tensor", summed: int = 0, weight: bool = False) -> Any:
    """A matrix as eight bits tell it: times the largest powers of two that fit, rounded, and back.

    Args:
      summed: the axis that a product sums.
    """
    dtype, how = getattr(ml_dtypes, format), RECIPES[recipe].scaled
    wide = np.moveaxis(np.asarray(x, np.float32), summed, -1)
    whole = how == "row" or (how != "tensor" and summed == 0 and not weight)  # it is the batch's
    parts = wide.reshape(1, -1) if how == "tensor" else wide.reshape(-1, wide.shape[-1] if whole else how)
    limit = RECIPES[recipe].limit if format == E4M3 else 0.0
    parts = np.clip(parts, -limit, limit) if limit else parts
    most = limit or np.abs(parts).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        scale = 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(dtype).max) / most))
    scale = np.where(np.asarray(most) > 0, scale, 1.0)
    found = (parts * scale.astype(np.float32)).astype(dtype).astype(np.float64) / scale
    return np.moveaxis(found.reshape(wide.shape), -1, summed)


def product(engine: str, layout: str, recipe: str = "tensor") -> dict[str, Any]:
    """y, dx and dw of a product, on values of very different sizes."""
    g = mtf.Graph()
    x, slope = g.input("x", [B, WIDE], "float32"), g.input("slope", [B, OUT], "float32")
    w = g.variable("w", [WIDE, OUT], W)
    y = mtf.float8_einsum([x, w], [B, OUT], recipe=recipe)
    dx, dw = mtf.gradients(mtf.reduce_sum(y * slope), [x, w])
    program = mtf.lower(g, mtf.Mesh("x:2;y:2"), mtf.Layout(layout), {"y": y, "dx": dx, "dw": dw})
    if engine == "lockstep":
        return LockstepEngine(program).step({"x": X, "slope": SLOPE})
    from mesh_tf_core.engines import open_engine

    opened = open_engine(program, engine)
    opened.initialize()
    return opened.step({"x": X, "slope": SLOPE})


X = (RNG.normal(size=(8, 512)) * np.exp(3 * RNG.normal(size=(8, 512)))).astype(np.float32)
W = (RNG.normal(size=(512, 256)) / 300).astype(np.float32)
SLOPE = (RNG.normal(size=(8, 256)) * np.exp(4 * RNG.normal(size=(8, 256)))).astype(np.float32)


@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        ("lockstep", ""),
        ("lockstep", "batch:x;d_ff:y"),
        ("lockstep", "d_model:x+y"),
        ("local", "batch:x;d_model:y"),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.one_in(6)
def test_numbers(recipe: str, engine: str, layout: str) -> None:
    found = product(engine, layout, recipe)

    def of(x: Any, summed: int, format: str = E4M3) -> Any:
        return rounded(x, format, recipe, summed, x is W)

    slope = RECIPES[recipe].backward
    y, dx = of(X, 1) @ of(W, 0), of(SLOPE, 1, slope) @ of(W, 1).T
    for name, want in (("y", y), ("dx", dx), ("dw", of(X, 0).T @ of(SLOPE, 0, slope))):
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-5 * np.abs(want).max(), err_msg=name)
    least = 0.5 if RECIPES[recipe].limit else 0.002  # X has much beyond the limit
    assert least < np.abs(found["y"] - X @ W).max() / np.abs(X @ W).max() < (1.0 if least == 0.5 else 0.1)


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
    x = g.input("x", [B, WIDE], "float32")
    y = mtf.float8_einsum([x, g.variable("w", [WIDE, OUT], W)], [B, OUT])
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


def test_fixed_scales_need_no_pass_over_factors() -> None:
    """Only gradients of results have their largest element found; the step is faster where memory counts."""

    def step(recipe: str) -> mtf.Model:
        return transformer(**{**SMALL, "d_model": 512, "d_ff": 512}, dtype="bfloat16", float8=recipe)

    found, fixed = ([n.op for n, _ in step(r).step_graph.walk()] for r in ("tensor", "fixed"))
    assert sum(isinstance(op, AbsMax) for op in fixed) < 0.5 * sum(isinstance(op, AbsMax) for op in found)
    formats = {op.format for op in fixed if isinstance(op, Quantize) and not op.cut}
    assert formats == {E5M2} and {op.format for op in fixed if isinstance(op, Quantize) and op.cut} == {E4M3}
    prices = [cost(step(r), "a:1", "", hardware="tpu-v7").predicted.step_seconds for r in ("tensor", "fixed")]
    assert prices[1] < prices[0]


def test_experts_weights_are_gathered_in_eight_bits() -> None:
    """With fixed scales, which no device has to ask another for; the loss is the same."""
    sizes = {"experts": 4, "layers": 2, "d_model": 32, "d_ff": 64, "heads": 2, "d_kv": 8, "vocab": 64}
    batch = {n: RNG.integers(0, 64, (4, 8)).astype(np.int32) for n in ("tokens", "targets")}
    found: dict[str, list[float]] = {}
    for recipe in ("fixed", "tensor"):
        model = mixture(**sizes, batch=4, length=8, dtype="bfloat16", float8=recipe)
        stored = {n: "zero3" for n, v in model.graph.variables.items() if "experts/w" in n}
        program = model.lower(mtf.Mesh("x:2"), mtf.Layout("batch:x;expert_batch:x"), Options(storage=stored))
        formats = {
            program.values[o].dtype
            for instr, _ in program.walk()
            if isinstance(instr, AllGather) and "experts" in instr.origin.scope
            for o in instr.outputs
            if "experts" in program.values[o].shape.names
        }
        assert formats == ({E4M3} if recipe == "fixed" else {"bfloat16"})
        for layout, options in (("", Options()), ("batch:x;expert_batch:x", Options(storage=stored))):
            run = mtf.Trainer(model, "x:2", layout, options, "lockstep")
            found.setdefault(recipe, []).append(run.step(batch)["loss"])
    np.testing.assert_allclose(*found["fixed"], rtol=1e-3)


def test_a_tensor_is_made_a_factor_once() -> None:
    """For the two products that share x, and their gradients; weights are made again for backward."""
    nodes = [node.op for node, _ in block(True).step_graph.walk()]
    formats = [op.format for op in nodes if isinstance(op, Quantize)]
    assert (formats.count(E4M3), formats.count(E5M2)) == (8, 3)


def test_backward_keeps_eight_bits() -> None:
    """Of the factors: a byte an element from forward to backward, not two."""

    def kept(float8: bool) -> set[str]:
        graph = block(float8).step_graph
        return {
            graph.tensor(o).dtype for b in graph.blocks for i, o in b.saved.items() if graph.tensor(i).shape
        }

    assert E4M3 in kept(True) and E4M3 not in kept(False)


def test_backward_of_gated_units_has_their_inputs_in_eight_bits() -> None:
    """Forward is exact; gradients are those at the rounded inputs (DeepSeek-V3, section 3.3.3)."""
    a, b, gate, slope = (RNG.normal(size=(8, 512)) for _ in range(4))

    def found(recipe: str) -> dict[str, Any]:
        g = mtf.Graph()
        xs = [g.input(name, [B, WIDE], "float64") for name in ("a", "b", "gate", "slope")]
        with g.float8(recipe):
            y, again = gated(lambda a, b, c: mtf.silu(a) * b * c, xs[:2], WIDE.name, xs[2:3])
        assert (again is not None) is (recipe == "blocks")
        made = {"y": y} | dict(zip("abc", mtf.gradients(mtf.reduce_sum(y * xs[3]), xs[:3]), strict=True))
        made |= {} if again is None else {"again": again}
        program = mtf.lower(g, mtf.Mesh("x:2;y:2"), mtf.Layout("batch:x;d_model:y"), made)
        return LockstepEngine(program).step({"a": a, "b": b, "gate": gate, "slope": slope})

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    exact, small = found(""), found("blocks")
    np.testing.assert_allclose(small["y"], exact["y"], rtol=1e-12)
    near_a, near_b = (rounded(x, E4M3, "blocks", 1).astype(np.float64) for x in (a, b))
    unit = near_a * sigmoid(near_a)
    np.testing.assert_allclose(small["again"], unit * near_b * gate, rtol=1e-9)
    np.testing.assert_allclose(small["c"], slope * unit * near_b, rtol=1e-9)
    np.testing.assert_allclose(small["b"], slope * unit * gate, rtol=1e-9)
    bend = sigmoid(near_a) * (1 + near_a * (1 - sigmoid(near_a)))
    np.testing.assert_allclose(small["a"], slope * bend * near_b * gate, rtol=1e-9)
    assert np.abs(small["a"] - exact["a"]).max() > 1e-3


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


SMALL = {"layers": 2, "d_model": 32, "d_kv": 8, "heads": 4, "d_ff": 32, "vocab": 32, "batch": 4, "length": 64}


@pytest.mark.parametrize("recipe", by_day(RECIPES, every=2))
@pytest.mark.one_in(4)
def test_experts_train_alike_under_layouts(recipe: str) -> None:
    data = {n: RNG.integers(0, 32, (4, 64)).astype(np.int32) for n in ("tokens", "targets")}

    def trained(layout: str, float8: str) -> list[float]:
        model = mixture(**SMALL, experts=4, capacity_factor=0.0, float8=float8)
        run = mtf.Trainer(model, "x:2;y:2", layout, engine="lockstep")
        return [run.step(data)["loss"] for _ in range(2)]

    alone, wide = trained("", recipe), trained("", "")
    np.testing.assert_allclose(alone, wide, rtol=0.02)
    assert alone != wide
    layout = "batch:x;experts:x;heads:y;length@elsewhere:y;expert_length@elsewhere:y"
    np.testing.assert_allclose(trained(layout, recipe), alone, rtol=2e-3)


@pytest.mark.parametrize("name", ["tensor", "mxfp4"])
def test_a_recipe_that_does_nothing_is_refused(name: str) -> None:
    with pytest.raises(mtf.UserError, match="float8"):
        resnet(float8=name)


@pytest.mark.parametrize("schedule", ONE_WAY)
@pytest.mark.one_in(4)
def test_stages_train_alike_or_are_refused(schedule: str) -> None:
    """Differentiating a copy of the stages would lose the gradients of float8."""
    model, data = transformer(**SMALL, float8="mxfp8"), np.arange(256, dtype=np.int32).reshape(4, 64) % 32
    options = Options(microbatches=2, schedule=schedule)
    try:
        run = mtf.Trainer(model, "x:2;y:2", "layers:x;batch:y", options, "lockstep")
    except mtf.UserError as error:
        assert "custom_gradient" in str(error)
        return
    found = run.step({"tokens": data, "targets": data})["loss"]
    alone = mtf.Trainer(model, "x:1", "", engine="lockstep").step({"tokens": data, "targets": data})["loss"]
    assert found == pytest.approx(alone, rel=1e-3)


@pytest.mark.nightly
def test_stages_keep_factors_by_name() -> None:
    """What is kept by the name of a weight or an operation stays for both slots of backward, also in stages
    with slots for weights; the rest, other names and wider types of a value among it, is made again."""
    data = {n: np.arange(512, dtype=np.int32).reshape(4, 128) ** 2 % 31 for n in ("tokens", "targets")}
    sizes = {"layers": 2, "dense": 0, "d_model": 128, "heads": 2, "d_expert": 128, "experts": 2, "vocab": 32}
    words = "attention+o+wi+wg+gate/quantize+gate/quantize_2+experts/quantize"

    def loss(schedule: str, recompute: Iterable[str] = ()) -> list[float]:
        model = latent(**sizes, chosen=1, shared=0, batch=4, dtype="bfloat16", float8="blocks")
        options = Options(microbatches=2, schedule=schedule, recompute=policies(recompute))
        run = mtf.Trainer(model, "x:2", "layers:x", options, "lockstep")
        return [run.step(data)["loss"] for _ in range(2)]

    np.testing.assert_allclose(loss("zb-h1", [f"layers:keep={words}"]), loss("zb-h1"), rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loss_falls_as_that_of_bfloat16(recipe: str) -> None:
    """300 steps of a language model: within 2 % of bfloat16's loss, the mean of the last 50."""

    def curve(float8: str) -> float:
        model = transformer(**{**SMALL, "batch": 8}, dtype="bfloat16", float8=float8, learning_rate=3e-3)
        run, rng = mtf.Trainer(model, "x:1", "", engine="local"), np.random.default_rng(0)
        found = []
        for _ in range(300):
            tokens = np.cumsum(rng.integers(1, 3, (8, 65)), 1) % 32
            batch = {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}
            found.append(float(run.step(batch)["loss"]))
        return float(np.mean(found[-50:]))

    assert curve(recipe) == pytest.approx(curve(""), rel=0.02)
