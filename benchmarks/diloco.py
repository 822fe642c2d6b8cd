"""Replicas that meet rarely against synchronous training on the same tokens, trained here.

    python benchmarks/diloco.py [--steps 1000] [--out benchmarks/results/diloco.json]

The example language model learns the standard library's sources: synchronously, and as 2 and 4 replicas that
meet every 10, 30 and 100 steps, in plain means (rate 1, no momentum) and with the paper's outer step (0.7 and
0.9), each three times on windows of another order. All take the same number of tokens in a step, shared among
the replicas, and the same learning rates. The loss is that on files that nobody trains on, of what replicas
have in common, after the last meeting. Takes some CPU minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import mesh_tf_core as mtf
from benchmarks import small_lm
from benchmarks.small_lm import BATCH

ROOT = Path(__file__).resolve().parent.parent
HEADS, LAYERS = 4, 2
SEEDS, EVALUATED = 3, 32
MEANS, PAPER = (1.0, 0.0), (0.7, 0.9)
"""Rate and momentum of the outer step."""
CASES = ((1, 1, MEANS), (2, 30, MEANS), (2, 30, PAPER), (2, 10, MEANS), (2, 100, MEANS), (4, 30, MEANS))
"""Replicas, their period, and how they meet; the first is synchronous."""


def trained(replicas: int, period: int, outer: tuple[float, float], seed: int, steps: int) -> dict[str, Any]:
    """One run; `replicas` 1 is synchronous."""
    own = BATCH // replicas
    options = mtf.Options(diloco=mtf.DiLoCo("sites", period, *outer) if replicas > 1 else None)
    model = small_lm.build(HEADS, LAYERS, own)
    trainer = mtf.Trainer(model, f"sites:{replicas}", "", options, engine="local")
    began = time.process_time()
    history = trainer.fit(small_lm.training(own, seed), steps)
    row = {
        "replicas": replicas,
        "period": period,
        "outer": outer,
        "seed": seed,
        "curve": [round(statistics.fmean(r["loss"] for r in part), 4) for part in _tenths(history)],
        "held_out": trainer.evaluate(small_lm.held_out(EVALUATED * replicas, own))["loss"],
        "cpu_seconds": time.process_time() - began,
    }
    trainer.engine.close()
    return row


def _tenths(history: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The losses of each tenth of a run."""
    size = max(1, len(history) // 10)
    return [history[i : i + size] for i in range(0, len(history), size)][:10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=1000, help="a multiple of the periods")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "diloco.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    base = 0.0
    for replicas, period, outer in CASES:
        # The last step is a meeting: what is evaluated has all that was learned.
        steps = args.steps - args.steps % period
        found = [trained(replicas, period, outer, seed, steps) for seed in range(SEEDS)]
        rows += found
        own = [row["held_out"] for row in found]
        mean = statistics.fmean(own)
        base = base or mean
        said = f"{mean:.4f} ({min(own):.4f} to {max(own):.4f}), {100 * (mean / base - 1):+.1f} %"
        print(f"{replicas} replicas, period {period}, outer step {outer}: held-out loss {said}", flush=True)
    command = f"python benchmarks/diloco.py --steps {args.steps}"
    result = {"date": date.today().isoformat(), "command": command, "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
