"""Files that hold arrays by name: where each lies in them, and how they are written piece by piece.

A safetensors file is a number of 8 bytes, a JSON header of so many bytes (name -> dtype, shape, first byte
and end), and the arrays in row-major order (https://github.com/huggingface/safetensors, "Format"). A .npy
file holds one array, here under the name "", and its checksum covers the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mesh_tf_core.engines.pieces import Piece
from mesh_tf_core.files import create
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.kernels.numpy_kernel import np_dtype

SAFE = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U32": "uint32",
    "I8": "int8",
    "BOOL": "bool",
}
"""The format's names of our element types."""
HEADER = 100_000_000
"""Most bytes of a safetensors header: the format's own limit."""
CHUNK = 1 << 22
"""Bytes that are written or hashed at once."""


@dataclass(frozen=True)
class Place:
    """Where an array lies in a file, in row-major order.

    Attributes:
      offset: of its first byte; hashed: of the first that its checksum covers.
    """

    path: Path
    offset: int
    hashed: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return itemsize(self.dtype) * math.prod(self.shape)

    def mapped(self) -> Any:
        """The array, mapped into memory: what is not looked at is not read."""
        dtype = np_dtype(self.dtype)
        if not self.bytes:
            return np.zeros(self.shape, dtype)
        return np.memmap(self.path, dtype, "r", self.offset, self.shape)

    def sha256(self) -> str:
        """Of what its checksum covers."""
        with self.path.open("rb") as file:
            file.seek(self.hashed)
            return digest(file, self.offset + self.bytes - self.hashed)


def digest(file: BinaryIO, bytes: int) -> str:
    """SHA-256 of the next so many bytes; of fewer, if the file ends."""
    found = hashlib.sha256()
    while bytes and (content := file.read(min(CHUNK, bytes))):
        found.update(content)
        bytes -= len(content)
    return found.hexdigest()


# -- reading -------------------------------------------------------------------------------------------------


def places(path: Path) -> dict[str, Place]:
    """The arrays in a file by name; no array is read.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no such file, or its arrays are not all there; in one line.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path.name} is not a file")
    return {"": _npy(path)} if path.suffix == ".npy" else dict(_safetensors(path))


def _safetensors(path: Path) -> Iterator[tuple[str, Place]]:
    with path.open("rb") as file:
        length = path.stat().st_size
        size = int.from_bytes(file.read(8), "little")
        if size > min(HEADER, length - 8):
            raise ValueError(f"{path.name} has {length} bytes, and a header of {size}")
        try:
            header = json.loads(file.read(size))
            if not isinstance(header, dict):
                raise ValueError("it is no object")
            for name, said in header.items():
                if name != "__metadata__":
                    yield name, _place(path, name, 8 + size, length, said)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{path.name}: its header cannot be read ({why[:200]})") from None


def _place(path: Path, name: str, begin: int, length: int, said: Mapping[str, Any]) -> Place:
    if said["dtype"] not in SAFE:
        raise ValueError(f"{name[:80]!r} is of {str(said['dtype'])[:20]!r}")
    first, end = said["data_offsets"]
    shape = tuple(said["shape"])
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, first, end)):
        raise ValueError(f"{name[:80]!r} has a size that is none")
    found = Place(path, begin + first, begin + first, SAFE[said["dtype"]], shape)
    if end - first != found.bytes or begin + end > length:
        raise ValueError(
            f"{name[:80]!r} has {found.bytes} bytes and lies from {first} to {end} of {length - begin}"
        )
    return found


def _npy(path: Path) -> Place:
    """bfloat16, which the format lacks, is stored as uint16."""
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                shape, turned, dtype = np.lib.format.read_array_header_1_0(file)
            else:
                shape, turned, dtype = np.lib.format.read_array_header_2_0(file)
            found = Place(path, file.tell(), 0, "bfloat16" if dtype == np.uint16 else str(dtype), shape)
            length = found.bytes
        except Exception as error:  # its parser raises many kinds
            raise ValueError(f"{path.name} is no array: {type(error).__name__}") from None
    if turned or found.offset + length != path.stat().st_size:
        raise ValueError(f"{path.name} is {dtype}{list(shape)} and has {path.stat().st_size} bytes")
    return found


# -- writing -------------------------------------------------------------------------------------------------


def header(arrays: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a safetensors file of arrays of these dtypes and shapes, in this order."""
    said, end, names = {}, 0, {dtype: name for name, dtype in SAFE.items()}
    for name, (dtype, shape) in arrays.items():
        begin, end = end, end + itemsize(dtype) * math.prod(shape)
        said[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(said).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def flat(array: Any) -> Any:
    """An array's bytes in row-major order, uint8 [n], without a copy where they lie so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def write_pieces(path: Path, pieces: Mapping[Piece, Any]) -> dict[Piece, str]:
    """Writes pieces of variables to a new safetensors file, on the disk when it returns; SHA-256 of each.

    Each is asked for once and forgotten once it is written. The widest elements come first, so that all are
    aligned.
    """
    order = sorted(pieces, key=lambda piece: -itemsize(piece.dtype))
    with create(path) as file:
        file.write(header({piece.key: (piece.dtype, piece.shape) for piece in order}))
        found = {piece: _put(file, piece, pieces[piece]) for piece in order}
        file.flush()
        os.fsync(file.fileno())
    return found


def _put(file: BinaryIO, piece: Piece, array: Any) -> str:
    content, hashed = flat(np.asarray(array, np_dtype(piece.dtype)).reshape(piece.shape)), hashlib.sha256()
    for begin in range(0, len(content), CHUNK):
        part = content[begin : begin + CHUNK]
        hashed.update(part)
        file.write(part)
    return hashed.hexdigest()
