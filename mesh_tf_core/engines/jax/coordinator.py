"""Where the processes of a job meet: JAX's coordination service, in a process of its own.

    python coordinator.py ADDRESS:PORT PROCESSES

The first process of the job starts it and holds its standard input. JAX aborts every process of a job at
once when the service goes. This one outlives the process that started it until nobody is connected any more,
at most `LINGER` seconds: all leave a job that is done, or find out that the first was lost and say so. Then
its port is free for the next start. It imports nothing of ours.
"""

from __future__ import annotations

import os
import signal
import sys
import time

LINGER = 20.0
"""Seconds that the service outlives the first process, at most."""
HEARTBEAT = 100_000_000
"""Seconds of silence after which JAX gives a process up, three years: `cluster.Cluster` is the one that
watches. JAX's own sign of life would end a process where another one has come with its number."""
LOOK = 0.2
"""Seconds between two looks at who is connected."""
ESTABLISHED = "01"
"""Of a connection, in Linux's tables of them."""


def connected(port: int) -> bool:
    """Whether somebody is connected to a port of this machine; True where the system does not tell."""
    tables = [path for path in ("/proc/net/tcp", "/proc/net/tcp6") if os.path.exists(path)]
    for path in tables:
        with open(path, encoding="ascii") as file:
            for line in file:
                local, _, state = line.split()[1:4]
                if state == ESTABLISHED and local.endswith(f":{port:04X}"):
                    return True
    return not tables


def main() -> None:
    """Serves until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its process
    from jaxlib import _jax

    address, processes = sys.argv[1:]
    service = _jax.get_distributed_runtime_service(
        # Or it would end all of them when one comes with a number that is taken (see `meeting.take_number`).
        address,
        int(processes),
        heartbeat_timeout=HEARTBEAT,
        shutdown_timeout=1,
        recoverable=True,
    )
    print("ready", flush=True)
    sys.stdin.read()
    until = time.monotonic() + LINGER
    while time.monotonic() < until and connected(int(address.rpartition(":")[2])):
        time.sleep(LOOK)
    del service
    sys.stdout.flush()


if __name__ == "__main__":
    main()
