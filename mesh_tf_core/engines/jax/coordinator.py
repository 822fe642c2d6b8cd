"""Where the processes of a job meet: JAX's coordination service, in a process of its own.

    python coordinator.py ADDRESS:PORT PROCESSES

The first process of the job starts it and holds its standard input. JAX aborts every process of a job at once
when the one that holds the service is lost. This one outlives that by `LINGER` seconds, in which the others
find out and say who it was. It imports nothing of ours.
"""

from __future__ import annotations

import signal
import sys
import time

LINGER = 20.0
"""Seconds that the service outlives a first process that ended without a word."""
HEARTBEAT = 3600
"""Seconds of silence after which JAX gives a process up: `cluster.Cluster` is the one that watches."""
LEAVE = 5.0
"""Seconds that it outlives the first process of a job that is done: JAX aborts one that is still leaving when
the service goes."""
DONE = "done"


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
    time.sleep(LEAVE if said == DONE else LINGER)
    del service
    sys.stdout.flush()


if __name__ == "__main__":
    main()
