"""ATen's losses."""

from __future__ import annotations

from typing import Any

from layoutopt.importers.arrays.contract import Operand
from layoutopt.importers.torch.elementwise import Type, rule
from layoutopt.importers.torch.emitter import Equations
from layoutopt.importers.torch.internals import FLOATS

_MEAN, _SUM = 1, 2


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
    x = _classes_last(m, x)
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
    loss = m.unary("neg", m.reshape(m.picked(_classes_last(m, x), places), y.shape))
    return _counted(m, loss, counts, reduction)


def _classes_last(m: Equations, x: Operand) -> Operand:
    """[rows, classes, ...] -> [rows, ..., classes]."""
    rank = len(x.shape)
    return m.transpose(x, [0, *range(2, rank), 1]) if rank > 2 else x


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
    m.whole.append(number)
    return m.binary("div", m.reduced("reduce_sum", loss, every), number, loss.dtype)
