"""ATen's products, attention, normalisations, convolutions, pooling and interpolation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import ConvNumbers, Operand, RaggedNumbers
from layoutopt.importers.torch.elementwise import Type, formulas, rule
from layoutopt.importers.torch.emitter import Equations
from layoutopt.importers.torch.masks import HiddenKeys
from layoutopt.importers.torch.reductions import variance

formulas(
    {
        "linear": lambda m, v, x, w, bias=None: m.added(
            m.product(m.cast(x, v.dtype), m.cast(w, v.dtype), ([len(x.shape) - 1], [1])), bias
        ),
        "addmm": lambda m, v, y, a, b: m.binary("add", _matmul(m, v, a, b), m.expand(y, v.shape), v.dtype),
        "layer_norm": lambda m, v, x, shape, weight=None, bias=None, epsilon=1e-5, *more: _affine(
            m, _normalized(m, x, x.shape[: -len(shape)], epsilon), weight, bias, range(-len(shape), 0)
        ),
        "group_norm": lambda m, v, x, groups, weight=None, bias=None, epsilon=1e-5, *more: _affine(
            m, _normalized(m, x, (x.shape[0], groups), epsilon), weight, bias, [1]
        ),
    }
)


@rule("matmul", "bmm", "mm", "mv", "dot")
def _matmul(m: Equations, v: Type, x: Operand, y: Operand) -> Operand:
    x, y = m.cast(x, v.dtype), m.cast(y, v.dtype)
    if len(y.shape) <= 2:
        return m.product(x, y, ([len(x.shape) - 1], [0]))
    if len(x.shape) == 1:
        return m.product(x, y, ([0], [len(y.shape) - 2]))
    lead = tuple(map(int, np.broadcast_shapes(x.shape[:-2], y.shape[:-2])))
    x, y = m.expand(x, (*lead, *x.shape[-2:])), m.expand(y, (*lead, *y.shape[-2:]))
    k = len(lead)
    return m.product(x, y, ([k + 1], [k]), (range(k), range(k)))


@rule("einsum")
def _einsum(m: Equations, v: Type, text: str, xs: Sequence[Operand], **more: Any) -> Operand:
    """Two operands at a time, whose letters come once each."""
    left, _, out = text.replace(" ", "").partition("->")
    names = left.split(",")
    if "." in text or not out or any(len(set(n)) < len(n) for n in (*names, out)):
        raise NotImplementedError("its equation has an ellipsis, no result or a repeated letter")
    (x, *rest), (own, *others) = [m.cast(x, v.dtype) for x in xs], names
    x, own = _summed(m, x, own, {*"".join(others), *out})
    for i, (y, name) in enumerate(zip(rest, others, strict=True)):
        needed = {*out, *"".join(others[i + 1 :])}
        y, name = _summed(m, y, name, {*own, *needed})
        x, own = _summed(m, x, own, {*name, *needed})
        shared = [c for c in own if c in name]
        batch, gone = [c for c in shared if c in needed], [c for c in shared if c not in needed]
        pairs = [([own.index(c) for c in each], [name.index(c) for c in each]) for each in (gone, batch)]
        x = m.product(x, y, *pairs)
        own = "".join([*batch, *(c for c in own if c not in shared), *(c for c in name if c not in shared)])
    return m.transpose(x, [own.index(c) for c in out])


def _summed(m: Equations, x: Operand, name: str, needed: set[str]) -> tuple[Operand, str]:
    """x without the axes that nothing else has."""
    gone = [a for a, c in enumerate(name) if c not in needed]
    if not gone:
        return x, name
    return m.reduced("reduce_sum", x, gone), "".join(c for c in name if c in needed)


@rule("scaled_dot_product_attention")
def _attention(
    m: Equations,
    v: Type,
    q: Operand,
    k: Operand,
    w: Operand,
    mask: Operand | HiddenKeys | None = None,
    rate: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Operand:
    """One operation: of queries [.., heads, length, d] or [.., kv heads, group, length, d]."""
    q, k, w = (m.cast(x, v.dtype) for x in (q, k, w))
    keys, values = _unrepeated(m, k), _unrepeated(m, w)
    if keys.shape[:-1] == values.shape[:-1]:
        k, w = keys, values
    size, group = q.shape[-1], 1
    if len(q.shape) > 3:
        group = q.shape[-3] // k.shape[-3]
    if group > 1:
        q = m.reshape(q, (*q.shape[:-3], k.shape[-3], group, *q.shape[-2:]))
    seen = mask if isinstance(mask, HiddenKeys) else HiddenKeys()
    causal, ins = causal or seen.causal, [q, k, w]
    extra = ""
    if mask is not None and not isinstance(mask, HiddenKeys):
        extra = "mask" if mask.dtype == "bool" else "bias"
        ins.append(_grouped(m, mask, k.shape[-3], group) if group > 1 else mask)
    if rate:
        ins.append(m.folded_key())
    how = {"causal": causal, "window": seen.window, "scale": scale or size**-0.5, "rate": rate}
    made = m.emit("attention", ins, (*q.shape[:-1], w.shape[-1]), v.dtype, **how, extra=extra)
    return m.reshape(made, v.shape)


def _unrepeated(m: Equations, x: Operand) -> Operand:
    """Keys or values before they were repeated for every query of a group."""
    if (cast := m.maker(x, "convert_element_type")) and x.dtype != cast.ins[0].dtype:
        before = _unrepeated(m, cast.ins[0])
        return x if before is cast.ins[0] else m.cast(before, x.dtype)
    e = m.maker(x, "reshape")
    wide = e and m.maker(e.ins[0], "broadcast_in_dim")
    if not e or not wide or len(e.ins[0].shape) != len(x.shape) + 1:
        return x
    at, axis = wide.ins[0], len(x.shape) - 2
    if at.shape[:axis] != e.ins[0].shape[:axis] or e.ins[0].shape[axis + 1 :] != x.shape[-2:]:
        return x
    if wide.params["broadcast_dimensions"] == tuple(a for a in range(len(x.shape) + 1) if a != axis):
        return at
    if len(at.shape) == len(x.shape) + 1 and at.shape[axis] == 1:
        inner = m.maker(at, "broadcast_in_dim", "reshape")
        return inner.ins[0] if inner else m.reshape(at, (*at.shape[:axis], *at.shape[axis + 1 :]))
    return x


def _grouped(m: Equations, mask: Operand, heads: int, group: int) -> Operand:
    """A mask of every query head as one of groups of them."""
    if len(mask.shape) < 3:
        return mask
    own = (1, 1) if mask.shape[-3] == 1 else (heads, group)
    return m.reshape(mask, (*mask.shape[:-3], *own, *mask.shape[-2:]))


def _affine(m: Equations, y: Operand, weight: Any, bias: Any, axes: Sequence[int]) -> Operand:
    y = y if weight is None else m.along("mul", y, weight, axes)
    return y if bias is None else m.along("add", y, bias, axes)


def _normalized(m: Equations, x: Operand, rows: Sequence[int], epsilon: float) -> Operand:
    """x with mean 0 and variance 1 in each of [*rows] rows of elements."""
    line = m.reshape(x, (*rows, math.prod(x.shape) // math.prod(rows)))
    return m.reshape(m.unary("normalize", line, epsilon=epsilon, center=True), x.shape)


def batch_norm(
    m: Equations, x: Operand, given: Sequence[Operand | None], train: bool, momentum: float, epsilon: float
) -> tuple[Operand, tuple[Operand, Operand], tuple[Operand | None, Operand | None]]:
    """BatchNorm of (x, weight, bias, running mean, running variance): the result, the statistics, and the new
    running ones."""
    weight, bias, old_mean, old_var = given
    axes = [0, *range(2, len(x.shape))]
    lead = [x.shape[1] if a == 1 else 1 for a in range(len(x.shape))]
    new: tuple[Operand | None, Operand | None] = (None, None)
    if train or old_mean is None or old_var is None:
        mean = m.mean(x, axes, True)
        apart = m.binary("sub", x, mean, x.dtype)
        var = variance(m, apart, axes)
        if old_mean is not None and old_var is not None:
            count = math.prod(x.shape) / x.shape[1]
            unbiased = m.binary("mul", var, count / (count - 1), x.dtype)
            new = _mixed(m, old_mean, mean, momentum), _mixed(m, old_var, unbiased, momentum)
    else:
        mean, var = (m.broadcast(t, lead, [1]) for t in (old_mean, old_var))
        apart = m.binary("sub", x, mean, x.dtype)
    rate = m.unary("rsqrt", m.binary("add", var, epsilon, x.dtype))
    return _affine(m, m.binary("mul", apart, rate, x.dtype), weight, bias, [1]), (mean, var), new


def _mixed(m: Equations, old: Operand, now: Operand, momentum: float) -> Operand:
    now = m.cast(m.reshape(now, old.shape), old.dtype)
    kept = m.binary("mul", old, 1 - momentum, old.dtype)
    return m.binary("add", kept, m.binary("mul", now, momentum, old.dtype), old.dtype)


@rule("_grouped_mm", "grouped_mm_fallback")
def _grouped_mm(
    m: Equations, v: Type, x: Operand, w: Operand, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Operand:
    """Rows, sorted by group, times the matrix of their group; `offs`: where each group ends."""
    if len(x.shape) != 2 or len(w.shape) != 3 or offs is None or bias is not None:
        raise NotImplementedError("its first operand is not rows in consecutive groups")
    n, dtype = offs.shape[0], offs.dtype
    ends = [m.slice(offs, 0, 0, n - 1), m.constant(0, dtype)]
    counts = m.binary("sub", offs, m.emit("pad", ends, (n,), dtype, padding_config=((1, 0, 0),)), dtype)
    numbers = RaggedNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    ins = [m.cast(x, v.dtype), m.cast(w, v.dtype), counts]
    return m.emit("ragged_dot_general", ins, v.shape, v.dtype, ragged_dot_dimension_numbers=numbers)


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
def _max_pool(m: Equations, v: Any, x: Operand, size: Any, stride: Any = None, padding: Any = 0) -> Any:
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
