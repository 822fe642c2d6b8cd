"""Replicas that are jobs of their own, and synchronise through a directory: a late or lost replica stops no
other.

Replicas train alone as those of an axis do (`tracing.replicas`), but each in a job of its own, on any
devices. In common they have a row of outer states, each one file: the variables that all begin from, and the
outer momentum. Round r is open from when state r is there until state r + 1 is. After every `period` steps a
replica

    saves      its checkpoint, if it keeps any, with the state that it began from
    posts      how far it came from that state, into the round that is open now
    waits      until all that were in the last meeting (at first all) have posted there, the round is closed,
               or its patience is over
    closes     the round, if it still is open: of the mean over the posts that are there follows the next
               state
    takes      the newest state, whoever closed the round, and trains on from there

A lost replica therefore delays the others by their patience once. A late one joins the round that is open
when it arrives, unless it began more than `staleness` rounds earlier (then its work is dropped). A replica
that returns takes the newest state. Optimizer state stays with its replica. With all replicas in time it is
algorithm 1 of Douillard et al. 2023.

Work is posted once. A killed replica resumes from its checkpoint, which is no older than its last post. It
synchronises first if it had not done so; if a state already contains its work, it takes that state and posts
nothing. After any kills, without a replica that was too late, the states and variables are therefore those of
an undisturbed run.

A post that is not finite, or lacks arrays of this model, is left out of the mean, and the state records this.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mesh_tf_core.engines import Engine
from mesh_tf_core.engines.pieces import VariablePiece
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ops.few_bits import BITS, DTYPE, WHOLE, quantised, restored
from mesh_tf_core.tracing.diloco import ParameterSlice, fragments_of, outer_step, wide
from mesh_tf_core.tracing.replicas import MOMENTUM
from mesh_tf_core.training.decoupled import Decoupled, Met
from mesh_tf_core.training.finite import is_finite
from mesh_tf_core.training.opened import Checkpoint
from mesh_tf_core.training.outer_step_files import FLOATS, ArraysByName, Directory, MeetingState, UnusablePost
from mesh_tf_core.training.prefetch import BatchGroups

CODES, SCALES = "codes", "scales"
"""Suffixes of a variable's name for its representation in few bits."""
BEGAN, LOST = "meet/began", "meet/lost"
"""Suffixes of a variable's name for the synchronisation state in a checkpoint: the state that the replica
began from, and the rounding error of its last post."""
EXTRA = "meet"
"""The name in a checkpoint of the further data of synchronisations."""
POLL, SLOWEST = 0.05, 1.0
"""Seconds between two looks at the directory: a thousandth of the patience, within these."""


