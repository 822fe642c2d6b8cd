"""Random numbers of a step in parts are those of the whole batch, however the parts are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.schedules import KINDS, ONE_WAY, kind_name
from mesh_tf_core.ops.context import FORMS

B, L, M, D = mtf.Dim("batch", 8), mtf.Dim("length", 4), mtf.Dim("memory", 4), mtf.Dim("d", 6)
HEADS, LAYERS = mtf.Dim("heads", 2), mtf.Dim("layers", 4)
PARTS = (1, 2, 4, 8)


def model() -> mtf.Model:
    """Draws in every way, before, in and behind the layers: for each element, with the batch last, for whole
    rows, for none of the batch, and for the weights of attention."""
    g = mtf.Graph()
    rate = mtf.Dim("rate", 1)

    def drawing(x: mtf.Tensor) -> mtf.Tensor:
        x = mtf.dropout(mtf.dropout(x, 0.3), 0.2, noise_shape=[B, D])
        turned = mtf.random_normal(g.random_key(), [L, D, B], stddev=0.1)
        rows = mtf.random_uniform(g.random_key(), [B], dtype="float32")
        lone = mtf.random_uniform(g.random_key(), [rate, B], dtype="float32")
        return (x + turned.cast("float64")) * (rows + mtf.reduce_sum(lone, rate)).cast("float64")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        w = g.variable("w", [D], mtf.Normal(0.5), "float64")
        w += mtf.random_normal(g.random_key(), [D], stddev=0.1).cast("float64")
        key = mtf.rename(h, length="memory")
        return mtf.tanh(drawing(h * w + mtf.attention(h * w, key, key, L, M, D, causal=True, dropout=0.3)))

    table = g.variable("table", [D], mtf.Normal(0.5), "float64")
    x = drawing(g.input("x", [B, L, HEADS, D], "float64") * table)
    h = drawing(mtf.scan(layer, x, LAYERS))
    return mtf.Model(mtf.reduce_mean(mtf.square(h - 0.3)) * 10.0, mtf.SGD(0.3))


def step(built: mtf.Model, mesh: str, layout: str, parts: int, schedule: str = "gpipe", **more: Any) -> Any:
    """The loss of a step, and the variables after it."""
    options = mtf.Options(microbatches=parts, schedule=schedule, **more)
    program = built.lower(mtf.Mesh(mesh), mtf.Layout(layout), options)
    x = np.random.default_rng(4).normal(size=(8, 4, 2, 6))
    engine = LockstepEngine(program)
    loss = float(engine.step({"x": x.reshape(program.values[program.feeds["x"]].shape.sizes)})["loss"])
    return {"loss": loss, **{name: np.asarray(engine.read(name)) for name in ("w", "table")}}


def same(found: Any, expected: Any) -> None:
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.fixture(scope="module")
def built() -> mtf.Model:
    return model()


@pytest.fixture(scope="module")
def alone(built: mtf.Model) -> Any:
    return step(built, "one:1", "", 1)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.one_in(2)
def test_parts_draw_what_the_whole_batch_draws(parts: int, built: mtf.Model, alone: Any) -> None:
    same(step(built, "one:1", "", parts), alone)
    if parts < B.size:
        same(step(built, "x:2;y:2", "batch:x;d:y", parts, storage={"w": 3, "table": 2}), alone)


@pytest.mark.parametrize("schedule", ONE_WAY)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.one_in(18)
def test_stages_draw_what_one_device_draws(parts: int, schedule: str, built: mtf.Model, alone: Any) -> None:
    same(step(built, "pipe:2", "layers:pipe", parts, schedule), alone)


@pytest.mark.parametrize("schedule", ONE_WAY)
@pytest.mark.one_in(6)
def test_what_runs_again_draws_the_same(schedule: str, built: mtf.Model, alone: Any) -> None:
    whole = not KINDS[kind_name(schedule)].split  # of which no stage runs again as a whole
    how = {"recompute": frozenset({"layers", *["tick"] * whole})}
    same(step(built, "pipe:2;data:2", "layers:pipe;batch:data", 4, schedule, **how), alone)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.one_in(2)
def test_every_form_of_attention_draws_the_same(form: str, built: mtf.Model, alone: Any) -> None:
    how = {"context": frozenset({("memory", form)})}
    same(step(built, "x:2;data:2", "length:x;memory:x;batch:data", 2, **how), alone)
