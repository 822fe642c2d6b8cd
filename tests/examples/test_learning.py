"""Examples learn: over some steps on real text the loss falls below that of guessing single bytes' shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from examples import bert, moe_lm, transformer_seq2seq
from tests.examples.helper import check_same, train

SIZES: dict[str, Any] = {
    "layers": 1,
    "d_model": 32,
    "d_kv": 8,
    "heads": 4,
    "d_ff": 64,
    "vocab": 128,
    "batch": 8,
    "length": 32,
    "learning_rate": 0.01,
}
STEPS = 30
EXAMPLES: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "seq2seq": (transformer_seq2seq, {}, "x:2;y:2", "batch:x;heads:y;d_ff:y;vocab:y"),
    "moe": (moe_lm, {"experts": 4, "gated": True}, "x:4", "batch:x;experts:x"),
    "bert": (bert, {"warmup": 5}, "x:2;y:2", "batch:x;vocab:y"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_loss_falls(name: str) -> None:
    example, more, mesh, layout = EXAMPLES[name]
    losses, _ = train(example, {**SIZES, **more}, mesh, layout, steps=STEPS)
    first, last = float(np.mean(losses[:3])), float(np.mean(losses[-5:]))
    assert last < 0.8 * first, f"loss {first:.3f} -> {last:.3f} in {STEPS} steps"


def test_the_first_steps_are_those_of_one_device() -> None:
    """Also after the number of steps in which a small mistake in a gradient would show."""
    example, more, mesh, layout = EXAMPLES["moe"]
    hparams = {**SIZES, **more, "learning_rate": 0.001}
    got, want = train(example, hparams, mesh, layout, steps=8), train(example, hparams, steps=8)
    check_same(got, want)
