"""The page of the documentation on published runs; nobody else writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.published_criteria import Criterion

HEAD = """\
# Predictions against what others published

This page is written by `python -m benchmarks.published --page docs/published.md` on {date}, with presets as
they ship. Nothing is set per run but the network between nodes, where a source says which it was (vTrain:
100 GB/s a node, OneFlow: 12.5 GB/s: `--set-hardware node_egress=100GB/s`). Tables, layouts and sources are in
`benchmarks/data`, `benchmarks/published_gpu.py` and `benchmarks/published_tpu.py`.
"""

TABLES = """\
## By table

Mean error, and in brackets its sign. {pipelined} rows with pipeline stages cannot be expressed. Rows not
judged have a policy of recomputation of their own (priced with nothing recomputed), or several slices.

| table | rows | which | error | largest | regret, mean and largest |
|---|---|---|---|---|---|"""

CONSTANTS = """\
## Fitted constants

At most four for a stack of software; every other number of a preset is measured or specified. The interval
of 90 % is of fits to models drawn with replacement. Where what ships is not the fit: `sustained` 0.88 lies
between the fit in which models count alike (0.83) and the one in which rows do (1), and was set when the
errors of all rows were known; of collectives, compiled programs on GPUs hide 0.5 by how steps of
`dgxc_benchmarking_h100` grow from 8 to 2048 GPUs, and programs launched from Python 0.4, so that vTrain's
several-node rows are within 13 %. These rows count as having had a part.

| stack | constant | ships | fitted | interval | to |
|---|---|---|---|---|---|"""

PARTS = {
    "no part in a fit": "no part in any number",
    "part in a fit": "had a part",
    "not judged": "not judged",
}


def page(result: Mapping[str, Any], judged: Sequence[Criterion]) -> str:
    """The whole page."""
    parts = (_criteria(judged), _tables(result), _constants(result["constants"]))
    return HEAD.format(date=result["date"]) + "".join("\n" + "\n".join(part) + "\n" for part in parts)


def _criteria(judged: Sequence[Criterion]) -> Iterator[str]:
    yield "## What is reached\n"
    yield "| what | reached | without rows that had a part | bound | |"
    yield "|---|---|---|---|---|"
    for c in judged:
        sign, reached = ("≥" if c.least else "≤"), "no rows" if c.reached is None else _text(c, c.reached)
        apart = "" if c.unfitted is None or not c.fitted else _text(c, c.unfitted)
        verdict = "" if c.reached is None else "met" if c.met else "**not met**"
        yield f"| {c.name} ({c.rows} rows) | {reached} | {apart} | {sign} {_text(c, c.bound)} | {verdict} |"


def _text(criterion: Criterion, value: float) -> str:
    return f"{value:.2f}" if criterion.least else f"{100 * value:.1f} %"


def _tables(result: Mapping[str, Any]) -> Iterator[str]:
    yield TABLES.format(pipelined=result["pipelined"])
    for name, table in result["tables"].items():
        for part, q in table["quality"].items():
            regret = "" if q["regret"] is None else f"{_percent(q['regret'])}, {_percent(q['worst_regret'])}"
            error = f"{_percent(q['mape'])} ({100 * q['bias']:+.1f} %)"
            yield f"| `{name}` | {q['rows']} | {PARTS[part]} | {error} | {_percent(q['worst'])} | {regret} |"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _constants(fitted: Mapping[str, Any]) -> Iterator[str]:
    yield CONSTANTS
    for stack, found in fitted.items():
        for name, k in found["constants"].items():
            low, high = k["interval"]
            yield (
                f"| {stack} | `{name}` | {k['ships']:.3g} | {k['fitted']:.3g} | {low:.3g} to {high:.3g} "
                f"| {found['rows']} rows of {', '.join(found['models'])} |"
            )
