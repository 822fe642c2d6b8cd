"""Trains an example for a few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.engines import open_engine
from mesh_tf_core.ir.program import Program
from mesh_tf_core.lower.verify import verify

Result = tuple[list[float], dict[str, Any]]
SMALL: dict[str, Any] = {
    "layers": 2,
    "d_model": 16,
    "d_kv": 4,
    "heads": 4,
    "d_ff": 32,
    "vocab": 32,
    "batch": 8,
    "length": 8,
    "learning_rate": 0.01,
}
"""A language model that trains in no time."""


def batches(example: ModuleType, hparams: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    source = example.data(**hparams)
    return [next(source) for _ in range(count)]


def train(
    example: ModuleType,
    hparams: Mapping[str, Any],
    mesh: str = "one:1",
    layout: str = "",
    steps: int = 3,
    seen: Callable[[Program], None] | None = None,
    engine: str = "lockstep",
    **options: Any,
) -> Result:
    """Losses of some steps, and the variables afterwards."""
    model = example.model(**hparams)
    program = verify(model.lower(mtf.Mesh(mesh), mtf.Layout(layout), mtf.Options(**options)))
    if seen is not None:
        seen(program)
    runs = open_engine(program, engine)
    losses = []
    for batch in batches(example, hparams, steps):
        # With microbatches, a batch comes as parts along a first dimension of its own.
        shaped = {n: x.reshape(program.values[program.feeds[n]].shape.sizes) for n, x in batch.items()}
        losses.append(float(runs.step(shaped)["loss"]))
        assert runs.communication_bytes == program.communication_bytes()
    learned = {name: runs.read(name) for name in program.variables}
    runs.close()
    return losses, learned


def check_same(got: Result, want: Result) -> None:
    """Equal losses and variables; AssertionError names the first variable that differs."""
    np.testing.assert_allclose(got[0], want[0], rtol=3e-5)
    assert got[1].keys() == want[1].keys()
    for name, value in got[1].items():
        # Adam divides by the root of tiny second moments: noise of a gradient shows at 1e-3 of a step.
        np.testing.assert_allclose(value, want[1][name], atol=3e-4, rtol=1e-3, err_msg=name)
