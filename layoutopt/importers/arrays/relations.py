"""The axes of an operation's operands and results that mean the same, primitive by primitive.

The best description of these rules is Shardy's (openxla/shardy, `op_sharding_rule_registry.cc`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from layoutopt.importers.arrays.contract import KEY, Equation, Operand, has_fractions
from layoutopt.importers.arrays.indexing import IndexedPiece, indexing

Axis = tuple[Operand, int]


@dataclass(frozen=True)
class Same:
    """Two axes are one.

    Attributes:
      kind: "ids" if both an index and its look-up have the axis; "sized" if the two may differ in size, as in
        strided windows; "product" of a dot_general; "cut" if they are two
        dimensions that are cut at the same places.
    """

    a: Axis
    b: Axis
    kind: str = ""


@dataclass(frozen=True)
class Regroup:
    """All elements of an array in row-major order, under other axes."""

    x: Operand
    y: Operand


@dataclass(frozen=True)
class AxisPart:
    """Axis `y` is one of `count` equal pieces of axis `x`."""

    x: Axis
    y: Axis
    count: int


@dataclass(frozen=True)
class Copies(AxisPart):
    """Axis `x` is `count` copies of axis `y`, one behind the other."""


@dataclass(frozen=True)
class Join:
    """Axis `y` is axes of equal size one behind the other."""

    xs: tuple[Axis, ...]
    y: Axis


AxisRelation = Same | Regroup | AxisPart | Join


# fmt: off
ELEMENTWISE = frozenset((
    "neg", "exp", "exp2", "log", "log1p", "expm1", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin",
    "acos", "atan", "asinh", "acosh", "atanh", "logistic", "sqrt", "rsqrt", "cbrt", "square", "abs", "sign",
    "floor",
    "ceil", "round", "erf", "erfc", "erf_inv", "not", "is_finite", "integer_pow", "stop_gradient",
    "convert_element_type", "copy", "copy_p", "real", "imag", "reduce_precision", "name", "lgamma", "digamma",
    "sharding_constraint", "optimization_barrier", "device_put", "bitcast_convert_type", "population_count",
    "add", "add_any", "sub", "mul", "div", "max", "min", "pow", "rem", "atan2", "eq", "ne", "lt", "le", "gt",
    "ge", "and", "or", "xor", "nextafter", "shift_left", "shift_right_logical", "shift_right_arithmetic",
    "select_n", "clamp", "mesh_cast", "reshard", "layout_constraint", "pvary", "with_xla_metadata",
))
# fmt: on
REDUCTIONS = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin")
)
ALONG = frozenset(("normalize", "cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp", "sort", "rev"))

TO, PRODUCT, FROM = "to_experts", "expert_product", "from_experts"
"""Markers of rows at experts (`mixtures`)."""


def relations(equation: Equation, pieces: dict[int, IndexedPiece]) -> Iterator[AxisRelation]:
    """The relations of an equation; of a loop, those between its operands and its body."""
    prim = equation.prim
    if prim in ELEMENTWISE:
        for x in equation.ins:
            for y in equation.outs:
                yield from _aligned(x, y)
    elif prim in REDUCTIONS:
        yield from _mapped(equation.ins[0], equation.out, equation.kept)
    elif prim in ALONG:
        for x, y in zip(equation.ins, equation.outs, strict=True):
            yield from _aligned(x, y)
            yield from _aligned(equation.ins[0], y)
    elif prim in _RULES:
        yield from _RULES[prim](equation)
    elif prim == "slice":
        yield from _slice(equation, pieces.get(id(equation)))


def _is_plain(x: Operand) -> bool:
    return x.dtype not in (KEY, "token")


def _paired(
    x: Operand, y: Operand, axes: Iterable[tuple[int, int]], kind: str = ""
) -> Iterator[AxisRelation]:
    """Pairs (axis of x, axis of y) that are one; one of size 1 stands for none."""
    return (Same((x, a), (y, b), kind) for a, b in axes if kind == "sized" or x.shape[a] == y.shape[b])


def _aligned(x: Operand, y: Operand) -> Iterator[AxisRelation]:
    """Axes at equal positions."""
    plain = len(x.shape) == len(y.shape) and _is_plain(x) and _is_plain(y)
    return _paired(x, y, ((a, a) for a in range(len(x.shape) * plain)))


def _mapped(x: Operand, y: Operand, axes: Sequence[int], first: int = 0) -> Iterator[AxisRelation]:
    """Axis axes[i] of x is axis first + i of y."""
    return _paired(x, y, ((a, i) for i, a in enumerate(axes, first)))


def _dot(e: Equation) -> Iterator[AxisRelation]:
    (lc, rc), (lb, rb) = e.params["dimension_numbers"]
    x, y = e.ins[:2]
    # Values flow forward: the axes that a product keeps are more certain than those that it sums out.
    for i, (a, b) in enumerate(zip(lb, rb, strict=True)):
        yield Same((x, a), (e.out, i), "product")
        yield Same((y, b), (e.out, i), "product")
    yield from _product(e, (lc, rc), ((*lc, *lb), (*rc, *rb)), len(lb))


def _product(
    e: Equation,
    summed: tuple[Sequence[int], Sequence[int]],
    used: tuple[Sequence[int], Sequence[int]],
    at: int,
) -> Iterator[AxisRelation]:
    """The axes that a product of two keeps, from the result's axis `at` on, and those that it sums out.

    Args:
      summed, used: axes of either factor, pair by pair; those that the result does not have in order.
    """
    for operand, gone in zip(e.ins, used, strict=False):
        for a in range(len(operand.shape)):
            if a not in gone:
                yield Same((operand, a), (e.out, at), "product")
                at += 1
    yield from _paired(e.ins[0], e.ins[1], zip(*summed, strict=True), "product")


def _concatenate(e: Equation) -> Iterator[AxisRelation]:
    dim = e.params["dimension"]
    for x in e.ins:
        yield from _paired(x, e.out, ((a, a) for a in range(len(e.out.shape)) if a != dim))
    if len(e.ins) > 1 and len({x.shape[dim] for x in e.ins}) == 1:
        yield Join(tuple((x, dim) for x in e.ins), (e.out, dim))
    elif len(e.ins) == 1:
        yield Same((e.ins[0], dim), (e.out, dim))


def _stack(e: Equation) -> Iterator[AxisRelation]:
    """Also the other way round: rows with an axis more, and without it."""
    axis = e.params["axis"]
    whole, rows = (e.out, e.ins) if e.prim == "stack" else (e.ins[0], e.outs)
    kept = [a for a in range(len(whole.shape)) if a != axis]
    for row in rows:
        yield from _mapped(whole, row, kept)


def _tile(e: Equation) -> Iterator[AxisRelation]:
    x, y = e.ins[0], e.out
    for a, count in enumerate(e.params["reps"]):
        yield Same((x, a), (y, a)) if count == 1 else Copies((y, a), (x, a), count)


def _slice(e: Equation, piece: IndexedPiece | None) -> Iterator[AxisRelation]:
    x, y = e.ins[0], e.out
    for a, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)):
        if m == n:
            yield Same((x, a), (y, a))
        elif piece is not None and piece.axis == a:
            yield AxisPart((x, a), (y, a), piece.count)


def _split(e: Equation) -> Iterator[AxisRelation]:
    axis, sizes = e.params["axis"], e.params["sizes"]
    for y in e.outs:
        for a in range(len(y.shape)):
            if a != axis:
                yield Same((e.ins[0], a), (y, a))
            elif len(set(sizes)) == 1:
                yield AxisPart((e.ins[0], a), (y, a), len(sizes))


def _indexed(e: Equation) -> Iterator[AxisRelation]:
    """A gather, and a scatter as one of its result."""
    found, ids = indexing(e), e.ins[1]
    whole, rows = (e.ins[0], e.out) if e.prim == "gather" else (e.out, e.ins[2])
    if e.prim != "gather":
        yield from _aligned(e.ins[0], e.out)
    yield from _paired(whole, rows, found.kept)
    for a, i, o in found.common:
        yield Same((whole, a), (rows, o))
        yield Same((ids, i), (rows, o))
    yield from _paired(ids, rows, found.others, "ids")


def _top_k(e: Equation) -> Iterator[AxisRelation]:
    for y in e.outs:
        yield from _mapped(e.ins[0], y, range(len(y.shape) - 1))
    yield Same((e.outs[0], len(e.out.shape) - 1), (e.outs[1], len(e.out.shape) - 1))


def _attention(e: Equation) -> Iterator[AxisRelation]:
    """Queries [.., heads, (group,) length, d], keys and values [.., heads, memory, d]."""
    (q, k, v), y = e.ins[:3], e.out
    rows, keys = len(y.shape), len(k.shape)
    for x, count in ((k, keys - 2), (v, keys - 2), (q, rows - 1)):
        yield from _paired(x, y, ((a, a) for a in range(count)), "product")
    yield Same((v, keys - 1), (y, rows - 1), "product")
    yield Same((k, keys - 2), (v, keys - 2), "product")
    yield Same((q, rows - 1), (k, keys - 1), "product")
    if e.params["extra"]:
        x = e.ins[3]
        shift = rows - len(x.shape)
        yield from _paired(x, y, ((a, a + shift) for a in range(len(x.shape) - 1)), "product")
        yield from _paired(x, k, [(len(x.shape) - 1, keys - 2)], "product")


def _ragged(e: Equation) -> Iterator[AxisRelation]:
    numbers = e.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, _) = numbers.dot_dimension_numbers
    _, y, counts = e.ins[:3]
    groups = list(numbers.rhs_group_dimensions)
    if lb or len(groups) != 1 or len(counts.shape) != 1:
        return
    yield Same((counts, 0), (y, groups[0]), "ids")
    yield from _product(e, (lc, rc), (lc, (*rc, *groups)), 0)


def _experts(e: Equation) -> Iterator[AxisRelation]:
    """A row's tokens are other dimensions at the experts, cut at the same places."""
    x, y, alone = e.ins[0], e.out, 1 if e.params["alike"] else 2
    here, there = (alone, 2) if e.prim == TO else (2, alone)
    yield from (Same((x, a), (y, a), "cut") for a in range(alone))
    yield from _mapped(x, y, range(here, len(x.shape)), there)


