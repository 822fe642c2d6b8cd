"""The contract of an operation: all that other code may ask of it, checked when its class is created.

  required facets  roles, infer, kernel, flops, gradient
  optional facets  `Op.OPTIONAL`; each says what holds without it
  facts            `Op.FACTS`: attributes of the class, or properties where they depend on its fields

`roles` is the only statement about distribution. Legality, lowering, collectives, bytes and memory are read
off it. No reader depends on a single operation: the contract has everything it needs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import TensorType
from mesh_tf_core.ir.kernel import At, Kernel, PartRows
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.visible import Visible

__all__ = ["At", "Kernel", "Op", "Roles", "Tensor", "TensorType", "Work"]


@dataclass(frozen=True, slots=True)
class Roles:
    """The role of each dimension of an operation when it is split.

    Attributes:
      parallel: a device that holds the matching pieces of the inputs computes its piece of the outputs.
      reduced: dimensions that an output may lack; a device that holds a piece computes a partial result of
        every output that does, and partial results are joined by `combine` ("sum", "max" or "min").
      whole: name -> reason; every device needs all of this dimension, so a split input is gathered first.
    """

    parallel: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    combine: str = "sum"
    whole: dict[str, str] = field(default_factory=dict)


FLAG = (False, True)
"""The values of a fact that holds or does not."""
PRODUCTS = ("matmul", "attention")
"""Kinds of operations that the matrix unit runs."""


@dataclass(frozen=True, eq=False, init=False)
class Op:
    """One operation. Subclasses are frozen dataclasses of hashable fields and define every required method.

    Raises:
      TypeError: a class breaks the contract; raised when the class is created.
    """

    FACETS: ClassVar[tuple[str, ...]] = ("roles", "infer", "kernel", "flops", "gradient")
    OPTIONAL: ClassVar[tuple[str, ...]] = (
        *("lower", "expand", "work", "describe", "moved", "operands", "labels", "spread"),
        *("distributes", "unreduced", "summand", "of_part", "untrained"),
    )
    FACTS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "kind": ("matmul", "elementwise", "reduce", "gather", "random", "data", "attention"),
        **dict.fromkeys(("free", "linear", "converts", "regroups", "exchanges"), FLAG),
        **dict.fromkeys(("divides", "vanishes", "adds", "in_place", "cuts", "joins"), FLAG),
        **dict.fromkeys(("scales", "derives_key"), FLAG),
        **dict.fromkeys(("renames", "still", "crosses"), ((),)),
    }
    """Fact -> the values that it may have."""

    kind: ClassVar[str] = "elementwise"
    """The class of work by which it is priced; `data` moves bytes only."""
    free: ClassVar[bool] = False
    """True if the output is the input under another name (or a scalar): it takes no time and no memory."""
    linear: ClassVar[bool] = False
    """True if a sum of partial inputs may wait until after the operation (jointly in all its inputs)."""
    converts: ClassVar[bool] = False
    """True if it represents the same numbers, perhaps in another element type. It runs on any shard of its
    operand, whatever the layout. Its result of a variable still counts as this variable, and a pending sum
    may be taken after it except for rounding."""
    regroups: ClassVar[bool] = False
    """True if an axis may split one dimension of an input and another of the output."""
    exchanges: ClassVar[bool] = False
    """True if rules for elsewhere hold for its input and its output, each by itself: it moves values from
    where the one lies to where the other does."""
    divides: ClassVar[bool] = False
    """True if it is the quotient of its two operands, element by element."""
    vanishes: ClassVar[bool] = False
    """True if it has one operand and maps 0 to 0."""
    adds: ClassVar[bool] = False
    """True if its last operand is a term of its result, pending over the same axes."""
    in_place: ClassVar[bool] = False
    """True if it writes a part of its first operand and leaves the rest unchanged."""
    cuts: ClassVar[bool] = False
    """True if a product may read or write a part of its first operand in place."""
    joins: ClassVar[bool] = False
    """True if its operands are parts of its result, in which they lie from the start."""
    scales: ClassVar[bool] = False
    """True if its result only scales tensors for a product, and is divided by again: of a step in parts, each
    part takes its own, and the results differ by rounding."""
    derives_key: ClassVar[bool] = False
    """True if it makes a random key; more int32 scalars behind its operands make another one."""
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Dimensions that its output has under another name: (old, new)."""
    still: ClassVar[tuple[str, ...]] = ()
    """Dimensions that its parameters name although it moves nothing along them."""
    crosses: ClassVar[tuple[str, ...]] = ()
    """Dimensions of keys, one of them `whole`, whose shards are combined in one of the forms of `spread`;
    options name the form by the first dimension."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A dataclass has its own, so that only a class that is none comes here with something to keep.
        if args or kwargs:
            raise TypeError(
                f"operation {type(self).__name__} is not a dataclass; write @dataclass(frozen=True) "
                "above the class"
            )

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_contract(cls, abstract)

    @property
    def name(self) -> str:
        """Short name in programs and reports."""
        return type(self).__name__.lower()

    # -- required facets -------------------------------------------------------------------------------------

    def roles(self, *inputs: TensorType) -> Roles:
        """The role of every dimension."""
        raise NotImplementedError

    def infer(self, *inputs: TensorType) -> TensorType | tuple[TensorType, ...]:
        """Type of the output (several: a tuple), or a UserError that lists the operands."""
        raise NotImplementedError

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        """Computes one device's outputs from its slices; `at` knows local sizes and where the slices
        begin."""
        raise NotImplementedError

    def flops(self, *local: TensorType) -> float:
        """Floating-point operations on inputs of the given local sizes."""
        raise NotImplementedError

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        """Gradient with respect to every input (None: not differentiable), built from operations."""
        raise NotImplementedError

    # -- optional facets -------------------------------------------------------------------------------------

    def lower(self, low: Any, inputs: Sequence[int], types: Sequence[TensorType]) -> Sequence[int]:
        """Emits its instructions and returns its outputs, for operations that `roles` alone cannot place;
        without it, an operation is lowered from its roles.

        Args:
          low: the lowering, a `builder.Emitter`.
          inputs: values with the placement of the layout.
          types: of the outputs.
        """
        raise NotImplementedError

    def expand(self, *inputs: Tensor) -> Tensor | None:
        """The same result from smaller operations, used when a `whole` dimension is split; without it, that
        dimension is gathered."""
        return None

    def work(self, *local: TensorType) -> Work:
        """The matrix product and the work besides `flops`; None: the operation is no product."""
        return NO_PRODUCT

    def describe(self) -> str:
        """Name and parameters in one line, for programs; without it, all fields that are not None."""
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        text = ", ".join(f"{name}={_brief(value)}" for name, value in said.items() if value is not None)
        return f"{self.name}({text})" if text else self.name

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> float:
        """Bytes that a device reads and writes; without it, those of all operands and results.

        Args:
          inputs, outputs: types of the local pieces.
        """
        return float(sum(t.bytes for t in (*inputs, *outputs)))

    def operands(self, inputs: Sequence[int]) -> Sequence[int]:
        """The inputs that a device reads; without it, all: only the gradient needs the others."""
        return inputs

    def labels(self, *inputs: TensorType) -> tuple[int, Dim, bool] | None:
        """Position of the input whose numbers index a dimension, this dimension, and whether negative numbers
        deliberately index nothing (padding); any other number out of range is a mistake in the data. None if
        no input holds indices."""
        return None

    def spread(
        self, low: Any, inputs: Sequence[int], types: Sequence[TensorType], form: str, wanted: Sequence[bool]
    ) -> Sequence[int] | None:
        """Its outputs, in a form in which the dimension it needs whole is not gathered (see `crosses`); None
        if gathering does.

        Args:
          inputs, types: as of `lower`.
          form: one of `ops.context.FORMS`.
          wanted: for each output, True if anything reads it; otherwise any value may replace it.

        Raises:
          LayoutError: the operands or the layout do not allow the form.
        """
        return None

    def distributes(self, constant: Sequence[bool]) -> bool:
        """True if a sum of its operands, except the `constant` ones, may be taken after it; by default for
        linear operations and casts."""
        return self.linear or self.converts

    def unreduced(self, dim: Dim, inputs: Sequence[Tensor]) -> Tensor | None:
        """The result [dim, dimensions of the output] before `dim`, which the inputs have, is summed out; None
        if it is not a sum over `dim`."""
        return None

    def summand(self, dim: Dim, parts: Sequence[Tensor], constant: Sequence[bool]) -> Tensor | None:
        """r [dim, dimensions of the output] whose sum over `dim` is the output; None if there is none. Not
        called for linear operations.

        Args:
          parts: such summands of the inputs; of a constant, the input itself.
        """
        return None

    def of_part(self, rows: PartRows) -> tuple[Op, int] | None:
        """The same on a part of the batch, and which of its operands is the part's number then, an int32
        scalar; None if it does not depend on which rows of the batch it works on."""
        return None

    def untrained(self) -> tuple[Op, int] | None:
        """The operation that replaces it without training, and the number of its first operands that this one
        takes; None if there is none."""
        return None

    @classmethod
    def lowers(cls) -> bool:
        """True if the class defines `lower`."""
        return cls.lower is not Op.lower

    @classmethod
    def expands(cls) -> bool:
        """True if the class defines `expand`."""
        return cls.expand is not Op.expand


def inferred(op: Op, types: TensorType | tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """The types of the results, one by one; UserError if `infer` returned something else."""
    listed = types if isinstance(types, tuple) else (types,)
    if not listed or not all(isinstance(t, TensorType) for t in listed):
        raise UserError(
            f"operation {type(op).__name__}: infer returned {types!r}; it must return an mtf.TensorType "
            "or a non-empty tuple of them"
        )
    return listed


def _brief(value: Any) -> str:
    if isinstance(value, Shape):
        return "[" + " ".join(value.names) + "]"
    if isinstance(value, tuple):
        return "(" + " ".join(map(_brief, value)) + ")"
    return getattr(value, "name", None) or str(value)


_UNHASHABLE = re.compile(r"(\w+\.)*(list|dict|set|bytearray|List|Dict|Set|Mutable\w+|ndarray)\b")


def check_contract(cls: Any, abstract: bool) -> None:
    """TypeError if a class of operations breaks the contract. (That it is frozen, `dataclass` itself
    checks.)"""
    what = f"operation {cls.__name__}"
    missing = [f for f in Op.FACETS if getattr(cls, f) is getattr(Op, f)]
    if missing and not abstract:
        raise TypeError(f"{what} does not define {', '.join(missing)}; add these methods")
    for name in (*Op.FACETS, *Op.OPTIONAL):
        own, declared = getattr(cls, name), getattr(Op, name)
        if not callable(own):
            raise TypeError(f"{what}: {name} is {own!r}; define a method {name}{_takes(declared)}")
        bound = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
        if not _fits(own, declared, bound):
            must = f"must have the signature {name}{_takes(declared)}"
            raise TypeError(f"{what}: the method {name}{_takes(own)} {must}")
    for name, allowed in Op.FACTS.items():
        value = getattr(cls, name)
        if not isinstance(value, property) and value not in allowed:
            listed = ", ".join(map(repr, allowed))
            raise TypeError(f"{what}: {name} is {value!r}; choose from {listed}")
    for name, annotation in inspect.get_annotations(cls).items():
        if "ClassVar" in str(annotation):
            meant = get_close_matches(name, Op.FACTS, 1, 0.75)
            if meant and name not in Op.FACTS:
                raise TypeError(
                    f"{what}: operations have no class attribute {name!r}; did you mean {meant[0]!r}?"
                )
        elif name in (*Op.FACETS, *Op.OPTIONAL, *Op.FACTS):
            raise TypeError(f"{what}: field {name!r} has the name of a facet of operations; rename it")
        elif _UNHASHABLE.match(getattr(annotation, "__name__", str(annotation))):
            raise TypeError(
                f"{what}: field {name!r} has type {annotation}, which is not hashable; use a tuple"
            )


def _counts(facet: Any) -> tuple[int, int, bool]:
    """How many arguments a facet needs and takes by position, and whether it takes any number."""
    found = list(inspect.signature(facet).parameters.values())
    by_position = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in by_position)
    return needed, len(by_position), any(p.kind is p.VAR_POSITIONAL for p in found)


def _fits(own: Any, declared: Any, bound: bool) -> bool:
    """Whether a facet can be called as it is declared; operands may have names of their own. A `bound` one (a
    static or a class method) has no `self`."""
    if own is declared:
        return True
    (needed, taken, many), (fixed, _, several) = _counts(own), _counts(declared)
    needed, taken = needed + bound, taken + bound
    if several:
        return many or taken > fixed
    return needed <= fixed and (many or taken >= fixed)


def _takes(facet: Any) -> str:
    taken = (p.replace(annotation=p.empty) for p in inspect.signature(facet).parameters.values())
    return f"({', '.join(map(str, taken))})"


@dataclass(frozen=True, slots=True)
class Work:
    """The work on one device's pieces; None where an operation has no such part.

    Attributes:
      product: (batch, m, n, k) of the matrix product that the operation is.
      overhead: FLOPs that the model does not need: repeated, or what `Einsum.needed` leaves out.
      added: rows and width of the partial results of a convolution: places times taps, and channels.
      blocked: FLOPs of the matrix unit and operations of the vector unit that take turns in a kernel that
        works on blocks, and elements of operands and results that are made ready for it.
      visible: the pairs of an attention.
      grouped: each row is multiplied by the matrix of its group.
    """

    product: tuple[int, int, int, int] | None = None
    overhead: float = 0.0
    added: tuple[int, int] | None = None
    blocked: tuple[float, float, float] | None = None
    visible: Visible | None = None
    grouped: bool = False


NO_PRODUCT = Work()
