"""What the stored results say of predictions for each preset, in short: `costmodels/hardware/known.json`.

    python -m benchmarks.known

writes it anew from `results/published.json` and `results/verify.json`; who writes these calls `write`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from costmodels.calibration.tpus import GENERATIONS
from costmodels.hardware import split_name
from costmodels.hardware.known import FILE

RESULTS = Path(__file__).parent / "results"


def known() -> dict[str, Any]:
    """The content of the file."""
    published, verified = (_read(name) for name in ("published", "verify"))
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, rows in _by_hardware(published).items():
        errors = [abs(r["predicted_seconds"] / r["published_seconds"] - 1) for r in rows]
        found[name]["steps"] = {
            "rows": len(rows),
            "fitted": sum(r["fitted"] for r in rows),
            "mean": round(statistics.fmean(errors), 4),
            "worst": round(max(errors), 4),
        }
    for name, compiled in _by_topology(verified).items():
        found[name]["compiler"] = {
            "rows": len(compiled),
            "compute": _typical(compiled, "compute_seconds"),
            "memory": _typical(compiled, "peak_memory_bytes"),
        }
    dates = {"published": published["date"], "verify": verified["date"]}
    return {"made_of": dates, "hardware": dict(sorted(found.items()))}


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _by_hardware(published: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for table in published["tables"].values():
        for row in table["rows"]:
            if not row["not_judged"]:
                found[split_name(row["hardware"])[0]].append(row)
    return found


def _by_topology(verified: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in verified["rows"]:
        if "refused" not in row["compiler"] and "stale" not in row:
            found[GENERATIONS[row["topology"].partition(":")[0]].hardware].append(row)
    return found


def _typical(rows: list[dict[str, Any]], what: str) -> float:
    """Median of how many times too large or too small, less one."""
    ratios = [abs(math.log(r[what]["predicted"] / r[what]["compiler"])) for r in rows]
    return round(math.exp(statistics.median(ratios)) - 1, 4)


def write() -> None:
    """Writes the file."""
    FILE.write_text(json.dumps(known(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
