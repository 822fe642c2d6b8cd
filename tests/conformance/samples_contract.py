"""Samples: contractions, reductions, normalisation, softmax and losses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from scipy import special

import mesh_tf_core as mtf
from mesh_tf_core.ir.dims import SparseDim
from mesh_tf_core.ops.experts import expert_product, from_experts, to_experts
from mesh_tf_core.ops.float8 import Dequantize, float8_expert_product, in_eight_bits, quantized
from mesh_tf_core.ops.float8_recipes import E4M3, RECIPES
from tests.conformance.helper import Arg, Sample, dims

AB = Arg("a:8 b:4")
ABC = Arg("a:8 b:4 c:2")
ROUGH = Arg("a:6 b:4")


def _normal(x: np.ndarray, axis: int | None) -> np.ndarray:
    x = x - x.mean(axis, keepdims=True)
    return x / np.sqrt((x * x).mean(axis, keepdims=True) + 1e-6)


def _rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def _cross_entropy(x: np.ndarray, ids: np.ndarray, z: float = 0.0) -> np.ndarray:
    lse = special.logsumexp(x, -1)
    picked = np.take_along_axis(x, ids[..., None], -1)[..., 0]
    return lse - picked + z * lse**2


def in_float8(x: np.ndarray, format: str) -> np.ndarray:
    """The tensor as eight bits tell it, scaled by a power of two."""
    dtype = getattr(ml_dtypes, format)
    scale = 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(dtype).max) / np.abs(x).max()))
    return (x.astype(np.float32) * scale).astype(dtype).astype(np.float64) / scale


def _grouped(x: np.ndarray, w: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Of group 4, which has no matrix, zeros."""
    w = np.concatenate([w, np.zeros_like(w[:, :1])], 1)
    return np.einsum("ab,cab->ac", x, w[:, np.sort(ids)])


def _through_experts(g: mtf.Graph, x: Any, w: Any, ids: Any, gates: Any) -> Any:
    """Two of eight experts, added up with gates; a second result has the names that tokens have there."""
    few, k = SparseDim("e", 8, 2, 8), mtf.Dim("k", 2)
    there = to_experts(ids, few, k, "bl")
    made = expert_product(to_experts(x, few, k, "bl", ["d"]), w, there) * to_experts(gates, few, k, "bl")
    y = from_experts(made, k, "bl", ["f"])
    return y, mtf.rename(y, b="expert_b", l="expert_l")


def _experts_in_float8(g: mtf.Graph, x: Any, w: Any, ids: Any) -> Any:
    few, k = SparseDim("e", 8, 2, 8), mtf.Dim("k", 2)
    rows, there = to_experts(x, few, k, "bl", ["d"]), to_experts(ids, few, k, "bl")
    y = from_experts(float8_expert_product(rows, w, there, "tensor"), k, "bl", ["f"])
    return y, mtf.rename(y, b="expert_b", l="expert_l")


def _in_float8(x: np.ndarray, w: np.ndarray, ids: np.ndarray) -> Any:
    x, w = (in_float8(each, "float8_e4m3fn") for each in (x, w))
    return (np.einsum("bld,blkdf->blf", x, w[ids]),) * 2


