"""Routers against NumPy, token by token; mixtures in two levels, and attention by experts; under layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllToAll
from tests.layers.helper import check_layouts, run

RNG = np.random.default_rng(0)
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
E, F = mtf.Dim("experts", 4), mtf.Dim("d_ff", 16)
LAYOUTS = [
    ("x:2;y:2", "batch:x;experts:x;d_ff:y"),
    ("x:2;y:2", "batch:x+y;experts:x+y"),
    ("x:2;y:2", "length:x;capacity:y"),
    ("x:2;y:2", "router:x;d_model:y"),
]
Router = layers.TokenChoice | layers.ExpertChoice


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def in_turn(router: layers.TokenChoice, p: Any, room: int, importance: Any) -> Any:
    """Gates [token, expert] of one group: first choices in order, then second ones."""
    out, used = np.zeros_like(p), np.zeros(p.shape[1], int)
    order = np.argsort(-p, -1, kind="stable")[:, : router.chosen]
    picked = np.take_along_axis(p, order, -1)
    for j in range(router.chosen):
        for s in range(len(p)):
            # Of a token that is not important its best expert is the second choice, and only that is used.
            if importance[s] < 1 and (importance[s] == 0 or j != min(1, router.chosen - 1)):
                continue
            e, gate = (order[s, j], picked[s, j]) if importance[s] == 1 else (order[s, 0], picked[s, 0])
            if router.normalized:
                gate = gate / picked[s].sum() if importance[s] == 1 else 1.0
            if j and router.later == "threshold" and gate <= router.threshold:
                continue
            if j and router.later == "overflow" and out[s].any():
                continue
            used[e] += 1
            if used[e] <= room:
                out[s, e] = gate
    return out


def largest(scores: Any, room: int) -> Any:
    """Every expert keeps the tokens of its largest scores."""
    kept = np.argsort(-scores, 0, kind="stable")[:room]
    out = np.zeros_like(scores)
    np.put_along_axis(out, kept, np.take_along_axis(scores, kept, 0), 0)
    return out


def gates_of(router: Any, p: Any, importance: Any | None = None) -> Any:
    """Gates [group, token, expert]."""
    importance = np.ones(p.shape[:2]) if importance is None else importance
    room = router.capacity(p.shape[1], p.shape[2])
    if isinstance(router, layers.ExpertChoice):
        return np.array([largest(q * (i[:, None] > 0), room) for q, i in zip(p, importance, strict=True)])
    made = [
        in_turn(router, q, len(q) if router.kept == "largest" else room, i)
        for q, i in zip(p, importance, strict=True)
    ]
    return np.array([largest(m, room) for m in made]) if router.kept == "largest" else np.array(made)


def experts(w: dict[str, Any], x: Any) -> Any:
    """Every expert's result for every token: [group, token, expert, d_model]."""
    h = np.maximum(np.einsum("bsd,edf->bsef", x, w["experts/wi"]), 0)
    return np.einsum("bsef,efd->bsed", h, w["experts/wo"])


def balance(p: Any, importance: Any | None = None) -> float:
    first = np.eye(p.shape[-1])[p.argmax(-1)]
    counts = np.ones(p.shape[:2]) if importance is None else (importance == 1)
    n = np.maximum(counts.sum(1), 1)[:, None]
    even = ((first * counts[..., None]).sum(1) / n) * ((p * counts[..., None]).sum(1) / n)
    return float(even.mean() * p.shape[-1] ** 2)


def mixture(router: Any) -> Any:
    layer = layers.MixtureOfExperts(E, F, router)

    def build(g: mtf.Graph, x: mtf.Tensor, *importance: mtf.Tensor) -> mtf.Tensor:
        y, loss = layer(x, *importance)
        return y + loss

    return build


ROUTERS: dict[str, Any] = {
    "threshold": layers.TokenChoice(1.0, chosen=2, later="threshold", threshold=0.35),
    "overflow": layers.TokenChoice(1.0, chosen=3, later="overflow"),
    "largest": layers.TokenChoice(1.0, chosen=1, kept="largest"),
    "largest of two": layers.TokenChoice(0.5, chosen=2, kept="largest"),
    "z-loss": layers.TokenChoice(1.0, z_loss=0.5),
    "experts choose": layers.ExpertChoice(2.0, z_loss=0.1),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name: str) -> None:
    router = ROUTERS[name]
    dense = check_layouts(mixture(router), {"x": X}, LAYOUTS)
    w = dense.variables
    logits = X[1] @ w["experts/router"]
    p = softmax(logits)
    loss = 0.0 if isinstance(router, layers.ExpertChoice) else balance(p)
    loss += router.z_loss * (np.log(np.exp(logits).sum(-1)) ** 2).mean()
    gates = gates_of(router, p)
    want = np.einsum("bse,bsed->bsd", gates, experts(w, X[1])) + loss
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)
    plain = gates_of(layers.TokenChoice(router.capacity_factor, chosen=getattr(router, "chosen", 1)), p)
    assert name == "z-loss" or not np.allclose(gates, plain), "this router does nothing"


