"""The work of an operation on one device beyond its FLOPs and the types of its operands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """The work on one device's pieces.

    Attributes:
      product: (batch, m, n, k) of the matrix product that the operation is; None: it is none.
      overhead: FLOPs that the model does not need: repeated work of another operation, and what
        `Einsum.needed` leaves out.
      added: rows and width of the partial results that it adds up, one product after the other: of a
        convolution, places times taps, and channels; None: there are none.
      blocked: FLOPs of the matrix unit and operations of the vector unit that take turns in a kernel that
        works on blocks, and elements of operands and results that are made ready for it; None: it is no such
        kernel.
    """

    product: tuple[int, int, int, int] | None = None
    overhead: float = 0.0
    added: tuple[int, int] | None = None
    blocked: tuple[float, float, float] | None = None


NO_PRODUCT = Work()