def _expert_product(e: Equation) -> Iterator[AxisRelation]:
    (x, weights, ids, experts), y = e.ins, e.out
    yield Same((weights, 0), (experts, 0))
    for a in range(2):
        yield Same((x, a), (y, a))
        yield Same((ids, a), (y, a))
    yield Same((x, 2), (weights, 1), "product")
    yield Same((weights, 2), (y, 2), "product")


def _conv(e: Equation) -> Iterator[AxisRelation]:
    d, groups = e.params["dimension_numbers"], e.params["feature_group_count"]
    (x, w), y = e.ins, e.out
    yield Same((x, d.lhs_spec[0]), (y, d.out_spec[0]), "product")
    if groups == 1:
        yield Same((w, d.rhs_spec[0]), (y, d.out_spec[1]), "product")
        yield Same((x, d.lhs_spec[1]), (w, d.rhs_spec[1]), "product")
    elif w.shape[d.rhs_spec[1]] == 1 and w.shape[d.rhs_spec[0]] == groups:
        yield Same((w, d.rhs_spec[0]), (y, d.out_spec[1]), "product")
        yield Same((x, d.lhs_spec[1]), (y, d.out_spec[1]), "product")
    yield from _paired(x, y, zip(d.lhs_spec[2:], d.out_spec[2:], strict=True), "sized")