def test_overflow_leaves_fewer_tokens_behind() -> None:
    def lost(router: Any) -> int:
        layer = layers.MixtureOfExperts(E, F, router)
        return int((np.abs(run(lambda g, x: layer(x)[0], {"x": X}).out).max(-1) == 0).sum())

    assert lost(ROUTERS["overflow"]) < lost(layers.TokenChoice(1.0))


def test_experts_that_choose_are_all_full() -> None:
    p = softmax(X[1] @ RNG.normal(size=(8, 4)))
    assert ((gates_of(ROUTERS["experts choose"], p) > 0).sum(1) == 4).all()


@pytest.mark.parametrize("name", ["largest", "largest of two", "experts choose", "threshold", "two"])
def test_importance(name: str) -> None:
    """Tokens of importance 0 go nowhere, and those below 1 to their best expert only."""
    router = ROUTERS.get(name, layers.TokenChoice(2.0, chosen=2))
    values = RNG.choice([0.0, 0.5, 1.0], (4, 8))
    inputs = {"x": X, "importance": ("batch:4 length:8", values)}
    dense = check_layouts(mixture(router), inputs, LAYOUTS[:3])
    p = softmax(X[1] @ dense.variables["experts/router"])
    loss = router.z_loss * (np.log(np.exp(X[1] @ dense.variables["experts/router"]).sum(-1)) ** 2).mean()
    counted = (values > 0).astype(float) if name == "largest" else values
    loss += 0.0 if isinstance(router, layers.ExpertChoice) else balance(p, counted)
    want = np.einsum("bse,bsed->bsd", gates_of(router, p, values), experts(dense.variables, X[1])) + loss
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


def test_random_second_choices() -> None:
    """Used as often as the gate is large: for a tiny threshold all, for a large one some."""
    router = layers.TokenChoice(4.0, chosen=2, later="random", threshold=0.9)
    dense = check_layouts(mixture(router), {"x": X}, LAYOUTS)
    w = dense.variables
    p = softmax(X[1] @ w["experts/router"])
    bars = [layers.TokenChoice(4.0, chosen=2, later="threshold", threshold=t) for t in (1, 0.01)]
    one, two = (gates_of(bar, p) for bar in bars)
    each = experts(w, X[1])
    with_one, with_two = (np.einsum("bse,bsed->bsd", g, each) + balance(p) for g in (one, two))
    first = np.isclose(dense.out, with_one, atol=1e-4).all(-1)
    both = np.isclose(dense.out, with_two, atol=1e-4).all(-1)
    assert (first | both).all()
    assert min(first.sum(), both.sum()) > 5
    sure = run(mixture(layers.TokenChoice(4.0, chosen=2, later="random", threshold=1e-9)), {"x": X})
    np.testing.assert_allclose(sure.out, with_two, rtol=1e-4, atol=1e-5)


def test_jitter_moves_the_router_only() -> None:
    router = layers.TokenChoice(4.0, jitter=0.2)
    dense = check_layouts(mixture(router), {"x": X}, LAYOUTS)
    still = run(mixture(layers.TokenChoice(4.0)), {"x": X})
    moved = np.abs(dense.out - still.out).max()
    assert 1e-3 < moved < 2.0


GRID = ("outer_batch:2 batch:2 length:8 d_model:8", RNG.normal(size=(2, 2, 8, 8)))
ROWS, COLUMNS = mtf.Dim("rows", 2), mtf.Dim("columns", 4)
TWO_AXES = ("x:2;y:2", "outer_batch:x;batch:y;rows:y;columns:x")
GRID_LAYOUTS = [
    TWO_AXES,
    ("x:2;y:2", "outer_batch:x;batch:y"),
    ("x:2;y:2", "rows:x;columns:y;d_ff:x"),
    ("x:4", "columns:x"),
    ("x:2;y:2", "rows:x;columns:y"),
]


def two_levels(layer: layers.MixtureOfExperts2D) -> Any:
    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        y, loss = layer(x)
        return y + loss

    return build


