"""A traced function as plain data: equations over variables, calls inlined, loops with their bodies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KEY = "key"
"""Dtype of random keys."""
FLAT = "flat"
"""Parameter of an equation in a JAX function with a custom derivative: its slope at corners is 0."""


@dataclass(eq=False, slots=True)
class Var:
    """A value of the traced function.

    Attributes:
      dtype: a dtype of the runtime, "key", or NumPy's name.
      path: its place among the arguments, for arguments.
    """

    shape: tuple[int, ...]
    dtype: str
    path: str = ""


@dataclass(eq=False, slots=True)
class CapturedArray:
    """An array that the function captures."""

    value: Any
    shape: tuple[int, ...]
    dtype: str


Operand = Var | CapturedArray


def has_fractions(v: Operand) -> bool:
    """True if an array's elements are no whole numbers, truth values or keys."""
    return v.dtype.startswith(("float", "bfloat"))


def is_empty(v: Operand) -> bool:
    """True if an array has no elements, as arrays that `jnp.pad` inserts when it pads by 0."""
    return 0 in v.shape


@dataclass(eq=False, slots=True)
class Equation:
    """One operation.

    Attributes:
      prim: JAX's name of it.
      where: file and line of the user's code.
      scope: names that the model's library gave, from the outermost to the innermost.
      body: of a loop (scan), or of a function with a custom derivative (custom).
      backward: of the latter: operands, results, their gradients -> gradients of the operands.
      recomputed: file and line of the user's own jax.checkpoint that it is inside of.
    """

    prim: str
    ins: list[Operand]
    outs: list[Var]
    params: dict[str, Any]
    where: str = ""
    scope: str = ""
    body: EquationBlock | None = None
    backward: EquationBlock | None = None
    recomputed: str = ""

    @property
    def out(self) -> Var:
        return self.outs[0]


@dataclass(eq=False, slots=True)
class EquationBlock:
    """Equations from some variables to some results."""

    ins: list[Var]
    equations: list[Equation] = field(default_factory=list)
    outs: list[Operand] = field(default_factory=list)

    def walk(self) -> Iterator[Equation]:
        """Every equation; those of a body follow its equation."""
        for equation in self.equations:
            yield equation
            for inner in (equation.body, equation.backward):
                if inner is not None:
                    yield from inner.walk()


def constant(value: Any, dtype: str) -> CapturedArray:
    """An array as an operand."""
    array = np.asarray(value)
    return CapturedArray(array, tuple(array.shape), dtype)


def layered(block: EquationBlock) -> set[int]:
    """ids of parameters that loops slice, layer by layer."""
    found: set[int] = set()
    source: dict[int, Operand] = {}
    for e in block.equations:
        if e.prim == "convert_element_type":
            source[id(e.out)] = e.ins[0]
        if e.prim == "scan":
            for x in e.ins[e.params["consts"] + e.params["carry"] :]:
                found.add(id(source.get(id(x), x)))
    return found


_RESHAPED = {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "squeeze"}


def factors_of_values(block: EquationBlock) -> set[int]:
    """ids of arguments that multiply something else, element by element: a normalization's scale."""
    found: set[int] = set()
    source = {id(v): id(v) for v in block.ins}

    def look(block: EquationBlock) -> None:
        for e in block.equations:
            own = [source.get(id(x)) for x in e.ins]
            if e.prim in _RESHAPED and own[0] is not None:
                source[id(e.out)] = own[0]
            elif e.body is not None:
                source.update((id(v), x) for v, x in zip(e.body.ins, own, strict=False) if x is not None)
                look(e.body)
            elif e.prim == "mul" and own[0] != own[1] and all(isinstance(x, Var) for x in e.ins):
                found.update(x for x in own if x is not None)

    look(block)
    return found
