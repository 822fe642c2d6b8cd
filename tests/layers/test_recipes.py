"""The layers of examples/recipes.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from examples.diffusion import UNet
from mesh_tf_core import layers
from tests.layers.helper import check_layouts, run
from tests.layers.recipes import CODE, RECIPES, RNG, D, X

IDS = ("batch:4 length:8", RNG.integers(0, 8, (4, 8)))
V = mtf.Dim("vocab", 8)
LAYOUTS = [("x:2;y:2", "batch:x;d_model:y"), ("x:2;y:2", "length:x;batch:y")]


def dense(name: str) -> Any:
    """tanh of a map of the features to themselves."""

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        inner = mtf.rename(x, d_model="d_model_in")
        return layers.Dense((D,), ("d_model_in",), activation="tanh", name=name)(inner)

    return layer


def block(x: mtf.Tensor) -> mtf.Tensor:
    return x + dense("block")(x)


def test_universal() -> None:
    got = check_layouts(lambda g, x: RECIPES["universal"](block, x, 3), {"x": X}, LAYOUTS)
    y, w = X[1], got.variables["block/weight"]
    for _ in range(3):
        y = y + np.tanh(y @ w)
    np.testing.assert_allclose(got.out, y, rtol=1e-4, atol=1e-5)


def test_adaptive_time() -> None:
    """Position by position, in a loop that ends where it stops."""

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        mean, cost = RECIPES["adaptive_time"](block, x * 2.0, 4)
        return mean + cost

    got = check_layouts(build, {"x": X}, LAYOUTS)
    w = got.variables
    halt, bias, weight = w["halt/weight"], w["halt/bias"], w["block/weight"]
    want, costs, steps = np.zeros((4, 8, 8)), [], set()
    for at in np.ndindex(4, 8):
        y, total = 2 * X[1][at], 0.0
        for n in range(4):
            p = 1 / (1 + np.exp(-(y @ halt + bias)))[0]
            y = y + np.tanh(y @ weight)
            last = total + p > 0.99 or n == 3
            want[at] += y * (1 - total if last else p)
            if last:
                costs.append(n + 1 + 1 - total)
                steps.add(n)
                break
            total += p
    assert len(steps) > 1, "every position stops at the same step: this test would show little"
    np.testing.assert_allclose(got.out, want + np.mean(costs), rtol=1e-4, atol=1e-4)


def test_funnel() -> None:
    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return RECIPES["funnel"](block, x, [1, 2])

    got = check_layouts(build, {"x": X}, LAYOUTS)
    w = got.variables
    y = X[1] + np.tanh(X[1] @ w["stack_0/block/weight"][0])
    y = y.reshape(4, 4, 2, 8).mean(2)
    for i in range(2):
        y = y + np.tanh(y @ w["stack_1/block/weight"][i])
    np.testing.assert_allclose(got.out, y, rtol=1e-4, atol=1e-5)


def test_transparent() -> None:
    encoder, decoder = mtf.Dim("encoder_layers", 3), mtf.Dim("decoder_layers", 2)

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        def decode(y: mtf.Tensor, memory: mtf.Tensor) -> mtf.Tensor:
            return y + dense("decode")(y * mtf.reduce_mean(memory, "memory_length"))

        return RECIPES["transparent"](block, decode, x, x * 0.5, encoder, decoder)

    got = check_layouts(build, {"x": X}, [LAYOUTS[0], ("x:2;y:2", "length:x;memory_length:y")])
    w = got.variables
    x, outputs = X[1], []
    for i in range(3):
        x = x + np.tanh(x @ w["block/weight"][i])
        outputs.append(x)
    shares = np.exp(w["shares"])
    shares /= shares.sum(-1, keepdims=True)
    y = X[1] * 0.5
    for j in range(2):
        memory = sum(s * o for s, o in zip(shares[j], outputs, strict=True)).mean(1, keepdims=True)
        y = y + np.tanh(y * memory @ w["decode/weight"][j])
    np.testing.assert_allclose(got.out, y, rtol=1e-4, atol=1e-5)


def normal(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def test_evolved() -> None:
    attention = layers.Attention(mtf.Dim("heads", 2), mtf.Dim("d_kv", 4))
    feed_forward = layers.FeedForward(mtf.Dim("d_ff", 16))

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return RECIPES["evolved"](x, attention, feed_forward)

    layouts = [("x:2;y:2", "batch:x;heads:y;d_ff:y"), ("x:2;y:2", "length:x;d_model:y")]
    got = check_layouts(build, {"x": X}, layouts, atol=1e-4)
    w = got.variables
    half = run(lambda g, x: RECIPES["residual"](RECIPES["gated"], x, "glu"), {"x": X})
    a, b = (normal(X[1]) @ w[f"glu/dense_product/{i}/weight"] for i in (0, 1))
    y = X[1] + a / (1 + np.exp(-b))
    np.testing.assert_allclose(half.out, y, rtol=1e-4, atol=1e-5)
    n = normal(y)
    wide = np.maximum(n @ w["branches/conv1x1/weight"], 0)
    padded = np.pad(n, ((0, 0), (1, 1), (0, 0)))
    narrow = np.maximum(sum(padded[:, j : j + 8] @ w["branches/conv3x1/weight"][j] for j in range(3)), 0)
    wide[..., :4] += narrow
    padded = np.pad(normal(wide), ((0, 0), (4, 4), (0, 0)))
    mixed = sum(padded[:, j : j + 8] * w["branches/conv9x1/depthwise/weight"][j] for j in range(9))
    y[..., :4] += mixed @ w["branches/conv9x1/pointwise/weight"]

    def rest(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        x = RECIPES["residual"](attention, x, "attention")
        return RECIPES["residual"](feed_forward, x, "feed_forward")

    np.testing.assert_allclose(got.out, run(rest, {"x": (X[0], y)}).out, rtol=1e-3, atol=1e-4)


def test_fixup() -> None:
    """The identity at first; weights that are not last are smaller by a known factor."""
    feed_forward = layers.FeedForward(mtf.Dim("d_ff", 16))

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return RECIPES["fixup"](feed_forward, x, branches=16, layers=2)

    got = run(build, {"x": X})
    np.testing.assert_array_equal(got.out, X[1].astype(np.float32))
    assert not got.variables["fixup/feed_forward/wo"].any()
    assert np.abs(got.after["fixup/feed_forward/wo"]).max() > 1e-3

    def scoped(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        with g.scope("fixup"):
            return feed_forward(x)

    plain = run(scoped, {"x": X}).variables["fixup/feed_forward/wi"]
    np.testing.assert_allclose(got.variables["fixup/feed_forward/wi"], plain / 4, rtol=1e-5)


def log_softmax(x: Any) -> Any:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def to_vocab(x: mtf.Tensor) -> mtf.Tensor:
    return layers.Dense((V,), ("d_model",), name="logits")(x)


def test_distilled() -> None:
    def build(g: mtf.Graph, x: mtf.Tensor, ids: mtf.Tensor) -> mtf.Tensor:
        return RECIPES["distilled"](to_vocab, to_vocab, x, ids.cast("int32"), V, 2.0, 0.25)

    made = [
        run(build, {"x": X, "ids": IDS}, *place) for place in (("one:1", ""), ("x:2;y:2", "vocab:x;batch:y"))
    ]
    for got in made:
        w = got.variables
        student, teacher = (X[1] @ w[f"{n}/logits/weight"] for n in ("student", "teacher"))
        hard = -np.take_along_axis(log_softmax(student), IDS[1][..., None], -1).mean()
        soft = -(np.exp(log_softmax(teacher / 2)) * log_softmax(student / 2)).sum(-1).mean()
        np.testing.assert_allclose(got.out, 0.75 * hard + 0.25 * 4 * soft, rtol=1e-4)
        np.testing.assert_array_equal(got.after["teacher/logits/weight"], w["teacher/logits/weight"])
        assert np.abs(got.after["student/logits/weight"] - w["student/logits/weight"]).max() > 1e-5


def test_ensemble() -> None:
    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return RECIPES["ensemble"](to_vocab, x, mtf.Dim("members", 3), V)

    got = check_layouts(build, {"x": X}, [*LAYOUTS, ("x:2;y:2", "vocab:x;batch:y")])
    each = np.exp(log_softmax(np.einsum("bld,mdv->mblv", X[1], got.variables["logits/weight"])))
    np.testing.assert_allclose(got.out, np.log(each.mean(0)), rtol=1e-4, atol=1e-5)


def test_parallel() -> None:
    got = check_layouts(lambda g, x: RECIPES["parallel"]([dense("one"), dense("two")], x), {"x": X}, LAYOUTS)
    one, two = (np.tanh(X[1] @ got.variables[f"{n}/weight"]) for n in ("one", "two"))
    np.testing.assert_allclose(got.out, (one + two) / np.sqrt(2), rtol=1e-4, atol=1e-5)


def test_masked() -> None:
    attention = layers.Attention(mtf.Dim("heads", 2), mtf.Dim("d_kv", 4))
    segments = np.repeat([[0, 0, 0, 1, 1, 1, 1, 1]], 4, 0)
    ids = np.where(np.arange(8) == 7, 0, IDS[1] + 1)

    def build(g: mtf.Graph, x: mtf.Tensor, ids: mtf.Tensor, segments: mtf.Tensor) -> mtf.Tensor:
        return RECIPES["masked"](attention, x, ids.cast("int32"), segments.cast("int32"))

    inputs = {"x": X, "ids": (IDS[0], ids), "segments": (IDS[0], segments)}
    got = check_layouts(build, inputs, [*LAYOUTS, ("x:2;y:2", "length:x;memory_length:y")])
    # Two texts apart, each read from left to right.
    causal = layers.Attention(mtf.Dim("heads", 2), mtf.Dim("d_kv", 4), causal=True)
    parts = [
        run(lambda g, x: causal(x), {"x": (f"batch:4 length:{b - a} d_model:8", X[1][:, a:b])}).out
        for a, b in ((0, 3), (3, 7))
    ]
    np.testing.assert_allclose(got.out[:, :7], np.concatenate(parts, 1), rtol=1e-4, atol=1e-5)
    assert not got.out[:, 7].any()


def test_pooled() -> None:
    classes = mtf.Dim("classes", 2)
    got = check_layouts(lambda g, x: RECIPES["pooled"](x, classes), {"x": X}, LAYOUTS)
    w = got.variables
    want = np.tanh(X[1][:, 0] @ w["pooler/weight"]) @ w["classes/weight"]
    np.testing.assert_allclose(got.out, want, rtol=1e-4, atol=1e-5)


def test_weights_of_classes() -> None:
    weights = np.linspace(0.5, 4.0, 8)

    def build(g: mtf.Graph, x: mtf.Tensor, ids: mtf.Tensor) -> mtf.Tensor:
        return RECIPES["weighted_loss"](mtf.rename(x, d_model="vocab"), ids.cast("int32"), V, weights)

    got = check_layouts(build, {"x": X, "ids": IDS}, [*LAYOUTS, ("x:2;y:2", "vocab:x;batch:y")])
    each = np.log(np.exp(X[1]).sum(-1)) - np.take_along_axis(X[1], IDS[1][..., None], -1)[..., 0]
    np.testing.assert_allclose(got.out, np.average(each, weights=weights[IDS[1]]), rtol=1e-5)


def test_recurrent() -> None:
    hidden = mtf.Dim("hidden", 8)

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return RECIPES["recurrent"](mtf.rename(x, d_model="hidden"), hidden)

    got = check_layouts(build, {"x": X}, [("x:2;y:2", "batch:x;hidden:y"), ("x:2;y:2", "hidden_in:x")])
    w = got.variables["w"]
    np.testing.assert_allclose(w @ w.T, np.eye(8), atol=1e-6)
    np.testing.assert_allclose(got.out, X[1] @ w, rtol=1e-4, atol=1e-5)


def test_local_and_global() -> None:
    """As many layers one after the other give."""
    heads, d_kv = mtf.Dim("heads", 2), mtf.Dim("d_kv", 4)
    local = layers.Attention(heads, d_kv, causal=True, window=3)
    whole, groups = layers.Attention(heads, d_kv, causal=True), mtf.Dim("groups", 2)

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return RECIPES["local_and_global"](x, groups, local, whole, block)

    made = check_layouts(build, {"x": X}, LAYOUTS).variables

    def unrolled(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        for n in range(groups.size):
            for name, attend in (("local_0", local), ("local_1", local), ("global", whole)):
                initial = g.initialized(lambda at, _, n=n: made[at.split("/", 1)[1]][n])
                with initial, g.scope(str(n)), g.scope(name):
                    x = block(x + attend(layers.RMSNorm()(x)))
        return x

    got = run(build, {"x": X})
    np.testing.assert_allclose(run(unrolled, {"x": X}).out, got.out, rtol=1e-4, atol=1e-5)


def test_float8_stack() -> None:
    """The same but for rounding to three bits behind the point."""

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return RECIPES["float8_stack"](block, x, mtf.Dim("layers", 2))

    got = check_layouts(build, {"x": X}, LAYOUTS)
    y = X[1]
    for w in got.variables["block/weight"]:
        y = y + np.tanh(y @ w)
    assert 1e-3 < np.abs(got.out - y).max() / np.abs(y).max() < 0.1


def test_denoised() -> None:
    """With a network of one map, against the equation step by step; the example's U-Net runs in it."""
    v = mtf.Dim("d_model", 8)

    def network(x: mtf.Tensor, at: mtf.Tensor) -> mtf.Tensor:
        return dense("noise")(x) * (at.cast("float32") * 1e-3)

    got = check_layouts(lambda g, x: RECIPES["denoised"](network, x, 4), {"x": X}, LAYOUTS, atol=1e-4)
    w, left = got.variables["noise/weight"], np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    assert w.shape == (8, v.size)
    x, times = X[1], [999, 666, 333, 0]
    for at, after in zip(times, [*times[1:], None], strict=True):
        noise = np.tanh(x @ w) * at * 1e-3
        image = (x - noise * np.sqrt(1 - left[at])) / np.sqrt(left[at])
        then = 1.0 if after is None else left[after]
        x = image * np.sqrt(then) + noise * np.sqrt(1 - then)
    np.testing.assert_allclose(got.out, x, rtol=1e-3, atol=1e-4)
    unet, run = UNet(4, (1, 2), 1, 4, 2), mtf.Eager("x:2", "height:x", "lockstep")
    with run.step(unroll=False) as g:
        sides = [mtf.Dim(n, s) for n, s in (("batch", 2), ("height", 8), ("width", 8), ("colours", 1))]
        drawn = RECIPES["denoised"](
            unet, g.constant(RNG.normal(size=(2, 8, 8, 1)), sides, "float32"), 2
        ).numpy()
    assert drawn.shape == (2, 8, 8, 1) and np.isfinite(drawn).all()
    assert run.variables["stem/weight"].shape.sizes == (3, 3, 1, 4)


def test_deepseek_experts() -> None:
    """DeepSeek-V2-Lite's: 64 experts of 3 x 2048 x 1408, a shared block of twice that width, a router."""
    g = mtf.Graph()
    x = g.input("x", [mtf.Dim("batch", 1), mtf.Dim("length", 64), mtf.Dim("d_model", 2048)], "bfloat16")
    y, loss = RECIPES["deepseek_experts"]()(x)
    assert mtf.Model(mtf.reduce_mean(y.cast("float32")) + loss).parameters == 66 * 3 * 2048 * 1408 + 2048 * 64


def test_every_recipe_is_tested() -> None:
    """By its name in a test, or as a part of another recipe."""
    here = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test*recipes.py"))
    assert len(RECIPES) > 20
    calls = {name: len(re.findall(rf"\b{name}\b", CODE)) for name in RECIPES}
    assert [n for n, count in calls.items() if f'RECIPES["{n}"]' not in here and count < 2] == []


def test_the_page_lists_every_recipe() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")
    listed = {
        name
        for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    parts = {"residual", "beside", "branches", "gated", "orthogonal"}
    assert listed | parts == set(RECIPES)
