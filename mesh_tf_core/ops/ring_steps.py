"""The computation of a ring's device between its messages (see `ops.context`, `ops.ring`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ops.blockwise import HIDDEN, NOTHING_SEEN
from mesh_tf_core.ops.kinds import Elementwise, MadeByLowering, SourceOp

_NEVER = 2 * HIDDEN
"""Log-sum-exp of what is not to count, even beside rows that see nothing."""
_DONE = 1e30
"""Log-sum-exp beside which every weight is 0."""


@dataclass(frozen=True)
class RingStep(MadeByLowering, Elementwise, abstract=True):
    """An operation that depends on how far keys have travelled.

    Attributes:
      ring: the dimension that counts the pieces.
      step: distance that its operands have come round the ring.
      counted: the last operand, an int32 scalar, is added to the distance.
      before: the step is for devices whose keys passed the end of the ring, else for the others.
      end: keys come from following devices, and this is the number of the last one; 0: from previous devices.
    """

    ring: str
    step: int = 0
    counted: bool = False
    before: bool = False
    end: int = 0

    def counts(self, k: Kernel, at: At, slices: Sequence[Any]) -> Any:
        """Bool scalar: whether this device is one of those; None if all are."""
        if not self.step:
            return None
        number, step = k.scalar(at.shard(self.ring), "int32"), k.scalar(self.step, "int32")
        if self.end:
            number = k.binary("sub", k.scalar(self.end, "int32"), number)
        if self.counted:
            step = k.binary("add", step, slices[-1])
        return k.binary("lt" if self.before else "ge", number, step)


@dataclass(frozen=True)
class JoinParts(RingStep):
    """Attention to more keys: (result, log-sum-exp) of some and of others -> of both.

    Attributes:
      dtype: of the result.
    """

    dtype: str = "float32"

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        return TensorType(inputs[0].shape, self.dtype), inputs[1]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        one, low, other, more = slices[:4]
        wide, counts = at.inputs[1].dtype, self.counts(k, at, slices)
        seen = k.binary("gt", more, k.scalar(NOTHING_SEEN, wide))
        seen = seen if counts is None else k.binary("and", seen, counts)
        # A row that sees nothing stays as its first part has it.
        more = k.where(seen, more, k.scalar(_NEVER, wide))
        low = k.binary("max", low, k.scalar(HIDDEN, wide))
        top = k.binary("max", low, more)
        shares = [k.unary("exp", k.binary("sub", x, top)) for x in (low, more)]
        total = k.binary("add", *shares)
        rows, names = at.inputs[1].shape.names, at.outputs[0].shape.names
        sizes = [d.size if d.name in rows else 1 for d in at.outputs[0].shape]
        assert [n for n in names if n in rows] == [*rows]
        terms = [
            k.binary("mul", k.cast(x, wide), k.reshape(k.binary("div", share, total), sizes))
            for x, share in zip((one, other), shares, strict=True)
        ]
        return k.cast(k.binary("add", *terms), self.dtype), k.binary("add", top, k.unary("log", total))

    def flops(self, *local: TensorType) -> float:
        return 3.0 * local[0].shape.size + 10.0 * local[1].shape.size


@dataclass(frozen=True)
class AddPart(RingStep):
    """A sum and one more term, on the devices that the term is for.

    Attributes:
      dtype: of the sum afterwards.
    """

    dtype: str = "float32"
    linear: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(inputs[0].shape, self.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        wide = "float64" if self.dtype == "float64" else "float32"
        total, term = (k.cast(x, wide) for x in slices[:2])
        counts = self.counts(k, at, slices)
        if counts is not None:
            term = k.where(counts, term, k.scalar(0.0, wide))
        return k.cast(k.binary("add", total, term), self.dtype)


@dataclass(frozen=True)
class ChoosePart(RingStep):
    """The first of two operands on devices that `step` selects, or (without a step) on every second device;
    else the other."""

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        counts = self.counts(k, at, slices)
        if counts is None:
            number = k.scalar(at.shard(self.ring), "int32")
            counts = k.binary("eq", k.binary("mod", number, k.scalar(2, "int32")), k.scalar(0, "int32"))
        return k.where(counts, *slices[:2])


@dataclass(frozen=True)
class LaterRows(RingStep):
    """The log-sum-exp of rows in the form that later keys need: rows that see nothing, and rows of devices
    from which the keys are hidden, give them no weight."""

    element_flops: ClassVar[float] = 2.0

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        lse, wide, counts = slices[0], at.inputs[0].dtype, self.counts(k, at, slices)
        seen = k.binary("gt", lse, k.scalar(NOTHING_SEEN, wide))
        return k.where(seen if counts is None else k.binary("and", seen, counts), lse, k.scalar(_DONE, wide))


@dataclass(frozen=True)
class Place(SourceOp):
    """[ring] int32: the position at which every device's piece begins, `by` further with every device."""

    ring: Dim
    first: int
    by: int

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(Shape([self.ring]), "int32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        number = k.scalar(at.shard(self.ring.name), "int32")
        by, first = k.scalar(self.by, "int32"), k.scalar(self.first, "int32")
        return k.reshape(k.binary("add", first, k.binary("mul", number, by)), (1,))


@dataclass(frozen=True)
class PlaceSent(RingStep):
    """The place of a neighbour's value: `by` further, for places from `start` that wrap after `total`."""

    by: int = 0
    start: int = 0
    total: int = 1
    element_flops: ClassVar[float] = 0.0

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        start, total, by = (k.scalar(n, "int32") for n in (self.start, self.total, self.by % self.total))
        place = k.binary("add", k.binary("sub", slices[0], start), by)
        return k.binary("add", k.binary("mod", place, total), start)
