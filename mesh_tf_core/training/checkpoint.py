"""Checkpoints that no layout is part of, checked by checksums, written atomically by one process or by many.

    step-000000100/
      00000.safetensors ...   the pieces of variables that one process wrote; of a process alone whole ones
      manifest.json           step, extra state; dtype, shape and pieces of every variable, each with its
                              file, place in the variable and SHA-256; and the manifest's own

A checkpoint is written under a temporary name and renamed when all of it is on the disk, and every file that
its manifest names was found there, of its size. Older checkpoints are removed only then. A process writes one
piece after the other, and reads of every variable the pieces that its devices hold, so no host needs room for
more than these.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_tf_core.engines.pieces import VariablePiece
from mesh_tf_core.errors import UserError
from mesh_tf_core.files import sync_names
from mesh_tf_core.training import array_files
from mesh_tf_core.training import manifest as manifests
from mesh_tf_core.training.folders import check_directory, listed, make, named, owned, tidy, unwritable
from mesh_tf_core.training.manifest import MANIFEST, Manifest, ManifestEntry, PieceFile
from mesh_tf_core.training.opened import Checkpoint, reason

if TYPE_CHECKING:
    from mesh_tf_core.engines import Cluster

__all__ = ["Checkpoint", "check_directory", "listed", "newest", "owned", "unwritable", "write"]

ASIDE = ".aside"
"""Suffix of a checkpoint that is newer than the one chosen for resuming; it now belongs to the user."""


class CheckpointWarning(UserWarning):
    """A checkpoint is torn or edited and an older one is used, or its directory's lock is not as it was."""


# -- writing -------------------------------------------------------------------------------------------------

WrittenPieces = list[dict[str, Any]]
"""Plain data: of every piece that a process wrote its file, its checksum and which it is."""


def write(
    directory: str | Path,
    step: int,
    pieces: Mapping[VariablePiece, Any],
    extra: Mapping[str, Any],
    keep: int = 3,
    mode: int | None = None,
) -> Path:
    """Writes `step-N` and removes all but the newest `keep`. Only one job may do so at a time (`locking`).

    Args:
      pieces: see `array_files.write_pieces`; together they are whole variables.
      extra: plain JSON data.
      mode: of the folder; None: decided by the umask.

    Raises:
      OSError: it cannot be written; existing files are unchanged and no other files remain.
    """
    with beginning(directory, step, mode) as folder:
        return finish(folder, step, write_pieces(folder, 0, pieces), extra, keep)


@contextlib.contextmanager
def beginning(directory: str | Path, step: int, mode: int | None = None) -> Iterator[Path]:
    """A folder for the files of a checkpoint; if it has not got its name (`finish`), it is removed. Its files
    get its mode (`files.create`)."""
    root = Path(directory)
    root.mkdir(exist_ok=True)
    tidy(root)
    folder = root / f".{named(step)}.{secrets.token_hex(8)}"
    make(folder, mode)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write_pieces(folder: Path, process: int, pieces: Mapping[VariablePiece, Any]) -> WrittenPieces:
    """Writes one process's pieces of a checkpoint; returns the data that `finish` needs."""
    if not pieces:
        return []
    file = f"{process:05d}.safetensors"
    sums = array_files.write_pieces(folder / file, pieces)
    return [{**asdict(piece), "file": file, "sha256": found} for piece, found in sums.items()]


def finish(folder: Path, step: int, written: Iterable[Any], extra: Mapping[str, Any], keep: int = 3) -> Path:
    """Gives a checkpoint its name, once all processes have written their pieces, and removes old ones.

    Raises:
      OSError: it cannot be written.
      UserError: a written file is missing. No checkpoint is removed.
    """
    manifest = Manifest(step=step, variables=_entries_of(step, written), extra=dict(extra))
    manifests.write(folder / MANIFEST, manifest)
    sync_names(folder)
    try:
        _look(folder, step)
    except (OSError, ValueError) as error:
        raise UserError(
            f"step {step} is not saved: {reason(error)}, although every process reported that it had written "
            "its part (earlier checkpoints are kept); check that all processes use the same file system"
        ) from None
    root = folder.parent
    final = root / named(step)
    if final.exists():
        final.rename(root / f".{final.name}.replaced")
    folder.rename(final)
    sync_names(root)
    tidy(root)
    _prune(root, final, keep)
    return final


def _entries_of(step: int, written: Iterable[Any]) -> dict[str, ManifestEntry]:
    """The manifest's variables, of what processes said that they wrote."""
    found: dict[str, list[Any]] = {}
    try:
        for one in written:
            found.setdefault(one["name"], []).append(one)
        return {
            name: ManifestEntry(
                dtype=ones[0]["dtype"],
                shape=tuple(ones[0]["whole"]),
                part=tuple(ones[0]["shape"]),
                parts=tuple(
                    PieceFile(file=o["file"], sha256=o["sha256"], begin=tuple(o["begin"])) for o in ones
                ),
            )
            for name, ones in found.items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"step {step} is not saved: a process sent an invalid report of its pieces "
            f"({' '.join(str(error).split())[:200]}); start all processes with the same version of layoutopt"
        ) from None


def _prune(root: Path, newest: Path, keep: int) -> None:
    """Removes old checkpoints, so that `keep` are left whose files are there, the newest among them. One that
    is torn is not counted: of whole ones as many are kept."""
    left = keep - 1
    for step, path in listed(root):
        if path == newest:
            continue
        if left <= 0:
            shutil.rmtree(path, ignore_errors=True)
            continue
        with contextlib.suppress(OSError, ValueError):
            _look(path, step)
            left -= 1


