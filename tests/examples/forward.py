"""The examples' losses in plain NumPy, place by place and head by head where that is clearer: another way to
the same number.

Every function takes the variables by name, a batch, and the hyperparameters that the shapes do not say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.special import erf, expit, logsumexp

Arrays = Mapping[str, Any]


def below(v: Arrays, scope: str, at: int | None = None) -> dict[str, Any]:
    """The variables of a scope, in float64; `at`: of one layer of its stack."""
    found = {
        n.removeprefix(f"{scope}/"): np.asarray(x, np.float64)
        for n, x in v.items()
        if n.startswith(f"{scope}/")
    }
    return found if at is None else {n: x[at] for n, x in found.items()}


def layer_norm(x: Any, v: Arrays, epsilon: float = 1e-6) -> Any:
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
    return y * v["scale"] + v.get("bias", 0)


def rms_norm(x: Any, v: Arrays, epsilon: float = 1e-6) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * v["scale"]


def silu(x: Any) -> Any:
    return x * expit(x)


def cross_entropy(logits: Any, targets: Any) -> Any:
    right = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (logsumexp(logits, -1) - right).mean()


def softmax(x: Any) -> Any:
    y = np.exp(x - x.max(-1, keepdims=True))
    return y / y.sum(-1, keepdims=True)


def turned(x: Any, base: float = 10000.0) -> Any:
    """Rotary positions of x [batch, length, heads, d]: as complex numbers."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[None, :, None]
    return np.concatenate([z.real, z.imag], -1)


