"""Concat, slice and pad along a split dimension: what is sent, and by how much less than gathering it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.pricer import price
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllGather, Origin, Permute, Program
from mesh_tf_core.lower.verify import verify
from mesh_tf_core.ops.rearrange import Run, rounds, runs

B = mtf.Dim("b", 2)


def lowered(devices: int, size: int, apply: object) -> Program:
    """The program of apply(x [a b]) with `a` split over all devices, as it is."""
    g = mtf.Graph()
    y = apply(g.input("x", [mtf.Dim("a", size), B], "float32"))  # type: ignore[operator]
    return verify(mtf.lower(g, mtf.Mesh(f"x:{devices}"), mtf.Layout("a:x"), {"y": y}))


@pytest.mark.parametrize(
    ("apply", "messages", "elements"),
    [
        # Half of 32 over 4 devices: piece j of 4 lies on device j // 2; each of the first two sends twice.
        (lambda x: mtf.slice_dim(x, "a", 0, 16), 2, 4 + 4),
        # The last half: mirrored.
        (lambda x: mtf.slice_dim(x, "a", 16, 16), 2, 4 + 4),
        # x twice: 16 elements a piece, half of which every device has or sends.
        (lambda x: mtf.concat([x, x], "a"), 4, 4 * 8),
        # Pieces of 12 out of pieces of 8.
        (lambda x: mtf.pad(x, "a", 0, 16), 3, 8 + 4 + 4),
    ],
    ids=["first half", "last half", "concat", "pad"],
)
def test_bytes(apply: object, messages: int, elements: int) -> None:
    program = lowered(4, 32, apply)
    sent = [i for i, _ in program.walk() if isinstance(i, Permute)]
    assert not any(isinstance(i, AllGather) for i, _ in program.walk())
    assert len(sent) <= messages
    assert sum(map(program.wire_bytes, sent)) <= elements * B.size * 4


def test_gathered_where_that_is_cheaper() -> None:
    """Every device needs nearly everything: one message of the whole instead of many."""
    program = lowered(8, 8, lambda x: mtf.concat([x] * 8, "a"))
    assert any(isinstance(i, AllGather) for i, _ in program.walk())
    assert not any(isinstance(i, Permute) for i, _ in program.walk())


@given(st.data())
@pytest.mark.nightly
def test_runs_cover_the_result_and_rounds_are_permutations(data: st.DataObject) -> None:
    pieces = data.draw(st.integers(2, 8))
    sizes = [pieces * data.draw(st.integers(1, 5)) for _ in range(data.draw(st.integers(1, 3)))]
    length = sum(sizes) // pieces
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    found = runs([(b, 0, s) for b, s in zip(begins, sizes, strict=True)], sizes, pieces, length)
    # Element by element: operand o, element e lies on device e // step, and comes to begins[o] + e.
    want = {}
    for begin, size in zip(begins, sizes, strict=True):
        step, before = size // pieces, begin // pieces
        for e in range(size):
            want[divmod(begin + e, length)] = (e // step, before + e % step)
    got = {(r.target, r.at + n): (r.source, r.begin + n) for r in found for n in range(r.size)}
    assert got == want
    steps = rounds(found)
    for step_runs in steps:
        assert len({r.source for r in step_runs}) == len({r.target for r in step_runs}) == len(step_runs)
        assert step_runs[0].size == max(r.size for r in step_runs)
    assert sorted(r for s in steps for r in s) == sorted(r for r in found if r.source != r.target)


def test_neighbouring_runs_are_joined() -> None:
    assert runs([(0, 0, 8)], [8], 2, 4) == [Run(0, 0, 0, 0, 4), Run(1, 0, 1, 0, 4)]
    assert runs([(0, 0, 4), (4, 0, 4)], [4, 4], 2, 4) == [
        Run(0, 0, 0, 0, 2),
        Run(1, 0, 0, 2, 2),
        Run(0, 2, 1, 0, 2),
        Run(1, 2, 1, 2, 2),
    ]


@pytest.mark.parametrize(
    ("how", "crossings"),
    [
        ({"shift": 1}, 1),
        ({"shift": -3}, 3),
        ({"shift": 7, "wrap": True}, 1),
        ({"pairs": ((0, 1), (1, 0), (4, 5))}, 1),
        ({"pairs": ((0, 4), (1, 3), (2, 5))}, 3),
    ],
)
def test_pieces_that_cross_one_link(how: dict[str, Any], crossings: int) -> None:
    """On a ring of eight."""
    assert Permute((0,), (1,), Origin(0, "", Phase.FORWARD), ("x",), **how).crossings(8) == crossings


def test_far_pieces_cost_more_on_a_torus_only() -> None:
    times = {}
    for name in ("tpu-v3", "h100"):
        for offset in (1, 2):
            program = lowered(8, 1 << 23, lambda x, o=offset: mtf.shift(x, o * (1 << 20), "a"))
            (line,) = [x for x in price(program, load_hardware(name)).lines if x.name == "permute"]
            times[name, offset] = line.seconds
    assert times["tpu-v3", 2] > 1.5 * times["tpu-v3", 1]
    assert times["h100", 2] == times["h100", 1]
