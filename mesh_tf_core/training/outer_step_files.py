"""The directory in which replicas synchronise: its file names, and the checks of its files.

    state-00000007.npz             what replicas begin from after the 7th round: variables and outer momentum
    round-00000007-replica-1.npz   a post: how far replica 1 came, into round 7
    state-00000008-by-1.npz        a state that replica 1 is making
    replica-1/.lock                replica 1's, for as long as it runs

Others write there too, and disks fail. A file therefore counts only if its content repeats its name (round,
replica, run). Before an array is read, its type and shape must be as expected; nothing else is read, whatever
the size of the file. A state counts only behind the one before it, so that a stray copy with a large number
is none. Only files with exact names of this format are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mesh_tf_core.errors import UserError
from mesh_tf_core.faults import at_path
from mesh_tf_core.files import replace_file, unwritable
from mesh_tf_core.ops.few_bits import BITS
from mesh_tf_core.training import array_files
from mesh_tf_core.training.decoupled import Decoupled
from mesh_tf_core.training.finite import is_finite
from mesh_tf_core.training.locking import locked

ArraysByName = dict[str, np.ndarray]
ArrayShape = tuple[int, ...]
WantedArrays = Mapping[str, tuple[Sequence[str], ArrayShape]]
"""Name of an array -> the dtypes that it may have, and its shape."""
ABOUT = "about.json"
"""The array of a file with its metadata."""
MOST_ABOUT = 1 << 20
"""Bytes of that."""
STATE = re.compile(r"state-(\d{8})\.npz")
OURS = re.compile(r"(?:state-(\d{8})(?:-by-\d+)?|round-(\d{8})-replica-\d+)\.npz")
FLOATS = ("float32", "float64")

Round = Annotated[int, Field(ge=0, lt=10**8)]
ReplicaNumber = Annotated[int, Field(ge=0)]


class MeetWarning(UserWarning):
    """A file in the synchronisation directory does not belong there."""


class UnusablePost(ValueError):
    """Why a file is not used, in one line."""


class Post(BaseModel):
    """The header of a post.

    Attributes:
      run: which the directory's first state began; round: into which it is.
      since: the state that its replica began from.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    run: str
    round: Round
    replica: ReplicaNumber
    since: Round
    bits: int


