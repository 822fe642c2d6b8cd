"""Samples: attention as one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

import mesh_tf_core as mtf
from mesh_tf_core.ops.attention import FusedAttention
from mesh_tf_core.ops.ring_pieces import RING, ZIGZAG
from tests.conformance.helper import Arg, Sample, dims

Q, K = Arg("b:2 l:8 h:4 d:2"), Arg("b:2 m:8 h:4 d:2")


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seen: np.ndarray | bool = True,
    bias: np.ndarray | float = 0.0,
    extra: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Result and log-sum-exp of [.., queries, d], [.., keys, d] and [.., keys, e]."""
    logits = np.where(seen, q @ np.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5 + bias, -np.inf)
    if extra is not None:
        column = np.full((*logits.shape[:-1], 1), extra)
        logits, v = np.concatenate([logits, column], -1), np.concatenate([v, v[..., :1, :] * 0], -2)
    return special.softmax(logits, -1) @ v, special.logsumexp(logits, -1)


def _heads_first(*xs: np.ndarray) -> list[np.ndarray]:
    return [np.swapaxes(x, 1, 2) for x in xs]


def _apart(queries: int = 8, keys: int = 8) -> np.ndarray:
    """The query's position minus the key's."""
    return np.arange(queries)[:, None] - np.arange(keys)


def near(window: int, causal: bool) -> np.ndarray:
    """Whether 16 queries see as many keys."""
    apart = _apart(16, 16)
    return (apart < window) & (apart > (-1 if causal else -window))


