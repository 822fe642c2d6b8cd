"""Storage of every array that stays between steps: split, it takes less memory and gives the same numbers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.liveness import memory
from mesh_tf_core.engines import open_engine
from mesh_tf_core.ir.program import AllGather, Program
from mesh_tf_core.ir.schedules import ONE_WAY
from mesh_tf_core.lower.storage import read_stage
from tests.kept_arrays import AFTER, KINDS, batch, model
from tests.marks import by_day

MESH, OTHER = "data:2;pod:2", "other"
STORED = {"zero3": {"storage": {OTHER: 3}}, "zero3@pod": {"storage": {OTHER: read_stage("zero3@pod")}}}
WAYS: dict[str, dict[str, Any]] = {
    **STORED,
    "recomputed": {**STORED["zero3"], "recompute": frozenset({"layers"})},
    "in parts": {**STORED["zero3"], "microbatches": 2},
    "on the hosts": {"offload": frozenset({("weights", OTHER)})},
    "split on the hosts": {**STORED["zero3"], "offload": frozenset({("weights", OTHER)})},
}


def lowered(kind: str, mesh: str, dtype: str = "float64", **options: Any) -> Program:
    layout = mtf.Layout("batch:data+pod" if mesh else "")
    return model(kind, dtype).lower(mtf.Mesh(mesh or "data:1"), layout, mtf.Options(**options))


def learned(program: Program, engine: str, dtype: str = "float64") -> tuple[dict[str, Any], Any]:
    running = open_engine(program, engine)
    feeds = {"x": batch(dtype)["x"].reshape(program.values[program.feeds["x"]].shape.sizes)}
    losses = [float(np.asarray(running.step(feeds)["loss"])) for _ in range(2)]
    return {"loss": losses, **{n: np.asarray(running.read(n)) for n in program.variables}}, running


@pytest.mark.parametrize(("kind", "how"), by_day(itertools.product(KINDS, WAYS), every=5))
def test_numbers_and_bytes(kind: str, how: str) -> None:
    compare(kind, how, "lockstep")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(3)
def test_numbers_and_bytes_in_tensorflow(kind: str) -> None:
    compare(kind, "zero3", "local")


def compare(kind: str, how: str, engine_name: str) -> None:
    """Two steps on four devices against the same on one, in an engine."""
    options = WAYS[how]
    parts = options.get("microbatches", 1)
    one, _ = learned(lowered(kind, "", microbatches=parts), "lockstep")
    program = lowered(kind, MESH, **options)
    found, engine = learned(program, engine_name)
    assert found.keys() == one.keys()
    for name, wanted in one.items():
        # Adam's factors are powers in float32, which libraries round otherwise.
        near = (1e-9, 1e-12) if engine_name == "lockstep" else (1e-5, 1e-6)
        np.testing.assert_allclose(found[name], wanted, *near, err_msg=name)
    if engine_name == "lockstep":
        assert engine.peak_memory_bytes == memory(program).peak
    sent = {axis: n for axis, n in program.communication_bytes().items() if n}
    assert {axis: n for axis, n in engine.communication_bytes.items() if n} == pytest.approx(sent)
    held = sum(s.value.local_bytes(program.mesh) for s in program.variables.values() if not s.host)
    assert engine.variable_bytes == held


@pytest.mark.parametrize("kind", KINDS)
def test_no_device_gathers_all_layers(kind: str) -> None:
    code = lowered(kind, MESH, storage={"w": 3, OTHER: 3}).code
    assert not [instr for instr in code if isinstance(instr, AllGather)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ONE_WAY)
def test_averages_of_stages(schedule: str) -> None:
    found, layers = model(AFTER, layers=mtf.Dim("layers", 4)), {"storage": {"w": 3, OTHER: 3}}
    one = found.lower(mtf.Mesh("data:1"), mtf.Layout(""), mtf.Options(microbatches=4))
    options = mtf.Options(**layers, microbatches=4, schedule=schedule)
    staged = found.lower(mtf.Mesh(MESH), mtf.Layout("batch:data;layers:pod"), options)
    losses = [learned(program, "lockstep")[0]["loss"] for program in (one, staged)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_split_storage_takes_less_memory(kind: str) -> None:
    plain = lowered(kind, MESH)
    for how, ways in (("zero3@pod", 2), ("zero3", 4)):
        found = lowered(kind, MESH, **WAYS[how])
        before, after = (p.variables[OTHER].value.local_bytes(p.mesh) for p in (plain, found))
        assert after == before / ways
        assert memory(found).peak < memory(plain).peak