EINSUM = (
    Sample(
        "matmul",
        "einsum",
        lambda g, x, w: mtf.einsum([x, w], dims("a:8 c:8")),
        (AB, Arg("b:4 c:8")),
        np.matmul,
        together=("a b c",),
    ),
    Sample(
        "batched",
        "einsum",
        lambda g, x, w: mtf.einsum([x, w], dims("a:8 b:4 e:2")),
        (Arg("a:8 b:4 c:2"), Arg("b:4 c:2 e:2")),
        lambda x, w: np.einsum("abc,bce->abe", x, w),
        together=("a b c e",),
    ),
    Sample(
        "grouped product",
        "einsum",
        lambda g, x, w, i: mtf.grouped_product(x, w, mtf.sort(i, "a"), "e"),
        (AB, Arg("c:2 e:4 b:4"), Arg("a:8", "int:5")),
        _grouped,
        together=("a b c e",),
    ),
    Sample(
        "experts",
        "einsum",
        _through_experts,
        (Arg("b:4 l:2 d:4"), Arg("e:8 d:4 f:2"), Arg("b:4 l:2 k:2", "int:8"), Arg("b:4 l:2 k:2")),
        lambda x, w, ids, gates: (np.einsum("bld,blkdf,blk->blf", x, w[ids], gates),) * 2,
        together=("expert_b expert_l e d f",),
    ),
    Sample(
        "float8 experts",
        "einsum",
        _experts_in_float8,
        (Arg("b:4 l:2 d:4"), Arg("e:8 d:4 f:2"), Arg("b:4 l:2 k:2", "int:8")),
        _in_float8,
        together=("expert_b expert_l e d f",),
        stops=(0, 1),
    ),
    Sample(
        "three operands",
        "einsum",
        lambda g, x, y, z: mtf.einsum([x, y, z], dims("c:2 a:8")),
        (AB, Arg("b:4 c:2"), Arg("a:8 c:2")),
        lambda x, y, z: np.einsum("ab,bc,ac->ca", x, y, z),
        together=("a b c",),
    ),
    Sample(
        "sum in one operand",
        "einsum",
        lambda g, x, y: mtf.einsum([x, y], dims("b:4")),
        (AB, Arg("c:2")),
        lambda x, y: x.sum(0) * y.sum(),
        together=("a b c",),
    ),
    Sample(
        "to scalar", "einsum", lambda g, x, y: mtf.einsum([x, y], []), (AB, AB), lambda x, y: (x * y).sum()
    ),
    Sample(
        "twice the same",
        "einsum",
        lambda g, x: mtf.einsum([x, x], dims("a:8")),
        (AB,),
        lambda x: (x * x).sum(1),
    ),
    Sample(
        "float8 einsum",
        "einsum",
        lambda g, x, w: mtf.float8_einsum([x, w], dims("a:8 c:8")),
        (AB, Arg("b:4 c:8")),
        lambda x, w: in_float8(x, "float8_e4m3fn") @ in_float8(w, "float8_e4m3fn"),
        together=("a b c",),
        stops=(0, 1),
    ),
    Sample(
        "stored in eight bits",
        "einsum",
        lambda g, x: x.graph.apply(
            Dequantize(x.dtype), *quantized(mtf.stop_gradient(x), E4M3, RECIPES["fixed"], stored=True)
        ),
        (AB,),
        lambda x: (np.clip(x, -224, 224) * 2).astype(ml_dtypes.float8_e4m3fn).astype(x.dtype) / 2,
        stops=(0,),
    ),
    Sample(
        "in eight bits",
        "einsum",
        lambda g, x: in_eight_bits(x, "b", "tensor"),
        (AB,),
        lambda x: in_float8(x, "float8_e4m3fn"),
        stops=(0,),
    ),
    Sample(
        "broadcast",
        "einsum",
        lambda g, x: mtf.broadcast(x, dims("c:2 b:4 a:8")),
        (AB,),
        lambda x: np.broadcast_to(x.T, (2, 4, 8)),
    ),
    Sample(
        "residual sums",
        "einsum",
        lambda g, x, v, w: mtf.einsum([x, v], dims("a:8 c:8")) + mtf.einsum([x, w], dims("a:8 c:8")) * 2.0,
        (AB, Arg("b:4 c:8"), Arg("b:4 c:8")),
        lambda x, v, w: x @ v + 2 * x @ w,
        together=("a b c",),
    ),
)

