"""Refusals of an import: all of a function in one error, each operation with the user's lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import Equation, Unimportable
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.tensor import Tensor

WIDER = {"uint8": "int32", "int16": "int32", "uint16": "int32", "uint64": "int64", "int4": "int8"}
"""JAX's element types without an equal in the runtime, and their replacements."""
_WRAPPING = ("uint8", "int16", "uint16")
_GROWING = frozenset((
    "add", "add_any", "sub", "mul", "neg", "integer_pow", "abs", "sign", "not", "shift_left", "dot_general",
    "reduce_sum", "cumsum", "scatter-add", "scatter_add", "convert_element_type",
))  # fmt: skip
"""Primitives whose results may lie outside of their operands' range."""


def wrapped(e: Equation, made: Tensor) -> Tensor:
    """A result in the range of its element type: fractions outside become its ends, as XLA's on CPUs."""
    dtype = e.out.dtype
    if dtype not in _WRAPPING or e.prim not in _GROWING:
        return made
    ends = np.iinfo(dtype)
    low, high = int(ends.min), int(ends.max)
    if e.prim == "convert_element_type":
        if e.ins[0].dtype == "bool":
            return made
        if is_float(e.ins[0].dtype):
            return mtf.minimum(mtf.maximum(made, low), high)
    return mtf.mod(made - low, high - low + 1) + low


OTHERWISE = "rewrite this line with other operations, or report the operation as an issue"


class Refusal(Unimportable):
    """An operation that cannot be imported: the user's line, its name, the reason, the remedy.

    Attributes:
      kind: refusals of one kind are one item of a list.
    """

    def __init__(self, equation: Equation, why: str, instead: str) -> None:
        shapes = ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in equation.ins)
        self.place = equation.where or "unknown line"
        self._scope = f" in {equation.scope}" if equation.scope else ""
        self._what = f"cannot import {equation.prim}{f' of {shapes}' if shapes else ''}: {why}; {instead}"
        self.kind = equation.prim, why, instead
        super().__init__(self.at(self.place))

    def at(self, places: str) -> str:
        """The same of several lines."""
        return f"{places}{self._scope}: {self._what}"


def refuse(equation: Equation, why: str, instead: str) -> NoReturn:
    """Raises the refusal of an operation."""
    raise Refusal(equation, why, instead)


class Refusals:
    """The refusals while a function is written, and the values that are unknown because of them.

    An operation that follows from a refused one may fail for that reason alone, so it is not listed.

    Attributes:
      found: in the order of the function.
    """

    def __init__(self) -> None:
        self.found: list[Unimportable] = []
        self._unknown: set[int] = set()

    def follows(self, e: Equation) -> bool:
        """True if an equation depends on a refused operation; then its results do too."""
        if not any(id(x) in self._unknown for x in e.ins):
            return False
        self.lose(e)
        for body in (e.body, e.backward):
            if body is not None:
                self._unknown.update(map(id, body.ins))
        return True

    def lose(self, e: Equation) -> None:
        """Marks the results of an equation as unknown."""
        self._unknown.update(map(id, e.outs))

    def leave(self, e: Equation) -> None:
        """Ends a body: its outputs are known if all their values are."""
        if e.body is not None and any(id(x) in self._unknown for x in e.body.outs):
            self.lose(e)

    def add(self, e: Equation, error: Exception) -> None:
        """An equation that could not be written."""
        if not isinstance(error, Unimportable):
            error = Refusal(e, str(error) or "the shapes of its operands do not match", OTHERWISE)
        if error not in self.found:
            self.found.append(error)
        self.lose(e)


def refused(found: Sequence[Unimportable]) -> Unimportable:
    """One error for all that an import refuses, kind by kind, each with all of its lines."""
    kinds: dict[object, list[Unimportable]] = {}
    for error in found:
        kinds.setdefault(error.kind if isinstance(error, Refusal) else str(error), []).append(error)
    items = []
    for first, *others in kinds.values():
        if isinstance(first, Refusal):
            places = (x.place for x in (first, *others) if isinstance(x, Refusal))
            items.append(first.at(", ".join(dict.fromkeys(places))))
        else:
            items.append(str(first))
    if len(items) == 1:
        return Unimportable(items[0])
    return Unimportable(" ".join(f"({n}) {text}" for n, text in enumerate(items, 1)))
