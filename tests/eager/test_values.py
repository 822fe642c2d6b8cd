"""Eager tensors: what they show, Python control flow, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.eager import EagerStep, EagerTensor

B, D, F = mtf.Dim("batch", 4), mtf.Dim("d", 3), mtf.Dim("d_ff", 4)
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def new(layout: str = "batch:data;d_ff:model", engine: str = "lockstep") -> EagerStep:
    return mtf.Eager("data:2;model:2", layout, engine).step()


def test_print_shows_dimensions_splits_and_values() -> None:
    x = new().constant(X, [B, D])
    assert str(x) == (
        "float32[batch:4/data d:3] on mesh data:2;model:2\n"
        "[[ 0.  1.  2.]\n [ 3.  4.  5.]\n [ 6.  7.  8.]\n [ 9. 10. 11.]]"
    )
    assert repr(x) == "Tensor(%0 float32[batch:4/data d:3])"
    assert f"{mtf.reduce_sum(x)}" == "float32[] 66"


def test_a_large_tensor_is_summed_up_and_shows_what_is_not_finite() -> None:
    many = np.linspace(-1, 1, 100, dtype=np.float32)
    g = new()
    text = str(g.constant(many, [mtf.Dim("n", 100)]))
    assert text.startswith("float32[n:100] on mesh data:2;model:2, min -1, mean ")
    assert text.endswith(", max 1\n[-1.     -0.9798 ...  0.9798  1.    ]")
    many[3] = np.nan
    assert ", max 1, 1 of 100 not finite\n" in str(g.constant(many, [mtf.Dim("n", 100)]))
    none = np.full(100, np.nan, np.float32)
    assert "model:2, 100 of 100 not finite\n" in str(g.constant(none, [mtf.Dim("n", 100)]))


@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_shards_are_the_devices_pieces(engine: str) -> None:
    g = new(engine=engine)
    y = mtf.einsum([g.constant(X, [B, D]), g.constant(np.eye(3, 4, dtype=np.float32), [D, F])], [B, F])
    whole = np.concatenate([X, np.zeros((4, 1), np.float32)], 1)
    shards = y.shards()
    assert list(shards) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for (row, column), piece in shards.items():
        np.testing.assert_array_equal(piece, whole[2 * row : 2 * row + 2, 2 * column : 2 * column + 2])
    np.testing.assert_array_equal(y.numpy(), whole)
    assert y.layout == mtf.Layout("batch:data;d_ff:model")
    assert mtf.reduce_sum(y, [F]).layout == mtf.Layout("batch:data")


def test_shards_on_tensorflows_devices() -> None:
    x = new(engine="local").constant(X, [B, D])
    assert x.pieces is not None
    for pieces in (x.pieces, (x + 1.0).pieces):
        assert [p.device[-5:] for p in pieces] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


def test_python_control_flow_follows_values() -> None:
    x = new().constant([1.0, 2.0, 3.0, 4.0], [B])
    steps = 0
    while mtf.reduce_max(x) > 0.5:
        x = x * 0.5
        steps += 1
    assert steps == 3
    assert float(mtf.reduce_sum(x)) == 1.25
    assert int(mtf.reduce_sum(x)) == 1
    assert [v for v in range(2) if mtf.reduce_sum(x) > float(v)] == [0, 1]


def test_numbers_in_lists_are_what_models_use() -> None:
    g = new()
    values = (1.5, 2, True, np.float64(1))
    assert [g.constant(v).dtype for v in values] == [
        "float32",
        "int32",
        "bool",
        "float64",
    ]
    assert g.constant([1, 2, 3, 4], [B], "bfloat16").numpy().dtype == "bfloat16"


def test_values_of_another_step_are_taken_explicitly() -> None:
    first, second = new(), new("batch:model")
    x = first.constant(X, [B, D])
    with pytest.raises(
        mtf.UserError, match=r"add: Tensor\(%0 .*\) belongs to another mtf.Eager object; .*step.constant\(x\)"
    ):
        second.constant(X, [B, D]) + x
    y = second.constant(x)
    assert y.layout == mtf.Layout("batch:model")
    np.testing.assert_array_equal(y.numpy(), X)


def test_another_step_of_the_same_context() -> None:
    run = mtf.Eager("data:2", "batch:data", "lockstep")
    with run.step() as g:
        x = g.constant(X, [B, D])
    with run.step() as h:
        with pytest.raises(mtf.UserError, match="belongs to another step; copy its value"):
            h.constant(X, [B, D]) + x
        with pytest.raises(mtf.UserError, match="add: this eager step has"):
            x + h.constant(X, [B, D])
        with pytest.raises(mtf.UserError, match="feed: this eager step has"):
            g.constant(X, [B, D])
        assert float(mtf.reduce_sum(h.constant(x) + 1.0)) == 78
    assert float(x.numpy().sum()) == 66


def test_arrays_are_no_operands_but_their_scalars_are() -> None:
    x = new().constant(X, [B, D])
    for use in (lambda: x * X, lambda: X * x):
        with pytest.raises(mtf.UserError, match=r"mul: expected a tensor, found ndarray; .*step.constant"):
            use()
    for y in (x * np.float32(2), np.int64(2) * x):
        np.testing.assert_array_equal(y.numpy(), 2 * X)


def test_a_tensor_that_is_being_traced_cannot_be_mixed_in() -> None:
    symbolic = mtf.Graph("plain").input("x", [B, D], "float32")
    with pytest.raises(mtf.UserError, match="belongs to graph 'plain', whose tensors have no values while"):
        new().constant(X, [B, D]) + symbolic
    with pytest.raises(mtf.UserError, match="belongs to graph 'eager step', not to 'plain'"):
        symbolic + new().constant(X, [B, D])


@pytest.mark.parametrize("use", [float, int, lambda t: t.numpy(), lambda t: t.shards()])
def test_a_traced_tensor_has_no_value(use: Any) -> None:
    x = mtf.Graph().input("x", [], "float32")
    with pytest.raises(mtf.UserError, match=r"has no value while the model is being built; .*mtf.Eager"):
        use(x)


def test_a_value_inside_a_loop_that_is_built() -> None:
    def body(x: mtf.Tensor) -> mtf.Tensor:
        assert float(mtf.reduce_sum(x)) > 0
        return x

    run = mtf.Eager("data:2", "batch:data", "lockstep")
    with pytest.raises(mtf.UserError, match="the bodies of loops and branches are built before they run"):
        mtf.scan(body, run.step(unroll=False).constant(X, [B, D]), mtf.Dim("layers", 2))
    mtf.scan(body, run.step().constant(X, [B, D]), mtf.Dim("layers", 2))


def test_many_elements_are_no_truth_value() -> None:
    x = new().constant(X, [B, D])
    with pytest.raises(mtf.UserError, match=r"has 12 elements, .* reduce it first \(mtf.reduce_any"):
        bool(x > 3.0)


def test_an_illegal_layout_names_the_operation_and_the_line() -> None:
    g = new("batch:data;d_ff:data")
    w = g.constant(np.zeros((3, 4), np.float32), [D, F])
    x = g.constant(X, [B, D])
    before = len(g.nodes)
    with (
        pytest.raises(
            mtf.LayoutError,
            match=r"einsum in 'ff' at .*test_values.py:\d+: .* both 'batch' and 'd_ff'",
        ),
        g.scope("ff"),
    ):
        mtf.einsum([x, w], [B, F])
    assert len(g.nodes) == before
    assert float(mtf.reduce_sum(x + 1.0)) == 78


def test_a_size_that_devices_do_not_divide() -> None:
    with pytest.raises(
        mtf.LayoutError,
        match=r"feed at.*test_values.py:.*has size 3, which is not divisible by the 2 devices of",
    ):
        new("d:model").constant(X, [B, D])


def test_a_loops_own_dimension_cannot_be_split() -> None:
    for unroll in (False, True):
        g = mtf.Eager("data:2", "layers:data", "lockstep").step(unroll=unroll)
        with pytest.raises(
            mtf.LayoutError,
            match=r"scan at.*test_values.py:.*, because its iterations .* run one after another",
        ):
            mtf.scan(lambda x: x + 1.0, g.constant(X, [B, D]), mtf.Dim("layers", 2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: mtf.Eager("data:2", "batch:model"), ", but mesh data:2 has no axis of that name"),
        (
            lambda: mtf.Eager("data:2", engine="eager"),
            r"unknown eager engine 'eager'; known: auto, local, lockstep",
        ),
        (lambda: new().constant(X, [B]), "need an array of shape"),
        (lambda: new().constant(np.array(["a"]), [mtf.Dim("n", 1)]), r"dtype '.*' is not supported"),
        (lambda: new().input("x", [B]), "the batch has no array for the model's input"),
    ],
)
def test_wrong_input(make: Any, text: str) -> None:
    with pytest.raises(mtf.UserError, match=text):
        make()


def test_communication_is_counted() -> None:
    g = new()
    x = g.constant(X, [B, D])
    assert g.communication_bytes == {"data": 0, "model": 0}
    assert isinstance(mtf.reduce_sum(x), EagerTensor)
    assert g.communication_bytes == {"data": 4, "model": 0}


def test_only_so_many_lowered_operations_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_tf_core.eager.machine.KEPT", 3)
    g = new()
    x = g.constant(X, [B, D])
    for factor in range(2, 9):
        np.testing.assert_array_equal((x * factor).numpy(), factor * X)
    assert len(g.machine._known) <= 3
