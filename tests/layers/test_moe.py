"""Mixtures of experts against a token-by-token NumPy router, under layouts, and with their all-to-all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllToAll
from tests.layers.helper import Run, check_layouts, run

RNG = np.random.default_rng(0)
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
E, F = mtf.Dim("experts", 4), mtf.Dim("d_ff", 16)
LAYOUTS = [
    ("x:2;y:2", "batch:x"),
    ("x:2;y:2", "experts:y"),
    ("x:2;y:2", "batch:x;experts:x"),
    ("x:2;y:2", "batch:x+y;experts:x+y"),
    ("x:4", "batch:x;experts:x"),
    ("x:2;y:2", "batch:x;experts:x;d_ff:y"),
    ("x:2;y:2", "batch:x;experts:y"),
    ("x:2;y:2", "batch:x;expert_batch:x;experts:y"),
    ("x:2;y:2", "length:x;capacity:y"),
    ("x:2;y:2", "d_model:x;router:y;experts:y"),
    ("x:2;y:2", "length:x+y;experts:y"),
]


def layer(chosen: int, factor: float, gated: bool = False) -> layers.MixtureOfExperts:
    return layers.MixtureOfExperts(E, F, layers.TokenChoice(factor, chosen=chosen), "silu", gated)


def with_loss(moe: layers.MixtureOfExperts) -> Any:
    """The output plus the loss, so that gradients of both are compared."""

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        y, loss = moe(x)
        return y + loss

    return build


def reference(moe: layers.MixtureOfExperts, w: dict[str, Any], x: Any) -> tuple[Any, float]:
    """Tokens go to their experts one by one, first choices before second ones."""
    logits = x @ w["experts/router"]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out, loss = np.zeros_like(x), 0.0
    for b in range(len(x)):
        used = np.zeros(E.size, int)
        order = np.argsort(-p[b], -1)[:, : moe.router.chosen]
        gates = np.take_along_axis(p[b], order, -1)
        gates = gates / gates.sum(-1, keepdims=True) if moe.router.chosen > 1 else gates
        for j in range(moe.router.chosen):
            for s in range(x.shape[1]):
                e = order[s, j]
                used[e] += 1
                if used[e] > moe.router.capacity(x.shape[1], E.size):
                    continue
                h = x[b, s] @ w["experts/wi"][e]
                h = h / (1 + np.exp(-h)) * (x[b, s] @ w["experts/wg"][e] if moe.gated else 1.0)
                out[b, s] += gates[s, j] * (h @ w["experts/wo"][e])
        fraction = np.bincount(order[:, 0], minlength=E.size) / x.shape[1]
        loss += E.size * (fraction * p[b].mean(0)).sum() / len(x)
    return out, loss


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("chosen", "factor"), [(1, 1.25), (1, 0.5), (2, 1.0), (2, 4.0)])
def test_against_numpy(chosen: int, factor: float, gated: bool) -> None:
    moe = layer(chosen, factor, gated)
    got = run(with_loss(moe), {"x": X})
    want, loss = reference(moe, got.variables, X[1])
    np.testing.assert_allclose(got.out, want + loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("chosen", "factor"), [(1, 1.0), (2, 1.0)])
def test_layouts(chosen: int, factor: float) -> None:
    check_layouts(with_loss(layer(chosen, factor)), {"x": X}, LAYOUTS)


def test_some_tokens_are_dropped_and_none_with_room() -> None:
    def lost(factor: float) -> int:
        moe = layer(1, factor)
        out = run(lambda g, x: moe(x)[0], {"x": X}).out
        return int((np.abs(out).max(-1) == 0).sum())

    assert lost(0.5) > 0
    assert lost(4.0) == 0


def all_to_alls(made: Run) -> list[AllToAll]:
    return [i for i, _ in made.program.walk() if isinstance(i, AllToAll) and i.origin.phase == Phase.FORWARD]


def test_splitting_the_experts_with_the_batch_is_an_all_to_all() -> None:
    """Two forward: to the experts and back; nothing of the buffers is gathered."""
    made = run(with_loss(layer(2, 1.0)), {"x": X}, "x:4", "batch:x;experts:x")
    assert len(all_to_alls(made)) == 2
    sizes = {made.program.values[i.inputs[0]].shape.names for i in all_to_alls(made)}
    assert sizes == {
        ("batch", "router", "capacity", "d_model"),
        ("expert_batch", "experts", "capacity", "d_model"),
    }
    forward = [i for i, _ in made.program.walk() if i.origin.phase == Phase.FORWARD]
    assert not any(type(i).__name__ == "AllGather" for i in forward)


def test_other_layouts_need_none() -> None:
    for mesh, layout in (("x:4", "batch:x"), ("x:2;y:2", "batch:x;expert_batch:x;experts:y")):
        assert not all_to_alls(run(with_loss(layer(2, 1.0)), {"x": X}, mesh, layout))


def test_an_even_router_has_loss_one() -> None:
    """Equal logits: every mean probability is 1/E, whatever is chosen."""

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        y, loss = layer(2, 1.0)(x * 0.0)
        return y + loss

    np.testing.assert_allclose(run(build, {"x": X}).out, 1.0, rtol=1e-6)


def test_group_and_experts_may_not_share_an_axis_with_d_ff() -> None:
    with pytest.raises(mtf.LayoutError, match="'experts' and 'd_ff' split over mesh axis 'x'"):
        run(with_loss(layer(1, 1.0)), {"x": X}, "x:4", "experts:x;d_ff:x")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layer(5, 1.0), "TokenChoice: chosen=5 must be from 1 to the number of experts, 4"),
        (lambda: layer(1, 0.0), "capacity_factor must be positive, found 0"),
        (
            lambda: run(lambda g, x: layer(1, 1.0)(x)[0], {"x": ("a:8 d_model:8", X[1][0])}),
            "must have the dimens",
        ),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()
