"""Arrays that are given to a model: they never change, and compare by their elements."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dtypes import DTYPES, is_float, whole_numbers

_OWN = ("float32", "bfloat16", "float16", "uint32", "int8", "bool")
"""Element types that an array keeps unless it is asked for in another."""


class FixedArray:
    """An array that cannot be changed: a copy, unless the given array is read-only."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        if self.array.flags.writeable:
            self.array = self.array.copy()
            self.array.setflags(write=False)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of type, shape and elements."""
        a = self.array
        held = hashlib.sha256(f"{a.dtype} {a.shape}".encode())
        held.update(a.tobytes())
        return held.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedArray) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return self.digest[:12]

    def __deepcopy__(self, memo: Any) -> FixedArray:
        return self


def numbers(what: str, given: Any) -> Any:
    """Numbers or truth values as an array; UserError, which names `what`, for anything else."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise UserError(
            f"{what}: the value cannot be converted to an array ({error}); give nested lists of equal "
            "lengths, or an array"
        ) from None
    if str(array.dtype) not in DTYPES and array.dtype.kind not in "fiu":
        raise UserError(
            f"{what}: expected an array of numbers, found dtype {array.dtype}, shape {array.shape}"
        )
    return array


def usual_dtype(array: Any) -> str:
    """The default element type of an array in a model: float32 for float64, int32 for integers that it can
    represent."""
    name = str(array.dtype)
    if name in _OWN:
        return name
    if array.dtype.kind == "f":
        return "float32"
    low, high = whole_numbers("int32")
    return "int32" if not array.size or (array.min() >= low and array.max() <= high) else "int64"


def check_numbers(what: str, array: Any, dtype: str) -> None:
    """UserError if an element is not a number of a dtype: a fraction is never cut off."""
    if is_float(dtype) or not array.size:
        return
    low, high = whole_numbers(dtype)
    wide = array.astype(np.float64) if array.dtype.kind not in "iub" else array
    wrong = wide[(wide != np.floor(wide)) | (wide < low) | (wide > high)]
    if wrong.size:
        raise UserError(f"{what}: {dtype} cannot represent {wrong.flat[0]}; choose another dtype")
