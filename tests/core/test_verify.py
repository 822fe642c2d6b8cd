"""The verifier of programs finds every broken rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

import mesh_tf_core as mtf
from mesh_tf_core.ir.instructions import PARAMETER
from mesh_tf_core.ir.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Done,
    Instr,
    Local,
    Loop,
    Program,
    ReduceScatter,
    Slice,
    WriteVariable,
)
from mesh_tf_core.lower.verify import ProgramError, verify
from mesh_tf_core.ops.basic import Scale, Shift

A, B, C, L = mtf.Dim("a", 4), mtf.Dim("b", 4), mtf.Dim("c", 4), mtf.Dim("l", 2)


def sample(layout: str = "a:x;b:y") -> Program:
    """A program with every kind of instruction but a permutation."""
    g = mtf.Graph()
    x = g.input("x", [A, B], "float32")
    w = g.variable("w", [B, C], mtf.ONES)
    y = mtf.einsum([x, w], [A, C])
    s = mtf.scan(lambda h: mtf.tanh(h), y, L)
    _, (z,) = mtf.scan(lambda h: (h, [mtf.reduce_sum(h, "c")]), s, L)
    placed = mtf.Layout(layout + ";d:y;e:x;f:y")
    g.assign(g.lookup("w"), w * 0.5)
    results = {
        "y": s,
        "z": z,
        "exchanged": mtf.rename(x, a="d", b="e"),
        "gathered": mtf.rename(x, b="h"),
        "sliced": mtf.rename(s, c="f"),
        "scattered": mtf.rename(mtf.einsum([x, w], [A, C]), c="f"),
    }
    return mtf.lower(g, mtf.Mesh("x:2;y:2"), placed, results)


def index(program: Program, kind: type[Instr], code: Any = None) -> int:
    return next(i for i, instr in enumerate(code or program.code) if isinstance(instr, kind))


def changed(program: Program, kind: type[Instr], **fields: Any) -> Program:
    """The first instruction of a kind with other fields."""
    at = index(program, kind)
    code = list(program.code)
    code[at] = replace(code[at], **fields)
    return replace(program, code=tuple(code))


def value(program: Program, kind: type[Instr], which: str, **fields: Any) -> Program:
    """A value of the first instruction of a kind with other fields."""
    at = getattr(program.code[index(program, kind)], which)[0]
    values = list(program.values)
    values[at] = replace(values[at], **fields)
    return replace(program, values=tuple(values))


def in_loop(program: Program, **fields: Any) -> Program:
    return changed(program, Loop, **fields)


def test_the_sample_is_right_and_has_every_kind() -> None:
    program = verify(sample())
    kinds = {type(i) for i, _ in program.walk()}
    assert {Local, ReduceScatter, AllReduce, AllGather, AllToAll, Slice, Loop, WriteVariable} <= kinds, kinds


def first_loop(program: Program) -> Loop:
    loop = program.code[index(program, Loop)]
    assert isinstance(loop, Loop)
    return loop


FAULTS: dict[str, tuple[Callable[[Program], Program], str]] = {
    "an axis on two dimensions": (
        lambda p: value(p, Local, "outputs", splits=(("x",), ("x",))),
        "an axis splits two dimensions",
    ),
    "splits for another rank": (
        lambda p: value(p, Local, "outputs", splits=(("x",),)),
        "the number of splits differs from the number of dimensions",
    ),
    "split and partial": (
        lambda p: value(p, Local, "outputs", partial=("x",)),
        "the value is both split and a pending sum over the same axis",
    ),
    "a size that is not divisible": (
        lambda p: value(p, Local, "outputs", shape=mtf.Shape([mtf.Dim("a", 3), C])),
        "is not divisible by the devices of",
    ),
    "an input from nowhere": (
        lambda p: replace(p, code=p.code[1:]),
        "is not computed before this instruction",
    ),
    "computed twice": (lambda p: replace(p, code=(p.code[0], *p.code)), "is computed twice"),
    "a result from nowhere": (
        lambda p: replace(p, results={"none": len(p.values)}, values=(*p.values, p.values[0])),
        "result 'none': %[0-9]+ is not computed",
    ),
    "a result that is partial": (
        lambda p: replace(p, results={"y": p.code[index(p, ReduceScatter)].inputs[0]}),
        "still has pending sums",
    ),
    "a sum over other axes": (
        lambda p: changed(p, AllReduce, axes=("x",)),
        "the axes of the sum differ from the axes of the pending sum in %[0-9]+",
    ),
    "a scatter over other axes": (
        lambda p: changed(p, ReduceScatter, axes=("x",)),
        "the axes of the sum differ from the axes of the pending sum",
    ),
    "a scatter to another dimension": (lambda p: changed(p, ReduceScatter, dim="a"), "must not change from"),
    "a gather of another dimension": (lambda p: changed(p, AllGather, dim="a"), "must not change from"),
    "an exchange the wrong way": (
        lambda p: changed(
            p, AllToAll, split=p.code[index(p, AllToAll)].concat, concat=p.code[index(p, AllToAll)].split
        ),  # type: ignore[attr-defined]
        "must not change from",
    ),
    "a slice of another dimension": (lambda p: changed(p, Slice, dim="zzz"), "must not change from"),
    "a type that changes": (
        lambda p: value(p, AllGather, "outputs", dtype="bfloat16"),
        "have different types",
    ),
    "a variable written as it is not stored": (
        lambda p: changed(p, WriteVariable, inputs=(p.feeds["x"],)),
        "does not have the placement in which the variable is stored",
    ),
    "what is on its way, read": (
        lambda p: changed(p, AllGather, rule=PARAMETER),
        "is read before its communication has finished",
    ),
    "a message that nothing waits for": (
        lambda p: changed(
            replace(p, code=p.code[: index(p, AllGather) + 1], results={}), AllGather, rule="x"
        ),
        "no instruction of the block waits for %",
    ),
    "waiting for what did not start": (
        lambda p: replace(p, code=(*p.code, Done((p.feeds["x"],), (), p.code[0].origin, "permute"))),
        "no matching start instruction for %",
    ),
    "a lost pending sum": (
        lambda p: changed(p, Local, op=Scale(1.0), inputs=(p.feeds["x"],)),
        "needs a pending sum over|over different axes|splits two dimensions",
    ),
    "a carry that changes": (
        lambda p: in_loop(p, carried=tuple(c._replace(init=p.feeds["x"]) for c in first_loop(p).carried)),
        "is not computed|changes its type or placement",
    ),
    "a carry from nowhere": (lambda p: in_loop(p, body=()), "is not computed"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str) -> None:
    fault, match = FAULTS[name]
    with pytest.raises(ProgramError, match=match):
        verify(fault(sample()))


@dataclass(frozen=True, slots=True)
class Unheard(Collective):
    """Of a kind that has no rule."""

    name = "unheard"


def test_a_collective_without_a_rule_is_refused() -> None:
    program = sample()
    at = index(program, AllGather)
    old = program.code[at]
    code = (*program.code[:at], Unheard(old.inputs, old.outputs, old.origin, ("x",)), *program.code[at + 1 :])
    with pytest.raises(ProgramError, match=r"unheard\(x\): no rule covers operands of these types"):
        verify(replace(program, code=code))


def test_a_pending_sum_in_an_operation_that_is_not_linear() -> None:
    program = sample()
    at = index(program, ReduceScatter)
    pending = program.code[at].inputs[0]
    wrong = Local((pending,), (len(program.values),), program.code[at].origin, Shift(1.0))
    values = (*program.values, replace(program.values[pending], id=len(program.values), partial=()))
    code = (*program.code[:at], wrong, *program.code[at:])
    with pytest.raises(ProgramError, match="an operand is a pending sum, but the operation is not linear"):
        verify(replace(program, code=code, values=values))


def test_a_carry_that_is_passed_on_unreduced() -> None:
    """The original carries a delayed sum through its while loop and computes wrong values."""
    g = mtf.Graph()
    x = g.input("x", [A, B], "float32")
    s = mtf.scan(lambda s: mtf.reduce_sum(x * s), mtf.reduce_sum(x), L)
    program = mtf.lower(g, mtf.Mesh("x:2"), mtf.Layout("a:x"), {"s": s})
    loop = first_loop(verify(program))
    body = [i for i in loop.body if not isinstance(i, AllReduce)]
    partial = next(i for i in loop.body if isinstance(i, AllReduce)).inputs[0]
    carried = tuple(c._replace(leave=partial) for c in loop.carried)
    with pytest.raises(ProgramError, match="has other pending sums after an iteration than before"):
        verify(in_loop(program, body=tuple(body), carried=carried))
