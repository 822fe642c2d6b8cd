"""A traced function as plain data with its arguments, as a front end hands it to the importer.

A front end (`importers.jax`, `importers.torch`) reads its library's trace as a `TracedProgram`; `build`
infers the dimensions and writes the graph. Nothing here knows a library: operations have the names of
`relations` and of the tables of handlers. Their parameters are Python's numbers, strings and tuples, NumPy
arrays, or the records below: two equations compute the same if the `repr` of their parameters is equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np

from layoutopt.front_ends import FrontEnd
from mesh_tf_core.errors import UserError

KEY = "key"
"""Dtype of random keys."""
FLAT = "flat"
"""Parameter of an equation in a function whose library wrote its derivative: its slope at corners is 0."""
FIRST = "first"
"""Parameter of an extreme of several: the first of equal operands or elements has all of the slope."""


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
    """An array that the function captures. A front end interns them: equal arrays are one object."""

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
      prim: its name, as the tables of handlers have it.
      where: file and line of the user's code.
      scope: names that the model's library gave, from the outermost to the innermost.
      body: of a loop (scan), or of a function with a custom derivative (custom).
      backward: of the latter: operands, results, their gradients -> gradients of the operands.
      recomputed: file and line of the user's own checkpoint that it is inside of.
      call: the library's call that it is a part of, if that has one kernel for all of its parts.
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
    call: str = ""

    @property
    def out(self) -> Var:
        return self.outs[0]

    @property
    def kept(self) -> list[int]:
        """The axes of the first operand that a reduction or a squeeze leaves."""
        rank = len(self.ins[0].shape)
        gone = {a % rank for a in self.params["axes" if "axes" in self.params else "dimensions"]}
        return [a for a in range(rank) if a not in gone]

    @property
    def may_give_keys(self) -> bool:
        """True if its results would be keys where an operand is one."""
        draws = ("random_bits", "random_uniform", "random_normal")
        return self.prim not in draws and not any(map(has_fractions, self.outs))


@dataclass(eq=False, slots=True)
class EquationBlock:
    """Equations from some variables to some results; `replaced`: the user's own, if they differ."""

    ins: list[Var]
    equations: list[Equation] = field(default_factory=list)
    outs: list[Operand] = field(default_factory=list)
    replaced: list[Equation] | None = None

    @property
    def ran(self) -> list[Equation]:
        """The equations of the user's program."""
        return self.equations if self.replaced is None else self.replaced

    def walk(self) -> Iterator[Equation]:
        """Every equation; those of a body follow its equation."""
        for equation in self.equations:
            yield equation
            for inner in (equation.body, equation.backward):
                if inner is not None:
                    yield from inner.walk()


@dataclass(frozen=True)
class IndexNumbers:
    """The axes of a gather or of a scatter, in the order that XLA gives both, under its names of a gather."""

    offset_dims: tuple[int, ...]
    collapsed_slice_dims: tuple[int, ...]
    start_index_map: tuple[int, ...]
    operand_batching_dims: tuple[int, ...] = ()
    start_indices_batching_dims: tuple[int, ...] = ()


@dataclass(frozen=True)
class ConvNumbers:
    """The axes of a convolution: batch and channels, or filters and channels, then those of space."""

    lhs_spec: tuple[int, ...]
    rhs_spec: tuple[int, ...]
    out_spec: tuple[int, ...]


@dataclass(frozen=True)
class RaggedNumbers:
    """The axes of a product whose rows are in groups, under XLA's names."""

    dot_dimension_numbers: tuple[Any, ...]
    lhs_ragged_dimensions: tuple[int, ...]
    rhs_group_dimensions: tuple[int, ...]


@dataclass(frozen=True)
class Noted:
    """Names that a library noted for the axes of an array.

    Attributes:
      names: from the first axis on; None for one without a name.
      logical: they are names of dimensions for sure; else they may be axes of a mesh.
    """

    names: tuple[str | None, ...]
    logical: bool


@dataclass(frozen=True)
class Leaf:
    """One array of the arguments.

    Attributes:
      value: the array itself, None if only its type was given.
      trained: whether the user's optimizer updates it, if it is a parameter.
      dtype: in which it is stored; that of its `Var` is the one in which operations read it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    value: Any = None
    noted: Noted | None = None
    trained: bool = True


def stacked_leaf(v: Var, layers: Sequence[Leaf]) -> Leaf:
    """The arrays of several layers, one behind the other."""
    value = None
    if all(leaf.value is not None for leaf in layers):
        value = np.stack([np.asarray(leaf.value) for leaf in layers])
        value.setflags(write=False)
    noted = layers[0].noted
    if noted is not None:
        noted = Noted((None, *noted.names), noted.logical)
    return replace(layers[0], path=v.path, shape=v.shape, value=value, noted=noted)


class Unimportable(UserError):
    """A refusal of an import; the message gets the front end's name in front."""


@dataclass(frozen=True)
class TracedProgram:
    """A traced function with its arguments.

    Attributes:
      function: the user's; `types` and `roles`: of its arguments, in its order.
      parameters, state, batch, keys: variables of the block with their arrays, in the order of `block.ins`.
      loss: which result of the block is the loss.
      new_state: variable of the state -> which result is its new value.
      metrics: name -> which result it is; `results`: the paths of all results, the loss first.
      notes: parts of the function that are not imported.
    """

    name: str
    front_end: FrontEnd
    block: EquationBlock
    parameters: Sequence[tuple[Var, Leaf]]
    state: Sequence[tuple[Var, Leaf]]
    batch: Sequence[tuple[Var, Leaf]]
    keys: Sequence[tuple[Var, Leaf]] = ()
    loss: int = 0
    new_state: Mapping[Var, int] = field(default_factory=dict)
    metrics: Mapping[str, int] = field(default_factory=dict)
    results: tuple[str, ...] = ("",)
    notes: Sequence[str] = ()
    function: Any = None
    types: tuple[Any, ...] = ()
    roles: tuple[str, ...] = ()


def constant(value: Any, dtype: str) -> CapturedArray:
    """An array as an operand."""
    array = np.asarray(value)
    return CapturedArray(array, tuple(array.shape), dtype)


class Constants:
    """The arrays that a function captures; equal ones, as masks of every layer, are one."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], CapturedArray] = {}

    def of(self, array: np.ndarray, dtype: str) -> CapturedArray:
        """An array as an operand."""
        if array.ndim == 0:
            return constant(array, dtype)
        key = dtype, array.shape, sha256(np.ascontiguousarray(array).tobytes()).digest()
        return self._known.setdefault(key, constant(array, dtype))


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


def live(equations: Sequence[Equation], outs: Sequence[Operand]) -> list[Equation]:
    """The equations that results need."""
    needed, kept = {id(x) for x in outs}, []
    for e in reversed(equations):
        if any(id(y) in needed for y in e.outs):
            kept.append(e)
            needed.update(map(id, e.ins))
    return kept[::-1]


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