def _window(e: Equation) -> Iterator[AxisRelation]:
    for a, n in enumerate(e.params["window_dimensions"]):
        yield Same((e.ins[0], a), (e.out, a), "" if n == 1 else "sized")


def _scan(e: Equation) -> Iterator[AxisRelation]:
    assert e.body is not None
    consts, carry = e.params["consts"], e.params["carry"]
    for i, (x, inner) in enumerate(zip(e.ins, e.body.ins, strict=True)):
        if i < consts + carry:
            yield from _aligned(x, inner)
        else:
            yield from _mapped_below(x, inner)
    for i, y in enumerate(e.outs):
        inner_out = e.body.outs[i]
        if i < carry:
            yield from _aligned(inner_out, e.body.ins[consts + i])
            yield from _aligned(y, e.body.ins[consts + i])
        else:
            yield from _mapped_below(y, inner_out)
    stacks = [x for x in (*e.ins[consts + carry :], *e.outs[carry:]) if _is_plain(x)]
    for x in stacks[1:]:
        yield Same((stacks[0], 0), (x, 0))


def _mapped_below(outer: Operand, inner: Operand) -> Iterator[AxisRelation]:
    if _is_plain(outer) and _is_plain(inner):
        yield from _paired(outer, inner, ((a + 1, a) for a in range(len(inner.shape))))


def _custom(e: Equation) -> Iterator[AxisRelation]:
    assert e.body is not None and e.backward is not None
    for x, inner in zip(e.ins, e.body.ins, strict=True):
        yield from _aligned(x, inner)
    for y, result in zip(e.outs, e.body.outs, strict=True):
        yield from _aligned(y, result)
    floats = [y for y in e.outs if has_fractions(y)]
    for x, inner in zip((*e.ins, *floats), e.backward.ins, strict=True):
        yield from _aligned(x, inner)
    for i, dx in zip(e.params["real"], e.backward.outs, strict=True):
        yield from _aligned(e.ins[i], dx)


_RULES: dict[str, Callable[[Equation], Iterator[AxisRelation]]] = {
    "broadcast_in_dim": lambda e: _paired(e.ins[0], e.out, enumerate(e.params["broadcast_dimensions"])),
    "reshape": lambda e: iter((Regroup(e.ins[0], e.out),)),
    "transpose": lambda e: _mapped(e.ins[0], e.out, e.params["permutation"]),
    "squeeze": lambda e: _mapped(e.ins[0], e.out, e.kept),
    "dot_general": _dot,
    "ragged_dot_general": _ragged,
    **dict.fromkeys((TO, FROM), _experts),
    PRODUCT: _expert_product,
    "attention": _attention,
    "cross_entropy": lambda e: chain(
        _mapped(e.ins[0], e.out, range(len(e.out.shape))), _aligned(e.ins[1], e.out)
    ),
    "concatenate": _concatenate,
    **dict.fromkeys(("stack", "unstack"), _stack),
    "pad": lambda e: _paired(
        e.ins[0], e.out, ((a, a) for a, widths in enumerate(e.params["padding_config"]) if not any(widths))
    ),
    "tile": _tile,
    "split": _split,
    "dynamic_slice": lambda e: _aligned(e.ins[0], e.out),
    "dynamic_update_slice": lambda e: chain(_aligned(e.ins[0], e.out), _aligned(e.ins[1], e.out)),
    **dict.fromkeys(("gather", "scatter", "scatter-add", "scatter_add", "scatter_max"), _indexed),
    "top_k": _top_k,
    "conv_general_dilated": _conv,
    **{f"reduce_window_{how}": _window for how in ("max", "min", "sum")},
    "scan": _scan,
    "custom": _custom,
}
