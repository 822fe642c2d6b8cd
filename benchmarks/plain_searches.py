"""Searches as users write them, with no word about the space: what is proven within a minute.

    .venv/bin/python -m benchmarks.plain_searches [--only NAME ...] [--time-limit SECONDS]

Every search is a process of its own on one core, whose clock shows its CPU seconds (`BY_CPU`), so that a
machine that others use too tells the same. It covers the usual layouts, then everything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.time_limits import BY_CPU
from benchmarks.torch_modules_made import LLAMA_8B, LLAMA_70B, QWEN3

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "plain_searches.json"
WHOLE = {"torch_dtype": "bfloat16", "tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": WHOLE | LLAMA_8B | {"model_type": "llama"},
    "Llama 3 70B": WHOLE | LLAMA_70B | {"model_type": "llama"},
    "Qwen3 30B-A3B": WHOLE | QWEN3 | {"model_type": "qwen3_moe"},
    "Gemma 2 9B": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 256000,
        "torch_dtype": "bfloat16",
    },
}
TEXT = ("batch=512", "length=4096")
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(CONFIGS, ("config.json", TEXT)),
    "DeepSeek-V2-Lite": ("examples/deepseek_lm.py:v2_lite", TEXT),
    "ViT-B/16": ("examples/vit.py:b16", ("batch=4096",)),
    "CLIP B/32": ("examples/clip.py:b32", ("batch=32768",)),
    "Mamba-2 130M": ("examples/mamba_lm.py:mamba2_130m", ("batch=512", "length=2048")),
}
"""Name -> file and settings."""
DEVICES, HARDWARE = (64, 512), "h100"


def searched(name: str, devices: int, limit: float) -> dict[str, Any]:
    """One search: its command, its answer and what is proven of it."""
    file, settings = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        model = ROOT / file
        if name in CONFIGS:
            model = Path(folder) / file
            model.write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
        words = ["search", str(model), "--devices", str(devices), "--hardware", HARDWARE]
        words += [word for each in settings for word in ("--set", each)]
        words += ["--time-limit", f"{limit:g}", "--json", "--quiet"]
        done = subprocess.run(
            [sys.executable, "-c", BY_CPU, *words],
            cwd=ROOT,
            env={**os.environ, "LAYOUTOPT_CORES": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    row: dict[str, Any] = {"model": name, "devices": devices, "date": datetime.now(UTC).date().isoformat()}
    if done.returncode:
        return row | {"error": done.stderr.splitlines()[0]}
    plan = json.loads(done.stdout)
    solver = plan["solver"]
    return row | {
        "step_seconds": plan["predicted"]["step_seconds"],
        "gap": solver["gap"],
        "status": solver["status"],
        "seconds": round(solver["wall_seconds"], 1),
        "usual": (plan.get("usual") or {}).get("status"),
        "notes": [n for n in plan["notes"] if "bound" in n],
    }


def main() -> None:
    """Searches, and writes what was found after each search."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[*MODELS])
    parser.add_argument("--time-limit", type=float, default=60.0)
    asked = parser.parse_args()
    known = json.loads(OUT.read_text(encoding="utf-8"))["rows"] if OUT.exists() else []
    rows = {(row["model"], row["devices"]): row for row in known}
    for name in asked.only:
        for devices in DEVICES:
            rows[name, devices] = row = searched(name, devices, asked.time_limit)
            print(row, flush=True)
            found = {"limit": asked.time_limit, "hardware": HARDWARE, "rows": [*rows.values()]}
            OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
