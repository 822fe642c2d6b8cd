"""Primitives that work element by element, and reductions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import FIRST, FLAT, Equation, Operand
from layoutopt.importers.arrays.keys import key_of
from layoutopt.importers.arrays.refusals import refuse
from layoutopt.importers.arrays.writer import (
    Handler,
    Kept,
    ScalarArray,
    UndrawnUniform,
    Writer,
    WrittenValue,
    our_dtype,
)
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.activations import extreme, modulus
from mesh_tf_core.ops.order import first_extreme
from mesh_tf_core.ops.shape import Reshape
from mesh_tf_core.tables import pairs

_REDUCE = {f"reduce_{name}": getattr(mtf, f"reduce_{name}") for name in ("sum", "max", "min", "prod")}
_REDUCE |= {"reduce_and": mtf.reduce_all, "reduce_or": mtf.reduce_any}
_OF_NOTHING = {"reduce_sum": 0, "reduce_prod": 1, "reduce_and": True, "reduce_or": False}
"""Reductions of arrays without elements."""


def _reduce(w: Writer, e: Equation) -> None:
    x, axes = e.ins[0], tuple(e.params["axes"])
    value = w.value(x)
    if isinstance(value, ScalarArray):
        count = math.prod(x.shape[a] for a in axes)
        if not count and e.prim not in _OF_NOTHING:
            refuse(
                e,
                "it reduces an array without elements, which has no maximum or minimum",
                "remove this operation",
            )
        found = value.value * count if e.prim == "reduce_sum" else value.value
        found = found**count if e.prim == "reduce_prod" else found
        made = found if count else _OF_NOTHING[e.prim]
        w.put(e.out, ScalarArray(made, e.out.dtype))
        return
    if FIRST in e.params:
        t, dim = w.merged(x, axes[0])
        w.put(e.out, w.renamed(first_extreme(e.prim.removeprefix("reduce_"), t, dim), _between(w, e)))
        return
    gone = [d for a in axes for d in w.dims(x, a)]
    t = w.drawn(value, x)
    # What is the same all along a dimension is summed by counting.
    lacking = math.prod(d.size for d in gone if d.name not in t.shape.names)
    here = [d.name for d in gone if d.name in t.shape.names]
    done = _REDUCE[e.prim](t, here) if here else t
    if lacking > 1 and e.prim == "reduce_sum":
        done = done * lacking
    elif lacking > 1 and e.prim == "reduce_prod":
        done = mtf.pow(done, float(lacking))
    w.put(e.out, w.renamed(done, _between(w, e)))


def _between(w: Writer, e: Equation) -> dict[str, str]:
    """The names of dimensions that are left -> those of the result."""
    return w.between(e.ins[0], e.out, [(a, i) for i, a in enumerate(e.kept)])


def _extreme(w: Writer, e: Equation) -> None:
    x, (axis,) = e.ins[0], e.params["axes"]
    t, dim = w.merged(x, axis)
    found = (mtf.argmax if e.prim == "argmax" else mtf.argmin)(t, dim)
    w.put(e.out, w.renamed(found, _between(w, e)).cast(our_dtype(e.out.dtype)))


_ALIKE = "exp log log1p expm1 sin cos tanh sqrt square sign floor"
"""Primitives whose names NumPy and `mesh_tf_core` have too."""
_CALLED = (
    "neg:negative exp2:exp2 tan:tan abs:abs ceil:ceil not:invert is_finite:isfinite add:add add_any:add "
    "sub:subtract mul:multiply max:maximum min:minimum pow:power rem:fmod eq:equal ne:not_equal lt:less "
    "le:less_equal gt:greater ge:greater_equal and:bitwise_and or:bitwise_or xor:bitwise_xor"
)
"""Primitives, and what NumPy calls them."""
NUMBERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _ALIKE.split()},
    **{name: getattr(np, ours) for name, ours in pairs(_CALLED).items()},
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "div": lambda x, y: (
        np.divide(x, y) if np.result_type(x, y).kind == "f" else np.trunc(np.divide(x, y)).astype(x.dtype)
    ),
}
"""Primitives as functions of numbers that are known when the model is built."""


def _int_div(x: Any, y: Any) -> Tensor:
    """Rounded towards zero, as XLA does."""
    quotient = mtf.floordiv(x, y)
    short = mtf.logical_and(quotient < 0, mtf.not_equal(quotient * y, x))
    return quotient + short.cast(quotient.dtype)


def _rem(x: Any, y: Any) -> Tensor:
    """With the sign of x, as XLA's."""
    if isinstance(x, Tensor):
        size = mtf.abs(y) if isinstance(y, Tensor) else abs(y)
        return mtf.mod(modulus(x), size) * mtf.where(x < 0, -1, mtf.ones_like(x))
    return mtf.mod(abs(x), mtf.abs(y)) * (1 if x >= 0 else -1)