def _whole(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.swapaxes(attend(*_heads_first(q, k, v))[0], 1, 2)


def _grouped(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """q [l h g d], k [h m d], v [m e h], bias [h m l]."""
    found, _ = attend(
        q.transpose(1, 2, 0, 3),
        k[:, None],
        v.transpose(2, 0, 1)[:, None],
        _apart() >= 0,
        bias.transpose(0, 2, 1)[:, None],
    )
    return found.transpose(2, 0, 1, 3)


def _segmented(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, ids: np.ndarray, others: np.ndarray
) -> np.ndarray:
    """Windows of 3 to both sides, and an extra logit, so that a query which sees no key has zeros."""
    near = np.abs(_apart()) < 3
    seen = (ids[:, :, None] == others[:, None, :])[:, None] & mask[None, :, None] & near
    found, _ = attend(*_heads_first(q, k, v), seen, 0.0, 0.5)
    return np.swapaxes(found, 1, 2)


def _with_statistic(g: mtf.Graph, q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor, bias: mtf.Tensor) -> Any:
    op = FusedAttention("d", *dims("l:4 m:8"), 2**-0.5, causal=True, extras=("bias",))
    result, lse = g.apply(op, q, k, v, bias)
    return result, lse.cast(q.dtype)


def _statistic(causal: bool) -> Callable[..., Any]:
    def apply(g: mtf.Graph, q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor) -> Any:
        length, memory = q.dim("l"), k.dim("m")
        result, lse = g.apply(FusedAttention("d", length, memory, 2**-0.5, causal=causal), q, k, v)
        return result, lse.cast(q.dtype)

    return apply


def _texts(q: np.ndarray, k: np.ndarray, v: np.ndarray, *others: np.ndarray) -> np.ndarray:
    mask, ids, keys = others
    seen = (ids[:, :, None] == keys[:, None, :]) & mask[None, None, :] & (_apart(16, 16) >= 0)
    return attend(q, k, v, seen, 0.0, 0.5)[0]


TEXTS = (
    *(Arg(f"b:2 {n}:16 d:2") for n in "lmm"),
    Arg("m:16", "bool"),
    *(Arg(f"b:2 {n}:16", "int:2") for n in "lm"),
)
ROUND = tuple(
    Sample(
        f"attention in texts, {form}",
        "attention",
        lambda g, q, k, v, mask, ids, others: mtf.attention(
            q, k, v, "l", "m", "d", mask=mask, segments=(ids, others), causal=True, extra_logit=0.5
        ),
        TEXTS,
        _texts,
        together=("b l",),
        context=form,
    )
    for form in (RING, ZIGZAG)
)

SAMPLES = (
    Sample(
        "attention",
        "attention",
        lambda g, q, k, v: mtf.attention(q, k, v, "l", "m", "d"),
        (Q, K, K),
        _whole,
        together=("b l h",),
    ),
    Sample(
        "attention grouped",
        "attention",
        lambda g, q, k, v, b: mtf.attention(q, k, v, "l", "m", "d", bias=b, causal=True),
        (Arg("l:8 h:2 g:4 d:2"), Arg("h:2 m:8 d:2"), Arg("m:8 e:3 h:2"), Arg("h:2 m:8 l:8")),
        _grouped,
        together=("l h g",),
    ),
    Sample(
        "attention masked",
        "attention",
        lambda g, q, k, v, mask, ids, others: mtf.attention(
            q, k, v, "l", "m", "d", mask=mask, segments=(ids, others), window=3, extra_logit=0.5
        ),
        (Q, K, K, Arg("h:4 m:8", "bool"), Arg("b:2 l:8", "int:2"), Arg("b:2 m:8", "int:2")),
        _segmented,
        together=("b l h",),
    ),
    Sample(
        "attention with dropout",
        "attention",
        lambda g, q, k, v, key: mtf.attention(
            q, k, v, "l", "m", "d", causal=True, window=4, dropout=0.3, random_key=key
        ),
        (Q, K, K, Arg("", "key")),
        together=("b l h",),
    ),
    Sample(
        "attention with its statistic",
        "attention",
        _with_statistic,
        (Arg("g:8 l:4 d:2"), Arg("m:8 d:2"), Arg("m:8 d:2"), Arg("m:8")),
        lambda q, k, v, bias: attend(q, k, v, _apart(4) >= 0, bias),
        together=("l g",),
    ),
    *ROUND,
    Sample(
        "attention, ring",
        "attention",
        _statistic(False),
        (Arg("g:2 l:8 d:2"), Arg("m:16 d:2"), Arg("m:16 e:3")),
        lambda q, k, v: attend(q, k, v),
        together=("l g",),
        context="ring",
    ),
    *(
        Sample(
            f"attention, ring of a window{of}",
            "attention",
            lambda g, q, k, v, causal=causal, window=window: mtf.attention(
                q, k, v, "l", "m", "d", causal=causal, window=window, extra_logit=0.5
            ),
            (Arg("g:2 l:16 d:2"), Arg("m:16 d:2"), Arg("m:16 e:3")),
            lambda q, k, v, causal=causal, window=window: attend(q, k, v, near(window, causal), 0.0, 0.5)[0],
            together=("l g",),
            context="ring",
        )
        for of, window, causal in (
            (" of one", 1, True),
            ("", 4, True),
            (" beyond half", 11, True),
            (" to both sides", 3, False),
            (" to both sides, beyond half", 11, False),
        )
    ),
    *(
        Sample(
            f"attention with dropout, {form}{of}",
            "attention",
            lambda g, q, k, v, key, causal=causal, window=window: mtf.attention(
                q, k, v, "l", "m", "d", causal=causal, window=window, dropout=0.3, random_key=key
            ),
            (Arg("g:2 l:16 b:2 d:2"), Arg("m:16 b:2 d:2"), Arg("m:16 b:2 e:3"), Arg("", "key")),
            together=("l g b",),
            context=form,
        )
        for form, of, window, causal in (
            (RING, "", 0, True),
            (RING, " of a window", 11, False),
            (ZIGZAG, "", 0, True),
        )
    ),
    Sample(
        "attention, zigzag",
        "attention",
        _statistic(True),
        (Arg("g:2 l:16 d:2"), Arg("m:16 d:2"), Arg("m:16 e:3")),
        lambda q, k, v: attend(q, k, v, _apart(16, 16) >= 0),
        together=("l g",),
        context="zigzag",
    ),
    Sample(
        "attention, all_to_all",
        "attention",
        lambda g, q, k, v: mtf.attention(q, k, v, "l", "m", "d", causal=True),
        (Arg("l:8 h:8 d:2"), Arg("h:8 m:8 d:2"), Arg("m:8 h:8 d:2")),
        lambda q, k, v: attend(q.transpose(1, 0, 2), k, v.transpose(1, 0, 2), _apart() >= 0)[0].transpose(
            1, 0, 2
        ),
        together=("l h",),
        context="all_to_all",
    ),
)
