"""Loss curves of a small mixture of experts with narrow types, beside those of bfloat16:
`python -m benchmarks.narrow_types`.

Every run has the same initial weights and the same batches of a text that can be learned: a random walk over
the vocabulary with two kinds of steps, whose entropy is ln 2.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from examples.moe_lm import model

OUT = Path(__file__).parent / "results" / "narrow_types.json"
STEPS, EVERY, VOCAB, BATCH, LENGTH = 300, 25, 64, 8, 64
SIZES: dict[str, Any] = {"layers": 2, "d_model": 128, "d_kv": 32, "heads": 4, "d_ff": 256, "experts": 4}
SIZES |= {"vocab": VOCAB, "batch": BATCH, "length": LENGTH, "dtype": "bfloat16", "learning_rate": 2e-3}
FORMS: dict[str, dict[str, str]] = {
    "bfloat16": {},
    "float8=blocks": {"float8": "blocks"},
    "float8=tensor": {"float8": "tensor"},
    "moments=bfloat16": {"moments": "bfloat16"},
    "moments=int8": {"moments": "int8"},
    "float8=blocks, moments=int8": {"float8": "blocks", "moments": "int8"},
}
"""Name -> what is set; the first one is what others are compared with."""


def losses(form: dict[str, str]) -> list[float]:
    """The loss of every step."""
    run, rng = mtf.Trainer(model(**SIZES, **form), "x:1", "", engine="local"), np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        tokens = np.cumsum(rng.integers(1, 3, (BATCH, LENGTH + 1)), 1) % VOCAB
        batch = {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}
        found.append(float(run.step(batch)["loss"]))
    return found


def main() -> None:
    made = model(**SIZES)
    content: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python -m benchmarks.narrow_types",
        "steps": STEPS,
        "every": EVERY,
        "parameters": made.parameters,
        "curves": {},
    }
    for name, form in FORMS.items():
        found = losses(form)
        means = [fmean(found[i : i + EVERY]) for i in range(0, STEPS, EVERY)]
        content["curves"][name] = [round(mean, 5) for mean in means]
        OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(name, *(f"{mean:.3f}" for mean in means), flush=True)


if __name__ == "__main__":
    main()
