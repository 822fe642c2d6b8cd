"""Questions that only some operations answer, in groups: a class extends the groups that it answers.

SumRules          where a sum of operands may wait, and which results are sums
PartialAccess     reads or writes a part of an operand
StepCopies        differs in a copy of the step: a part of the batch, a replica, an evaluation
DimensionNames    names dimensions along which it moves nothing
LabelOperand      one operand holds indices into a dimension
ContextParallel   works on keys that may be split along their positions
GradientOperands  some operands are for the gradient alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import TensorType
from mesh_tf_core.ir.kernel import PartRows
from mesh_tf_core.ir.op import FLAG, Op
from mesh_tf_core.ir.tensor import Tensor


@dataclass(frozen=True)
class SumRules(Op, abstract=True):
    """Commutes with sums in more or fewer cases than `linear` and `converts` imply."""

    FACETS: ClassVar[tuple[str, ...]] = ()
    OPTIONAL: ClassVar[tuple[str, ...]] = ("distributes", "unreduced", "summand")
    FACTS: ClassVar[Mapping[str, tuple[object, ...]]] = {"divides": FLAG, "vanishes": FLAG, "adds": FLAG}

    divides: ClassVar[bool] = False
    """True if it is the quotient of its two operands, element by element."""
    vanishes: ClassVar[bool] = False
    """True if it has one operand and maps 0 to 0."""
    adds: ClassVar[bool] = False
    """True if its last operand is a term of its result, pending over the same axes."""

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


@dataclass(frozen=True)
class PartialAccess(Op, abstract=True):
    """Reads or writes a part of its first operand."""

    FACETS: ClassVar[tuple[str, ...]] = ()
    OPTIONAL: ClassVar[tuple[str, ...]] = ("moved",)
    FACTS: ClassVar[Mapping[str, tuple[object, ...]]] = {"in_place": FLAG, "cuts": FLAG, "joins": FLAG}

    in_place: ClassVar[bool] = False
    """True if it writes a part of its first operand and leaves the rest unchanged."""
    cuts: ClassVar[bool] = False
    """True if a product may read or write the part in place."""
    joins: ClassVar[bool] = False
    """True if its operands are parts of its result, in which they lie from the start."""

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> float:
        """Bytes that a device reads and writes; by default, those of all operands and results.

        Args:
          inputs, outputs: types of the local pieces.
        """
        return all_bytes(inputs, outputs)


@dataclass(frozen=True)
class StepCopies(Op, abstract=True):
    """Differs between the step and its copies on a part of the batch, for a replica or without training."""

    FACETS: ClassVar[tuple[str, ...]] = ()
    OPTIONAL: ClassVar[tuple[str, ...]] = ("of_part", "untrained")
    FACTS: ClassVar[Mapping[str, tuple[object, ...]]] = {"scales": FLAG, "derives_key": FLAG}

    scales: ClassVar[bool] = False
    """True if its result only scales tensors for a product, and is divided by again: of a step in parts, each
    part takes its own, and the results differ by rounding."""
    derives_key: ClassVar[bool] = False
    """True if it makes a random key; more int32 scalars behind its operands make another one."""

    def of_part(self, rows: PartRows) -> tuple[Op, int] | None:
        """The same on a part of the batch, and which of its operands is the part's number then, an int32
        scalar; None if it does not depend on which rows of the batch it works on."""
        return None

    def untrained(self) -> tuple[Op, int] | None:
        """The operation that replaces it without training, and the number of its first operands that this one
        takes; None if there is none."""
        return None


@dataclass(frozen=True)
class DimensionNames(Op, abstract=True):
    """Names dimensions in its parameters along which it moves nothing."""

    FACETS: ClassVar[tuple[str, ...]] = ()
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    FACTS: ClassVar[Mapping[str, tuple[object, ...]]] = {"renames": ((),), "still": ((),)}

    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Dimensions that its output has under another name: (old, new)."""
    still: ClassVar[tuple[str, ...]] = ()
    """Dimensions that its parameters name although it moves nothing along them."""


@dataclass(frozen=True)
class LabelOperand(Op, abstract=True):
    """One operand holds indices into a dimension."""

    FACETS: ClassVar[tuple[str, ...]] = ("labels",)
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    FACTS: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    def labels(self, *inputs: TensorType) -> tuple[int, Dim, bool]:
        """Position of the input whose numbers index a dimension, this dimension, and whether negative numbers
        deliberately index nothing (padding); any other number out of range is a mistake in the data."""
        raise NotImplementedError


@dataclass(frozen=True)
class ContextParallel(Op, abstract=True):
    """Works on keys that may be split along their positions."""

    FACETS: ClassVar[tuple[str, ...]] = ()
    OPTIONAL: ClassVar[tuple[str, ...]] = ("spread",)
    FACTS: ClassVar[Mapping[str, tuple[object, ...]]] = {"crosses": ((),)}

    crosses: ClassVar[tuple[str, ...]] = ()
    """Dimensions, one of them `whole`, whose shards are combined in one of the forms of `spread`; options
    name the form by the first dimension."""

    def spread(
        self, low: Any, inputs: Sequence[int], types: Sequence[TensorType], form: str, wanted: Sequence[bool]
    ) -> Sequence[int] | None:
        """Its outputs, in a form in which the dimension it needs whole is not gathered; None if gathering
        does.

        Args:
          inputs, types: as of `Op.lower`.
          form: one of `ops.context.FORMS`.
          wanted: for each output, True if anything reads it; otherwise any value may replace it.

        Raises:
          LayoutError: the operands or the layout do not allow the form.
        """
        return None


@dataclass(frozen=True)
class GradientOperands(Op, abstract=True):
    """Some operands are for the gradient alone."""

    FACETS: ClassVar[tuple[str, ...]] = ("operands",)
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    FACTS: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    def operands(self, inputs: Sequence[int]) -> Sequence[int]:
        """The inputs that a device reads."""
        raise NotImplementedError


def all_bytes(inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> float:
    """Bytes of all operands and results."""
    return float(sum(t.bytes for t in (*inputs, *outputs)))


def distributes(op: Op, constant: Sequence[bool]) -> bool:
    """True if a sum of an operation's operands, except the `constant` ones, may be taken after it."""
    return op.distributes(constant) if isinstance(op, SumRules) else op.linear or op.converts


def renames(op: Op) -> tuple[tuple[str, str], ...]:
    """Dimensions that an operation's output has under another name: (old, new)."""
    return op.renames if isinstance(op, DimensionNames) else ()


def crosses(op: Op) -> tuple[str, ...]:
    """Dimensions whose shards an operation combines; see `ContextParallel.crosses`."""
    return op.crosses if isinstance(op, ContextParallel) else ()


def derives_key(op: Op) -> bool:
    """True if an operation makes a random key."""
    return isinstance(op, StepCopies) and op.derives_key


def scales(op: Op) -> bool:
    """True if an operation's result only scales tensors for a product."""
    return isinstance(op, StepCopies) and op.scales


def in_place(op: Op) -> bool:
    """True if an operation writes a part of its first operand."""
    return isinstance(op, PartialAccess) and op.in_place


def read_operands(op: Op, inputs: Sequence[int]) -> Sequence[int]:
    """The inputs of an operation that a device reads; only its gradient needs the others."""
    return op.operands(inputs) if isinstance(op, GradientOperands) else inputs
