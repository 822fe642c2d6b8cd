"""What single stages of a pipeline do and hold, where each is a program of its own."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.liveness import MemoryRules, memory
from costmodels.stage_ends import StageEnd, end_work, schedule_of, stage_shares
from costmodels.stage_times import runs_in_ticks, stage_times
from examples.deepseek_lm import model as deepseek
from examples.transformer_lm import model as transformer
from mesh_tf_core.ir.blocks import ARRIVING
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import NAMES, ONE_WAY, PipelineSchedule
from mesh_tf_core.ir.stage_orders import IDLE, StageAction

SIZES = {"layers": 4, "d_model": 16, "d_kv": 4, "heads": 2, "d_ff": 32, "vocab": 512, "batch": 8, "length": 8}
APART = MemoryRules(stage_programs=True)


@cache
def program(schedule: str, tied: bool = False) -> Program:
    options = mtf.Options(microbatches=4, schedule=schedule)
    return transformer(**SIZES, tied=tied).lower(mtf.Mesh("pipe:2"), mtf.Layout("layers:pipe"), options)


def held_by(schedule: str, tied: bool = False) -> dict[str, set[str]]:
    """The part of the model's variables that only single stages have -> these."""
    outline = program(schedule, tied).outline
    work = end_work(outline)
    names = {name.split("/adam")[0] for name, ends in work.variables.items() if ends}
    return {name: {end.value for end in work.variables[name]} for name in names}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ONE_WAY)
def test_the_first_stage_has_the_embedding_and_the_last_one_the_head(schedule: str) -> None:
    assert held_by(schedule) == {
        "embedding/tokens": {"first"},
        "embedding/positions": {"first"},
        "final_norm/scale": {"last"},
        "output/projection": {"last"},
    }
    both = held_by(schedule, tied=True)
    assert both["embedding/tokens"] == {"first", "last"} and both["embedding/positions"] == {"first"}


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.one_in(2)
def test_what_a_stage_has_from_others_is_held_until_its_slot(schedule: str) -> None:
    outline = program(schedule).outline
    column = schedule_of(outline)
    assert column is not None
    of, shares = column.schedule, stage_shares(outline)[StageEnd.FIRST]
    for slot in (StageAction.FORWARD, StageAction.BACKWARD):
        there = np.argwhere(of.table[..., slot, 0] != IDLE).tolist()
        works = [(tick, stage, *of.table[tick, stage, slot].tolist()) for tick, stage in there]
        at = {(int(of.virtual[stage, chunk]), item): (tick, stage) for tick, stage, item, chunk in works}
        step = -1 if slot is StageAction.BACKWARD else 1
        taken = ((tick, at.get((v + step, item), (0, 1))) for (v, item), (tick, _) in at.items())
        spans = [(made, then) for made, (then, stage) in taken if not stage]
        most = max(sum(made < tick <= then for made, then in spans) for tick in range(len(of.table)))
        assert most <= shares[ARRIVING, of.waiting(slot)] * of.waiting(slot) <= of.waiting(slot)


@pytest.mark.parametrize("schedule", ONE_WAY)
def test_a_stage_holds_no_variable_of_another_one(schedule: str) -> None:
    """The larger end counts: the first stage has no logits and no head, the last one no embedding."""
    found, whole = memory(program(schedule), APART), memory(program(schedule))
    names = {h.what.removeprefix("variable ") for h in found.holdings}
    mine, other = ("embedding/", "output/") if found.stage is StageEnd.FIRST else ("output/", "embedding/")
    assert any(n.startswith(mine) for n in names) and not any(n.startswith(other) for n in names)
    assert whole.stage is None and whole.peak - found.peak > 3 * 4 * 512 * 16
    assert not any(
        "vocab" in h.what for h in found.holdings if found.stage is StageEnd.FIRST and h.value >= 0
    )


