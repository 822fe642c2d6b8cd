"""JAX models: what the import infers, whether numbers agree, how fast their plans run."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pages.tables import caption, stored, table

HEAD = """\
# JAX models of other libraries

Sixteen models as their libraries make them, without weights, mostly as wide as published and with fewer
layers. The expected dimensions were written down before the first import
(`benchmarks/jax_models_expected.json`); the table counts pairs of axes that are one dimension, or two, as
expected. Searches are for `data:8;model:8` of TPU v5p.
"""
NUMBERS = """\
## Losses and gradients

Narrow models of the same classes, without dropout. The table has the largest relative difference to JAX, on
one device and split over `data:2;model:2`.
"""
PLANS = """\
## Steps under their plans

Milliseconds a step on eight virtual CPU devices, interleaved rounds. The ratio is the plan's step over the
better of the other two, with the upper end of its 95 % interval.
"""


def page() -> Iterator[str]:
    """docs/results/jax_models.md."""
    yield HEAD
    yield caption("python benchmarks/jax_models.py", "jax_models")
    yield from table(
        ("model", "import, CPU s", "pairs of axes as expected", "search", "search, CPU s"),
        (
            (
                r["note"],
                r["import_cpu_seconds"],
                f"{r['axes']['as_expected']:,} of {r['axes']['pairs']:,}",
                r["search"]["status"],
                r["search_cpu_seconds"],
            )
            for r in stored("jax_models")["rows"]
        ),
    )
    yield NUMBERS
    yield caption("python benchmarks/jax_models.py --check", "jax_models_numbers")
    yield from table(
        ("model", "loss, one device", "gradients", "loss, split", "gradients"),
        (
            (
                r["name"],
                *(f"{r[at][what]:.1e}" for at in ("one device", "layout") for what in ("loss", "gradients")),
            )
            for r in stored("jax_models_numbers")["rows"]
        ),
    )
    yield PLANS
    plans = stored("jax_plans")
    yield caption(plans["command"], "jax_plans")
    yield from table(
        ("program", "plan", "expert's shardings", "replicated", "ratio"),
        (
            (
                r["name"],
                *(f"{1e3 * r['seconds'][k]:.0f}" for k in ("plan", "expert", "replicated")),
                f"{r['ratio']:.2f} ({r['upper']:.2f})",
            )
            for r in plans["rows"]
        ),
    )
    yield "\n".join(f"- {note}" for note in plans["notes"])
