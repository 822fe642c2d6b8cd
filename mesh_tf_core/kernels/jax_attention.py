"""Attention by kernels of JAX's own libraries: Pallas's splash attention on TPUs, cuDNN's on NVIDIA GPUs.

Both give the result and the log-sum-exp, and take them back for the gradients. Queries that share a key
are the heads of one such kernel, and shared dimensions its batch. Attention without a library kernel
(`libraries.lacks_kernel`) is left to the operation, which then works by blocks.

The functions that take a log-sum-exp back are private to JAX: its version is pinned (`engines.jax.compat`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from mesh_tf_core.ir.kernel import BLOCKS, Attending

T = Any


def _shapes(a: Attending) -> tuple[int, int, int, int]:
    """Batch, heads that share a key, queries and keys."""
    *rows, queries, _ = a.query.shape
    return math.prod(rows[: a.shared]), math.prod(rows[a.shared :]), queries, a.key.shape[-2]


def _flat(a: Attending, x: T, heads: bool) -> T:
    """[batch, heads, rows, ..] of what has rows, [batch, keys, width] of keys."""
    batch, group, queries, _ = _shapes(a)
    rest = x.shape[len(a.query.shape) - 1 :] if heads else x.shape[a.shared :]
    return x.reshape((batch, group, queries, *rest) if heads else (batch, *rest))


# -- TPU -----------------------------------------------------------------------------------------------------


def _splash(a: Attending, interpret: bool) -> Any:
    """The kernel for this device's queries."""
    _, group, queries, keys = _shapes(a)
    q, kv = (next(b for b in BLOCKS if n % b == 0) for n in (queries, keys))
    sizes = splash.BlockSizes(q, kv, kv, q, kv, kv, q, kv)
    shards = len(a.starts)
    shape = (shards * queries, keys)
    if a.window:
        ahead = 0 if a.causal else a.window - 1
        mask: Any = masks.LocalMask(shape, (a.window - 1, ahead), 0, shards)
    else:
        mask = masks.CausalMask(shape, 0, shards) if a.causal else masks.FullMask(shape)
    if a.causal or a.window:
        mask.q_sequence = np.concatenate([np.arange(s, s + queries, dtype=np.int32) for s in a.starts])
    made = splash.make_splash_mqa(
        masks.MultiHeadMask([mask] * group),
        block_sizes=sizes,
        save_residuals=True,
        head_shards=1,
        q_seq_shards=shards,
        interpret=interpret,
    )
    if shards == 1:
        return made
    shard = (jnp.asarray(a.first, jnp.int32) - a.starts[0]) // (a.starts[1] - a.starts[0])

    def part(x: T) -> T:
        """A device's part of what says which blocks there are: along the queries, its second axis or its
        only one."""
        axis = 0 if x.ndim == 1 else 1
        size = x.shape[axis] // shards
        return jax.lax.dynamic_slice_in_dim(x, shard * size, size, axis)

    infos = (made.fwd_mask_info, made.dq_mask_info, made.dkv_mask_info)
    return splash.SplashAttentionKernel(*(jax.tree.map(part, info) for info in infos), **made.kwargs)


def _segments(a: Attending) -> Any:
    """Numbers of texts [batch, queries] and [batch, keys]; a key that is masked belongs to none."""
    if a.mask is None and a.segments is None:
        return None
    batch, _, queries, keys = _shapes(a)
    rank, shared = len(a.query.shape), a.query.shape[: a.shared]
    between = (1,) * (rank - 2 - a.shared)

    def spread(x: T, *last: int) -> T:
        return jnp.broadcast_to(x, (*shared, *between, *last)).reshape(batch, max(last))

    one = jnp.ones((1,) * rank, jnp.int32)
    q, kv = a.segments or (one, one)
    q, kv = spread(q.astype(jnp.int32), queries, 1), spread(kv.astype(jnp.int32), 1, keys)
    if a.mask is not None:
        kv = jnp.where(spread(a.mask, 1, keys), kv, jnp.iinfo(jnp.int32).min)
    return splash.SegmentIds(q, kv)


def _scaled(a: Attending) -> T:
    return (_flat(a, a.query, True) * a.scale).astype(a.query.dtype)


def _sinks(a: Attending) -> T:
    """The extra logit of every head."""
    return None if a.extra_logit is None else jnp.full(_shapes(a)[1], a.extra_logit, jnp.float32)


def on_tpu(a: Attending, interpret: bool = False) -> tuple[T, T]:
    """Result and log-sum-exp; `interpret` runs the kernel without a TPU."""
    kernel, sinks = _splash(a, interpret), _sinks(a)

    def one(q: T, k: T, v: T, ids: Any) -> Any:
        return kernel(q, k, v, ids, sinks)

    result, (lse,) = jax.vmap(one)(_scaled(a), _flat(a, a.key, False), _flat(a, a.value, False), _segments(a))
    rows = a.query.shape[:-1]
    return result.reshape(*rows, a.value.shape[-1]), lse.reshape(rows)


def gradient_on_tpu(a: Attending, result: T, lse: T, dresult: T, interpret: bool = False) -> tuple[T, T, T]:
    """Gradients of query, key and value."""
    kernel, sinks = _splash(a, interpret), _sinks(a)
    names = ("mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function")
    fixed = {name: kernel.kwargs[name] for name in (*names, "attn_logits_soft_cap", "interpret")}

    def one(q: T, k: T, v: T, ids: Any, o: T, total: T, do: T) -> Any:
        kept = (q, k, v, ids, sinks, o, total, kernel.dq_mask_info, kernel.dkv_mask_info)
        return splash._splash_attention_bwd(save_residuals=False, **fixed, res=kept, do=do)[3:6]

    keys = _flat(a, a.key, False), _flat(a, a.value, False)
    rows = (_flat(a, x, True) for x in (result, lse, dresult))
    dq, dk, dv = jax.vmap(one)(_scaled(a), *keys, _segments(a), *rows)
    dq = (dq * a.scale).astype(a.query.dtype)
    return dq.reshape(a.query.shape), dk.reshape(a.key.shape), dv.reshape(a.value.shape)


# -- GPU -----------------------------------------------------------------------------------------------------


def _cudnn(a: Attending) -> tuple[tuple[T, ...], dict[str, Any]]:
    """Operands and parameters that cuDNN's forward and backward have in common."""
    none = jnp.zeros(0, a.query.dtype)
    keys = (_flat(a, x, False)[:, None] for x in (a.key, a.value))
    fixed = {
        "scale": a.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.CAUSAL if a.causal else cudnn.MaskType.NO_MASK,
        "layout": cudnn.AttentionLayout.BNTH.value,
        "sliding_window_length": a.window or None,
    }
    return (_flat(a, a.query, True), *keys, *[none] * 7), fixed


def on_gpu(a: Attending) -> tuple[T, T]:
    """Result and log-sum-exp."""
    operands, fixed = _cudnn(a)
    result, lse = cudnn._dot_product_attention_fwd_p_wrapper.bind(*operands, **fixed, is_training=True)
    rows = a.query.shape[:-1]
    return result.reshape(*rows, a.value.shape[-1]), lse.reshape(rows)


def gradient_on_gpu(a: Attending, result: T, lse: T, dresult: T) -> tuple[T, T, T]:
    """Gradients of query, key and value."""
    operands, fixed = _cudnn(a)
    rows = (_flat(a, x, True) for x in (lse, result, dresult))
    dq, dk, dv = cudnn._dot_product_attention_bwd_p_wrapper.bind(*operands, *rows, **fixed)
    return dq.reshape(a.query.shape), dk.reshape(a.key.shape), dv.reshape(a.value.shape)
