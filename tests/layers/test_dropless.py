"""Five mixtures in float64 under random layouts: loss and every gradient against a dense reference, in which
each expert multiplies every token."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.dims import SparseDim
from mesh_tf_core.lower.verify import verify
from mesh_tf_core.ops.experts import expert_product, from_experts, to_experts
from tests.conformance.helper import dims

EXPERTS = 8
INPUTS = {
    "x": "batch:4 length:4 d:4",
    "router": "d:4 router:8",
    "wi": "experts:8 d:4 f:4",
    "wg": "experts:8 d:4 f:4",
    "wo": "experts:8 f:4 d:4",
}
RNG = np.random.default_rng(3)
VALUES = {name: RNG.normal(size=[d.size for d in dims(text)]) for name, text in INPUTS.items()}
ROUTERS = {
    "mixtral": layers.TopExperts(chosen=2),
    "qwen": layers.TopExperts(chosen=4, normalized=False),
    "deepseek v2": layers.TopExperts(chosen=3, normalized=False, scale=16.0, groups=4, groups_chosen=2),
    "deepseek v3": layers.TopExperts(chosen=3, scores="sigmoid", scale=2.5, groups=4, groups_chosen=2),
    "switch": layers.TopExperts(capacity_factor=1.0, chosen=1, normalized=False),
}
SPLIT = ("batch", "length", "d", "router", "experts", "f", "expert_batch", "expert_length", "choice")
TOKENS = ("batch", "length")


class Given(layers.TopExperts):
    """A router whose weights are an input."""

    def logits(self, x: Any, router: mtf.Dim, token: str, d_model: str, *rest: Any) -> Any:
        return mtf.einsum([x, x.graph.tensors[1]], [*dims("batch:4 length:4"), router])


def results(router: layers.TopExperts) -> tuple[mtf.Graph, dict[str, mtf.Tensor]]:
    """The loss and the gradient of every input."""
    g = mtf.Graph("mixture")
    given = {name: g.input(name, dims(text), "float64") for name, text in INPUTS.items()}
    x, _, wi, wg, wo = given.values()
    found = Given(**vars(router)).choices(x, mtf.Dim("router", EXPERTS), "length", "d", None)
    few = SparseDim("experts", EXPERTS, router.chosen, EXPERTS)
    sent = partial(to_experts, experts=few, choice=found.choice, tokens=TOKENS)
    ids, gates, rows = sent(found.ids), sent(found.gates), sent(x, rest=["d"])
    h = mtf.silu(expert_product(rows, wi, ids)) * expert_product(rows, wg, ids) * gates
    y = from_experts(expert_product(h, wo, ids), found.choice, TOKENS, ["d"])
    loss = mtf.reduce_sum(mtf.square(y)) + found.loss
    slopes = mtf.gradients(loss, list(given.values()))
    return g, {"loss": loss, **dict(zip(INPUTS, slopes, strict=True))}


def picks(router: layers.TopExperts) -> Any:
    """The experts of each token, by NumPy: 1 where chosen, and 1 where also within the capacity."""
    logits = VALUES["x"] @ VALUES["router"]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True) if router.scores == "softmax" else 1 / (1 + np.exp(-logits))
    taken, kept = np.zeros(p.shape), np.zeros(p.shape)
    for b in range(4):
        order = []
        for t in range(4):
            scores = p[b, t].copy()
            apart = scores.reshape(router.groups, -1)
            best = np.sort(apart, -1)[:, -2:].sum(-1) if router.scores == "sigmoid" else apart.max(-1)
            far = np.argsort(-best, kind="stable")[router.groups_chosen :]
            scores[np.isin(np.arange(EXPERTS) // apart.shape[1], far)] = -1
            order.append(np.argsort(-scores, kind="stable")[: router.chosen])
        used = np.zeros(EXPERTS, int)
        for j in range(router.chosen):
            for t in range(4):
                e = order[t][j]
                taken[b, t, e], used[e] = 1, used[e] + 1
                room = router.capacity(4, EXPERTS) if router.capacity_factor else 99
                kept[b, t, e] = used[e] <= room
    return taken, kept


def reference(router: layers.TopExperts) -> dict[str, Any]:
    """The same by a dense program."""
    import jax
    import jax.numpy as jnp

    taken, kept = picks(router)

    def loss(given: dict[str, Any]) -> Any:
        logits = given["x"] @ given["router"]
        p = jax.nn.sigmoid(logits) if router.scores == "sigmoid" else jax.nn.softmax(logits, -1)
        gates = p * taken
        gates = gates / gates.sum(-1, keepdims=True) if router.normalized else gates
        h = jnp.einsum("bld,edf->blef", given["x"], given["wi"])
        h = jax.nn.silu(h) * jnp.einsum("bld,edf->blef", given["x"], given["wg"])
        y = jnp.einsum("ble,blef,efd->bld", gates * kept * router.scale, h, given["wo"])
        shares = (p / p.sum(-1, keepdims=True)).mean(1)
        return (y**2).sum() + (taken.mean(1) * shares).mean() * EXPERTS**2 / router.chosen

    with jax.enable_x64(True):
        value, slopes = jax.value_and_grad(loss)({n: jnp.asarray(v) for n, v in VALUES.items()})
        return {"loss": np.asarray(value), **{n: np.asarray(s) for n, s in slopes.items()}}


def compared(name: str, count: int) -> None:
    """Compares `count` random layouts, half of which split the experts."""
    g, found = results(ROUTERS[name])
    want, rng, done = reference(ROUTERS[name]), np.random.default_rng(len(name)), 0
    while done < count:
        axes = [*rng.permutation(["x", "y", "z"])]
        rules = {n: "+".join(a for a in axes if rng.random() < 0.3) for n in SPLIT}
        if done % 2:
            rules["experts"] = rules["experts"] or axes[0]
        further = {f"{n}@elsewhere": axes[-1] for n in TOKENS if rng.random() < 0.4}
        layout = ";".join(f"{n}:{over}" for n, over in (rules | further).items() if over)
        try:
            program = verify(mtf.lower(g, mtf.Mesh("x:2;y:2;z:2"), mtf.Layout(layout), found))
        except LayoutError:
            continue
        engine = LockstepEngine(program)
        got = engine.step(VALUES)
        for key, value in want.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-9, atol=1e-9, err_msg=f"{key} {layout}")
        assert engine.communication_bytes == program.communication_bytes()
        done += 1


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.one_in(4)
def test_few_random_layouts(name: str) -> None:
    compared(name, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROUTERS)
def test_many_random_layouts(name: str) -> None:
    compared(name, 60)
