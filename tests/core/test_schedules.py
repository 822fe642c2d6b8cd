"""Tables of schedules: stages have what they work on, and idle as long as closed forms say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed.pipelining import schedules

import mesh_tf_core as mtf
from layoutopt.optimize.evaluation.slot_pictures import drawn
from mesh_tf_core.ir.schedules import KINDS, NAMES, PipelineSchedule, check_schedule
from mesh_tf_core.ir.stage_orders import IDLE, StageAction
from tests.slot_seconds import apart as seconds_apart
from tests.slot_seconds import together

SIZES = [(2, 2, 2), (2, 8, 3), (4, 8, 2), (4, 2, 2), (4, 16, 4), (6, 12, 2)]
ODD = [(2, 1, 2), (3, 4, 2), (3, 7, 4), (5, 3, 3)]
"""(stages, microbatches, rounds)."""
COSTS = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.75), (2.0, 2.5, 1.0)]
"""Of slots: as long, and w <= f <= b, as all forms below are for."""


def scheduled(name: str, stages: int, microbatches: int, rounds: int) -> PipelineSchedule:
    return PipelineSchedule.named(f"{name}:{rounds}" if KINDS[name].rounds else name, stages, microbatches)


def cases() -> Iterator[PipelineSchedule]:
    for name, kind in KINDS.items():
        for stages, microbatches, rounds in (*SIZES, *(() if kind.mirrored else ODD)):
            # Orders of DualPipe need twice as many microbatches as stages.
            microbatches = microbatches if kind.one_way else max(microbatches, 2 * stages)
            yield scheduled(name, stages, microbatches, rounds)


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
            place, ring = int(of.places[put][tick, stage, slot]), rings.setdefault((stage, put), {})
            if slot == put:
                assert (place == IDLE) == (item == IDLE) and place < of.ring(put)
                ring[place] = (item, chunk)
            if item != IDLE and slot > put:
                assert ring[place] == (item, chunk)
        if item == IDLE:
            continue
        at = virtual(of, stage, chunk)
        assert found.setdefault((StageAction(slot), at, item), (tick, stage)) == (tick, stage)
    last = max(at for _, at, _ in found)
    for (slot, at, item), (tick, stage) in found.items():
        if slot is StageAction.FORWARD and at:
            before = found[slot, at - 1, item][0]
            assert before == tick - 1 if kind.one_way else before < tick
        if slot is StageAction.BACKWARD and at < last:
            before = found[slot, at + 1, item][0]
            assert before == tick - 1 if kind.one_way else before < tick
        if slot is StageAction.BACKWARD and at == last:
            then = found[StageAction.FORWARD, at, item][0]
            assert then == tick if kind.at_once and kind.one_way else then < tick
        assert stage == found[StageAction.FORWARD, at, item][1]
        if slot is StageAction.WEIGHTS:
            assert found[StageAction.BACKWARD, at, item][0] <= tick
    for slot in StageAction:
        ticks = of.done(slot)
        assert not ticks or of.idle(slot) == (table[ticks.start : ticks.stop, :, slot, 0] == IDLE).mean()
    each = of.microbatches * (last + 1)
    if kind.split and kind.one_way:
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
    # Every stage of these has as much: half stages as the first one of 1f1b (Qi et al. 2023, section 6), and
    # one more of DualPipe's (DeepSeek-V3, table 2).
    for name, held in (("zb-v", 2 * p), ("dualpipev", 2 * p + 1), ("dualpipe", p + 1)):
        assert scheduled(name, p, m, 1).held.tolist() == [held] * p
    for of in cases():
        assert of.in_flight == of.held.max(), of


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("p", "m", "rounds"), [(2, 8, 2), (4, 16, 2), (4, 8, 4), (6, 24, 3), (8, 32, 2)])
def test_stages_idle_as_long_as_closed_forms_say(
    costs: tuple[float, float, float], p: int, m: int, rounds: int
) -> None:
    f, b, w = costs
    split = {
        # Qi et al. 2023, section 2.3; section 6: of equal slots none but to begin and end.
        "zb-h1": (p - 1) * (f + b - w),
        "zb-v": (p - 1) * max(b, 2 * f - w),
        # F&B + B - 3 W for half of the stages, or for all (DeepSeek-V3, table 2).
        "dualpipe": (p / 2 - 1) * ((f + b + w) + (b + w) - 3 * w),
        "dualpipev": (p - 1) * ((f + b + w) + (b + w) - 3 * w),
    }
    for name, kind in KINDS.items():
        of = scheduled(name, p, m, rounds)
        each = costs if kind.split else (f, b + w, 0.0)
        idle = seconds_apart(of, each) - of.works * (f + b + w)
        if name.startswith("dualpipe") and b != w:
            # The paper's two halves of a backward slot are equal.
            assert 0 <= idle <= split[name], name
            continue
        assert idle == pytest.approx(split.get(name, (p - 1) * (f + b + w))), name
        if kind.one_way:
            waits = (p - 1) * (f + b + w * (not kind.split))
            assert together(of, each) - of.works * (f + b + w) == pytest.approx(waits), name
        if not kind.split:
            # Huang et al. 2019, section 2.2; Narayanan et al. 2021, section 2.2.2.
            assert of.idle() == pytest.approx((p - 1) / (m * of.rounds + p - 1))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("of", [*cases()], ids=str)
def test_a_picture_shows_all_slots_and_as_much_idle_time(of: PipelineSchedule, apart: bool) -> None:
    """Columns are slots: as long as together or alone, with what each stage does, and no more in flight."""
    kind, picture = KINDS[of.kind], drawn(of, apart)
    if not apart and not kind.one_way:
        return
    widths = (1, 2 - kind.split, 1)
    if of.microbatches % of.stages == 0 or not apart:
        assert picture.shape[1] == (seconds_apart if apart else together)(of, widths)
    for stage, row in enumerate(picture.tolist()):
        for mark, width, slot in zip("FBW", widths, StageAction, strict=True):
            table = of.table[:, stage, slot]
            for chunk, said in ((table[:, 1] == 0, mark), (table[:, 1] > 0, mark.lower())):
                assert row.count(said) == width * (chunk & (table[:, 0] != IDLE)).sum()
        begun = np.cumsum([x in "Ff" for x in row]) - np.cumsum([x in "Bb" for x in row]) // widths[1]
        if apart and kind.one_way and not kind.split:
            assert begun.max() <= of.in_flight_apart(stage)


def test_a_stage_with_its_own_program_has_fewer_microbatches_in_flight() -> None:
    """Those of Megatron-LM's first stage: its warm-up, and one more."""
    found = {
        (name, m): PipelineSchedule(name, 8, m).in_flight_apart(0)
        for name, kind in KINDS.items()
        for m in (4, 32)
        if kind.one_way
    }
    assert found["1f1b", 32] == found["zb-h1", 32] == 8 and found["1f1b", 4] == 4
    assert found["gpipe", 32] == 32 and PipelineSchedule("1f1b", 8, 32).in_flight_apart(7) == 1
    assert PipelineSchedule("interleaved", 8, 32, 6).in_flight_apart(0) == 2 * 7 + 5 * 8 + 1
    for of in cases():
        if of.kind in ("1f1b", "zb-h1") or (of.kind == "interleaved" and of.microbatches % of.stages == 0):
            assert of.in_flight_apart(0) <= of.in_flight


