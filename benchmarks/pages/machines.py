"""The reference of hardware presets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import fmean

from benchmarks.pages.tables import prose, share, table
from costmodels.hardware import Hardware, hardware_names, load_hardware
from costmodels.hardware.known import FILE
from layoutopt.plan.units import bytes_text, rate_text

HEAD = """\
# Hardware presets

`--hardware NAME` takes a preset or a JSON file. `layoutopt hardware NAME` prints every number with its
source and date. `--set-hardware node_egress=100GB/s` changes one number. The guide to extending
layoutopt shows how to [add a chip](../guides/extending.md#a-chip).

Besides the presets of the table, `cpu-local` is your machine after
[calibration](../explanation/calibration.md), and `cpu-jax` describes XLA on virtual CPU devices.

The mean error is that of predicted step times, under all frameworks, of runs that had no part in a fit
([by kind](../results/accuracy.md#by-kind-of-run)).
"""
HEADS = (
    "name",
    "one device",
    "peak, bfloat16",
    "usable memory",
    "memory bandwidth",
    "network",
    "mean error (runs)",
)


def page() -> Iterator[str]:
    """docs/reference/hardware.md."""
    yield prose(HEAD)
    machines = (load_hardware(name) for name in hardware_names() if not name.startswith("cpu-"))
    yield from table(HEADS, map(_row, machines))


def _row(machine: Hardware) -> tuple[object, ...]:
    return (
        f"`{machine.name}`",
        machine.device,
        rate_text(machine.peak_flops("bfloat16"), "FLOP/s"),
        f"{bytes_text(machine.usable_memory_bytes)} of {bytes_text(machine.memory_bytes)}",
        rate_text(machine.memory_bandwidth, "B/s"),
        machine.topology.kind,
        _error(machine),
    )


def _error(machine: Hardware) -> str:
    kinds = json.loads(FILE.read_text(encoding="utf-8"))["kinds"]
    own = (k for k in kinds if k["hardware"] == machine.name and not k["fitted"])
    errors = [abs(e) for k in own for e in k["seconds"]]
    return f"{share(fmean(errors))} ({len(errors)})" if errors else "not compared"
