"""Checks of the arrays that a user feeds and stores, and the rows of a batch that a process feeds."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from mesh_tf_core.engines.ids import Ids, ids_of
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dtypes import is_float, whole_numbers
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.program import Program, Stored, Value
from mesh_tf_core.kernels.array_kernel import np_dtype


class Feeds:
    """Checks a batch against the inputs of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def _ids(self) -> Ids:
        return ids_of(self.program)

    def checked(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The program's inputs as arrays of its dtypes, taken from a batch that may hold more.

        Raises:
          UserError: an input is missing, its shape or kind of number differs from the model's, or it has
            numbers that its dtype cannot represent, or that index no element of a dimension (see `ids`).
        """
        out = {}
        for name, id in self.program.feeds.items():
            out[name] = _fed(name, self.program.values[id], batch)
            if out[name].dtype.kind in "iuf":
                self._ids.check(name, out[name])
        return out


def _fed(name: str, v: Value, batch: Mapping[str, Any]) -> Any:
    """One input as an array of its dtype."""
    if name not in batch:
        raise UserError(f"the batch has no array for the model's input {name!r}; {known_names(name, batch)}")
    array = np.asarray(batch[name])
    if array.shape != v.shape.sizes:
        raise UserError(
            f"input {name!r}: the model was built for shape [{v.shape}], but the array has shape "
            f"{list(array.shape)}; feed an array of the model's shape, or build the model for yours"
        )
    wanted = np_dtype(v.dtype)
    if not are_numbers(array.dtype):
        raise UserError(
            f"input {name!r}: the model expects {v.dtype}, found {array.dtype}; feed an array of real numbers"
        )
    if array.dtype.kind in "fc" and wanted.kind in "iub":
        raise UserError(
            f"input {name!r}: the model expects {v.dtype}, found {array.dtype}; convert the array first"
        )
    if array.dtype.kind in "iu" and wanted.kind in "iu" and array.size:
        _check_width(name, array, wanted)
    return array.astype(wanted, copy=False)


def _check_width(name: str, array: Any, wanted: Any) -> None:
    """UserError if a whole number is outside of a dtype's range, where a cast would wrap it."""
    if np.can_cast(array.dtype, wanted):
        return
    least, most = np.iinfo(wanted).min, np.iinfo(wanted).max
    low, high = array.min(), array.max()
    if low < least or high > most:
        raise UserError(
            f"input {name!r}: the model expects {wanted} ({least} to {most}), found numbers from {low} "
            f"to {high}; feed numbers in the expected range (for hashed ids, take them modulo the size of "
            "their table), or declare the model's input as int64"
        )


def are_numbers(dtype: Any) -> bool:
    """True if a NumPy dtype represents real numbers, including those of ml_dtypes: not complex numbers, text
    or dates."""
    return dtype.kind in "biuf" or (dtype.kind == "V" and dtype.type is not np.void)


def holds(array: Any, dtype: str) -> Any:
    """The numbers of an array that a dtype can represent, bool [n...]: finite ones, rounded to a narrower
    float for floats, and exact otherwise."""
    kind = array.dtype.kind
    with np.errstate(over="ignore", invalid="ignore"):
        if is_float(dtype):
            made = array.astype(np_dtype(dtype), copy=False)
            if kind in "iu":
                wide, limits = made.astype(np.float64), np.iinfo(array.dtype)
                inside = (wide >= limits.min) & (wide < limits.max + 1)
                return inside & (wide.astype(array.dtype) == array)
            return np.isfinite(made.astype(np.float32) if made.itemsize == 2 else made)  # three times as fast
        low, high = whole_numbers(dtype)
        if kind in "biu":
            return (array >= low) & (array <= high)
        wide = array.astype(np.float64)
        return (wide >= low) & (wide < high + 1) & (wide == np.floor(wide))


def stored(program: Program, name: str) -> Stored:
    """A variable by name; UserError if there is none."""
    if name not in program.variables:
        raise UserError(f"there is no variable {name!r}; {known_names(name, program.variables)}")
    return program.variables[name]


def check_array(variable: Variable, array: Any) -> Any:
    """A variable's new value as an array of its dtype; UserError if it has another shape."""
    array = np.asarray(array)
    if array.shape != variable.shape.sizes:
        raise UserError(
            f"variable {variable.name!r} has shape [{variable.shape}], but the array has shape "
            f"{list(array.shape)}; give an array of the variable's shape"
        )
    return array.astype(np_dtype(variable.dtype), copy=False)


def rows_of(program: Program, batch: str, ranks: Iterable[int]) -> Any:
    """Rows along the dimension `batch` that devices read of a program's inputs, int64 [n], ascending.

    In a program with microbatches, the inputs hold the batch in parts, one after the other.
    """
    mesh, ranks = program.mesh, tuple(ranks)
    held = np.zeros(0, bool)
    for id in program.feeds.values():
        v = program.values[id]
        n = v.shape.index(batch) + 1
        sizes = v.local(mesh).shape.sizes[:n]
        read = np.zeros(v.shape.sizes[:n], bool)
        for rank in ranks:
            begins = [mesh.group_index(rank, axes) * s for axes, s in zip(v.splits, sizes, strict=False)]
            read[tuple(slice(b, b + s) for b, s in zip(begins, sizes, strict=True))] = True
        held = read.reshape(-1) | (held if held.size else False)
    return np.flatnonzero(held)


def widened(array: Any, rows: Any, size: int) -> Any:
    """An array of `size` rows with the rows of `array` at the given places; the others are zero, and take no
    memory if there are many."""
    whole = np.zeros((size, *array.shape[1:]), array.dtype)
    whole[rows] = array
    return whole
