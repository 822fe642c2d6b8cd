"""Optimizers against the published update rules, written out in NumPy, alone and under split layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from examples.transformer_lm import model as transformer
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.lower.verify import verify
from mesh_tf_core.ops.eight_bits import SMALLEST, FromEightBits, ToEightBits, largest

Array = Any
Step = Callable[[Array, Array], Array]
RATE = 0.05


def sgd(momentum: float) -> Iterator[Callable[[Array, Array], Array]]:
    state: dict[str, Array] = {}

    def step(w: Array, g: Array) -> Array:
        state["v"] = momentum * state.get("v", 0.0) + g
        return w - RATE * state["v"]

    yield step


def adam(decay: float) -> Iterator[Step]:
    m, v, t = 0.0, 0.0, 0

    def step(w: Array, g: Array) -> Array:
        nonlocal m, v, t
        t += 1
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        update = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        return w - RATE * (update + decay * w)

    yield step


def adafactor(factored: bool, momentum: float = 0.0) -> Iterator[Step]:
    m: Array = 0.0
    row: Array = 0.0
    column: Array = 0.0
    v: Array = 0.0
    t = 0

    def step(w: Array, g: Array) -> Array:
        nonlocal row, column, v, t, m
        t += 1
        beta = 1 - t**-0.8
        g2 = g * g + 1e-30
        if factored:
            row = beta * row + (1 - beta) * g2.mean(1)
            column = beta * column + (1 - beta) * g2.mean(0)
            v = np.outer(row, column) / row.mean()
        else:
            v = beta * v + (1 - beta) * g2
        u = g / np.sqrt(v)
        u = u / max(1.0, np.sqrt((u * u).mean()))
        m = momentum * m + (1 - momentum) * RATE * max(1e-3, np.sqrt((w * w).mean())) * u
        return w - m

    yield step


CASES = {
    "sgd": (mtf.SGD(RATE), lambda: sgd(0.0)),
    "momentum": (mtf.SGD(RATE, momentum=0.9), lambda: sgd(0.9)),
    "adam": (mtf.Adam(RATE), lambda: adam(0.0)),
    "adam with weight decay": (mtf.Adam(RATE, weight_decay=0.1), lambda: adam(0.1)),
    "adam that decays others": (mtf.Adam(RATE, weight_decay=0.1, undecayed=("^w$",)), lambda: adam(0.0)),
    "adafactor": (mtf.Adafactor(RATE), lambda: adafactor(False)),
    "adafactor, momentum": (mtf.Adafactor(RATE, beta1=0.9), lambda: adafactor(False, 0.9)),
    "adafactor, factored": (mtf.Adafactor(RATE, min_dim=4), lambda: adafactor(True)),
}
N, A, B = mtf.Dim("n", 8), mtf.Dim("a", 8), mtf.Dim("b", 4)
RNG = np.random.default_rng(0)
BATCHES = [
    {"x": RNG.normal(size=(8, 8)).astype(np.float32), "y": RNG.normal(size=(8, 4)).astype(np.float32)}
    for _ in range(5)
]


def regression(optimizer: mtf.Optimizer) -> mtf.Model:
    """Mean squared error of a linear map."""
    g = mtf.Graph()
    x, y = g.input("x", [N, A], "float32"), g.input("y", [N, B], "float32")
    w = g.variable("w", [A, B], mtf.Normal(0.5))
    return mtf.Model(mtf.reduce_mean(mtf.square(mtf.einsum([x, w], [N, B]) - y)), optimizer)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["", "n:m;a:k", "a:m;b:k", "b:k+m"])
def test_against_numpy(name: str, layout: str) -> None:
    optimizer, reference = CASES[name]
    model = regression(optimizer)
    engine = LockstepEngine(verify(model.lower(mtf.Mesh("m:2;k:2"), mtf.Layout(layout))))
    engine.initialize()
    w = engine.read("w").astype(np.float64)
    step = next(reference())
    for batch in BATCHES:
        error = batch["x"] @ w - batch["y"]
        assert engine.step(batch)["loss"] == pytest.approx((error**2).mean(), rel=1e-5)
        w = step(w, 2 / error.size * batch["x"].T @ error)
        np.testing.assert_allclose(engine.read("w"), w, rtol=2e-4, atol=2e-5)
    assert engine.read("step") == len(BATCHES)


def test_layers_of_a_scan_are_factored_apart() -> None:
    """Stacked variables: each layer has its own row, column, clipping and scale, as if it were unrolled."""
    layers = 3

    def build(stacked: bool) -> mtf.Model:
        g = mtf.Graph()
        x = g.input("x", [N, A], "float32")
        c = mtf.Dim("c", 8)
        init = mtf.Constant(0.3)

        def layer(h: mtf.Tensor, name: str = "w") -> mtf.Tensor:
            y = mtf.einsum([h, g.variable(name, [A, c], init) * bend], [N, c])
            return mtf.tanh(mtf.rename(y, c="a"))

        bend = mtf.one_hot(mtf.mtf_range(g, A), c) + 0.1
        if stacked:
            h = mtf.scan(layer, x, mtf.Dim("layers", layers))
        else:
            h = x
            for i in range(layers):
                h = layer(h, f"w{i}")
        return mtf.Model(mtf.reduce_mean(mtf.square(h - 0.5)), mtf.Adafactor(RATE, min_dim=4))

    one, many = (LockstepEngine(build(s).lower(mtf.Mesh("m:2"), mtf.Layout("c:m"))) for s in (True, False))
    for batch in BATCHES:
        only_x = {"x": batch["x"]}
        assert one.step(only_x)["loss"] == pytest.approx(many.step(only_x)["loss"], rel=1e-5)
    for i in range(layers):
        np.testing.assert_allclose(one.read("w")[i], many.read(f"w{i}"), rtol=1e-4, atol=1e-6)


def test_master_copies_stay_float32() -> None:
    """Updates too small for bfloat16 add up in the float32 variable."""
    g = mtf.Graph()
    w = g.variable("w", [A], mtf.ONES, activation_dtype="bfloat16")
    model = mtf.Model(mtf.reduce_sum(w.cast("float32")), mtf.SGD(1e-4))
    engine = LockstepEngine(model.lower(mtf.Mesh("m:2"), mtf.Layout("a:m")))
    for _ in range(10):
        engine.step({})
    np.testing.assert_allclose(engine.read("w"), 1 - 1e-3, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_averages_of_adam_have_the_type_that_is_asked_for(dtype: str) -> None:
    made = transformer(
        layers=1, d_model=8, heads=2, d_kv=4, d_ff=16, vocab=16, batch=2, length=8, moments=dtype
    )
    run = mtf.Trainer(made, "x:2", "batch:x", engine="lockstep")
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8) % 16
    losses = [run.step({"tokens": tokens, "targets": tokens})["loss"] for _ in range(3)]
    assert losses[-1] < losses[0]
    slots = [v for n, v in run.program.variables.items() if n.endswith(("adam_m", "adam_v"))]
    assert slots and {v.variable.dtype for v in slots} == {dtype}


def test_averages_of_an_unknown_type_are_refused() -> None:
    with pytest.raises(mtf.UserError, match="int4"):
        mtf.Adam(0.1, moments="int4")
    with pytest.raises(mtf.UserError, match="sgd"):
        transformer(optimizer="sgd", moments="bfloat16")


def codes(signed: bool) -> np.ndarray:
    """The numbers of codes, as bitsandbytes makes them (`create_dynamic_map`)."""
    found = [0.0]
    for decade in range(7):
        ends = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        found += [*(10.0 ** (decade - 6) * (ends[:-1] + ends[1:]) / 2)]
    return np.array([*found, 1.0, *(-n for n in found[1:])] if signed else [*found, 1.0])


@pytest.mark.parametrize("layout", ["", "rows:m", "d:m"])
@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_are_the_nearest_codes_of_a_row(signed: bool, layout: str) -> None:
    rng, g = np.random.default_rng(0), mtf.Graph()
    given = (rng.normal(size=(8, 512)) * np.exp(4 * rng.normal(size=(8, 512)))).astype(np.float32)
    given[0], given[1, 3:] = 0, 0
    given = given if signed else np.abs(given)
    x = g.input("x", [mtf.Dim("rows", 8), mtf.Dim("d", 512)], "float32")
    most = largest(x, "d")
    kept = g.apply(ToEightBits(signed), x, most)
    results = {"y": g.apply(FromEightBits(signed), kept, most), "kept": kept.cast("int32")}
    found = LockstepEngine(mtf.lower(g, mtf.Mesh("m:2"), mtf.Layout(layout), results)).step({"x": given})
    top = np.maximum(np.abs(given).max(1, keepdims=True), 1e-30)
    near = np.abs((given / top)[..., None] - codes(signed)).argmin(-1)
    np.testing.assert_allclose(found["y"], codes(signed)[near] * top * (top > 1e-30), rtol=1e-5)
    assert found["kept"].min() >= -128 and found["kept"].max() <= 127


def test_eight_bits_of_averages_do_not_shrink() -> None:
    """300 steps of averages that are stored and loaded in each, of constant gradients: the root of the second
    one stays within 5 % of float32's, the largest elements of both exactly there."""

    def stored(signed: bool) -> Callable[[Array], Array]:
        g = mtf.Graph()
        x = g.input("x", [mtf.Dim("d", 128)], "float32")
        most = largest(x, "d")
        found = g.apply(FromEightBits(signed), g.apply(ToEightBits(signed), x, most), most)
        engine = LockstepEngine(mtf.lower(g, mtf.Mesh("m:1"), mtf.Layout(""), {"y": found}))
        return lambda a: engine.step({"x": a.astype(np.float32)})["y"]

    first, second = stored(True), stored(False)
    size = np.random.default_rng(0).uniform(0.4, 3.9, 128)
    size[0] = 4.0
    m, root, wide_m, wide = np.zeros((4, 128))
    for _ in range(300):
        m, wide_m = 0.9 * first(m) + 0.1 * size, 0.9 * wide_m + 0.1 * size
        root = np.sqrt(0.99 * second(root) ** 2 + 0.01 * size**2)
        wide = 0.99 * wide + 0.01 * size**2
    part = root / np.sqrt(wide)
    assert np.abs(part - 1).max() < 0.05, part
    assert part[0] == pytest.approx(1, rel=1e-4) and m[0] == pytest.approx(wide_m[0], rel=1e-4)