class MeetingState(BaseModel):
    """The header of a state.

    Attributes:
      present: replicas whose work of the previous round it contains; left: those whose posts were left out,
        and why.
      shared: settings that all replicas must have in common.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    run: str
    round: Round
    present: tuple[ReplicaNumber, ...]
    left: dict[ReplicaNumber, str]
    shared: dict[str, float]


About = TypeVar("About", Post, MeetingState)


class Directory:
    """The files of one run, as one replica reads and writes them.

    Attributes:
      run: the run's name, once a state was read or made.
    """

    def __init__(self, how: Decoupled) -> None:
        self.how, self.root, self.run = how, Path(how.directory), ""
        self._told: set[str] = set()
        make_folder(self.root)
        own = how.replica
        left = re.compile(rf"\.(round-\d{{8}}-replica|state-\d{{8}}-by)-{own}\.npz\.[0-9a-f]{{16}}\.part")
        self._remove(lambda name: bool(left.fullmatch(name)))

    # -- names -----------------------------------------------------------------------------------------------

    def place(self, name: str) -> Path:
        """A file's path."""
        return self.root / f"{name}.npz"

    def post(self, round: int, replica: int) -> Path:
        """The path of a post."""
        return self.place(f"round-{round:08d}-replica-{replica}")

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.root)
        except OSError as error:
            raise UserError(
                f"meet: the directory {str(self.root)!r} cannot be read ({error.strerror}); name a "
                "readable directory"
            ) from None

    def newest(self) -> int:
        """The newest state; -1 if there is none. One without the state before it is somebody's copy."""
        rounds = {int(found[1]) for name in self._names() if (found := STATE.fullmatch(name))}
        newest = max((r for r in rounds if r == 0 or r - 1 in rounds), default=-1)
        if rounds and newest < 0:
            raise UserError(
                f"meet: {str(self.root)!r} has state {max(rounds)} but no earlier one, so state "
                f"{max(rounds)} is a copy, or earlier states were removed; move the file away, or name "
                "another directory"
            )
        for stray in sorted(r for r in rounds if r > newest):
            name = f"state-{stray:08d}.npz"
            if name not in self._told:
                self._told.add(name)
                warnings.warn(
                    f"meet: {name} in {str(self.root)!r} is ignored, because the previous state does not "
                    "exist",
                    MeetWarning,
                    stacklevel=2,
                )
        return newest

    def tidy(self, before: int) -> None:
        """Removes the files of rounds that no replica reads again."""
        found = ((name, OURS.fullmatch(name)) for name in self._names())
        old = {name for name, match in found if match and int(match[1] or match[2]) < before}
        self._remove(old.__contains__)

    def _remove(self, which: Any) -> None:
        for name in self._names():
            if which(name):
                with contextlib.suppress(OSError):  # a folder of such a name stays
                    (self.root / name).unlink()

    # -- reading ---------------------------------------------------------------------------------------------

    def has_post(self, round: int, replica: int) -> bool:
        """True if a replica has posted; a post of another run, left from before, is none."""
        path = self.post(round, replica)
        try:
            return _about(_opened(path), Post).run == self.run
        except FileNotFoundError:
            return False
        except UnusablePost:
            return True  # it is named when the round is closed

    def read_post(
        self, round: int, replica: int, wanted: Mapping[int, WantedArrays]
    ) -> tuple[Post, ArraysByName]:
        """A post and its arrays.

        Args:
          wanted: bits -> the arrays of a post with these bits, their dtype and shape.

        Raises:
          FileNotFoundError: there is none.
          UnusablePost: it is none that can be used.
        """
        arrays = _opened(self.post(round, replica))
        about = _about(arrays, Post)
        for name, here, there in (
            ("run", self.run, about.run),
            ("round", round, about.round),
            ("replica", replica, about.replica),
        ):
            if here != there:
                raise UnusablePost(f"the file belongs to {name} {str(there)[:40]}, not {here}")
        if about.bits not in BITS:
            raise UnusablePost(f"the file has the unsupported bits={about.bits}")
        return about, _read(arrays, wanted[about.bits])

    def about(self, round: int) -> MeetingState:
        """The header of the state.

        Raises:
          FileNotFoundError: it is not there.
          UserError: it is not a state of replicas with these settings.
        """
        return self._state(round)[0]

    def read_state(self, round: int, wanted: Mapping[str, ArrayShape]) -> tuple[MeetingState, ArraysByName]:
        """A state with the wanted arrays; raises as `about` does."""
        about, arrays = self._state(round)
        try:
            return about, _read(arrays, {name: (FLOATS, shape) for name, shape in wanted.items()})
        except UnusablePost as error:
            raise UserError(
                f"meet: {str(self.root)!r} has states of another model, or damaged states "
                f"(state-{round:08d}.npz: {error}); name another directory, or use the same "
                "hyperparameters and fragments"
            ) from None

    def _state(self, round: int) -> tuple[MeetingState, Mapping[str, Any]]:
        path = self.place(f"state-{round:08d}")
        try:
            arrays = _opened(path)
            about = _about(arrays, MeetingState)
            if about.round != round:
                raise UnusablePost(f"the file contains state {about.round}")
            if self.run and about.run != self.run:
                raise UnusablePost("the file belongs to another run")
            if about.shared.get("replica") == self.how.count <= max(about.present, default=0):
                raise UnusablePost(f"the file belongs to replica {max(about.present)}")
        except UnusablePost as error:
            raise UserError(
                f"meet: {str(path)!r} cannot be used: {error}; remove the file and start again"
            ) from None
        self._agree(about)
        self.run = about.run
        return about, arrays

    def _agree(self, about: MeetingState) -> None:
        """Raises UserError where replicas that meet otherwise made a state: they would not count this one."""
        for name, here in self.how.shared.items():
            there = about.shared.get(name, float("nan"))
            so = "replica=…/" if name == "replica" else f"{name}="
            if there != here:
                raise UserError(
                    f"meet: the replicas in {str(self.root)!r} use {so}{there:g}, but this replica uses "
                    f"{so}{here:g}; use the same setting, or name another directory"
                )

    # -- writing ---------------------------------------------------------------------------------------------

    def put_post(self, round: int, since: int, arrays: ArraysByName) -> None:
        """Posts, replacing an earlier post."""
        own = self.how.replica
        about = Post(run=self.run, round=round, replica=own, since=since, bits=self.how.bits)
        _write(self.post(round, own), arrays, about)

    def put_state(
        self,
        round: int,
        arrays: ArraysByName,
        present: Sequence[int] = (),
        left: Mapping[int, str] | None = None,
    ) -> None:
        """Makes a state, if it is not there yet."""
        place, beside = (self.place(f"state-{round:08d}{by}") for by in ("", f"-by-{self.how.replica}"))
        run = self.run or secrets.token_hex(8)
        shared = {name: float(said) for name, said in self.how.shared.items()}
        about = MeetingState(
            run=run, round=round, present=tuple(present), left=dict(left or {}), shared=shared
        )
        _write(beside, arrays, about)
        try:
            os.link(beside, place)  # unlike a rename it replaces nothing
        except FileExistsError:
            pass
        except OSError as error:
            raise UserError(
                f"meet: no state can be created in {str(self.root)!r} ({error.strerror}); name a "
                "directory on a file system with hard links, e.g. a local disk or NFS"
            ) from None
        finally:
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def only(how: Decoupled) -> Iterator[str]:
    """Within it no other process is the same replica. Yields why that is not sure, or nothing.

    Raises:
      UserError: another one is.
    """
    place = Path(how.directory) / f"replica-{how.replica}"
    for path in (place.parent, place):
        make_folder(path)
    with locked(place, f"replica {how.replica}/{how.count}") as trouble:
        yield trouble


