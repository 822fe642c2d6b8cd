"""One process's part in a job of several: the other processes, their state, and their agreements.

JAX's distributed runtime finds the processes, starts them together and runs their collectives; its key-value
store carries these messages. Every process writes its state there every second and reads the states of the
others, so that each detects a missing process itself.
"""

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

from mesh_tf_core.engines.jax import compat as jax_compat
from mesh_tf_core.engines.jax import rendezvous, watch
from mesh_tf_core.engines.jax.store import BEAT, NOW, JobStore, tried
from mesh_tf_core.engines.jax.watch import Watch
from mesh_tf_core.errors import ClusterError, UserError

GRACE = 3.0
"""Seconds for a process to end once the job has failed."""
OUTSIDE = "this process is not part of the job: it has not joined yet, or it has already left"


def print_error(text: str) -> None:
    """Prints why the job failed, if nothing else can."""
    print(f"error: {text}", file=sys.stderr, flush=True)


class Cluster(contextlib.AbstractContextManager["Cluster"]):
    """The processes that run one program together. Every process creates this object and uses it as a
    context.

    Without arguments JAX finds the processes itself, in jobs of Slurm, Kubernetes, Open MPI or a Cloud TPU.

    A process that is lost, frozen or late ends the whole job: every other process raises `ClusterError` with
    the name of the process. A process that still blocks in a library `GRACE` seconds later is ended.

    Args:
      coordinator: HOST:PORT of the first process, where the others connect; by default
        JAX_COORDINATOR_ADDRESS. The service listens only on that host's address.
      processes: number of processes; by default JAX_NUM_PROCESSES.
      process: rank of this process, from 0; by default JAX_PROCESS_ID.
      timeout: seconds to wait for a live process that does not reach a step.
      start_timeout: seconds to wait for a process that has not started.
      tell: called with the reason of a failure when the main thread cannot report it.

    Attributes:
      index: rank of this process; `processes`: number of processes.
      hosts: name of each process's machine.
      is_writer: True if this process writes files that the job writes once, such as checkpoints.

    Raises:
      UserError: a number is missing or malformed.
    """

    def __init__(
        self,
        coordinator: str | None = None,
        processes: int | None = None,
        process: int | None = None,
        *,
        timeout: float = 25.0,
        start_timeout: float = 300.0,
        tell: Callable[[str], None] = print_error,
    ) -> None:
        self.place = rendezvous.JobAddress.of(coordinator, processes, process)
        self.timeout, self.start_timeout, self.tell = max(timeout, 3 * BEAT), start_timeout, tell
        self.index, self.processes = self.place.process or 0, self.place.processes or 1
        self.hosts: tuple[str, ...] = ()
        self.failure = ""
        self._devices = 0
        self._store: JobStore | None = None
        self._watch = Watch((), self.timeout)
        self._rounds = 0
        self._before_end: list[Callable[[], object]] = []
        self._changed = threading.Condition()
        self._asks = self._stopping = False
        self._begun = 0
        self._last: int | None = None
        self._ended = threading.Event()

    @property
    def is_writer(self) -> bool:
        return self.index == 0

    @property
    def joined(self) -> bool:
        return self._store is not None

    @property
    def store(self) -> JobStore:
        """The key-value store that all processes write and read; ClusterError if this process has not
        joined."""
        if self._store is None:
            raise ClusterError(OUTSIDE)
        return self._store

    # -- coming and going ------------------------------------------------------------------------------------

    def join(self) -> None:
        """Waits until every process is there.

        Raises:
          ClusterError: a process did not connect.
          UserError: the processes cannot be found, have the same numbers or count each other differently, or
            the coordinator's port is in use.
        """
        if self.joined:
            return
        self._store, self.index, self.processes = rendezvous.join(self.place, self.start_timeout)
        self._watch = Watch([i for i in range(self.processes) if i != self.index], self.timeout)
        for run, name in ((self._beat, "signs of life"), (self._judge, "others' signs of life")):
            threading.Thread(target=run, name=name, daemon=True).start()
        atexit.register(self._at_exit)
        found = self.gather("the start", [socket.gethostname(), self.processes], patient=True)
        rendezvous.check_counts(self.index, self.processes, found)
        self.hosts = tuple(host for host, _ in found)

    def start(self, mesh_devices: int) -> tuple[Any, ...]:
        """JAX's devices by rank, including those of this process; connects to the other processes first.

        Raises:
          UserError: the mesh cannot be divided equally, or a process has other devices than its part.
        """
        self.join()
        self._devices = self.devices_of(mesh_devices)
        with self.doing("starting its devices", patient=True):
            return jax_compat.devices(mesh_devices, self.processes)

    def device_count(self) -> int:
        """Number of JAX's devices in all processes; connects to the other processes first."""
        self.join()
        with self.doing("starting its devices", patient=True):
            return jax_compat.device_count()

    def devices_of(self, mesh_devices: int) -> int:
        """Devices of one process, if the mesh has `mesh_devices`; UserError if they cannot be divided
        equally."""
        count, left = divmod(mesh_devices, self.processes)
        if left or not count:
            raise UserError(
                f"a mesh of {mesh_devices} devices cannot be divided equally among the {self.processes} "
                f"processes of the job; choose a mesh whose size is a multiple of {self.processes}"
            )
        return count

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the job: together with the others, or because of an error, which is sent to them."""
        if not self.joined or self._ended.is_set():
            return
        try:
            if error is None and not self.failure:
                for call in self._before_end:
                    call()
                self.gather("the end", None, patient=True)
                self._ended.set()
                rendezvous.leave()
        except BaseException as found:  # of what this process does last
            error = found
            raise
        finally:
            left = self._ended.is_set()
            self._ended.set()
            if error is not None and not self.failure and not left:
                self._report(_text(error))
                rendezvous.drop()

    def before_end(self, call: Callable[[], object]) -> None:
        """Registers a function to call when this process is about to leave together with the others."""
        self._before_end.append(call)

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)

    def _at_exit(self) -> None:
        with contextlib.suppress(ClusterError):
            self.close(getattr(sys, "last_value", None))
        if self.failure:  # at its end, a library may wait for the others
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ClusterError.exit_code)

    # -- while it runs ---------------------------------------------------------------------------------------

    def gather(self, what: str, value: Any, patient: bool = False) -> list[Any]:
        """Every process's value, by index. All processes must call it, in the same order.

        Args:
          what: what is awaited, for messages.
          value: a JSON value.
          patient: wait up to an hour for a process that lives, not `timeout` seconds.
        """
        number, self._rounds = self._rounds, self._rounds + 1
        with self.doing(what, patient):
            self.store.put(f"round/{number}/{self.index}", json.dumps(value))
            found = [self.fetch(f"round/{number}/{i}") for i in range(self.processes)]
            if number:  # everybody has read it before coming here
                self.store.drop(f"round/{number - 1}/{self.index}")
        return found

    def share(self, what: str, make: Callable[[], Any]) -> Any:
        """Broadcasts to all processes the value that worker 0 makes; worker 0 may take its time."""
        return self.gather(what, make() if self.is_writer else None, patient=True)[0]

    def same(self, what: str, value: Any) -> None:
        """Raises ClusterError unless `value` is equal in all processes."""
        values = self.gather(what, value, patient=True)
        for i, other in enumerate(values):
            if other != values[0]:
                raise ClusterError(
                    f"{what} differs between processes: {values[0]!r} in {self.name(0)}, {other!r} in "
                    f"{self.name(i)}; start every process with the same command and the same files"
                )

    def name(self, index: int) -> str:
        """The name of a process in messages."""
        parts = [self.hosts[index]] if self.hosts else []
        if self._devices:
            first, last = index * self._devices, (index + 1) * self._devices - 1
            parts.append(f"device {first}" if first == last else f"devices {first} to {last}")
        return f"worker {index} ({', '.join(parts)})" if parts else f"worker {index}"

    def post(self, key: str, value: Any) -> None:
        """Stores a JSON value for the others to `fetch`; may be called in any thread."""
        self.check()
        try:
            self.store.post(key, value)
        except RuntimeError:
            self.explain(key)
            raise

    def fetch(self, key: str) -> Any:
        """The value that another process posts, once it is posted; callable from any thread.

        Raises:
          ClusterError: the job has failed, or no value arrived within `watch.PATIENT` seconds.
        """
        until = time.monotonic() + watch.PATIENT
        while time.monotonic() < until:
            self.check()
            if (text := self.store.wanted(key)) is not None:
                return json.loads(text)
        raise ClusterError(
            f"the message {key!r} from another process did not arrive within {watch.PATIENT:.0f} s, or was "
            "deleted; restart the job"
        )

    @contextlib.contextmanager
    def doing(self, what: str, patient: bool = False) -> Iterator[None]:
        """Wraps an action that needs all processes, or makes them wait; all must run these in the same order.

        Args:
          patient: it may take long.
        """
        self.check()
        self._watch.does(f"in {what}", 1, patient)
        yield
        self._watch.does(f"after {what}", 0, patient)

    def check(self) -> None:
        """Raises ClusterError if the job has failed, or this process is no part of it."""
        if not self.joined or self._ended.is_set():
            raise ClusterError(OUTSIDE)
        if self.failure:
            raise ClusterError(self.failure)

    def explain(self, what: str) -> None:
        """Raises the job's failure as ClusterError, if there is one, after JAX reported that `what`
        failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, watch.SILENCE + GRACE)
        if self.failure:
            raise ClusterError(f"{self.failure} ({self.name(self.index)} was at: {what})")

    # -- an end after the same step --------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """Asks all processes to end after the same step (`begins`); signal handlers may call it."""
        self._asks = True

    def begins(self, step: int) -> bool:
        """True if all processes run the step that this one is about to begin; all processes get the same
        answer.

        A collective needs every process, so none may end before a step that another has begun. Once a process
        has asked to stop, each reports the last step that it began and begins no further step until the last
        one is known.
        """
        with self._changed:
            if self._stopping:
                self._changed.wait_for(lambda: self.failure or self._last is not None)
            self.check()
            if self._last is not None and step > self._last:
                return False
            self._begun = max(self._begun, step)
            return True

    # -- signs of life ---------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Says what this process does, and reads what the others do; in a thread."""
        number = 0
        while not self._ended.is_set():
            number += 1
            state = [number, *self._watch.own.told()]
            asks = self._asks and not self._stopping
            found = tried(lambda state=state, asks=asks: self._exchanged(state, asks))  # type: ignore[misc]
            if found is not None:
                self._heard(found)
            self._ended.wait(BEAT / 10 if self._stopping and self._last is None else self._pace)

    @property
    def _pace(self) -> float:
        """Many processes speak more seldom, so that the one that listens keeps up."""
        return BEAT * max(1.0, min(3.0, self.processes / 128))

    def _exchanged(self, state: list[Any], asks: bool) -> dict[str, str]:
        self.store.put(f"{NOW}/{self.index}", json.dumps(state))
        if asks:
            self.store.put(f"{NOW}/stop", "1")
        return self.store.under(NOW)

    def _heard(self, found: dict[str, str]) -> None:
        self._watch.hears({int(key): json.loads(state) for key, state in found.items() if key.isdigit()})
        if "stop" in found and not self._stopping:
            with self._changed:
                self._stopping, begun = True, self._begun
            tried(lambda: self.store.put(f"{NOW}/begun {self.index}", str(begun)))
        last = [int(value) for key, value in found.items() if key.startswith("begun ")]
        if self._last is None and len(last) == self.processes:
            with self._changed:
                self._last = max(last)
                self._changed.notify_all()
        if "failure" in found:
            self._fail(found["failure"])

    def _judge(self) -> None:
        """Finds out who is missing; in a thread of its own, since `_beat` may hang with the service."""
        awake = time.monotonic()
        while not self._ended.wait(BEAT / 2):
            now, before = time.monotonic(), awake
            awake = now
            if now - before > watch.SILENCE / 2:  # this process stood still, perhaps with all the others
                self._watch.starts_anew()
            elif text := self._watch.missing(self.name):
                self._fail(text)
                return

    def _report(self, text: str) -> None:
        """Tells everybody that this process fails, and gives them the time to hear it."""
        tried(lambda: self.store.put(f"{NOW}/failure", f"{self.name(self.index)} failed: {text}", False))

    def _fail(self, text: str) -> None:
        """Ends what waits for others, then the process if need be."""
        with self._changed:
            if self._ended.is_set() or self.failure:
                return
            self.failure = text
            self._changed.notify_all()
        tell = partial(self.store.put, f"{NOW}/failure", text, False)
        threading.Thread(target=tried, args=(tell,), name="telling", daemon=True).start()
        threading.Thread(target=self._end, args=(text,), name="end of the job", daemon=True).start()

    def _end(self, text: str) -> None:
        if not self._ended.wait(GRACE):
            self.tell(text)
            os._exit(ClusterError.exit_code)


def _text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped"
    said = " ".join(str(error).split())
    return said if isinstance(error, ClusterError) and said else f"{type(error).__name__}: {said[:500]}"
