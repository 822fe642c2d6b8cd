"""The schema of a checkpoint's manifest. Nothing in it is believed before all of it is checked."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mesh_tf_core.errors import UserError
from mesh_tf_core.faults import at_path
from mesh_tf_core.files import create
from mesh_tf_core.ir.dtypes import DTYPES
from mesh_tf_core.reading import read_file

FORMAT = "layoutopt-checkpoint/3"
MANIFEST = "manifest.json"
LARGEST = 1 << 32
"""Bytes of a manifest, written or read: some 30 million pieces."""
LONGEST = 80
"""Characters of a manifest's texts that a refusal repeats."""
LAST = 10**18
"""An upper limit of steps in any training."""

if TYPE_CHECKING:
    Dtype = str
else:
    Dtype = Literal[DTYPES]
StoredSize = Annotated[int, Field(ge=0, lt=1 << 48)]
StoredSizes = Annotated[tuple[StoredSize, ...], Field(max_length=32, strict=False)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class PieceFile(BaseModel):
    """A piece of a variable: its file, where it begins in the variable, and the SHA-256 of its bytes."""

    model_config = ConfigDict(strict=True, frozen=True)

    file: Annotated[str, Field(pattern=r"^[0-9]{5,9}\.safetensors$")]
    sha256: Digest
    begin: StoredSizes


class ManifestEntry(BaseModel):
    """A variable, in pieces of one shape that fill it as tiles do."""

    model_config = ConfigDict(strict=True, frozen=True)

    dtype: Dtype
    shape: StoredSizes
    part: StoredSizes
    parts: Annotated[tuple[PieceFile, ...], Field(min_length=1, strict=False)]

    @model_validator(mode="after")
    def _fills(self) -> Self:
        begins, sizes = [part.begin for part in self.parts], self.part
        if 0 in self.shape:
            fills = sizes == self.shape and begins == [(0,) * len(sizes)]
        else:
            fills = len(sizes) == len(self.shape) and all(
                size and not whole % size for whole, size in zip(self.shape, sizes, strict=True)
            )
            if fills:
                counts = [whole // size for whole, size in zip(self.shape, sizes, strict=True)]
                fills = math.prod(counts) == len(begins) and {*begins} == {
                    tuple(n * size for n, size in zip(at, sizes, strict=True))
                    for at in itertools.product(*map(range, counts))
                }
        if not fills:
            raise ValueError(
                f"{len(begins)} pieces of shape {list(sizes)} do not fill shape {list(self.shape)}"
            )
        return self


class Manifest(BaseModel):
    """A manifest. `extra` is the trainer's (the data's position, the mesh and the layout at the time)."""

    model_config = ConfigDict(strict=True, frozen=True)

    format: str = FORMAT
    step: Annotated[int, Field(ge=0, lt=LAST)]
    variables: dict[str, ManifestEntry]
    extra: dict[str, Any]


def write(path: Path, manifest: Manifest) -> None:
    """Writes the file, which is new, with a digest of all of it. The folder around it gets its name when all
    of it is there.

    Raises:
      OSError: it cannot be written.
      UserError: it would be larger than readers accept.
    """
    plain = {
        **manifest.model_dump(),
        "extra": json.loads(json.dumps(manifest.extra)),
    }  # keys as they are read
    content = json.dumps({**plain, "sha256": _digest(plain)}).encode()
    if len(content) > LARGEST:
        parts = sum(len(entry.parts) for entry in manifest.variables.values())
        raise UserError(
            f"step {manifest.step} is not saved: its {parts:,} pieces of variables are too many for a "
            "manifest; save from fewer processes, or stack equal layers"
        )
    with create(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Manifest:
    """The manifest of a file.

    Raises:
      OSError: it cannot be read.
      ValueError: it is damaged, or of another format; in one line.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    try:
        plain = json.loads(read_file(path, LARGEST))
        if not isinstance(plain, Mapping):
            raise ValueError(f"{path.name} must contain a JSON object, found {type(plain).__name__}")
        said = plain.get("format", FORMAT)
        if said != FORMAT:
            raise ValueError(f"{path.name} has format {str(said)[:LONGEST]!r} instead of {FORMAT!r}")
        for name in ("format", "sha256"):
            if name not in plain:
                raise ValueError(f"{path.name} lacks {name!r}")
        manifest = Manifest.model_validate(plain)
        if plain["sha256"] != _digest(plain):
            raise ValueError(f"{path.name} does not match its checksum")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:LONGEST]
        raise ValueError(f"{path.name}: {at_path(repr(where), first['msg'])}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{path.name} is nested too deeply, or too large") from None
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
