"""Samples: element-wise operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

import mesh_tf_core as mtf
from mesh_tf_core.ops.activations import extreme, modulus
from mesh_tf_core.ops.basic import total
from mesh_tf_core.ops.binary import binary
from mesh_tf_core.ops.custom import LibraryKernels
from mesh_tf_core.ops.unary import unary
from tests.conformance.helper import Arg, Sample, dims

TABLE = np.arange(32).reshape(4, 8) / 16 - 1
AB = Arg("a:8 b:4")


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


UNARY: dict[str, tuple[str, Callable[..., Any]]] = {
    "neg": ("normal", np.negative),
    "abs": ("normal", np.abs),
    "sign": ("normal", np.sign),
    "exp": ("normal", np.exp),
    "log": ("positive", np.log),
    "log1p": ("positive", np.log1p),
    "expm1": ("normal", np.expm1),
    "sqrt": ("positive", np.sqrt),
    "rsqrt": ("positive", lambda x: x**-0.5),
    "square": ("normal", lambda x: x * x),
    "reciprocal": ("positive", lambda x: 1 / x),
    "sin": ("normal", np.sin),
    "cos": ("normal", np.cos),
    "atan": ("normal", np.arctan),
    "tanh": ("normal", np.tanh),
    "sigmoid": ("normal", special.expit),
    "erf": ("normal", special.erf),
    "erfc": ("normal", special.erfc),
    "floor": ("normal", np.floor),
    "relu": ("normal", lambda x: np.maximum(x, 0)),
    "softplus": ("normal", lambda x: np.log1p(np.exp(x))),
    **dict.fromkeys(("gelu", "gelu_fast", "gelu_new"), ("normal", _gelu)),
    "gelu_exact": ("normal", lambda x: x * special.ndtr(x)),
    "silu": ("normal", lambda x: x * special.expit(x)),
    "not": ("bool", np.logical_not),
    "is_finite": ("normal", np.isfinite),
}

BINARY: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "add": ("normal", "normal", np.add),
    "sub": ("normal", "normal", np.subtract),
    "mul": ("normal", "normal", np.multiply),
    "div": ("normal", "positive", np.divide),
    "max": ("normal", "normal", np.maximum),
    "min": ("normal", "normal", np.minimum),
    "pow": ("positive", "normal", np.power),
    "mod": ("normal", "positive", np.mod),
    "floordiv": ("normal", "positive", np.floor_divide),
    "eq": ("int:3", "int:3", np.equal),
    "ne": ("int:3", "int:3", np.not_equal),
    "lt": ("normal", "normal", np.less),
    "le": ("int:3", "int:3", np.less_equal),
    "gt": ("normal", "normal", np.greater),
    "ge": ("int:3", "int:3", np.greater_equal),
    "and": ("bool", "bool", np.logical_and),
    "or": ("bool", "bool", np.logical_or),
}


def _unary(fn: str) -> Sample:
    kind, reference = UNARY[fn]
    return Sample(fn, "elementwise", lambda g, x: unary(fn, x), (Arg("a:8 b:4", kind),), reference)


def _binary(fn: str) -> Sample:
    left, right, reference = BINARY[fn]
    return Sample(
        f"{fn} broadcast",
        "elementwise",
        lambda g, x, y: binary(fn, x, y),
        (Arg("a:8 b:4", left), Arg("c:2 b:4", right)),
        lambda x, y: reference(x[:, :, None], y.T[None]),
        together=("a b c",),
    )


SAMPLES = (
    *(_unary(fn) for fn in UNARY),
    *(_binary(fn) for fn in BINARY),
    Sample(
        "mul transposed",
        "elementwise",
        lambda g, x, y: x * y,
        (AB, Arg("b:4 a:8")),
        lambda x, y: x * y.T,
    ),
    Sample(
        "operators", "elementwise", lambda g, x: -((x * 2.0 + 1.0) / 4.0 - x), (AB,), lambda x: x / 2 - 0.25
    ),
    Sample("number first", "elementwise", lambda g, x: 1.0 / (3.0 - x) ** 2.0, (Arg("a:8 b:4", "unit"),)),
    Sample(
        "add_n",
        "elementwise",
        lambda g, x, y, z: mtf.add_n([x, y, z]),
        (AB, Arg("b:4 a:8"), AB),
        lambda x, y, z: x + y.T + z,
    ),
    Sample(
        "total",
        "elementwise",
        lambda g, x, y: total([mtf.reduce_sum(x), mtf.reduce_sum(y)]),
        (AB, Arg("b:4")),
        lambda x, y: x.sum() + y.sum(),
    ),
    Sample(
        "shared maximum",
        "elementwise",
        lambda g, x, y: extreme("max", x, y),
        (AB, Arg("c:2 b:4")),
        lambda x, y: np.maximum(x[:, :, None], y.T[None]),
        together=("a b c",),
    ),
    Sample("modulus", "elementwise", lambda g, x: modulus(x), (AB,), np.abs),
    Sample("scale", "elementwise", lambda g, x: mtf.scale(x, -2.5), (AB,), lambda x: -2.5 * x),
    Sample("add a number", "elementwise", lambda g, x: x + 0.5, (AB,), lambda x: x + 0.5),
    Sample("cast", "elementwise", lambda g, x: mtf.cast(x, "int32"), (AB,), lambda x: x.astype(np.int32)),
    Sample("cast bool", "elementwise", lambda g, x: x.cast("float32"), (Arg("a:8 b:4", "bool"),)),
    Sample(
        "where",
        "elementwise",
        lambda g, c, x, y: mtf.where(c, x, y),
        (Arg("a:8", "bool"), AB, Arg("c:2 b:4")),
        lambda c, x, y: np.where(c[:, None, None], x[:, :, None], y.T[None]),
        together=("a b c",),
    ),
    Sample(
        "where number",
        "elementwise",
        lambda g, c, x: mtf.where(c, x, 0.0),
        (Arg("b:4", "bool"), AB),
        lambda c, x: np.where(c, x, 0),
    ),
    Sample(
        "constant array",
        "elementwise",
        lambda g, x: x * mtf.constant(g, TABLE, dims("b:4 a:8"), x.dtype),
        (AB,),
        lambda x: x * TABLE.T,
    ),
    Sample("stop_gradient", "elementwise", lambda g, x: mtf.stop_gradient(x), (AB,), lambda x: x, stops=(0,)),
    Sample(
        "kernels of a library",
        "elementwise",
        lambda g, x: x.graph.apply(LibraryKernels(((4.0, 2.0, 3),)), x) * 2.0,
        (AB,),
        lambda x: x * 2.0,
    ),
)
