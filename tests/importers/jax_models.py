"""Small models in plain JAX, and the comparison of what is imported with JAX itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import layoutopt
import mesh_tf_core as mtf
from layoutopt.importers.jax.shardings import leaves_of
from mesh_tf_core.engines.lockstep import LockstepEngine

VOCAB, LENGTH, MODEL, HEADS, WIDTH, HIDDEN, LAYERS, BATCH = 32, 8, 16, 4, 4, 48, 2, 4


def numbers(seed: int = 0) -> Callable[..., Any]:
    random = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(random.normal(size=shape) * 0.2, jnp.float32)


# -- models --------------------------------------------------------------------------------------------------


def perceptron(params, batch):
    h = batch["x"]
    for layer in params["layers"][:-1]:
        h = jax.nn.relu(h @ layer["w"] + layer["b"])
    last = params["layers"][-1]
    log = jax.nn.log_softmax(h @ last["w"] + last["b"])
    return -jnp.mean(jnp.take_along_axis(log, batch["y"][:, None], axis=-1))


def perceptron_arguments():
    f = numbers()
    sizes = (12, 16, 16, 10)
    layers = [{"w": f(a, b), "b": f(b)} for a, b in itertools.pairwise(sizes)]
    return {"layers": layers}, {"x": f(8, 12), "y": jnp.arange(8, dtype=jnp.int32)}


def _norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _rotated(x, positions):
    """Rotary positions, by halves that are cut apart and joined again."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / 100.0 ** (jnp.arange(half) / half)
    cos, sin = (jnp.concatenate([f(angle)] * 2, -1)[:, None] for f in (jnp.cos, jnp.sin))
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def _block(h, p, mask):
    x = _norm(h, p["first_norm"])
    parts = jnp.split(x @ p["qkv"], 3, -1)
    q, k, v = (t.reshape(*t.shape[:-1], HEADS, WIDTH) for t in parts)
    positions = jnp.arange(h.shape[1])
    q, k = _rotated(q, positions), _rotated(k, positions)
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH)
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e9), -1)
    h = h + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape) @ p["out"]
    x = _norm(h, p["second_norm"])
    gate, up = jnp.split(x @ p["gate_up"], 2, -1)
    return h + (jax.nn.silu(gate) * up) @ p["down"]


def transformer(params, batch, scanned=False):
    tokens = batch["tokens"]
    h = params["embedding"][tokens]
    mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    if scanned:
        h, _ = jax.lax.scan(lambda h, p: (_block(h, p, mask), None), h, params["blocks"])
    else:
        for p in params["blocks"]:
            h = _block(h, p, mask)
    logits = _norm(h, params["norm"]) @ params["embedding"].T
    log = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(log, tokens[:, 1:, None], -1).mean()


def transformer_arguments(scanned=False):
    f = numbers()

    def block(*n):
        return {
            "first_norm": 1 + f(*n, MODEL),
            "second_norm": 1 + f(*n, MODEL),
            "qkv": f(*n, MODEL, 3 * HEADS * WIDTH),
            "out": f(*n, HEADS * WIDTH, MODEL),
            "gate_up": f(*n, MODEL, 2 * HIDDEN),
            "down": f(*n, HIDDEN, MODEL),
        }

    blocks = block(LAYERS) if scanned else [block() for _ in range(LAYERS)]
    tokens = np.random.default_rng(1).integers(0, VOCAB, (BATCH, LENGTH))
    params = {"embedding": f(VOCAB, MODEL), "norm": 1 + f(MODEL), "blocks": blocks}
    return params, {"tokens": jnp.asarray(tokens, jnp.int32)}


def convolutions(params, state, batch):
    """Strides, a depthwise filter, pooling, tied axes through a flattening, running statistics."""
    numbers_ = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(
        batch["image"], params["stem"], (1, 1), "SAME", dimension_numbers=numbers_
    )
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    new = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}
    x = jax.nn.relu((x - mean) * jax.lax.rsqrt(var + 1e-3) * params["scale"])
    x = jax.lax.conv_general_dilated(
        x, params["depthwise"], (2, 2), "SAME", dimension_numbers=numbers_, feature_group_count=8
    )
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    log = jax.nn.log_softmax(x.reshape(x.shape[0], -1) @ params["head"])
    loss = -(jax.nn.one_hot(batch["label"], 5) * log).sum(-1).mean()
    return loss, (new, {"norm": jnp.sqrt((log**2).sum())})


def convolutions_arguments():
    f = numbers()
    params = {"stem": f(3, 3, 3, 8), "depthwise": f(3, 3, 1, 8), "scale": 1 + f(8), "head": f(2 * 2 * 8, 5)}
    batch = {"image": f(4, 8, 8, 3), "label": jnp.arange(4, dtype=jnp.int32)}
    return params, {"mean": jnp.zeros(8), "var": jnp.ones(8)}, batch


def recurrence(params, batch):
    def step(h, x):
        h = jnp.tanh(x @ params["w"] + h @ params["u"])
        return h, h

    start = jnp.zeros((batch["x"].shape[0], 6))
    h, ys = jax.lax.scan(step, start, jnp.moveaxis(batch["x"], 1, 0), reverse=True)
    return (ys**2).mean() + h.sum()


def recurrence_arguments():
    f = numbers()
    return {"w": f(4, 6), "u": f(6, 6)}, {"x": f(8, 5, 4)}


