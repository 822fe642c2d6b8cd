"""Attention in JAX: by blocks against its own function, the libraries' kernels against the blocks, and what
compilers make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.jax.compile import Executable, compile_for
from mesh_tf_core.ir.kernel import Attending
from mesh_tf_core.kernels import jax_attention as libraries
from mesh_tf_core.kernels.jax_kernel import JaxKernel
from mesh_tf_core.kernels.libraries import lacks_kernel
from mesh_tf_core.ops import blockwise
from tests.marks import by_day

RNG = np.random.default_rng(0)
BATCH, HEADS, GROUP, QUERIES, KEYS, WIDTH = 1, 2, 2, 128, 256, 32


def normal(*sizes: int) -> Any:
    return jnp.asarray(RNG.normal(size=sizes), jnp.float32)


def operands(values: int = WIDTH, **more: Any) -> Attending:
    keys = (BATCH, HEADS, KEYS)
    given = {"first": 0, "starts": (0,), "scale": WIDTH**-0.5, **more}
    return Attending(
        normal(BATCH, HEADS, GROUP, QUERIES, WIDTH), normal(*keys, WIDTH), normal(*keys, values), 2, **given
    )


def close(got: Any, want: Any) -> None:
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)


SEEN: list[dict[str, Any]] = [{}, {"causal": True}, {"causal": True, "window": 9}, {"window": 9}]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "bias"),
    by_day(((how, bool((row + bias) % 2)) for row, how in enumerate(SEEN) for bias in (0, 1)), every=7),
)
@pytest.mark.one_in(2)
def test_by_blocks_as_jax_itself(how: dict[str, Any], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in blocks of a part of the queries."""
    monkeypatch.setattr(blockwise, "MOST", 48 * KEYS * GROUP)
    added = normal(1, HEADS, GROUP, QUERIES, KEYS) if bias else None
    a = operands(bias=added, **how)
    dresult = normal(*a.query.shape)

    def reference(q: Any, k: Any, v: Any, added: Any) -> Any:
        given = (jnp.swapaxes(x.reshape(BATCH, -1, *x.shape[-2:]), 1, 2) for x in (q, k, v))
        flat = None if added is None else added.reshape(1, HEADS * GROUP, QUERIES, KEYS)
        near = a.window - 1 if a.window else None
        window = None if near is None else (near, 0 if a.causal else near)
        found = jax.nn.dot_product_attention(*given, flat, is_causal=a.causal, local_window_size=window)
        return jnp.swapaxes(found, 1, 2).reshape(a.query.shape)

    want, back = jax.vjp(reference, a.query, a.key, a.value, added)
    k = JaxKernel()
    result, lse = blockwise.forward(k, a)
    close([result], [want])
    *wanted, dbias = back(dresult)
    close(blockwise.backward(k, a, result, lse, dresult, None), wanted)
    if bias:
        close([blockwise.bias_gradient(k, a, result, lse, dresult, None)], [dbias])