def _power(x: Tensor, n: int) -> Tensor:
    if n == 0:
        return mtf.ones_like(x)
    if n < 0:
        return mtf.reciprocal(_power(x, -n))
    half = mtf.square(_power(x, n // 2)) if n > 1 else None
    return x if half is None else half * x if n % 2 else half


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(mtf, name) for name in _ALIKE.split()},
    "neg": lambda x: -x,
    "exp2": lambda x: mtf.exp(x * math.log(2)),
    "tan": lambda x: mtf.sin(x) / mtf.cos(x),
    "atan": mtf.atan,
    "asin": lambda x: mtf.atan(x * mtf.rsqrt(1 - mtf.square(x))),
    "acos": lambda x: math.pi / 2 - mtf.atan(x * mtf.rsqrt(1 - mtf.square(x))),
    # Differences of exponentials lose all digits near 0, also in the gradient of a sum of exponentials.
    "sinh": lambda x: (mtf.expm1(x) - mtf.expm1(-x)) * 0.5,
    "cosh": lambda x: mtf.square(mtf.expm1(x * 0.5) - mtf.expm1(x * -0.5)) * 0.5 + 1.0,
    "logistic": mtf.sigmoid,
    "rsqrt": mtf.rsqrt,
    "cbrt": lambda x: mtf.sign(x) * mtf.pow(mtf.abs(x), 1 / 3),
    "abs": modulus,
    "ceil": lambda x: -mtf.floor(-x),
    "erf": mtf.erf,
    "erfc": mtf.erfc,
    "not": lambda x: mtf.logical_not(x) if x.dtype == "bool" else -1 - x,
    "is_finite": mtf.is_finite,
    "stop_gradient": mtf.stop_gradient,
}


def _bitwise(name: str) -> Callable[[Any, Any], Tensor]:
    def both(x: Any, y: Any) -> Tensor:
        tensor: Tensor = x if isinstance(x, Tensor) else y
        if tensor.dtype == "bool":
            of = {"and": mtf.logical_and, "or": mtf.logical_or, "xor": mtf.logical_xor}[name]
            return of(_tensor(x, tensor), _tensor(y, tensor))
        binary = tensor.graph.binary
        if name == "or":  # of bits that only one has, and of those that both have
            return binary("bit_xor", binary("bit_xor", x, y), binary("bit_and", x, y))
        return binary("bit_" + name, x, y)

    return both


def _tensor(x: Any, like: Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else mtf.constant(like.graph, x, (), like.dtype)


def _cornered(e: Equation, given: Sequence[Any]) -> Tensor | None:
    """An extreme whose slope at equal operands is said: that of the first, or, of a number and a tensor in a
    function whose derivative its library wrote (`jax.nn.relu`), 0."""
    numbers = [x for x in given if not isinstance(x, Tensor)]
    if e.prim not in ("max", "min") or not (FIRST in e.params or (FLAT in e.params and numbers)):
        return None
    # Of equal operands `maximum` takes the first.
    x, y = given if FIRST in e.params else sorted(given, key=lambda x: isinstance(x, Tensor))
    if e.prim == "max" and FLAT in e.params and x == 0:
        return mtf.relu(y)
    return (mtf.maximum if e.prim == "max" else mtf.minimum)(x, y)


_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    **dict.fromkeys(("add", "add_any"), mtf.add),
    "sub": mtf.subtract,
    "mul": mtf.multiply,
    "div": mtf.divide,
    **{name: partial(extreme, name) for name in ("max", "min")},
    "pow": mtf.pow,
    "rem": _rem,
    "eq": mtf.equal,
    "ne": mtf.not_equal,
    "lt": mtf.less,
    "le": mtf.less_equal,
    "gt": mtf.greater,
    "ge": mtf.greater_equal,
    **{name: _bitwise(name) for name in ("and", "or", "xor")},
}


