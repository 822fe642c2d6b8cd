"""The examples at published sizes, searched by the command line.

    .venv/bin/python benchmarks/examples_searched.py [--only PART]

CPU seconds are those of the whole command.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "examples.json"
CASES: tuple[tuple[str, dict[str, int], int, str], ...] = (
    ("transformer_lm.py:llama3_8b", {"batch": 128, "length": 8192}, 64, "h100"),
    ("deepseek_lm.py:v2_lite", {"batch": 64, "length": 4096}, 64, "h100"),
    ("mamba_lm.py:mamba2_130m", {"batch": 64, "length": 2048}, 8, "h100"),
    ("vit.py:b16", {"batch": 1024}, 8, "tpu-v5e"),
    ("clip.py:b32", {"batch": 32768}, 64, "tpu-v4"),
    ("diffusion.py:cifar10", {"batch": 128}, 8, "tpu-v4"),
    ("dlrm.py:criteo", {"batch": 65536}, 8, "h100"),
)
"""Model, settings, devices, hardware."""


def solved(model: str, settings: dict[str, int], devices: int, hardware: str) -> dict[str, Any]:
    """One search: its command, its answer, its CPU seconds."""
    words = ["layoutopt", "search", f"examples/{model}", "--devices", str(devices), "--hardware", hardware]
    words += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", *words, "--json", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    plan = json.loads(done.stdout)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(words),
        "cpu_seconds": round(ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime, 1),
        "parameters": plan["model"]["parameters"],
        "mesh": ";".join(f"{axis}:{size}" for axis, size in plan["mesh"].items()),
        "layout": ";".join(f"{dim}:{'+'.join(axes)}" for dim, axes in plan["layout"].items() if axes),
        "storage": sorted(set(plan["storage"].values())),
        "recompute": plan["recompute"],
        "microbatches": plan["microbatches"],
        "step_seconds": plan["predicted"]["step_seconds"],
        "mfu": plan["predicted"]["mfu"],
        "peak_memory_bytes": plan["predicted"]["peak_memory_bytes"],
        "status": plan["solver"]["status"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="cases with this in their model")
    only = parser.parse_args().only
    found = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    for model, *case in CASES:
        if only in model:
            found[model] = solved(model, *case)
            OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(model, found[model]["status"], found[model]["cpu_seconds"], flush=True)


if __name__ == "__main__":
    main()
