"""Variables over any number of devices: shards that are padded, with the numbers of one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.kernels.fusion import Fuses
from costmodels.liveness import MemoryRules, memory
from examples.transformer_lm import model as transformer
from mesh_tf_core.engines import open_engine
from mesh_tf_core.ir.dims import PaddedDim
from mesh_tf_core.ir.program import AllGather, Program, ReduceScatter
from mesh_tf_core.lower.storage import paddable
from tests.marks import by_day

SIZES = {"layers": 2, "d_model": 20, "d_kv": 5, "heads": 4, "d_ff": 28, "vocab": 22, "batch": 12, "length": 6}


def model(**more: Any) -> mtf.Model:
    found: mtf.Model = transformer(**{**SIZES, "clip_norm": 1.0, **more})
    return found


def lowered(
    found: mtf.Model,
    mesh: str,
    layout: str,
    stage: int,
    parts: int = 1,
    again: bool = False,
    schedule: str = "gpipe",
) -> Program:
    trained = [n for n, v in found.training_step().graph.variables.items() if v.trainable]
    options = mtf.Options(
        schedule=schedule,
        storage=dict.fromkeys(trained, stage),
        recompute=frozenset({"layers"} if again else ()),
        microbatches=parts,
    )
    return found.lower(mtf.Mesh(mesh), mtf.Layout(layout), options)


def learned(program: Program, engine: str) -> tuple[list[float], dict[str, Any], Any]:
    """Losses of three steps, the variables after them, and the engine."""
    running, rng = open_engine(program, engine), np.random.default_rng(0)
    feeds = {}
    for name in sorted(program.feeds):
        shape = program.values[program.feeds[name]].shape.sizes
        feeds[name] = rng.integers(0, SIZES["vocab"], (SIZES["batch"], SIZES["length"])).reshape(shape)
    losses = [float(np.asarray(running.step(feeds)["loss"])) for _ in range(3)]
    return losses, {n: np.asarray(running.read(n)) for n in program.variables}, running


CASES = [
    ("data:3", "batch:data", 3, 1, False),
    ("data:4;model:2", "batch:data;heads:model;d_ff:model", 2, 1, False),
    ("a:3;b:2", "batch:a", 3, 2, True),
    ("data:3", "batch:data", 1, 2, False),
    ("data:6", "batch:data", 2, 1, True),
    ("a:3;b:2", "batch:a;heads:b;d_ff:b;vocab:b", 3, 1, False),
]


IN_STAGES = [
    (4, "interleaved:2", 3, True),
    (4, "circular:2", 2, False),
    (5, "interleaved:2", 1, False),
    (5, "1f1b", 3, False),
]
"""Layers, schedule, stage of storage, whether layers run again."""


def compare(program: Program, found: mtf.Model, engine: str) -> None:
    """An engine with padded shards against one device."""
    losses, variables, running = learned(program, engine)
    expected, wanted, one = learned(lowered(found, "data:1", "", 0), "lockstep")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, array in wanted.items():
        # Adam divides by small moments: sums in another order differ as much without padding.
        np.testing.assert_allclose(variables[name], array, atol=5e-6, err_msg=name)
    held = {axis: n for axis, n in running.communication_bytes.items() if n}
    for axis, sent in program.communication_bytes().items():
        assert held.get(axis, 0.0) == pytest.approx(sent)
    state = sum(s.value.local_bytes(program.mesh) for s in program.variables.values())
    assert running.variable_bytes == state
    running.close()
    one.close()


@pytest.mark.parametrize("case", by_day([(case,) for case in CASES], every=4))
@pytest.mark.parametrize("engine", ["lockstep", "local"])
@pytest.mark.one_in(4)
def test_padded_shards_learn_as_one_device_does(case: Any, engine: str) -> None:
    program = lowered(model(), *case)
    assert [s for s in program.variables.values() if s.padded is not None]
    compare(program, model(), engine)


@pytest.mark.parametrize("case", by_day([(case,) for case in IN_STAGES], every=4))
@pytest.mark.parametrize("engine", ["lockstep", pytest.param("local", marks=pytest.mark.nightly)])
def test_layers_that_lie_in_the_order_of_stages_are_padded_too(case: Any, engine: str) -> None:
    layers, schedule, stage, again = case
    mesh, layout = "data:3;pipe:2", "batch:data;layers:pipe"
    program = lowered(model(layers=layers), mesh, layout, stage, 4, again, schedule)
    assert [s for s in program.variables.values() if s.padded is not None and s.variable.order is not None]
    compare(program, model(layers=layers), engine)


def test_gradients_are_scattered_and_weights_gathered_with_their_padding() -> None:
    program = lowered(model(), "data:3", "batch:data", 3)
    gathers = [i for i, _ in program.walk() if isinstance(i, AllGather)]
    scatters = [i for i, _ in program.walk() if isinstance(i, ReduceScatter)]
    sizes = [program.values[i.outputs[0]].shape.padded for i in (*gathers, *scatters)]
    assert any(isinstance(d, PaddedDim) and d.size == 21 and d.real == 20 for d in sizes)
    assert len(scatters) >= 9


def test_a_device_holds_its_share_of_what_does_not_divide() -> None:
    """Where 96 devices of no dimension's divisors held all (70 B parameters took 1 TiB)."""
    found = transformer(
        layers=2, d_model=8192, d_kv=128, heads=64, kv_heads=8, gated=True, d_ff=28672, vocab=32000,
        batch=96, length=128, dtype="bfloat16", clip_norm=1.0,
    )  # fmt: skip
    program = lowered(found, "data:96", "batch:data", 3, again=True)
    state = sum(s.value.local_bytes(program.mesh) for s in program.variables.values())
    whole = sum(s.variable.bytes for s in program.variables.values())
    assert whole / 96 <= state < 1.02 * whole / 96
    assert memory(program, MemoryRules(fuses=Fuses.ALL)).peak < 0.5 * whole


