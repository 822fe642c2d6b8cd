"""State of a JAX function: in one variable or many, evaluated by another build, and in microbatches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import layoutopt
import mesh_tf_core as mtf
from tests.importers.jax_plans import plan_of

LAYERS, WIDTH, ROWS = 3, 16, 8
RATES: dict[str, tuple[float, ...]] = {
    "alike": (0.25, 0.25, 0.25),
    "rising": (0.1, 0.2, 0.3),
    "first": (0.25, 0.0, 0.0),
    "last": (0.0, 0.0, 0.25),
}
"""Rates of dropout: which layers become a loop depends on them."""


def numbers(*shape: int, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).normal(size=shape) * 0.3).astype(np.float32)


TABLES = numbers(WIDTH, seed=8), numbers(WIDTH, seed=9)
BATCH = {"x": numbers(ROWS, WIDTH, seed=7)}
PARAMS = {
    "blocks": [
        {"up": numbers(WIDTH, 24, seed=i), "down": numbers(24, WIDTH, seed=10 + i)} for i in range(LAYERS)
    ]
}
STATE = [{"count": np.zeros((), np.uint32), "mean": numbers(WIDTH, seed=20 + i)} for i in range(LAYERS)]


def dropping(rates: tuple[float, ...]) -> Callable[..., Any]:
    """A loss of layers that count their draws, with a table that only training reads, before another."""

    def loss(params: Any, state: Any, batch: Any, key: Any) -> Any:
        h, new = batch["x"], []
        for p, s, rate in zip(params["blocks"], state, rates, strict=True):
            u = jnp.tanh(h @ p["up"]) @ p["down"]
            if rate:
                key, own = jax.random.split(key)
                u = jnp.where(jax.random.bernoulli(own, 1 - rate, u.shape), u / (1 - rate), 0.0)
                s = {"count": s["count"] + 1, "mean": s["mean"]}
            h = h + u + s["mean"]
            new.append(s)
        h = (h + TABLES[0] if any(rates) else h) * TABLES[1]
        return (h**2).mean(), new

    return loss


def built(rates: tuple[float, ...]) -> layoutopt.JaxModel:
    given = {"state": STATE, "rng": jax.random.key(0), "optimizer": "sgd"}
    return layoutopt.from_jax(dropping(rates), PARAMS, BATCH, **given)


def held(trainer: mtf.Trainer, of: Any) -> Any:
    """One of the user's arrays, of the variable that holds it."""
    found = np.asarray(trainer.engine.read(of.variable))
    return (found if of.layer is None else found[of.layer]).reshape(of.shape)


@pytest.mark.parametrize("rates", RATES)
def test_another_build_of_a_model_evaluates_the_arrays_of_the_training(rates: str) -> None:
    """Whatever layers are a loop in one of the two, and whatever tables only one of them has."""
    model, still = built(RATES[rates]), built((0.0,) * LAYERS)
    trainer = mtf.Trainer(model, mtf.Mesh("a:2"), mtf.Layout("batch:a"), engine="lockstep")
    trainer.step(BATCH)
    blocks = [
        {k: held(trainer, model.origin.parameters[f"blocks/{i}/{k}"]) for k in ("up", "down")}
        for i in range(LAYERS)
    ]
    wanted, _ = dropping((0.0,) * LAYERS)({"blocks": blocks}, STATE, BATCH, jax.random.key(0))
    assert trainer.evaluate([BATCH], model=still)["loss"] == pytest.approx(float(wanted), rel=1e-5)


class Block(nnx.Module):
    """A layer of Flax that counts its draws."""

    def __init__(self, rate: float, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, 24, rngs=rngs), nnx.Linear(24, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.drop(self.down(jax.nn.gelu(self.up(x))))


class Net(nnx.Module):
    """Such layers, one after the other."""

    def __init__(self, layers: int, rate: float) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rate, rngs) for _ in range(layers)])

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def flax(layers: int, rate: float) -> tuple[Callable[..., Any], Any, Any]:
    """Loss, parameters and state of a network of Flax."""
    definition, params, rest = nnx.split(Net(layers, rate), nnx.Param, ...)

    def loss(params: Any, rest: Any, batch: Any) -> Any:
        net = nnx.merge(definition, params, rest)
        value = jnp.square(net(batch["x"])).mean()
        return value, nnx.state(net, nnx.Not(nnx.Param))

    return loss, params, rest


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_network_of_flax_is_evaluated_without_dropout(layers: int) -> None:
    models = []
    for rate in (0.5, 0.0):
        loss, params, rest = flax(layers, rate)
        models.append(layoutopt.from_jax(loss, params, BATCH, state=rest, optimizer="sgd"))
    trainer = mtf.Trainer(models[0], mtf.Mesh("a:1"), mtf.Layout(""), engine="lockstep")
    wanted = float(loss(params, rest, BATCH)[0])
    assert trainer.evaluate([BATCH], model=models[1])["loss"] == pytest.approx(wanted, rel=1e-5)
    dropped = trainer.step(BATCH)["loss"]
    assert abs(float(dropped) - wanted) > 0.01 * wanted


