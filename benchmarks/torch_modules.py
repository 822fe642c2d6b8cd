"""Imports PyTorch modules at full size, compares their parameters, loops and dimensions with what was written
down before, and searches them on 64 H100 under `--framework torch`.

    python benchmarks/torch_modules.py [NAME...] [--out FILE] [--devices N] [--time-limit S] [--limit S]

Every module is a process of its own, and each row is written when it ends; one that takes longer than
`--limit` is given up. `--no-search` ends with the import, and leaves the stored search.
"""

from __future__ import annotations

import argparse
import json
import math
import site
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.jax_models import together  # noqa: E402

HARDWARE, FRAMEWORK = "h100", "torch"


def imported(entry: Any, name: str) -> tuple[Any, Any, float, float]:
    """A module, its model, and the CPU seconds of the import and of torch.export in it."""
    import torch
    from torch import export

    import layoutopt

    module, spent = entry.make(), [0.0]
    own = export.export

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return own(*args, **kwargs)
        finally:
            spent[0] += time.process_time() - start

    # What PyTorch loads on first use is in neither of both.
    layoutopt.from_torch(torch.nn.Linear(2, 2), torch.ones(4, 2), loss=lambda out, batch: out.square().mean())
    with mock.patch.object(export, "export", timed):
        start = time.process_time()
        model = layoutopt.from_torch(module, entry.given(), name=name)
        return module, model, time.process_time() - start, spent[0]


def one(name: str, devices: int, limit: float, search: bool) -> dict[str, Any]:
    """What is measured of one module."""
    import layoutopt
    from benchmarks.torch_modules_made import ENTRIES

    entry = ENTRIES[name]
    row: dict[str, Any] = {"name": name, "note": entry.note}
    module, model, whole, export = imported(entry, name)
    row |= {"import_cpu_seconds": round(whole, 2), "export_cpu_seconds": round(export, 2)}
    row["nodes"] = len(list(model.graph.walk()))
    own = list(module.parameters())
    row["parameters"] = {
        "imported": sum(math.prod(a.shape) for a in model.origin.parameters.values()),
        "module": sum(p.numel() for p in own),
        "published": entry.parameters,
        "imported_trained": model.parameters,
        "module_trained": sum(p.numel() for p in own if p.requires_grad),
    }
    row["loops"] = {
        "found": [len(run.layers) for run in model.origin.rerolled.runs],
        "expected": list(entry.loops),
    }
    axes = {path: [list(x) for x in a.axes] for path, a in model.origin.parameters.items()}
    good, total, wrong = together(axes, entry.axes)
    row["axes"] = {"as_expected": good, "pairs": total, "different": wrong[:20]}
    row["notes"] = list(model.origin.notes)
    if search:
        row["search"] = searched(layoutopt, model, devices, limit)
    return row


def searched(layoutopt: Any, model: Any, devices: int, limit: float) -> dict[str, Any]:
    """The usual layouts, proven or stopped."""
    from mesh_tf_core.errors import InfeasibleError, LimitError

    start = time.process_time()
    try:
        plan = layoutopt.search(
            model,
            devices=devices,
            hardware=HARDWARE,
            framework=FRAMEWORK,
            allow="usual",
            alternatives=False,
            time_limit=limit,
        )
    except (InfeasibleError, LimitError) as error:
        status = "INFEASIBLE" if isinstance(error, InfeasibleError) else "UNKNOWN"
        return {
            "status": status,
            "cpu_seconds": round(time.process_time() - start, 1),
            "devices": devices,
            "said": str(error),
        }
    spent, found = time.process_time() - start, plan.to_json()
    options = {k: found[k] for k in ("recompute", "microbatches", "schedule") if found.get(k)}
    stages = sorted({str(s) for s in found["storage"].values()})
    return {
        "status": found["solver"]["status"],
        "gap": found["solver"]["gap"],
        "cpu_seconds": round(spent, 1),
        "devices": devices,
        "step_seconds": found["predicted"]["step_seconds"],
        "peak_memory_bytes": found["predicted"]["peak_memory_bytes"],
        "mesh": found["mesh"],
        "layout": found["layout"],
        "storage": stages,
        **options,
        "notes": found.get("notes", []),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", default=str(HERE / "results" / "torch_modules.json"))
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--time-limit", type=float, default=60, help="seconds of a search")
    parser.add_argument("--limit", type=float, default=900, help="seconds of a module")
    parser.add_argument("--no-search", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        row = one(args.one, args.devices, args.time_limit, not args.no_search)
        print("ROW " + json.dumps(row))
        return
    from benchmarks.torch_modules_made import ENTRIES

    out, rows, about = Path(args.out), {}, ""
    if out.exists():
        old = json.loads(out.read_text(encoding="utf-8"))
        rows, about = {r["name"]: r for r in old["rows"]}, old.get("about", "")
    for name in args.names or ENTRIES:
        command = [sys.executable, __file__, "--one", name, "--devices", str(args.devices)]
        command += ["--time-limit", str(args.time_limit)] + ["--no-search"] * args.no_search
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.limit)
            line = next((x for x in done.stdout.splitlines() if x.startswith("ROW ")), None)
            error = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            line, error = None, f"given up after {args.limit:g} s"
        for folder in (
            *site.getsitepackages(),
            str(HERE.parent),
        ):
            line, error = line and line.replace(f"{folder}/", ""), error.replace(f"{folder}/", "")
        row = json.loads(line[4:]) if line else {"name": name, "note": ENTRIES[name].note, "error": error}
        if args.no_search and "search" in rows.get(name, {}):
            row["search"] = rows[name]["search"]
        rows[name] = row
        print(json.dumps(row), flush=True)
        head = {"date": date.today().isoformat(), "hardware": HARDWARE, "framework": FRAMEWORK}
        head |= {"devices": args.devices, "time_limit": args.time_limit, "about": about}
        ordered = [rows[n] for n in ENTRIES if n in rows]
        out.write_text(json.dumps({**head, "rows": ordered}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
