"""ATen's reductions along axes, and its losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from layoutopt.importers.arrays.contract import FIRST, FLAT, CapturedArray, Operand, Var
from layoutopt.importers.torch.calls import FLOATS
from layoutopt.importers.torch.elementwise import TABLE, AtenRule, Type, dims_of, formulas, rule
from layoutopt.importers.torch.emitter import Equations
from layoutopt.importers.torch.indexing import moved


def _reduction(prim: str) -> AtenRule:
    return lambda m, v, x, dim=None, keepdim=False, **more: m.reduced(
        prim, m.cast(x, v.dtype), dims_of(dim, len(x.shape)), keepdim
    )


_REDUCTIONS = {"sum": "sum", "amax": "max", "amin": "min", "any": "or", "all": "and", "prod": "prod"}
TABLE |= {name: _reduction(f"reduce_{own}") for name, own in _REDUCTIONS.items()}


def _max_or_min(prim: str) -> AtenRule:
    def write(m: Equations, v: Any, x: Operand, other: Any = None, keepdim: bool = False) -> Any:
        if isinstance(other, Var | CapturedArray):
            return m.binary(prim, x, other, v.dtype)
        axes = dims_of(other, len(x.shape))
        if not isinstance(v, list):
            return m.reduced(f"reduce_{prim}", x, axes, keepdim)
        found = m.reduced(f"reduce_{prim}", x, axes, keepdim, **{FIRST: True})
        return [found, TABLE[f"arg{prim}"](m, v[1], x, other)]

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
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d": lambda m, v, x, n: m.mean(
            x, range(2, len(x.shape)), True
        ),
        "softmax _softmax special_softmax": lambda m, v, x, dim, *_, **of: m.softmax(m.cast(x, v.dtype), dim),
        "log_softmax _log_softmax": lambda m, v, x, dim, *_, **how: m.softmax(m.cast(x, v.dtype), dim, True),
    }
)


def variance(m: Equations, x: Operand, axes: Sequence[int], correction: float = 0) -> Operand:
    """The variance of numbers with mean 0 along axes, which stay with one element."""
    z = m.unary("integer_pow", x, y=2)
    count = math.prod(x.shape[a] for a in axes)
    return m.binary("mul", m.reduced("reduce_sum", z, axes, True), 1 / (count - correction), x.dtype)


def _root(m: Equations, x: Operand, p: float = 2) -> Operand:
    """The p-th root, whose slope at 0 is 0: that of norms and spreads."""
    zero = m.binary("eq", x, 0, x.dtype, "bool")
    inside = m.select(zero, 1, x, x.dtype)
    found = m.unary("sqrt", inside) if p == 2 else m.binary("pow", inside, 1 / p, x.dtype)
    return m.select(zero, 0, found, x.dtype)


@rule("linalg_vector_norm", "norm")
def _norm(
    m: Equations, v: Type, x: Operand, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Operand:
    order = 2 if p in ("fro", None) else p
    if not 1 < order < math.inf:
        raise NotImplementedError("its order is no number above 1")
    x = m.cast(x, "float64" if v.dtype == "float64" else "float32")
    size = x if order == 2 else m.unary("abs", x, **{FLAT: True})
    powers = TABLE["pow"](m, Type(x.shape, x.dtype), size, order)
    total = m.reduced("reduce_sum", powers, dims_of(dim, len(x.shape)), keepdim)
    return m.cast(_root(m, total, order), v.dtype)


_BY_PRODUCT = 25
"""Rows from which on PyTorch makes Euclidean distances of a product."""


@rule("cdist")
def _cdist(m: Equations, v: Type, x: Operand, y: Operand, p: float = 2, compute_mode: Any = None) -> Operand:
    """Distances of rows [..., rows, d] and [..., others, d]."""
    n, k = x.shape[-2], y.shape[-2]
    if p != 2 or (compute_mode or 0) == 2 or (compute_mode != 1 and max(n, k) <= _BY_PRODUCT):
        x, y = (m.reshape(t, (*t.shape[:a], 1, *t.shape[a:])) for t, a in ((x, len(x.shape) - 1), (y, -2)))
        return _norm(m, v, m.binary("sub", x, y, x.dtype), p, -1)
    last, lead = len(x.shape) - 1, range(len(x.shape) - 2)
    both = m.product(x, y, ([last], [last]), (lead, lead))
    wide = (m.unary("integer_pow", t, y=2) for t in (x, y))
    a, b = (m.reduced("reduce_sum", t, [last]) for t in wide)
    total = m.along("add", m.binary("mul", both, -2, v.dtype), a, [*lead, last - 1])
    total = m.along("add", total, b, [*lead, last])
    return _root(m, m.clamped(total, 0, None, v.dtype), 2)


def _spread(root: bool) -> AtenRule:
    """The variance, or its root; a truth value in the place of `dim` is `unbiased`."""

    def write(
        m: Equations,
        v: Any,
        x: Operand,
        dim: Any = None,
        unbiased: bool = True,
        keepdim: bool = False,
        correction: Any = None,
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        axes = dims_of(dim, len(x.shape))
        mean = m.mean(x, axes, True)
        apart = m.binary("sub", x, mean, x.dtype)
        found = variance(m, apart, axes, int(unbiased) if correction is None else correction)
        found = _root(m, found) if root else found
        if isinstance(v, list):
            return [m.reshape(found, v[0].shape), m.reshape(mean, v[1].shape)]
        return m.reshape(found, v.shape)

    return write


TABLE |= {"var": _spread(False), "std": _spread(True)}
TABLE |= {f"{name}_mean": TABLE[name] for name in ("var", "std")}


_MEAN, _SUM = 1, 2
UNEQUAL = (
    "the loss has means over several arrays of targets, which ranks and microbatches weight by their mean "
    "number of targets: where padding leaves more of one than of another, the loss is not exactly the batch's"
)


@rule("cross_entropy_loss")
def _cross_entropy(
    m: Equations,
    v: Type,
    x: Operand,
    y: Operand,
    weight: Any = None,
    reduction: int = _MEAN,
    ignored: int = -100,
    smoothing: float = 0.0,
) -> Operand:
    """Of logits [rows, classes, ...] and class numbers [rows, ...]."""
    if weight is not None or y.dtype in FLOATS:
        raise NotImplementedError("it weights classes")
    x = moved(m, x, 1 % len(x.shape), -1)
    counts, safe = _targets(m, y, ignored)
    loss: Operand = m.emit("cross_entropy", [x, safe], y.shape, x.dtype)
    if smoothing:
        spread = m.mean(m.unary("neg", m.softmax(x, -1, log=True)), [len(x.shape) - 1])
        loss = m.binary("mul", loss, 1 - smoothing, x.dtype)
        loss = m.binary("add", loss, m.binary("mul", spread, smoothing, x.dtype), x.dtype)
    return _counted(m, loss, counts, reduction)


@rule("nll_loss", "nll_loss_nd")
def _nll(
    m: Equations, v: Type, x: Operand, y: Operand, weight: Any = None, reduction: int = 1, ignored: int = -100
) -> Operand:
    """The negated number of each row's class; x [rows, classes, ...]."""
    if weight is not None:
        raise NotImplementedError("it weights classes")
    counts, safe = _targets(m, y, ignored)
    places = m.reshape(safe, (*y.shape, 1))
    loss = m.unary("neg", m.reshape(m.picked(moved(m, x, 1 % len(x.shape), -1), places), y.shape))
    return _counted(m, loss, counts, reduction)


def _targets(m: Equations, y: Operand, ignored: int) -> tuple[Operand, Operand]:
    """Whether each class number counts, and the numbers with 0 in place of those that do not."""
    counts = m.binary("ne", y, ignored, y.dtype, "bool")
    return counts, m.select(counts, y, 0, y.dtype)


def _counted(m: Equations, loss: Operand, counts: Operand, reduction: int) -> Operand:
    """The losses of rows that count: each, their sum, or their mean."""
    loss = m.select(counts, loss, 0, loss.dtype)
    every = range(len(loss.shape))
    if reduction != _MEAN:
        return m.reduced("reduce_sum", loss, every) if reduction == _SUM else loss
    number = m.reduced("reduce_sum", m.cast(counts, loss.dtype), every)
    if (e := m.maker(counts, "ne")) and not m.maker(e.ins[0], "iota"):
        m.targets.add(id(e.ins[0]))
    m.notes |= dict.fromkeys([UNEQUAL] * (len(m.targets) > 1))
    m.whole.append(number)
    return m.binary("div", m.reduced("reduce_sum", loss, every), number, loss.dtype)
