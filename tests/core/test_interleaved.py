"""Interleaved 1F1B gives the numbers of one device; what is in flight grows with stages and rounds, not with
microbatches, and stages wait as long as the closed form says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.liveness import memory
from costmodels.pipeline_bubble import waiting
from costmodels.pricing.pricer import pricer
from examples import transformer_seq2seq
from mesh_tf_core.ir.instructions import Instr, Local, Permute
from mesh_tf_core.ir.program import text
from mesh_tf_core.ir.schedules import PipelineSchedule
from mesh_tf_core.ir.stage_orders import StageAction
from mesh_tf_core.ir.values import Loop
from mesh_tf_core.lower.verify import verify
from tests.core.test_circular import FURTHER, another_turn, batch, check, lowered, model, steps
from tests.core.test_elsewhere import trained
from tests.core.test_one_forward_one_backward import wide
from tests.core.test_pipelines import changed, same
from tests.examples.helper import SMALL

ORDER = "interleaved"


@pytest.fixture(scope="module")
def plain() -> mtf.Model:
    return model()


@pytest.fixture(scope="module")
def dense(plain: mtf.Model) -> Any:
    return steps(plain.lower(mtf.Mesh("one:1"), mtf.Layout()))[:2]


CASES: list[tuple[str, str, int, int, dict[str, Any]]] = [
    ("pipe:2", "layers:pipe", 3, 4, {}),
    ("pipe:4", "layers:pipe", 6, 2, {"recompute": {"layers"}}),
    ("pipe:2", "layers:pipe", 2, 4, {"recompute": {"tick"}}),
    ("pipe:2", "layers:pipe", 3, 2, {"recompute": {"layers:keep=products"}}),
    ("t:2;pipe:2", "layers:pipe;e:t", 4, 2, {"storage": FURTHER}),
    ("data:2;pipe:2", "layers:pipe;batch:data", 1, 2, {"storage": {"wi": 2, "wo": 1}}),
]


@pytest.mark.parametrize(("mesh", "layout", "parts", "rounds", "given"), CASES)
@pytest.mark.one_in(3)
def test_losses_and_variables_are_those_of_one_device(
    mesh: str, layout: str, parts: int, rounds: int, given: dict[str, Any], plain: mtf.Model, dense: Any
) -> None:
    check(lowered(plain, mesh, layout, parts, rounds, ORDER, **given), dense)


@pytest.mark.parametrize("again", [set(), {"tick"}])
def test_what_is_sent_and_what_waits(again: set[str], plain: mtf.Model) -> None:
    stages, parts, rounds = 2, 4, 4
    schedule = PipelineSchedule("interleaved", stages, parts, rounds)
    program = lowered(plain, "pipe:2", "layers:pipe", parts, rounds, ORDER, recompute=again)
    sent, done = dict.fromkeys(("forward", "backward"), 0), dict.fromkeys(("forward", "recompute"), 0)
    for instr, times in program.expected():
        names = {n for i in (*instr.inputs, *instr.outputs) for n in program.values[i].shape.names}
        phase = instr.origin.phase
        if isinstance(instr, Permute) and program.values[instr.inputs[0]].shape.names[-1:] == ("d",):
            sent[phase] += times
        if isinstance(instr, Local) and instr.op.name == "einsum" and "e" in names and phase in done:
            done[phase] += times
    assert sent == {"forward": schedule.ticks, "backward": schedule.ticks}
    useful = 2 * parts * (8 // stages)
    assert 1 - useful / done["forward"] == pytest.approx(schedule.idle())
    assert done["recompute"] == (done["forward"] if again else 0)
    # What is before and behind the layers runs once for every microbatch.
    branches = [(i, n) for i, n in program.expected() if isinstance(i, Loop) and i.branch is not None]
    slots = [n * i.times for i, n in branches if any(isinstance(each, Permute) for each in i.body)]
    taken = {phase: sum(n * i.times for i, n in branches if i.origin.phase == phase) for phase in sent}
    assert slots == [schedule.works_in(StageAction.FORWARD, schedule.loops[-1])]
    assert taken == {"forward": 2 * parts + slots[0], "backward": parts}
    cost = pricer(load_hardware("tpu-v5e"), program.mesh).cost(program)
    found = waiting(program, cost)
    assert found is not None and found.schedule == schedule and schedule.ticks - schedule.works == stages - 1
    assert 0 < found.seconds < cost.step_seconds * schedule.idle()


def test_branches_add_to_the_sums_of_ticks_where_they_are_taken(plain: mtf.Model) -> None:
    """What is before and behind the layers runs in few ticks; its gradients are added up in these alone."""
    program = lowered(plain, "pipe:2", "layers:pipe", 4, 2, ORDER)
    loops = [i for i, _ in program.walk() if isinstance(i, Loop)]
    branches = {own.outer for loop in loops if loop.branch is not None for own in loop.summed}
    summed = {term for loop in loops if loop.dim.name == "tick" for term, _ in loop.summed}
    assert summed & branches and summed & branches <= program.added.keys()
    assert any("added to" in line for line in text(program).splitlines() if line.strip().startswith("sum"))


def test_what_is_in_flight_does_not_grow_with_the_microbatches() -> None:
    state, peaks = 4096 * 4, {}
    for schedule in ("circular:2", "interleaved:2"):
        for parts in (8, 32):
            how = mtf.Options({}, frozenset({"tick"}), parts, schedule=schedule)
            program = wide(parts).lower(mtf.Mesh("pipe:2"), mtf.Layout("layers:pipe"), how)
            fed = sum(program.values[i].local_bytes(program.mesh) for i in program.feeds.values())
            found = memory(program)
            peaks[schedule, parts] = found.peak - fed
    # All that grows are the columns of the table, a few numbers a tick.
    assert 0 < peaks["interleaved:2", 32] - peaks["interleaved:2", 8] < state / 8
    assert peaks["circular:2", 32] - peaks["circular:2", 8] >= 48 * state
    # A ring of P R + P - 1 states is held once.
    assert [h.bytes for h in found.holdings if "in_flight" in h.what] == [5 * state]


def test_checkpoints_do_not_know_of_rounds(plain: mtf.Model, tmp_path: Path) -> None:
    def trainer(mesh: str, layout: str, schedule: str) -> mtf.Trainer:
        how = mtf.Options(microbatches=4, schedule=schedule)
        return mtf.Trainer(plain, mesh, layout, options=how, engine="lockstep")

    ways = [("pipe:2", "layers:pipe", n) for n in ("interleaved:4", "interleaved:2", "circular:2")]
    whole, first, *others = (trainer(*way) for way in [("one:1", "", "gpipe"), *ways])
    for each in (whole, first):
        each.step(batch())
    assert first.evaluate([batch()]) == pytest.approx(whole.evaluate([batch()]))
    first.save(tmp_path)
    expected = whole.step(batch())["loss"]
    for other in others:
        other.restore(tmp_path)
        assert float(other.step(batch())["loss"]) == pytest.approx(float(expected))
        for name in other.program.variables:
            np.testing.assert_allclose(other.engine.read(name), whole.engine.read(name), 1e-9, 1e-12)


def _wide_open(instr: Instr) -> Instr | None:
    """A branch that is always taken."""
    taken = isinstance(instr, Loop) and instr.branch is not None
    return instr.remade(runs=None, branch=None) if taken else None


FAULTS: dict[str, Any] = {
    "the ends are not joined": lambda i: replace(i, wrap=False) if isinstance(i, Permute) else None,
    "what is behind the layers runs in every turn": _wide_open,
    "another chunk's turn": another_turn,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, plain: mtf.Model, dense: Any) -> None:
    program = lowered(plain, "pipe:2", "layers:pipe", 2, 2, ORDER)
    broken = replace(program, code=changed(program.code, FAULTS[fault]))
    assert broken.code != program.code
    with pytest.raises(AssertionError):
        same(steps(verify(broken))[:2], dense)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved:2"])
def test_other_loops_may_stand_before_the_layers(schedule: str) -> None:
    sizes = {n: x for n, x in SMALL.items() if n != "layers"}
    built = transformer_seq2seq.model(**sizes, encoder_layers=2, decoder_layers=4, optimizer="sgd")
    how = mtf.Options(microbatches=2, schedule=schedule)
    program = built.lower(mtf.Mesh("pipe:2"), mtf.Layout("decoder_layers:pipe"), how)
    whole = trained(built.lower(mtf.Mesh("one:1"), mtf.Layout()))
    for name, x in trained(program).items():
        np.testing.assert_allclose(x, whole[name], 2e-4, 2e-5, err_msg=name)


def test_what_it_cannot_do_is_refused_with_what_to_do(plain: mtf.Model) -> None:
    for built, mesh, rounds, why in (
        (plain, "pipe:2", 3, "stages do not divide the 8 layers, which is required because an"),
        (model(linear=False), "pipe:2", 2, "schedule interleaved:2 over 'layers': the loss needs sums"),
    ):
        with pytest.raises(mtf.UserError, match=why) as error:
            lowered(built, mesh, "layers:pipe", 2, rounds, ORDER)
        assert "\n" not in str(error.value)
    with pytest.raises(mtf.UserError, match="interleaved:2"):
        mtf.Options(schedule="interleaved:1")
