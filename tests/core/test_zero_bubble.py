"""ZB-H1 gives the numbers of one device, and gradients of weights run only when no stage is idle."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.liveness import memory
from costmodels.pipeline_bubble import waiting
from costmodels.pricing.pricer import pricer
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.instructions import Instr, Local, Permute
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import PipelineSchedule
from mesh_tf_core.lower.verify import verify
from mesh_tf_core.ops.index import DynamicSlice
from tests.core.test_one_forward_one_backward import FURTHER, lowered, nested
from tests.core.test_pipelines import changed, model, same, steps

ZERO = "zb-h1"


@pytest.fixture(scope="module")
def plain() -> mtf.Model:
    return model()


@pytest.fixture(scope="module")
def dense(plain: mtf.Model) -> Any:
    return steps(plain.lower(mtf.Mesh("one:1"), mtf.Layout()))[:2]


def check(program: Program, dense: Any) -> None:
    *found, engine = steps(program)
    same(found, dense)
    assert engine.communication_bytes == program.communication_bytes()
    assert engine.peak_memory_bytes == memory(program).peak


KEPT = "layers:keep=products"
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("pipe:2", "layers:pipe", 4, {}),
    ("pipe:4", "layers:pipe", 2, {}),
    ("pipe:4", "layers:pipe", 1, {"recompute": {"layers"}}),
    ("t:2;pipe:2", "layers:pipe;e:t;vocabulary:pipe+t", 8, {"storage": {"table": 1, "wo": 1}}),
    (
        "pipe:2;data:2",
        "layers:pipe;batch:data",
        4,
        {"recompute": {"layers:keep=products"}, "storage": FURTHER},
    ),
    ("pipe:2;t:2", "layers:pipe;d:t", 4, {"recompute": {"layers:keep=others"}}),
    ("pipe:2;data:2", "layers:pipe;batch:data", 4, {"recompute": {"tick"}, "storage": FURTHER}),
    ("pipe:2", "layers:pipe", 4, {"recompute": {"tick", "layers:count=1"}}),
    ("pipe:4", "layers:pipe", 2, {"recompute": {"tick", "layers:keep=products"}}),
]


@pytest.mark.parametrize(("mesh", "layout", "parts", "given"), CASES)
@pytest.mark.one_in(6)
def test_losses_and_variables_are_those_of_one_device(
    mesh: str, layout: str, parts: int, given: dict[str, Any], plain: mtf.Model, dense: Any
) -> None:
    check(lowered(plain, mesh, layout, parts, ZERO, **given), dense)


def products(program: Program) -> Counter[str]:
    """How often products with "e" run, by the phase and the slot that they are in."""
    found = Counter[str]()
    for instr, times in program.expected():
        if isinstance(instr, Local) and instr.op.name == "einsum":
            names = [program.values[i].shape.names for i in (*instr.inputs, *instr.outputs)]
            made = names[-1]
            if any("e" in each for each in names):
                weights = {"d", "e"} <= {*made} and "batch" not in made
                found[f"{instr.origin.phase}{' of weights' * weights}"] += times
    return found


def _hands_on(instr: Instr, program: Program) -> bool:
    """Whether stages hand on a state, or what is read of each example."""
    return isinstance(instr, Permute) and program.values[instr.inputs[0]].shape.names[-1:] == ("d",)


@pytest.mark.parametrize(("stages", "parts"), [(2, 8), (4, 8), (4, 4)])
def test_gradients_of_weights_run_once_for_every_microbatch(
    stages: int, parts: int, plain: mtf.Model
) -> None:
    schedule, own = PipelineSchedule(ZERO, stages, parts), 4 // stages
    zero, plainly = (lowered(plain, f"pipe:{stages}", "layers:pipe", parts, s) for s in (ZERO, "1f1b"))
    one, other = products(zero), products(plainly)
    assert one["forward"] == other["forward"] == 2 * own * schedule.ticks
    assert one["backward"] == other["backward"]
    assert other["backward of weights"] == 2 * own * schedule.ticks
    assert one["backward of weights"] == 2 * own * parts
    sent = [sum(n for i, n in p.expected() if _hands_on(i, p)) for p in (zero, plainly)]
    assert sent[0] == sent[1]
    assert zero.communication_bytes() == plainly.communication_bytes()
    # The ring of what backward keeps for the weights has a place for each stage.
    assert schedule.ring(1) == min(stages, parts + 1)


def test_how_long_stages_wait(plain: mtf.Model) -> None:
    found = {}
    for schedule in ("1f1b", ZERO):
        program = lowered(plain, "pipe:4", "layers:pipe", 8, schedule)
        cost = pricer(load_hardware("cpu-local"), program.mesh).cost(program)
        bubble = waiting(program, cost)
        assert bubble is not None and (bubble.schedule.ticks, bubble.schedule.works) == (11, 8)
        found[schedule] = bubble
    assert 0 < found[ZERO].seconds < found["1f1b"].seconds


@pytest.mark.parametrize("again", [(), ("layers", "parts"), ("layers:keep=others",), ("tick", "parts")])
def test_loops_inside_of_layers(again: tuple[str, ...]) -> None:
    built, rows = nested(), np.random.default_rng(4).normal(size=(8, 4))

    def learned(mesh: str, layout: str, how: mtf.Options) -> dict[str, Any]:
        program = built.lower(mtf.Mesh(mesh), mtf.Layout(layout), how)
        engine = LockstepEngine(program)
        engine.step({"x": rows.reshape(program.values[program.feeds["x"]].shape.sizes)})
        assert engine.peak_memory_bytes == memory(program).peak
        return {name: np.asarray(engine.read(name)) for name in program.variables}

    how = mtf.Options({}, frozenset(again), 4, schedule=ZERO)
    piped = learned("pipe:2;data:2", "layers:pipe;batch:data", how)
    same([piped], [learned("one:1", "", mtf.Options())])


FAULTS: dict[str, Any] = {
    "gradients go on": lambda i: (
        replace(i, shift=-i.shift) if isinstance(i, Permute) and i.origin.phase == Phase.BACKWARD else None
    ),
    "weights take what the ring has first": lambda i: (
        replace(i, inputs=(i.inputs[0], FAULTY)) if _reads_late(i) and FAULTY is not None else None
    ),
}
FAULTY: int | None = None


def _reads_late(instr: Instr) -> bool:
    return isinstance(instr, Local) and instr.op == DynamicSlice("in_flight")


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, plain: mtf.Model, dense: Any) -> None:
    global FAULTY
    program = lowered(plain, "pipe:2", "layers:pipe", 4, ZERO)
    slices = (i for i, _ in program.walk() if isinstance(i, Local) and i.origin.phase == Phase.BACKWARD)
    FAULTY = next(i.inputs[1] for i in slices if i.op == DynamicSlice("microbatch"))
    broken = replace(program, code=changed(program.code, FAULTS[fault]))
    assert broken.code != program.code
    with pytest.raises(AssertionError):
        same(steps(verify(broken))[:2], dense)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe"])
def test_whole_stages_run_again_before_gradients_of_weights_wait(
    schedule: str, plain: mtf.Model, dense: Any
) -> None:
    """What these read of the second run waits with them, in place of all that backward reads."""
    program, other = (
        lowered(plain, "pipe:2", "layers:pipe", 4, schedule, recompute=again) for again in ({"tick"}, set())
    )
    check(program, dense)
    assert memory(program).peak < memory(other).peak
