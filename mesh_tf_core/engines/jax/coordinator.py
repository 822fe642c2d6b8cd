"""Where the processes of a job meet: JAX's coordination service, in a process of its own.

    python coordinator.py ADDRESS:PORT PROCESSES

The first process of the job starts it and holds its standard input. JAX aborts every process of a job at
once when the one that holds the service is lost. This one outlives that until nobody is connected any more,
at most `LINGER` seconds, in which the others find out and say who it was; then its port is free for the next
start. It imports nothing of ours.
"""

from __future__ import annotations

import os
import signal
import sys
import time

LINGER = 20.0
"""Seconds that the service outlives a first process that ended without a word, at most."""
HEARTBEAT = 3600
"""Seconds of silence after which JAX gives a process up: `cluster.Cluster` is the one that watches."""
LEAVE = 5.0
"""The same after a job that is done: JAX aborts one that is still leaving when the service goes."""
DONE = "done"
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
        address, int(processes), heartbeat_timeout=HEARTBEAT, shutdown_timeout=1
    )
    print("ready", flush=True)
    said = sys.stdin.read()
    until = time.monotonic() + (LEAVE if said == DONE else LINGER)
    while time.monotonic() < until and connected(int(address.rpartition(":")[2])):
        time.sleep(LOOK)
    del service
    sys.stdout.flush()


if __name__ == "__main__":
    main()
