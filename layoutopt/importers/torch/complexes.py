"""Complex numbers, as rotary positions are often written: a real and an imaginary array."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layoutopt.importers.arrays.contract import Operand
from layoutopt.importers.torch.elementwise import TABLE, Type
from layoutopt.importers.torch.emitter import Equations

REAL = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class Complex:
    """Two arrays of one shape."""

    real: Operand
    imag: Operand

    @property
    def shape(self) -> tuple[int, ...]:
        """That of both."""
        return self.real.shape


_PARTWISE = (
    *("view", "reshape", "flatten", "unflatten", "squeeze", "_unsafe_view", "unsqueeze", "expand"),
    *("expand_as", "transpose", "permute", "slice", "narrow", "select", "index_select", "index", "gather"),
    *("clone", "contiguous", "alias", "detach", "movedim"),
)
"""Operations that do the same with both arrays."""


def _mul(m: Equations, v: Type, a: Any, b: Any) -> Complex:
    def times(x: Any, y: Any) -> Operand:
        return m.binary("mul", x, y, v.dtype)

    if not isinstance(a, Complex):
        a, b = b, a
    if not isinstance(b, Complex):
        return Complex(times(a.real, b), times(a.imag, b))
    real = m.binary("sub", times(a.real, b.real), times(a.imag, b.imag), v.dtype)
    return Complex(real, m.binary("add", times(a.real, b.imag), times(a.imag, b.real), v.dtype))


_RULES: Mapping[str, Callable[..., Any]] = {
    "mul": _mul,
    "polar": lambda m, v, size, angle: Complex(
        *(m.binary("mul", size, m.unary(name, angle), v.dtype) for name in ("cos", "sin"))
    ),
    "complex": lambda m, v, re, im: Complex(re, im),
    "view_as_complex": lambda m, v, x: Complex(
        *(m.reshape(m.slice(x, len(x.shape) - 1, i, 1), x.shape[:-1]) for i in range(2))
    ),
    "view_as_real": lambda m, v, x: m.concatenate(
        [m.reshape(part, (*x.shape, 1)) for part in (x.real, x.imag)], len(x.shape)
    ),
    "real": lambda m, v, x: x.real,
    "imag": lambda m, v, x: x.imag,
    "conj": lambda m, v, x: Complex(x.real, m.unary("neg", x.imag)),
    **dict.fromkeys(("to", "_to_copy"), lambda m, v, x, *rest, **more: x),
}


def is_about(name: str, args: Sequence[Any]) -> bool:
    """True for an operation on complex numbers, or one that makes them."""
    return name in ("polar", "complex", "view_as_complex") or any(isinstance(x, Complex) for x in args)


def made(m: Equations, name: str, v: Type, args: Sequence[Any]) -> Any:
    """The result of an operation; NotImplementedError if it has no rule."""
    if name in _RULES:
        return _RULES[name](m, v, *args)
    if name not in _PARTWISE:
        raise NotImplementedError("it is of complex numbers")
    sides = ([getattr(x, side) if isinstance(x, Complex) else x for x in args] for side in ("real", "imag"))
    return Complex(*(TABLE[name](m, v, *own) for own in sides))
