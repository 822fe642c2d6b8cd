"""ATen's products, attention and normalisations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import Operand, RaggedNumbers
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
            m, normalized(m, x, own := [*range(len(x.shape))][-len(shape) :], epsilon), weight, bias, own
        ),
        "group_norm": lambda m, v, x, groups, weight=None, bias=None, epsilon=1e-5, *more: _affine(
            m, m.reshape(_in_groups(m, x, groups, epsilon), x.shape), weight, bias, [1]
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
        pairs = [
            ([own.index(c) for c in letters], [name.index(c) for c in letters]) for letters in (gone, batch)
        ]
        x = m.product(x, y, *pairs)
        own = "".join([*batch, *(c for c in own if c not in shared), *(c for c in name if c not in shared)])
    return m.transpose(x, [own.index(c) for c in out])


def _summed(m: Equations, x: Operand, name: str, needed: set[str]) -> tuple[Operand, str]:
    """x without the axes that nothing else has."""
    gone = [a for a, c in enumerate(name) if c not in needed]
    if not gone:
        return x, name
    return m.reduced("reduce_sum", x, gone), "".join(c for c in name if c in needed)


# -- attention -----------------------------------------------------------------------------------------------


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
    more = {
        "causal": causal,
        "window": seen.window,
        "scale": scale or size**-0.5,
        "rate": rate,
        "extra": extra,
    }
    return m.reshape(m.emit("attention", ins, (*q.shape[:-1], w.shape[-1]), v.dtype, **more), v.shape)


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


# -- normalisations ------------------------------------------------------------------------------------------


def _affine(m: Equations, y: Operand, weight: Any, bias: Any, axes: Sequence[int]) -> Operand:
    y = y if weight is None else m.along("mul", y, weight, axes)
    return y if bias is None else m.along("add", y, bias, axes)


def _in_groups(m: Equations, x: Operand, groups: int, epsilon: float) -> Operand:
    z = m.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    return normalized(m, z, range(2, len(z.shape)), epsilon)


def normalized(m: Equations, x: Operand, axes: Sequence[int], epsilon: float) -> Operand:
    """x with mean 0 and variance 1 along axes."""
    if list(axes) == [len(x.shape) - 1]:
        return m.unary("normalize", x, epsilon=epsilon, center=True)
    mean = m.mean(x, axes, True)
    return _scaled(m, x, mean, variance(m, x, axes, mean), epsilon)


def _scaled(m: Equations, x: Operand, mean: Operand, var: Operand, epsilon: float) -> Operand:
    rate = m.unary("rsqrt", m.binary("add", var, epsilon, x.dtype))
    return m.binary("mul", m.binary("sub", x, mean, x.dtype), rate, x.dtype)


def batch_norm(
    m: Equations, x: Operand, given: Sequence[Operand | None], train: bool, momentum: float, epsilon: float
) -> tuple[Operand, Operand | None, Operand | None]:
    """BatchNorm of (x, weight, bias, running mean, running variance): the result, and the new statistics."""
    weight, bias, old_mean, old_var = given
    axes = [0, *range(2, len(x.shape))]
    lead = [x.shape[1] if a == 1 else 1 for a in range(len(x.shape))]
    new: tuple[Operand | None, Operand | None] = (None, None)
    if train or old_mean is None or old_var is None:
        mean = m.mean(x, axes, True)
        var = variance(m, x, axes, mean)
        m.whole += [mean, var]
        if old_mean is not None and old_var is not None:
            count = math.prod(x.shape) / x.shape[1]
            unbiased = m.binary("mul", var, count / (count - 1), x.dtype)
            new = _mixed(m, old_mean, mean, momentum), _mixed(m, old_var, unbiased, momentum)
    else:
        mean, var = (m.broadcast(t, lead, [1]) for t in (old_mean, old_var))
    return _affine(m, _scaled(m, x, mean, var, epsilon), weight, bias, [1]), *new


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
