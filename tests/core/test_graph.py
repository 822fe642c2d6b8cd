"""Building graphs: structure, scopes, loops, and what is said about mistakes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import mesh_tf_core as mtf
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ops.binary import Binary
from mesh_tf_core.ops.unary import Unary
from mesh_tf_core.optimizers import by_name

A, B, L = mtf.Dim("a", 4), mtf.Dim("b", 6), mtf.Dim("layers", 3)


@pytest.fixture
def g() -> mtf.Graph:
    return mtf.Graph("g")


def test_every_change_ends_what_is_remembered(g: mtf.Graph) -> None:
    made: list[int] = []

    def remembered() -> bool:
        """Whether it was worked out before."""
        count = len(made)
        assert g.remembered("count", lambda: made.append(0) or g.version) == g.version
        return len(made) == count

    x = g.input("x", [A], "float32")
    changes: list[Callable[[], Any]] = [
        lambda: x * 2.0,
        lambda: g.variable("w", [A], mtf.ONES),
        lambda: g.declare(Variable("v", x.shape, "float32", mtf.ZEROS)),
        lambda: g.assign(g.lookup("w"), x),
        lambda: g.deliver([(x, "w")]),
        lambda: mtf.scan(lambda c: c + 1.0, x, L),
        g.changed,
    ]
    for change in changes:
        remembered()
        assert remembered()
        change()
        assert not remembered()


def test_a_copy_of_a_graph_remembers_for_itself(g: mtf.Graph) -> None:
    g.input("x", [A], "float32")
    found = g.remembered("list", list)
    twin = copy.deepcopy(g)
    assert twin.remembered("list", list) is not found and g.remembered("list", list) is found


def test_a_model_follows_its_graph(g: mtf.Graph) -> None:
    """Its fingerprint, and its steps in parts, are those of the graph as it is now."""
    w, x = g.variable("w", [A], mtf.ONES), g.input("x", [B, A], "float32")
    model = mtf.Model(mtf.reduce_mean(x * w))
    first, parts = model.fingerprint, model.training_step(2)
    assert (model.fingerprint, model.training_step(2)) == (first, parts)
    seen = g.variable("seen", [A], mtf.ZEROS, trainable=False)
    g.assign(g.lookup("seen"), seen + mtf.reduce_max(x, B))
    assert model.fingerprint != first
    with pytest.raises(
        mtf.UserError,
        match="the value assigned to variable 'seen' is not a sum over the microbatches, because of reduce",
    ):
        model.training_step(2)


def test_inputs_and_variables(g: mtf.Graph) -> None:
    x = g.input("x", [A], "float32")
    w = g.variable("w", [A], mtf.ONES, activation_dtype="bfloat16")
    assert (str(x.type), str(w.type), g.lookup("w").dtype) == ("float32[a:4]", "bfloat16[a:4]", "float32")
    with pytest.raises(mtf.UserError, match="input 'x' is declared twice"):
        g.input("x", [A])
    with pytest.raises(mtf.UserError, match="variable 'w' already exists; choose another name, use the"):
        g.variable("w", [B], mtf.ONES)
    with pytest.raises(mtf.UserError, match="has no variable 'v'; known: w"):
        g.lookup("v")
    with pytest.raises(mtf.UserError, match="dtype 'float' is not supported"):
        g.variable("u", [B], mtf.ONES, dtype="float")


def test_scopes_name_variables(g: mtf.Graph) -> None:
    with g.scope("block"), g.scope("dense"):
        y = g.variable("w", [A], mtf.ONES) * 2.0
    assert "block/dense/w" in g.variables
    assert g.producer[y.id].scope == "block/dense"


def test_assign_needs_the_variables_type(g: mtf.Graph) -> None:
    w = g.variable("w", [A], mtf.ONES)
    with pytest.raises(
        mtf.UserError, match="assign to variable 'w': the value must have the variable's type"
    ):
        g.assign(g.lookup("w"), w.cast("int32"))


def test_assign_inside_a_loop(g: mtf.Graph) -> None:
    w = g.variable("w", [A], mtf.ONES)

    def body(x: mtf.Tensor) -> mtf.Tensor:
        g.assign(g.lookup("w"), x)
        return x

    with pytest.raises(mtf.UserError, match=rf"found float32\[a:4\] inside a loop over {L}"):
        mtf.scan(body, w, L)


def test_tensors_of_another_graph(g: mtf.Graph) -> None:
    x, y = g.input("x", [A], "float32"), mtf.Graph("other").input("y", [A], "float32")
    with pytest.raises(mtf.UserError, match="belongs to graph 'other', not to"):
        mtf.einsum([x, y], [A])
    with pytest.raises(mtf.UserError, match="expected a tensor, found int 3"):
        g.apply(Binary("add"), x, 3)  # type: ignore[arg-type]


def test_a_tensor_has_no_value(g: mtf.Graph) -> None:
    x = g.input("x", [A], "float32")
    with pytest.raises(mtf.UserError, match=r"has no value while the model is being built; use mtf.where"):
        assert x > 0.0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda x, y: x + y, r"a.* has size 4 in one operand and 5 in another"),
        (lambda x, y: x + x.cast("int32"), r"add of float32\[a:4\], int32\[a:4\]: operands have dtypes"),
        (
            lambda x, y: mtf.einsum([x], [B]),
            r"einsum of float32\[a:4\]: no operand has the output dimension b:6",
        ),
        (lambda x, y: mtf.einsum([], []), "einsum: found no operands; pass at least one tensor"),
        (
            lambda x, y: mtf.broadcast(x, [B]),
            "add it to the target, or reduce x over it",
        ),
        (lambda x, y: mtf.reduce_sum(x, "c"), "has no dimension 'c'"),
        (lambda x, y: mtf.reduce_any(x), "reduce_any and reduce_all need a bool tensor, all other"),
        (lambda x, y: x & x, "and of .*: both operands must be bool"),
        (lambda x, y: ~x, "not: the tensor must be bool"),
        (lambda x, y: mtf.where(x, x, x), "the condition must be bool; compare or cast it first"),
        (lambda x, y: mtf.where(x > 0.0, 1.0, 2.0), "where: x or y must be a tensor, found two numbers"),
        (
            lambda x, y: mtf.reshape(x, [B]),
            "both shapes must have the same number of elements",
        ),
        (lambda x, y: mtf.transpose(x, [A, B]), "both must have the same dimensions"),
        (lambda x, y: mtf.slice_dim(x, "a", 3, 2), "must select at least one element and stay within the"),
        (lambda x, y: mtf.pad(x, "a", -1, 2), "and after=2 must both be at least 0"),
        (lambda x, y: mtf.concat([x, x.cast("int32")], "a"), "operands have dtypes float32 and int32"),
        (
            lambda x, y: mtf.concat([x, mtf.rename(x, a="c")], "a"),
            "all other dimensions must be the same in the same order",
        ),
        (lambda x, y: mtf.gather(x, x, "a"), "the indices must be int32 or int64, found"),
        (
            lambda x, y: mtf.gather(x, x.cast("int32"), "a"),
            "both the table and the ids have dimension 'a'; rename",
        ),
        (
            lambda x, y: mtf.scatter_add(x, x.cast("int32"), A),
            "both the table and the ids have dimension 'a'",
        ),
        (
            lambda x, y: mtf.scatter_add(x, y.cast("int32"), B),
            "the first dimensions of the rows must be the ids' dimensions",
        ),
        (lambda x, y: mtf.pick(x, y.cast("int32"), "a"), "the ids must have the dimensions of x except"),
        (lambda x, y: mtf.dropout(x, 1.0), "dropout: rate must be at least 0 and less than 1"),
        (
            lambda x, y: mtf.softmax(x.cast("int32"), "a"),
            "softmax of.*the tensor must have a float dtype; cast it first, e.g. with",
        ),
        (lambda x, y: mtf.add_n([x, mtf.rename(x, a="c")]), "all operands must have the same dimensions"),
        (
            lambda x, y: x.graph.apply(Unary("exq"), x),
            "unknown element-wise function 'exq'; did you mean 'exp'",
        ),
        (
            lambda x, y: x.graph.apply(Binary("subb"), x, x),
            "unknown element-wise function 'subb'; did you mean 'sub'",
        ),
    ],
)
def test_operand_errors(g: mtf.Graph, make: Any, match: str) -> None:
    x = g.input("x", [A], "float32")
    y = g.input("y", [mtf.Dim("a", 5)], "float32")
    with pytest.raises(mtf.UserError, match=match):
        make(x, y)


def test_scan_needs_the_same_state_back(g: mtf.Graph) -> None:
    x = g.input("x", [A], "float32")
    with pytest.raises(
        mtf.UserError, match=r"the body must return the types of its arguments, float32\[a:4\]; found int32"
    ):
        mtf.scan(lambda h: h.cast("int32"), x, L)
    with pytest.raises(
        mtf.UserError, match="scan: found neither a tensor to carry nor xs; pass at least one"
    ):
        mtf.scan(lambda h: h, [], L)
    with pytest.raises(mtf.UserError, match="has no dimension 'layers'"):
        mtf.scan(lambda h, u: h, x, L, [x])


def test_a_loops_tensors_stay_inside(g: mtf.Graph) -> None:
    x, kept = g.input("x", [A], "float32"), []

    def body(h: mtf.Tensor) -> mtf.Tensor:
        kept.append(h * 2.0)
        return h

    mtf.scan(body, x, L)
    with pytest.raises(mtf.UserError, match="was computed inside a loop body and is not visible outside"):
        kept[0] + 1.0


def test_scan_shapes(g: mtf.Graph) -> None:
    x, xs = g.input("x", [A], "float32"), g.input("xs", [L, A], "float32")

    def body(state: Any, u: mtf.Tensor) -> Any:
        h, n = state
        w = g.variable("w", [A, B], mtf.ONES)
        h = mtf.rename(mtf.slice_dim(mtf.einsum([h, w], [B]), "b", 0, 4), b="a") + u
        return (h, n + 1), [mtf.reduce_sum(h)]

    (h, n), (sums,) = mtf.scan(body, [x, g.step()], L, [xs])
    assert [str(t.type) for t in (h, n, sums)] == ["float32[a:4]", "int32[]", "float32[layers:3]"]
    assert str(g.lookup("w").shape) == "layers:3 a:4 b:6" and g.lookup("w").stacked == 1


def test_depth_costs_nothing() -> None:
    def build(depth: int) -> mtf.Model:
        g = mtf.Graph()
        x = g.input("x", [A], "float32")
        square = [A, mtf.Dim("c", 4)]

        def layer(h: mtf.Tensor) -> mtf.Tensor:
            return mtf.rename(mtf.tanh(mtf.einsum([h, g.variable("w", square, mtf.ONES)], square[1:])), c="a")

        return mtf.Model(mtf.reduce_sum(mtf.scan(layer, x, mtf.Dim("layers", depth))))

    def size(depth: int) -> tuple[int, int]:
        model = build(depth)
        program = model.lower(mtf.Mesh("x:2"), mtf.Layout("a:x"))
        return len(list(model.step_graph.walk())), len(list(program.walk()))

    assert size(6) == size(96)


def test_walk_multiplies_loops(g: mtf.Graph) -> None:
    x = g.input("x", [A], "float32")
    mtf.scan(lambda h: mtf.scan(lambda s: mtf.tanh(s), h, mtf.Dim("m", 5)), x, L)
    assert {node.op.name: times for node, times in g.walk()} == {"feed": 1, "scan": 3, "tanh": 15}


def test_models_need_a_scalar_loss(g: mtf.Graph) -> None:
    x = g.input("x", [A], "float32")
    with pytest.raises(mtf.UserError, match="Model: loss must be a scalar tensor, found"):
        mtf.Model(x)
    g.variable("unused", [A], mtf.ONES)
    with pytest.raises(mtf.UserError, match="the loss does not depend on the variables unused; remove them"):
        _ = mtf.Model(mtf.reduce_sum(x)).step_graph


def test_optimizers_by_name() -> None:
    assert by_name("adam", 0.5) == mtf.Adam(0.5)
    with pytest.raises(mtf.UserError, match="unknown optimizer 'adm'; did you mean 'adam'"):
        by_name("adm", 0.5)
    with pytest.raises(mtf.UserError, match="SGD: learning_rate must be positive and finite, found 0"):
        mtf.SGD(0)


def test_fingerprint_follows_the_model() -> None:
    def build(factor: float) -> mtf.Model:
        g = mtf.Graph()
        return mtf.Model(mtf.reduce_sum(g.variable("w", [A], mtf.ONES) * factor))

    assert build(2.0).fingerprint == build(2.0).fingerprint != build(3.0).fingerprint
