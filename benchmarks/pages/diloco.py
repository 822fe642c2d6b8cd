"""Replicas that synchronise every H steps (DiLoCo): loss, links, bandwidth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from benchmarks.pages.tables import caption, share, stored, table

HEAD = """\
# Replicas that synchronise every H steps

[DiLoCo](../guides/diloco.md) trades loss for communication. This page has both sides.

## When it pays

A model of 70,553,706,496 parameters on four slices of 8 x 16 TPU v5e, 512 sequences of 4,096 tokens a step.
The bandwidth is that of one slice to the others. Every row is proven optimal unless the table says
otherwise.
"""
LOSS = """\
## Loss

A language model of 69,360 parameters learns the sources of Python's standard library. A step has 64 windows
of 32 bytes unless the table says otherwise. Replicas share them. The loss is on files that no run trained
on, after the last synchronisation.
"""
BANDWIDTH = """\
## Bandwidth for a given utilisation

Published tables give the bandwidth at which a share of the time is compute, from a simulator that is not
published. The rule of `benchmarks/diloco_utilisation.py` computes the same entries; the bandwidths form a
grid of 50 points.
"""


def page() -> Iterator[str]:
    """docs/results/diloco.md."""
    yield HEAD
    links = stored("diloco_links")
    yield caption(links["command"], "diloco_links")
    yield from table(
        ("Gbit/s", "way", "step", "MFU", "memory", "status"),
        (
            (
                r["gigabits"],
                r["way"],
                f"{r['seconds']:.1f} s",
                share(r["mfu"]),
                f"{r['gib']:.1f} GiB",
                r["status"],
            )
            for r in links["rows"]
        ),
    )
    yield LOSS
    found = stored("diloco")
    yield caption(found["command"], "diloco")
    yield from table(("steps", "case", "runs", "held-out loss", "least to most"), _losses(found["rows"]))
    yield BANDWIDTH
    used = stored("diloco_utilisation")
    yield caption(used["command"], "diloco_utilisation")
    yield from table(("table", "entries", "same point", "same or neighbouring point"), _points(used["rows"]))


def _losses(rows: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    by = defaultdict(list)
    for r in rows:
        by[r["steps"], r["case"]].append(r["held_out"])
    for (steps, case), losses in by.items():
        between = f"{min(losses):.3f} to {max(losses):.3f}" if len(losses) > 1 else ""
        yield f"{steps:,}", case, len(losses), f"{fmean(losses):.3f}", between


def _points(rows: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    by = defaultdict(list)
    for r in rows:
        by[r["table"]].append(r)
    for name, own in by.items():
        off = [abs(r["points_apart"]) for r in own]
        yield name, len(off), sum(o == 0 for o in off), sum(o <= 1 for o in off)
