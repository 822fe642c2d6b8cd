"""What a condition does not choose is not run: results, gradients, and what is sent, on every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.liveness import memory
from mesh_tf_core.engines import open_engine
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.engines.tf.local import TfLocalEngine
from mesh_tf_core.ir.program import AllReduce, Loop
from mesh_tf_core.lower.verify import verify
from tests.conformance.helper import check_bytes
from tests.engines.control import PROGRAMS, A, N, batches, branches, until


@pytest.mark.parametrize("name", PROGRAMS)
def test_tensorflow_equals_lockstep(name: str, devices: Any) -> None:
    program = PROGRAMS[name]()
    engine, oracle = TfLocalEngine(program, devices[:4]), open_engine(program, "lockstep")
    for batch in batches(program):
        found, expected = engine.step(batch), oracle.step(batch)
        for key, array in expected.items():
            assert np.isfinite(array).all(), key
            np.testing.assert_allclose(found[key], array, 1e-12, 1e-12, err_msg=key)
        check_bytes(program, oracle.communication_bytes)
    assert engine.communication_bytes == program.communication_bytes()


def test_branches_against_numpy() -> None:
    program = branches()
    for batch in batches(program):
        h, w = batch["x"], batch["w"]
        for flag in batch["means"]:
            h = (h * w).mean(0) + h if flag else np.sqrt(np.maximum(h, 0)) * w
        np.testing.assert_allclose(LockstepEngine(program).step(batch)["y"], h, 1e-12)


def test_a_loop_stops() -> None:
    """Three steps of six: half of what the loop could send, and the right number of steps."""
    program = until()
    engine = LockstepEngine(program)
    assert engine.step(batches(program)[0])["n"] == 3
    inside = [
        (instr, times)
        for instr, times in program.walk()
        if isinstance(instr, AllReduce) and times == 6 and "x" in instr.axes
    ]
    assert inside
    saved = sum(3 * program.wire_bytes(instr) for instr, _ in inside)
    assert engine.communication_bytes["x"] == program.communication_bytes()["x"] - saved


def test_a_branch_that_is_not_run_sends_nothing() -> None:
    program = branches()
    engine = LockstepEngine(program)
    sent = []
    for batch in batches(program):
        engine.step(batch)
        sent.append(engine.communication_bytes["x"])
    assert sent[0] > sent[1]


def test_predicted_bytes_are_the_mean_of_two_branches() -> None:
    """An engine counts what it sends: all of a branch that runs, nothing of the other."""
    program, sent = branches(), []
    for flag in (1.0, 0.0):
        engine = LockstepEngine(program)
        engine.step({**batches(program)[0], "x": np.ones((8, 4)), "means": np.full(3, flag)})
        sent.append(engine.communication_bytes)
    assert sent[0]["x"] > sent[1]["x"]
    mean = {axis: (sent[0][axis] + sent[1][axis]) / 2 for axis in sent[0]}
    assert mean == pytest.approx(program.communication_bytes(), 1e-12)


def test_price_is_the_mean_of_two_branches() -> None:
    loops = [instr for instr, _ in branches().walk() if isinstance(instr, Loop) and instr.branch]
    assert len(loops) == 4 and {loop.times for loop in loops} == {0.5}
    assert {loop.times for loop in (i for i, _ in until().walk()) if isinstance(loop, Loop)} == {6}


def test_variables_of_a_branch_have_no_dimension_of_it() -> None:
    g = mtf.Graph()
    x = g.input("x", [N], "float32")
    y = mtf.cond(mtf.reduce_sum(x) > 0.0, lambda: x * g.variable("w", [N], mtf.ONES), lambda: x)
    assert g.variables["w"].shape == mtf.Shape([N]) and y.shape == x.shape


@pytest.mark.parametrize("layout", ["", "n:x", "n:x;a:y"])
def test_a_block_that_runs_again(layout: str) -> None:
    """The same values and gradients, one variable without a dimension of the block, less memory."""

    def build(again: bool) -> mtf.Model:
        g = mtf.Graph()
        x, c = g.input("x", [N, A], "float64"), mtf.Dim("c", 4)

        def block(h: mtf.Tensor) -> mtf.Tensor:
            for i in range(3):
                w = g.variable(f"w{i}", [A, c], mtf.Normal(0.7), "float64")
                h = mtf.rename(mtf.tanh(mtf.einsum([h, w], [N, c])), c="a")
            return h

        y = mtf.recomputable(block, x, name="again") if again else block(x)
        return mtf.Model(mtf.reduce_sum(mtf.square(y)), mtf.SGD(0.1))

    mesh, batch = mtf.Mesh("x:2;y:2"), {"x": np.random.default_rng(0).normal(size=(8, 4))}
    programs = [
        build(False).lower(mesh, mtf.Layout(layout)),
        build(True).lower(mesh, mtf.Layout(layout)),
        build(True).lower(mesh, mtf.Layout(layout), mtf.Options(recompute=frozenset({"again"}))),
    ]
    ran = []
    for program in programs:
        assert program.variables["w0"].variable.shape.names == ("a", "c")
        engine = LockstepEngine(verify(program))
        ran.append([engine.step(batch)["loss"], engine.step(batch)["loss"], engine.read("w0")])
    for other in ran[1:]:
        for found, expected in zip(other, ran[0], strict=True):
            np.testing.assert_allclose(found, expected, 1e-12)
    assert {i.origin.phase for i, _ in programs[2].walk()} >= {"recompute"}
    kept, again = (memory(p).peak for p in programs[1:])
    assert again < kept


def test_errors() -> None:
    g = mtf.Graph()
    x = g.input("x", [N], "float32")
    total = mtf.reduce_sum(x)
    v = mtf.Graph.variable(g, "v", [N], mtf.ONES)
    with pytest.raises(mtf.UserError, match="predicate must be a bool scalar"):
        mtf.cond(total, lambda: x, lambda: x)
    with pytest.raises(mtf.UserError, match="same types"):
        mtf.cond(total > 0.0, lambda: x, lambda: total)
    with pytest.raises(mtf.UserError, match="a branch or block must return a tensor or a tuple of tensors,"):
        mtf.cond(total > 0.0, lambda: x, lambda: None)
    with pytest.raises(mtf.UserError, match="tuples of the same length"):
        mtf.cond(total > 0.0, lambda: x, lambda: (x, x))
    with pytest.raises(mtf.UserError, match="while_loop: the condition must return a bool scalar, found"):
        mtf.while_loop(lambda h: h, lambda h: h, [x], 3)
    with pytest.raises(mtf.UserError, match="the body must return the types of its arguments"):
        mtf.while_loop(lambda h: total > 0.0, lambda h: total, [x], 3)

    def stores() -> mtf.Tensor:
        g.assign(g.lookup("v"), v)
        return x

    with pytest.raises(
        mtf.UserError,
        match="an assignment inside a branch or a while loop is not",
    ):
        mtf.cond(total > 0.0, stores, lambda: x)
    with pytest.raises(mtf.UserError, match="found no tensor argument; pass at least one"):
        mtf.recomputable(lambda: x)
