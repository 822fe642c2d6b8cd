"""Traced functions lose nodes, not numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from mesh_tf_core.engines.tf.devices import tensorflow

tf = tensorflow()

from tensorflow.python.eager import context, execute  # noqa: E402

from mesh_tf_core.engines.tf.graph import simplified  # noqa: E402


def ran(made: Any, *arrays: np.ndarray) -> Any:
    """What a function's definition gives."""
    own = context.context()
    own.add_function_def(made)
    (found,) = execute.execute(made.signature.name, 1, [tf.constant(a) for a in arrays], (), own)
    return found.numpy()


def run(body: Any, *arrays: np.ndarray) -> tuple[Any, Any, Counter[str]]:
    """What it gives as it was traced and simplified, and the operations that are left."""
    specs = [tf.TensorSpec(a.shape, a.dtype) for a in arrays]
    traced = tf.function(body, autograph=False, input_signature=specs).get_concrete_function()
    made = simplified(traced, f"simplified_{body.__name__}")
    return traced(*map(tf.constant, arrays)).numpy(), ran(made, *arrays), Counter(n.op for n in made.node_def)


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_equal_constants_are_one() -> None:
    def constants(x: Any) -> Any:
        return (x * 2.0 + 3.0) * 2.0

    plain, found, left = run(constants, X)
    np.testing.assert_array_equal(found, plain)
    assert left == {"Const": 2, "Mul": 2, "AddV2": 1}


def test_numbers_of_other_types_and_signs_stay_apart() -> None:
    def signs(x: Any) -> Any:
        return tf.math.divide(x, -0.0) + tf.math.divide(x, 0.0) + tf.cast(tf.constant(0), tf.float32)

    plain, found, left = run(signs, X + 1)
    np.testing.assert_array_equal(found, plain)
    assert left["Const"] == 3


def test_reshapes_that_change_nothing_go() -> None:
    def reshapes(x: Any) -> Any:
        there_and_back = tf.reshape(tf.reshape(tf.identity(x), [3, 2]), [2, 3])
        return tf.reshape(tf.reshape(there_and_back + x, [6]), [3, 2])

    plain, found, left = run(reshapes, X)
    np.testing.assert_array_equal(found, plain)
    assert left == {"AddV2": 1, "Reshape": 1, "Const": 1}


def test_work_is_not_merged() -> None:
    """Of two equal products the second may be there to hold less in between."""

    def twice(x: Any) -> Any:
        return tf.exp(x) + tf.exp(x)

    plain, found, left = run(twice, X)
    np.testing.assert_array_equal(found, plain)
    assert left["Exp"] == 2


def test_what_passes_through_comes_out() -> None:
    def same(x: Any) -> Any:
        return tf.reshape(x, [2, 3])

    plain, found, left = run(same, X)
    np.testing.assert_array_equal(found, plain)
    assert not left


def test_order_is_kept_where_it_was_asked_for() -> None:
    def ordered(x: Any) -> Any:
        first = tf.reshape(x, [2, 3])
        with tf.control_dependencies([first]):
            return tf.identity(x) * 2.0

    plain, found, _ = run(ordered, X)
    np.testing.assert_array_equal(found, plain)


def test_a_variable_is_read_before_it_is_written_and_other_variables_are_not_waited_for() -> None:
    def handle(name: str) -> Any:
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2, 3], shared_name=f"test_simplify/{name}")

    def update(x: Any) -> Any:
        old = {n: tf.raw_ops.ReadVariableOp(resource=handle(n), dtype=tf.float32) for n in ("a", "b")}
        for n in old:
            tf.raw_ops.AssignVariableOp(resource=handle(n), value=x)
        return old["a"] - old["b"]

    traced = tf.function(
        update, autograph=False, input_signature=[tf.TensorSpec([2, 3])]
    ).get_concrete_function()
    made = simplified(traced, "simplified_update")
    reads = {n.name: n.input[0].partition(":")[0] for n in made.node_def if n.op == "ReadVariableOp"}
    names = {n.name: n.attr["shared_name"].s for n in made.node_def if n.op == "VarHandleOp"}
    for node in made.node_def:
        if node.op == "AssignVariableOp":
            own = names[node.input[0].partition(":")[0]]
            waits = [i.removeprefix("^") for i in node.input if i.startswith("^")]
            assert [names[reads[w]] for w in waits] == [own]
    for n in ("a", "b"):
        tf.raw_ops.AssignVariableOp(resource=handle(n), value=tf.fill([2, 3], 3.0 if n == "a" else 1.0))
    found, after = ran(made, X), tf.raw_ops.ReadVariableOp(resource=handle("b"), dtype=tf.float32)
    np.testing.assert_array_equal(found, np.full((2, 3), 2.0))
    np.testing.assert_array_equal(after.numpy(), X)


def test_a_variable_that_is_read_after_its_write_is_the_new_one() -> None:
    def later(x: Any) -> Any:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2, 3], shared_name="test_simplify/later")
        tf.raw_ops.AssignVariableOp(resource=handle, value=x)
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32) * 2.0

    plain, found, _ = run(later, X)
    np.testing.assert_array_equal(found, plain)
    np.testing.assert_array_equal(found, X * 2)
