"""A language model in plain JAX: `loss` and `params` do not use layoutopt.

    layoutopt search examples/jax_transformer.py --devices 8 --hardware tpu-v5e --out plan.json
    layoutopt verify plan.json --topology v5e:2x4

docs/guides/jax.md shows how to apply a plan to such a program.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.training import Training, trained

if TYPE_CHECKING:
    from mesh_tf_core import Model


def shapes(layers: int, d_model: int, heads: int, d_ff: int, vocab: int) -> dict[str, Any]:
    """The types of the parameters."""
    import jax

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jax.numpy.float32)

    d_kv = d_model // heads
    return {
        "embedding": of(vocab, d_model),
        "layers": {
            "attention_norm": of(layers, d_model),
            "query": of(layers, d_model, heads, d_kv),
            "key": of(layers, d_model, heads, d_kv),
            "value": of(layers, d_model, heads, d_kv),
            "out": of(layers, heads, d_kv, d_model),
            "mlp_norm": of(layers, d_model),
            "up": of(layers, d_model, d_ff),
            "down": of(layers, d_ff, d_model),
        },
        "norm": of(d_model),
        "head": of(d_model, vocab),
    }


def normed(x: Any, scale: Any) -> Any:
    """Zhang & Sennrich 2019."""
    import jax
    import jax.numpy as jnp

    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1.0 + scale)


def loss(params: Any, batch: Any, dtype: str = "float32") -> Any:
    """Mean cross-entropy of the next token, in nats; activations are of `dtype`."""
    import jax
    import jax.numpy as jnp

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        h = normed(x, p["attention_norm"])
        q, k, v = (jnp.einsum("bld,dhk->blhk", h, p[name]) for name in ("query", "key", "value"))
        logits = jnp.einsum("blhk,bmhk->bhlm", q, k) * q.shape[-1] ** -0.5
        earlier = jnp.arange(x.shape[1])[:, None] >= jnp.arange(x.shape[1])
        weights = jax.nn.softmax(jnp.where(earlier, logits, -1e9))
        x = x + jnp.einsum("bhlm,bmhk,hkd->bld", weights, v, p["out"])
        return x + jax.nn.gelu(normed(x, p["mlp_norm"]) @ p["up"]) @ p["down"], None

    params = jax.tree.map(lambda p: p.astype(dtype), params)
    x = params["embedding"][batch["tokens"]]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    log = jax.nn.log_softmax((normed(x, params["norm"]) @ params["head"]).astype("float32"))
    return -jnp.take_along_axis(log, batch["targets"][..., None], -1).mean()


@trained(learning_rate=0.001)
def model(
    layers: int = 4,
    d_model: int = 256,
    heads: int = 8,
    d_ff: int = 1024,
    vocab: int = 512,
    batch: int = 32,
    length: int = 128,
    *,
    training: Training,
) -> Model:
    """The model of the loss, with inferred dimensions."""
    import jax
    import jax.numpy as jnp

    import layoutopt

    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params = shapes(layers, d_model, heads, d_ff, vocab)
    batches = {"tokens": tokens, "targets": tokens}
    own = partial(loss, dtype=training.dtype)
    return layoutopt.from_jax(own, params, batches, optimizer=training.optimizer_of(), name="jax_transformer")


def data(
    batch: int = 32, length: int = 128, vocab: int = 512, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields windows of the standard library's source code as bytes."""
    from examples.text import batches

    return batches(batch, length, vocab, split)
