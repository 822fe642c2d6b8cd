"""Recipes of trainers priced from config.json, as by `layoutopt cost`: `python -m benchmarks.recipes`.

`benchmarks/data/recipes.json` names the published file of a model, what the recipe changes in it, and its
layout. No row had a part in any number. Results: `benchmarks/results/recipes.json`, where `first` is what was
predicted when a row was priced for the first time.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import layoutopt

HERE = Path(__file__).parent
OUT = HERE / "results" / "recipes.json"
CONFIGS = HERE.parent / "tests" / "data" / "published_configurations.json"
DECIDED = ("storage", "recompute", "offload", "context")


def priced(row: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """A recipe with its prediction."""
    model = layoutopt.from_huggingface({**config, **row.get("change", {})}, **row["settings"])
    decided = {name: row[name] for name in DECIDED if name in row}
    asked = {"hardware": row["hardware"], "framework": row["framework"]}
    found = layoutopt.cost(model, row["mesh"], row["layout"], **asked, **decided)
    return {"seconds": found.predicted.step_seconds, "gib": found.predicted.peak_memory_bytes / 2**30}


def main() -> None:
    content = json.loads((HERE / "data" / "recipes.json").read_text(encoding="utf-8"))
    configs = json.loads(CONFIGS.read_text(encoding="utf-8"))["models"]
    before = json.loads(OUT.read_text(encoding="utf-8"))["rows"] if OUT.exists() else []
    known = {(r["name"], r["hardware"], r["mesh"]): r["first"] for r in before}
    rows = []
    for row in content["rows"]:
        found = priced(row, configs[row["config"]]["config"])
        rows.append(
            {
                **row,
                "predicted": found,
                "first": known.get((row["name"], row["hardware"], row["mesh"]), found),
            }
        )
        error = found["seconds"] / row["seconds"] - 1
        print(f"{row['name']:26} {row['mesh']:20} {error:+.1%} {found['gib']:.1f} GiB", flush=True)
    date = datetime.now(UTC).date().isoformat()
    OUT.write_text(json.dumps({"date": date, "source": content["source"], "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
