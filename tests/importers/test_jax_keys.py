"""What draws with one key in JAX has the same numbers here; what cannot be followed is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import layoutopt
import mesh_tf_core as mtf
from layoutopt.importers.arrays.keys import Keys
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.errors import UserError
from mesh_tf_core.ops.random import FoldIn, folded
from tests.marks import by_day

SHAPE = (64, 24)
ONES = {"x": np.ones(SHAPE, np.float32)}


def kept(key: Any, shape: tuple[int, ...] = SHAPE) -> Any:
    return jax.random.bernoulli(key, 0.7, shape).astype(jnp.float32)


def imported(loss: Callable[..., Any], key: Any = None) -> layoutopt.JaxModel:
    key = jax.random.PRNGKey(3) if key is None else key
    params = {"s": jnp.ones(SHAPE)}
    return layoutopt.from_jax(lambda p, b, k: loss(p["s"] * b["x"], k), params, ONES, rng=key)


def value(model: layoutopt.JaxModel, mesh: str = "a:1", layout: str = "", batch: Any = ONES) -> float:
    engine = LockstepEngine(mtf.lower(model.graph, mtf.Mesh(mesh), mtf.Layout(layout), {"loss": model.loss}))
    engine.initialize()
    return float(engine.step(batch)["loss"])


def in_steps(model: layoutopt.JaxModel) -> list[float]:
    trainer = mtf.Trainer(model, mtf.Mesh("a:1"), mtf.Layout(""), engine="lockstep")
    return [float(trainer.step(ONES)["loss"]) for _ in range(2)]


def split_in_turn(key: Any, _: Any) -> Any:
    key, own = jax.random.split(key)
    return key, kept(own)


def unrolled_keys(key: Any, count: int) -> list[Any]:
    made = []
    for _ in range(count):
        key, own = jax.random.split(key)
        made.append(own)
    return made


def dropped(x: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.0)


EQUAL: dict[str, Callable[[Any, Any], Any]] = {
    "one key": lambda x, k: kept(k) - kept(k),
    "uniform and bernoulli": lambda x, k: kept(k) - (jax.random.uniform(k, SHAPE) < 0.7),
    "two ranges": lambda x, k: (
        jax.random.uniform(k, SHAPE, minval=-1, maxval=3) - (4 * jax.random.uniform(k, SHAPE) - 1)
    ),
    "dropout and its mask": lambda x, k: dropped(x, k) - kept(k) / 0.7,
    "two normals": lambda x, k: jax.random.normal(k, SHAPE) - jax.random.normal(k, SHAPE),
    "equal fold_in": lambda x, k: kept(jax.random.fold_in(k, 5)) - kept(jax.random.fold_in(k, 5)),
    "split is fold_in": lambda x, k: kept(jax.random.split(k, 3)[2]) - kept(jax.random.fold_in(k, 2)),
    "constants": lambda x, k: kept(jax.random.key(7)) - kept(jax.random.PRNGKey(7)),
    "a key that a scan closes over": lambda x, k: (
        jax.lax.scan(lambda c, _: (c, kept(k)), 0.0, None, length=3)[1] - kept(k)
    ),
    "a key that a scan hands on": lambda x, k: (
        jax.lax.scan(split_in_turn, k, None, length=3)[1] - jnp.stack([kept(s) for s in unrolled_keys(k, 3)])
    ),
    "keys of a scan's elements": lambda x, k: (
        jax.lax.scan(lambda c, s: (c, kept(s)), 0.0, jax.random.split(k, 3))[1]
        - jnp.stack([kept(s) for s in jax.random.split(k, 3)])
    ),
    "keys put together": lambda x, k: (
        jax.lax.scan(lambda c, s: (c, kept(s)), 0.0, jnp.stack([k, *unrolled_keys(k, 2)]))[1]
        - jnp.stack([kept(s) for s in (k, *unrolled_keys(k, 2))])
    ),
    "a counter of a loop": lambda x, k: (
        jax.lax.scan(lambda c, i: (c, kept(jax.random.fold_in(k, i))), 0.0, jnp.arange(3))[1]
        - jnp.stack([kept(jax.random.fold_in(k, i)) for i in range(3)])
    ),
    "keys of examples": lambda x, k: (
        jax.vmap(lambda s: kept(s, (24,)))(jax.random.split(k, 64))
        - jax.vmap(lambda s: kept(s, (24,)))(jax.random.split(k, 64))
    ),
}
DIFFERENT: dict[str, Callable[[Any, Any], Any]] = {
    "split": lambda x, k: (lambda a, b: kept(a) - kept(b))(*jax.random.split(k)),
    "a scan's elements": lambda x, k: (lambda m: m[0] - m[1])(
        jax.lax.scan(lambda c, s: (c, kept(s)), 0.0, jax.random.split(k, 2))[1]
    ),
    "a scan's own": lambda x, k: (lambda m: m[0] - m[1])(jax.lax.scan(split_in_turn, k, None, length=2)[1]),
    "raw and typed words": lambda x, k: kept(k) - kept(jax.random.key(3)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_keys_draw_equal_numbers(name: str) -> None:
    new = (jax.random.PRNGKey, jax.random.key)[list(EQUAL).index(name) % 2]
    assert value(imported(lambda x, k: (x * EQUAL[name](x, k) ** 2).mean(), new(3))) < 1e-11


@pytest.mark.nightly
def test_jax_draws_equal_numbers_there() -> None:
    made = jax.jit(lambda k: {n: (loss(jnp.ones(SHAPE), k) ** 2).mean() for n, loss in EQUAL.items()})
    assert {n: float(x) for n, x in made(jax.random.key(3)).items() if not float(x) < 1e-11} == {}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_keys_draw_other_numbers(name: str) -> None:
    loss = DIFFERENT[name]
    model = imported(lambda x, k: (x * loss(x, k) ** 2).mean())
    assert 0.36 < value(model) < 0.48


def test_arguments_draw_anew_in_every_step_and_constants_do_not() -> None:
    first, second = in_steps(imported(lambda x, k: (0 * x).sum() + kept(k).mean()))
    assert first != second
    first, second = in_steps(imported(lambda x, k: (0 * x).sum() + kept(jax.random.key(1)).mean()))
    assert first == second


def test_draws_do_not_depend_on_the_layout() -> None:
    model = imported(lambda x, k: (x * jax.lax.scan(split_in_turn, k, None, length=3)[1].sum(0) ** 2).mean())
    split = value(model, "a:2", f"{next(iter(model.graph.dims()))}:a")
    assert value(model) == pytest.approx(split, rel=1e-6)


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "two shapes": lambda x, k: kept(k) * kept(k, (24,)),
    "two distributions": lambda x, k: kept(k) * jax.random.normal(k, SHAPE),
    "of many and of one": lambda x, k: (
        jax.vmap(lambda s: kept(s, (24,)))(jax.random.split(k, 64)) * kept(jax.random.split(k, 64)[5], (24,))
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_jax_makes_of_the_same_bits_in_another_way_is_refused(name: str) -> None:
    said = r"test_jax_keys.py:\d+.*draws numbers of another kind or shape with the same key"
    with pytest.raises(UserError, match=said):
        imported(lambda x, k: (x * REFUSED[name](x, k)).mean())


def test_a_key_that_cannot_be_followed_is_refused() -> None:
    def loss(x: Any, k: Any) -> Any:
        return (x * kept(jax.random.wrap_key_data(jax.random.key_data(k) + jnp.uint32(1)))).mean()

    with pytest.raises(UserError, match=r"its random key comes from add in .*test_jax_keys.py:\d+"):
        imported(loss)


KEYS_OF_LAYERS: dict[str, Callable[[Any, int], list[Any]]] = {
    "fold_in": lambda k, n: [jax.random.fold_in(k, i) for i in range(n)],
    "hashes": lambda k, n: [jax.random.fold_in(k, (i * 2654435761 + 97) % 2**32) for i in range(n)],
    "in a row above int32": lambda k, n: [jax.random.fold_in(k, 2**32 - 1 - 3 * i) for i in range(n)],
    "split": lambda k, n: list(jax.random.split(k, n)),
    "in turn": unrolled_keys,
    "one": lambda k, n: [k] * n,
    "constants in turn": lambda k, n: unrolled_keys(jax.random.key(5), n),
    "seeds": lambda k, n: [jax.random.PRNGKey(2**31 + 5 * i) for i in range(n)],
    "nested": lambda k, n: [
        jax.random.fold_in(jax.random.split(jax.random.fold_in(k, i))[1], 7) for i in range(n)
    ],
}
DRAWN: tuple[Callable[[Any, Any], Any], ...] = (
    dropped,
    lambda x, k: x * (jax.random.uniform(k, x.shape) > 0.3),
    lambda x, k: x + 0.1 * jax.random.normal(k, x.shape),
    lambda x, k: x * jax.random.bernoulli(k, 0.7, (x.shape[0], 1)),
    lambda x, k: jax.vmap(dropped)(x, jax.random.split(k, x.shape[0])),
)


@pytest.mark.parametrize(("keys", "count"), by_day(itertools.product(KEYS_OF_LAYERS, range(1, 9)), every=5))
def test_unrolled_layers_draw_with_the_keys_that_they_are_given(keys: str, count: int) -> None:
    """The loop that they become has in every iteration the numbers of its layer."""
    kind = list(KEYS_OF_LAYERS).index(keys) + count
    new, draw, own = (jax.random.key, jax.random.PRNGKey)[kind % 2], DRAWN[kind % 5], KEYS_OF_LAYERS[keys]

    def loss(params: Any, batch: Any, k: Any) -> Any:
        h = g = batch["x"]
        for w, key in zip(params, own(k, count), strict=True):
            h = h + draw(jnp.tanh(h @ w), key)
        # What the layers drew, drawn again: other constants in each layer keep these apart.
        for i, key in enumerate(own(k, count)):
            g = g + draw(jnp.tanh(g @ params[i]) * 2.0**i / 2.0**i, key)
        return ((h - g) ** 2).mean()

    random = np.random.default_rng(0)
    params = [jnp.asarray(random.normal(size=(8, 8)) * 0.4, jnp.float32) for _ in range(count)]
    x = np.asarray(random.normal(size=(70, 8)), np.float32)
    model = layoutopt.from_jax(loss, params, {"x": x}, rng=new(0))
    assert any(n.body is not None for n in model.graph.nodes) == (count > 1)
    assert value(model, batch={"x": x}) < 1e-9


def test_numbers_that_are_known_are_folded_as_the_operation_does() -> None:
    graph = mtf.Graph("keys")
    five = mtf.constant(graph, 5, (), "int32")
    made = graph.apply(FoldIn(11, (None, 2**31 + 3)), five)
    begun = graph.apply(FoldIn(None, (2**31 + 3,)), graph.apply(FoldIn(11), five))
    engine = LockstepEngine(mtf.lower(graph, mtf.Mesh("a:1"), mtf.Layout(""), {"made": made, "begun": begun}))
    engine.initialize()
    found = engine.step({})
    assert int(found["made"]) % 2**32 == int(found["begun"]) % 2**32 == folded(folded(11, 5), 2**31 + 3)


def test_arrays_of_keys_know_which_keys_they_have() -> None:
    several = Keys(1, (np.arange(6), 2))
    assert several.meets(Keys(1, (4, 2))) and not several.meets(Keys(1, (4, 3)))
    assert not several.meets(Keys(1, (7, 2)))
