"""Somebody who is no part of a job and talks to its coordinator, as any user of the machine can to a port.

    python stranger.py ADDRESS OUTSIDE

Joins under a number of the job (JAX's service lets that in), reads what lies there, and writes messages of
its own: a failure, a wish to stop, other signs of life, and before every checkpoint a folder that is named by
OUTSIDE; then messages of the job that it has recorded, under other keys. Prints what it could do, as JSON. It
imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

from jaxlib import _jax

ROOT = "layoutopt/"
CHECKPOINTS = 60
SECONDS = 5.0


def main() -> None:
    address, outside = sys.argv[1:]
    found: dict[str, object] = {"joined": False, "read": 0, "written": 0, "uid": os.getuid()}
    if address.startswith("unix:"):  # JAX would abort this process
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(address.removeprefix("unix:"))
            except OSError as error:
                print(json.dumps({**found, "error": error.strerror}))
                return
    client = _jax.get_distributed_runtime_client(address, 1, init_timeout=3, shutdown_on_destruction=False)
    try:
        client.connect()
        found["joined"] = True
        forged = {"now/failure": "a stranger ends this job", "now/stop": "1", "now/begun 1": "1"}
        forged["now/1"] = json.dumps([10**9, "in a step", 0.0, 10**9, True])
        forged["now/7"] = "\u202ejunk"
        for number in range(1, CHECKPOINTS):
            forged[f"checkpoint {number}/folder"] = json.dumps({"said": [outside]})
        recorded = dict(client.key_value_dir_get(ROOT))
        found["read"] = len(recorded)
        for key, value in forged.items():
            with_key = ROOT + key
            if key.startswith("now/") or with_key not in recorded:
                client.key_value_set(with_key, value, allow_overwrite=True)
                found["written"] = int(str(found["written"])) + 1
        until = time.monotonic() + SECONDS
        old = recorded.get(ROOT + "now/1", "")
        while time.monotonic() < until:  # what the job itself wrote, again and under other keys
            for key in ("now/1", "now/0", "now/failure"):
                client.key_value_set(ROOT + key, old, allow_overwrite=True)
            time.sleep(0.5)
    except RuntimeError as error:
        found["error"] = str(error).split("\n")[0][:200]
    print(json.dumps(found), flush=True)
    os._exit(0)  # without a word to the others


if __name__ == "__main__":
    main()
