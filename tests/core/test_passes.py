"""Passes: what they change, as text, and what they keep."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, Collective, Program, ReduceScatter, Slice
from mesh_tf_core.lower.base import lower_base
from mesh_tf_core.lower.messages import combine_small
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.pipeline import passes
from mesh_tf_core.lower.placement import placement
from mesh_tf_core.lower.sums import delay_sums
from mesh_tf_core.lower.uses import compact, drop_dead
from mesh_tf_core.lower.verify import verify
from tests.core.golden import CASES, FOLDER, record


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """If the change is meant: python -m tests.core.golden, and read the difference."""
    assert record(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in FOLDER.glob("*.txt")} == set(CASES)


def lowered(name: str) -> Program:
    build, mesh, layout = CASES[name]
    graph, results = build()
    return lower_base(graph, Oracle(placement(graph, mtf.Mesh(mesh), mtf.Layout(layout))), results)


def count(program: Program, kind: type) -> int:
    return sum(times for i, times in program.walk() if isinstance(i, kind))


def test_sums_wait_behind_additions() -> None:
    assert count(lowered("residual"), AllReduce) == 2
    assert count(delay_sums(lowered("residual")), AllReduce) == 1


def test_a_sum_that_is_split_is_scattered() -> None:
    program = delay_sums(lowered("scattered"))
    assert (count(program, AllReduce), count(program, ReduceScatter), count(program, Slice)) == (0, 1, 0)


def test_a_sum_over_an_inner_axis_is_scattered_within_the_outer_one() -> None:
    """A variable stored over model and data, in the mesh's order, whose gradient is a sum over data alone."""
    b, d = mtf.Dim("batch", 8), mtf.Dim("d", 16)
    g = mtf.Graph("inner axis")
    x = g.input("x", [b, d], "float32")
    w = g.variable("w", [d], mtf.Normal(0.1))
    model = mtf.Model(mtf.reduce_mean(mtf.square(x * w)), optimizer=mtf.SGD(0.1))
    found = {}
    for mesh in ("data:2;model:4", "model:4;data:2"):
        program = model.lower(mtf.Mesh(mesh), mtf.Layout("batch:data"), mtf.Options({"w": 2}))
        found[mesh] = [type(i).__name__ for i, _ in program.walk() if isinstance(i, ReduceScatter | Slice)]
    assert found["data:2;model:4"][:2] == ["ReduceScatter", "Slice"]
    assert found["model:4;data:2"][:2] == ["Slice", "ReduceScatter"]


def test_gradient_sums_leave_the_loop_and_travel_together() -> None:
    base = lowered("training_step")
    delayed = delay_sums(drop_dead(base))
    assert count(delayed, AllReduce) < count(base, AllReduce)
    together = [i for i, _ in combine_small(delayed).walk() if isinstance(i, AllReduce) and len(i.inputs) > 1]
    assert [(i.axes, len(i.inputs)) for i in together] == [(("x",), 4)]


@pytest.mark.parametrize("name", CASES)
def test_passes_never_send_more(name: str) -> None:
    program = lowered(name)
    for run in passes().values():
        after = verify(run(program))
        assert sum(after.communication_bytes().values()) <= sum(program.communication_bytes().values())
        assert count(after, Collective) <= count(program, Collective)
        program = after


def test_compact_numbers_values_in_order() -> None:
    program = compact(drop_dead(lowered("training_step")))
    assert [v.id for v in program.values] == list(range(len(program.values)))
    assert compact(program) == program


def test_a_sum_that_is_read_early_does_not_wait() -> None:
    """An update in the middle of a step reads its gradient before a second gradient is ready."""
    g = mtf.Graph()
    a, b = mtf.Dim("a", 4), mtf.Dim("b", 4)
    x = g.input("x", [a, b], "float32")
    w = g.variable("w", [b], mtf.ONES)
    first = mtf.reduce_sum(x * w, "a")
    with g.phase(Phase.UPDATE):
        g.assign(g.lookup("w"), w - first)
    second = mtf.reduce_sum(x * w * w, "a")
    v = g.variable("v", [b], mtf.ONES)
    with g.phase(Phase.UPDATE):
        g.assign(g.lookup("v"), v - second)
    program = verify(mtf.lower(g, mtf.Mesh("x:2"), mtf.Layout("a:x")))
    sums = [i for i in program.code if isinstance(i, AllReduce)]
    assert [len(i.inputs) for i in sums] == [1, 1]


@pytest.mark.parametrize("dtype, expected", [("int32", 4.0), ("bool", 4.0), ("bfloat16", 4.8125)])
def test_within_microbatches_a_sum_waits_behind_no_conversion_that_drops_fractions(
    dtype: str, expected: float
) -> None:
    """Of sums 0.6 + 0.6: 1 is their whole part, 0 + 0 that of their terms."""
    g, b, d = mtf.Graph("m"), mtf.Dim("batch", 4), mtf.Dim("d", 4)
    x, w = g.input("x", [b, d], "float32"), g.variable("w", [d], mtf.ONES)
    kept = mtf.reduce_sum(mtf.einsum([x, w], [b]).cast(dtype).cast("float32"))
    model = mtf.Model(mtf.reduce_sum(mtf.einsum([x, w], [b])), metrics={"kept": kept})
    program = model.lower(mtf.Mesh("a:2"), mtf.Layout("d:a"), mtf.Options(microbatches=2))
    engine = LockstepEngine(program)
    engine.initialize()
    assert float(engine.step({"x": np.full((2, 2, 4), 0.3, np.float32)})["kept"]) == expected
