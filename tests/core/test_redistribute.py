"""Redistribution: any splits to any splits gives the right pieces, by the cheapest sequence."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Input, Origin, Program
from mesh_tf_core.lower.base import Lowering
from mesh_tf_core.lower.oracle import Oracle, Relayout, plan_moves
from mesh_tf_core.lower.placement import Placement
from mesh_tf_core.lower.verify import verify

Splits = tuple[tuple[str, ...], ...]
MESH = mtf.Mesh("x:2;y:3;z:4")
WAYS = MESH.as_dict()


def placements(axes: str, rank: int) -> list[Splits]:
    """Every way to split `rank` dimensions over some of the axes, in every order."""
    out = set()
    for count in range(len(axes) + 1):
        for order in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), rank - 1):
                ends = (0, *cuts, count)
                out.add(tuple(order[ends[i] : ends[i + 1]] for i in range(rank)))
    return sorted(out)


def moved(have: Splits, want: Splits, sizes: tuple[int, ...]) -> Program:
    """A program that only redistributes its input."""
    low = Lowering(mtf.Graph(), Oracle(Placement(MESH, mtf.Layout(), {})))
    kind = TensorType(mtf.Shape(mtf.Dim(f"d{i}", s) for i, s in enumerate(sizes)), "float32")
    first = low.new(kind, have)
    low.emit(Input((), (first,), Origin(0, "", Phase.FORWARD), "x"))
    last = low.placed(first, want)
    return Program(MESH, mtf.Layout(), tuple(low.values), tuple(low.code), {}, {"x": first}, {"y": last})


@settings(max_examples=150)
@given(st.integers(1, 4), st.data())
def test_every_device_gets_its_piece(rank: int, data: st.DataObject) -> None:
    options = placements("xyz", rank)
    have, want = data.draw(st.sampled_from(options)), data.draw(st.sampled_from(options))
    needed = [
        math.lcm(*(math.prod(WAYS[a] for a in side[d]) for side in (have, want)))
        * data.draw(st.integers(1, 2))
        for d in range(rank)
    ]
    program = verify(moved(have, want, tuple(needed)))
    assert program.values[program.results["y"]].splits == want
    engine = LockstepEngine(program)
    x = np.arange(math.prod(needed), dtype=np.float32).reshape(needed)
    np.testing.assert_array_equal(engine.step({"x": x})["y"], x)
    assert engine.communication_bytes == program.communication_bytes()


def step_costs(now: Splits, move: Relayout) -> tuple[float, Splits]:
    """Bytes that a device sends in one step, of a tensor of one byte, and the splits afterwards."""
    splits, n = list(now), math.prod(WAYS[a] for a in move.axes)
    piece = 1 / math.prod(WAYS[a] for axes in now for a in axes)
    if move.kind == "slice":
        splits[move.dim] += move.axes
        return 0.0, tuple(splits)
    source = move.dim if move.kind == "gather" else move.source
    assert splits[source][-len(move.axes) :] == move.axes
    splits[source] = splits[source][: -len(move.axes)]
    if move.kind == "gather":
        return (n - 1) * piece, tuple(splits)
    splits[move.dim] += move.axes
    return (n - 1) / n * piece, tuple(splits)


def single_steps(now: Splits, axes: str) -> list[Relayout]:
    """Every step there is."""
    free = [a for a in axes if not any(a in split for split in now)]
    found = [Relayout("slice", d, (a,)) for d in range(len(now)) for a in free]
    for d, split in enumerate(now):
        for count in range(1, len(split) + 1):
            found.append(Relayout("gather", d, split[-count:]))
            found += [Relayout("exchange", e, split[-count:], d) for e in range(len(now)) if e != d]
    return found


@pytest.mark.parametrize(("axes", "rank"), [("xy", 2), ("xy", 3), ("xyz", 2)])
def test_no_sequence_is_cheaper(axes: str, rank: int) -> None:
    """Against the costs of all sequences, relaxed until nothing changes (Bellman-Ford)."""
    options = placements(axes, rank)
    edges = [(s, *step_costs(s, m)[::-1]) for s in options for m in single_steps(s, axes)]
    mesh = tuple((a, WAYS[a]) for a in axes)
    for have in options[:: max(1, len(options) // 12)]:
        least = dict.fromkeys(options, math.inf) | {have: 0.0}
        changed = True
        while changed:
            changed = False
            for a, b, cost in edges:
                if least[a] + cost < least[b] - 1e-12:
                    least[b], changed = least[a] + cost, True
        for want in options:
            now, total = have, 0.0
            for move in plan_moves(have, want, (144,) * rank, mesh):
                cost, now = step_costs(now, move)
                total += cost
            assert now == want
            assert total == pytest.approx(least[want], abs=1e-9), f"{have} to {want}"


def test_common_moves_are_single_steps() -> None:
    def kinds(have: Splits, want: Splits) -> list[str]:
        return [m.kind for m in plan_moves(have, want, (144, 144), MESH.axes)]

    assert kinds(((), ()), (("x", "z"), ("y",))) == ["slice", "slice"]
    assert kinds((("x", "z"), ("y",)), ((), ("y",))) == ["gather"]
    assert kinds((("x", "z"), ()), ((), ("x", "z"))) == ["exchange"]
    assert kinds((("y", "z"), ()), (("y",), ("z",))) == ["exchange"]
    assert kinds((("x",), ()), (("x",), ("z",))) == ["slice"]


def test_steps_keep_to_what_divides() -> None:
    """A dimension of size 2 cannot hold y for a moment, although that would be cheaper."""
    for move in plan_moves((("x",), ("y",), ()), (("y",), ("x",), ()), (6, 6, 2), (("x", 2), ("y", 3))):
        assert move.dim != 2 or move.axes == ("x",)


def test_axes_of_one_device_move_too() -> None:
    assert [m.kind for m in plan_moves((("a",), ()), ((), ("a",)), (3, 3), (("a", 1), ("b", 2)))] == [
        "exchange"
    ]
