"""Connects a job's processes with JAX's distributed runtime, with as few open ports as possible and with
errors that name missing processes. `join` has all code that depends on JAX's internals."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mesh_tf_core.engines.jax import compat as jax_compat
from mesh_tf_core.engines.jax import coordinator
from mesh_tf_core.engines.jax.codes import Codes, given_secret
from mesh_tf_core.engines.jax.coordinator import HEARTBEAT
from mesh_tf_core.engines.jax.store import BEAT, NOW, JobStore
from mesh_tf_core.engines.jax.watch import SILENCE
from mesh_tf_core.errors import ClusterError, UserError

ADDRESS, PROCESSES, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
SOCKET = coordinator.SOCKET
LONGEST_SOCKET = 107
"""Bytes of the name of a Unix socket, in Linux."""
ABORTS = 3600
"""Seconds after this process until JAX stops waiting for the others and aborts the process."""
LOOPBACK = "127.0.0.1"
REFUSED = "bad_cast"
"""JAX's message to a process that its service refuses."""
OWN = "number the processes from 0, each number once, and start all with the same --processes"


@dataclass(frozen=True)
class JobAddress:
    """The address where a job's processes connect, their number, and the rank of this one; JAX finds values
    that are None. The processes authenticate each other's messages with the secret."""

    coordinator: str | None
    processes: int | None
    process: int | None
    secret: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, coordinator: str | None, processes: int | None, process: int | None) -> JobAddress:
        """Replaces None by values of the environment; UserError if they are inconsistent."""
        coordinator = coordinator or os.environ.get(ADDRESS) or None
        processes = _number(PROCESSES) if processes is None else processes
        process = _number(PROCESS) if process is None else process
        if coordinator is None:
            if (processes, process) != (None, None):
                raise UserError(
                    "cluster: a rank or a number of processes is set, but not the coordinator's "
                    f"address; give HOST:PORT of process 0 with --coordinator or {ADDRESS}"
                )
            return cls(None, None, None, given_secret())
        host, colon, port = coordinator.rpartition(":")
        if coordinator.startswith(SOCKET):
            if not 0 < len(os.fsencode(coordinator.removeprefix(SOCKET))) <= LONGEST_SOCKET:
                raise UserError(
                    f"cluster: the name of the socket {coordinator[:200]!r} is empty or longer than "
                    f"{LONGEST_SOCKET} bytes; choose a shorter name (for launch, set TMPDIR=/tmp)"
                )
        elif not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise UserError(
                f"cluster: coordinator {coordinator!r} is not an address HOST:PORT; write e.g. host0:12345"
            )
        if processes is None or process is None:
            raise UserError(
                f"cluster: coordinator {coordinator} also needs the number of processes and the rank of "
                f"this process; give --processes and --process, or set {PROCESSES} and {PROCESS}"
            )
        if not 0 <= process < processes:
            raise UserError(
                f"cluster: rank {process} does not exist among {processes} processes; use a rank from 0 "
                f"to {processes - 1}"
            )
        return cls(coordinator, processes, process, given_secret())


def _number(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise UserError(f"cluster: {name} is {text[:40]!r}; set it to a whole number of at most six digits")
    return int(text)


def join(place: JobAddress, timeout: float) -> tuple[JobStore, int, int]:
    """Connects to the other processes; returns the key-value store, this process's rank, and the number of
    processes.

    Two servers then listen: the coordinator at its own address, and in every process the collectives of CPU
    devices at the address by which it reaches the coordinator. On one machine this address is loopback, and
    the coordinator may listen on a Unix socket, which no other user can connect to.

    Raises:
      UserError: JAX finds no other processes or runs already, or the port is in use.
      ClusterError: not all processes connected within `timeout` seconds, or they have different secrets.
    """
    jax_compat.make_ready()
    import jax
    from jax._src import distributed
    from jaxlib import _jax

    if jax_compat.running():
        raise UserError(
            "cluster: JAX has already started in this process; open the cluster before the first JAX "
            "computation"
        )
    jax.config.update("jax_enable_preemption_service", False)  # signals have an owner
    state = distributed.global_state
    own: list[str | None] = [None]
    met: list[JobStore] = []

    def serve(bind: str, processes: int, **_: Any) -> _Coordinator:
        address = _own_address(state.coordinator_address or bind)
        port = bind.rpartition(":")[2]
        if state.coordinator_address.startswith(SOCKET):
            bind = state.coordinator_address
        elif address is not None and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
            bind = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        return _Coordinator(bind, processes)

    def connect(*args: Any, **options: Any) -> Any:
        # Without a function to call JAX aborts a process that the service refuses. It calls none, for it
        # cannot make Python's object of the reason: the connecting fails with `REFUSED`.
        call = {"missed_heartbeat_callback": lambda _: None}
        return client(*args, **options, **call, shutdown_on_destruction=False)

    service, client = _jax.get_distributed_runtime_service, _jax.get_distributed_runtime_client
    _jax.get_distributed_runtime_service, _jax.get_distributed_runtime_client = serve, connect

    def initialize() -> None:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process,
            cluster_detection_method=None if place.coordinator is None else "deactivate",
            initialization_timeout=round(timeout) + ABORTS,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=60,  # all have come to the end; JAX aborts those that it does not see
        )
        store = JobStore(state.client, Codes(place.secret))
        take_number(store, state.process_id, state.num_processes, state.coordinator_address)
        store.begin_run(state.num_processes)
        met.append(store)

    try:
        _within(timeout, initialize)
    except ValueError as error:
        if isinstance(error, UserError):
            drop()
            raise
        raise UserError(
            "cluster: JAX found no job of Slurm, Kubernetes, Open MPI or a Cloud TPU here; give "
            "--coordinator HOST:PORT --processes N --process I, or start local processes with `layoutopt "
            "launch`"
        ) from None
    except TimeoutError:
        raise ClusterError(
            f"not all processes of the job connected to {state.coordinator_address or place.coordinator} "
            f"within {timeout:.0f} s; check that each was started with this address and its own rank, or "
            "wait longer with --start-timeout"
        ) from None
    except RuntimeError as error:
        if REFUSED in str(error):
            drop()
            raise UserError(
                f"cluster: the coordinator at {state.coordinator_address} rejected process "
                f"{state.process_id} of {state.num_processes}: another process has the same number, or "
                f"the job has fewer processes; {OWN}"
            ) from None
        raise ClusterError(
            f"this process cannot connect to the job's coordinator at {state.coordinator_address} "
            f"({' '.join(str(error).split())[:200]}); check the address and that process 0 is running"
        ) from None
    finally:
        _jax.get_distributed_runtime_service, _jax.get_distributed_runtime_client = service, client
    own[0] = _own_address(state.coordinator_address)
    gloo = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = lambda distributed_client: gloo(distributed_client, hostname=own[0])
    return met[0], state.process_id, state.num_processes


