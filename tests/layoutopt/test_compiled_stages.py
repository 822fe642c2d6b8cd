"""Every schedule of a pipeline through the TPU compiler, without a TPU: it sends the messages that the
program says."""

from __future__ import annotations

import pytest

import layoutopt
from layoutopt.models.loading import load_model
from mesh_tf_core.ir.schedules import NAMES

SIZES = ["layers=8", "d_model=256", "d_kv=64", "heads=4", "d_ff=1024", "length=256", "batch=16"]
PROGRAMS = {
    "examples/transformer_lm.py": (
        "v5p:2x2x1",
        "pipe:2;model:2",
        "layers:pipe;heads:model;d_ff:model;vocab:model",
    ),
    "examples/bert.py": ("v5p:2x2x2", "pipe:4;data:2", "layers:pipe;batch:data"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("source", PROGRAMS)
@pytest.mark.parametrize("schedule", NAMES)
def test_messages_are_those_that_the_program_says(schedule: str, source: str) -> None:
    pytest.importorskip("libtpu")
    topology, mesh, layout = PROGRAMS[source]
    built = load_model(source, SIZES).model
    priced = layoutopt.cost(built, mesh, layout, "tpu-v5p", schedule=schedule, microbatches=4)
    found = layoutopt.verify(priced, topology)
    assert found.compiled is not None and found.compiled.read.unknown_loops == 0
    assert found.same_collectives, found.moved
    between = [m for m in found.moved if m.family == "permute"]
    assert between and all(m.count.compiler == m.count.predicted > 0 for m in between)
    # The compiler joins sums, and makes none of its own.
    assert all(0 < m.count.compiler <= m.count.predicted for m in found.moved)
