"""Solves instances of the ASPLOS 2025 contest within its time limits, beside the best published costs.

    python -m benchmarks.contest FOLDER [--only V,N,T] [--time-limit SECONDS] [--cpu] [--out FILE.json]

FOLDER holds the instances of github.com/google/iopddl (benchmarks/*.json.gz); a single file may be named too.
Every instance is one `layoutopt solve-problem` of its own, by the command line: Python's start, reading and
writing count. The least certain come first. The cost is added up again from the file's own lists, in whole
numbers, by code that shares nothing with the solver. A row of `--out` is replaced when its instance is solved
again. `--cpu` is for a machine that others use too:
the command's clock then shows its own CPU seconds; those of its child processes are only in the results.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.time_limits import BY_CPU

HERE = Path(__file__).resolve().parent
PUBLISHED = HERE / "data" / "asplos2025_contest.csv"
OUT = HERE / "results" / "contest.json"
ORDER = "VNRTUKSCMLQDPAGB"
"""The instances that are public whole, the least certain first."""
SPARE = 2.0
"""Seconds of a limit in which a command may end after its own."""
HEADINGS = ("instance", "limit s", "seconds", "cost", "best published", "ratio", "bound / cost", "status")


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


def letter(path: Path) -> str:
    """The instance's letter: the end of the file's name; "" for other files."""
    found = re.search(r"(?:^|-)([A-Z])\.json(?:\.gz)?$", path.name)
    return found.group(1) if found else ""


def best_published(name: str) -> int | None:
    """The least cost that is known of an instance."""
    known = published().get(name, {})
    costs = [int(known[key]) for key in ("contest_best_cost", "best_known_cost") if known.get(key)]
    return min(costs, default=None)


def measure(path: Path, limit: float, cpu: bool) -> dict[str, Any]:
    """One row: solves an instance by the command line and adds its cost up again."""
    launch = ["-c", BY_CPU] if cpu else ["-m", "layoutopt"]
    asked = [str(path), "--time-limit", str(max(limit - SPARE, 0.5)), "--json", "--quiet"]
    start, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *launch, "solve-problem", *asked], capture_output=True, text=True, check=False
    )
    seconds, now = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    row: dict[str, Any] = {
        "instance": letter(path) or path.name,
        "limit": limit,
        "seconds": round(spent if cpu else seconds, 1),
        "cpu_seconds": round(spent, 1),
        "by_cpu": cpu,
        "exit": done.returncode,
    }
    if done.returncode:
        return {**row, "status": "LIMIT", "message": (done.stderr.strip().splitlines() or [""])[-1]}
    answer = json.loads(done.stdout)
    cost, _ = recount(str(path), answer["choices"])
    if cost != answer["solver"]["objective"]:
        raise SystemExit(f"{path}: the solver says {answer['solver']['objective']}, the file says {cost}")
    known = best_published(row["instance"])
    return {
        **row,
        "status": answer["solver"]["status"],
        "cost": cost,
        "bound": answer["solver"]["bound"],
        "best_published": known,
        "ratio": None if known is None else round(cost / known, 5),
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, in the order of `HEADINGS`."""
    if "cost" not in row:
        return [row["instance"], f"{row['limit']:g}", f"{row['seconds']:.1f}", *"----", row["status"]]
    known, ratio = row["best_published"], row["ratio"]
    return [
        row["instance"],
        f"{row['limit']:g}",
        f"{row['seconds']:.1f}",
        f"{row['cost']:,}",
        "-" if known is None else f"{known:,}",
        "-" if ratio is None else f"{ratio:.4f}",
        f"{row['bound'] / row['cost']:.4f}" if row["cost"] else "-",
        row["status"],
    ]


def files(given: Sequence[str], only: str | None) -> list[Path]:
    """The files to solve, the least certain first."""
    found: list[Path] = []
    for path in map(Path, given):
        found += sorted(path.glob("*.json*")) if path.is_dir() else [path]
    wanted = set((only or "").upper().replace(",", ""))
    if wanted:
        found = [path for path in found if letter(path) in wanted]
        missing = sorted(wanted - set(map(letter, found)))
        if missing:
            raise SystemExit(f"no file of instance {', '.join(missing)} in {', '.join(given)}")
    found = [path for path in found if letter(path) in set(ORDER) or str(path) in given]
    return sorted(found, key=lambda path: ORDER.find(letter(path)))


def main() -> int:
    """Prints the table of the files on the command line, a row as soon as it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="folders, or instances, .json or .json.gz")
    parser.add_argument("--only", help="letters of instances")
    parser.add_argument("--time-limit", type=float, help="seconds per instance; without it the contest's")
    parser.add_argument("--cpu", action="store_true", help="the limit is of CPU seconds")
    parser.add_argument("--out", type=Path, help=f"results, for example {OUT.relative_to(HERE.parent)}")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if arguments.out and arguments.out.exists():
        rows = {row["instance"]: row for row in json.loads(arguments.out.read_text())["rows"]}
    widths = (8, 7, 7, 18, 18, 6, 12, 8)
    print("  ".join(heading.rjust(width) for heading, width in zip(HEADINGS, widths, strict=True)))
    failed = False
    for path in files(arguments.files, arguments.only):
        known = published().get(letter(path))
        limit = arguments.time_limit or float(known["contest_timeout_s"] if known else 60)
        row = measure(path, limit, arguments.cpu)
        shown = zip(cells(row), widths, strict=True)
        print("  ".join(cell.rjust(width) for cell, width in shown), row.get("message", ""), flush=True)
        failed |= row["exit"] != 0
        rows[row["instance"]] = {**row, "date": date.today().isoformat(), "machine": platform.processor()}
        if arguments.out:
            found = {"rows": [rows[name] for name in sorted(rows)]}
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
