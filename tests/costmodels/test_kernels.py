"""Counting array functions: what operations are made of, and what their prices add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from costmodels.kernels.array_functions import calls
from costmodels.kernels.calls import PARTS, Call, NoArrayFunctionError, call_seconds
from mesh_tf_core import Dim, Shape
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ops.basic import Scale
from mesh_tf_core.ops.binary import Binary, Where
from mesh_tf_core.ops.conv import Conv
from mesh_tf_core.ops.convgrid import Grid
from mesh_tf_core.ops.einsum import Einsum
from mesh_tf_core.ops.grouped import GroupedProduct
from mesh_tf_core.ops.norm import Normalize
from mesh_tf_core.ops.reduce import Reduce
from mesh_tf_core.ops.shape import SliceDim
from mesh_tf_core.ops.softmax import Softmax
from mesh_tf_core.ops.windows import Window

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
        (Binary("add"), (tensor(), tensor()), ["scalar"]),
        (Reduce("sum", ("b",)), (tensor(A, B),), ["reduce.inner"]),
        (Reduce("sum", ("a",)), (tensor(A, B),), ["reduce.outer"]),
        (Reduce("sum", ("a", "c")), (tensor(A, B, C),), ["reduce.mixed"]),
        (Reduce("sum", ("b",)), (tensor(A, B, C),), ["reduce.middle"]),
        (Reduce("sum", ("b", "d")), (tensor(A, B, C, Dim("d", 3)),), ["reduce.apart"]),
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
    op = Normalize(("b",), 1e-6, True)
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


def test_a_product_pays_flops_and_its_parts():
    parts = {f"kernel_matmul_{part}": 10.0 ** (1 + i) for i, part in enumerate(PARTS)}
    call = Call("kernel.matmul", "float32", 7.0, flops=3.0, made=2.0, parts=(5.0, 6.0, 2.0, 1.0, 4.0))
    call = replace(call, final=False)
    expected = 3.0 + 50.0 + 600.0 + 2000.0 + 10000.0 + 400000.0
    assert call_seconds(call, seconds(kernel_matmul=1.0, **parts)) == expected
    assert call_seconds(call, seconds(kernel_matmul=1.0)) == 3.0, "a profile of before has no such curves"


def parts_of(out: Sequence[str], *terms: str, **sizes: int) -> tuple[float, ...]:
    dims = {name: Dim(name, n) for name, n in sizes.items()}
    inputs = [TensorType(Shape([dims[n] for n in term]), "float32") for term in terms]
    op = Einsum(Shape([dims[n] for n in out]))
    (found,) = calls(op, inputs, (op.infer(*inputs),), frozenset())
    return found.parts


def test_a_factor_that_lies_transposed_is_read_along_columns():
    """Forward, gradient of the activations, gradient of the weights: m x k x n."""
    small = {"m": 64, "k": 32, "n": 16}
    m, k, n = (4.0 * x for x in small.values())
    assert parts_of("mn", "mk", "kn", **small) == (m * 32, k * 16, m * 16, 0.0, 0.0)
    assert parts_of("mn", "mk", "nk", **small) == (m * 32, k * 16, m * 16, n * 32, 0.0)
    assert parts_of("kn", "mk", "mn", **small) == (k * 64, m * 16, k * 16, k * 64, 0.0)
    batched = (2 * m * 32, 2 * k * 16, 2 * m * 16, 2 * n * 32, 0.0)
    assert parts_of("zmn", "zmk", "znk", z=2, **small) == batched


def test_long_rows_read_along_columns_are_far_apart():
    """Rows of 2 KB; what lies as it should has no columns to read, however long its rows."""
    assert parts_of("mn", "mk", "nk", m=4, k=511, n=8)[3:] == (4.0 * 511 * 8, 0.0)
    assert parts_of("mn", "mk", "nk", m=4, k=512, n=8)[3:] == (0.0, 4.0 * 512 * 8)
    assert parts_of("mn", "mk", "kn", m=4, k=8, n=1024)[3:] == (0.0, 0.0)


def test_every_call_pays_a_launch_and_one_of_scalars_nothing_else():
    table = {"kernel.unary": lambda amount: 2.0 * amount, "kernel.launch": lambda amount: 5.0}
    call, scalar = Call("kernel.unary", "float32", 10.0), Call("kernel.scalar", "float32", 8.0)
    assert call_seconds(call, table.get) == 10.0 * 2.0 + 5.0
    assert call_seconds(scalar, table.get) == 5.0
    assert call_seconds(scalar, seconds(kernel_unary=2.0)) == 0.0, "a profile of before has no launches"


def test_a_convolution_packs_its_windows():
    x, w = tensor(B, Dim("y", 10), Dim("x", 11), C), tensor(Dim("v", 3), Dim("u", 5), C, Dim("o", 7))
    op = Conv(Grid((Window("y", 3, 1, 1, 0, 0), Window("x", 5, 2, 1, 0, 0)), ("v", "u"), C.name))
    (found,) = calls(op, (x, w), (op.infer(x, w),), frozenset())
    places, taken = B.size * 8 * 4, 3 * 5 * C.size
    assert found.op_class == "kernel.matmul.conv"
    assert found.parts == (4.0 * places * taken, 4.0 * taken * 16, 4.0 * places * 7, 0.0, 0.0)


@pytest.mark.parametrize(("made", "counted"), [(2, 16), (16, 16), (17, 32)])
def test_a_convolution_makes_whole_vectors_of_channels(made, counted):
    x, w = tensor(B, Dim("y", 10), C), tensor(Dim("v", 3), C, Dim("o", made))
    op = Conv(Grid((Window("y", 3, 1, 1, 0, 0),), ("v",), C.name))
    (found,) = calls(op, (x, w), (op.infer(x, w),), frozenset())
    assert found.flops == 2.0 * B.size * 8 * 3 * C.size * counted


def test_slices_are_views_or_of_narrow_or_of_long_rows():
    """Of [8, 16, 4] in float32: rows from one on, half of the last axis (8 bytes), half of the middle one."""
    found = []
    for dim, size in (("a", 3), ("c", 2), ("b", 8)):
        op, x = SliceDim(dim, 1, size), tensor(Dim("a", 8), Dim("b", 16), Dim("c", 4))
        found.append([c.op_class for c in calls(op, (x,), (op.infer(x),), frozenset())])
    assert found == [[], ["kernel.copy.narrow"], ["kernel.copy.slice"]]


def test_an_array_function_that_is_not_known_is_said():
    class Odd(Scale):
        def kernel(self, k, at, *slices):
            return k.nothing_like_it(slices[0])

    with pytest.raises(NoArrayFunctionError, match="nothing_like_it"):
        calls(Odd(2.0), (tensor(A),), (tensor(A),), frozenset())


def test_a_device_with_some_of_the_groups_does_their_part_of_all_rows():
    rows, wide, made = Dim("r", 4), Dim("k", 8), Dim("m", 16)
    op = GroupedProduct(Dim("g", 8))
    local = tensor(rows, wide), tensor(Dim("g", 2), wide, made), TensorType(Shape([rows]), "int32")
    found = calls(op, local, (tensor(rows, made),), frozenset("g"))
    assert sum(c.flops for c in found) == op.flops(*local) == 2 * 4 * 8 * 16 / 4
