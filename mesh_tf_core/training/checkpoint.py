"""Checkpoints that no layout is part of, checked by checksums, written atomically by one process or by many.

    step-000000100/
      00000.safetensors ...   the pieces of variables that one process wrote; of a process alone whole ones
      manifest.json           step, extra state; dtype, shape and pieces of every variable, each with its
                              file, place in the variable and SHA-256; and the manifest's own

A checkpoint is written under a temporary name and renamed when all of it is on the disk. A process writes one
piece after the other, and reads of every variable the pieces that its devices hold, so no host needs room
for more than these. What else lies in the directory is somebody else's: only names that are exactly ours are
read, counted or removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh_tf_core.engines.pieces import Begin, Piece, region
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.files import sync_names
from mesh_tf_core.ir.blocks import REPLICA
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.kernels.numpy_kernel import np_dtype
from mesh_tf_core.tracing.meeting import BEFORE
from mesh_tf_core.training import array_files
from mesh_tf_core.training import manifest as manifests
from mesh_tf_core.training.array_files import Place
from mesh_tf_core.training.locking import locked
from mesh_tf_core.training.manifest import MANIFEST, Entry, Manifest, Part

if TYPE_CHECKING:
    from mesh_tf_core.engines import Cluster

STEP = "([0-9]{9}|[1-9][0-9]{9,17})"
NAME = re.compile(f"step-{STEP}")
UNFINISHED = re.compile(rf"\.step-{STEP}\.[0-9a-f]{{1,16}}")
"""Left by a process that was ended while it wrote."""
REPLACED = re.compile(rf"\.step-{STEP}\.replaced")
"""The older one of the same step, for the moment between two renamings."""


class CheckpointWarning(UserWarning):
    """A checkpoint is torn or edited, and an older one is used."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files all agree with their checksums.

    Attributes:
      extra: what the trainer added (the data's position, the layout at the time).
      skipped: newer checkpoints that were passed over, and why.
    """

    path: Path
    step: int
    variables: Mapping[str, Entry]
    extra: Mapping[str, Any]
    skipped: tuple[str, ...] = ()
    _places: dict[str, dict[str, Place]] = field(default_factory=dict, compare=False, repr=False)

    def check_variables(self, variables: Iterable[Variable]) -> None:
        """UserError unless it has these variables."""
        where = str(self.path.parent)
        for variable in variables:
            name, shape = variable.name, variable.shape.sizes
            if name not in self.variables:
                met = f"{variable.slot_of}/{BEFORE}"
                other = "another model"
                if variable.slot_of is not None and name.startswith(met):
                    other = "replicas that met otherwise, or none; train on with the same diloco"
                raise UserError(f"checkpoint {where!r} has no variable {name!r}: it is of {other}")
            there = self.variables[name].shape
            if variable.shape.names[:1] == (REPLICA,) and there[-len(shape) + 1 :] == shape[1:] != shape:
                count = there[0] if len(there) == len(shape) else 0
                if count != shape[0]:
                    raise UserError(
                        f"checkpoint {where!r} is of {count or 'no'} replicas, here are {shape[0]}, each "
                        "with an optimizer state of its own: train on with as many, or begin anew from "
                        "weights (`save_weights`, `load`)"
                    )
            if there[1:] == shape and f"{name}/{BEFORE}" in self.variables:
                raise UserError(
                    f"checkpoint {where!r} is of {there[0]} replicas that meet rarely, here are none: train "
                    "on with their diloco, or begin anew from weights (`save_weights`, `load`)"
                )
            if there != shape:
                raise UserError(
                    f"checkpoint {where!r}: variable {name!r} has shape {there} there, [{variable.shape}] "
                    "here; use the same hyperparameters"
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
                        f"checkpoint {str(self.path)!r}: variable {name!r} cannot be read: {_reason(error)}"
                    ) from None
        return out

    def check(self, mine: Callable[[int], bool] = lambda number: True) -> None:
        """Raises OSError or ValueError unless the files hold what the manifest says: those pieces whose
        numbers are `mine`; others' files must be there too."""
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
                    raise ValueError(f"{said} differs from its checksum in {part.file}")

    def _entry(self, name: str) -> Entry:
        if name not in self.variables:
            raise UserError(
                f"checkpoint {str(self.path)!r} has no variable {name!r}; {known_names(name, self.variables)}"
            )
        return self.variables[name]

    def _place(self, name: str, entry: Entry, part: Part) -> Place:
        """Where a piece lies; the header of a file is read once."""
        if part.file not in self._places:
            self._places[part.file] = array_files.places(self.path / part.file)
        found, key = (
            self._places[part.file],
            Piece(name, entry.dtype, entry.shape, part.begin, entry.part).key,
        )
        if part.file.endswith(".npy"):
            key = ""
        if key not in found:
            raise ValueError(f"{part.file} lacks {key[: manifests.LONGEST]!r}")
        return found[key]


# -- the directory -------------------------------------------------------------------------------------------


def check_directory(directory: str | Path) -> None:
    """Raises UserError unless checkpoints can be written there; makes the directory, and the one around it,
    but none above."""
    if not str(directory):
        raise UserError("checkpoint '' names no directory; write for example build/run")
    root = Path(directory)
    try:
        for folder in (root.parent, root):
            if not folder.is_dir():
                folder.mkdir()
    except FileExistsError as error:
        raise UserError(
            f"checkpoint {str(directory)!r}: {str(error.filename)!r} is a file; name a directory"
        ) from None
    except FileNotFoundError:
        raise UserError(
            f"checkpoint {str(directory)!r} cannot be made: there is no folder "
            f"{str(root.parent.parent)!r}; make it, or name another place"
        ) from None
    except (OSError, ValueError) as error:
        raise unwritable(directory, error) from None
    if not os.access(root, os.W_OK | os.X_OK):
        raise UserError(f"checkpoint {str(directory)!r} cannot be written: permission denied")


@contextlib.contextmanager
def owned(directory: str | Path) -> Iterator[str]:
    """Within it checkpoints can be written there, by this job alone. Yields why the directory cannot be
    locked, or nothing.

    Raises:
      UserError: it cannot be written, or another job writes there.
    """
    check_directory(directory)
    with contextlib.ExitStack() as stack:
        try:
            trouble = stack.enter_context(locked(directory))
        except OSError as error:
            raise unwritable(directory, error) from None
        yield trouble


def unwritable(directory: str | Path, error: Exception) -> UserError:
    """What the system said, as the user's error."""
    said, todo = (
        (error.strerror if isinstance(error, OSError) else None) or error,
        "give a directory with room",
    )
    if isinstance(error, FileNotFoundError):
        said, todo = "its folder was removed", "leave it, or give another directory"
    left = listed(directory)
    kept = f"; {left[0][1].name} is still there" if left else ""
    return UserError(f"checkpoint {str(directory)!r} cannot be written: {said}; {todo}{kept}")


def listed(directory: str | Path) -> list[tuple[int, Path]]:
    """Steps and paths of the checkpoints in a directory, the newest first, whole or not."""
    ours = {}
    for pattern in (REPLACED, NAME):  # the later one stands
        for path in _entries(Path(directory)):
            if found := pattern.fullmatch(path.name):
                ours[int(found[1])] = path
    return sorted(ours.items(), reverse=True)


def _entries(root: Path) -> list[Path]:
    """The directories in a directory; a link is somebody's own."""
    try:
        with os.scandir(root) as found:
            return [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]
    except (OSError, ValueError):
        return []


def _tidy(root: Path) -> None:
    """Removes what ended processes left; what one had put aside gets its name again."""
    for path in _entries(root):
        if found := REPLACED.fullmatch(path.name):
            named = root / f"step-{found[1]}"
            if not named.exists():
                path.rename(named)
                continue
        if found or UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


# -- writing -------------------------------------------------------------------------------------------------

Written = list[dict[str, Any]]
"""Plain data: of every piece that a process wrote its file, its checksum and which it is."""


def write(
    directory: str | Path, step: int, pieces: Mapping[Piece, Any], extra: Mapping[str, Any], keep: int = 3
) -> Path:
    """Writes `step-N` and removes all but the newest `keep`. Only one job may do so at a time (`locking`).

    Args:
      pieces: see `array_files.write_pieces`; together they are whole variables.
      extra: plain data (what JSON holds).

    Raises:
      OSError: it cannot be written; what was there is there, and nothing else.
    """
    with beginning(directory, step) as folder:
        return finish(folder, step, write_pieces(folder, 0, pieces), extra, keep)


@contextlib.contextmanager
def beginning(directory: str | Path, step: int) -> Iterator[Path]:
    """A folder for the files of a checkpoint; if it has not got its name (`finish`), it is removed."""
    root = Path(directory)
    root.mkdir(exist_ok=True)
    _tidy(root)
    folder = root / f".{_named(step)}.{secrets.token_hex(8)}"
    folder.mkdir()
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _named(step: int) -> str:
    return f"step-{step:09d}"


def write_pieces(folder: Path, process: int, pieces: Mapping[Piece, Any]) -> Written:
    """Writes what one process writes of a checkpoint; what `finish` must know of it."""
    if not pieces:
        return []
    file = f"{process:05d}.safetensors"
    sums = array_files.write_pieces(folder / file, pieces)
    return [{**asdict(piece), "file": file, "sha256": found} for piece, found in sums.items()]


def finish(folder: Path, step: int, written: Iterable[Any], extra: Mapping[str, Any], keep: int = 3) -> Path:
    """Gives a checkpoint its name, once all processes have written their pieces, and removes old ones."""
    found: dict[str, list[Any]] = {}
    for one in written:
        found.setdefault(one["name"], []).append(one)
    variables = {
        name: Entry(
            dtype=ones[0]["dtype"],
            shape=tuple(ones[0]["whole"]),
            part=tuple(ones[0]["shape"]),
            parts=tuple(Part(file=o["file"], sha256=o["sha256"], begin=tuple(o["begin"])) for o in ones),
        )
        for name, ones in found.items()
    }
    manifests.write(folder / MANIFEST, Manifest(step=step, variables=variables, extra=dict(extra)))
    sync_names(folder)
    root = folder.parent
    final = root / _named(step)
    if final.exists():
        final.rename(root / f".{final.name}.replaced")
    folder.rename(final)
    sync_names(root)
    _tidy(root)
    others = [path for _, path in listed(root) if path != final]
    for old in others[max(0, keep - 1) :]:
        shutil.rmtree(old, ignore_errors=True)
    return final


# -- reading -------------------------------------------------------------------------------------------------


def newest(directory: str | Path, cluster: Cluster | None = None) -> Checkpoint | None:
    """The newest whole checkpoint, every file checked; torn or edited ones are named in `skipped`.

    None if there is no checkpoint at all.

    Args:
      cluster: processes that all ask for it, and share the checking.

    Raises:
      UserError: there are checkpoints, and none is whole.
      ClusterError: processes see other checkpoints.
    """
    skipped: list[str] = []
    found = listed(directory)
    if cluster is not None:
        names = ", ".join(path.name for _, path in found)
        cluster.same(f"what lies in {directory}", names)
    for step, path in found:
        opened, why = _checked(path, step, cluster)
        if opened is not None:
            return replace(opened, skipped=tuple(skipped))
        skipped.append(f"{path.name}: {why}")
    if skipped:
        raise UserError(
            f"checkpoint {str(directory)!r}: no whole checkpoint in it ({'; '.join(skipped)}); "
            "give another directory, or remove this one to start anew"
        )
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name} cannot be read ({error.strerror})"
    return " ".join(str(error).split())


def _checked(path: Path, step: int, cluster: Cluster | None) -> tuple[Checkpoint | None, str]:
    """A checkpoint that is whole, or why it is not; the same for all processes."""
    own, count = (0, 1) if cluster is None else (cluster.index, cluster.processes)
    opened, why = None, ""
    try:
        manifest = manifests.read(path / MANIFEST)
        if manifest.step != step:
            raise ValueError(f"{MANIFEST} says step {manifest.step}")
        opened = Checkpoint(path, step, manifest.variables, manifest.extra)
        opened.check(lambda number: number % count == own)
    except (OSError, ValueError) as error:
        why = _reason(error)
    if cluster is not None:
        why = next(filter(None, cluster.gather(f"checking {path.name}", why, patient=True)), "")
    return (None if why else opened), why
