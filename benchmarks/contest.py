"""Solves instances of the ASPLOS 2025 contest and prints cost, bound, gap and time beside the contest's best
and XLA's.

    python benchmarks/contest.py A.json.gz B.json.gz [--solver auto] [--time-limit 300]

The instances are in github.com/google/iopddl. Seconds count reading the file, reducing, solving and checking;
the cost is added up again from the file's own lists, in whole numbers, by code that shares nothing with the
solver.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layoutopt.problem import load, solve
from mesh_tf_core.errors import UserError

PUBLISHED = Path(__file__).parent / "data" / "asplos2025_contest.csv"
HEADINGS = (
    "instance",
    "status",
    "cost",
    "bound",
    "gap",
    "seconds",
    "contest's best",
    "best known",
    "XLA",
    "XLA / ours",
)


def published() -> dict[str, dict[str, str]]:
    """The published costs by instance letter."""
    lines = [line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    return {row["instance"]: row for row in csv.DictReader(lines)}


def recount(path: str, choices: Sequence[int]) -> tuple[int, int]:
    """(cost, highest usage) of `choices`, straight from the file's lists."""
    opener: Any = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt") as stream:
        problem = json.load(stream)["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    cost = sum(costs[choice] for costs, choice in zip(nodes["costs"], choices, strict=True))
    for (first, second), costs in zip(edges["nodes"], edges["costs"], strict=True):
        cost += costs[choices[first] * len(nodes["costs"][second]) + choices[second]]
    change: dict[int, int] = {}
    for (start, end), usages, choice in zip(nodes["intervals"], nodes["usages"], choices, strict=True):
        if start < end:
            change[start] = change.get(start, 0) + usages[choice]
            change[end] = change.get(end, 0) - usages[choice]
    usage = peak = 0
    for moment in sorted(change):
        usage += change[moment]
        peak = max(peak, usage)
    if peak > problem["usage_limit"]:
        raise SystemExit(f"{path}: the answer uses {peak} of {problem['usage_limit']}")
    return cost, peak


def line(path: str, solver: str, limit: float | None) -> list[str]:
    """One row of the table."""
    start = time.perf_counter()
    problem = load(path)
    answer = solve(
        problem, solver, limit, lambda cost, bound: print(f"  {cost:.0f} >= {bound:.0f}", file=sys.stderr)
    )
    seconds = time.perf_counter() - start
    letter = re.search(r"([A-Z])$", problem.name)
    known = published().get(letter.group(1) if letter else "", {})
    best, record, xla = (known.get(key, "") for key in ("contest_best_cost", "best_known_cost", "xla_cost"))
    if answer.choices is None:
        return [
            problem.name,
            answer.status.value,
            "-",
            f"{answer.bound:.0f}",
            "-",
            f"{seconds:.1f}",
            best,
            record,
            xla,
            "-",
        ]
    cost, _ = recount(path, answer.choices)
    if cost != answer.objective:
        raise SystemExit(f"{path}: the solver says {answer.objective}, the file says {cost}")
    ratio = f"{int(xla) / cost:.2f}" if xla else ""
    bound = f"{answer.bound:.0f}"
    return [
        problem.name,
        answer.status.value,
        str(cost),
        bound,
        f"{answer.gap:.1e}",
        f"{seconds:.1f}",
        best,
        record,
        xla,
        ratio,
    ]


def main() -> int:
    """Prints the table for the files on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="instances, .json or .json.gz")
    parser.add_argument("--solver", default="auto", help="auto, cp-sat or highs")
    parser.add_argument("--time-limit", type=float, help="seconds per instance")
    arguments = parser.parse_args()
    try:
        rows = [
            list(HEADINGS),
            *(line(path, arguments.solver, arguments.time_limit) for path in arguments.files),
        ]
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
