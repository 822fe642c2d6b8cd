"""Element types by name, with their sizes; and the type of a tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.tables import pairs

_BYTES = "float64:8 float32:4 bfloat16:2 float16:2 int64:8 int32:4 uint32:4 int8:1 bool:1"
_SIZES = {name: int(size) for name, size in pairs(_BYTES).items()}
DTYPES = tuple(_SIZES)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
"""The dtypes for factors of products only (`mtf.float8_einsum`): nothing else is computed or stored in
them."""
FLOATS = ("float64", "float32", "bfloat16", "float16")
INTEGERS = tuple(name for name in DTYPES if name not in (*FLOATS, "bool"))
_EIGHT_BITS = re.compile("float8|fp8|f8|e4m3|e5m2")


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return 1 if dtype in FLOAT8 else _SIZES[check_dtype(dtype)]


def check_dtype(dtype: str) -> str:
    """Returns `dtype`, or raises UserError if it is not an element type."""
    if dtype not in _SIZES:
        name = "bf16" if _EIGHT_BITS.search(str(dtype).lower()) else str(dtype)
        raise UserError(f"dtype {dtype!r} is not supported; {known_names(name, _SIZES)}")
    return dtype


def is_float(dtype: str) -> bool:
    """True if `dtype` has fractions."""
    return dtype in FLOATS


def whole_numbers(dtype: str) -> tuple[int, int]:
    """The least and the largest number of a dtype without fractions."""
    if dtype == "bool":
        return 0, 1
    bits = 8 * itemsize(dtype)
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def promote(a: str, b: str) -> str:
    """The dtype of an operation between two operands; only equal dtypes mix, and others need an explicit
    cast."""
    if a != b:
        raise UserError(f"operands have dtypes {a} and {b}; cast one of them explicitly with mtf.cast")
    return a


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a tensor, or of its shard on one device."""

    shape: Shape
    dtype: str

    @property
    def bytes(self) -> int:
        return self.shape.size * itemsize(self.dtype)

    @property
    def places(self) -> TensorType:
        """The type of the array that holds it."""
        shape = self.shape.places
        return self if shape is self.shape else TensorType(shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{self.shape}]"
