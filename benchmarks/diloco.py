"""Replicas that meet rarely against synchronous training on the same tokens, trained here.

    python benchmarks/diloco.py [--only 1500]
    python benchmarks/diloco.py --choose

The example language model (69,360 parameters) learns the standard library's sources: synchronously, and as
replicas that share a batch and meet rarely, on windows of another order for each seed (`RUNS`). All take the
same number of tokens in a step, shared among the replicas, and the same rates of the inner steps, which fall
by a cosine to the end, so that the last meetings come after the decay. The loss is that on files that nobody
trains on, of what replicas have in common, after the last meeting.

What there is to choose (inner rate, batch, the outer step: `CHOICES`) is chosen by the first half of those
files, with a seed of its own. What is shown is by the second half, with other seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from benchmarks import small_lm
from benchmarks.small_lm import VOCAB
from examples.text import Windows, corpus
from mesh_tf_core.optimizers import WarmupCosine

RESULTS = Path(__file__).resolve().parent / "results"
HEADS, LAYERS, LENGTH = 3, 2, 32
BATCH, PEAK, WARMUP, FLOOR = 64, 1e-2, 100, 0.05
"""Sequences of a step; the inner rate, its first steps, and the share of it at the end."""
EVALUATED, CHOOSING = 4096, 100
"""Sequences that the loss is of, and the seed by which is chosen."""
MEANS, PAPER, CHOSEN = (1.0, 0.0), (0.7, 0.9), (0.7, 0.7)
"""Rate and momentum of the outer step: plain means, those of 2311.08105, and the best that was tried here."""


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
      replicas: 0 is synchronous training; 1 meets itself, an optimizer of its own (2503.09799, section 4).
      period: steps between two meetings.
      outer: rate and momentum.
      batch: of all; rate: of the inner steps.
    """

    replicas: int = 0
    period: int = 30
    outer: tuple[float, float] = CHOSEN
    batch: int = BATCH
    rate: float = PEAK

    @property
    def name(self) -> str:
        if not self.replicas:
            return f"synchronous, batch {self.batch}, inner rate {self.rate:g}"
        rate, momentum = self.outer
        return (
            f"{self.replicas} replicas every {self.period} steps, outer rate {rate:g}, "
            f"momentum {momentum:g}, batch {self.batch}, inner rate {self.rate:g}"
        )


SYNCHRONOUS, TWO = Case(), Case(2)
RUNS = {
    4500: (SYNCHRONOUS, Case(rate=1.6e-2), TWO),
    1500: (
        SYNCHRONOUS,
        TWO,
        Case(1),
        Case(2, outer=MEANS),
        Case(2, outer=PAPER),
        Case(2, 10),
        Case(2, 100),
        Case(4),
    ),
}
"""Steps -> what is compared after so many, which all periods divide."""
CHOICES = {
    1500: (
        *(Case(batch=32, rate=rate) for rate in (5e-3, 1e-2)),
        *(Case(2, outer=outer, batch=32, rate=5e-3) for outer in (MEANS, (0.9, 0.5), CHOSEN, PAPER)),
        Case(2, outer=MEANS, batch=32),
        *(Case(rate=rate) for rate in (5e-3, 1e-2, 2e-2)),
        *(
            Case(2, outer=outer)
            for outer in (MEANS, (1.4, 0.2), (1.0, 0.5), (0.6, 0.6), (0.8, 0.6), (0.5, 0.7))
        ),
        Case(2, outer=(0.6, 0.6), rate=5e-3),
        Case(2, outer=(1.0, 0.5), rate=2e-2),
    ),
    3000: (
        *(Case(rate=rate) for rate in (6e-3, 1e-2, 1.6e-2)),
        *(Case(2, outer=outer) for outer in ((0.8, 0.6), CHOSEN, (0.6, 0.8))),
    ),
}
"""The same for what `--choose` compares."""


def trained(case: Case, seed: int, steps: int, half: int) -> dict[str, Any]:
    """One run; `half` of the held-out text: 0 or 1."""
    replicas = max(1, case.replicas)
    own = case.batch // replicas
    rare = mtf.DiLoCo("sites", case.period, *case.outer) if replicas > 1 else None
    model = small_lm.build(HEADS, LAYERS, own, LENGTH, WarmupCosine(case.rate, WARMUP, steps, FLOOR))
    trainer = mtf.Trainer(model, f"sites:{replicas}", "", mtf.Options(diloco=rare), engine="local")
    began, data = time.process_time(), small_lm.training(own, seed, LENGTH)
    curve: list[float] = []

    def judge(step: int) -> None:
        curve.append(round(trainer.evaluate(islice(held_out(half, own), EVALUATED // 4 // own))["loss"], 4))

    every = steps // 10
    with tempfile.TemporaryDirectory() as folder:
        alone = mtf.Decoupled(folder, 0, 1, case.period, *case.outer) if case.replicas == 1 else None
        trainer.fit(
            data, steps, evaluate=judge if half else None, evaluate_every=every, meet=alone, keep=False
        )
    row = {
        "case": case.name,
        **asdict(case),
        "steps": steps,
        "seed": seed,
        "curve": curve,
        "held_out": trainer.evaluate(islice(held_out(half, own), EVALUATED // own))["loss"],
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    trainer.engine.close()
    return row


def held_out(half: int, batch: int) -> Iterator[dict[str, np.ndarray]]:
    """Windows of one half of the files that nobody trains on, the same for every run."""
    text = corpus("held-out")
    middle = len(text) // 2
    return Windows(text[middle:] if half else text[:middle], batch, LENGTH, VOCAB, 12345)


def said(rows: list[dict[str, Any]], base: float) -> str:
    """The runs of a case, beside the mean of the synchronous ones."""
    found = [row["held_out"] for row in rows]
    mean = statistics.fmean(found)
    spread = f"{mean:.4f} ({min(found):.4f} to {max(found):.4f})"
    return f"{rows[0]['case']}: {spread}, {100 * (mean / base - 1):+.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--choose", action="store_true", help="what was tried, by the other half of the text")
    parser.add_argument("--only", type=int, default=0, metavar="STEPS", help="runs of so many steps alone")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seeds = [CHOOSING] if args.choose else [int(seed) for seed in args.seeds.split(",")]
    place = args.out or RESULTS / ("diloco_choices.json" if args.choose else "diloco.json")
    command = "python benchmarks/diloco.py" + " --choose" * args.choose
    rows: list[dict[str, Any]] = []
    for steps, cases in (CHOICES if args.choose else RUNS).items():
        base: dict[int, float] = {}  # of a batch, the best of the synchronous trainings
        for case in cases if args.only in (0, steps) else ():
            found = [trained(case, seed, steps, 0 if args.choose else 1) for seed in seeds]
            rows += found
            if not case.replicas:
                mean = statistics.fmean(row["held_out"] for row in found)
                base[case.batch] = min(mean, base.get(case.batch, mean))
            print(f"{steps} steps, {said(found, base[case.batch])}", flush=True)
            result = {"date": date.today().isoformat(), "command": command, "rows": rows}
            place.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
