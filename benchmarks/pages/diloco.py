"""Replicas that synchronise every H steps (DiLoCo): loss, links, bandwidth."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from benchmarks import small_lm
from benchmarks.diloco import HEADS, LAYERS
from benchmarks.diloco import LENGTH as WINDOW
from benchmarks.diloco_links import BATCH, LENGTH, SLICE, SLICES
from benchmarks.diloco_utilisation import GRID
from benchmarks.pages.tables import caption, prose, span, stored, table

HEAD = """\
# Replicas that synchronise every H steps

[DiLoCo](../guides/diloco.md) saves communication but raises the loss.

## When it pays

The table shows predicted seconds of a step for several bandwidths between slices. A model of 70 billion
parameters (Llama 3's sizes) trains on {slices} slices of {slice} TPU v5e, on {sequences} sequences of
{tokens:,} tokens a step. {status}
"""
LOSS = """\
## Loss

A language model of {parameters:,} parameters is trained on the source code of Python's standard library. The
replicas share the {batch} windows of {length} bytes of a step. The loss is measured on held-out files
after the last synchronisation and averaged over {seeds} runs.
"""
BANDWIDTH = """\
## Bandwidth for a given utilisation

Two papers list the bandwidth at which a given share of the time is compute, for several periods; their
simulator is not published. `benchmarks/diloco_utilisation.py` predicts the same entries. All bandwidths
lie on a grid of {points} points. The table counts the predictions that hit the published point, or this
point or a neighbour.
"""


def page() -> Iterator[str]:
    """docs/results/diloco.md."""
    links = stored("diloco_links")
    statuses = Counter(r["status"] for r in links["rows"])
    proven = f"{statuses.pop('OPTIMAL')} of {len(links['rows'])} plans are proven optimal."
    sizes = {"slices": SLICES, "slice": " × ".join(map(str, SLICE)), "sequences": BATCH, "tokens": LENGTH}
    yield prose(HEAD, **sizes, status=proven if statuses else "Every plan is proven optimal.")
    yield caption(links["command"], "diloco_links")
    speeds = sorted({r["gigabits"] for r in links["rows"]})
    heads = ("synchronisation of slices", *(f"{g:,} Gbit/s" for g in speeds))
    yield from table(heads, _links(links["rows"], speeds))
    found = stored("diloco")
    (batch,) = {r["batch"] for r in found["rows"]}
    yield prose(
        LOSS,
        parameters=small_lm.build(HEADS, LAYERS, length=WINDOW).parameters,
        length=WINDOW,
        batch=batch,
        seeds=len({r["seed"] for r in found["rows"]}),
    )
    yield caption(found["command"], "diloco")
    heads = (
        "replicas",
        "period",
        "outer rate, momentum",
        "inner rate",
        "steps",
        "held-out loss",
        "range",
    )
    yield from table(heads, _losses(found["rows"]))
    yield prose(BANDWIDTH, points=len(GRID))
    used = stored("diloco_utilisation")
    yield caption(used["command"], "diloco_utilisation")
    yield from table(
        ("published table", "entries", "same point", "same or neighbouring point"), _points(used["rows"])
    )


def _links(rows: list[dict[str, Any]], speeds: list[int]) -> Iterator[tuple[object, ...]]:
    by: dict[str, dict[int, float]] = defaultdict(dict)
    for r in rows:
        by[r["way"].removeprefix("sites, ")][r["gigabits"]] = r["seconds"]
    for way in sorted(by, key=lambda way: (way == "synchronous", len(way), way)):
        yield way, *(f"{by[way][g]:.1f}" for g in speeds)


def _losses(rows: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    by: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for r in rows:
        alone = r["replicas"] == 0
        how = ("none (synchronous)", "", "") if alone else (r["replicas"], r["period"], _pair(r["outer"]))
        by[(*how, r["rate"], f"{r['steps']:,}")].append(r["held_out"])
    for case, losses in by.items():
        yield *case, f"{fmean(losses):.3f}", span(losses, "{:.3f}")


def _pair(values: list[float]) -> str:
    return ", ".join(f"{v:g}" for v in values)


def _points(rows: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    by = defaultdict(list)
    for r in rows:
        by[r["table"]].append(r)
    for name, own in by.items():
        off = [abs(r["points_apart"]) for r in own]
        yield name, len(off), sum(o == 0 for o in off), sum(o <= 1 for o in off)
