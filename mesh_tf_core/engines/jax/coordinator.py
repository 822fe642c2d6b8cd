"""The coordination service of a job's processes (JAX's), in a process of its own.

    python coordinator.py ADDRESS:PORT|unix:PATH PROCESSES

The first process of the job starts it and holds its standard input. JAX aborts every process of a job at once
when the service ends. This process therefore outlives the process that started it until no process is
connected, for at most `LINGER` seconds. All processes then leave a finished job, or detect and report that
the first was lost. Then its port is free for the next start, or its socket is removed with the folder around
it. It imports nothing of this library.
"""

import contextlib
import os
import signal
import sys
import time

from mesh_tf_core.reading import read_file

LINGER = 20.0
"""Seconds that the service outlives the first process, at most."""
HEARTBEAT = 100_000_000
"""Seconds of silence after which JAX gives a process up, three years: `cluster.Cluster` is the one that
watches. JAX's own heartbeat would end a process if another one has connected with its number."""
LOOK = 0.2
"""Seconds between two looks at who is connected."""
SOCKET = "unix:"
"""The host part of an address that is a Unix socket, which only processes with write permission can reach."""
ESTABLISHED, CONNECTED = "01", "03"
"""The numbers of an open connection in Linux's tables: of TCP, of Unix sockets."""


def connected(address: str) -> bool:
    """True if a process is connected to an address of this machine, or if the system does not report this."""
    tables = ["/proc/net/tcp", "/proc/net/tcp6"]
    path, port = "", ""
    if address.startswith(SOCKET):
        tables, path = ["/proc/net/unix"], address.removeprefix(SOCKET)
    else:
        port = f":{int(address.rpartition(':')[2]):04X}"

    def here(fields: list[str]) -> bool:
        if path:
            return [*fields[5:6], *fields[7:]] == [CONNECTED, path]
        return fields[3] == ESTABLISHED and fields[1].endswith(port)

    known = [table for table in tables if os.path.exists(table)]
    for table in known:
        lines = read_file(table).decode(errors="surrogateescape").split("\n")
        if any(here(line.split(None, 7)) for line in lines if line):
            return True
    return not known


def main() -> None:
    """Serves until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its process
    from jaxlib import _jax

    address, processes = sys.argv[1:]
    service = _jax.get_distributed_runtime_service(
        # Or it would end all of them when one comes with a number that is taken (`rendezvous.take_number`).
        address,
        int(processes),
        heartbeat_timeout=HEARTBEAT,
        shutdown_timeout=1,
        recoverable=True,
    )
    print("ready", flush=True)
    sys.stdin.read()
    until = time.monotonic() + LINGER
    while time.monotonic() < until and connected(address):
        time.sleep(LOOK)
    del service
    if address.startswith(SOCKET):
        path = address.removeprefix(SOCKET)
        with contextlib.suppress(OSError):  # `launch` tidies too
            os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
