"""A family of the example language model, trained here: a law fitted to the small ones foretells the large.

    python benchmarks/size_family.py [--out benchmarks/results/size_family.json]

Every size of `FITTED` is trained `SEEDS` times, each on windows of its own order of the standard library's
sources, and evaluated on files that it is not trained on after each number of tokens of `TOKENS`. Learning
rates fall with the root of the step after a warm-up, so that a run is the beginning of a longer one. The law
of `layoutopt size --fit` is fitted to these runs; the larger size of `HELD_OUT`, trained on more tokens than
any of them, is not among them: its loss has to lie in its interval. Takes some CPU minutes.

All have two layers at least, for one alone cannot look up what followed the same bytes before (Olsson et al.
2022, arXiv 2209.11895): it is of another kind. Runs begin at four times the warm-up, and most have more than
ten tokens a parameter: before, large sizes still gain more of a token than small ones, and the law has one
term of tokens for all.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import mesh_tf_core as mtf
from benchmarks import small_lm
from benchmarks.small_lm import BATCH, LENGTH
from layoutopt.sizing.family import counted
from layoutopt.sizing.fitting import fit

ROOT = Path(__file__).resolve().parent.parent
FITTED = ((2, 2), (2, 3), (3, 2), (3, 3))
HELD_OUT = (4, 3)
"""Heads and layers."""
TOKENS = (262_144, 524_288, 1_048_576, 1_572_864)
LAST = 2_097_152
SEEDS = 2
EVALUATED = 24
"""Batches that the loss is measured on."""


def trained(heads: int, layers: int, seed: int, tokens: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """One run, evaluated after each number of tokens."""
    model = small_lm.build(heads, layers)
    trainer = mtf.Trainer(model, "data:1", engine="local")
    data, held_out = small_lm.training(seed=seed), small_lm.held_out(EVALUATED)
    size, began = counted(model), time.process_time()
    for number in tokens:
        trainer.fit(data, number // (BATCH * LENGTH), keep=False)
        loss = trainer.evaluate(held_out)["loss"]
        row = {
            "heads": heads,
            "layers": layers,
            "seed": seed,
            "N": size.total,
            "D": number,
            "loss": loss,
            "cpu_seconds": time.process_time() - began,
        }
        print(row, flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "size_family.json")
    out = parser.parse_args().out
    runs = [row for s in range(SEEDS) for size in FITTED for row in trained(*size, s, TOKENS)]
    held = [row for s in range(SEEDS) for row in trained(*HELD_OUT, s, (LAST,))]
    law = fit({name: [row[name] for row in runs] for name in ("N", "D", "loss")}, source="this machine")
    n, d = held[0]["N"], held[0]["D"]
    low, high = law.loss_interval(n, d)
    losses = [row["loss"] for row in held]
    predicted = law.loss(n, d)
    found = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "law": {"constants": dict(law.constants), "intervals": law.intervals, "runs": len(runs)},
        "held_out": {
            "N": n,
            "D": d,
            "losses": losses,
            "predicted": predicted,
            "interval": [low, high],
            "error": max(losses, key=lambda x: abs(x - predicted)) / predicted - 1,
            "inside": all(low <= loss <= high for loss in losses),
            "beyond": law.outside(n, d),
        },
        "spread": max(
            abs(a["loss"] - b["loss"]) for a in runs for b in runs if (a["N"], a["D"]) == (b["N"], b["D"])
        ),
        "cpu_seconds": time.process_time(),
        "rows": runs + held,
    }
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}, indent=1))


if __name__ == "__main__":
    main()
