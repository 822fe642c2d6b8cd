"""Files with named arrays: the place of each array, and writing piece by piece.

A safetensors file is an 8-byte length, a JSON header of this length (name -> dtype, shape, first byte and
end), and the arrays in row-major order, one after the other: the format allows no gap between them, no
overlap and no surplus (https://github.com/huggingface/safetensors, "Format"). A .npz file is a zip archive of
.npy files.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import weakref
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from mesh_tf_core.engines.pieces import VariablePiece
from mesh_tf_core.files import create
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.reading import opened

SAFE = {
    **{f"F{bits}": f"float{bits}" for bits in (64, 32, 16)},
    **{
        f"{k}{bits}": f"{name}{bits}" for k, name in (("I", "int"), ("U", "uint")) for bits in (64, 32, 16, 8)
    },
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}
"""Element types by the format's names; NumPy lacks the others (such as those of less than 8 bits)."""
HEADER = 100_000_000
"""Most bytes of a safetensors header: the format's own limit."""
NPY_HEADER = 1 << 16
"""Most bytes of a .npy header; it needs about a hundred."""
CHUNK = 1 << 22
"""Bytes that are written or hashed at once."""


@dataclass(frozen=True)
class ArrayLocation:
    """The location of an array in a file, in row-major order: `offset` is that of its first byte."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(np_dtype(self.dtype).itemsize) * math.prod(self.shape)

    def mapped(self) -> Any:
        """The array, mapped into memory: only accessed parts are read."""
        dtype = np_dtype(self.dtype)
        if not self.bytes:
            return np.zeros(self.shape, dtype)
        with opened(self.path) as file:
            return np.memmap(file, dtype, "r", self.offset, self.shape)

    def sha256(self) -> str:
        """The SHA-256 of its bytes, or of fewer where the file ends."""
        found, left = hashlib.sha256(), self.bytes
        with opened(self.path) as file:
            file.seek(self.offset)
            while left and (content := file.read(min(CHUNK, left))):
                found.update(content)
                left -= len(content)
        return found.hexdigest()


# -- reading -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _parsing(what: str) -> Iterator[None]:
    """Parsers of damaged bytes raise errors of many kinds; here all are a ValueError of one line."""
    try:
        yield
    except Exception as error:
        kind = "" if type(error) is ValueError else type(error).__name__
        why = " ".join(f"{kind} {error}".split())
        raise ValueError(f"{what} cannot be read ({why[:200]})") from None


def places(path: Path) -> dict[str, ArrayLocation]:
    """The arrays in a safetensors file by name; no array is read.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no such file, or its arrays are not all there; in one line.
    """
    with opened(path) as file:
        length = path.stat().st_size
        size = int.from_bytes(file.read(8), "little")
        if size > min(HEADER, length - 8):
            raise ValueError(f"{path.name} has only {length} bytes, too few for a header of {size}")
        with _parsing(f"{path.name}: its header"):
            header = json.loads(file.read(size).decode(), object_pairs_hook=_once, parse_constant=_refuse)
            if not isinstance(header, dict):
                raise ValueError("the JSON value is not an object")
            about = header.pop("__metadata__", None) or {}
            "".join([*header, *about, *about.values()]).encode()  # all are text
            found = {name: _place(path, name, 8 + size, said) for name, said in header.items()}
        end = 8 + size
        for name, place in sorted(found.items(), key=lambda each: (each[1].offset, each[1].bytes)):
            if place.offset != end:
                raise ValueError(
                    f"{path.name}: {name[:80]!r} begins at byte {place.offset} instead of byte {end}"
                )
            end += place.bytes
        if end != length:
            raise ValueError(f"{path.name} has {length} bytes, but its arrays end at byte {end}")
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; the format forbids to name an array twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not valid JSON")


def _place(path: Path, name: str, begin: int, said: Mapping[str, Any]) -> ArrayLocation:
    if said["dtype"] not in SAFE:
        raise ValueError(f"{name[:80]!r} has the unsupported dtype {str(said['dtype'])[:20]!r}")
    first, end = said["data_offsets"]
    shape = tuple(said["shape"])
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, first, end)):
        raise ValueError(f"{name[:80]!r} has an invalid size")
    found = ArrayLocation(path, begin + first, SAFE[said["dtype"]], shape)
    if end - first != found.bytes:
        raise ValueError(
            f"{name[:80]!r} needs {found.bytes} bytes, but its data_offsets are {first} to {end}"
        )
    return found


@dataclass(frozen=True)
class Zipped:
    """An array in a .npz file."""

    archive: zipfile.ZipFile
    entry: zipfile.ZipInfo
    dtype: Any
    shape: tuple[int, ...]

    def read(self) -> Any:
        """The array; ValueError, in one line, if it is damaged or takes more memory than there is."""
        with _parsing(f"{self.entry.filename!r}"), self.archive.open(self.entry) as file:
            return np.lib.format.read_array(file, allow_pickle=False)


def zipped(path: Path) -> dict[str, Zipped]:
    """The arrays in a .npz file by name; no array is read, however many bytes they are.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no such file, or its arrays are not all there; in one line.
    """
    found, file = {}, opened(path)
    with _parsing(path.name), contextlib.ExitStack() as failed:
        failed.callback(file.close)
        archive = zipfile.ZipFile(file)
        if min(entry.header_offset for entry in archive.infolist()) != 0:
            raise ValueError("the first array does not start at byte 0")
        entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
        for name, entry in _once([(entry.filename.removesuffix(".npy"), entry) for entry in entries]).items():
            with archive.open(entry) as stored:
                head = io.BytesIO(stored.read(NPY_HEADER))
                read = read_array_header_1_0 if read_magic(head) == (1, 0) else read_array_header_2_0
                shape, _, dtype = read(head)
            if not all(type(number) is int and 0 <= number < 1 << 62 for number in shape):
                raise ValueError(f"the shape {shape} is invalid")
            # Then reading the array reads all of the entry, which checks its checksum.
            if not dtype.hasobject and head.tell() + dtype.itemsize * math.prod(shape) != entry.file_size:
                raise ValueError(
                    f"{name[:80]!r} has {entry.file_size} bytes, which do not fit an array "
                    f"{dtype}{list(shape)}"
                )
            found[name] = Zipped(archive, entry, dtype, shape)
        weakref.finalize(archive, failed.pop_all().close)
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


def write_npz(file: BinaryIO, arrays: Iterable[tuple[str, Any]]) -> None:
    """Writes a .npz file as `np.savez` does, which takes all arrays at once; of these, one is held at a
    time."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array, order="C"), allow_pickle=False)


def flat(array: Any) -> Any:
    """An array's bytes in row-major order, uint8 [n], without a copy where they lie so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def write_pieces(path: Path, pieces: Mapping[VariablePiece, Any]) -> dict[VariablePiece, str]:
    """Writes pieces of variables to a new safetensors file, on the disk when it returns; SHA-256 of each.

    Each is read once and released after it is written. The widest elements come first, so that all are
    aligned.
    """
    order = sorted(pieces, key=lambda piece: -itemsize(piece.dtype))
    with create(path) as file:
        file.write(header({piece.key: (piece.dtype, piece.shape) for piece in order}))
        found = {piece: _put(file, piece, pieces[piece]) for piece in order}
        file.flush()
        os.fsync(file.fileno())
    return found


def _put(file: BinaryIO, piece: VariablePiece, array: Any) -> str:
    content, hashed = flat(np.asarray(array, np_dtype(piece.dtype)).reshape(piece.shape)), hashlib.sha256()
    for begin in range(0, len(content), CHUNK):
        part = content[begin : begin + CHUNK]
        hashed.update(part)
        file.write(part)
    return hashed.hexdigest()