def attended(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """Of every head [batch, length, heads, d]; a group of heads may share keys and values."""
    out = np.empty((*q.shape[:3], v.shape[-1]))
    shared = q.shape[2] // k.shape[2]
    for h in range(q.shape[2]):
        logits = q[:, :, h] @ k[:, :, h // shared].transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        if causal:
            logits = np.where(np.tri(q.shape[1], dtype=bool), logits, -np.inf)
        out[:, :, h] = softmax(logits) @ v[:, :, h // shared]
    return out


def attention(x: Any, v: Arrays, causal: bool = False, base: float = 0.0) -> Any:
    """x [batch, length, d_model]; `base`: of rotary positions."""

    def of(name: str) -> Any:
        w = v[name]
        y = x @ w.reshape(len(w), -1) + v.get(f"{name}_bias", np.zeros(1)).reshape(-1)
        return y.reshape(*x.shape[:2], -1, w.shape[-1])

    q, k, values = of("q"), of("k"), of("v")
    if base:
        q, k = turned(q, base), turned(k, base)
    found = attended(q, k, values, causal).reshape(*x.shape[:2], -1)
    return found @ v["o"].reshape(-1, v["o"].shape[-1]) + v.get("o_bias", 0)


def feed_forward(x: Any, v: Arrays, act: Callable[[Any], Any]) -> Any:
    h = act(x @ v["wi"] + v.get("bi", 0))
    return (h * (x @ v["wg"]) if "wg" in v else h) @ v["wo"] + v.get("bo", 0)


def dense(x: Any, v: Arrays) -> Any:
    return x @ v["weight"] + v.get("bias", 0)


def llama(v: Arrays, batch: Arrays, hparams: Mapping[str, Any]) -> float:
    x = v["embedding/tokens"][batch["tokens"]]
    for i in range(hparams["layers"]):
        w = below(v, "attention", i), below(v, "feed_forward", i)
        x = x + attention(rms_norm(x, below(v, "attention_norm", i)), w[0], True, hparams["rotary_base"])
        x = x + feed_forward(rms_norm(x, below(v, "feed_forward_norm", i)), w[1], silu)
    return cross_entropy(rms_norm(x, below(v, "final_norm")) @ v["output/projection"], batch["targets"])


def encoder(
    x: Any, v: Arrays, layers: int, act: Callable[[Any], Any], epsilon: float, causal: bool = False
) -> Any:
    for i in range(layers):
        y = layer_norm(x, below(v, "attention_norm", i), epsilon)
        x = x + attention(y, below(v, "attention", i), causal)
        y = layer_norm(x, below(v, "feed_forward_norm", i), epsilon)
        x = x + feed_forward(y, below(v, "feed_forward", i), act)
    return x


def image_tokens(image: Any, v: Arrays, patch: int) -> Any:
    squares = [
        image[:, r : r + patch, c : c + patch].reshape(len(image), -1)
        for r in range(0, image.shape[1], patch)
        for c in range(0, image.shape[2], patch)
    ]
    w = v["weight"].reshape(-1, v["weight"].shape[-1])
    x = np.stack(squares, 1) @ w + v.get("bias", 0)
    whole = np.broadcast_to(v["class"], (len(x), 1, x.shape[-1]))
    return np.concatenate([whole, x], 1) + v["positions"]


def vit(v: Arrays, batch: Arrays, hparams: Mapping[str, Any]) -> float:
    x = image_tokens(batch["image"], below(v, "embedding"), hparams["patch"])
    x = encoder(x, v, hparams["layers"], lambda x: x * (1 + erf(x / np.sqrt(2))) / 2, 1e-6)
    x = layer_norm(x[:, 0], below(v, "final_norm"))
    return cross_entropy(dense(x, below(v, "output")), batch["label"])


def clip(v: Arrays, batch: Arrays, hparams: Mapping[str, Any]) -> float:
    def act(x: Any) -> Any:
        return x * expit(1.702 * x)

    def unit(x: Any) -> Any:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    w = below(v, "image")
    x = layer_norm(
        image_tokens(batch["image"], below(w, "embedding"), hparams["patch"]), below(w, "first_norm"), 1e-5
    )
    x = encoder(x, w, hparams["image_layers"], act, 1e-5)[:, 0]
    pictures = unit(dense(layer_norm(x, below(w, "final_norm"), 1e-5), below(w, "projection")))
    w, text = below(v, "text"), batch["text"]
    x = w["embedding/tokens"][text] + w["embedding/positions"][: text.shape[1]]
    x = encoder(x, w, hparams["text_layers"], act, 1e-5, causal=True)[np.arange(len(text)), text.argmax(1)]
    said = unit(dense(layer_norm(x, below(w, "final_norm"), 1e-5), below(w, "projection")))
    logits, order = pictures @ said.T * np.exp(v["log_scale"]), np.arange(len(text))
    return (cross_entropy(logits, order) + cross_entropy(logits.T, order)) / 2


def dlrm(v: Arrays, batch: Arrays, hparams: Mapping[str, Any]) -> float:
    def perceptron(x: Any, name: str) -> Any:
        for i in range(hparams["layers"]):
            x = np.maximum(dense(x, below(v, f"{name}_{i}")), 0)
        return x

    losses = []
    for numbers, ids, clicked in zip(batch["numbers"], batch["ids"], batch["clicked"], strict=True):
        x = dense(perceptron(np.log1p(numbers), "bottom"), below(v, "bottom_out"))
        vectors = [x, *(v["embedding/tables"][t][i] for t, i in enumerate(ids))]
        pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        y = dense(x, below(v, "top_from_numbers")) + np.array(pairs) @ v["top_from_pairs/weight"]
        (logit,) = dense(perceptron(np.maximum(y, 0), "top"), below(v, "output"))
        losses.append(np.log1p(np.exp(logit)) - logit * clicked)
    return np.mean(losses)


def mamba(v: Arrays, batch: Arrays, hparams: Mapping[str, Any]) -> float:
    """The states step by step."""
    x = v["embedding/tokens"][batch["tokens"]]
    for i in range(hparams["layers"]):
        one = {n.removeprefix("mamba/"): v[n][i] for n in v if n.startswith("mamba/")}
        u = rms_norm(x, below(v, "norm", i), 1e-5)

        def made(name: str, u: Any = u, one: Any = one) -> Any:
            y, taps = np.tensordot(u, one[name], 1), one[f"{name}_conv/weight"]
            past = [
                np.roll(y, k, 1) * (np.arange(y.shape[1]) >= k).reshape(1, -1, *[1] * (y.ndim - 2))
                for k in range(len(taps))
            ]
            return silu(sum(p * t for p, t in zip(past, taps[::-1], strict=True)) + one[f"{name}_conv/bias"])

        values, b, c = made("x"), made("b"), made("c")
        dt = np.log1p(np.exp(u @ one["dt"] + one["step_bias"]))
        state, out = np.zeros((*values[:, 0].shape, b.shape[-1])), []
        for t in range(x.shape[1]):
            decay = np.exp(-dt[:, t] * np.exp(one["log_a"]))
            new = np.einsum("bh,bhp,bn->bhpn", dt[:, t], values[:, t], b[:, t])
            state = state * decay[..., None, None] + new
            out.append(np.einsum("bhpn,bn->bhp", state, c[:, t]) + one["skip"][:, None] * values[:, t])
        y = np.stack(out, 1) * silu(np.tensordot(u, one["gate"], 1))
        y = y / np.sqrt((y * y).mean((-1, -2), keepdims=True) + 1e-5) * one["out_norm"]
        x = x + np.einsum("blhp,hpd->bld", y, one["out"])
    return cross_entropy(
        rms_norm(x, below(v, "final_norm"), 1e-5) @ v["embedding/tokens"].T, batch["targets"]
    )


def deepseek(v: Arrays, batch: Arrays, hparams: Mapping[str, Any]) -> float:
    """Without the loss that balances experts; no token is dropped."""
    dense_layers, rank = hparams["dense"], hparams["d_kv"]

    def latent(x: Any, w: Arrays) -> Any:
        q = np.einsum("bld,dhk->blhk", x, w["q"])
        q = np.concatenate([q[..., :rank], turned(q[..., rank:])], -1)
        low = rms_norm(x @ w["kv_down"], below(w, "kv_norm"))
        k = np.einsum("blr,rhk->blhk", low, w["k_up"])
        same = np.broadcast_to(turned((x @ w["k_rotary"])[:, :, None]), (*k.shape[:3], hparams["d_rotary"]))
        found = attended(q, np.concatenate([k, same], -1), np.einsum("blr,rhk->blhk", low, w["v_up"]), True)
        return np.einsum("blhk,hkd->bld", found, w["o"])

    def mixture(x: Any, w: Arrays) -> Any:
        y = feed_forward(x, below(w, "shared"), silu)
        p = softmax(x @ w["router"])
        for place in np.ndindex(*x.shape[:2]):
            for e in np.argsort(-p[place])[: hparams["chosen"]]:
                expert = {n: w[n][e] for n in ("wi", "wg", "wo")}
                y[place] += p[place][e] * feed_forward(x[place], expert, silu)
        return y

    x = v["embedding/tokens"][batch["tokens"]]
    for i in range(hparams["layers"]):
        scope, j = ("dense", i) if i < dense_layers else ("sparse", i - dense_layers)
        w = below(v, scope)
        x = x + latent(rms_norm(x, below(w, "attention_norm", j)), below(w, "attention", j))
        if scope == "dense":
            x = x + feed_forward(
                rms_norm(x, below(w, "feed_forward_norm", j)), below(w, "feed_forward", j), silu
            )
        else:
            x = x + mixture(rms_norm(x, below(w, "experts_norm", j)), below(w, "experts", j))
    return cross_entropy(rms_norm(x, below(v, "final_norm")) @ v["output/projection"], batch["targets"])


def diffusion(v: Arrays, batch: Arrays, hparams: Mapping[str, Any]) -> float:
    groups, channels, widths = hparams["groups"], hparams["channels"], hparams["widths"]

    def conv(x: Any, w: Arrays, stride: int = 1) -> Any:
        taps = w["weight"]
        size, rows = len(taps), x.shape[1] // stride
        total = max(0, (rows - 1) * stride + size - x.shape[1])
        wide = np.pad(x, ((0, 0), *((total // 2, total - total // 2),) * 2, (0, 0)))
        out = np.zeros((len(x), rows, rows, taps.shape[-1]))
        for r, c in np.ndindex(size, size):
            seen = wide[:, r : r + rows * stride : stride, c : c + rows * stride : stride][:, :rows, :rows]
            out += seen @ taps[r, c]
        return out + w["bias"]

    def norm(x: Any, w: Arrays) -> Any:
        y = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
        y = (y - y.mean((1, 3), keepdims=True)) / np.sqrt(y.var((1, 3), keepdims=True) + 1e-6)
        return y.reshape(x.shape) * w["scale"] + w["bias"]

    def block(x: Any, w: Arrays) -> Any:
        y = conv(silu(norm(x, below(w, "norm_1"))), below(w, "conv_1"))
        y = y + dense(silu(time), below(w, "time"))[:, None, None]
        y = conv(silu(norm(y, below(w, "norm_2"))), below(w, "conv_2"))
        return y + (conv(x, below(w, "shortcut")) if "shortcut/weight" in w else x)

    def places(x: Any, w: Arrays) -> Any:
        flat = norm(x, below(w, "attention_norm")).reshape(len(x), -1, x.shape[-1])
        return x + attention(flat, below(w, "attention")).reshape(x.shape)

    def stage(x: Any, name: str) -> Any:
        x = block(x, below(v, name))
        return places(x, below(v, name)) if x.shape[1] == hparams["attend"] else x

    kept = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))[batch["step"]][:, None, None, None]
    x = batch["image"] * np.sqrt(kept) + batch["noise"] * np.sqrt(1 - kept)
    angle = batch["step"][:, None] * 10000.0 ** (-np.arange(channels // 2) / (channels // 2 - 1))
    waves = np.concatenate([np.sin(angle), np.cos(angle)], -1)
    time = dense(silu(dense(waves, below(v, "time/first"))), below(v, "time/second"))
    x = conv(x, below(v, "stem"))
    ones = [x]
    for level in range(len(widths)):
        for i in range(hparams["blocks"]):
            x = stage(x, f"down_{level}_{i}")
            ones.append(x)
        if level < len(widths) - 1:
            x = conv(x, below(v, f"half_{level}"), 2)
            ones.append(x)
    x = places(block(x, below(v, "middle/first")), below(v, "middle/first"))
    x = block(x, below(v, "middle/second"))
    for level in reversed(range(len(widths))):
        for i in range(hparams["blocks"] + 1):
            x = stage(np.concatenate([x, ones.pop()], -1), f"up_{level}_{i}")
        if level:
            x = conv(x.repeat(2, 1).repeat(2, 2), below(v, f"double_{level}"))
    found = conv(silu(norm(x, below(v, "final_norm"))), below(v, "output"))
    return ((found - batch["noise"]) ** 2).mean()
