"""Layers with states against their recurrences, step by step, and under layouts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from tests.layers.helper import Run, check_layouts, run

LENGTH = 16
X = (f"batch:2 length:{LENGTH} d_model:8", np.random.default_rng(0).normal(size=(2, LENGTH, 8)))
H, P, N = mtf.Dim("heads", 4), mtf.Dim("d_head", 4), mtf.Dim("d_state", 4)
MAMBA = layers.Mamba2(H, P, N, groups=2, chunk=4)
DELTA = layers.GatedDeltaNet(H, 2, mtf.Dim("d_k", 4), mtf.Dim("d_v", 6), chunk=8)
EQUAL = layers.GatedDeltaNet(H, 4, mtf.Dim("d_k", 4), mtf.Dim("d_v", 6), chunk=8)
KIMI = layers.GatedDeltaNet(
    H, 4, mtf.Dim("d_k", 4), mtf.Dim("d_v", 6), chunk=8, channels=True, rank=3, gate="sigmoid"
)
BOUNDED = layers.GatedDeltaNet(
    H, 2, mtf.Dim("d_k", 4), mtf.Dim("d_v", 6), chunk=16, channels=True, least=-5.0
)
LIGHTNING = layers.LightningAttention(H, mtf.Dim("d_kv", 4), layers=3, chunk=4)
SELECTIVE = layers.SelectiveStateSpace(mtf.Dim("heads", 8), N, rank=2, chunk=4)
FUSED = layers.SelectiveStateSpace(mtf.Dim("heads", 8), N, rank=2, chunk=4, fused=True)
LAYOUTS = [
    ("x:2;y:2", "batch:x;heads:y"),
    ("x:2;y:2", "length:x;d_model:y"),
]


def lightning(x: mtf.Tensor) -> mtf.Tensor:
    """The second of three layers."""
    return LIGHTNING(x, mtf.constant(x.graph, 1, dtype="int32"))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def softplus(x: Any) -> Any:
    return np.log1p(np.exp(x))


def unit(x: Any, axes: tuple[int, ...] = (-1,), epsilon: float = 1e-6) -> Any:
    return x / np.sqrt((x * x).mean(axes, keepdims=True) + epsilon)


class Weights(dict[str, Any]):
    """Of a layer, by name inside it."""

    def made(self, name: str) -> Any:
        """The input times a weight."""
        return np.tensordot(X[1], self[name], 1)

    def conv(self, name: str) -> Any:
        """The same, after the short convolution."""
        y, w = self.made(name), self[f"{name}_conv/weight"]
        y = np.concatenate([np.zeros((len(y), len(w) - 1, *y.shape[2:])), y], 1)
        return silu(
            sum(y[:, i : i + LENGTH] * w[i] for i in range(len(w))) + self.get(f"{name}_conv/bias", 0)
        )


def weights(found: Run) -> Weights:
    return Weights({n.split("/", 1)[-1]: np.asarray(x, np.float64) for n, x in found.variables.items()})


def of_mamba(w: Weights) -> Any:
    values, b, c = w.conv("x"), w.conv("b"), w.conv("c")
    dt = softplus(w.made("dt") + w["step_bias"])
    state, out = 0.0, []
    for t in range(LENGTH):
        new = np.einsum("bgh,bghp,bgn->bghpn", dt[:, t], values[:, t], b[:, t])
        state = state * np.exp(-dt[:, t] * np.exp(w["log_a"]))[..., None, None] + new
        out.append(np.einsum("bghpn,bgn->bghp", state, c[:, t]) + w["skip"][..., None] * values[:, t])
    y = np.stack(out, 1) * silu(w.made("gate"))
    return np.einsum("blghp,ghpd->bld", unit(y, (-1, -2), 1e-5) * w["out_norm"], w["out"])


def of_selective(w: Weights) -> Any:
    x = w.conv("x")
    low, b, c = (x @ w[n] for n in ("dt_down", "b", "c"))
    dt, rate = softplus(low @ w["dt"] + w["step_bias"]), -np.exp(w["log_a"])
    state, out = 0.0, []
    for t in range(LENGTH):
        state = state * np.exp(dt[:, t, :, None] * rate) + (dt * x)[:, t, :, None] * b[:, t, None]
        out.append(np.einsum("bin,bn->bi", state, c[:, t]))
    return ((np.stack(out, 1) + x * w["skip"]) * silu(w.made("gate"))) @ w["out"]


def of_delta(w: Weights, layer: layers.GatedDeltaNet = DELTA) -> Any:
    q, k, v = (w.conv(n) for n in "qkv")
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    gate, dt = (
        np.einsum("blr,r...->bl...", w.made(f"{n}_down"), w[n]) if layer.rank else w.made(n)
        for n in ("gate", "dt")
    )
    dt, rate, write = dt + w["dt_bias"], np.exp(w["log_a"]), sigmoid(w.made("beta"))
    rate = rate[..., None] if layer.channels else rate
    decay = np.exp(layer.least * sigmoid(rate * dt) if layer.least else -rate * softplus(dt))
    decay = decay if layer.channels else decay[..., None]
    if v.ndim == 4:  # no head shares a key
        v, write, decay = v[:, :, :, None], write[..., None], decay[:, :, :, None]
    state, out = np.zeros((2, *v.shape[2:4], 4, 6)), []
    for t in range(LENGTH):
        state = state * decay[:, t][..., None]
        wrong = v[:, t] - np.einsum("bhk,bhgkv->bhgv", k[:, t], state)
        state = state + np.einsum("bhk,bhgv->bhgkv", k[:, t], wrong * write[:, t][..., None])
        out.append(np.einsum("bhk,bhgkv->bhgv", q[:, t] / 2, state))
    y = np.stack(out, 1).reshape(gate.shape)
    y = unit(y) * w["out_norm"] * (silu(gate) if layer.gate == "silu" else sigmoid(gate))
    return np.einsum("bli,id->bld", y.reshape(*y.shape[:2], -1), w["out"].reshape(-1, w["out"].shape[-1]))


def of_lightning(w: Weights) -> Any:
    q, k, v = (silu(w.made(n)) for n in "qkv")
    rate = 2.0 ** (-8 / 4 * np.arange(1, 5)) * (1 - 1 / (2 + 1e-5) + 1e-5)
    state, out = 0.0, []
    for t in range(LENGTH):
        state = state * np.exp(-rate)[:, None, None] + np.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        out.append(np.einsum("bhk,bhkv->bhv", q[:, t], state))
    y = unit(np.stack(out, 1), (-1, -2)) * w["out_norm"] * sigmoid(w.made("gate"))
    return np.einsum("blhv,hvd->bld", y, w["o"])


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("layer", "reference", "more"),
    [
        (MAMBA, of_mamba, "ssm_groups:x;chunks:y"),
        (DELTA, of_delta, "group:x;d_v:y"),
        (EQUAL, partial(of_delta, layer=EQUAL), "heads:x;d_v:y"),
        (KIMI, partial(of_delta, layer=KIMI), "heads:x;d_k:y"),
        (BOUNDED, partial(of_delta, layer=BOUNDED), "group:x;heads:y"),
        (lightning, of_lightning, "chunks:x;place:y"),
        (SELECTIVE, of_selective, "heads:x;d_state:y"),
        (FUSED, of_selective, "d_model:x;dt_rank:y"),
    ],
)
def test_states_step_by_step_under_every_layout(layer: Any, reference: Any, more: str) -> None:
    def build(_: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        made: mtf.Tensor = layer(x)
        return made

    found = run(build, {"x": X})
    np.testing.assert_allclose(found.out, reference(weights(found)), atol=2e-5)
    check_layouts(build, {"x": X}, [*LAYOUTS, ("x:2;y:2", more)], atol=3e-6)


def test_chunks_of_the_delta_rule_run_one_after_another() -> None:
    with pytest.raises(mtf.UserError, match="'chunks' cannot be split over x, because its iterations"):
        run(lambda _, x: DELTA(x), {"x": X}, "x:2", "chunks:x")


def test_chunks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(mtf.UserError, match="chunk=5 does not divide length=16; give a divisor"):
        run(lambda _, x: layers.Mamba2(H, P, N, chunk=5)(x), {"x": X})


@pytest.mark.parametrize("kv_heads", [0, 2, 1])
def test_a_learned_sink_is_the_same_in_one_operation_and_written_out(kv_heads: int) -> None:
    found = []
    for form in ("fused", "plain"):
        layer = layers.Attention(H, P, kv_heads, causal=True, window=5, sinks=True, attention=form)
        found.append(run(lambda _, x, layer=layer: layer(x), {"x": X}))
        check_layouts(lambda _, x, layer=layer: layer(x), {"x": X}, LAYOUTS[:2])
    for name in found[0].after:
        np.testing.assert_allclose(found[0].after[name], found[1].after[name], atol=1e-6)
    np.testing.assert_allclose(found[0].out, found[1].out, atol=1e-6)