def test_interleaved_stages_hold_what_those_of_pytorch_do() -> None:
    """Also where stages do not divide microbatches: one alone holds more than the ring of all."""
    more = 0
    for p, m, rounds in itertools.product((2, 4, 8), (2, 4, 5, 7, 8, 10, 14, 16, 18), (2, 3)):
        passes = max(1, m // p)
        if m % passes:
            continue
        of = PipelineSchedule("interleaved", p, m, rounds)
        asked = SimpleNamespace(
            n_local_stages=rounds, pp_group_size=p, _n_microbatches=m, microbatches_per_round=m // passes
        )
        for rank in range(p):
            compute = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
            theirs = compute(asked, rank)  # type: ignore[arg-type]
            kinds = [action.computation_type.name for action in theirs if action is not None]
            begun, done = (np.cumsum([k == name for k in kinds]) for name in ("FORWARD", "FULL_BACKWARD"))
            assert of.in_flight_apart(rank) == (begun - done).max(), (of, rank)
        more += of.in_flight_apart(0) > of.in_flight
    assert more


def test_orders_of_stages_are_those_of_pytorch() -> None:
    made = {"zb-v": schedules.ScheduleZBVZeroBubble, "dualpipev": schedules.ScheduleDualPipeV}
    slots = {"FORWARD": [0], "BACKWARD_INPUT": [1], "BACKWARD_WEIGHT": [2], "FULL_BACKWARD": [1, 2]}
    for (name, theirs), p, m in itertools.product(made.items(), (2, 3, 4), (3, 8, 13)):
        order = KINDS[name].order
        for rank in range(p if order is not None and (name == "zb-v" or m >= 2 * p) else 0):
            asked = SimpleNamespace(pp_group_size=p, _n_microbatches=m, num_stages=2 * p)
            blocks = filter(None, theirs._calculate_single_rank_operations(asked, rank))  # type: ignore[arg-type]
            expected = [
                [
                    (slot, action.microbatch_index, int(action.stage_index != rank))
                    for action in block.sub_actions or (block,)
                    for slot in slots[action.computation_type.name]
                ]
                for block in blocks
            ]
            assert order is not None and order(p, rank, m) == expected, (name, p, m, rank)


def test_what_is_no_schedule_is_refused_with_what_to_do() -> None:
    for asked in NAMES:
        check_schedule(asked)
    for name, m, why in (
        ("dualpipe", 6, "stages must be even, and the number of microbatches must be at least 6"),
        ("dualpipev", 4, "the number of microbatches must be at least 6, twice that of stages; found 4 mic"),
    ):
        with pytest.raises(mtf.UserError, match=why):
            _ = PipelineSchedule.named(name, 3, m).table
    for wrong in ("gpipe:2", "circular", "interleaved:1", "zb", "zb-v:2"):
        with pytest.raises(mtf.UserError):
            check_schedule(wrong)