@pytest.mark.parametrize("layers", [2, 4])
def test_training_of_a_network_of_flax_resumes_without_dropout(layers: int, tmp_path: Path) -> None:
    """What no step uses, such as counters at rate 0, need not be in the checkpoint; the rest must be."""
    trainers = []
    for rate in (0.5, 0.25, 0.0):
        loss, params, rest = flax(layers, rate)
        model = layoutopt.from_jax(loss, params, BATCH, state=rest, optimizer="sgd")
        trainers.append(mtf.Trainer(model, mtf.Mesh("a:1"), mtf.Layout(""), engine="lockstep"))
    first, *others = trainers
    first.step(BATCH)
    first.save(tmp_path / "dropped")
    for other in others:
        assert other.restore(tmp_path / "dropped") and other.step_number == 1
        name = next(n for n in other.program.variables if n.endswith("kernel"))
        assert np.array_equal(other.engine.read(name), first.engine.read(name))
    others[-1].save(tmp_path / "still")
    with pytest.raises(mtf.UserError, match=r"has no variable '.*': it was saved by another model"):
        first.restore(tmp_path / "still")


# -- microbatches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", RATES | {"none": (0.0,) * LAYERS})
def test_microbatches_count_the_draws_of_a_step_once(rates: str) -> None:
    """Draws are those of the rows in the whole batch, so a step in parts is the same as a whole one."""
    model = built((RATES | {"none": (0.0,) * LAYERS})[rates])
    found = []
    for parts in (1, 4):
        options = mtf.Options(microbatches=parts)
        trainer = mtf.Trainer(model, mtf.Mesh("a:2"), mtf.Layout("batch:a"), options, engine="lockstep")
        losses = [float(trainer.step(BATCH)["loss"]) for _ in range(2)]
        counts = [held(trainer, of) for path, of in model.origin.state.items() if path.endswith("count")]
        found.append((losses, [int(n) for n in counts]))
    assert found[1][1] == found[0][1]
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)


class Descent:
    """The least of an optimizer, as optax has them."""

    def init(self, params: Any) -> Any:
        return ()

    def update(self, grads: Any, state: Any, params: Any) -> Any:
        return jax.tree.map(jnp.negative, grads), state


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.one_in(4)
def test_a_step_of_flax_in_microbatches_counts_its_draws_once(layers: int, rate: float) -> None:
    loss, params, rest = flax(layers, rate)
    model = layoutopt.from_jax(loss, params, BATCH, state=rest, optimizer="sgd")
    found = []
    for parts in (1, 4):
        step = plan_of(model, "data:1", "batch:data", microbatches=parts).jax.train_step(loss, Descent())
        own, kept, state = step.init(params, rest)
        _, _, (value, state) = step(own, kept, state, BATCH)
        assert jax.tree.structure(state) == jax.tree.structure(rest)
        counts = [int(x) for x in jax.tree.leaves(state) if x.dtype == jnp.uint32]
        assert counts == [int(rate > 0)] * layers
        found.append(float(value))
    assert found[1] == pytest.approx(found[0], rel=0.5 if rate else 1e-5)


KEYS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "typed": (jax.random.key(1), lambda key: key),
    "raw": (jax.random.PRNGKey(1), lambda key: key),
    "of layers": (jax.random.split(jax.random.key(1), 2), lambda keys: keys[1]),
}


@pytest.mark.parametrize("role", ["state", "rng"])
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.one_in(6)
def test_each_microbatch_draws_its_own_numbers(kind: str, role: str) -> None:
    """One row each: with the same numbers in all, an element would be dropped in all rows or in none."""
    keys, one = KEYS[kind]

    def loss(params: Any, keys: Any, batch: Any) -> Any:
        new, own = jax.random.split(one(keys["key"]))
        mask = jax.random.bernoulli(own, 0.5, batch["x"].shape)
        value = (batch["x"] * params["w"] * mask).mean()
        return value, {"elements": mask.sum(), "rate": jnp.float32(0.5), "state": keys, "next": new}

    def drawn(params: Any, batch: Any, keys: Any) -> Any:
        return loss(params, keys, batch)

    params, batch = {"w": jnp.ones(WIDTH)}, {"x": np.ones((ROWS, WIDTH), np.float32)}
    given = {"key": keys}
    function, rest = (loss, (given, batch)) if role == "state" else (drawn, (batch, given))
    model = layoutopt.from_jax(function, params, batch, **{role: given}, optimizer="sgd")
    step = plan_of(model, "data:1", "batch:data", microbatches=ROWS).jax.train_step(function, Descent())
    own, kept, *_ = step.init(params)
    new, _, (value, found) = step(own, kept, *rest)
    dropped = (np.asarray(new["w"]) - 1) * ROWS * WIDTH
    assert set(np.round(-dropped)) - {0, ROWS}
    assert int(found["elements"]) == round(float(value) * ROWS * WIDTH) and float(found["rate"]) == 0.5
    for array, wanted in ((found["state"]["key"], keys), (found["next"], jax.random.split(one(keys))[0])):
        assert (jax.random.key_data(array) == jax.random.key_data(wanted)).all()