def segments() -> tuple[Any, Any]:
    """Two texts, of which every query sees a key."""
    q, kv = (jnp.arange(n) * 2 // n for n in (QUERIES, KEYS))
    return q.reshape(1, 1, 1, QUERIES, 1), kv.reshape(1, 1, 1, 1, KEYS)


CASES: dict[str, dict[str, Any]] = {
    "whole, an extra logit": {"extra_logit": 0.7},
    "second half of the queries, causal": {"causal": True, "starts": (0, QUERIES), "first": QUERIES},
    "window to both sides, narrow values": {
        "window": 70,
        "starts": (0, QUERIES),
        "first": QUERIES,
        "values": WIDTH // 2,
    },
    "a ring's keys behind the queries": {
        "window": 70,
        "starts": (-QUERIES,),
        "first": -QUERIES,
        "partial": True,
    },
    "a ring's keys of either side": {
        "window": 100,
        "starts": (-QUERIES, 2 * QUERIES),
        "first": jnp.int32(2 * QUERIES),
        "partial": True,
    },
    "masked keys and texts": {
        "segments": segments(),
        "mask": jnp.asarray(RNG.random((BATCH, 1, 1, 1, KEYS)) < 0.7),
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", by_day(CASES, every=9))
def test_a_tpu_does_the_same(case: str) -> None:
    a = operands(**CASES[case])
    assert not lacks_kernel(a, "tpu")
    result, lse = blockwise.forward(JaxKernel(), a)
    made, total = libraries.on_tpu(a, interpret=True)
    if a.partial:  # queries that see other keys alone
        seen = lse > blockwise.NOTHING_SEEN
        assert seen.any() and not seen.all() and (total[~seen] < blockwise.NOTHING_SEEN).all()
        made, result = (jnp.where(seen[..., None], x, 0.0) for x in (made, result))
        total, lse = (blockwise.with_extra(JaxKernel(), x, 0.5) for x in (total, lse))
    close((made, total), (result, lse))
    dresult = normal(*result.shape)
    want = blockwise.backward(JaxKernel(), a, result, lse, dresult, None)
    close(libraries.gradient_on_tpu(a, result, lse, dresult, interpret=True), want)


@pytest.mark.parametrize(
    "more",
    [
        {"bias": normal(1, 1, 1, 1, KEYS)},
        {"rate": 0.1},
        {"mask": jnp.ones((1, 1, 1, QUERIES, KEYS), bool)},
        {"segments": (jnp.ones((1, 1, GROUP, QUERIES, 1)), jnp.ones((1, 1, 1, 1, KEYS)))},
    ],
    ids=["bias", "dropout", "mask for every pair of positions", "texts by head"],
)
def test_what_a_library_has_no_kernel_for_is_left_to_blocks(more: dict[str, Any]) -> None:
    a = operands(**more)
    assert lacks_kernel(a, "tpu") and lacks_kernel(a, "gpu")
    k = JaxKernel("tpu")
    assert k.attention(a) is None and k.attention_gradient(a, a.query, a.query, a.query) is None


def test_a_gpu_is_given_cudnn() -> None:
    """No GPU is needed to see what it would run."""
    half = operands(causal=True, window=64)
    narrow = {n: getattr(half, n).astype(jnp.bfloat16) for n in ("query", "key", "value")}
    a = replace(half, **narrow)
    assert not lacks_kernel(a, "gpu")
    k = JaxKernel("gpu")

    def both(query: Any) -> Any:
        here = replace(a, query=query)
        made = k.attention(here)
        assert made is not None
        return k.attention_gradient(here, *made, made[0])

    text = jax.jit(both).trace(a.query).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text
    assert (
        lacks_kernel(replace(a, starts=(0, QUERIES)), "gpu")
        == "causal queries that start in the middle of the keys"
    )


@pytest.mark.slow
@pytest.mark.nightly
def test_the_tpu_compiler_takes_it() -> None:
    """Forward and both kernels of backward; the logits are never in memory."""
    g = mtf.Graph()
    b, h, d = mtf.Dim("batch", 4), mtf.Dim("heads", 2), mtf.Dim("d_kv", 128)
    n, m = mtf.Dim("length", 2048), mtf.Dim("memory_length", 2048)
    q, k, v = (g.input(name, [b, s, h, d], "bfloat16") for name, s in zip("qkv", (n, m, m), strict=True))
    y = mtf.attention(q, k, v, n, m, d, causal=True)
    slopes = mtf.gradients(mtf.reduce_sum((y * y).cast("float32")), [q, k, v])
    results = {f"d{name}": dx for name, dx in zip("qkv", slopes, strict=True) if dx is not None}
    program = mtf.lower(g, mtf.Mesh("x:2;y:2"), mtf.Layout("batch:x;length:y;memory_length:y"), results)
    made = compile_for(program, "v5e:2x2")
    assert isinstance(made, Executable)
    assert made.text.count("tpu_custom_call") == 3
    logits = 2 * 2 * 1024 * 2048 * 2
    assert made.allocated_bytes < logits
