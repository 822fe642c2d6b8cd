"""What of a pipeline's work counts, where each stage is a program of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.liveness import memory
from costmodels.pipeline_bubble import waiting
from costmodels.pricing.compilers import COMPILERS
from costmodels.pricing.compilers.launched import Launched
from costmodels.pricing.hidden import Cost
from costmodels.pricing.pricer import pricer
from costmodels.stage_ends import StageEnd, end_work
from examples.deepseek_lm import model as mixture
from examples.transformer_lm import model as transformer
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import KINDS, NAMES, ONE_WAY, PipelineSchedule, kind_name, rounds_of
from mesh_tf_core.ir.stage_orders import PADDING, Interleaved, StageAction
from tests.slot_seconds import apart

SIZES = {"d_model": 64, "d_kv": 16, "heads": 4, "d_ff": 128, "vocab": 512, "batch": 16, "length": 8}
P, M = 4, 8


def priced(schedule: str, layers: int, compiler: str = "launched") -> tuple[Program, Cost]:
    options = mtf.Options(microbatches=M, schedule=schedule)
    layout = mtf.Layout("layers:pipe;heads:model;vocab:model")
    program = transformer(**SIZES, layers=layers).lower(mtf.Mesh(f"pipe:{P};model:2"), layout, options)
    machine = replace(load_hardware("h100"), compiler=compiler)  # type: ignore[arg-type]
    return program, pricer(machine, program.mesh).cost(program)


def runs(cost: Cost, name: str, phase: Phase, scope: str = "") -> float:
    """How often a step does something."""
    found = [
        x.times for x in cost.lines if x.name == name and x.origin.phase == phase and scope in x.origin.scope
    ]
    assert found, (name, phase)
    return sum(found)


@pytest.mark.parametrize("schedule", ONE_WAY)
def test_stages_do_the_work_of_their_own(schedule: str) -> None:
    """Layers in as many slots as the fullest stage and those before and behind it have; the embedding in the
    first and last slot, or with several virtual stages in the first and last ones; the head for every
    microbatch; and nothing that takes results to all stages."""
    layers = P * rounds_of(schedule)
    _, cost = priced(schedule, layers)
    slots = M * rounds_of(schedule) + P - 1
    assert runs(cost, "attention", Phase.FORWARD) == pytest.approx(slots)
    for name, phase in (("gather", Phase.FORWARD), ("scatteradd", Phase.BACKWARD)):
        # The first stage may be on the way with all microbatches, where backward comes after all of forward.
        whole = phase is Phase.FORWARD and not KINDS[kind_name(schedule)].at_once
        most = M if whole else 1 if rounds_of(schedule) == 1 else P
        assert 1 - 1e-9 <= runs(cost, name, phase, "embedding") <= most + 1e-9
    head = Counter[str]()
    for x in cost.lines:
        if x.origin.scope == "output" and x.kind == "matmul":
            head[x.origin.phase] += x.times
    assert head == {Phase.FORWARD: M, Phase.BACKWARD: 2 * M}
    assert not any(
        x.times
        for x in cost.lines
        if x.axes == ("pipe",) and x.name != "permute" and x.origin.phase != Phase.UPDATE
    )


@pytest.mark.parametrize("schedule", ONE_WAY)
@pytest.mark.one_in(2)
def test_the_fullest_stage_waits_as_long_as_closed_forms_say(schedule: str) -> None:
    """(P - 1) forward and backward slots (Narayanan et al. 2021, section 2.2), less as many of weights (Qi et
    al. 2023, section 2.3)."""
    rounds = rounds_of(schedule)
    program, _ = priced(schedule, P * rounds)
    outline, found = program.outline, Launched().stages(program.outline)
    assert found is not None
    # As long as the head takes, the last one.
    assert found.fullest == P - 1
    slots = end_work(outline).slots
    share = dict.fromkeys((StageAction.FORWARD, StageAction.BACKWARD), (P - 1) / (M * rounds + P - 1))
    share[StageAction.WEIGHTS] = 1 - M / (M - P + 1)
    assert found.waits == pytest.approx({node: share[slot] for node, slot in slots.items()})


@pytest.mark.parametrize("schedule", ONE_WAY)
@pytest.mark.one_in(4)
def test_a_program_for_each_stage_takes_no_longer_than_one_for_all(schedule: str) -> None:
    together, apart = (
        priced(schedule, 2 * P * rounds_of(schedule) - 1, name)[1].step_seconds
        for name in ("xla-gpu", "launched")
    )
    assert apart < together


@pytest.mark.parametrize("schedule", sorted({*NAMES} - {*ONE_WAY}))
@pytest.mark.nightly
def test_orders_that_only_programs_for_each_stage_have(schedule: str) -> None:
    """The first stage is also the last one, and has the layers of two in DualPipe; it works on its own part
    of all microbatches at least."""
    layers = 2 * P
    program, cost = priced(schedule, layers)
    least = M * layers // P
    assert least - 1e-9 <= runs(cost, "attention", Phase.FORWARD) <= least + 2 * P
    assert not any(
        x.times
        for x in cost.lines
        if x.axes == ("pipe",) and x.name != "permute" and x.origin.phase != Phase.UPDATE
    )
    found = memory(program, COMPILERS["launched"].memory)
    held = {h.what.removeprefix("variable "): h.bytes for h in found.holdings}
    assert found.stage is StageEnd.FIRST and {"embedding/tokens", "output/projection"} <= held.keys()
    own = program.variables["feed_forward/wi"].value.local_bytes(program.mesh)
    assert held["feed_forward/wi"] == own == 2 * 64 * 128 * 4 * (1 + KINDS[schedule].mirrored)
    # Copies of layers exchange gradients where these lie.
    assert not {"slicedim", "concat", "transpose"} & {x.name for x in cost.lines if x.runs == 1}
    together, its = priced(schedule, layers, "xla-gpu")
    bubble = waiting(together, its)
    assert cost.step_seconds < its.step_seconds and bubble is not None
    lost, slots = 0.0, end_work(together.outline).slots
    for x in its.lines:
        lost += x.exposed * x.times * (bubble.schedule.idle(slots[n]) if (n := x.origin.node) in slots else 0)
    assert bubble.seconds == pytest.approx(lost, rel=0.05)


@pytest.mark.parametrize("layers", [4, 5, 6, 7])
def test_the_stage_with_the_most_work_decides(layers: int) -> None:
    """One or two layers a stage, fewer at both ends; the head takes as long as some layers."""
    program, cost = priced("1f1b", layers)
    counts = (Interleaved(P, 1).numbers(layers) != PADDING).sum(axis=1)
    found = waiting(program, cost, Launched().stages(program.outline))
    assert found is not None
    full = counts[found.fullest - 1]
    assert runs(cost, "attention", Phase.FORWARD) == pytest.approx((M - 1) * full + layers)
    assert 0 < found.seconds < cost.step_seconds * (P - 1) / M


def test_slots_of_weights_fill_the_wait() -> None:
    of = {name: PipelineSchedule(name, P, M) for name in ("1f1b", "zb-h1")}
    assert apart(of["zb-h1"], (1, 1, 1)) < apart(of["1f1b"], (1, 2, 0))
    assert priced("zb-h1", P)[1].step_seconds != priced("1f1b", P)[1].step_seconds


@pytest.mark.parametrize("schedule", sorted({*NAMES} - {*ONE_WAY}))
@pytest.mark.one_in(3)
def test_a_model_with_positions_in_every_layer_is_priced(schedule: str) -> None:
    """Rotary positions shift elements of a head, before the stages too, and are no moves between stages."""
    model = mixture(layers=5, batch=8, d_model=64, d_expert=32, length=16)
    decided = {"schedule": schedule, "microbatches": 4, "framework": "megatron", "hardware": "h100"}
    found = layoutopt.cost(model, "pipe:2", "layers:pipe", **decided)
    lines = [x for x in found.evaluation.cost.lines if "/attention" in x.origin.scope and not x.axes]
    times = {name: sum(x.times for x in lines if x.name == name) for name in ("shiftalong", "range")}
    assert times["shiftalong"] == pytest.approx(2 * times["range"]) and times["range"] > 0
    assert found.notes and all(" " in note for note in found.notes)


@pytest.mark.parametrize("layers", [8, 10])
def test_stages_that_recompute_some_layers_have_no_more_of_them(layers: int) -> None:
    """Whether the stages divide the layers or not."""
    model, every = transformer(**SIZES, layers=layers), list[float]()
    decided = {"schedule": "1f1b", "microbatches": M, "framework": "megatron", "hardware": "h100"}
    for again in ((), ("layers:count=1",)):
        found = layoutopt.cost(model, f"pipe:{P}", "layers:pipe", recompute=again, **decided)
        every.append(runs(found.evaluation.cost, "attention", Phase.FORWARD))
    assert every == pytest.approx(every[:1] * 2)
