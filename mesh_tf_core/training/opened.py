"""A checkpoint for reading: piece by piece, and only what is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mesh_tf_core.engines.pieces import Begin, VariablePiece, region
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import REPLICA
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.tracing.replicas import BEFORE
from mesh_tf_core.training import array_files
from mesh_tf_core.training import manifest as manifests
from mesh_tf_core.training.array_files import ArrayLocation
from mesh_tf_core.training.finite import is_finite
from mesh_tf_core.training.manifest import MANIFEST, ManifestEntry, PieceFile


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files all match their checksums.

    Attributes:
      extra: data of the trainer (the position of the data, the layout).
      skipped: newer checkpoints that were passed over, and why; aside: that have another name now.
    """

    path: Path
    step: int
    variables: Mapping[str, ManifestEntry]
    extra: Mapping[str, Any]
    skipped: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()
    _places: dict[str, dict[str, ArrayLocation]] = field(default_factory=dict, compare=False, repr=False)

    def check_variables(self, variables: Iterable[Variable]) -> None:
        """UserError unless it has these variables."""
        where = str(self.path.parent)
        for variable in variables:
            name, shape = variable.name, variable.shape.sizes
            if name not in self.variables:
                met = f"{variable.slot_of}/{BEFORE}"
                other = "another model or optimizer; use the same ones"
                if variable.slot_of is not None and name.startswith(met):
                    other = "a run with other diloco settings; resume with the same settings"
                raise UserError(f"checkpoint {where!r} has no variable {name!r}: it was saved by {other}")
            there = self.variables[name].shape
            if variable.shape.names[:1] == (REPLICA,) and there[-len(shape) + 1 :] == shape[1:] != shape:
                count = there[0] if len(there) == len(shape) else 0
                if count != shape[0]:
                    raise UserError(
                        f"checkpoint {where!r} was saved by {count or 'no'} replicas, but this training "
                        f"has {shape[0]}, and each replica has its own optimizer state; use the same "
                        "number of replicas, or start from the weights only (`save_weights`, `load`)"
                    )
            if there[1:] == shape and f"{name}/{BEFORE}" in self.variables:
                raise UserError(
                    f"checkpoint {where!r} was saved by {there[0]} replicas (diloco), but this training "
                    "has none; resume with the same diloco, or start from the weights only "
                    "(`save_weights`, `load`)"
                )
            if there != shape:
                raise UserError(
                    f"checkpoint {where!r}: variable {name!r} has shape {list(there)} in the checkpoint, "
                    f"but [{variable.shape}] in the model; use the hyperparameters of the saved model"
                )

    def read(self, name: str) -> Any:
        """A whole variable."""
        shape = self._entry(name).shape
        return self.part(name, (0,) * len(shape), shape)

    def part(self, name: str, begin: Begin, shape: Sequence[int]) -> Any:
        """A piece of a variable, put together from the pieces that lie in files; nothing else is read."""
        entry = self._entry(name)
        out = np.empty(tuple(shape), np_dtype(entry.dtype))
        for part in entry.parts:
            low = tuple(map(max, begin, part.begin))
            ends = ((b + n, p + m) for b, n, p, m in zip(begin, shape, part.begin, entry.part, strict=True))
            common = [min(end) - at for end, at in zip(ends, low, strict=True)]
            if all(size > 0 for size in common):
                here, there = (
                    region([at - b for at, b in zip(low, first, strict=True)], common)
                    for first in (begin, part.begin)
                )
                try:
                    found = self._place(name, entry, part).mapped()
                    out[here] = found[there]
                except (OSError, ValueError) as error:  # since it was checked
                    raise UserError(
                        f"checkpoint {str(self.path)!r}, variable {name!r}: {reason(error)}; resume from an "
                        "earlier checkpoint"
                    ) from None
        return out

    def check(
        self, mine: Callable[[int], bool] = lambda number: True, finite: Collection[str] = frozenset()
    ) -> None:
        """Raises OSError or ValueError unless the files match the manifest, and the variables `finite`
        contain only finite numbers. Checks the pieces with numbers in `mine`; the files of others must exist
        too."""
        number = 0
        for name, entry in self.variables.items():
            said = f"variable {name[: manifests.LONGEST]!r}"
            for part in entry.parts:
                place = self._place(name, entry, part)
                if (place.dtype, place.shape) != (entry.dtype, entry.part):
                    raise ValueError(
                        f"{said} is {entry.dtype}{list(entry.part)} in {MANIFEST}, "
                        f"{place.dtype}{list(place.shape)} in {part.file}"
                    )
                number += 1
                if mine(number) and place.sha256() != part.sha256:
                    raise ValueError(f"{said} in {part.file} does not match its checksum")
                if mine(number) and name in finite and not is_finite(place.mapped()):
                    raise ValueError(f"{said} contains NaN or infinite numbers")

    def _entry(self, name: str) -> ManifestEntry:
        if name not in self.variables:
            raise UserError(
                f"checkpoint {str(self.path)!r} has no variable {name!r}; {known_names(name, self.variables)}"
            )
        return self.variables[name]

    def _place(self, name: str, entry: ManifestEntry, part: PieceFile) -> ArrayLocation:
        """Where a piece lies; the header of a file is read once."""
        if part.file not in self._places:
            path = self.path / part.file
            if path.is_symlink():
                raise ValueError(f"{part.file} is a symbolic link")
            self._places[part.file] = array_files.places(path)
        found = self._places[part.file]
        key = VariablePiece(name, entry.dtype, entry.shape, part.begin, entry.part).key
        if key not in found:
            raise ValueError(f"{part.file} lacks {key[: manifests.LONGEST]!r}")
        return found[key]


def reason(error: Exception) -> str:
    """Why a file of a checkpoint cannot be read, in one line."""
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name} cannot be read ({error.strerror})"
    return " ".join(str(error).split())