def experts(params, batch):
    """A mixture with dense dispatch."""
    x = batch["x"]
    value, index = jax.lax.top_k(jax.nn.softmax(x @ params["router"], -1), 2)
    value = value / value.sum(-1, keepdims=True)
    weight = (jax.nn.one_hot(index, 4) * value[..., None]).sum(-2)
    h = jax.nn.silu(jnp.einsum("bd,edf->bef", x, params["up"]))
    return ((x + jnp.einsum("bef,efd,be->bd", h, params["down"], weight)) ** 2).mean()


def ragged_experts(params, batch):
    """The same, each expert with the rows that chose it, sorted: no product is made and thrown away."""
    x = batch["x"]
    value, index = jax.lax.top_k(x @ params["router"], 2)
    chosen = index.reshape(-1)
    order = jnp.argsort(chosen)
    counts = jnp.bincount(chosen, length=4)
    h = jax.nn.silu(jax.lax.ragged_dot(x[order // 2], params["up"], counts))
    y = jax.lax.ragged_dot(h, params["down"], counts)
    y = y[jnp.argsort(order)].reshape(*index.shape, -1)
    return ((x + jnp.einsum("bkd,bk->bd", y, jax.nn.softmax(value, -1))) ** 2).mean()


def experts_arguments():
    f = numbers()
    return {"router": f(6, 4), "up": f(4, 6, 8), "down": f(4, 8, 6)}, {"x": f(8, 6)}


@jax.custom_vjp
def _clipped(x):
    return x


_clipped.defvjp(lambda x: (x, x), lambda x, g: (jnp.clip(g, -0.01, 0.01) * x,))


@jax.custom_jvp
def _straight_through(x):
    return jnp.round(x)


_straight_through.defjvp(lambda p, t: (jnp.round(p[0]), t[0]))


def own_derivatives(params, batch):
    return (_straight_through(_clipped(batch["x"] @ params["w"])) @ params["v"]).sum()


def own_derivatives_arguments():
    f = numbers()
    return {"w": 5 * f(4, 6), "v": f(6, 2)}, {"x": 5 * f(8, 4)}


MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[str, str]]]] = {
    "perceptron": (perceptron, perceptron_arguments, [("data:2;model:2", "batch:data;layers_0:model")]),
    "transformer": (
        transformer,
        transformer_arguments,
        [("data:2;model:2", "batch:data;heads:model;d_ff:model;vocab:model")],
    ),
    "scanned transformer": (
        partial(transformer, scanned=True),
        partial(transformer_arguments, scanned=True),
        [("data:2;model:2", "length:data;d_model:model"), ("data:2", "memory_length:data;vocab:data")],
    ),
    "convolutions": (convolutions, convolutions_arguments, [("data:2;model:2", "batch:data;height:model")]),
    "recurrence": (recurrence, recurrence_arguments, [("data:2", "batch:data")]),
    "experts": (experts, experts_arguments, [("data:2;model:2", "batch:data;experts:model")]),
    "ragged experts": (ragged_experts, experts_arguments, [("data:2;model:2", "batch:data;experts:model")]),
    "own derivatives": (own_derivatives, own_derivatives_arguments, [("data:2", "batch:data")]),
}
"""Name -> function, what makes its arguments, (mesh, layout) under which it is compared too."""


# -- comparison ----------------------------------------------------------------------------------------------


def imported(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A model of the list, and its arguments."""
    loss, arguments, _ = MODELS[name]
    given = arguments()
    state = {"state": given[1]} if len(given) == 3 else {}
    return layoutopt.from_jax(loss, given[0], given[-1], **state), given


def compared(model: Any, loss: Callable[..., Any], given: tuple[Any, ...], layouts: Any) -> dict[str, float]:
    """What differs from JAX -> by how much (relative norms), the worst of all layouts."""

    def scalar(*args):
        found = loss(*args)
        return found[0] if isinstance(found, tuple) else found

    value, grads = jax.jit(jax.value_and_grad(scalar))(*given)
    wanted = {leaf.path: np.asarray(leaf.value) for leaf in leaves_of(grads)[0]}
    variables = [v for v in model.graph.variables.values() if v.trainable]
    made = mtf.gradients(model.loss, [model.graph.read(v) for v in variables])
    results = {"loss": model.loss, **{v.name: g for v, g in zip(variables, made, strict=True)}}
    feeds = {leaf.path: np.asarray(leaf.value) for leaf in leaves_of(given[-1])[0]}
    arrays = model.origin.parameters
    off = dict.fromkeys(("loss", *wanted), 0.0)
    assert set(results) == {"loss", *(arrays[path].variable for path in wanted)}
    for mesh, layout in [("data:1", ""), *layouts]:
        engine = LockstepEngine(mtf.lower(model.graph, mtf.Mesh(mesh), mtf.Layout(layout), results))
        engine.initialize()
        found = engine.step(feeds)
        off["loss"] = max(off["loss"], abs(float(found["loss"]) - float(value)) / abs(float(value)))
        for path, want in wanted.items():
            whole = np.asarray(found[arrays[path].variable])
            got = (whole if arrays[path].layer is None else whole[arrays[path].layer]).reshape(want.shape)
            off[path] = max(off[path], float(np.linalg.norm(got - want) / np.linalg.norm(want)))
    return off
