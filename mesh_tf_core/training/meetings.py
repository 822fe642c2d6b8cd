"""Replicas that are jobs of their own, and meet in a directory: one that is late or lost stops nobody.

Replicas train alone as those of an axis do (`tracing.replicas`), but each in a job of its own, on whatever
devices. In common they have a row of outer states, each one file: the variables that all begin from, and the
outer momentum. Round r is open from when state r is there until state r + 1 is. After every `period` steps a
replica

    posts      how far it came from the state that it began from, into the round that is open now
    waits      until all that were in the last meeting (at first all) have posted there, the round is closed,
               or its patience is over
    closes     the round, if it still is open: of the mean over the posts that are there follows the next
               state
    takes      the newest state, whoever closed the round, and trains on from there

so that a lost replica costs the others their patience once, a late one joins the round that is open when it
comes, unless it began more than `staleness` rounds before that (then what it did is dropped), and one that
returns takes the newest state. Optimizer state stays with its replica. Files appear whole or not at all: they
are written beside their place and renamed, and a state that is there is never replaced. With all replicas in
time it is algorithm 1 of Douillard et al. 2023.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mesh_tf_core.engines import Engine
from mesh_tf_core.errors import UserError
from mesh_tf_core.files import write_file
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ops.few_bits import WHOLE, quantised, restored
from mesh_tf_core.tracing.diloco import Part, fragments_of
from mesh_tf_core.tracing.meeting import MOMENTUM
from mesh_tf_core.training.decoupled import Decoupled
from mesh_tf_core.training.locking import locked

Arrays = dict[str, np.ndarray]
CODES, SCALES = "codes", "scales"
"""Names, below a variable's own, of what stands for it in few bits."""
ABOUT = "about"
"""The array of a file that says what else is known of it, as JSON."""
POLL = 0.05
"""Seconds between two looks at the directory, at first; a thousandth of the patience if that is more."""


@dataclass(frozen=True)
class Met:
    """One meeting.

    Attributes:
      round: the state that was taken.
      present: replicas whose work is in it.
      dropped: what this one did is not: it was too old.
      bytes: that it posted, each time it did, without the file's own.
    """

    round: int
    present: tuple[int, ...]
    dropped: bool
    bytes: int = 0

    def words(self, count: int) -> str:
        """'round 3, 3 of 4 replicas'."""
        lost = "; what this one did was too old and is dropped" if self.dropped else ""
        return f"round {self.round}, {len(self.present)} of {count} replicas{lost}"


