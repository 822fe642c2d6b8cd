"""1F1B gives the numbers of one device, holds what grows with the stages and not with the microbatches, and
waits as long as its closed form says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.hardware.model import CompilerName
from costmodels.liveness import memory
from costmodels.pipeline_bubble import waiting
from costmodels.pricing.compilers import COMPILERS
from costmodels.pricing.pricer import pricer
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.instructions import Instr, Local, Permute
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Loop, Program
from mesh_tf_core.ir.schedules import ONE_F_ONE_B, ONE_WAY, PipelineSchedule
from mesh_tf_core.lower.verify import verify
from mesh_tf_core.ops.index import DynamicSlice, DynamicUpdate
from tests.core.test_pipelines import LAYERS, B, D, E, changed, model, options, same, steps


@pytest.fixture(scope="module")
def plain() -> mtf.Model:
    return model()


@pytest.fixture(scope="module")
def dense(plain: mtf.Model) -> Any:
    return steps(plain.lower(mtf.Mesh("one:1"), mtf.Layout()))[:2]


def lowered(
    model: mtf.Model, mesh: str, layout: str, parts: int, schedule: str = ONE_F_ONE_B, **given: Any
) -> Program:
    how = options({**given, "microbatches": parts, "schedule": schedule})
    return model.lower(mtf.Mesh(mesh), mtf.Layout(layout), how)


FURTHER = {"wi": 3, "wo": 2, "table": 1, "shared": 3}
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("pipe:2", "layers:pipe", 4, {}),
    ("pipe:4", "layers:pipe", 1, {}),
    ("t:2;pipe:2", "layers:pipe;e:t;vocabulary:pipe+t", 8, {"storage": {"table": 3, "wo": 1}}),
    ("pipe:2;data:2", "layers:pipe;batch:data", 2, {"recompute": {"layers"}, "storage": FURTHER}),
    ("pipe:4", "layers:pipe", 2, {"recompute": {"tick"}}),
    ("pipe:2;t:2", "layers:pipe;d:t", 4, {"recompute": {"layers:keep=products"}}),
    ("pipe:2;data:2", "layers:pipe;batch:data", 4, {"recompute": {"tick", "layers"}, "storage": FURTHER}),
    ("data:2;pipe:2", "layers:pipe;batch:data", 4, {"recompute": {"layers:count=1"}, "storage": FURTHER}),
]
POLICIES: list[set[str]] = [
    set(),
    {"tick"},
    {"layers"},
    {"tick", "layers"},
    {"layers:keep=products"},
    {"layers:keep=others"},
    {"layers:keep=products:count=1"},
    {"tick", "layers:count=1"},
]
"""What of stages runs again."""


@pytest.mark.parametrize(("mesh", "layout", "parts", "given"), CASES)
@pytest.mark.one_in(3)
def test_losses_and_variables_are_those_of_one_device(
    mesh: str, layout: str, parts: int, given: dict[str, Any], plain: mtf.Model, dense: Any
) -> None:
    program = lowered(plain, mesh, layout, parts, **given)
    *found, engine = steps(program)
    same(found, dense)
    assert engine.communication_bytes == program.communication_bytes()
    assert engine.peak_memory_bytes == memory(program).peak


def test_random_numbers_are_those_of_microbatches_on_one_device() -> None:
    built = model(dropout=0.3)
    alone = steps(built.lower(mtf.Mesh("one:1"), mtf.Layout(), mtf.Options(microbatches=4)), 1)
    same(steps(lowered(built, "pipe:4;t:2", "layers:pipe;e:t", 4), 1)[:2], alone[:2])


@pytest.mark.parametrize(("stages", "parts", "again"), [(2, 8, ""), (4, 4, "tick"), (2, 4, "layers")])
def test_stages_work_and_wait_as_the_schedule_says(
    stages: int, parts: int, again: str, plain: mtf.Model
) -> None:
    schedule = PipelineSchedule("1f1b", stages, parts)
    program = lowered(plain, f"pipe:{stages}", "layers:pipe", parts, recompute={again} if again else ())
    done = {"forward": 0, "recompute": 0}
    sent = {"forward": 0, "backward": 0}
    for instr, times in program.expected():
        phase = instr.origin.phase
        if isinstance(instr, Local) and instr.op.name == "einsum" and phase in done:
            names = {n for i in (*instr.inputs, *instr.outputs) for n in program.values[i].shape.names}
            done[phase] += times if "e" in names else 0
        if isinstance(instr, Permute) and program.values[instr.inputs[0]].shape.names[-1:] == ("d",):
            sent[phase] += times
    # Two products for each of a stage's layers in every slot, of which the bubble's are for nothing.
    useful = 2 * parts * (4 // stages)
    assert 1 - useful / done["forward"] == pytest.approx(schedule.idle())
    assert done["recompute"] == (done["forward"] if again else 0)
    # The state and what is read of each example.
    assert sent == {"forward": 2 * schedule.ticks, "backward": 2 * schedule.ticks}


@pytest.mark.parametrize("schedule", ONE_WAY)
def test_a_gradient_is_added_up_in_one_loop(schedule: str, plain: mtf.Model) -> None:
    """Two loops with a sum each would hold every gradient of a stage twice."""
    options = mtf.Options(microbatches=4, schedule=schedule)
    program = plain.lower(mtf.Mesh("pipe:2"), mtf.Layout("layers:pipe"), options)
    loops = [instr for instr, _ in program.walk() if isinstance(instr, Loop) and instr.dim.name == "tick"]
    sums = [{program.values[r.outer].shape for r in loop.summed} for loop in loops]
    weights = {shape for found in sums for shape in found if {"d", "e"} <= {*shape.names}}
    assert weights and all(sum(shape in found for found in sums) == 1 for shape in weights)


@pytest.mark.parametrize("profile", COMPILERS)
def test_memory_of_a_program_for_each_stage(profile: CompilerName) -> None:
    """PyTorch's stages keep what backward reads where it was made, of P microbatches; one program of all
    stages keeps it of 2 P - 1."""
    program = wide(32).lower(
        mtf.Mesh("pipe:4"), mtf.Layout("layers:pipe"), mtf.Options(microbatches=32, schedule=ONE_F_ONE_B)
    )
    rules = COMPILERS[profile].memory
    (ring,) = {
        rules.sizes(program).of(v, program.mesh) // (4 * 4096)
        for v in program.values
        if v.shape.names[1:3] == ("in_flight", "layers_of_stage")
    }
    assert ring == (4 if rules.stage_programs else 7)
    assert rules.stage_programs == COMPILERS[profile].calls
    found = {r: memory(program, replace(rules, stage_programs=r)).peak for r in (False, True)}
    assert found[False] - found[True] >= 3 * 4 * 4096


def test_how_long_stages_wait(plain: mtf.Model) -> None:
    program = lowered(plain, "pipe:4;t:2", "layers:pipe;e:t", 8)
    cost = pricer(load_hardware("tpu-v5e"), program.mesh).cost(program)
    found = waiting(program, cost)
    assert found is not None
    of = found.schedule
    assert (found.dim, of.stages, of.ticks, of.works) == ("layers", 4, 11, 8)
    assert 0 < found.seconds < cost.step_seconds * 3 / 11


def wide(examples: int) -> mtf.Model:
    """Layers whose states take most of the memory."""
    g = mtf.Graph()
    batch, wide, layers = mtf.Dim("batch", examples), mtf.Dim("wide", 4096), mtf.Dim("layers", 4)
    x = g.input("x", [batch, wide], "float32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        return mtf.tanh(h * g.variable("w", [wide], mtf.ONES))

    return mtf.Model(mtf.reduce_mean(mtf.square(mtf.scan(layer, x, layers))))


def test_what_is_in_flight_does_not_grow_with_the_microbatches() -> None:
    state, peaks = 4096 * 4, {}
    for schedule in ("gpipe", ONE_F_ONE_B):
        for parts in (8, 32):
            how = mtf.Options({}, frozenset({"tick"}), parts, schedule=schedule)
            program = wide(parts).lower(mtf.Mesh("pipe:4"), mtf.Layout("layers:pipe"), how)
            fed = sum(program.values[i].local_bytes(program.mesh) for i in program.feeds.values())
            found = memory(program)
            peaks[schedule, parts] = found.peak - fed
    # All that grows are the columns of the table, a few numbers a tick.
    assert 0 < peaks[ONE_F_ONE_B, 32] - peaks[ONE_F_ONE_B, 8] < state / 8
    assert peaks["gpipe", 32] - peaks["gpipe", 8] >= 24 * state
    # A ring of 2 P - 1 states is held once.
    assert [h.bytes for h in found.holdings if "in_flight" in h.what] == [7 * state]


def test_rings_go_from_loop_to_loop_and_are_held_once() -> None:
    how = mtf.Options(microbatches=8, schedule=ONE_F_ONE_B)
    program = wide(8).lower(mtf.Mesh("pipe:4"), mtf.Layout("layers:pipe"), how)
    updates = [i for i, _ in program.walk() if isinstance(i, Local) and i.op == DynamicUpdate("in_flight")]
    held = [h for h in memory(program).holdings if "in_flight" in h.what]
    assert len(held) == len(updates) / 2 > 0  # two loops write them


def nested() -> mtf.Model:
    """Layers with a loop inside, of which backward reads states and products."""
    g = mtf.Graph()
    x, parts = g.input("x", [B, D], "float64"), mtf.Dim("parts", 3)

    def part(h: mtf.Tensor) -> mtf.Tensor:
        wi = g.variable("wi", [D, E], mtf.Normal(0.5), "float64")
        inner = mtf.tanh(mtf.einsum([h, wi], [B, E]))
        wo = g.variable("wo", [E, D], mtf.Normal(0.5), "float64")
        return h + mtf.sigmoid(mtf.einsum([inner, wo], [B, D]))

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        return mtf.scan(part, h * g.variable("scale", [D], mtf.Normal(1.0), "float64"), parts)

    return mtf.Model(mtf.reduce_mean(mtf.square(mtf.scan(layer, x, LAYERS))), mtf.SGD(0.1))


INSIDE: dict[str, list[tuple[str, ...]]] = {
    ONE_F_ONE_B: [(), ("layers", "parts"), ("tick", "parts"), ("layers:keep=others",)],
    "interleaved:2": [(), ("layers",)],
}


@pytest.mark.parametrize("schedule", INSIDE)
def test_loops_inside_of_layers(schedule: str) -> None:
    built, batch = nested(), np.random.default_rng(4).normal(size=(8, 4))

    def learned(mesh: str, layout: str, *again: str) -> dict[str, Any]:
        how = mtf.Options({}, frozenset(again), 4 if layout else 1, schedule=schedule if layout else "gpipe")
        program = built.lower(mtf.Mesh(mesh), mtf.Layout(layout), how)
        engine = LockstepEngine(program)
        engine.step({"x": batch.reshape(program.values[program.feeds["x"]].shape.sizes)})
        assert engine.peak_memory_bytes == memory(program).peak
        return {name: np.asarray(engine.read(name)) for name in program.variables}

    alone = learned("one:1", "")
    for again in INSIDE[schedule]:
        same([learned("pipe:2;data:2", "layers:pipe;batch:data", *again)], [alone])
    with pytest.raises(mtf.UserError, match="save for the backward pass stay on the devices; remove"):
        learned("pipe:2", "layers:pipe", "parts")
    with pytest.raises(mtf.UserError, match="save for the backward pass stay on the devices; remove"):
        hosted = frozenset({("activations", "layers")})
        how = mtf.Options({}, frozenset({"layers"}), 2, schedule=schedule, offload=hosted)
        built.lower(mtf.Mesh("pipe:2"), mtf.Layout("layers:pipe"), how)


FAULTS: dict[str, Any] = {
    "the state goes the other way": lambda i: (
        replace(i, shift=-i.shift) if isinstance(i, Permute) and i.origin.phase == Phase.FORWARD else None
    ),
    "gradients go on": lambda i: (
        replace(i, shift=-i.shift) if isinstance(i, Permute) and i.origin.phase == Phase.BACKWARD else None
    ),
    "backward takes what another microbatch left": lambda i: (
        replace(i, inputs=(i.inputs[0], FAULTY)) if _reads_ring(i) and FAULTY is not None else None
    ),
}
FAULTY: int | None = None


def _reads_ring(instr: Instr) -> bool:
    return isinstance(instr, Local) and instr.op == DynamicSlice("in_flight")


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, plain: mtf.Model, dense: Any) -> None:
    global FAULTY
    program = lowered(plain, "pipe:2", "layers:pipe", 4)
    # The number of a microbatch, in place of where it lies.
    slices = (i for i, _ in program.walk() if isinstance(i, Local) and i.origin.phase == Phase.BACKWARD)
    FAULTY = (
        next(i.inputs[1] for i in slices if i.op == DynamicSlice("microbatch")) if "left" in fault else None
    )
    broken = replace(program, code=changed(program.code, FAULTS[fault]))
    assert broken.code != program.code
    with pytest.raises(AssertionError):
        same(steps(verify(broken))[:2], dense)


def refused(why: str, built: mtf.Model, layout: str = "layers:pipe") -> None:
    with pytest.raises(mtf.UserError, match=why) as error:
        lowered(built, "pipe:2;t:2", layout, 2)
    assert "\n" not in str(error.value)


def test_what_it_cannot_do_is_refused_with_what_to_do(plain: mtf.Model) -> None:
    refused("a schedule needs pipeline stages, and the layout has none", plain, "e:t")
    refused("over the whole batch; do not split", model(linear=False))
    with pytest.raises(mtf.UserError, match="schedule '1f1n': did you mean '1f1b'"):
        mtf.Options(schedule="1f1n")

    g = mtf.Graph()
    x = g.input("x", [B, D], "float64")
    mixed = mtf.einsum([x, g.variable("in", [D, E], mtf.ONES, "float64")], [B, E])

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        return h * g.variable("w", [E], mtf.ONES, "float64")

    behind = mtf.scan(layer, mixed, LAYERS) * mtf.tanh(mixed)
    refused("reads values from before and after the layers", mtf.Model(mtf.reduce_mean(mtf.square(behind))))