_seen: collections.deque[frozenset[tuple[int | str, ...]]] = collections.deque(maxlen=32)
"""Files of checkpoints that this process found whole: reading a manifest of 1,000 variables takes 50 ms."""


def _look(path: Path, step: int) -> None:
    """Raises OSError or ValueError unless a checkpoint's files are there, of their sizes. Those that have not
    changed since they were looked at are not read again."""
    with os.scandir(path) as entries:
        files = frozenset(
            (e.name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)
            for e in entries
            for s in (e.stat(follow_symlinks=False),)
        )
    if files not in _seen:
        # Every file is there and of its size; no checksum is computed.
        _opened(path, step, lambda _: False)
        _seen.append(files)


# -- reading -------------------------------------------------------------------------------------------------


def newest(
    directory: str | Path, cluster: Cluster | None = None, finite: Collection[str] = frozenset()
) -> Checkpoint | None:
    """The newest whole checkpoint, after a check of every file; incomplete or edited ones, and those that
    cannot be resumed, are named in `skipped`.

    None if there is no checkpoint at all.

    Args:
      cluster: processes that all call this function and share the check.
      finite: variables that must be finite.

    Raises:
      UserError: there are checkpoints, and none is whole.
      ClusterError: processes see other checkpoints.
    """
    return _first(directory, listed(directory), cluster, finite)


def of_step(
    directory: str | Path, step: int, cluster: Cluster | None = None, finite: Collection[str] = frozenset()
) -> Checkpoint:
    """The checkpoint of a step, after a check of every file; newer ones get other names (`ASIDE`) and no
    longer count.

    Args:
      cluster, finite: see `newest`. The process that writes checkpoints renames.

    Raises:
      UserError: there is none, or it is not whole.
      ClusterError: processes see other checkpoints.
    """
    there = listed(directory)
    found = _first(directory, [one for one in there if one[0] == step], cluster, finite)
    if found is None:
        steps = ", ".join(str(one) for one, _ in there[::-1])
        raise UserError(
            f"checkpoint {str(directory)!r}: resume={step}: there is no checkpoint of step {step}; "
            + (
                f"the directory has checkpoints of steps {steps}"
                if steps
                else "the directory has no checkpoints"
            )
        )
    said = []
    if cluster is None or cluster.is_writer:
        with owned(directory):
            for path in (path for one, path in there if one > step):
                place = _aside(path)
                path.rename(place)
                said.append(f"{path.name} is renamed to {place.name}")
            sync_names(Path(directory))
    return replace(found, aside=tuple(said))


def _aside(path: Path) -> Path:
    """A free name for a checkpoint that counts no more."""
    name = path.name.removeprefix(".").removesuffix(".replaced")
    names = (f"{name}{ASIDE}{'' if n == 1 else f'-{n}'}" for n in itertools.count(1))
    return next(found for each in names if not (found := path.with_name(each)).exists())


def going_on(directory: str | Path) -> str:
    """The checkpoints from which a training with infinite numbers can resume, in words."""
    there = listed(directory)
    if not there:
        return f"there is no checkpoint in {str(directory)!r} to resume from"
    older = ", ".join(str(step) for step, _ in there[1:])
    also = f" (or, with resume=STEP, from an older step: {older})" if older else ""
    return f"resume from step {there[0][0]}, the newest checkpoint in {str(directory)!r}{also}"


def _first(
    directory: str | Path, found: Sequence[tuple[int, Path]], cluster: Cluster | None, finite: Collection[str]
) -> Checkpoint | None:
    """The first of some checkpoints that is whole."""
    skipped: list[str] = []
    if cluster is not None:
        names = ", ".join(path.name for _, path in found)
        cluster.same(f"the list of checkpoints in {directory}", names)
    for step, path in found:
        opened, why = _checked(path, step, cluster, finite)
        if opened is not None:
            return replace(opened, skipped=tuple(skipped))
        skipped.append(f"{path.name}: {why}")
    if skipped:
        raise UserError(
            f"checkpoint {str(directory)!r}: the directory has no complete checkpoint "
            f"({'; '.join(skipped)}); give another directory, or remove this one to start again"
        )
    return None


def _checked(
    path: Path, step: int, cluster: Cluster | None, finite: Collection[str]
) -> tuple[Checkpoint | None, str]:
    """A checkpoint that is whole, or why it is not; the same for all processes."""
    own, count = (0, 1) if cluster is None else (cluster.index, cluster.processes)
    opened, why = None, ""
    try:
        opened = _opened(path, step, lambda number: number % count == own, finite)
    except (OSError, ValueError) as error:
        why = reason(error)
    if cluster is not None:
        why = next(filter(None, cluster.gather(f"checking {path.name}", why, patient=True)), "")
    return (None if why else opened), why


def _opened(
    path: Path, step: int, mine: Callable[[int], bool], finite: Collection[str] = frozenset()
) -> Checkpoint:
    """A checkpoint of this step; OSError or ValueError if `Checkpoint.check` finds that it is not whole."""
    manifest = manifests.read(path / MANIFEST)
    if manifest.step != step:
        raise ValueError(f"{MANIFEST} is of step {manifest.step}, not {step}")
    opened = Checkpoint(path, step, manifest.variables, manifest.extra)
    opened.check(mine, finite)
    return opened
