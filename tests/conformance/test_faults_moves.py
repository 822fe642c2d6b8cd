"""The same of what goes between devices, and of where devices are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mesh_tf_core.engines import lockstep
from mesh_tf_core.ir import program as program_module
from mesh_tf_core.ir.kernel import At
from mesh_tf_core.ir.op import Op
from mesh_tf_core.lower import base, oracle
from mesh_tf_core.lower.oracle import plan_moves
from mesh_tf_core.ops import (
    convgrid,
    order,
    pieces,
    rearrange,
    ring,
    ring_pieces,
    ring_steps,
    shape,
)
from mesh_tf_core.ops import random as random_ops
from tests.conformance.faults import BY_NAME, caught
from tests.conformance.helper import check_dense

pytestmark = pytest.mark.usefixtures("forget")


def test_wrong_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(At, "offset", lambda self, name: 0)
    caught("range", "one_hot", "gather", "scatter_add", "pick", "cross_entropy", "uniform", "dropout")
    caught("dynamic_slice in the last piece, and outside", "dynamic_update")


def test_random_numbers_by_local_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def local_rows(k: Any, at: At, *of: Any) -> Any:
        return rows(k, replace(at, split=frozenset()), *of)

    rows = random_ops.rows
    monkeypatch.setattr(random_ops, "rows", local_rows)
    caught("uniform", "dropout", match="off the dense")


def test_rename_that_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mesh-TensorFlow's own fault: the pieces stay where they were."""

    def lower(self: Op, lowering: base.Lowering, inputs: Any, types: Any) -> list[int]:
        return lowering.local(self, inputs, types, [lowering.natural(types[0].shape)])

    monkeypatch.setattr(shape.Rename, "lower", lower)
    caught("rename", "rename and use")


def test_reshape_that_keeps_every_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def lower(self: Op, lowering: base.Lowering, inputs: Any, types: Any) -> list[int]:
        return lowering.local(self, inputs, types, [lowering.natural(types[0].shape)])

    monkeypatch.setattr(shape.Reshape, "lower", lower)
    caught("reshape merge", "reshape regroup")


def test_moves_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "plan_moves", lambda *args: plan_moves(*args)[::-1])
    caught("rename swaps")


@pytest.mark.parametrize("kind", ["AllGather", "AllToAll"])
def test_group_in_the_wrong_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged = lockstep.LockstepEngine.exchanged

    def broken(self: Any, instr: Any, members: Any, v: Any) -> Any:
        turned = members[::-1] if type(instr).__name__ == kind else members
        return exchanged(self, instr, turned, v)

    monkeypatch.setattr(lockstep.LockstepEngine, "exchanged", broken)
    caught("rename swaps" if kind == "AllToAll" else "sort")


def test_candidates_without_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = order.Candidates.kernel

    def broken(self: Any, k: Any, at: At, *slices: Any) -> Any:
        return kernel(self, k, replace(at, offset_of=lambda name: 0), *slices)

    monkeypatch.setattr(order.Candidates, "kernel", broken)
    caught("top_k", "top_k ties", match="of out1 differ")


def test_running_sums_without_the_pieces_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(At, "shard", lambda self, name: 0)
    caught("cumsum", "cumsum exclusive", "max_pool overlaps", match="off the dense|different values")


def test_groups_with_one_another_s_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    filters = convgrid.Grid.filters

    def broken(self: Any, k: Any, *args: Any) -> Any:
        w = filters(self, k, *args)
        return k.flip(w, len(self.taps))

    monkeypatch.setattr(convgrid.Grid, "filters", broken)
    for name in ("conv grouped", "conv_transpose depthwise"):
        with pytest.raises(AssertionError, match="off the dense"):
            check_dense(BY_NAME[name])


