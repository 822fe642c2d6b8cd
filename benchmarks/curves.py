"""Every example trained on its real data under the layout that the search finds, beside one device.

    python benchmarks/curves.py [--steps 100] [--only transformer_lm]

Prints the loss at the start and the end, and the largest relative difference to the losses of one device
over the first 20 steps (float32; target 1e-3). Sizes are small, so that this takes minutes; the engine is the
local one. Fails if a loss does not fall by a fifth or differs by more than the target.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from inspect import signature
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mesh_tf_core as mtf  # noqa: E402
from layoutopt import search  # noqa: E402
from mesh_tf_core.engines import prepare  # noqa: E402

SIZES: dict[str, Any] = {
    "layers": 2,
    "d_model": 64,
    "d_kv": 16,
    "heads": 4,
    "d_ff": 128,
    "vocab": 256,
    "batch": 16,
    "length": 32,
    "learning_rate": 0.003,
}
MORE: dict[str, dict[str, Any]] = {
    "transformer_lm": {},
    "transformer_seq2seq": {},
    "moe_lm": {"experts": 4},
    "bert": {},
    "reformer_lm": {"chunk": 8},
    "resnet": {"size": 16, "stages": 2},
    "unet3d": {"size": 8, "batch": 4},
    "mlp": {},
}
MESH = "data:2;model:2"
SAME, FALLS, COMPARED = 1e-3, 0.8, 20


def losses(example: Any, hparams: dict[str, Any], trainer: mtf.Trainer, steps: int) -> list[float]:
    batches = itertools.islice(example.data(**hparams), steps)
    return [float(trainer.step(batch)["loss"]) for batch in batches]


def row(name: str, steps: int) -> bool:
    """Trains one example both ways and prints what came of it; whether it is as it should be."""
    example = importlib.import_module(f"examples.{name}")
    known = signature(example.model).parameters
    hparams = {**{n: v for n, v in SIZES.items() if n in known}, **MORE[name]}
    plan = search(example.model(**hparams), mesh=MESH, allow="usual")
    own = signature(example.data).parameters
    fed = {n: v for n, v in hparams.items() if n in own}
    got = losses(example, fed, mtf.Trainer(example.model(**hparams), plan), steps)
    one = losses(example, fed, mtf.Trainer(example.model(**hparams), "one:1"), COMPARED)
    apart = max(abs(a - b) / abs(b) for a, b in zip(got, one, strict=False))
    first, last = sum(got[:5]) / 5, sum(got[-5:]) / 5
    good = apart <= SAME and last <= FALLS * first
    layout = f"{plan.layout}" or "nothing is split"
    print(
        f"{name:20}{first:>8.3f}{last:>8.3f}{apart:>10.1e}  {'ok ' if good else 'BAD'}  {layout}", flush=True
    )
    return good


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", choices=sorted(MORE))
    asked = parser.parse_args()
    prepare(4)
    print(f"{'example':20}{'first':>8}{'last':>8}{'apart':>10}       layout on {MESH}")
    names = [asked.only] if asked.only else list(MORE)
    good = [row(name, asked.steps) for name in names]
    if not all(good):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
