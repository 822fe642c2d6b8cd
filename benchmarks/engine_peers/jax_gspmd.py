"""The model in JAX; jit partitions it from the parameters' and the batch's shardings (GSPMD)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.engine_peers.sizes import EPSILON, RATE, RULES, Sizes, batch, parameters, shapes

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"


def make(s: Sizes, mesh: dict[str, int]) -> Callable[[], float]:
    """One training step per call."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    devices = np.array(jax.devices()[: mesh["data"] * mesh["model"]]).reshape(mesh["data"], mesh["model"])
    grid = jax.sharding.Mesh(devices, ("data", "model"))

    def placed(x: Any, dims: tuple[str, ...]) -> Any:
        return jax.device_put(x, NamedSharding(grid, PartitionSpec(*(RULES.get(d) for d in dims))))

    p = {name: placed(x, shapes(s)[name][0]) for name, x in parameters(s).items()}
    tokens, targets = (placed(x, ("batch", "length")) for x in batch(s))
    mask = jnp.tril(jnp.ones((s.length, s.length), bool))

    def norm(x, scale):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale

    def loss(p, tokens, targets):
        x = p["tokens"][tokens] + p["positions"]
        for i in range(s.layers):
            y = norm(x, p["norm1"][i])
            q, k, v = (jnp.einsum("bld,dhk->blhk", y, p[n][i]) for n in "qkv")
            logits = jnp.where(mask, jnp.einsum("blhk,bmhk->bhlm", q, k) * s.d_kv**-0.5, -1e9)
            mixed = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(logits), v)
            x = x + jnp.einsum("blhk,hkd->bld", mixed, p["o"][i])
            hidden = jax.nn.relu(jnp.einsum("bld,df->blf", norm(x, p["norm2"][i]), p["wi"][i]))
            x = x + jnp.einsum("blf,fd->bld", hidden, p["wo"][i])
        logits = jnp.einsum("bld,dv->blv", norm(x, p["final_norm"]), p["projection"])
        picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    def step(p, tokens, targets):
        value, gradients = jax.value_and_grad(loss)(p, tokens, targets)
        return value, jax.tree.map(lambda x, g: x - RATE * g, p, gradients)

    state = [p]
    keep = {name: x.sharding for name, x in p.items()}
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(None, keep))

    def run() -> float:
        value, state[0] = compiled(state[0], tokens, targets)
        jax.block_until_ready(state[0])
        return float(value)

    return run