def _folded(e: Equation, values: list[WrittenValue]) -> ScalarArray | None:
    """The result where all operands are known numbers."""
    if e.prim not in NUMBERS or not all(isinstance(v, ScalarArray) for v in values):
        return None
    plain = {"bfloat16": "float32", "float16": "float32"}
    given = [np.asarray(v.value, plain.get(v.dtype, v.dtype)) for v in values if isinstance(v, ScalarArray)]
    with np.errstate(all="ignore"):
        found = NUMBERS[e.prim](*given)
    return ScalarArray(np.asarray(found).item(), e.out.dtype)


def _given(w: Writer, values: Sequence[WrittenValue], ins: Sequence[Operand]) -> list[Any]:
    """Numbers that are known, and tensors."""
    each = zip(values, ins, strict=True)
    return [v.value if isinstance(v, ScalarArray) else w.drawn(v, x) for v, x in each]


def _unary(w: Writer, e: Equation) -> None:
    values = [w.elementwise(e.ins[0], e.out)]
    folded = _folded(e, values)
    fn = mtf.abs if e.prim == "abs" and FLAT in e.params else _UNARY[e.prim]
    w.put(e.out, folded or fn(w.drawn(values[0], e.ins[0])))


def _binary(w: Writer, e: Equation) -> None:
    values = [w.elementwise(x, e.out) for x in e.ins]
    folded = _folded(e, values)
    if folded is not None:
        w.put(e.out, folded)
        return
    x, y = values
    if (
        e.prim == "lt"
        and isinstance(x, UndrawnUniform)
        and isinstance(y, ScalarArray)
        and (x.low, x.high) == (0.0, 1.0)
    ):
        w.put(e.out, Kept(x, float(y.value)))
        return
    given = _given(w, values, e.ins)
    if e.prim == "pow":  # alone has operands of two types: JAX's exponents may be whole
        given = [x.cast(our_dtype(e.out.dtype)) if isinstance(x, Tensor) else x for x in given]
    fn = _int_div if e.prim == "div" and not is_float(our_dtype(e.ins[0].dtype)) else _BINARY[e.prim]
    cornered = _cornered(e, given)
    w.put(e.out, fn(*given) if cornered is None else cornered)


def _integer_pow(w: Writer, e: Equation) -> None:
    x, n = w.elementwise(e.ins[0], e.out), int(e.params["y"])
    by_number = isinstance(x, ScalarArray) and ScalarArray(x.value**n, e.out.dtype)
    w.put(e.out, by_number or _power(w.drawn(x, e.ins[0]), n))


def _round(w: Writer, e: Equation) -> None:
    x = w.drawn(w.elementwise(e.ins[0], e.out), e.ins[0])
    up = mtf.floor(x + 0.5)
    if "EVEN" in str(e.params["rounding_method"]):
        # Halves go to the even neighbour.
        odd = mtf.logical_and(mtf.equal(up - x, 0.5), mtf.not_equal(mtf.mod(up, 2.0), 0.0))
        w.put(e.out, mtf.where(odd, up - 1.0, up))
    else:
        w.put(e.out, mtf.where(x < 0, -mtf.floor(0.5 - x), up))


def _convert(w: Writer, e: Equation) -> None:
    x, dtype = w.elementwise(e.ins[0], e.out), e.out.dtype
    if isinstance(x, ScalarArray):
        kind = np.dtype(our_dtype(dtype)) if our_dtype(dtype) != "bfloat16" else np.dtype("float32")
        w.put(e.out, ScalarArray(np.asarray(x.value).astype(kind).item(), dtype))
    elif isinstance(x, UndrawnUniform):
        w.put(e.out, replace(x, dtype=dtype))
    else:
        w.put(e.out, w.drawn(x, e.ins[0]).cast(our_dtype(dtype)))


def _narrowed(w: Writer, e: Equation) -> None:
    """Rounded to a narrower element type, and back."""
    kind = {(8, 7): "bfloat16", (5, 10): "float16"}
    bits = e.params["exponent_bits"], e.params["mantissa_bits"]
    if bits not in kind:
        refuse(
            e,
            f"it rounds to {bits[0]} bits of exponent and {bits[1]} bits of mantissa, which no supported "
            "type has",
            "convert to bfloat16 or float16 and back",
        )
    x = w.drawn(w.elementwise(e.ins[0], e.out), e.ins[0])
    w.put(e.out, x.cast(kind[bits]).cast(x.dtype))


def _same(w: Writer, e: Equation) -> None:
    for x, y in zip(e.ins, e.outs, strict=True):
        w.put(y, w.elementwise(x, y))


