"""Programs compiled by the real TPU compiler, beside the predictions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.pages.tables import caption, prose, ratio, share, span, stored, table

HEAD = """\
# The TPU compiler beside the predictions

`layoutopt verify` compiles a training step with the TPU compiler, which needs no TPU, and compares
collectives, peak memory and compute time with the prediction. The compiler's compute time is an
estimate, not a measurement. It does not include attention kernels, so they are excluded from the
prediction too. Ratios are prediction / compiler.

{same} of {programs} programs have the predicted collectives. The median error of peak memory is
{memory}, worst {memory_worst}. The median error of compute time is {compute}, worst {compute_worst}.
"""
SMALL = """\
Models below about 100 MiB fit in on-chip memory. For these models the compiler's peak also counts the
program and on-chip copies of variables, so the memory ratio is not meaningful.

## One program per kind of decision

Each program is a training step of a two-layer causal language model in bfloat16, with 4 sequences of
1,024 tokens; `experts` are steps of `examples/moe_lm.py`, which drops no token. Their messages have one size
whatever tokens choose, so a device has room for all rows and works on them, though {filled} are its own; the
prediction is of these alone, as software with messages of uneven sizes runs. Predicted memory of programs
that drop no token is therefore {dropless} of the compiler's. Products of experts are megablox's kernels,
which skip empty rows and are excluded as attention is.
"""
JAX = """\
## Steps of JAX libraries

`plan.jax` builds these steps for eight TPU v5e, from loss functions written in other JAX libraries. The
median error of peak memory is {peak_memory_bytes}, that of compute time {compute_seconds}.
"""


def page() -> Iterator[str]:
    """docs/results/compiler.md."""
    found = stored("verify")
    rows = found["rows"]
    memory, compute = _errors(rows, "peak_memory_bytes"), _errors(rows, "compute_seconds")
    yield prose(
        HEAD,
        same=sum(r["same_collectives"] for r in rows),
        programs=len(rows),
        memory=share(median(memory)),
        memory_worst=share(max(memory), 0),
        compute=share(median(compute)),
        compute_worst=share(max(compute), 0),
    )
    yield caption(found["command"], "verify")
    heads = ("model", "parameters", "topologies", "same collectives", "memory ratio", "compute ratio")
    yield from table(heads, _models(rows))
    experts = (r["peak_memory_bytes"] for r in found["kinds"] if "experts:" in r["layout"])
    dropless = span([ratio(each, "compiler") for each in experts], "{:.2f}")
    yield prose(SMALL, filled="a half to an eighth", dropless=dropless)
    yield caption("python benchmarks/verify.py --kinds", "verify", found["kinds"])
    heads = ("decision", "topology", "mesh", "layout", "collectives", "memory ratio", "compute ratio")
    yield from table(heads, ((_decision(r), *_row(r)) for r in found["kinds"]))
    jax = stored("jax_verify")
    off = {k: share(jax["summary"][f"{k}_median_error"]) for k in ("peak_memory_bytes", "compute_seconds")}
    yield prose(JAX, **off)
    yield caption("python benchmarks/jax_verify.py", "jax_verify")
    yield from table(
        ("step", "memory ratio", "compute ratio"),
        (
            (r["step"], *(f"{ratio(r[k], 'compiler'):.2f}" for k in ("peak_memory_bytes", "compute_seconds")))
            for r in jax["rows"]
        ),
    )


def _models(rows: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Programs of one model, of every topology, mesh and layout."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        size = f"{float(format(row['parameters'] / 1e6, '.3g')):,g} M"
        groups[f"`{row['model'].removeprefix('examples/')}`", size].append(row)
    for names, own in groups.items():
        chips = ", ".join(dict.fromkeys(r["topology"] for r in own))
        same = f"{sum(r['same_collectives'] for r in own)} of {len(own)}"
        ratios = ([ratio(r[k], "compiler") for r in own] for k in ("peak_memory_bytes", "compute_seconds"))
        yield *names, chips, same, *(span(values, "{:.2f}") for values in ratios)


def _errors(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [abs(ratio(r[key], "compiler") - 1) for r in rows]


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["topology"],
        f"`{row['mesh']}`",
        f"`{row['layout'] or 'none'}`",
        "as predicted" if row["same_collectives"] else "not as predicted",
        f"{ratio(row['peak_memory_bytes'], 'compiler'):.2f}",
        f"{ratio(row['compute_seconds'], 'compiler'):.2f}",
    )


def _decision(row: dict[str, Any]) -> str:
    options = row.get("options") or {}
    if "context" in options:
        return f"`--context {dict(_pairs(options['context']))['memory_length']}`"
    if "collective_matmul" in options:
        return f"`--collective-matmul {','.join(options['collective_matmul'])}`"
    if "experts:" in row["layout"]:
        return "`experts`"
    return "`zero3@data`" if "@" in str(row["stage"]) else "`length@elsewhere:model`"


def _pairs(found: Any) -> Any:
    return (
        found.items()
        if isinstance(found, dict)
        else [p if isinstance(p, list) else p.split(",") for p in found]
    )
