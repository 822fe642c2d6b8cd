"""The errors of predictions by kind of run: `costmodels/hardware/known.json`.

    python -m benchmarks.known

writes it anew from `results/`; who writes these calls `write`. Every run that was predicted is a row; rows of
one kind (hardware, framework, pipeline stages, mixture of experts, part in a fit) are stored together.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.one_gpu import STEPS
from costmodels.calibration.tpu_compiled import GENERATIONS
from costmodels.frameworks import DEFAULT
from costmodels.hardware import split_name
from costmodels.hardware.known import FILE

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class KnownRow:
    """A run that was predicted.

    Attributes:
      hardware: the preset that priced it, without settings.
      framework: that it was priced under.
      stages, mixture: whether it had pipeline stages, and experts.
      fitted: it had a part in a constant.
      seconds, memory: predicted over published, less 1; None: not published.
    """

    table: str
    run: str
    hardware: str
    framework: str
    stages: bool
    mixture: bool
    fitted: bool
    seconds: float | None
    memory: float | None

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.hardware, self.framework, self.stages, self.mixture, self.fitted


def rows() -> Iterator[KnownRow]:
    """Every judged run of the result pages, once."""
    yield from _published()
    yield from unseen()
    yield from _recipes()
    yield from _own()


def _published() -> Iterator[KnownRow]:
    """Those of programs built for them, where these are not priced again under their own frameworks."""
    again = _read("unseen")["tables"].keys()
    for table, found in _read("published")["tables"].items():
        for row in found["rows"]:
            staged = row["stages"] > 1
            if Path(table).stem in again:
                continue
            yield KnownRow(
                table.removeprefix("published/").removesuffix(".csv"),
                row["run"],
                split_name(row["hardware"])[0],
                row["framework"],
                staged,
                False,
                row["fitted"],
                row["predicted_seconds"] / row["published_seconds"] - 1,
                None,
            )


def unseen() -> Iterator[KnownRow]:
    """Every row under its framework."""
    for table, found in _read("unseen")["tables"].items():
        for row in found["found"]:
            predicted, gib = row.get("predicted_seconds"), row.get("predicted_gib")
            yield KnownRow(
                table,
                row["name"],
                split_name(row["hardware"])[0],
                row["framework"],
                "layers:" in row["layout"],
                row["family"] == "moe",
                row["half"] == "fitted",
                predicted / row["seconds"] - 1 if predicted and row["seconds"] else None,
                gib / row["gib"] - 1 if gib and row["gib"] else None,
            )


def _recipes() -> Iterator[KnownRow]:
    """Recipes of trainers; to some, rates of their chip were fitted."""
    for row in _read("recipes")["rows"]:
        yield KnownRow(
            "recipes",
            f"{row['name']} on {row['mesh']}",
            row["hardware"],
            row["framework"],
            False,
            "expert_batch" in row["layout"],
            row.get("derived", False),
            row["predicted"]["seconds"] / row["seconds"] - 1,
            None,
        )


def _own() -> Iterator[KnownRow]:
    """Steps of our own on one GPU. To the times of dense models in bfloat16 a constant was fitted, to no
    memory."""
    stored = _read("one_gpu")
    for name, row in stored["steps"].items():
        off = {k: row["predicted"][k] / row["measured"][k] - 1 for k in row["measured"]}
        file, sizes, _ = STEPS[name]
        mixture = "moe" in file
        kind = "one_gpu", name, stored["hardware"], DEFAULT, False, mixture
        yield KnownRow(*kind, not mixture and "dtype" in sizes, off["step_seconds"], None)
        yield KnownRow(*kind, False, None, off["peak_memory_bytes"])


def known() -> dict[str, Any]:
    """The content of the file."""
    kinds = defaultdict(list)
    for row in rows():
        if (row.seconds, row.memory) != (None, None):
            kinds[row.kind].append(row)
    names = "hardware", "framework", "stages", "mixture", "fitted"
    compilers = {
        name: {
            "rows": len(compiled),
            "compute": _typical(compiled, "compute_seconds"),
            "memory": _typical(compiled, "peak_memory_bytes"),
        }
        for name, compiled in sorted(_by_topology(_read("verify")).items())
    }
    sources = ("published", "unseen", "recipes", "one_gpu", "verify")
    return {
        "made_of": {name: _read(name)["date"] for name in sources},
        "kinds": [
            {
                **dict(zip(names, kind, strict=True)),
                "seconds": [round(r.seconds, 4) for r in found if r.seconds is not None],
                "memory": [round(r.memory, 4) for r in found if r.memory is not None],
            }
            for kind, found in sorted(kinds.items())
        ],
        "compiler": compilers,
    }


@cache
def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
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
    _read.cache_clear()
    found = known()
    kinds = ",\n  ".join(map(json.dumps, found.pop("kinds")))
    rest = json.dumps(found, indent=1).removesuffix("\n}")
    FILE.write_text(f'{rest},\n "kinds": [\n  {kinds}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    write()
