"""The conformance helper can fail: a fault of every family is planted and must be found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines import lockstep
from mesh_tf_core.ir import program as program_module
from mesh_tf_core.ir.kernel import At
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.program import AllReduce, Local, Loop, Program
from mesh_tf_core.lower import base, oracle, pipeline, placing
from mesh_tf_core.lower.redistribute import plan_moves
from mesh_tf_core.ops import (
    along,
    basic,
    conv,
    convgrid,
    cumulative,
    dynamic,
    einsum,
    index,
    norm,
    order,
    pieces,
    pool,
    product,
    rearrange,
    reduce,
    ring,
    ring_steps,
    shape,
    softmax,
)
from mesh_tf_core.ops import random as random_ops
from mesh_tf_core.tracing.gradients import _Backward
from tests.conformance.helper import Sample, check_dense, conform
from tests.conformance.samples import SAMPLES

pytestmark = pytest.mark.usefixtures("forget")
BY_NAME = {s.name: s for s in SAMPLES}
CAUGHT = (AssertionError, ValueError, IndexError)


def all_parallel(self: Op, *inputs: TensorType) -> Roles:
    """A wrong role: as if every dimension were independent."""
    return Roles(parallel=tuple(dict.fromkeys(n for t in inputs for n in t.shape.names)))


def caught(*names: str, match: str = "", mesh: str = "x:2;y:2") -> None:
    """Each sample must be found faulty."""
    for name in names:
        with pytest.raises(CAUGHT) as found:
            conform(BY_NAME[name], mesh, "float64")
        assert re.search(match, str(found.value)), f"{name}: {found.value}"


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (einsum.Einsum, "matmul"),
        (reduce.Reduce, "sum"),
        (reduce.Reduce, "max"),
        (softmax.Softmax, "softmax"),
        (softmax.LogSumExp, "logsumexp"),
        (norm.Normalize, "layer_norm"),
        (index.Gather, "gather"),
        (index.ScatterAdd, "scatter_add"),
        (index.Pick, "pick"),
        (order.ArgMax, "argmax"),
        (order.Sort, "sort"),
        (along.TakeAlong, "take_along"),
        (along.PutAlong, "put_along"),
        (dynamic.DynamicSlice, "dynamic_slice"),
        (conv.Conv, "conv 1d"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_wrong_role(operation: type[Op], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "roles", all_parallel)
    caught(name)


def test_lost_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Base lowering forgets the sum and says that nothing is pending."""

    def joined(self: base.Lowering, id: int, axes: tuple[str, ...], combine: str) -> int:
        self.values[id] = replace(self.values[id], partial=())
        return id

    monkeypatch.setattr(base.Lowering, "joined", joined)
    caught("matmul", "sum", "gather", "cross_entropy", match="leaves a sum")


def test_lost_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = base.Lowering.joined

    def only_sums(self: base.Lowering, id: int, axes: tuple[str, ...], combine: str) -> int:
        return joined(self, id, axes, combine) if combine == "sum" else id

    monkeypatch.setattr(base.Lowering, "joined", only_sums)
    caught("max", "min", match="disagrees with others|off the dense")
    caught("any", match="disagrees with others|differ from the dense")


def test_product_of_own_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What devices exchange is 1 instead of their factors' product."""

    def kernel(self: Op, k: Any, at: At, x: Any) -> Any:
        return k.full(at.outputs[0].shape.sizes, 1.0, at.outputs[0].dtype)

    monkeypatch.setattr(product.PieceProducts, "kernel", kernel)
    caught("prod", "prod of two", match="off the dense")


def _without_sums(program: Program) -> Program:
    """The first all-reduce of a program becomes a copy."""
    reduce = next((i for i in program.code if isinstance(i, AllReduce)), None)
    if reduce is None:
        return program
    copy = Local(reduce.inputs, reduce.outputs, reduce.origin, basic.Scale(1.0))
    values = list(program.values)
    values[reduce.inputs[0]] = replace(values[reduce.inputs[0]], partial=())
    return replace(
        program, values=tuple(values), code=tuple(copy if i is reduce else i for i in program.code)
    )


def test_pass_that_drops_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES, ("broken", _without_sums)))
    caught("matmul", "sum of all", "layer_norm first")
    monkeypatch.setattr("tests.conformance.helper.verify", lambda program: program)
    monkeypatch.setattr(pipeline, "verify", lambda program: program)
    caught(
        "matmul", "sum of all", "layer_norm first", match="disagrees with others|off the dense|engine counts"
    )


def test_pass_that_drops_a_loop_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(program: Program) -> Program:
        def without(instr: Any) -> Any:
            return replace(instr, carried=(), outputs=instr.outputs) if isinstance(instr, Loop) else instr

        return replace(program, code=tuple(map(without, program.code)))

    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES, ("broken", broken)))
    with pytest.raises((AssertionError, KeyError)):
        conform(BY_NAME["scan"], "x:2", "float64")


def _rewritten(change: Callable[[Loop], Loop]) -> Callable[[Program], Program]:
    """A pass that changes every loop at the top."""

    def run(program: Program) -> Program:
        return replace(program, code=tuple(change(i) if isinstance(i, Loop) else i for i in program.code))

    return run


def test_pass_that_runs_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _rewritten(lambda loop: replace(loop, runs=None))
    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES, ("broken", broken)))
    with pytest.raises(AssertionError, match=r"off the dense|of out0 differ|against NumPy"):
        check_dense(BY_NAME["while_loop"])


