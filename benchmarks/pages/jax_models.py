"""JAX models: what the import infers, whether numbers agree, how fast their plans run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.pages.tables import caption, prose, stored, table

HEAD = """\
# JAX models of other libraries

Other libraries build these {models} models, without weights and with fewer layers, mostly at the
published width. The import infers which axes of arrays are the same dimension: {right:,} of {pairs:,}
pairs of axes are as written down before the first import (`benchmarks/jax_models_expected.json`).
{optimal} searches on `{mesh}` of {hardware} end with a proof.

*Loss* and *gradients* are the largest relative differences between layoutopt and JAX, for a narrow
model of the same class without dropout, on one device and split over `{split}`.
"""
PLANS = """\
## Steps under their plans

The table shows milliseconds of a step on eight virtual CPU devices, under layoutopt's plan, under an
expert's shardings, and with everything replicated. The three run in turn. The ratio is the plan's time
/ the time of the faster alternative, as the median over rounds; the bound is its one-sided 95 % upper
confidence bound (bootstrap).
"""


def page() -> Iterator[str]:
    """docs/results/jax_models.md."""
    found, numbers = stored("jax_models"), stored("jax_models_numbers")
    rows, differences = found["rows"], {r["name"]: r for r in numbers["rows"]}
    yield prose(
        HEAD,
        models=len(rows),
        right=sum(r["axes"]["as_expected"] for r in rows),
        pairs=sum(r["axes"]["pairs"] for r in rows),
        mesh=found["mesh"],
        hardware=found["hardware"],
        optimal=sum(r["search"]["status"] == "OPTIMAL" for r in rows),
        split=numbers["mesh"],
    )
    yield caption("python benchmarks/jax_models.py", "jax_models")
    yield caption("python benchmarks/jax_models.py --check", "jax_models_numbers")
    yield from table(
        ("model", "import, CPU s", "search, CPU s", "loss", "gradients"),
        (
            (
                r["note"],
                r["import_cpu_seconds"],
                r["search_cpu_seconds"],
                *_differences(differences[r["name"]]),
            )
            for r in rows
        ),
    )
    yield prose(PLANS)
    plans = stored("jax_plans")
    yield caption(plans["command"], "jax_plans")
    yield from table(
        ("program", "plan, ms", "expert, ms", "replicated, ms", "ratio", "bound"),
        (
            (
                r["name"],
                *(f"{1e3 * r['seconds'][k]:.0f}" for k in ("plan", "expert", "replicated")),
                f"{r['ratio']:.2f}",
                f"{r['upper']:.2f}",
            )
            for r in plans["rows"]
        ),
    )


def _differences(row: dict[str, Any]) -> Iterator[str]:
    """The larger of the differences on one device and under a layout, of losses and of gradients."""
    for what in ("loss", "gradients"):
        yield f"{max(row[where][what] for where in ('one device', 'layout')):.0e}"