def test_small_variables_and_updates_that_mix_elements_stay_whole() -> None:
    program = lowered(model(optimizer="adafactor"), "data:3", "batch:data", 3)
    assert not [s for s in program.variables.values() if s.padded is not None]
    graph = model(optimizer="adafactor").training_step().graph
    assert not paddable(graph)["feed_forward/wi"] & {"d_model", "d_ff"}
    tiny = lowered(model(), "data:64", "", 3)
    assert all(s.padded is None or s.padded.real >= 64 for s in tiny.variables.values())


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.one_in(2)
def test_what_is_saved_goes_on_over_another_number_of_devices(stages: bool) -> None:
    how = ("data:3;pipe:2", "batch:data;layers:pipe", 3, 4, False, "interleaved:2")
    found = model(layers=5)
    first = lowered(found, *how) if stages else lowered(found, "data:3", "batch:data", 3)
    _, variables, running = learned(first, "lockstep")
    saved = {piece.name: np.asarray(array) for piece, array in running.snapshot().items()}
    other = open_engine(lowered(found, "data:4;model:2", "batch:data;d_ff:model", 2), "lockstep")
    for name, array in variables.items():
        np.testing.assert_array_equal(saved[name], array)
        other.write(name, array)
        np.testing.assert_array_equal(np.asarray(other.read(name)), array)
    running.close()
    other.close()


def test_an_evaluation_reads_padded_shards() -> None:
    found, batch = model(), {"tokens": np.zeros((SIZES["batch"], SIZES["length"]), np.int32)}
    batch["targets"] = batch["tokens"]
    trained = [n for n, v in found.training_step().graph.variables.items() if v.trainable]
    losses = []
    for mesh, storage in (("data:3", dict.fromkeys(trained, "zero3")), ("data:1", {})):
        trainer = mtf.Trainer(found, mesh, "batch:data", options=mtf.Options(storage), engine="local")
        losses.append(trainer.evaluate([batch], model())["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("fault", ["padding counts", "a run begins late"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mesh_tf_core.engines import pieces
    from mesh_tf_core.ops.pieces import CutPadding

    if fault == "padding counts":
        real = CutPadding.kernel

        def kernel(self: CutPadding, k: Any, at: Any, *slices: Any) -> Any:
            axis = at.inputs[0].shape.names.index(self.dim.name)
            return real(self, k, at, k.flip(slices[0], axis))

        monkeypatch.setattr(CutPadding, "kernel", kernel)
    else:
        counting = pieces._counting
        monkeypatch.setattr(
            pieces, "_counting", lambda *a: [(max(b - 1, 0), n, at) for b, n, at in counting(*a)]
        )
    program = lowered(model(), "data:3", "batch:data", 3)
    losses, _, running = learned(program, "lockstep")
    running.close()
    expected, _, one = learned(lowered(model(), "data:1", "", 0), "lockstep")
    one.close()
    assert not np.allclose(losses, expected, rtol=1e-5)
