"""The best k of many experts, as Mixtral, Qwen and DeepSeek choose them, against NumPy, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.lower import Options
from tests.layers.helper import check_layouts, run

RNG = np.random.default_rng(0)
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
E, F, S = mtf.Dim("experts", 8), mtf.Dim("d_ff", 4), mtf.Dim("d_ff", 8)
LAYOUTS = [
    ("x:2;y:2", "batch:x;experts:x;d_ff:y"),
    ("x:2;y:2", "batch:x+y;experts:x+y"),
    ("x:2;y:2", "length:x;experts:y;expert_length:x"),
    ("x:2;y:2", "batch:x;length:y;experts:x+y"),
    ("x:2;y:2", "batch:x;length:y;experts:y;expert_batch:x"),
    ("x:2;y:2", "router:x;d_model:y"),
]
LOAD = np.array([0, 9, 3, 12, 20, 1, 40, 11], np.float32)
"""Choices of a step before the first; their mean is 12."""
ROUTERS = {
    "mixtral": layers.TopExperts(chosen=2),
    "qwen": layers.TopExperts(chosen=4, normalized=False),
    "deepseek v2": layers.TopExperts(chosen=3, normalized=False, scale=16.0, groups=4, groups_chosen=2),
    "deepseek v3": layers.TopExperts(
        chosen=3, scores="sigmoid", scale=2.5, groups=4, groups_chosen=2, balance_rate=0.01
    ),
    "full": layers.TopExperts(chosen=4, capacity_factor=0.5, z_loss=0.1),
}


def chosen(router: layers.TopExperts, scores: Any) -> list[int]:
    """The experts of one token, best first."""
    if router.groups > 1:
        apart = scores.reshape(router.groups, -1)
        best = np.sort(apart, -1)[:, -2:].sum(-1) if router.scores == "sigmoid" else apart.max(-1)
        kept = np.argsort(-best)[: router.groups_chosen]
        scores = np.where(np.isin(np.arange(len(scores)) // apart.shape[1], kept), scores, -np.inf)
    return list(np.argsort(-scores, kind="stable")[: router.chosen])


def routed(router: layers.TopExperts, logits: Any, bias: Any, counted: Any) -> tuple[Any, float, Any]:
    """Gates [group, token, expert], the balance loss, and how often each expert was chosen."""
    p = np.exp(logits)
    p = p / p.sum(-1, keepdims=True) if router.scores == "softmax" else p / (1 + p)
    gates, taken = np.zeros_like(p), np.zeros_like(p)
    for b in range(len(p)):
        used = np.zeros(p.shape[-1], int)
        picks = [chosen(router, p[b, t] + bias) for t in range(p.shape[1])]
        for j in range(router.chosen):
            for t, pick in enumerate(picks):
                if not counted[b, t]:
                    continue
                e = pick[j]
                taken[b, t, e] = 1
                used[e] += 1
                gate = p[b, t, e] / (p[b, t, pick].sum() if router.normalized else 1)
                if not router.capacity_factor or used[e] <= router.capacity(p.shape[1], p.shape[-1]):
                    gates[b, t, e] = router.scale * gate
    n = counted.sum(1)[:, None]
    shares = (p / p.sum(-1, keepdims=True) * counted[..., None]).sum(1) / n
    loss = (taken.sum(1) / n * shares).mean() * p.shape[-1] ** 2 / router.chosen
    return gates, float(loss), taken.sum((0, 1))


def expected(router: layers.TopExperts, w: Any, counted: Any | None = None) -> tuple[Any, Any]:
    """The layer's output plus its loss; and the loads."""
    x = X[1]
    logits = x @ w["experts/router"]
    counted = np.ones((4, 8)) if counted is None else counted
    gates, loss, load = routed(router, logits, 0.01 * np.sign(12 - LOAD) * (router.balance_rate > 0), counted)
    loss += router.z_loss * (np.log(np.exp(logits).sum(-1)) ** 2).mean()
    h = np.einsum("bsd,edf->bsef", x, w["experts/wi"])
    h = h / (1 + np.exp(-h)) * np.einsum("bsd,edf->bsef", x, w["experts/wg"])
    y = np.einsum("bse,bsef,efd->bsd", gates, h, w["experts/wo"])
    if "experts/shared/wi" in w:
        h = x @ w["experts/shared/wi"]
        more = (h / (1 + np.exp(-h)) * (x @ w["experts/shared/wg"])) @ w["experts/shared/wo"]
        y = y + more / (1 + np.exp(-x @ w["experts/shared_gate"]))[..., None]
    return y + loss, load


def mixture(router: layers.TopExperts, shared: bool = False) -> Any:
    layer = layers.MixtureOfExperts(
        E, F, router, "silu", True, shared=S if shared else None, shared_gate=shared
    )

    def build(g: mtf.Graph, x: mtf.Tensor, *importance: mtf.Tensor) -> mtf.Tensor:
        with g.initialized(lambda name, found: LOAD if name.endswith("router_load") else found):
            y, loss = layer(x, *importance)
        return y + loss

    return build


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ROUTERS)
def test_against_numpy(name: str) -> None:
    """Output and gradients under every layout, and the bias and the load after the step."""
    router = ROUTERS[name]
    dense = check_layouts(mixture(router, name == "qwen"), {"x": X}, LAYOUTS)
    want, load = expected(router, dense.variables)
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-4)
    if router.balance_rate:
        np.testing.assert_allclose(dense.after["experts/router_bias"], 0.01 * np.sign(12 - LOAD), rtol=1e-6)
        np.testing.assert_array_equal(dense.after["experts/router_load"], load)


