"""Runs a layer on NumPy arrays: its output and the gradients of everything, under a layout."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.program import Program
from mesh_tf_core.lower.verify import verify

Build = Callable[..., mtf.Tensor]


@dataclass
class Run:
    """What a layer gave.

    Attributes:
      out: its output; variables: their initial values.
      after: the variables after one step of plain descent on sum(output * fixed numbers), so that a wrong
        gradient shows.
    """

    out: Any
    program: Program
    variables: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)


def run(build: Build, inputs: Mapping[str, tuple[str, Any]], mesh: str = "one:1", layout: str = "") -> Run:
    """Builds build(graph, *tensors) and runs one step of it.

    Args:
      inputs: name -> ("dim:size dim:size", float array).
    """
    g = mtf.Graph()
    tensors = []
    for name, (text, _) in inputs.items():
        dims = [mtf.Dim(n, int(s)) for n, s in (part.split(":") for part in text.split())]
        tensors.append(g.input(name, dims, "float32"))
    y = build(g, *tensors)
    w = np.random.default_rng(zlib.crc32(str(y.shape).encode())).normal(size=y.shape.sizes)
    weights = g.input("weights", list(y.shape), "float32")
    model = mtf.Model(mtf.reduce_sum(y * weights), mtf.SGD(0.01))
    step = model.training_step()
    program = verify(mtf.lower(step.graph, mtf.Mesh(mesh), mtf.Layout(layout), {**step.results, "y": y}))
    engine = LockstepEngine(program)
    engine.initialize()
    before = {n: engine.read(n) for n in program.variables}
    feeds = {n: np.asarray(x, np.float32) for n, (_, x) in inputs.items()}
    out = engine.step({**feeds, "weights": w.astype(np.float32)})
    assert engine.communication_bytes == program.communication_bytes()
    return Run(out["y"], program, before, {n: engine.read(n) for n in program.variables})


def check_layouts(
    build: Build, inputs: Mapping[str, tuple[str, Any]], layouts: list[tuple[str, str]], atol: float = 2e-5
) -> Run:
    """AssertionError unless output and updated variables are the same under every layout; returns the dense
    run."""
    dense = run(build, inputs)
    assert dense.after
    for mesh, layout in layouts:
        got = run(build, inputs, mesh, layout)
        np.testing.assert_allclose(got.out, dense.out, rtol=1e-4, atol=atol, err_msg=layout)
        for name, value in got.after.items():
            np.testing.assert_allclose(
                value, dense.after[name], rtol=1e-4, atol=atol, err_msg=f"{layout} {name}"
            )
            moved = np.abs(dense.after[name] - dense.variables[name]).max()
            assert name == "step" or moved > 10 * atol, f"{name} does not learn: this test would show nothing"
    return dense
