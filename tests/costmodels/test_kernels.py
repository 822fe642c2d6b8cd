"""Counting array functions: what operations are made of, and what their prices add up to."""

from __future__ import annotations

import pytest

from costmodels.kernels.array_functions import Call, NoArrayFunctionError, call_seconds, calls
from mesh_tf_core import Dim, Shape
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ops.basic import Scale
from mesh_tf_core.ops.binary import Binary, Where
from mesh_tf_core.ops.einsum import Einsum
from mesh_tf_core.ops.norm import Normalize
from mesh_tf_core.ops.reduce import Reduce
from mesh_tf_core.ops.softmax import Softmax

A, B, C = Dim("a", 8), Dim("b", 16), Dim("c", 4)


def tensor(*dims: Dim, dtype: str = "float32") -> TensorType:
    return TensorType(Shape(dims), dtype)


def classes(op, *inputs: TensorType) -> list[str]:
    out = op.infer(*inputs)
    return [c.op_class.removeprefix("kernel.") for c in calls(op, inputs, (out,), frozenset())]


@pytest.mark.parametrize(
    ("op", "inputs", "found"),
    [
        (Binary("add"), (tensor(A, B), tensor(A, B)), ["binary.same.add"]),
        (Binary("add"), (tensor(A, B), tensor(B)), ["binary.row.add"]),
        (Binary("add"), (tensor(A, B), tensor(A)), ["binary.column.add"]),
        (Binary("add"), (tensor(A, B, C), tensor(B)), ["binary.general.add"]),
        (Scale(2.0), (tensor(A, B),), ["binary.same.mul"]),
        (Binary("add"), (tensor(), tensor()), []),
        (Reduce("sum", ("b",)), (tensor(A, B),), ["reduce.inner"]),
        (Reduce("sum", ("a",)), (tensor(A, B),), ["reduce.outer"]),
        (Reduce("sum", ("a", "c")), (tensor(A, B, C),), ["reduce.mixed"]),
        (Softmax("b"), (tensor(A, B),), ["softmax"]),
        (Where(), (tensor(B, dtype="bool"), tensor(A, B), tensor()), ["where.row"]),
        (Where(), (tensor(A, B, dtype="bool"), tensor(A, B), tensor()), ["where.scalar"]),
        (Einsum(Shape([A, C])), (tensor(A, B), tensor(B, C)), ["matmul"]),
        (Einsum(Shape([A, B])), (tensor(A, B), tensor(B)), ["binary.row.mul"]),
    ],
)
def test_classes(op, inputs, found):
    assert classes(op, *inputs) == found


def test_a_softmax_along_another_dimension_is_made_of_parts():
    assert classes(Softmax("a"), tensor(A, B)) == [
        "reduce.outer", "binary.row.sub", "unary.exp", "reduce.outer", "binary.row.div",
    ]  # fmt: skip


def test_a_batched_product_has_its_own_class_and_flops():
    x, y = tensor(A, B, C), TensorType(Shape([A, C, Dim("d", 2)]), "float32")
    (call,) = calls(Einsum(Shape([A, B, Dim("d", 2)])), (x, y), (tensor(A, B, Dim("d", 2)),), frozenset())
    assert call.op_class == "kernel.batch"
    assert call.flops == 2 * 8 * 16 * 4 * 2
    assert call.bytes == 4 * (8 * 16 * 4 + 8 * 4 * 2 + 8 * 16 * 2)


def test_only_the_last_call_makes_the_output():
    op = Normalize("b", 1e-6, True)
    found = calls(op, (tensor(A, B),), (tensor(A, B),), frozenset())
    assert len(found) > 5
    assert [c.final for c in found] == [False] * (len(found) - 1) + [True]


def seconds(**curves: float):
    """Constant curves by class."""
    table = {name.replace("_", "."): (lambda amount, v=v: v * amount) for name, v in curves.items()}
    return table.get


def test_a_class_without_a_curve_has_its_prefix_s():
    call = Call("kernel.unary.tanh", "float32", 10.0, made=5.0, final=False)
    assert call_seconds(call, seconds(kernel=1.0)) == 10.0
    assert call_seconds(call, seconds(kernel=1.0, kernel_unary=2.0)) == 20.0
    assert call_seconds(call, seconds(kernel_unary=2.0, kernel_unary_tanh=3.0)) == 30.0
    with pytest.raises(KeyError, match="tanh"):
        call_seconds(call, seconds(kernel_binary=1.0))


def test_only_what_stays_needs_fresh_memory():
    curve = seconds(kernel=1.0, kernel_fresh=1.0)
    call = Call("kernel.unary", "float32", 10.0, made=5.0, final=True)
    assert call_seconds(call, curve, stays=True) == 15.0
    assert call_seconds(call, curve, stays=False) == 10.0
    inner = Call("kernel.unary", "float32", 10.0, made=5.0, final=False)
    assert call_seconds(inner, curve, stays=True) == 10.0


def test_a_product_pays_flops_operands_and_result():
    curve = seconds(kernel_matmul=1.0, kernel_matmul_operands=10.0, kernel_matmul_result=100.0)
    call = Call("kernel.matmul", "float32", 7.0, flops=3.0, made=2.0, final=False)
    assert call_seconds(call, curve) == 3.0 + 50.0 + 200.0


def test_an_array_function_that_is_not_known_is_said():
    class Odd(Scale):
        def kernel(self, k, at, *slices):
            return k.nothing_like_it(slices[0])

    with pytest.raises(NoArrayFunctionError, match="nothing_like_it"):
        calls(Odd(2.0), (tensor(A),), (tensor(A),), frozenset())