def make_folder(path: Path) -> None:
    """Makes a folder, if it is not there; UserError if it cannot be."""
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            f"meet: the directory {str(path)!r} cannot be created ({error.strerror}); name a directory "
            "that can be written"
        ) from None


# -- one file ------------------------------------------------------------------------------------------------


def _write(path: Path, arrays: Mapping[str, np.ndarray], about: BaseModel) -> None:
    """Writes beside the place and renames: a link, a pipe or a device that lies there is replaced, not
    opened."""
    said = np.frombuffer(about.model_dump_json().encode(), np.uint8)
    try:
        replace_file(path, lambda file: array_files.write_npz(file, [(ABOUT, said), *arrays.items()]))
    except OSError as error:
        raise unwritable(path, error, "a synchronisation file") from None


def _opened(path: Path) -> Mapping[str, array_files.Zipped]:
    """The arrays of a file; none is read."""
    try:
        return array_files.zipped(path)
    except FileNotFoundError:
        if path.is_symlink():  # its name is there, so whoever reads it again would do so for ever
            raise UnusablePost("the file is a broken symbolic link") from None
        raise
    except (OSError, ValueError) as error:
        raise UnusablePost(getattr(error, "strerror", None) or str(error)) from None


def _about(arrays: Mapping[str, array_files.Zipped], kind: type[About]) -> About:
    found = arrays.get(ABOUT)
    if found is None or found.dtype != np.uint8 or len(found.shape) != 1 or found.shape[0] > MOST_ABOUT:
        raise UnusablePost("the file has no valid description")
    try:
        return kind.model_validate_json(found.read().tobytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = repr(".".join(map(str, first["loc"]))[:80]) if first["loc"] else "the file"
        raise UnusablePost(f"invalid description: {at_path(field, first['msg'])[:200]}") from None
    except ValueError as error:
        raise UnusablePost(str(error)) from None


def _read(arrays: Mapping[str, array_files.Zipped], wanted: WantedArrays) -> ArraysByName:
    """The arrays that are wanted. Types and shapes of all are looked at before one is read."""
    for name, (dtypes, shape) in wanted.items():
        if name not in arrays:
            raise UnusablePost(f"{name[:80]!r} is missing")
        found = arrays[name]
        if str(found.dtype) not in dtypes or found.shape != shape:
            said = f"{found.dtype!s:.40}{list(found.shape)!s:.80}"
            raise UnusablePost(f"{name[:80]!r} is {said}, not {dtypes[0]}{list(shape)}")
    made = {}
    for name in wanted:
        try:
            made[name] = arrays[name].read()
        except (OSError, ValueError) as error:
            raise UnusablePost(str(error)) from None
        if not is_finite(made[name]):
            raise UnusablePost(f"{name[:80]!r} contains NaN or infinite numbers")
    return made