@pytest.mark.parametrize("chosen", [1, 2])
def test_two_levels(chosen: int) -> None:
    outer = layers.TokenChoice(1.25, chosen=chosen)
    layer = layers.MixtureOfExperts2D(ROWS, COLUMNS, F, outer)
    layouts = [pair for pair in GRID_LAYOUTS if "d_ff" not in pair[1]]
    dense = check_layouts(two_levels(layer), {"x": GRID}, layouts)
    w, x = dense.variables, GRID[1]
    p = softmax(x @ w["experts/row_router"])
    loss = balance(p.reshape(4, 8, 2))
    first = gates_of(outer, p.reshape(4, 8, 2)).reshape(p.shape)
    room, want = outer.capacity(8, 2), np.zeros_like(x)
    inner = np.zeros((2, 2))
    for a in range(2):
        for r in range(2):
            # Places are in the tokens' order, first choices before second ones.
            places = np.zeros((2, room), int) - 1
            for b in range(2):
                order = np.argsort(-p[a, b], -1)
                ranks = np.where(order[:, 0] == r, 0, 1)
                mine = [s for j in range(2) for s in range(8) if ranks[s] == j and first[a, b, s, r] > 0]
                places[b, : len(mine)] = mine
            at = places.reshape(-1)
            who = np.repeat(np.arange(2), room)
            tokens = np.where((at >= 0)[:, None], x[a, who, at], 0)
            gate = np.where(at >= 0, first[a, who, at, r], 0)
            full = (at >= 0).astype(float)
            importance = full if chosen == 1 else (full + (gate >= 0.5)) / 2
            q = softmax(tokens @ w["experts/column_router"][r])[None]
            inner[a, r] = balance(q, importance[None]) if importance.any() else 0
            second = gates_of(layer.inner, q, importance[None])[0]
            h = np.maximum(np.einsum("td,cdf->tcf", tokens, w["experts/wi"][r]), 0)
            y = np.einsum("tc,tcf,cfd->td", second, h, w["experts/wo"][r])
            for t in range(len(at)):
                if at[t] >= 0:
                    want[a, who[t], at[t]] += gate[t] * y[t]
    np.testing.assert_allclose(dense.out, want + loss + inner.mean(), rtol=1e-4, atol=1e-5)


def test_two_levels_are_two_kinds_of_all_to_alls() -> None:
    """Along y to the rows, along x to the columns, and back; nothing is gathered."""
    layer = layers.MixtureOfExperts2D(ROWS, COLUMNS, F)
    made = run(two_levels(layer), {"x": GRID}, *TWO_AXES)
    forward = [i for i, _ in made.program.walk() if i.origin.phase == Phase.FORWARD]
    axes = [i.axes for i in forward if isinstance(i, AllToAll)]
    assert sorted(axes) == [("x",), ("x",), ("y",), ("y",), ("y",)]
    assert not any(type(i).__name__ == "AllGather" for i in forward)


H, K = mtf.Dim("heads", 2), mtf.Dim("d_kv", 4)


@pytest.mark.parametrize("cross", [False, True])
def test_attention_by_experts(cross: bool) -> None:
    router = layers.TokenChoice(1.0)
    layer = layers.ExpertsAttention(layers.Attention(H, K, causal=not cross), E, router)
    m = X[1][::-1]

    def build(g: mtf.Graph, x: mtf.Tensor, m: mtf.Tensor) -> mtf.Tensor:
        y, loss = layer(x, m) if cross else layer(x)
        return y + loss

    inputs = {"x": X, "m": ("batch:4 memory_length:8 d_model:8", m)}
    layouts = [("x:2;y:2", "batch:x;experts:x;heads:y"), *LAYOUTS[2:]]
    dense = check_layouts(build, inputs, layouts)
    w = {n.removeprefix("attention/"): v for n, v in dense.variables.items()}

    def projected(x: Any, name: str) -> tuple[Any, float]:
        p = softmax(x @ w[f"{name}/router"])
        return np.einsum("bse,bsd,ednhk->nbhsk", gates_of(router, p), x, w[f"{name}/weight"]), balance(p)

    if cross:
        ((q,), one), ((k, v), other) = projected(X[1], "q"), projected(m, "kv")
        loss = one + other
    else:
        (q, k, v), loss = projected(X[1], "qkv")
    logits = np.einsum("bhlk,bhmk->bhlm", q, k) / 2
    weights = softmax(logits if cross else np.where(np.tril(np.ones((8, 8), bool)), logits, -1e9))
    want = np.einsum("bhlm,bhmk,hkd->bld", weights, v, w["o"]) + loss
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.TokenChoice(later="rnd"), "later='rnd' is unknown; did you mean 'random'"),
        (lambda: layers.TokenChoice(kept="best"), "kept='best' is unknown; .*known: first, largest"),
        (lambda: layers.TokenChoice(chosen=0), "TokenChoice: chosen and threshold must be positive, found"),
        (lambda: layers.TokenChoice(chosen=2, later="overflow", kept="largest"), "use kept='first'"),
        (lambda: layers.TokenChoice(jitter=1.0), "Jitter: epsilon must be at least 0 and less than 1, found"),
        (lambda: layers.ExpertChoice(0.0), "ExpertChoice: capacity_factor must be positive, found 0"),
        (
            lambda: layers.MixtureOfExperts2D(ROWS, COLUMNS, F, layers.TokenChoice(chosen=3)),
            "TokenChoice: chosen=3 must be from 1 to the number of experts, 2",
        ),
        (
            lambda: run(two_levels(layers.MixtureOfExperts2D(ROWS, COLUMNS, F)), {"x": X}),
            "must have the dimensions outer_batch, batch, length and d_model, .* reshape the batch into",
        ),
        (
            lambda: layers.ExpertsAttention(layers.Attention(H, K, kv_heads=1), E),
            "ExpertsAttention: kv_heads and shared_kv are not supported",
        ),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()