def test_halo_from_the_wrong_side(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = pieces._moved

    def broken(low: Any, id: int, axes: Any, shift: int, wrap: bool) -> int:
        return moved(low, id, axes, -shift, wrap)

    monkeypatch.setattr(pieces, "_moved", broken)
    caught("conv 1d", "conv 1d causal", "conv_transpose 1d wide", "sum_pool", "shift 1", "shift 7 around")


def test_halo_that_is_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the nearest neighbour is asked, though the window reaches further."""
    moved = pieces._moved

    def broken(low: Any, id: int, axes: Any, shift: int, wrap: bool) -> int:
        return moved(low, id, axes, max(-1, min(1, shift)), wrap)

    monkeypatch.setattr(pieces, "_moved", broken)
    caught("conv 1d wide", "max_pool wide", "shift 3", mesh="x:2;y:4")


def test_run_sent_to_the_wrong_device(monkeypatch: pytest.MonkeyPatch) -> None:
    links = program_module.Permute.links

    def broken(self: Any, n: int) -> Any:
        return tuple((a, n - 1 - b) for a, b in links(self, n)) if self.pairs else links(self, n)

    monkeypatch.setattr(program_module.Permute, "links", broken)
    caught("concat", "slice", "pad", match="off the dense|different values")


def test_run_put_in_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = rearrange._looked_up
    monkeypatch.setattr(rearrange, "_looked_up", lambda k, at, dim, table: looked_up(k, at, dim, table[::-1]))
    caught("concat", "slice", "pad", match="off the dense|different values")


def test_uncounted_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = program_module.count_sent

    def doubled(*of: Any) -> None:
        """The engine counts messages one by one; a program says how often each runs."""
        counted(*of, *([] if len(of) > 4 else [2.0]))

    monkeypatch.setattr(program_module, "count_sent", doubled)
    caught("matmul", match="engine counts")


def _not_sent(self: Any, id: int, shift: int = 1, pairs: Any = ()) -> int:
    return id


def _once_more(self: Any, id: int, shift: int = 1, pairs: Any = ()) -> int:
    return _SENT(self, id, shift if pairs or shift > 0 else shift + 1, pairs)


_SENT, _STEP, _ROUND = ring.Ring.sent, ring.Ring.step, ring.Ring.round
_BEGAN = ring_pieces.Pieces.began


def _first(self: Any, kind: Any, turn: Any, *operands: int, **fields: Any) -> list[int]:
    return _STEP(self, kind, turn and replace(turn, number=None), *operands, **fields)


def _unjoined(self: Any, k: Any, at: At, *slices: Any) -> Any:
    one, low, other = slices[:3]
    return k.cast(k.binary("add", one, other), self.dtype), low


ROUND: dict[str, tuple[type, str, Any, str]] = {
    "nothing is sent": (ring.Ring, "sent", _not_sent, "attention, ring"),
    "keys stay": (ring.Ring, "round", lambda self, keys, *_: [*keys], "attention, zigzag"),
    "parts are added": (ring_steps.JoinParts, "kernel", _unjoined, "attention, ring"),
    "later keys count": (ring_steps.LaterRows, "counts", lambda *_: None, "attention in texts, ring"),
    "all devices count": (ring_steps.AddPart, "counts", lambda *_: None, "attention, zigzag"),
    "pieces stay": (ring.Ring, "homes", lambda self, odd: (), "attention, zigzag"),
    "sums are not taken": (ring, "summed", lambda low, id: id, "attention, ring"),  # type: ignore[dict-item]
    "all turns of a loop are the first": (ring.Ring, "step", _first, "attention, zigzag"),
    "gradients go round once more": (ring.Ring, "sent", _once_more, "attention, ring of a window"),
    "all keys come from before": (
        ring.Ring,
        "round",
        lambda self, keys, way, half: _ROUND(self, keys, 1, half),
        "attention, ring of a window to both sides",
    ),
    "weights are dropped by places of one's own": (
        ring_pieces.Pieces,
        "began",
        lambda self, half, sent=None, way=1: _BEGAN(self, half) if sent is None else sent,
        "attention with dropout, zigzag",
    ),
    "places stay": (
        ring_steps.PlaceSent,
        "kernel",
        lambda self, k, at, *slices: slices[0],
        "attention, ring of a window to both sides, beyond half",
    ),
}


@pytest.mark.parametrize("fault", ROUND)
def test_context(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, sample = ROUND[fault]
    monkeypatch.setattr(where, name, wrong)
    four = fault.startswith(("sums", "gradients", "all turns", "all keys"))
    caught(sample, mesh="x:2;y:2" if four else "x:2")