def test_stacked_vectors_stay_in_float32() -> None:
    """A norm of 64 layers in a loop has the averages of a norm that no loop runs."""
    made = transformer(**{**EIGHT, "layers": 64}, moments="int8").step_graph.variables
    norms = [v for n, v in made.items() if "norm" in n and n.endswith(("adam_m", "adam_v"))]
    assert max(v.shape.size for v in norms) >= SMALLEST
    assert {v.dtype for v in norms} == {"float32"} and made["attention/q/adam_m"].dtype == "int8"


EIGHT = {
    "layers": 2,
    "d_model": 64,
    "heads": 2,
    "d_kv": 64,
    "d_ff": 128,
    "vocab": 64,
    "batch": 8,
    "length": 16,
}


@cache
def trained(moments: str, layout: str, stage: int) -> tuple[list[float], int, int]:
    """Losses of four steps; bytes of the averages of one device, and of all."""
    tokens = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    model = transformer(**EIGHT, moments=moments)
    names = [v.name for v in model.graph.variables.values() if v.trainable and len(v.shape)]
    run = mtf.Trainer(model, "x:2;y:2", layout, mtf.Options(dict.fromkeys(names, stage)), "lockstep")
    losses = [run.step(batch)["loss"] for _ in range(4)]
    state = [v for n, v in run.program.variables.items() if "/adam_" in n]
    own = sum(v.value.local_bytes(run.program.mesh) for v in state)
    return losses, own, sum(v.variable.bytes for v in state)


@pytest.mark.parametrize(
    ("layout", "stage"), [("batch:x;d_ff:y", 1), ("d_model:x;vocab:y", 0), ("batch:x+y", 3)]
)
@pytest.mark.one_in(3)
@pytest.mark.nightly
def test_eight_bits_of_averages(layout: str, stage: int) -> None:
    """A byte an element and a number a row, split as the variable is; losses as in float32."""
    alone, split = trained("int8", "", 0), trained("int8", layout, stage)
    wide = trained("float32", layout, stage)
    np.testing.assert_allclose(split[0], alone[0], rtol=1e-4)
    np.testing.assert_allclose(split[0], wide[0], rtol=5e-3)
    assert split[0] != wide[0]
    assert 0.25 < split[2] / wide[2] < 0.29 and split[1] / wide[1] < 0.36