REDUCE = (
    Sample("sum", "reduce", lambda g, x: mtf.reduce_sum(x, "b"), (ABC,), lambda x: x.sum(1)),
    Sample(
        "sum of two", "reduce", lambda g, x: mtf.reduce_sum(x, ["c", "a"]), (ABC,), lambda x: x.sum((0, 2))
    ),
    Sample("sum of all", "reduce", lambda g, x: mtf.reduce_sum(x), (ABC,), np.sum),
    Sample("mean", "reduce", lambda g, x: mtf.reduce_mean(x, "a"), (ABC,), lambda x: x.mean(0)),
    Sample("prod", "reduce", lambda g, x: mtf.reduce_prod(x, "b"), (ABC,), lambda x: x.prod(1)),
    Sample(
        "prod of two", "reduce", lambda g, x: mtf.reduce_prod(x, ["a", "b"]), (ABC,), lambda x: x.prod((0, 1))
    ),
    Sample("max", "reduce", lambda g, x: mtf.reduce_max(x, "b"), (ABC,), lambda x: x.max(1)),
    Sample("min", "reduce", lambda g, x: mtf.reduce_min(x, ["a", "b"]), (ABC,), lambda x: x.min((0, 1))),
    Sample(
        "any", "reduce", lambda g, x: mtf.reduce_any(x, "a"), (Arg("a:8 b:4", "bool"),), lambda x: x.any(0)
    ),
    Sample("all", "reduce", lambda g, x: mtf.reduce_all(x), (Arg("a:2 b:4", "bool"),), lambda x: x.all()),
    Sample(
        "sum of ints",
        "reduce",
        lambda g, x: mtf.reduce_sum(x, "a"),
        (Arg("a:8 b:4", "int:9"),),
        lambda x: x.sum(0),
    ),
)

NORM = (
    Sample(
        "normalize two",
        "norm",
        lambda g, x: mtf.normalize(x, ("a", "b")),
        (AB,),
        lambda x: _normal(x, (0, 1)),
    ),
    Sample("layer_norm", "norm", lambda g, x: mtf.layer_norm(x, "b"), (AB,), lambda x: _normal(x, 1)),
    Sample(
        "layer_norm first",
        "norm",
        lambda g, x, s, b: mtf.layer_norm(x, "a", s, b),
        (AB, Arg("a:8"), Arg("a:8")),
        lambda x, s, b: _normal(x, 0) * s[:, None] + b[:, None],
    ),
    Sample(
        "layer_norm rough", "norm", lambda g, x: mtf.layer_norm(x, "a"), (ROUGH,), lambda x: _normal(x, 0)
    ),
    Sample(
        "rms_norm",
        "norm",
        lambda g, x, s: mtf.rms_norm(x, "b", s),
        (AB, Arg("b:4")),
        lambda x, s: _rms(x) * s,
    ),
)

SOFTMAX = (
    Sample("softmax", "softmax", lambda g, x: mtf.softmax(x, "a"), (AB,), lambda x: special.softmax(x, 0)),
    Sample(
        "softmax last", "softmax", lambda g, x: mtf.softmax(x, "b"), (ABC,), lambda x: special.softmax(x, 1)
    ),
    Sample(
        "log_softmax",
        "softmax",
        lambda g, x: mtf.log_softmax(x, "a"),
        (AB,),
        lambda x: special.log_softmax(x, 0),
    ),
    Sample(
        "logsumexp", "softmax", lambda g, x: mtf.logsumexp(x, "b"), (ABC,), lambda x: special.logsumexp(x, 1)
    ),
    Sample(
        "masked_softmax",
        "softmax",
        lambda g, x, m: mtf.masked_softmax(x, m, "a"),
        (AB, Arg("a:8 b:4", "bool")),
        lambda x, m: np.where(m, special.softmax(np.where(m, x, -1e9), 0), 0),
    ),
    Sample(
        "cross_entropy",
        "softmax",
        lambda g, x, t: mtf.softmax_cross_entropy(x, t, "v"),
        (Arg("a:4 b:2 v:8"), Arg("a:4 b:2", "int:8")),
        _cross_entropy,
    ),
    Sample(
        "cross_entropy z",
        "softmax",
        lambda g, x, t: mtf.softmax_cross_entropy(x, t, "v", z_loss=0.1),
        (Arg("a:8 v:8"), Arg("a:8", "int:8")),
        lambda x, t: _cross_entropy(x, t, 0.1),
    ),
)

SAMPLES = (*EINSUM, *REDUCE, *NORM, *SOFTMAX)