@pytest.mark.parametrize("schedule", NAMES)
def test_a_stage_between_the_ends_has_neither_end(schedule: str) -> None:
    outline = program(schedule).outline
    work, names = end_work(outline), {"embedding/tokens", "output/projection"}
    assert names <= work.of_others(StageEnd.MIDDLE)
    assert not names & work.of_others(StageEnd.FIRST) or not work.both
    node = next(n for n, ends in work.nodes.items() if ends)
    assert not work.has(node, StageEnd.MIDDLE)


def flying(stages: int, name: str = "dualpipe", stage: int = 0, late: bool = False) -> tuple[int, int]:
    return PipelineSchedule.named(name, stages, 4 * stages).held_apart(stage, late)


def test_what_waits_for_gradients_of_weights_waits_when_little_else_is_there() -> None:
    """DualPipe holds the values of P + 1 microbatches (DeepSeek-V3, table 2); P / 2 gradients wait at the
    stage between its halves at its end, when as many microbatches are left."""
    for stages in (4, 8, 16):
        assert flying(stages) == (stages + 1, 1)
        assert flying(stages, stage=stages // 2 - 1) == (stages + 1, 1)
        assert flying(stages, stage=stages // 2 - 1, late=True) == (stages // 2, stages // 2)
        assert [flying(stages, "zb-h1", s) for s in (0, stages - 1)] == [(stages, 1), (stages, stages)]
        assert flying(stages, "1f1b") == (stages, 0)


@cache
def mixed(schedule: str, recompute: tuple[str, ...] = (), dense: int = 2) -> Program:
    """Layers with experts in stages, behind dense ones that the first stage has."""
    model = deepseek(layers=8 + dense, dense=dense, batch=16, length=32, d_model=32, d_ff=64, vocab=512)
    options = mtf.Options(microbatches=16, schedule=schedule, recompute=frozenset(recompute))
    return model.lower(mtf.Mesh("pipe:4"), mtf.Layout("layers:pipe"), options)


def test_the_stage_at_the_other_end_has_the_other_stream() -> None:
    """Each of DualPipe's ends has the embedding of one stream and the head of the other: their gradients are
    added up once there, and nowhere else."""
    found = memory(mixed("dualpipe"), APART, at=[StageEnd.FIRST])
    sums = [h.what for h in found.holdings if "vocab:512" in h.what and h.what.startswith("float32[")]
    assert sums and sum("d_model:32 vocab" in what for what in sums) <= 2
    outline = mixed("dualpipe").outline
    work = end_work(outline)
    ends = {
        n.index for n, _ in outline.walk() if work.nodes.get(n.index) and n.index in runs_in_ticks(outline)
    }
    assert work.both and 0.3 < len(ends & work.elsewhere) / len(ends) < 0.7
    middle = memory(mixed("dualpipe"), APART, at=[StageEnd.MIDDLE])
    assert not any("vocab" in h.what or "dense_layers" in h.what for h in middle.holdings)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_layers_before_the_stages_are_kept_and_computed_once(schedule: str) -> None:
    """One program makes them once more for backward; a stage with a program of its own holds what they save
    of every microbatch in flight."""
    stage = PipelineSchedule.named(schedule, 4, 16)
    whole, again = mixed(schedule), mixed(schedule, ("dense_layers",))
    sizes, flying = [], stage.in_flight_apart(0)
    for program in (whole, again):
        held = [*APART.sizes(program).times.items()]
        assert held and {n for _, n in held} == {flying}
        kept = [program.values[i] for i, _ in held]
        assert all(v.shape.names[0] == "dense_layers" for v in kept)
        sizes.append(sum(APART.sizes(program).of(v, program.mesh) for v in kept) // flying)
    streams = stage.streams * 2 * 32 * 32 * 4
    assert streams <= sizes[1] <= 2 * streams < sizes[0] / 2
    outline = whole.outline
    times, work = stage_times(outline), end_work(outline)
    assert times is not None and work.remade
    assert all(times.nodes[node] == 0 and times.again[node] > 0 for node in times.again)
