"""The examples at published sizes, as searched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.pages.tables import caption, share, stored, table
from layoutopt.plan.units import bytes_text, seconds_text

HEAD = """\
# Examples at published sizes

A file of `examples/` has a small `model` that trains in minutes, and models of published sizes by name.
`--set` changes every hyperparameter of both. Parameter counts agree with Meta's, DeepSeek's and OpenAI's
checkpoints, with torchvision, transformers and Ho et al. 2020; DLRM has 26 tables of 2^20 rows. The
searches use presets as they ship and meshes of up to two axes. CPU seconds are those of the whole
command.
"""


def page() -> Iterator[str]:
    """docs/results/examples.md."""
    yield HEAD
    yield caption("python benchmarks/examples_searched.py", "examples")
    heads = ("command", "parameters", "layout", "decided", "step", "MFU", "memory", "status", "CPU seconds")
    yield from table(heads, map(_row, stored("examples").values()))


def _row(found: dict[str, Any]) -> tuple[object, ...]:
    decided = [*found["storage"], *(f"recompute {loop}" for loop in found["recompute"])]
    parts = found["microbatches"]
    decided += [f"{parts} microbatches"] if parts > 1 else []
    return (
        f"`{found['command']}`",
        f"{found['parameters']:,}",
        f"`{found['mesh']}`: `{found['layout']}`",
        "; ".join(decided),
        seconds_text(found["step_seconds"]),
        share(found["mfu"]),
        bytes_text(found["peak_memory_bytes"]),
        found["status"],
        found["cpu_seconds"],
    )
