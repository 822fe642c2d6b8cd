"""Every benchmark can be imported: what it takes from the packages is still there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVERY = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))


def test_every_benchmark_can_be_imported() -> None:
    """In a process of its own, as some of them set up devices for JAX."""
    program = f"import importlib\nfor name in {EVERY}: importlib.import_module('benchmarks.' + name)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
