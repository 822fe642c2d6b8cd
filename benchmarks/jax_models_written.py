"""The small models of `jax_models_small.py` that are written with a library, not taken from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.jax_models_parts import (
    BATCH,
    LENGTH,
    VOCAB,
    S,
    cross_entropy,
    entry,
    next_token,
    tokens,
    types,
)


@entry
def linen_scan_lm():
    import flax.linen as nn

    init = nn.initializers.lecun_normal()

    def logical(*names):
        return nn.with_logical_partitioning(init, names)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            y = nn.LayerNorm()(x)
            attention = nn.MultiHeadDotProductAttention(4, kernel_init=logical("embed", "heads", "kv"))
            x = x + attention(y, y, mask=mask)
            y = nn.Dense(128, kernel_init=logical("embed", "mlp"))(nn.LayerNorm()(x))
            y = nn.with_logical_constraint(nn.gelu(y), ("batch", "length", "mlp"))
            return x + nn.Dense(64, kernel_init=logical("mlp", "embed"))(y), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            embed = nn.Embed(VOCAB, 64)
            h = embed(x) + self.param("pos", init, (x.shape[1], 64))
            layers = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=6,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            h, _ = layers()(h, nn.make_causal_mask(x))
            return embed.attend(nn.LayerNorm()(h))

    model = Model()
    # The boxes of logical axes stay on.
    params = jax.eval_shape(model.init, jax.random.PRNGKey(0), tokens())

    def loss(params, batch):
        return next_token(model.apply(params, batch["x"]), batch["x"])

    return loss, (types(params), {"x": tokens()})


# -- Equinox, Haiku ------------------------------------------------------------------------------------------


@entry
def eqx_mlp():
    import equinox as eqx

    net = eqx.filter_eval_shape(eqx.nn.MLP, 48, 10, 64, 3, key=jax.random.PRNGKey(0))
    params, static = eqx.partition(net, lambda x: isinstance(x, S))

    def loss(params, batch):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch["x"]), batch["y"])

    return loss, (params, {"x": S((BATCH, 48), jnp.float32), "y": S((BATCH,), jnp.int32)})


@entry
def eqx_transformer():
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        first: eqx.nn.LayerNorm
        second: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, d, heads, key):
            a, b = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(heads, d, key=a)
            self.first, self.second = eqx.nn.LayerNorm(d), eqx.nn.LayerNorm(d)
            self.mlp = eqx.nn.MLP(d, d, 2 * d, 1, jax.nn.gelu, key=b)

        def __call__(self, x):
            y = jax.vmap(self.first)(x)
            x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((x.shape[0],) * 2, bool)))
            return x + jax.vmap(self.mlp)(jax.vmap(self.second)(x))

    class Model(eqx.Module):
        table: eqx.nn.Embedding
        positions: jax.Array
        blocks: list
        out: eqx.nn.Linear

        def __init__(self, d, key):
            a, b, c, *rest = jax.random.split(key, 5)
            self.table = eqx.nn.Embedding(VOCAB, d, key=a)
            self.positions = jax.random.normal(b, (LENGTH, d))
            self.out = eqx.nn.Linear(d, VOCAB, key=c)
            self.blocks = [Block(d, 4, k) for k in rest]

        def __call__(self, x):
            h = jax.vmap(self.table)(x) + self.positions
            for block in self.blocks:
                h = block(h)
            return jax.vmap(self.out)(h)

    net = eqx.filter_eval_shape(Model, 64, key=jax.random.PRNGKey(0))
    params, static = eqx.partition(net, lambda x: isinstance(x, S))

    def loss(params, batch):
        return next_token(jax.vmap(eqx.combine(params, static))(batch["x"]), batch["x"])

    return loss, (params, {"x": tokens()})


@entry
def hk_transformer():
    import haiku as hk

    def run(batch):
        d, init = 64, hk.initializers.VarianceScaling(1.0)
        h = hk.Embed(VOCAB, d)(batch["x"]) + hk.get_parameter("pos", (LENGTH, d), init=jnp.zeros)
        mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH)))

        @hk.experimental.layer_stack(4)
        def block(h):
            y = hk.LayerNorm(-1, True, True)(h)
            h = h + hk.MultiHeadAttention(4, 16, w_init=init, model_size=d)(y, y, y, mask=mask)
            y = hk.Linear(2 * d)(hk.LayerNorm(-1, True, True)(h))
            return h + hk.Linear(d)(jax.nn.gelu(y))

        return next_token(hk.Linear(VOCAB)(block(h)), batch["x"])

    made = hk.transform(run)
    batch = {"x": tokens()}
    params = types(jax.eval_shape(made.init, jax.random.PRNGKey(0), batch))
    return (lambda params, batch: made.apply(params, None, batch)), (params, batch)
