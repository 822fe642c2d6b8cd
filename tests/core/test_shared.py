"""Variables that iterations share, and values that every iteration stores."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.lower import Options
from tests.layers.helper import check_layouts, run

X = ("batch:4 d_model:8", np.random.default_rng(0).normal(size=(4, 8)))
D = mtf.Dim("d_model", 8)
LAYOUTS = [("x:2;y:2", "batch:x;d_model:y"), ("x:2;y:2", "batch:x+y")]


def step(x: mtf.Tensor) -> mtf.Tensor:
    inner = mtf.rename(x, d_model="inner")
    return mtf.tanh(layers.Dense((D,), ("inner",))(inner)) + x


def test_a_loop_applies_one_block_again_and_again() -> None:
    """The same numbers as the block written out three times with one weight, and the same gradient."""

    def looped(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        with g.sharing():
            return mtf.scan(step, x, mtf.Dim("steps", 3))

    def written_out(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        with g.sharing():
            return step(step(step(x)))

    dense = check_layouts(looped, {"x": X}, LAYOUTS)
    assert dense.variables["dense/weight"].shape == (8, 8)
    want = run(written_out, {"x": X})
    np.testing.assert_allclose(dense.out, want.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dense.after["dense/weight"], want.after["dense/weight"], rtol=1e-5, atol=1e-6)
    y, w = X[1], dense.variables["dense/weight"]
    for _ in range(3):
        y = np.tanh(y @ w) + y
    np.testing.assert_allclose(dense.out, y, rtol=1e-5, atol=1e-6)


def test_shared_inside_a_layer_of_its_own() -> None:
    """Two layers with a weight each, which both apply twice."""

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        with x.graph.sharing():
            return mtf.scan(step, x, mtf.Dim("steps", 2))

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return mtf.scan(layer, x, mtf.Dim("layers", 2))

    dense = check_layouts(build, {"x": X}, LAYOUTS)
    y, w = X[1], dense.variables["dense/weight"]
    assert w.shape == (2, 8, 8)
    for i in (0, 0, 1, 1):
        y = np.tanh(y @ w[i]) + y
    np.testing.assert_allclose(dense.out, y, rtol=1e-5, atol=1e-6)


def test_shared_under_one_name_needs_one_type() -> None:
    g = mtf.Graph()
    with g.sharing():
        a, b = (g.variable("w", [D], mtf.ONES) for _ in range(2))
        assert a.id == b.id
        with pytest.raises(mtf.UserError, match="is shared, but was made with type float32"):
            g.variable("w", [mtf.Dim("d_model", 4)], mtf.ONES)
    with pytest.raises(mtf.UserError, match=r"already exists; .* make both inside graph.sharing"):
        g.variable("w", [D], mtf.ONES)


def test_every_iteration_stores_its_value() -> None:
    """Layer i of a stack keeps the mean of what it was given; nested loops have a value per pair."""

    def inner(x: mtf.Tensor) -> mtf.Tensor:
        g = x.graph
        g.variable("seen", [D], mtf.ZEROS, trainable=False)
        g.assign(g.lookup("seen"), mtf.reduce_mean(x, "batch"))
        return x * 2.0 + g.variable("bias", [D], mtf.ZEROS)

    def outer(x: mtf.Tensor) -> mtf.Tensor:
        return mtf.scan(inner, x, mtf.Dim("inner_layers", 2))

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return mtf.scan(outer, x, mtf.Dim("layers", 2))

    dense = check_layouts(build, {"x": X}, LAYOUTS)
    want = X[1].mean(0) * np.array([[1.0, 2.0], [4.0, 8.0]])[..., None]
    np.testing.assert_allclose(dense.after["seen"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["", "batch:x"])
def test_assignments_with_microbatches(layout: str) -> None:
    """Once per step, from sums over the whole batch: at the top, in a stack, and what no batch is in."""

    def model() -> mtf.Model:
        g = mtf.Graph()
        x = g.input("x", [mtf.Dim("batch", 4), D], "float32")
        count = g.variable("count", [], mtf.ZEROS, trainable=False)
        g.assign(g.lookup("count"), count + 1.0)

        def layer(x: mtf.Tensor) -> mtf.Tensor:
            seen = g.variable("seen", [D], mtf.ZEROS, trainable=False)
            g.assign(g.lookup("seen"), seen * 0.5 + mtf.reduce_mean(x, "batch"))
            return x * g.variable("w", [D], mtf.ONES) + mtf.sign(seen) * 0.1

        y = mtf.scan(layer, x, mtf.Dim("layers", 2))
        most = g.variable("squares", [D], mtf.ZEROS, trainable=False)
        g.assign(g.lookup("squares"), mtf.sqrt(mtf.reduce_sum(mtf.square(y), "batch")) + most)
        return mtf.Model(mtf.reduce_mean(mtf.square(y)))

    batches = [{"x": np.random.default_rng(n).normal(size=(4, D.size)).astype(np.float32)} for n in range(3)]
    runs = [mtf.Trainer(model(), "x:2", layout, Options(microbatches=n), "lockstep") for n in (1, 2)]
    for batch in batches:
        one, two = (run.step(batch)["loss"] for run in runs)
        assert two == pytest.approx(one, rel=1e-5)
    for name in ("count", "seen", "squares", "w"):
        whole, parts = (run.engine.read(name) for run in runs)
        np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6, err_msg=name)
    assert runs[1].engine.read("count") == 3


def test_an_assignment_that_parts_cannot_make_is_refused() -> None:
    g = mtf.Graph()
    x = g.input("x", [mtf.Dim("batch", 4), D], "float32")
    g.variable("seen", [D], mtf.ZEROS, trainable=False)
    g.assign(g.lookup("seen"), mtf.reduce_max(x, "batch"))
    model = mtf.Model(mtf.reduce_sum(x * g.variable("w", [D], mtf.ONES)))
    with pytest.raises(
        mtf.UserError,
        match="the value assigned to variable 'seen' is not a sum over the microbatches, because of",
    ):
        model.training_step(2)


def test_frozen_variables_are_stored_only() -> None:
    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        with g.frozen():
            teacher = layers.LayerNorm(name="teacher")(x)
        return teacher * layers.LayerNorm(name="student")(x)

    got = run(build, {"x": X})
    np.testing.assert_array_equal(got.after["teacher/scale"], got.variables["teacher/scale"])
    assert np.abs(got.after["student/scale"] - got.variables["student/scale"]).max() > 1e-3


def test_initial_values_are_changed_from_inside_to_outside() -> None:
    g = mtf.Graph()

    def doubled(name: str, initial: mtf.Initializer) -> mtf.Initializer:
        assert isinstance(initial, mtf.Normal)
        return mtf.Normal(initial.stddev * 2)

    def ones(name: str, initial: mtf.Initializer) -> mtf.Initializer:
        return mtf.ONES if name == "norm/w" else initial

    with g.initialized(ones), g.scope("norm"):
        g.variable("w", [D], mtf.Normal(0.5))
        with g.initialized(doubled):
            g.variable("v", [D], mtf.Normal(0.5))
    g.variable("u", [D], mtf.Normal(0.5))
    found = [g.variables[n].initializer for n in ("norm/w", "norm/v", "u")]
    assert found == [mtf.ONES, mtf.Normal(1.0), mtf.Normal(0.5)]


def test_lookup_below_the_scope_first() -> None:
    g = mtf.Graph()
    g.variable("w", [], mtf.ONES)
    with g.scope("block"):
        assert g.lookup("w").name == "w"
        g.variable("w", [D], mtf.ONES)
        assert g.lookup("w").name == "block/w"
