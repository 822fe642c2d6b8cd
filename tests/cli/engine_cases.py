"""Commands with `--engine jax`, in a process of their own, where nobody has started JAX.

    JAX_PLATFORMS=cpu python -m tests.cli.engine_cases

Prints one JSON object: command -> what it printed, or what went wrong.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from layoutopt.cli import app
from layoutopt.cli.measure import NAME
from mesh_tf_core.engines.jax import compat

MLP = "examples/mlp.py"
ON = ("--mesh", "data:2;model:4", "--layout", "batch:data;hidden:model")
TRACE = "TRACE"
"""Stands for a folder."""
TRAIN = ("train", MLP, *ON, "--steps", "20", "--held-out", "2", "--set", "hidden=256")
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": TRAIN,
    "measure": ("measure", MLP, *ON, "--steps", "2", "--warm-up", "1", "--trace", TRACE),
    "validate": ("validate", MLP, "--mesh", "data:2", "--layouts", "2", "--steps", "1"),
}


EAGER = """import jax

from examples.mlp import data, model

KEY = jax.random.key(0)  # JAX has started before anything is known of the mesh
"""
"""The same model, from a file that uses JAX."""


def torn(place: Path) -> list[float]:
    """Sizes of a kept program that was cut off, as by a killed writer, and compiled twice since; the whole is
    1."""
    import jax

    def small(x: Any) -> Any:
        return x + 1.0

    def made() -> Path:
        jax.clear_caches()
        compat.compiled(jax.jit(small).lower(1.0))
        (path,) = place.glob("jit_small-*-cache")
        return path

    path = made()
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[: whole // 2])
    return [made().stat().st_size / whole for _ in range(2)]


def main() -> None:
    said: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        compat.LONG = 0.0  # a fast machine compiles these in less
        file, traced = Path(cache, "eager.py"), Path(cache, "traced")
        file.write_text(EAGER, encoding="utf-8")
        for name, (command, _, *words) in COMMANDS.items():
            words = [str(traced) if word == TRACE else word for word in words]
            line = [command, str(file), *words, "--engine", "jax", "--json", "--quiet"]
            done = CliRunner().invoke(app, line)
            said[name] = json.loads(done.stdout) if done.exit_code == 0 else done.output
        said["traced"] = json.loads(gzip.decompress((traced / NAME).read_bytes()))["traceEvents"]
        place = Path(cache) / "layoutopt" / "compiled"
        said["kept"] = [oct(place.stat().st_mode & 0o777), len(list(place.iterdir()))]
        said["again"] = torn(place)
    said["libraries"] = sorted({"jax", "tensorflow"} & set(sys.modules))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
