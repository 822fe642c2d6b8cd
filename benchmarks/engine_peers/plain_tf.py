"""The model as one writes it by hand in TensorFlow, on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.engine_peers.sizes import EPSILON, RATE, Sizes, batch, parameters


def loss(p: dict[str, Any], tokens: Any, targets: Any, s: Sizes, mask: Any) -> Any:
    def norm(x, scale):
        x = x - tf.reduce_mean(x, -1, keepdims=True)
        return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + EPSILON) * scale

    def heads(x):
        return tf.transpose(tf.reshape(x, [s.batch, s.length, s.heads, s.d_kv]), [0, 2, 1, 3])

    x = tf.gather(p["tokens"], tokens) + p["positions"]
    x = tf.reshape(x, [-1, s.d_model])
    for i in range(s.layers):
        y = norm(x, p["norm1"][i])
        q, k, v = (heads(tf.matmul(y, tf.reshape(p[n][i], [s.d_model, -1]))) for n in "qkv")
        weights = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * s.d_kv**-0.5 + mask)
        mixed = tf.reshape(tf.transpose(tf.matmul(weights, v), [0, 2, 1, 3]), [-1, s.heads * s.d_kv])
        x = x + tf.matmul(mixed, tf.reshape(p["o"][i], [-1, s.d_model]))
        x = x + tf.matmul(tf.nn.relu(tf.matmul(norm(x, p["norm2"][i]), p["wi"][i])), p["wo"][i])
    logits = tf.matmul(norm(x, p["final_norm"]), p["projection"])
    labels = tf.reshape(targets, [-1])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def make(s: Sizes, mesh: dict[str, int]) -> Callable[[], float]:
    """One training step per call."""
    del mesh
    p = {name: tf.Variable(x) for name, x in parameters(s).items()}
    mask = tf.constant(np.where(np.tril(np.ones((s.length, s.length), bool)), 0, -1e9).astype(np.float32))
    tokens, targets = map(tf.constant, batch(s))

    @tf.function
    def step(tokens, targets):
        with tf.GradientTape() as tape:
            value = loss(p, tokens, targets, s, mask)
        for variable, gradient in zip(p.values(), tape.gradient(value, list(p.values())), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(tf.IndexedSlices(RATE * gradient.values, gradient.indices))
            else:
                variable.assign_sub(RATE * gradient)
        return value

    return lambda: float(step(tokens, targets))
