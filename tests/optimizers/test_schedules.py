"""Schedules, clipping and loss scaling against the published formulas, and the same under split layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, Local
from mesh_tf_core.lower.verify import ProgramError, verify
from mesh_tf_core.ops.basic import Total

N, A, B = mtf.Dim("n", 8), mtf.Dim("a", 8), mtf.Dim("b", 4)
LAYOUTS = ["", "n:m;a:k", "a:m;b:k"]
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 8)).astype(np.float32), "y": RNG.normal(size=(8, 4)).astype(np.float32)}


def engine_of(optimizer: mtf.Optimizer, layout: str = "", **options: Any) -> LockstepEngine:
    """Mean squared error of a linear map with a bias."""
    g = mtf.Graph()
    x, y = g.input("x", [N, A], "float32"), g.input("y", [N, B], "float32")
    w, bias = g.variable("w", [A, B], mtf.Normal(0.5)), g.variable("bias", [B], mtf.ONES)
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], [N, B]) + bias - y))
    model = mtf.Model(loss, optimizer)
    return LockstepEngine(
        verify(model.lower(mtf.Mesh("m:2;k:2"), mtf.Layout(layout), mtf.Options(**options)))
    )


def gradients_of(w: Any, bias: Any, batch: dict[str, Any] = BATCH) -> tuple[Any, Any]:
    error = batch["x"] @ w + bias - batch["y"]
    return 2 / error.size * batch["x"].T @ error, 2 / error.size * error.sum(0)


def rsqrt_rate(t: int) -> float:
    return 0.5 * min(t / 3, math.sqrt(3 / t))


def cosine_rate(t: int) -> float:
    u = min(1.0, (t - 3) / 4)
    return 0.5 * (t / 3 if t < 3 else 0.2 + 0.8 * (1 + math.cos(math.pi * u)) / 2)


def linear_rate(t: int) -> float:
    return 0.5 * (t / 3 if t < 3 else 1 - 0.8 * min(1.0, (t - 3) / 4))


SCHEDULES: dict[str, tuple[Any, Callable[[int], float]]] = {
    "rsqrt": (mtf.WarmupRsqrt(0.5, 3), rsqrt_rate),
    "cosine": (mtf.WarmupCosine(0.5, 3, 7, 0.2), cosine_rate),
    "linear": (mtf.WarmupLinear(0.5, 3, 7, 0.2), linear_rate),
    "product": (
        0.5 * mtf.LinearWarmup(3) * mtf.RsqrtDecay(4),
        lambda t: 0.5 * min(1, t / 3) / max(t, 4) ** 0.5,
    ),
    "sum": (
        mtf.LinearDecay(2, 6) * 0.4 + 0.1 * mtf.LinearWarmup(5) + 0.05,
        lambda t: 0.4 * min(1, max(0, (6 - t) / 4)) + 0.1 * min(1, t / 5) + 0.05,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rates(name: str, layout: str) -> None:
    """Plain descent shows the rate: the weights move by it times the gradient."""
    schedule, rate = SCHEDULES[name]
    engine = engine_of(mtf.SGD(schedule), layout)
    engine.initialize()
    for t in range(1, 10):
        w, bias = engine.read("w").astype(np.float64), engine.read("bias").astype(np.float64)
        engine.step(BATCH)
        dw, dbias = gradients_of(w, bias)
        np.testing.assert_allclose(engine.read("w"), w - rate(t) * dw, rtol=1e-4, atol=1e-6, err_msg=str(t))
        np.testing.assert_allclose(engine.read("bias"), bias - rate(t) * dbias, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", [mtf.SGD, mtf.Adam, mtf.Adafactor])
def test_a_flat_schedule_is_a_number(optimizer: Any) -> None:
    flat, number = engine_of(optimizer(mtf.WarmupLinear(0.1, 1, 100, 1.0))), engine_of(optimizer(0.1))
    for _ in range(3):
        assert flat.step(BATCH)["loss"] == pytest.approx(number.step(BATCH)["loss"], rel=1e-6)


@pytest.mark.parametrize("limit", [0.05, 100.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_scales_all_gradients_together(limit: float, layout: str) -> None:
    engine = engine_of(mtf.SGD(0.1, clip_norm=limit), layout)
    engine.initialize()
    w, bias = engine.read("w").astype(np.float64), engine.read("bias").astype(np.float64)
    dw, dbias = gradients_of(w, bias)
    norm = math.sqrt((dw**2).sum() + (dbias**2).sum())
    assert 0.05 < norm < 100  # one limit binds, the other does not
    engine.step(BATCH)
    factor = min(1.0, limit / norm)
    np.testing.assert_allclose(engine.read("w"), w - 0.1 * factor * dw, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(engine.read("bias"), bias - 0.1 * factor * dbias, rtol=1e-5, atol=1e-7)


def test_the_norm_is_one_sum() -> None:
    """Over the axes of all gradients; each counts what others that add up have, too, by its share."""
    program = engine_of(mtf.SGD(0.1, clip_norm=1.0), "a:m;b:k").program
    late = [i for i in program.code if isinstance(i, AllReduce) and i.origin.phase == Phase.UPDATE]
    assert [(i.axes, len(i.inputs), i.origin.scope) for i in late] == [(("m", "k"), 1, "gradient_norm")]
    at, total = next((n, i) for n, i in enumerate(program.code) if i.outputs == late[0].inputs)
    assert isinstance(total, Local) and total.op == Total((1, 2))
    wrong = (*program.code[:at], replace(total, op=Total((1, 1))), *program.code[at + 1 :])
    with pytest.raises(ProgramError, match=", but 2 of the summed devices hold a copy"):
        verify(replace(program, code=wrong))


@pytest.mark.parametrize("options", [{"storage": {"w": 2, "bias": 3}}, {"microbatches": 2}])
def test_clipping_with_split_storage_and_microbatches(options: dict[str, Any]) -> None:
    optimizer = mtf.Adam(mtf.WarmupRsqrt(0.1, 2), clip_norm=0.05, loss_scale=mtf.LossScale())
    plain, other = engine_of(optimizer), engine_of(optimizer, "n:m", **options)
    shapes = {n: other.program.values[i].shape.sizes for n, i in other.program.feeds.items()}
    for _ in range(3):
        got = other.step({n: x.reshape(shapes[n]) for n, x in BATCH.items()})
        assert got["loss"] == pytest.approx(plain.step(BATCH)["loss"], rel=1e-5)
    np.testing.assert_allclose(other.read("w"), plain.read("w"), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", [mtf.SGD, mtf.Adam])
def test_a_scaled_loss_gives_the_same_step(optimizer: Any, layout: str) -> None:
    """Powers of two round nothing."""
    scaled, plain = engine_of(optimizer(0.1, loss_scale=mtf.LossScale()), layout), engine_of(optimizer(0.1))
    for _ in range(3):
        assert scaled.step(BATCH)["loss"] == pytest.approx(plain.step(BATCH)["loss"], rel=1e-6)
    np.testing.assert_allclose(scaled.read("w"), plain.read("w"), rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")
def test_steps_that_are_not_finite_are_left_out(layout: str) -> None:
    engine = engine_of(mtf.Adam(0.1, loss_scale=mtf.LossScale(8.0, growth_interval=2)), layout)
    engine.initialize()
    bad = {**BATCH, "x": np.where(np.arange(64).reshape(8, 8) == 9, np.inf, BATCH["x"]).astype(np.float32)}
    scales = []
    for batch in (BATCH, BATCH, BATCH, bad, BATCH, BATCH):
        before = {n: engine.read(n) for n in ("w", "bias", "w/adam_m", "bias/adam_v", "step")}
        engine.step(batch)
        scales.append(float(engine.read("loss_scale")))
        for name, value in before.items():
            assert np.array_equal(engine.read(name), value) == (batch is bad), name
    # Doubled after two good steps in a row; the bad one halves it and the count begins anew.
    assert scales == [8, 16, 16, 8, 8, 16]


def test_float16_gradients_survive_with_a_scale() -> None:
    """A gradient of 2^-26 is zero in float16, its scaled one is not."""

    def weight(**options: Any) -> float:
        g = mtf.Graph()
        w = g.variable("w", [A], mtf.ONES, activation_dtype="float16")
        # Backward goes through float16 with the gradient 2^-26.
        loss = mtf.reduce_sum((w * 1.0).cast("float32")) * 2.0**-26
        engine = LockstepEngine(
            mtf.Model(loss, mtf.SGD(2.0**24, **options)).lower(mtf.Mesh("m:1"), mtf.Layout())
        )
        engine.step({})
        return float(engine.read("w")[0])

    assert weight() == 1.0
    assert weight(loss_scale=mtf.LossScale()) == 0.75


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mtf.WarmupRsqrt(0.0, 3), "WarmupRsqrt: peak must be positive, found 0"),
        (lambda: mtf.WarmupRsqrt(0.1, 0), r"warmup must be 1 to 2\^63 - 1 steps, found 0"),
        (lambda: mtf.WarmupCosine(0.1, 5, 5), "total=5 steps must be more than warmup=5"),
        (lambda: mtf.WarmupLinear(0.1, 5, 9, 2.0), "floor must be from 0 to 1"),
        (lambda: mtf.SGD(0.1, clip_norm=-1.0), "clip_norm must be at least 0"),
        (lambda: mtf.LossScale(0.0), "LossScale: initial must be from 1 to"),
        (lambda: mtf.LossScale(8.0, -1), "LossScale: growth_interval must be at least 0 steps, found"),
    ],
)
def test_bad_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()


def test_variables_with_rates_of_their_own() -> None:
    engine = engine_of(mtf.SGD(0.1, rates={"^bias$": 0.5 * mtf.LinearWarmup(2)}), "n:m;a:k")
    engine.initialize()
    for t in (1, 2, 3):
        w, bias = engine.read("w").astype(np.float64), engine.read("bias").astype(np.float64)
        engine.step(BATCH)
        dw, dbias = gradients_of(w, bias)
        np.testing.assert_allclose(engine.read("w"), w - 0.1 * dw, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            engine.read("bias"), bias - 0.5 * min(1, t / 2) * dbias, rtol=1e-4, atol=1e-6
        )


def test_bad_rates() -> None:
    with pytest.raises(
        mtf.UserError,
        match="in `rates` matches no variable; the variables are",
    ):
        engine_of(mtf.SGD(0.1, rates={"offset": 0.5}))
    with pytest.raises(mtf.UserError, match="in `rates` is not a valid regular expression"):
        mtf.SGD(0.1, rates={"(": 0.5})
    with pytest.raises(mtf.UserError, match="learning_rate must be positive and finite, found 0"):
        mtf.SGD(0.1, rates={"w": 0.0})
    with pytest.raises(mtf.UserError, match="only schedules and positive numbers can be added to a schedule"):
        mtf.LinearWarmup(3) * -1
    with pytest.raises(mtf.UserError, match="steps must be at least 1, found 0"):
        mtf.LinearWarmup(0)
    with pytest.raises(mtf.UserError, match="hold must be at least 1 step, found 0"):
        mtf.RsqrtDecay(0)
    with pytest.raises(mtf.UserError, match="LinearDecay: begin must be at least 0 and less than end, found"):
        mtf.LinearDecay(3, 3)
    with pytest.raises(mtf.UserError, match="Adafactor: beta1 must be at least 0 and less than 1, found"):
        mtf.Adafactor(0.1, beta1=1.0)
