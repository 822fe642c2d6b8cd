"""The model in TensorFlow's DTensor: the code of `plain_tf`, on variables and batches with layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from benchmarks.engine_peers.sizes import EPSILON, RATE, RULES, Sizes, batch, parameters, shapes


def make(s: Sizes, mesh: dict[str, int]) -> Callable[[], float]:
    """One training step per call."""
    n = mesh["data"] * mesh["model"]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * max(n, 1))
    grid = dtensor.create_mesh(list(mesh.items()), devices=[f"CPU:{i}" for i in range(n)])

    def layout(dims: tuple[str | None, ...]) -> Any:
        return dtensor.Layout([RULES.get(d, dtensor.UNSHARDED) for d in dims], grid)

    def placed(x: Any, dims: tuple[str | None, ...]) -> Any:
        whole = dtensor.copy_to_mesh(tf.constant(x), dtensor.Layout.replicated(grid, rank=len(dims)))
        return dtensor.relayout(whole, layout(dims))

    # DTensor cannot gather from a table that is split along its first dimension: the embedding stays whole.
    dims = {name: ((None, None) if name == "tokens" else d) for name, (d, _, _) in shapes(s).items()}
    # A variable per layer: of a stack that is split along its third dimension DTensor takes a wrong layer.
    p = {
        name: [dtensor.DVariable(placed(layer, dims[name][1:])) for layer in x]
        if dims[name][0] == "layers"
        else dtensor.DVariable(placed(x, dims[name]))
        for name, x in parameters(s).items()
    }
    trained = tf.nest.flatten(p)
    tokens, targets = (placed(x, ("batch", "length")) for x in batch(s))

    def norm(x, scale):
        x = x - tf.reduce_mean(x, -1, keepdims=True)
        return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + EPSILON) * scale

    def loss(tokens, targets):
        mask = (1.0 - tf.linalg.band_part(tf.ones([s.length, s.length]), -1, 0)) * -1e9
        x = tf.gather(p["tokens"], tokens) + p["positions"]
        for i in range(s.layers):
            y = norm(x, p["norm1"][i])
            q, k, v = (tf.einsum("bld,dhk->blhk", y, p[n][i]) for n in "qkv")
            weights = tf.nn.softmax(tf.einsum("blhk,bmhk->bhlm", q, k) * s.d_kv**-0.5 + mask)
            x = x + tf.einsum("blhk,hkd->bld", tf.einsum("bhlm,bmhk->blhk", weights, v), p["o"][i])
            hidden = tf.nn.relu(tf.einsum("bld,df->blf", norm(x, p["norm2"][i]), p["wi"][i]))
            x = x + tf.einsum("blf,fd->bld", hidden, p["wo"][i])
        logits = tf.einsum("bld,dv->blv", norm(x, p["final_norm"]), p["projection"])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits))

    @tf.function
    def step(tokens, targets):
        with tf.GradientTape() as tape:
            value = loss(tokens, targets)
        for variable, gradient in zip(trained, tape.gradient(value, trained), strict=True):
            variable.assign_sub(RATE * tf.convert_to_tensor(gradient))
        return value

    return lambda: float(step(tokens, targets))