class Meetings:
    """The meetings of one replica.

    Args:
      engine, program: of its training.
      found: the checkpoint that it resumes from.

    Attributes:
      round: the state that the replica began from.
      pending: a synchronisation is due before the next step.
    """

    def __init__(
        self, how: Decoupled, engine: Engine, program: Program, found: Checkpoint | None = None
    ) -> None:
        self.how, self.engine = how, engine
        self._shapes = {v.name: v.shape.sizes for v in _trained(program)}
        self.names = [*self._shapes]
        self._parts = fragments_of(_trained(program), how.fragments)
        self.round, self._began, self.pending = -1, ArraysByName(), False
        self._lost = ArraysByName()
        if how.bits != WHOLE:
            self._lost = {v.name: _wide(np.zeros(v.shape.sizes, v.dtype)) for v in _trained(program)}
        self.directory = Directory(how)
        if self.directory.newest() < 0:
            began = {name: _wide(engine.read(name)) for name in self.names}
            still = {f"{name}/{MOMENTUM}": np.zeros_like(x) for name, x in began.items()}
            self.directory.put_state(0, {**began, **still})
        if found is None or not self._goes_on(found):
            self._take(self.directory.newest())

    def stream(self, batches: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The stream of all batches, from which every replica takes its own in turn."""
        own = self.how.replica
        return BatchGroups(batches, self.how.count, lambda group: group[own], own + 1)

    def due(self, step: int) -> bool:
        """True if replicas synchronise after a step."""
        return step % (self.how.period // self.how.fragments) == 0

    def meet(self, stop: Callable[[], bool] = lambda: False) -> Met | None:
        """Posts the progress since the last synchronisation, and takes the newest state.

        Args:
          stop: called while waiting for others; once it returns True, None is returned, and `pending` stays.

        Raises:
          UserError: the variables are not finite, or the directory's content cannot be used.
        """
        self.pending = True
        since, size = self.round, 0
        while True:
            open = self.directory.newest()
            if open < since:
                raise UserError(
                    f"meet: {str(self.how.directory)!r} no longer has state {since}, from which this "
                    "replica started; restart all replicas in a new directory"
                )
            held = self._held(since, open)
            if held is not None:  # before this process was
                self._lost = self._made(held - 1)[1]
                return self._taken(held, size=size)
            if open - since > self.how.staleness * self.how.fragments:
                return self._taken(open, size=size, dropped=True)
            post, lost = self._made(open)
            size = sum(array.nbytes for array in post.values())
            self.directory.put_post(open, since, post)
            if not self._await(open, stop):
                return None
            if self.directory.newest() == open:
                self._close(open)
            with contextlib.suppress(FileNotFoundError):  # it is long ago
                about = self.directory.about(open + 1)
                if self.how.replica in about.present:
                    self._lost = lost
                if self.how.replica in (*about.present, *about.left):
                    return self._taken(self.directory.newest(), size, self.how.replica in about.left)
            # Another one closed it just before the post was there: the next round takes it.

    # -- a checkpoint ----------------------------------------------------------------------------------------

    def kept(self) -> tuple[dict[VariablePiece, Any], dict[str, Any]]:
        """The values that a checkpoint needs for a training to continue exactly: arrays, and plain data."""
        arrays = {f"{name}/{BEGAN}": array for name, array in self._began.items()}
        arrays |= {f"{name}/{LOST}": array for name, array in self._lost.items()}
        pieces: dict[VariablePiece, Any] = {}
        for name, array in arrays.items():
            begin = (0,) * array.ndim
            pieces[VariablePiece(name, str(array.dtype), array.shape, begin, array.shape)] = array
        who = {"replica": self.how.replica, "count": self.how.count, "run": self.directory.run}
        return pieces, {EXTRA: {**who, "round": self.round, "pending": self.pending}}

    def _goes_on(self, found: Checkpoint) -> bool:
        """Goes on from the checkpoint, if this replica wrote it in this run and not too long ago."""
        kept, newest = found.extra.get(EXTRA, {}), self.directory.newest()
        self.directory.about(newest)
        who = {"replica": self.how.replica, "count": self.how.count, "run": self.directory.run}
        if not kept or any(kept.get(name) != here for name, here in who.items()):
            return False
        late = newest - kept["round"] > self.how.staleness * self.how.fragments
        if late and not kept["pending"]:
            return False  # what it would do until the next meeting would be dropped there
        self.round, self.pending = kept["round"], kept["pending"]
        self._began = {name: found.read(f"{name}/{BEGAN}") for name in self.names}
        for name in self._lost:
            if f"{name}/{LOST}" in found.variables:
                self._lost[name] = found.read(f"{name}/{LOST}")
        return True

    def _held(self, since: int, open: int) -> int | None:
        """The first state after the one it began from that has its work in it, if it posted in a life before:
        a checkpoint is no older than the last post."""
        for round in range(max(since + 1, open - self.how.fragments - 1), open + 1):
            with contextlib.suppress(FileNotFoundError):
                if self.how.replica in self.directory.about(round).present:
                    return round
        return None

    # -- a post ----------------------------------------------------------------------------------------------

    def _fragment(self, round: int) -> dict[str, ParameterSlice]:
        return self._parts[round % self.how.fragments]

    def _made(self, round: int) -> tuple[ArraysByName, ArraysByName]:
        """What is posted into a round, and what is lost by rounding after that."""
        came = ArraysByName()
        for name, part in self._fragment(round).items():
            came[name] = self._began[name][part] - _wide(self.engine.read(name))[part]
            if not is_finite(came[name]):
                raise UserError(
                    f"meet: variable {name!r} contains NaN or infinite numbers, so this replica stops "
                    "and the other replicas continue; restart this replica from an earlier checkpoint "
                    "with a smaller learning rate, a warm-up or clip_norm in the optimizer"
                )
        if self.how.bits == WHOLE:
            return came, self._lost
        post, lost = ArraysByName(), dict(self._lost)
        for name, part in self._fragment(round).items():
            whole = came[name] + lost[name][part]
            codes, scales = quantised(whole, self.how.bits)
            lost[name] = lost[name].copy()
            lost[name][part] = whole - restored(codes, scales, whole.shape, self.how.bits)
            post[f"{name}/{CODES}"], post[f"{name}/{SCALES}"] = codes, scales
        return post, lost

    def _posted(self, round: int, replica: int) -> ArraysByName:
        """What a replica posted; raises as `Directory.read_post`."""
        shapes = {n: self._began[n][part].shape for n, part in self._fragment(round).items()}
        wanted: dict[int, Any] = {WHOLE: {name: (FLOATS, shape) for name, shape in shapes.items()}}
        for bits in set(BITS) - {WHOLE}:
            wanted[bits] = {}
            for name, shape in shapes.items():
                *rows, last = shape or (1,)
                wanted[bits][f"{name}/{CODES}"] = (DTYPE,), (*rows, -(-last * bits // 8))
                wanted[bits][f"{name}/{SCALES}"] = ("float32",), tuple(rows)
        about, found = self.directory.read_post(round, replica, wanted)
        if about.bits == WHOLE:
            return found
        with np.errstate(over="ignore"):
            return {
                name: restored(found[f"{name}/{CODES}"], found[f"{name}/{SCALES}"], shape, about.bits)
                for name, shape in shapes.items()
            }

    # -- a meeting -------------------------------------------------------------------------------------------

    def _await(self, open: int, stop: Callable[[], bool]) -> bool:
        """Until those that were there last have posted, or the round is closed, or the time is over; whether
        it was not stopped."""
        try:
            there = self.directory.about(open).present or range(self.how.count)
        except FileNotFoundError:
            return True  # it was closed long ago
        pause = min(max(POLL, self.how.patience / 1000), SLOWEST)
        until, missing = time.monotonic() + self.how.patience, [*there]
        while time.monotonic() < until and self.directory.newest() == open:
            missing = [replica for replica in missing if not self.directory.has_post(open, replica)]
            if not missing:
                break
            if stop():
                return False
            time.sleep(pause)
        return True

    def _close(self, open: int) -> None:
        """Makes the next state of the mean over the posts of a round that can be used."""
        state, posts, left = self._before(open), dict[int, ArraysByName](), dict[int, str]()
        for replica in range(self.how.count):
            with contextlib.suppress(FileNotFoundError):
                try:
                    posts[replica] = self._posted(open, replica)
                except UnusablePost as error:
                    left[replica] = str(error)
        while posts:
            made = self._outer(open, state, posts)
            if all(map(is_finite, made.values())):
                self.directory.put_state(open + 1, made, [*posts], left)
                self.directory.tidy(open - self.how.fragments)
                return
            largest = {
                n: max(float(np.abs(x).max(initial=0.0)) for x in a.values()) for n, a in posts.items()
            }
            del posts[worst := max(posts, key=largest.__getitem__)]
            left[worst] = "the numbers are too large"
        said = "; ".join(f"replica {replica}: {why}" for replica, why in left.items())
        raise UserError(
            f"meet: no update of round {open} in {str(self.how.directory)!r} can be used ({said}); check "
            "which jobs write to this directory, and start again"
        )

    def _outer(self, open: int, state: ArraysByName, posts: Mapping[int, ArraysByName]) -> ArraysByName:
        """The outer step of a fragment over the mean of what was posted."""
        rate, mu, made = self.how.learning_rate, self.how.momentum, ArraysByName()
        with np.errstate(over="ignore", invalid="ignore"):
            for name in self._fragment(open):
                mean = np.mean([each[name] for each in posts.values()], axis=0)
                held = f"{name}/{MOMENTUM}"
                made[name], made[held] = outer_step(state[name], state[held], mean, rate, mu)
        return made

    def _before(self, open: int) -> ArraysByName:
        """The last state of the fragment whose round is open; the first state is of all."""
        last, parts = open + 1 - self.how.fragments, self._fragment(open)
        at = max(last, 0)
        found = self.directory.read_state(at, self._wanted(at, parts, ("", f"/{MOMENTUM}")))[1]
        if last > 0:
            return found
        return {
            f"{n}{more}": found[f"{n}{more}"][p] for n, p in parts.items() for more in ("", f"/{MOMENTUM}")
        }

    def _wanted(
        self, round: int, parts: Mapping[str, ParameterSlice], more: tuple[str, ...] = ("",)
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what is read of a state; the first one is of whole variables."""
        shapes = {n: np.broadcast_to(0, self._shapes[n])[p if round else ...].shape for n, p in parts.items()}
        return {f"{name}{one}": shape for name, shape in shapes.items() for one in more}

    def _taken(self, newest: int, size: int, dropped: bool = False) -> Met:
        about = self._take(newest)
        self.pending = False
        return Met(self.round, about.present, dropped, size, about.left)

    def _take(self, newest: int) -> MeetingState:
        """The newest state of every fragment up to one as the variables; what the last one says of itself."""
        found: list[tuple[Mapping[str, ParameterSlice], MeetingState, ArraysByName]] = []
        while not found:
            first = max(self.round + 1, newest + 1 - self.how.fragments, 0)
            try:
                for round in range(first, newest + 1):
                    parts: Mapping[str, ParameterSlice] = dict.fromkeys(self.names, ...)
                    if round:
                        parts = self._fragment(round - 1)
                    found.append((parts, *self.directory.read_state(round, self._wanted(round, parts))))
            except FileNotFoundError:  # it was there when it was looked for
                found, newest = [], self.directory.newest()
        for parts, _, state in found:
            for name, part in parts.items():
                self._write(name, part, state[name])
        self.round = newest
        return found[-1][1]

    def _write(self, name: str, part: ParameterSlice, array: np.ndarray) -> None:
        """Sets a fragment of a variable."""
        whole = np.array(self.engine.read(name))
        began = np.array(self._began.get(name, _wide(whole)))  # a checkpoint may be writing the one before
        began[part] = whole[part] = array
        self._began[name] = began
        self.engine.write(name, whole)


def _trained(program: Program) -> list[Variable]:
    return [s.variable for s in program.variables.values() if s.variable.trainable]


def _wide(array: Any) -> np.ndarray:
    """As outer steps compute: in float32 at least."""
    found = np.asarray(array)
    return found.astype(wide(str(found.dtype)))