def test_branch_that_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "bool", lambda x: False, raising=False)
    with pytest.raises(AssertionError, match="off the dense"):
        check_dense(BY_NAME["cond"])


def test_backward_that_forgets_the_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that did not run is differentiated as if it had."""
    scan = _Backward._scan

    def broken(self: Any, node: Any, body: Any, dys: Any) -> Any:
        runs, body.runs = body.runs, None
        made = scan(self, node, body, dys)
        body.runs = runs
        return made

    monkeypatch.setattr(_Backward, "_scan", broken)
    with pytest.raises(AssertionError, match="finite differences"):
        check_dense(BY_NAME["while_loop"])


def test_wrong_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(At, "offset", lambda self, name: 0)
    caught("range", "one_hot", "gather", "scatter_add", "pick", "cross_entropy", "uniform", "dropout")
    caught("dynamic_slice in the last piece, and outside", "dynamic_update")


def test_random_numbers_by_local_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def local_rows(k: Any, at: At, shape: Any) -> Any:
        return rows(k, replace(at, split=frozenset()), shape)

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
    caught("cumsum", "cumsum exclusive", "max_pool overlaps", match="off the dense|disagrees")


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
    caught("concat", "slice", "pad", match="off the dense|disagrees")


def test_run_put_in_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = rearrange._looked_up
    monkeypatch.setattr(rearrange, "_looked_up", lambda k, at, dim, table: looked_up(k, at, dim, table[::-1]))
    caught("concat", "slice", "pad", match="off the dense|disagrees")


def test_uncounted_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = lockstep.count_sent
    monkeypatch.setattr(lockstep, "count_sent", lambda *of: counted(*of, times=2.0))
    caught("matmul", match="engine counts")


def test_layout_wrongly_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "check_disjoint", lambda splits, what: None)
    caught("gather", match="split and partial over the same axis", mesh="x:2")


def test_layout_wrongly_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: base.Lowering, op: Op, names: Any) -> None:
        if any(self.layout.axes_of(names)):
            raise mtf.LayoutError(f"{op.name} has both split over mesh axis")

    monkeypatch.setattr(base.Lowering, "check_disjoint", check)
    caught("matmul", match="refused although it is legal")


def _half(inner: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(self: Op, dy: Any, inputs: Any, output: Any) -> Any:
        return [g if g is None else g * 0.5 for g in inner(self, dy, inputs, output)]

    return gradient


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (einsum.Einsum, "matmul"),
        (basic.Shift, "add a number"),
        (reduce.Reduce, "max"),
        (product.ReduceProd, "prod"),
        (softmax.Softmax, "softmax"),
        (norm.Normalize, "layer_norm"),
        (index.Gather, "gather"),
        (shape.Rename, "rename"),
        (random_ops.Dropout, "dropout"),
        (order.TopK, "top_k"),
        (cumulative.CumSum, "cumsum"),
        (dynamic.DynamicUpdate, "dynamic_update"),
        (conv.Conv, "conv 1d"),
        (pool.Pool, "max_pool"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_wrong_gradient(operation: type[Op], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "gradient", _half(operation.gradient))
    with pytest.raises(AssertionError, match="finite differences"):
        check_dense(BY_NAME[name])


def test_wrong_value() -> None:
    sample = BY_NAME["exp"]
    wrong = Sample("exp", "elementwise", sample.apply, sample.args, lambda x: 2.0**x)
    with pytest.raises(AssertionError, match="off the dense result"):
        check_dense(wrong)


def _not_sent(self: Any, id: int, shift: int = 1, pairs: Any = ()) -> int:
    return id


def _once_more(self: Any, id: int, shift: int = 1, pairs: Any = ()) -> int:
    return _SENT(self, id, shift if pairs or shift > 0 else shift + 1, pairs)


_SENT, _STEP = ring.Ring.sent, ring.Ring.step


def _first(self: Any, kind: Any, turn: Any, *operands: int, **fields: Any) -> list[int]:
    return _STEP(self, kind, turn and replace(turn, number=None), *operands, **fields)


def _unjoined(self: Any, k: Any, at: At, *slices: Any) -> Any:
    one, low, other = slices[:3]
    return k.cast(k.binary("add", one, other), self.dtype), low


ROUND: dict[str, tuple[type, str, Any, str]] = {
    "nothing is sent": (ring.Ring, "sent", _not_sent, "attention, ring"),
    "keys stay": (ring.Ring, "round", lambda self, keys: [*keys], "attention, zigzag"),
    "parts are added": (ring_steps.JoinParts, "kernel", _unjoined, "attention, ring"),
    "later keys count": (ring_steps.LaterRows, "counts", lambda *_: None, "attention in texts, ring"),
    "all devices count": (ring_steps.AddPart, "counts", lambda *_: None, "attention, zigzag"),
    "pieces stay": (ring.Ring, "homes", lambda self, odd: (), "attention, zigzag"),
    "sums are not taken": (ring, "summed", lambda low, id: id, "attention, ring"),  # type: ignore[dict-item]
    "all turns of a loop are the first": (ring.Ring, "step", _first, "attention, zigzag"),
    "gradients go round once more": (ring.Ring, "sent", _once_more, "attention, ring of a window"),
}


@pytest.mark.parametrize("fault", ROUND)
def test_context(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, sample = ROUND[fault]
    monkeypatch.setattr(where, name, wrong)
    caught(sample, mesh="x:2;y:2" if fault.startswith(("sums", "gradients", "all turns")) else "x:2")
