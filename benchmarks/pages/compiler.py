"""Programs compiled by the real TPU compiler, beside the predictions."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.pages.tables import caption, ratio, share, stored, table

HEAD = """\
# The TPU compiler beside the predictions

`layoutopt verify` compiles a training step with the TPU compiler, without a TPU, and compares its
collectives, its peak memory and its compute time with the prediction. The compiler's seconds are its own
estimate, not a measurement. Kernels of attention are left out on both sides, because the compiler estimates
nothing for them. Ratios are predicted over compiler.
"""
SMALL = """\
Models below about 100 MiB lie in on-chip memory. The compiler's peak then counts the program itself and
on-chip copies of variables, so the ratio of memory says little there.

## One program per kind of decision

Two layers, causal attention, 1,024 tokens, bfloat16.
"""
JAX = """\
## Steps of JAX libraries

The step that `plan.jax` makes of the user's own loss, on eight v5e.
"""


def page() -> Iterator[str]:
    """docs/results/compiler.md."""
    found = stored("verify")
    rows = found["rows"]
    yield HEAD
    same = sum(r["same_collectives"] for r in rows)
    errors = {k: _errors(rows, k) for k in ("peak_memory_bytes", "compute_seconds")}
    yield f"{same} of {len(rows)} programs have the predicted collectives."
    for key, words in (("peak_memory_bytes", "Peak memory"), ("compute_seconds", "Compute")):
        yield f"{words}: median error {share(median(errors[key]))}, worst {share(max(errors[key]), 0)}."
    yield ""
    yield caption(found["command"], "verify")
    heads = ("model", "parameters", "topology", "mesh", "layout", "collectives", "memory", "compute")
    yield from table(heads, map(_row, rows))
    yield SMALL
    yield caption("python benchmarks/verify.py --kinds", "verify", found["kinds"])
    yield from table(("decision", *heads[2:]), ((_decision(r), *_row(r)[2:]) for r in found["kinds"]))
    yield JAX
    jax = stored("jax_verify")
    yield caption("python benchmarks/jax_verify.py", "jax_verify")
    for key, words in (("peak_memory_bytes", "Memory"), ("compute_seconds", "Compute")):
        yield f"{words}: median error {share(jax['summary'][f'{key}_median_error'])}."
    yield ""
    yield from table(
        ("step", "memory", "compute"),
        (
            (r["step"], *(f"{ratio(r[k], 'compiler'):.2f}" for k in ("peak_memory_bytes", "compute_seconds")))
            for r in jax["rows"]
        ),
    )


def _errors(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [abs(ratio(r[key], "compiler") - 1) for r in rows]


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    name = row["model"].removeprefix("examples/")
    stage = f"; zero{str(row['stage']).removeprefix('zero')}" if row["stage"] else ""
    return (
        f"`{name}`",
        f"{row['parameters'] / 1e6:,.3g} M",
        row["topology"],
        f"`{row['mesh']}`",
        f"`{row['layout'] or 'none'}`{stage}",
        "as predicted" if row["same_collectives"] else "others",
        f"{ratio(row['peak_memory_bytes'], 'compiler'):.2f}",
        f"{ratio(row['compute_seconds'], 'compiler'):.2f}",
    )


def _decision(row: dict[str, Any]) -> str:
    options = row.get("options") or {}
    if "context" in options:
        return f"`--context {dict(_pairs(options['context']))['memory_length']}`"
    if "collective_matmul" in options:
        return f"`--collective-matmul {','.join(options['collective_matmul'])}`"
    return "`zero3@data`" if "@" in str(row["stage"]) else "`length@elsewhere:model`"


def _pairs(found: Any) -> Any:
    return (
        found.items()
        if isinstance(found, dict)
        else [p if isinstance(p, list) else p.split(",") for p in found]
    )
