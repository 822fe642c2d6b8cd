"""What single stages of a pipeline do and hold, where each is a program of its own."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.liveness import MemoryRules, memory
from costmodels.stage_ends import StageEnd, end_work, schedule_of, stage_shares
from examples.transformer_lm import model as transformer
from mesh_tf_core.ir.blocks import ARRIVING
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import NAMES, ONE_WAY
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
    assert outline is not None
    work = end_work(outline)
    names = {name.split("/adam")[0] for name, ends in work.variables.items() if ends}
    return {name: {end.value for end in work.variables[name]} for name in names}


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
    column = None if outline is None else schedule_of(outline)
    assert outline is not None and column is not None
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
    assert outline is not None
    work, names = end_work(outline), {"embedding/tokens", "output/projection"}
    assert names <= work.of_others(StageEnd.MIDDLE)
    assert not names & work.of_others(StageEnd.FIRST) or not work.both
    node = next(n for n, ends in work.nodes.items() if ends)
    assert not work.has(node, StageEnd.MIDDLE)
