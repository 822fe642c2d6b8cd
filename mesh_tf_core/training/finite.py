"""Numbers of a training that must be finite: losses, and the variables that a checkpoint holds.

A step may have a finite loss and gradients that are not. Its variables cannot be trained on, so they are not
saved: whoever resumes finds the checkpoint before. The trained variables and their optimizer state are
checked. Other variables (`trainable=False`, such as a running minimum that begins at infinity) may hold any
numbers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mesh_tf_core.engines.pieces import VariablePiece
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.initializers import Variable

SKIPPED = 20
"""Steps in a row that a loss scale may leave out before the run is given up."""
AT_ONCE = 1 << 18
"""Elements that are checked together, so that intermediate results stay in the processor's cache."""
EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits that are all set in infinite and undefined numbers, for types for which NumPy's own check is six times
slower."""


def is_finite(array: Any) -> bool:
    """True if all elements are finite; of whole numbers they are."""
    flat = np.asarray(array).reshape(-1)
    name = flat.dtype.name
    if not is_float(name):
        return True
    mask = EXPONENT.get(name)
    if mask is not None and flat.flags.c_contiguous:
        bits = flat.view(np.uint16)
        parts = (bits[i : i + AT_ONCE] & mask != mask for i in range(0, bits.size, AT_ONCE))
        return all(bool(part.all()) for part in parts)
    return all(bool(np.isfinite(flat[i : i + AT_ONCE]).all()) for i in range(0, flat.size, AT_ONCE))


def finite_names(variables: Iterable[Variable]) -> frozenset[str]:
    """The variables that must be finite."""
    trained = (v for v in variables if v.trainable or v.slot_of is not None)
    return frozenset(v.name for v in trained if is_float(v.dtype))


class FinitePieces(Mapping[VariablePiece, Any]):
    """Pieces of variables, each checked when it is read, in the thread and process that write it.

    Args:
      names: of the variables that must be finite.
      step: step of the values; todo: the remedy if they are not finite, in words.

    Raises:
      UserError: when a piece with infinite numbers is read.
    """

    def __init__(
        self, pieces: Mapping[VariablePiece, Any], names: frozenset[str], step: int, todo: Callable[[], str]
    ) -> None:
        self._pieces, self._names, self._step, self._todo = pieces, names, step, todo

    def __getitem__(self, piece: VariablePiece) -> Any:
        array = self._pieces[piece]
        if piece.name in self._names and not is_finite(array):
            raise UserError(
                f"step {self._step} is not saved: variable {piece.name!r} contains NaN or infinite "
                "numbers; " + self._todo()
            )
        return array

    def __iter__(self) -> Iterator[VariablePiece]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


class FiniteLoss:
    """Looks at the loss of every step.

    Args:
      scaled: a loss scale skips steps with too large numbers and tries smaller scales.
    """

    def __init__(self, scaled: bool) -> None:
        self.scaled, self._skipped = scaled, 0

    def check(self, step: int, loss: float) -> None:
        """UserError for a loss that is not a finite number, or for too many of them in a row."""
        if math.isfinite(loss):
            self._skipped = 0
            return
        self._skipped += 1
        if self.scaled and self._skipped < SKIPPED:
            return
        tried = f"and in the {SKIPPED - 1} steps before, which the loss scale skipped" if self.scaled else ""
        raise UserError(
            f"the loss is {loss} in step {step}{f', {tried}' if tried else ''}; try a smaller "
            "learning rate, a warm-up, clip_norm in the optimizer, or float32 activations, and check the "
            "batch of that step"
        )
