"""What the figures and tables share: sums that add up, peaks that stay, knees where they are."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutopt.plan.details import MemoryTimeline, Point
from reports.reader import plan_of
from reports.views.choices import best_alternative, frontier, ranked
from reports.views.timeline import LEAST, phases, placed, stretched, thinned, total_seconds
from reports.views.variables import dimension_rows, grouped, split_text, totals
from reports.views.work import shares, work
from tests.reports import sample

PLAN = plan_of(sample.full_plan())


def test_work_adds_up_to_its_lines() -> None:
    rows = work(PLAN)
    lines = PLAN.details.lines
    assert sum(w.compute for w in rows) == pytest.approx(
        sum(x.times * x.seconds for x in lines if not x.communication)
    )
    assert sum(w.exposed for w in rows) == pytest.approx(
        sum(x.times * x.exposed_seconds for x in lines if x.communication)
    )
    assert [w.seconds for w in rows] == sorted((w.seconds for w in rows), reverse=True)
    first = rows[0]
    assert (first.name, first.phase) == ("layer/ffn/einsum wo", "backward")
    (collective,) = first.collectives.values()
    assert collective.kind == "all_reduce" and collective.sent == pytest.approx(2.2e9)


def test_collective_joins_the_computation_of_its_node() -> None:
    plan = sample.full_plan()
    line = {"op": "einsum", "scope": "ffn", "phase": "forward", "kind": "matmul", "times": 2, "seconds": 1.0}
    sent = {"op": "all_reduce", "scope": "ffn", "phase": "forward", "kind": "all_reduce", "times": 2}
    sent |= {"seconds": 0.5, "exposed_seconds": 0.25, "axes": ["model"], "communication": True}
    plan["details"]["lines"] = [line | {"node": 7}, sent | {"node": 7}, sent | {"node": 8}, sent]
    joined, alone = work(plan_of(plan))
    assert joined.op == "einsum" and joined.seconds == pytest.approx(2.5)
    assert alone.op == "all_reduce" and alone.exposed == pytest.approx(1.0)


def test_shares_without_by_kind_come_from_the_lines() -> None:
    plan = sample.full_plan()
    del plan["details"]["by_kind"]
    (name,) = shares(plan_of(plan))
    assert name == "answer"
    assert shares(plan_of(plan))["answer"].kinds["softmax"] == pytest.approx(0.012)


def test_ranking() -> None:
    rows = ranked(PLAN)
    assert [r.choice.name for r in rows] == [
        "answer",
        "second best: d_model split too",
        "tensor parallel",
        "data parallel",
        "replicated",
        "pipeline",
    ]
    assert rows[0].others == ("Mesh-TensorFlow paper",) and rows[-1].ratio is None
    best = best_alternative(PLAN)
    assert best is not None and best.choice.name.startswith("second best")
    assert best.ratio == pytest.approx(0.456 / 0.412)


def test_a_choice_that_runs_otherwise_is_no_twin() -> None:
    plan = sample.full_plan()
    twin = plan["alternatives"][0] | {
        "storage": dict(plan["storage"]),
        "recompute": ["layer"],
        "microbatches": 2,
    }
    other = twin | {"name": "other", "microbatches": 4, "storage": {"a": "zero1", "b": "zero1"}}
    plan["alternatives"] = [twin, other]
    answer, second = ranked(plan_of(plan))
    assert answer.others == (twin["name"],) and second.others == ()
    assert second.choice.in_short() == "zero1 ×2; recompute layer; 4 microbatches"


def test_frontier_has_the_knee_and_the_answer() -> None:
    points = frontier(PLAN)
    assert [p.predicted.peak_memory_bytes for p in points] == sorted(
        p.predicted.peak_memory_bytes for p in points
    )
    assert [round(p.predicted.step_seconds, 3) for p in points if p.knee] == [0.561]
    assert [round(p.predicted.step_seconds, 3) for p in points if p.is_answer] == [0.412]


def test_frontier_drops_what_is_beaten() -> None:
    plan = sample.full_plan()
    beaten = copy.deepcopy(plan["frontier"][2])
    beaten["layout"] = {"length": ["data"]}
    beaten["predicted"]["step_seconds"] *= 1.01
    plan["frontier"].append(beaten)
    assert len(frontier(plan_of(plan))) == len(sample.frontier())


def test_frontier_on_a_straight_line_has_no_knee() -> None:
    plan = sample.full_plan()
    plan["frontier"] = [
        sample.alternative(
            f"{i}",
            plan["mesh"],
            plan["layout"] if i == 4 else {"length": ["data"]},
            sample.predicted(1.0 - 0.1 * i, 0, 0, 2.0 + 0.5 * i, {}),
        )
        for i in range(5)
    ]
    assert not any(p.knee for p in frontier(plan_of(plan)))


def test_equal_variables_are_one_row() -> None:
    rows = {v.name: v for v in grouped(PLAN)}
    assert rows["layer_*/ffn/wi"].alike == sample.LAYERS
    assert split_text(rows["layer_*/ffn/wi"]) == "d_ff over model"
    assert sum(v.local_bytes * v.alike for v in rows.values()) == totals(PLAN)[1]


def test_a_number_that_all_share_stays_in_the_name() -> None:
    plan = sample.full_plan()
    for i, v in enumerate(plan["details"]["variables"]):
        v["name"] = f"stage_2/{v['name']}" if i < 40 else v["name"]
    names = [v.name for v in grouped(plan_of(plan))]
    assert "stage_2/layer_*/ffn/wi" in names


def test_dimensions() -> None:
    rows = {r.name: r for r in dimension_rows(PLAN)}
    assert rows["d_ff"].piece == 131072 // 32 and rows["d_ff"].axes == ("model",)
    assert rows["d_kv"].piece == 128 and not rows["d_kv"].axes
    assert [bool(r.axes) for r in dimension_rows(PLAN)] == [True] * 4 + [False] * 4


@given(
    st.lists(st.integers(0, 10**12), min_size=1, max_size=900),
    st.integers(20, 60),
)
def test_thinning_keeps_the_peak_and_the_order(sizes: list[int], most: int) -> None:
    points = tuple(Point(name="x", phase="forward", bytes=float(b)) for b in sizes)
    at = sizes.index(max(sizes))
    kept = thinned(MemoryTimeline(points=points, at=at), most)
    assert (at, float(max(sizes))) in kept
    assert [i for i, _ in kept] == sorted({i for i, _ in kept})
    assert all(points[i].bytes == b for i, b in kept)
    assert len(kept) <= max(most, len(sizes) if len(sizes) <= most else 0) + 3


def test_phases_in_order() -> None:
    assert PLAN.details.memory is not None
    found = phases(PLAN.details.memory)
    assert [p.name for p in found] == ["forward", "backward", "update"]
    assert found[-1].end == len(PLAN.details.memory.points)


def phased(*counts: int) -> MemoryTimeline:
    names = ("forward", "backward", "update", "forward again", "backward again")
    points = [Point(name="x", phase=names[i % 5], bytes=1.0) for i, n in enumerate(counts) for _ in range(n)]
    return MemoryTimeline(points=tuple(points), at=0)


def test_every_phase_has_room_for_its_name() -> None:
    place = stretched(phased(50, 20, 930))
    assert [place(x) for x in (0, 1000)] == [0.0, pytest.approx(1.0)]
    assert place(50) - place(0) == place(70) - place(50) == pytest.approx(LEAST / (2 * LEAST + 0.93))
    assert all(place(i) < place(i + 1) for i in range(1000))
    equal = stretched(phased(300, 300, 400))
    assert equal(450) == pytest.approx(0.45)


def test_too_many_phases_keep_their_shares() -> None:
    place = stretched(phased(100, 100, 100, 100, 600))
    assert place(300) == pytest.approx(0.3)


def test_instructions_lie_on_the_axis_where_the_step_is() -> None:
    points = tuple(Point(name=f"p{i}", bytes=1.0, seconds=s) for i, s in enumerate((1.0, 0.0, 3.0)))
    place = placed(MemoryTimeline(points=points))
    assert [place(i) for i in (0, 0.5, 1, 2, 2.5, 3)] == [0, 0.125, 0.25, 0.25, 0.625, 1]
    unknown = MemoryTimeline(points=tuple(p.model_copy(update={"seconds": 0.0}) for p in points))
    assert total_seconds(unknown) == 0 and placed(unknown)(1.5) == 0.5
