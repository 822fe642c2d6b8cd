"""Itemised cost: the kernels and collectives of a program on one device, one item each.

Items are frozen and add up. They have no seconds. Everything else is made from them: the seconds of a step
(`costmodels.pricing.pricer`), the lines of `layoutopt cost` (`lines`), their formulas (`explanation`), the
tables of the search (`templates`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from costmodels.kernels.compute import Quantity
from mesh_tf_core.ir.dims import SparseDim
from mesh_tf_core.ir.instructions import HOST
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Op, TensorType


class _Compute:
    """An item that sends nothing; `quantity` is what it does."""

    __slots__ = ()
    axes: ClassVar[Axes] = ()
    sent: ClassVar[float] = 0.0
    purpose: ClassVar[str] = ""
    quantity: Quantity

    @property
    def kind(self) -> str:
        return self.quantity.op_class

    @property
    def bytes(self) -> float:
        return self.quantity.bytes


@dataclass(frozen=True, slots=True)
class Computed(_Compute):
    """A kernel, or a loop's write to a stack.

    Attributes:
      flops: of its operations, each counted once. `quantity` includes recomputed work.
      lacks: why the local engine's array functions do not predict it; empty if that was not checked.
    """

    quantity: Quantity
    flops: float
    lacks: str = ""


@dataclass(frozen=True, slots=True)
class Called(_Compute):
    """An instruction as the array functions that the local engine calls for it.

    Attributes:
      inputs, outputs: types of one device's pieces.
      split: names of the dimensions that are split.
      stays: its result needs separate memory, `costmodels.kernels.calls` equation (2).
    """

    op: Op
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    split: frozenset[str]
    stays: bool
    quantity: Quantity = field(compare=False)

    @property
    def flops(self) -> float:
        return self.quantity.flops


@dataclass(frozen=True, slots=True)
class Started(_Compute):
    """The start of a step that stores `writes` variables: the same under every layout."""

    writes: int
    quantity: Quantity = field(default=Quantity(0.0, 0.0, "step", "float32"), init=False)
    flops: ClassVar[float] = 0.0


Between = tuple[tuple[Computed, float], ...]
"""Products, each with a part of its time."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective.

    Attributes:
      kind: its name.
      payloads: bytes of the pieces that a device puts in.
      sent: bytes that a device sends.
      purpose: its rule (`costmodels.pricing.overlap`).
      together: its values share one latency, else each is sent separately.
      crossings: for a permutation, the number of pieces that share a link of a ring.
      both_ways: another permute of the same size runs in the opposite direction at the same time.
      joined: it travels with a larger one, which pays for the latency.
      between: products from start to done, each with the part of its time that hides this message.
      experts: those of a device, between which and their tokens rows travel; None: another message.
    """

    kind: str
    axes: Axes
    payloads: tuple[int, ...]
    sent: float
    purpose: str = ""
    together: bool = True
    crossings: int = 1
    joined: bool = False
    between: Between = ()
    both_ways: bool = False
    experts: SparseDim | None = None
    flops: ClassVar[float] = 0.0
    bytes: ClassVar[float] = 0.0


@dataclass(frozen=True, slots=True)
class Transferred:
    """A transfer between a device and its host, loads or stores.

    Attributes:
      kind: `host_load` or `host_store`.
      sent: bytes over the link, as they lie in the device's memory.
      between: as of `Sent`; updated: an update reads or writes what moves.
    """

    kind: str
    sent: float
    between: Between = ()
    updated: bool = False
    axes: ClassVar[Axes] = (HOST,)  # named in the place of mesh axes
    purpose: ClassVar[str] = ""
    flops: ClassVar[float] = 0.0
    bytes: ClassVar[float] = 0.0


Item = Computed | Called | Started | Sent | Transferred
