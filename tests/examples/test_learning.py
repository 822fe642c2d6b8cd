"""Examples learn: over some steps on their real data the loss falls by a fifth or more."""

from __future__ import annotations

from inspect import signature
from typing import Any

import numpy as np
import pytest

from examples import (
    bert,
    clip,
    deepseek_lm,
    diffusion,
    dlrm,
    mamba_lm,
    moe_lm,
    reformer_lm,
    resnet,
    transformer_seq2seq,
    unet3d,
    vit,
)
from tests.examples.helper import check_same, train
from tests.marks import by_day

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
DIGITS = {"size": 8, "channels": 16, "stages": 2, "blocks": 1, "batch": 32, "learning_rate": 0.005}
STEPS = 30
EXAMPLES: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "seq2seq": (transformer_seq2seq, {}, "x:2;y:2", "batch:x;heads:y;d_ff:y;vocab:y"),
    "moe": (moe_lm, {"experts": 4, "gated": True}, "x:4", "batch:x;experts:x"),
    "bert": (bert, {"warmup": 5}, "x:2;y:2", "batch:x;vocab:y"),
    "reformer": (reformer_lm, {"chunk": 8}, "x:2;y:2", "batch:x;heads:y;d_ff:y"),
    "resnet": (resnet, DIGITS, "x:2;y:2", "batch:x;height:y"),
    "unet3d": (unet3d, {"size": 8, "levels": 1, "batch": 2}, "x:2", "depth:x"),
}
SMALL_CLIP = {"size": 8, "image_layers": 1, "text_layers": 1, "batch": 32, "length": 16, "warmup": 0} | {
    "learning_rate": 0.001
}
TODAY: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "vit": (vit, {"size": 8, "patch": 2, "batch": 32, "learning_rate": 0.003}, "x:2;y:2", "batch:x;heads:y"),
    "dlrm": (dlrm, {"batch": 256, "learning_rate": 0.05}, "x:2", "batch:x;tables:x"),
    "mamba": (mamba_lm, {"d_head": 16, "d_state": 16}, "x:2;y:2", "batch:x;heads:y"),
    "deepseek": (
        deepseek_lm,
        {"layers": 2, "d_rotary": 4, "d_v": 8, "kv_rank": 16},
        "x:4",
        "batch:x;experts:x",
    ),
    "clip": (clip, SMALL_CLIP, "x:2", "batch:x"),
    "diffusion": (diffusion, {"size": 8, "channels": 8, "attend": 4, "groups": 4}, "x:2", "height:x"),
}
BY_TURNS = [
    *by_day(EXAMPLES, every=8, first=1),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in TODAY),
]


def hparams_of(example: Any, more: dict[str, Any]) -> dict[str, Any]:
    """The small sizes that an example has, and its own."""
    known = signature(example.model).parameters
    return {**{n: v for n, v in SIZES.items() if n in known}, **more}


@pytest.mark.parametrize("name", BY_TURNS)
def test_the_loss_falls(name: str) -> None:
    example, more, mesh, layout = {**EXAMPLES, **TODAY}[name]
    losses, _ = train(example, hparams_of(example, more), mesh, layout, steps=STEPS)
    first, last = float(np.mean(losses[:3])), float(np.mean(losses[-5:]))
    assert last < 0.8 * first, f"loss {first:.3f} -> {last:.3f} in {STEPS} steps"


def test_the_first_steps_are_those_of_one_device() -> None:
    """Also after the number of steps in which a small mistake in a gradient would show."""
    example, more, mesh, layout = EXAMPLES["moe"]
    hparams = {**hparams_of(example, more), "learning_rate": 0.001}
    got, want = train(example, hparams, mesh, layout, steps=8), train(example, hparams, steps=8)
    check_same(got, want)
