"""Commands with `--engine jax`, in a process of their own, where nobody has started JAX.

    JAX_PLATFORMS=cpu python -m tests.cli.engine_cases

Prints one JSON object: command -> what it printed, or what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from layoutopt.cli import app

MLP = "examples/mlp.py"
ON = ("--mesh", "data:2;model:4", "--layout", "batch:data;hidden:model")
TRAIN = ("train", MLP, *ON, "--steps", "20", "--held-out", "2", "--set", "hidden=256")
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": TRAIN,
    "measure": ("measure", MLP, *ON, "--steps", "2", "--warm-up", "1"),
    "validate": ("validate", MLP, "--mesh", "data:2", "--layouts", "2", "--steps", "1"),
}


def main() -> None:
    said: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name, words in COMMANDS.items():
            done = CliRunner().invoke(app, [*words, "--engine", "jax", "--json", "--quiet"])
            said[name] = json.loads(done.stdout) if done.exit_code == 0 else done.output
        place = Path(cache) / "layoutopt" / "compiled"
        said["kept"] = [oct(place.stat().st_mode & 0o777), len(list(place.iterdir()))]
    said["libraries"] = sorted({"jax", "tensorflow"} & set(sys.modules))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
