"""ATen's convolutions, pooling and interpolation."""

from __future__ import annotations

from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import ConvNumbers, Operand
from layoutopt.importers.torch.elementwise import Type, rule
from layoutopt.importers.torch.emitter import Equations


def _each(given: Any, count: int) -> list[int]:
    """An argument for every axis of space."""
    listed = list(given) if isinstance(given, list | tuple) else [given]
    return listed * count if len(listed) == 1 else listed


@rule("conv1d", "conv2d", "conv3d")
def _conv(
    m: Equations,
    v: Type,
    x: Operand,
    w: Operand,
    bias: Operand | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    spread: Any = 1,
) -> Operand:
    """Of x with spread - 1 zeros between its elements."""
    space, spec = len(x.shape) - 2, tuple(range(len(x.shape)))
    dilations = _each(dilation, space)
    pads = [(p, p) if isinstance(p, int) else p for p in _each(0 if padding == "valid" else padding, space)]
    if padding == "same":
        total = [d * (n - 1) for d, n in zip(dilations, w.shape[2:], strict=True)]
        pads = [(t // 2, t - t // 2) for t in total]
    how: dict[str, Any] = {"dimension_numbers": ConvNumbers(spec, spec, spec), "batch_group_count": 1}
    how |= {"lhs_dilation": tuple(_each(spread, space)), "rhs_dilation": tuple(dilations)}
    how |= {"window_strides": tuple(_each(stride, space)), "padding": tuple(pads)}
    ins = [m.cast(x, v.dtype), m.cast(w, v.dtype)]
    y = m.emit("conv_general_dilated", ins, v.shape, v.dtype, feature_group_count=groups, **how)
    return m.added(y, bias, 1)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(
    m: Equations,
    v: Type,
    x: Operand,
    w: Operand,
    bias: Operand | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Operand:
    space, (ins, outs, *taps) = len(x.shape) - 2, w.shape
    wide = tuple(n * k for n, k in zip(x.shape[2:], taps, strict=True))
    if groups == 1 and _each(stride, space) == taps and v.shape[2:] == wide:
        # Nothing overlaps: one product, whose results lie side by side.
        y = m.product(m.cast(x, v.dtype), m.cast(w, v.dtype), ([1], [0]))
        order = [0, space + 1, *(a for i in range(space) for a in (1 + i, space + 2 + i))]
        return m.added(m.reshape(m.transpose(y, order), v.shape), bias, 1)
    w = m.transpose(m.reshape(w, (groups, ins // groups, outs, *taps)), [0, 2, 1, *range(3, 3 + space)])
    w = m.reshape(w, (groups * outs, ins // groups, *taps))
    w = m.unary("rev", w, dimensions=tuple(range(2, 2 + space)))
    each = (_each(dilation, space), taps, _each(padding, space), _each(output_padding, space))
    pads = [(d * (k - 1) - p, d * (k - 1) - p + more) for d, k, p, more in zip(*each, strict=True)]
    return _conv(m, v, x, w, bias, 1, pads, dilation, groups, stride)


@rule("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices")
def _max_pool(
    m: Equations,
    v: Any,
    x: Operand,
    size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    if any(d != 1 for d in _each(dilation, 1)):
        raise NotImplementedError("it has dilation")
    found = _window(m, "reduce_window_max", v[0] if isinstance(v, list) else v, x, size, stride, padding)
    return [found, None] if isinstance(v, list) else found


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    m: Equations,
    v: Type,
    x: Operand,
    size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Operand:
    total = _window(m, "reduce_window_sum", v, x, size, stride, padding)
    counts, space = np.ones((1,) * len(v.shape)), len(x.shape) - 2
    sizes = _each(size, space)
    each = zip(sizes, _each(stride or sizes, space), _each(padding, space), x.shape[2:], strict=True)
    for axis, (k, step, p, n) in enumerate(each, 2):
        low = np.arange(v.shape[axis]) * step - p
        over = p if count_include_pad else 0
        own = np.minimum(low + k, n + over) - np.maximum(low, -over)
        counts = counts * own.reshape([-1 if a == axis else 1 for a in range(len(v.shape))])
    if divisor_override or (counts == counts.flat[0]).all():
        return m.binary("mul", total, 1 / float(divisor_override or counts.flat[0]), v.dtype)
    return m.binary("mul", total, m.constant(1 / counts, v.dtype), v.dtype)


def _window(m: Equations, prim: str, v: Type, x: Operand, size: Any, stride: Any, padding: Any) -> Operand:
    """A reduction of windows; the last ones of an axis may reach beyond its padding (ceil_mode)."""
    space = len(x.shape) - 2
    sizes, pads = _each(size, space), _each(padding, space)
    strides = _each(stride or sizes, space)
    each = zip(x.shape[2:], v.shape[2:], sizes, strides, pads, strict=True)
    ends = [(p, max((out - 1) * step + k - n - p, 0)) for n, out, k, step, p in each]
    how: dict[str, Any] = {"window_dimensions": (1, 1, *sizes), "window_strides": (1, 1, *strides)}
    how |= dict.fromkeys(("base_dilation", "window_dilation"), (1,) * (space + 2))
    return m.emit(prim, [x], v.shape, v.dtype, padding=((0, 0), (0, 0), *ends), **how)


@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def _nearest(m: Equations, v: Type, x: Operand, *more: Any, **how: Any) -> Operand:
    if any(b % a for a, b in zip(x.shape, v.shape, strict=True)):
        raise NotImplementedError("its factors are not whole numbers")
    wide = [n for a, b in zip(x.shape[2:], v.shape[2:], strict=True) for n in (a, b // a)]
    axes = [0, 1, *range(2, 2 + len(wide), 2)]
    return m.reshape(m.broadcast(x, (*x.shape[:2], *wide), axes), v.shape)