def _named(w: Writer, e: Equation) -> None:
    """`jax.ad_checkpoint.checkpoint_name`: a scope of this name, by which a plan may keep the value."""
    _same(w, e)
    value, name = w.value(e.out), str(e.params.get("name", ""))
    if isinstance(value, Tensor) and name.isidentifier():
        with w.graph.scope(name):
            w.put(e.out, w.graph.apply(Reshape(value.shape), value))


def _constrained(w: Writer, e: Equation) -> None:
    place = e.where.replace("\\", "/").rsplit("/", 1)[-1]
    note = f"{place}: the sharding constraint is ignored, because the search decides the sharding"
    if note not in w.notes:
        w.notes.append(note)
    _same(w, e)


def _select(w: Writer, e: Equation) -> None:
    which, *cases = (w.elementwise(x, e.out) for x in e.ins)
    if isinstance(which, ScalarArray):
        w.put(e.out, cases[int(which.value)])
        return
    if len(cases) == 1:
        w.put(e.out, cases[0])
        return
    if len(cases) > 2 or e.ins[0].dtype != "bool":
        refuse(
            e,
            "its condition is not boolean or it selects among more than two arrays",
            "use jnp.where with a boolean condition",
        )
    no, yes = cases
    if isinstance(which, Kept) and isinstance(no, ScalarArray) and no.value == 0 and isinstance(yes, Tensor):
        dropped = _dropout(w, which, yes)
        if dropped is not None:
            w.put(e.out, dropped)
            return
    if isinstance(no, ScalarArray) and isinstance(yes, ScalarArray):
        if no == yes:
            w.put(e.out, no)
            return
        yes = w.drawn(yes, e.ins[2])
    elif not isinstance(no, ScalarArray) and not isinstance(yes, ScalarArray):
        no, yes = w.drawn(no, e.ins[1]), w.drawn(yes, e.ins[2])
    w.put(e.out, mtf.where(w.drawn(which, e.ins[0]), *_given(w, (yes, no), (e.ins[2], e.ins[1]))))


def _dropout(w: Writer, kept: Kept, x: Tensor) -> Tensor | None:
    """Dropout as one operation, where what is kept of x is 1 / probability of what it was."""
    from mesh_tf_core.ops.basic import Scale

    maker = w.graph.producer.get(x.id)
    if maker is None or not isinstance(maker.op, Scale) or not 0 < kept.probability <= 1:
        return None
    if not math.isclose(maker.op.factor, 1 / kept.probability, rel_tol=1e-4):
        return None
    source = w.graph.tensor(maker.inputs[0])
    if kept.probability == 1:
        return source
    noise = [d for d in kept.of.dims if d in source.shape.dims]
    if len(noise) < len(kept.of.dims):
        source = mtf.broadcast(source, [*(d for d in kept.of.dims if d not in noise), *source.shape])
        noise = list(kept.of.dims)
    # In the order of JAX's array: what else the key draws has its numbers in this order.
    order = [d for d in kept.of.dims if d in noise]
    whole = len(noise) == len(source.shape)
    if whole and list(source.shape) != order:
        source = mtf.transpose(source, order)
    return mtf.dropout(source, 1 - kept.probability, key_of(w.graph, kept.of.keys), None if whole else order)


def _clamp(w: Writer, e: Equation) -> None:
    low, x, high = _given(w, [w.elementwise(v, e.out) for v in e.ins], e.ins)
    if any(isinstance(v, Tensor) for v in (low, x, high)):
        # At its ends the slope is 0: of equal operands `maximum` takes the first.
        w.put(e.out, mtf.minimum(high, mtf.maximum(low, x)))
    else:
        w.put(e.out, ScalarArray(min(max(x, low), high), e.out.dtype))


TABLE: Mapping[str, Handler] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_REDUCE, _reduce),
    **dict.fromkeys(("argmax", "argmin"), _extreme),
    "integer_pow": _integer_pow,
    "round": _round,
    "convert_element_type": _convert,
    "reduce_precision": _narrowed,
    **dict.fromkeys(
        ("copy", "copy_p", "optimization_barrier", "device_put", "pvary", "real", "with_xla_metadata"), _same
    ),
    "name": _named,
    **dict.fromkeys(("sharding_constraint", "layout_constraint", "mesh_cast", "reshard"), _constrained),
    "select_n": _select,
    "clamp": _clamp,
}
