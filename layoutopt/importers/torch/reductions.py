"""ATen's reductions along axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from layoutopt.importers.arrays.contract import CapturedArray, Operand, Var
from layoutopt.importers.torch.elementwise import TABLE, AtenRule, Type, dims_of, formulas, rule
from layoutopt.importers.torch.emitter import Equations


def _reduction(prim: str) -> AtenRule:
    def write(
        m: Equations, v: Type, x: Operand, dim: Any = None, keepdim: bool = False, **more: Any
    ) -> Operand:
        return m.reduced(prim, m.cast(x, v.dtype), dims_of(dim, len(x.shape)), keepdim)

    return write


_REDUCTIONS = {"sum": "sum", "amax": "max", "amin": "min", "any": "or", "all": "and", "prod": "prod"}
TABLE |= {name: _reduction(f"reduce_{own}") for name, own in _REDUCTIONS.items()}


def _max_or_min(prim: str) -> AtenRule:
    def write(m: Equations, v: Any, x: Operand, other: Any = None, keepdim: bool = False) -> Any:
        if isinstance(other, Var | CapturedArray):
            return m.binary(prim, x, other, v.dtype)
        axes = dims_of(other, len(x.shape))
        found = m.reduced(f"reduce_{prim}", x, axes, keepdim)
        if not isinstance(v, list):
            return found
        left = [n for a, n in enumerate(x.shape) if a not in axes]
        places = m.emit(f"arg{prim}", [x], left, "int32", axes=tuple(axes))
        return [found, m.reshape(places, v[1].shape)]

    return write


TABLE |= {name: _max_or_min(name) for name in ("max", "min")}


def _place(prim: str) -> AtenRule:
    def write(m: Equations, v: Type, x: Operand, dim: Any = None, keepdim: bool = False) -> Operand:
        if dim is None:  # the place in all elements as one line
            x, dim = m.reshape(x, (math.prod(x.shape),)), 0
        axes = dims_of(dim, len(x.shape))
        shape = [n for a, n in enumerate(x.shape) if a not in axes]
        return m.reshape(m.emit(prim, [x], shape, "int32", axes=tuple(axes)), v.shape)

    return write


TABLE |= {name: _place(name) for name in ("argmax", "argmin")}


formulas(
    {
        "mean": lambda m, v, x, dim=None, keepdim=False, **more: m.mean(
            m.cast(x, v.dtype), dims_of(dim, len(x.shape)), keepdim
        ),
        "adaptive_avg_pool1d adaptive_avg_pool3d": lambda m, v, x, n: m.mean(x, range(2, len(x.shape)), True),
        "softmax _softmax special_softmax": lambda m, v, x, dim, *more, **how: m.softmax(
            m.cast(x, v.dtype), dim
        ),
        "log_softmax _log_softmax": lambda m, v, x, dim, *more, **how: m.softmax(
            m.cast(x, v.dtype), dim, log=True
        ),
    }
)


def variance(m: Equations, x: Operand, axes: Sequence[int], mean: Operand, correction: float = 0) -> Operand:
    """The variance along axes, which stay with one element."""
    z = m.unary("integer_pow", m.binary("sub", x, mean, x.dtype), y=2)
    count = math.prod(x.shape[a] for a in axes)
    return m.binary("mul", m.reduced("reduce_sum", z, axes, True), 1 / (count - correction), x.dtype)


@rule("var", "var_mean")
def _spread(
    m: Equations,
    v: Any,
    x: Operand,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    correction: Any = None,
) -> Any:
    """A truth value in the place of `dim` is `unbiased`."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    axes = dims_of(dim, len(x.shape))
    mean = m.mean(x, axes, True)
    found = variance(m, x, axes, mean, int(unbiased) if correction is None else correction)
    if isinstance(v, list):
        return [m.reshape(found, v[0].shape), m.reshape(mean, v[1].shape)]
    return m.reshape(found, v.shape)