def take_number(store: JobStore, process: int, processes: int, where: str) -> None:
    """Takes this process's number in the job at `where`.

    The service accepts a process with a rank of a running job, because it might be the old process,
    restarted. No process of the job learns of it before it has the rank.

    Raises:
      UserError: another process has the number.
      ClusterError: another process had it and was lost, so its job is about to end.
    """
    try:
        store.take_number(process)
        return
    except RuntimeError:  # this process does not know the codes of a run that began without it
        first, until = store.raw(f"{NOW}/{process}"), time.monotonic() + SILENCE
    while time.monotonic() < until:
        time.sleep(BEAT / 2)
        if store.raw(f"{NOW}/{process}") != first:
            drop()
            raise UserError(
                f"cluster: the job at {where} already has a process {process} (of {processes}); {OWN}"
            )
    drop()
    raise ClusterError(
        f"process {process} of {processes} joined the job at {where} earlier and no longer responds; "
        "start again when that job has ended"
    )


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Makes a call that cannot be interrupted; TimeoutError if it takes longer, and then it goes on."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="meeting", daemon=True).start()
    done.result(seconds)


def leave() -> None:
    """Leaves the job together with the others."""
    import jax

    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()


def check_counts(own: int, processes: int, found: Sequence[tuple[str, int]]) -> None:
    """UserError unless all processes count as many.

    Args:
      own: rank of this process, which expects `processes` processes.
      found: machine of each process, and the number of processes that it expects.
    """
    for i, (host, count) in enumerate(found):
        if count != processes:
            raise UserError(
                f"cluster: worker {i} ({host}) was started for {count} processes, worker {own} for "
                f"{processes}; start all with the same --processes"
            )


def drop() -> None:
    """Leaves without the others: at the end of this process JAX would wait for them for a minute."""
    from jax._src import distributed

    distributed.global_state.client = distributed.global_state.service = None


def _own_address(coordinator: str) -> str | None:
    """The address of this machine by which it reaches the coordinator; None if a name in a network leads to
    loopback here, as a machine's own name may."""
    if coordinator.startswith(SOCKET):
        return LOOPBACK
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, *_, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            found = str(probe.getsockname()[0])
    except OSError:
        return None
    is_local = host == "localhost" or where[0] == host
    return found if is_local or not ipaddress.ip_address(found).is_loopback else None


def _check_free(bind: str) -> None:
    """UserError where somebody listens already, and goes on when the service of a job that was lost would be
    gone: JAX's would share the port, or take the name of the socket, and the processes of a job would meet in
    two places."""
    until = time.monotonic() + coordinator.LINGER
    while error := _taken(bind):
        if time.monotonic() > until:
            raise UserError(
                f"cluster: process 0 cannot listen on {bind} ({error.strerror}); check whether "
                "another job, or a second process 0, uses this address"
            )
        time.sleep(coordinator.LOOK)


def _taken(bind: str) -> OSError | None:
    """The error where somebody listens; None also for addresses of which JAX will say what is wrong."""
    in_use = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    if bind.startswith(SOCKET):  # a name without a listener is left over, and JAX replaces it
        with socket.socket(socket.AF_UNIX) as probe:
            return None if probe.connect_ex(bind.removeprefix(SOCKET)) else in_use
    host, _, port = bind.rpartition(":")
    try:
        family, kind, *_, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what ended has left it
            probe.bind(where)
    except OSError as error:
        return error if error.errno == errno.EADDRINUSE else None
    return None


class _Coordinator:
    """The coordination service in a process of its own; see `engines.jax.coordinator`."""

    def __init__(self, bind: str, processes: int) -> None:
        _check_free(bind)
        command = [sys.executable, "-P", coordinator.__file__, bind, str(processes)]
        with tempfile.TemporaryFile() as notes:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=notes, start_new_session=True
            )
            assert self._process.stdout is not None
            if not self._process.stdout.readline():
                notes.seek(0)
                lines = notes.read().decode(errors="replace").split("\n")
                told = next((line.strip() for line in reversed(lines) if line.strip()), "no reason given")
                raise UserError(
                    f"cluster: process 0 cannot listen on {bind} ({told[:200]}); check whether another "
                    "job uses this address"
                )
            self._process.stdout.close()

    def shutdown(self) -> None:
        """It ends by itself a little later."""
        assert self._process.stdin is not None
        self._process.stdin.close()
