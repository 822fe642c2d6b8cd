"""The conformance helper can fail: faults of roles, lowering and passes are planted and must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines import lockstep
from mesh_tf_core.ir.kernel import At
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.program import AllReduce, Local, Loop, Program
from mesh_tf_core.lower import base, pipeline, placing
from mesh_tf_core.ops import (
    along,
    basic,
    conv,
    cumulative,
    einsum,
    index,
    norm,
    order,
    reduce,
    softmax,
)
from mesh_tf_core.tracing.gradients import _BackwardWalk
from tests.conformance.faults import BY_NAME, caught
from tests.conformance.helper import check_dense, conform

pytestmark = pytest.mark.usefixtures("forget")


def all_parallel(self: Op, *inputs: TensorType) -> Roles:
    """A wrong role: as if every dimension were independent."""
    return Roles(parallel=tuple(dict.fromkeys(n for t in inputs for n in t.shape.names)))


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
        (index.DynamicSlice, "dynamic_slice"),
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
    caught("matmul", "sum", "gather", "cross_entropy", match="needs a pending sum")


def test_lost_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = base.Lowering.joined

    def only_sums(self: base.Lowering, id: int, axes: tuple[str, ...], combine: str) -> int:
        return joined(self, id, axes, combine) if combine == "sum" else id

    monkeypatch.setattr(base.Lowering, "joined", only_sums)
    caught("max", "min", match="have different values|off the dense")
    caught("any", match="have different values|differ from the dense")


def test_product_of_own_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What devices exchange is 1 instead of their factors' product."""

    def kernel(self: Op, k: Any, at: At, x: Any) -> Any:
        return k.full(at.outputs[0].shape.sizes, 1.0, at.outputs[0].dtype)

    monkeypatch.setattr(cumulative.PieceProducts, "kernel", kernel)
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


def after_others(monkeypatch: pytest.MonkeyPatch, broken: pipeline.Pass) -> None:
    """Lets a pass run after the library's."""
    passes = pipeline.passes
    monkeypatch.setattr(pipeline, "passes", lambda *said: {**passes(*said), "broken": broken})


def test_pass_that_drops_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    after_others(monkeypatch, _without_sums)
    caught("matmul", "sum of all", "layer_norm first")
    monkeypatch.setattr("tests.conformance.helper.verify", lambda program: program)
    monkeypatch.setattr(pipeline, "verify", lambda program: program)
    caught(
        "matmul", "sum of all", "layer_norm first", match="have different values|off the dense|engine counts"
    )


def test_pass_that_drops_a_loop_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(program: Program) -> Program:
        def without(instr: Any) -> Any:
            return replace(instr, carried=(), outputs=instr.outputs) if isinstance(instr, Loop) else instr

        return replace(program, code=tuple(map(without, program.code)))

    after_others(monkeypatch, broken)
    with pytest.raises((AssertionError, KeyError)):
        conform(BY_NAME["scan"], "x:2", "float64")


def _rewritten(change: Callable[[Loop], Loop]) -> Callable[[Program], Program]:
    """A pass that changes every loop at the top."""

    def run(program: Program) -> Program:
        return replace(program, code=tuple(change(i) if isinstance(i, Loop) else i for i in program.code))

    return run


def test_pass_that_runs_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _rewritten(lambda loop: replace(loop, runs=None))
    after_others(monkeypatch, broken)
    with pytest.raises(AssertionError, match=r"off the dense|of out0 differ|against NumPy"):
        check_dense(BY_NAME["while_loop"])


def test_branch_that_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "bool", lambda x: False, raising=False)
    with pytest.raises(AssertionError, match="off the dense"):
        check_dense(BY_NAME["cond"])


def test_backward_that_forgets_the_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that did not run is differentiated as if it had."""
    scan = _BackwardWalk._scan

    def broken(self: Any, node: Any, body: Any, dys: Any) -> Any:
        runs, body.runs = body.runs, None
        made = scan(self, node, body, dys)
        body.runs = runs
        return made

    monkeypatch.setattr(_BackwardWalk, "_scan", broken)
    with pytest.raises(AssertionError, match="finite differences"):
        check_dense(BY_NAME["while_loop"])


def test_layout_wrongly_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "check_disjoint", lambda splits, what: None)
    caught("gather", match="the value is both split and a pending sum over the same axis", mesh="x:2")


def test_layout_wrongly_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: base.Lowering, op: Op, names: Any) -> None:
        if any(self.layout.axes_of(names)):
            raise mtf.LayoutError(f"{op.name} has both split over mesh axis")

    monkeypatch.setattr(base.Lowering, "check_disjoint", check)
    caught("matmul", match="refused although it is legal")