def test_importance() -> None:
    """A token of importance 0 goes nowhere, and takes no place."""
    values = RNG.choice([0.0, 1.0], (4, 8))
    inputs = {"x": X, "importance": ("batch:4 length:8", values)}
    dense = check_layouts(mixture(ROUTERS["full"]), inputs, LAYOUTS[:2])
    want, _ = expected(ROUTERS["full"], dense.variables, values)
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


def test_small_sigmoids_are_normalised() -> None:
    """Gates add up to the scale where every sigmoid is far below 1, as those of logits of -30 are."""
    router = layers.TopExperts(chosen=8, scores="sigmoid")
    ones = {"x": ("batch:2 length:4 d_model:8", np.ones((2, 4, 8)))}

    def out(level: float) -> Any:
        def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
            table = np.full((8, 8), level / 8, np.float32)
            with g.initialized(lambda name, found: table if name.endswith("/router") else found):
                return layers.MixtureOfExperts(E, F, router)(x)[0]

        return run(build, ones).out

    np.testing.assert_allclose(out(-30.0), out(0.0), rtol=1e-5)


def test_the_bias_evens_the_load() -> None:
    """An expert that gets all tokens loses them again; the gates do not know of the bias."""
    g = mtf.Graph()
    x = g.input("x", [mtf.Dim(n, s) for n, s in (("batch", 4), ("length", 8), ("d_model", 8))], "float32")
    skewed = np.zeros((8, 8), np.float32)
    skewed[:, 0] = 1.0
    router = layers.TopExperts(chosen=2, scores="sigmoid", balance_rate=0.02)
    with g.initialized(lambda name, found: skewed if name.endswith("/router") else found), g.frozen():
        y, loss = layers.MixtureOfExperts(E, F, router)(x * x)
    w = g.variable("w", [], mtf.ONES)
    model = mtf.Model(mtf.reduce_mean(y) * w, metrics={"balance": loss})
    run = mtf.Trainer(model, "x:2", "batch:x;experts:x", engine="lockstep")
    found = [run.step({"x": X[1].astype(np.float32)})["balance"] for _ in range(60)]
    assert found[0] > 1.3 and np.mean(found[-10:]) < 1.1


def test_default_forms_agree() -> None:
    """Two choices with gates that add up to 1 are GShard's, but for the balance loss."""
    top, gshard = layers.TopExperts(1.25, chosen=2), layers.TokenChoice(chosen=2)

    def out(router: Any) -> Any:
        layer = layers.MixtureOfExperts(E, F, router)
        return run(lambda g, x: layer(x)[0], {"x": X}).out

    np.testing.assert_allclose(out(top), out(gshard), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: layers.TopExperts(scores="sigmoids"),
            "scores='sigmoids' is unknown; did you mean 'sigmoid'",
        ),
        (lambda: layers.TopExperts(chosen=0), "chosen and scale must be positive"),
        (lambda: layers.TopExperts(groups=2, groups_chosen=3), "groups_chosen=3 must be from 1 to groups=2"),
        (
            lambda: mixture(layers.TopExperts(chosen=9)),
            "TopExperts: chosen=9 must be at most the number of experts in",
        ),
        (
            lambda: mixture(layers.TopExperts(chosen=5, groups=4, groups_chosen=2)),
            "TopExperts: chosen=5 must be at most the number of experts in",
        ),
        (
            lambda: mixture(layers.TopExperts(groups=3)),
            "TopExperts: groups=3 must divide the number of experts, 8",
        ),
        (
            lambda: mixture(layers.TopExperts(1.0, chosen=1, scores="sigmoid", groups=8, groups_chosen=2)),
            "at most half the number",
        ),
        (lambda: layers.MixtureOfExperts(E, F, shared_gate=True), "shared_gate needs `shared`"),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()


def test_microbatches_count_the_whole_batch() -> None:
    """In a stack of layers, each with a bias of its own."""

    def model() -> mtf.Model:
        g = mtf.Graph()
        x = g.input("x", [mtf.Dim("batch", 4), mtf.Dim("length", 8), mtf.Dim("d_model", 8)], "float32")
        layer = layers.MixtureOfExperts(E, F, ROUTERS["deepseek v3"])

        def block(state: tuple[mtf.Tensor, mtf.Tensor]) -> tuple[mtf.Tensor, mtf.Tensor]:
            y, loss = layer(state[0])
            return state[0] + y, state[1] + loss

        y, loss = mtf.scan(block, (x, mtf.reduce_sum(x) * 0.0), mtf.Dim("layers", 2))
        return mtf.Model(mtf.reduce_mean(mtf.square(y)) + loss * 0.01, mtf.SGD(0.01))

    found = []
    for parts in (1, 2):
        run = mtf.Trainer(model(), "x:2", "batch:x;experts:x", Options(microbatches=parts), "lockstep")
        losses = [run.step({"x": X[1].astype(np.float32)})["loss"] for _ in range(3)]
        found.append([losses, *(run.engine.read(f"experts/router_{n}") for n in ("bias", "load"))])
    for whole, part in zip(*found, strict=True):
        np.testing.assert_allclose(part, whole, rtol=1e-5)
    assert found[0][2].sum() == 2 * 32 * 3 and np.abs(found[0][1]).max() > 0.015
