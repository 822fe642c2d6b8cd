"""The examples at published sizes, as searched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.pages.tables import caption, prose, share, stored, table
from layoutopt.plan.units import bytes_text, seconds_text

HEAD = """\
# Examples at published sizes

Each file of `examples/` defines a small `model`, which trains in minutes, and models of published
sizes. `--set` changes any hyperparameter. Parameter counts agree with the published checkpoints (Meta,
DeepSeek, OpenAI), torchvision, transformers and Ho et al. 2020; DLRM has 26 tables of 2^20 rows.
Searches use the presets as they ship and meshes of up to two axes. CPU seconds are those of the whole
command.
"""


def page() -> Iterator[str]:
    """docs/results/examples.md."""
    yield prose(HEAD)
    yield caption("python benchmarks/examples_searched.py", "examples")
    heads = (
        "command",
        "parameters",
        "layout",
        "other decisions",
        "step",
        "MFU",
        "memory",
        "status",
        "CPU seconds",
    )
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
