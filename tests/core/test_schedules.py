"""Tables of schedules: stages have what they work on, and idle as long as closed forms say."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.ir.schedules import IDLE, KINDS, SCHEDULES, PipelineSchedule, StageAction, check_schedule

SIZES = [(2, 2, 2), (2, 8, 3), (4, 8, 2), (4, 2, 2), (4, 16, 4), (6, 12, 2)]
ODD = [(2, 1, 2), (3, 4, 2), (3, 7, 4), (5, 3, 3)]
"""(stages, microbatches, rounds)."""
COSTS = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.75), (2.0, 2.5, 1.0)]
"""Of slots: as long, and w <= f <= b, as all forms below are for."""


def cases() -> Iterator[PipelineSchedule]:
    for name, kind in KINDS.items():
        for stages, microbatches, rounds in (*SIZES, *(() if kind.mirrored else ODD)):
            yield PipelineSchedule(name, stages, microbatches, rounds if kind.rounds else 1)


def virtual(of: PipelineSchedule, stage: int, chunk: int) -> int:
    """Which virtual stage of its microbatch's stream it is."""
    if KINDS[of.kind].turns or KINDS[of.kind].mirrored:
        ends = (2 if KINDS[of.kind].turns else 1) * of.stages - 1
        return ends - stage if chunk else stage
    return chunk * of.stages + stage


@pytest.mark.parametrize("of", [*cases()], ids=str)
def test_every_stage_works_on_what_the_one_before_has_handed_on(of: PipelineSchedule) -> None:
    kind, table = KINDS[of.kind], of.table
    found: dict[tuple[StageAction, int, int], tuple[int, int]] = {}
    rings: dict[tuple[int, StageAction], dict[int, tuple[int, int]]] = {}
    puts = [slot for slot in (StageAction.FORWARD, StageAction.BACKWARD) if slot < of.last]
    for tick, slot, stage in np.argwhere(table[..., 0].transpose(0, 2, 1) > -2).tolist():
        item, chunk = table[tick, stage, slot].tolist()
        for put in puts:
            place, ring = int(of.places(put)[tick, stage, slot]), rings.setdefault((stage, put), {})
            if slot == put and of.busy[tick, slot]:
                ring[place] = (item, chunk)  # which an idle slot writes too
                assert place < of.ring(put)
            if item != IDLE and slot > put:
                assert ring[place] == (item, chunk)
        if item == IDLE:
            continue
        at = virtual(of, stage, chunk)
        assert found.setdefault((StageAction(slot), at, item), (tick, stage)) == (tick, stage)
    last = max(at for _, at, _ in found)
    for (slot, at, item), (tick, stage) in found.items():
        if slot is StageAction.FORWARD and at:
            assert found[slot, at - 1, item][0] == tick - 1
        if slot is StageAction.BACKWARD and at < last:
            assert found[slot, at + 1, item][0] == tick - 1
        if slot is StageAction.BACKWARD and at == last:
            then = found[StageAction.FORWARD, at, item][0]
            assert then == tick if kind.at_once else then < tick
        assert stage == found[StageAction.FORWARD, at, item][1]
        if slot is StageAction.WEIGHTS:
            assert found[StageAction.BACKWARD, at, item][0] <= tick
    each = of.microbatches * (last + 1)
    if kind.split:
        done = table[
            of.done(StageAction.WEIGHTS).start : of.done(StageAction.WEIGHTS).stop, :, StageAction.WEIGHTS, 0
        ]
        assert (done != IDLE).all()
    counts = {slot: sum(s is slot for s, _, _ in found) for slot in StageAction}
    assert counts == {
        StageAction.FORWARD: each,
        StageAction.BACKWARD: each,
        StageAction.WEIGHTS: each * kind.split,
    }


def test_what_is_in_flight_is_as_the_papers_count_it() -> None:
    p, m = 4, 32
    assert PipelineSchedule("gpipe", p, m).held.tolist() == [m] * p
    assert PipelineSchedule("1f1b", p, m).held.tolist() == [2 * (p - s) - 1 for s in range(p)]
    assert PipelineSchedule("zb-h1", p, m).held.tolist() == [2 * p - 1 - s for s in range(p)]
    for rounds in (2, 3, 4):
        of = PipelineSchedule("interleaved", p, m, rounds)
        assert of.held.tolist() == [p * rounds + p - 1 - 2 * s for s in range(p)]
        assert of.in_flight == p * rounds + p - 1
    # Every stage of these has as much; DualPipe's P + 1 with four stages (DeepSeek-V3, table 2).
    for name, held in (("zb-v", 3 * p - 1), ("dualpipe", p + 1)):
        assert PipelineSchedule(name, p, m).held.tolist() == [held] * p
    for of in cases():
        assert of.held.max() <= of.in_flight <= of.held.max() + 1, of


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("p", "m", "rounds"), [(2, 8, 2), (4, 16, 2), (4, 8, 4), (6, 24, 3), (8, 32, 2)])
def test_stages_idle_as_long_as_closed_forms_say(
    costs: tuple[float, float, float], p: int, m: int, rounds: int
) -> None:
    f, b, w = costs
    forms = {
        "zb-h1": ((p - 1) * (f + b), (p - 1) * (f + b - w)),
        "zb-v": (2 * (p - 1) * (f + b), (p - 1) * (2 * b - w)),
        "dualpipe": ((p - 2) * (f + b), (p / 2 - 1) * (2 * b - w)),
    }
    for name, kind in KINDS.items():
        of = PipelineSchedule(name, p, m, rounds if kind.rounds else 1)
        each = costs if kind.split else (f, b + w, 0.0)
        together, apart = forms.get(name, ((p - 1) * (f + b + w),) * 2)
        work = of.works * (f + b + w)
        assert of.together(each) - work == pytest.approx(together), name
        assert of.apart(each) - work == pytest.approx(apart), name
        if name not in forms:
            # Huang et al. 2019, section 2.2; Narayanan et al. 2021, section 2.2.2.
            assert of.bubble == pytest.approx((p - 1) / (m * of.rounds + p - 1))


def test_a_stage_with_its_own_program_has_fewer_microbatches_in_flight() -> None:
    """Those of Megatron-LM's first stage: its warm-up, and one more."""
    found = {(name, m): PipelineSchedule(name, 8, m).in_flight_apart(0) for name in KINDS for m in (4, 32)}
    assert found["1f1b", 32] == found["zb-h1", 32] == 8 and found["1f1b", 4] == 4
    assert found["gpipe", 32] == 32 and PipelineSchedule("1f1b", 8, 32).in_flight_apart(7) == 1
    assert PipelineSchedule("interleaved", 8, 32, 6).in_flight_apart(0) == 2 * 7 + 5 * 8 + 1
    for of in cases():
        if of.kind in ("1f1b", "interleaved", "zb-h1"):
            assert of.in_flight_apart(0) <= of.in_flight


def test_what_no_program_does_is_refused_with_what_to_do() -> None:
    for name, kind in KINDS.items():
        asked = name + ":2" * kind.rounds
        if asked in SCHEDULES:
            check_schedule(asked)
            continue
        with pytest.raises(
            mtf.UserError,
            match="this schedule cannot run, because all stages share one",
        ) as error:
            check_schedule(asked)
        assert "\n" not in str(error.value)
    with pytest.raises(mtf.UserError, match="the numbers of microbatches and stages must be even, found"):
        _ = PipelineSchedule("dualpipe", 3, 4).table
    for wrong in ("gpipe:2", "circular", "interleaved:1", "zb"):
        with pytest.raises(mtf.UserError):
            check_schedule(wrong)
