"""What the small models of `jax_models_small.py` have in common: their list, sizes and losses."""

from __future__ import annotations

import jax
import jax.numpy as jnp

S = jax.ShapeDtypeStruct
ENTRIES = {}
BATCH, LENGTH, VOCAB = 4, 16, 96


def entry(make):
    ENTRIES[make.__name__] = make
    return make


def cross_entropy(logits, labels):
    log = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log, labels[..., None], -1).mean()


def next_token(logits, tokens):
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


def tokens(length=LENGTH):
    return S((BATCH, length), jnp.int32)


def types(tree):
    return jax.tree.map(lambda x: S(x.shape, x.dtype), tree)