class Meetings:
    """The meetings of one replica.

    Args:
      engine, program: of its training.

    Attributes:
      round: the state that the replica began from.
    """

    def __init__(self, how: Decoupled, engine: Engine, program: Program) -> None:
        self.how, self.engine = how, engine
        self._shapes = {v.name: v.shape.sizes for v in _trained(program)}
        self.names = [*self._shapes]
        self._parts = fragments_of(_trained(program), how.fragments)
        self.round, self._began = -1, Arrays()
        self._lost: list[Arrays] = [{} for _ in self._parts]
        _folder(Path(how.directory))
        if self._newest() < 0:
            began = {name: _wide(engine.read(name)) for name in self.names}
            still = {f"{name}/{MOMENTUM}": np.zeros_like(x) for name, x in began.items()}
            self._put_state(0, {**began, **still}, ())
        self._take()

    def stream(self, batches: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Of all batches, every replica its own in turn."""
        return _Own(batches, self.how.replica, self.how.count)

    def due(self, step: int) -> bool:
        """Whether replicas meet after a step."""
        return step % (self.how.period // self.how.fragments) == 0

    def meet(self) -> Met:
        """Posts what was done since the last meeting, and takes the newest state."""
        since, size = self.round, 0
        while True:
            open = self._newest()
            if open < since:
                raise UserError(
                    f"meet: {str(self.how.directory)!r} had state {since} and has it no longer; somebody "
                    "removed it: begin all replicas anew, in another directory"
                )
            if open - since > self.how.staleness * self.how.fragments:
                return self._taken(dropped=True, size=size)
            fragment = open % self.how.fragments
            came = {
                name: self._began[name][part] - _wide(self.engine.read(name))[part]
                for name, part in self._parts[fragment].items()
            }
            post, lost = self._rounded(came, self._lost[fragment])
            size = sum(array.nbytes for array in post.values())
            _write(self._post(open, self.how.replica), post, {"since": since, "bits": self.how.bits})
            self._await(open)
            if self._newest() == open:
                self._close(open)
            with contextlib.suppress(FileNotFoundError):  # it is long ago
                if self.how.replica in self._state(open + 1)[1]["present"]:
                    self._lost[fragment] = lost
                    return self._taken(dropped=False, size=size)
            # Another one closed it just before the post was there: the next round takes it.

    # -- few bits --------------------------------------------------------------------------------------------

    def _rounded(self, came: Arrays, before: Arrays) -> tuple[Arrays, Arrays]:
        """What is posted, and what of it is lost by rounding; `before`: what was lost of the last post."""
        if self.how.bits == WHOLE:
            return came, {}
        post, lost = Arrays(), Arrays()
        for name, array in came.items():
            whole = array + before[name] if name in before else array
            codes, scales = quantised(whole, self.how.bits)
            lost[name] = whole - restored(codes, scales, whole.shape, self.how.bits)
            post[f"{name}/{CODES}"], post[f"{name}/{SCALES}"] = codes, scales
        return post, lost

    def _posted(self, round: int, replica: int) -> Arrays:
        """What a replica posted."""
        found, about = _read(self._post(round, replica))
        if about["bits"] == WHOLE:
            return found
        shapes = {
            n: self._began[n][part].shape for n, part in self._parts[round % self.how.fragments].items()
        }
        return {
            name: restored(found[f"{name}/{CODES}"], found[f"{name}/{SCALES}"], shape, about["bits"])
            for name, shape in shapes.items()
        }

    # -- the directory ---------------------------------------------------------------------------------------

    def _place(self, name: str) -> Path:
        return Path(self.how.directory) / f"{name}.npz"

    def _post(self, round: int, replica: int) -> Path:
        return self._place(f"round-{round:08d}-replica-{replica}")

    def _newest(self) -> int:
        """The newest state; -1 if there is none."""
        try:
            names = os.listdir(self.how.directory)
        except OSError as error:
            raise UserError(
                f"meet: the directory {str(self.how.directory)!r} cannot be read ({error.strerror})"
            ) from None
        found = (re.fullmatch(r"state-(\d{8})\.npz", name) for name in names)
        return max((int(each[1]) for each in found if each), default=-1)

    def _state(self, round: int) -> tuple[Arrays, dict[str, Any]]:
        return _read(self._place(f"state-{round:08d}"))

    def _put_state(self, round: int, arrays: Arrays, present: tuple[int, ...]) -> None:
        """Makes a state, if it is not there yet."""
        place = self._place(f"state-{round:08d}")
        beside = self._place(f"state-{round:08d}-by-{self.how.replica}")
        _write(beside, arrays, {"present": present, **self.how.shared})
        with contextlib.suppress(FileExistsError):
            os.link(beside, place)  # unlike a rename it replaces nothing
        beside.unlink()

    # -- a meeting -------------------------------------------------------------------------------------------

    def _await(self, open: int) -> None:
        """Until those that were there last have posted, or the round is closed, or the time is over."""
        try:
            there = self._state(open)[1]["present"] or range(self.how.count)
        except FileNotFoundError:
            return  # it was closed long ago
        pause, until = max(POLL, self.how.patience / 1000), time.monotonic() + self.how.patience
        every = [self._post(open, replica) for replica in there]
        while time.monotonic() < until and self._newest() == open and not all(p.exists() for p in every):
            time.sleep(pause)

    def _close(self, open: int) -> None:
        """Makes the next state of the mean over the posts of a round."""
        state = self._before(open)
        posts = [r for r in range(self.how.count) if self._post(open, r).exists()]
        came = [self._posted(open, replica) for replica in posts]
        rate, mu, made = self.how.learning_rate, self.how.momentum, Arrays()
        for name in self._parts[open % self.how.fragments]:
            mean = np.mean([each[name] for each in came], axis=0)
            momentum = mu * state[f"{name}/{MOMENTUM}"] + mean
            made[name] = state[name] - rate * (mean + mu * momentum)
            made[f"{name}/{MOMENTUM}"] = momentum
        self._put_state(open + 1, made, tuple(posts))
        self._tidy(open)

    def _before(self, open: int) -> Arrays:
        """The last state of the fragment whose round is open; the first state is of all."""
        last = open + 1 - self.how.fragments
        if last > 0:
            return self._state(last)[0]
        first, parts = self._state(0)[0], self._parts[open % self.how.fragments]
        return {
            f"{n}{more}": first[f"{n}{more}"][p] for n, p in parts.items() for more in ("", f"/{MOMENTUM}")
        }

    def _tidy(self, closed: int) -> None:
        """Removes what nobody reads again."""
        for path in Path(self.how.directory).iterdir():
            found = re.match(r"(?:state|round)-(\d{8})", path.name)
            if found and int(found[1]) < closed - self.how.fragments:
                path.unlink(missing_ok=True)

    def _taken(self, dropped: bool, size: int) -> Met:
        present = self._take()
        return Met(self.round, present, dropped, size)

    def _take(self) -> tuple[int, ...]:
        """The newest state of every fragment as the variables; whose work is in the last."""
        while True:
            newest = self._newest()
            first = max(self.round + 1, newest + 1 - self.how.fragments, 0)
            with contextlib.suppress(FileNotFoundError):  # it was there when it was looked for
                found = [(round, *self._state(round)) for round in range(first, newest + 1)]
                break
        for round, state, about in found:
            self._agree(about)
            parts = self._parts[(round - 1) % self.how.fragments] if round else dict.fromkeys(self.names, ...)
            for name, part in parts.items():
                self._write(name, part, state)
        self.round = newest
        return tuple(found[-1][2]["present"]) if found else ()

    def _agree(self, about: Mapping[str, Any]) -> None:
        """Raises UserError where replicas that meet otherwise made a state: they would not count this one."""
        for name, here in self.how.shared.items():
            there = about.get(name, here)
            so = "replica=…/" if name == "replica" else f"{name}="
            if there != here:
                raise UserError(
                    f"meet: replicas meet in {str(self.how.directory)!r} with {so}{there:g}, this one comes "
                    f"with {so}{here:g}; say the same, or name another directory"
                )

    def _write(self, name: str, part: Part, state: Arrays) -> None:
        """A fragment of a variable as a state has it."""
        whole = np.array(self.engine.read(name))
        if name not in state or state[name].shape != whole[part].shape:
            raise UserError(
                f"meet: {str(self.how.directory)!r} has the states of another model: {name!r} is missing or "
                "of another shape; name another directory, or the same hyperparameters and fragments"
            )
        if name not in self._began:
            self._began[name] = _wide(whole).copy()
        self._began[name][part] = state[name]
        whole[part] = state[name]
        self.engine.write(name, whole)


def _trained(program: Program) -> list[Variable]:
    return [s.variable for s in program.variables.values() if s.variable.trainable]


class _Own(Iterator[Mapping[str, Any]]):
    """One batch of every few; the place of the data is that of all of them."""

    def __init__(self, batches: Iterator[Mapping[str, Any]], number: int, count: int) -> None:
        self._batches, self._number, self._count = batches, number, count

    def __next__(self) -> Mapping[str, Any]:
        found = [*islice(self._batches, self._count)]
        if len(found) <= self._number:
            raise StopIteration
        return found[self._number]

    def __getattr__(self, name: str) -> Any:
        if name in ("get_state", "set_state"):  # if the data can tell its place, so can this
            return getattr(self._batches, name)
        raise AttributeError(name)


@contextlib.contextmanager
def only(how: Decoupled) -> Iterator[str]:
    """Within it no other process is the same replica. Yields why that is not sure, or nothing.

    Raises:
      UserError: another one is.
    """
    place = Path(how.directory) / f"replica-{how.replica}"
    for path in (place.parent, place):
        _folder(path)
    with locked(place, f"replica {how.replica}/{how.count}") as trouble:
        yield trouble


def _folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            f"meet: no directory {str(path)!r} ({error.strerror}); name one that can be written"
        ) from None


def _wide(array: Any) -> np.ndarray:
    """As outer steps compute: in float32 at least."""
    found = np.asarray(array)
    return found if found.dtype == np.float64 else found.astype(np.float32)


def _write(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    said = np.frombuffer(json.dumps(about).encode(), np.uint8)

    def put(file: BinaryIO) -> None:
        np.savez(file, **{ABOUT: said}, **arrays)  # type: ignore[arg-type]

    write_file(path, put, "what replicas meet with")


def _read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """What `_write` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      UserError: it is another one, or torn.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        about = json.loads(arrays.pop(ABOUT).tobytes())
    except FileNotFoundError:
        raise
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"meet: {str(path)!r} is torn, or nothing that a replica wrote ({error}); remove it, and start "
            "again"
        ) from None
    return arrays, about
