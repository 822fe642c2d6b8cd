"""The rewriter of programs: what was there stays, and what a pass adds makes a whole program."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mesh_tf_core as mtf
from mesh_tf_core.ir.builder import ProgramRewriter, inside, take_out
from mesh_tf_core.ir.program import AllReduce, Loop, Program
from mesh_tf_core.lower.uses import compact
from mesh_tf_core.lower.verify import ProgramError, verify

BATCH, D, LAYERS = mtf.Dim("batch", 4), mtf.Dim("d", 4), mtf.Dim("layers", 2)


@pytest.fixture
def program() -> Program:
    g = mtf.Graph()
    x = g.input("x", [BATCH, D], "float32")
    y = mtf.scan(lambda h: h * g.variable("w", [D], mtf.Normal(0.1)), x, LAYERS)
    return mtf.lower(
        g, mtf.Mesh("data:2;model:2"), mtf.Layout("batch:data"), {"y": y, "s": mtf.reduce_sum(y)}
    )


def test_new_values_follow_those_that_are_there(program: Program) -> None:
    """A sum in two steps, over one more axis each, is what it was in one."""
    (sum,) = (i for i in program.code if isinstance(i, AllReduce))
    state, code = ProgramRewriter(program), [*program.code]
    (source,), (out,) = sum.inputs, sum.outputs
    both = state.otherwise(source, partial=("data",))
    assert both == len(program.values) and state.values[both].partial == ("data",)
    again = state.otherwise(out, (), ("model",), "bfloat16")
    assert (again, state.values[again].dtype, state.values[again].tensor) == (
        both + 1,
        "bfloat16",
        program.values[out].tensor,
    )
    take_out(sum, code)
    with pytest.raises(ProgramError):
        verify(state.rewritten(code))
    state.emit(replace(sum, inputs=(source,)))
    with_sum = state.rewritten([*code, *state.code])
    assert with_sum.values[: len(program.values)] == program.values
    assert verify(compact(with_sum)).results.keys() == program.results.keys()


def test_a_loop_is_itself_unless_its_body_is_another(program: Program) -> None:
    (loop,) = (i for i in program.code if isinstance(i, Loop))
    assert inside(loop, list) is loop
    shorter = inside(loop, lambda body: body[:-1])
    assert shorter.body == loop.body[:-1] and shorter.carried == loop.carried
    with pytest.raises(AssertionError, match="is not in this block"):
        take_out(loop, [*loop.body])
