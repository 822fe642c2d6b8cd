"""Eager steps: variables, gradients, optimizers, loops; staged functions beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.eager import EagerStep

B, D, F, L = mtf.Dim("batch", 4), mtf.Dim("d", 3), mtf.Dim("d_ff", 4), mtf.Dim("layers", 3)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def new(engine: str = "lockstep") -> mtf.Eager:
    return mtf.Eager("data:2;model:2", "batch:data;d_ff:model", engine)


def loss_of(x: mtf.Tensor) -> mtf.Tensor:
    h = mtf.layers.Dense((F,), ("d",), activation="gelu")(x)
    return mtf.reduce_mean(mtf.square(h - 1.0))


def trained(x: mtf.Tensor) -> mtf.Tensor:
    loss = loss_of(x)
    mtf.minimize(loss, mtf.Adam(0.1))
    return loss


def test_variables_keep_their_values_and_are_stored_when_the_step_is_finished() -> None:
    run = new()
    with run.step() as g:
        trained(g.constant(X, [B, D]))
        before = run.read("dense/weight")
        w = g.read(g.lookup("dense/weight"))
        np.testing.assert_array_equal(w.numpy(), before)
    assert abs(run.read("dense/weight") - before).min() > 0.01
    assert sorted(run.variables) == [
        "dense/weight", "dense/weight/adam_m", "dense/weight/adam_v", "step"
    ]  # fmt: skip
    assert run.read("step") == 1
    run.write("dense/weight", before)
    with run.step() as g:
        assert float(loss_of(g.constant(X, [B, D]))) > 0
        np.testing.assert_array_equal(g.read(g.lookup("dense/weight")).numpy(), before)


def test_an_error_leaves_the_variables_as_they_were() -> None:
    run = new()
    with run.step() as g:
        loss_of(g.constant(X, [B, D]))
    before = run.read("dense/weight")
    with pytest.raises(ZeroDivisionError), run.step() as g:
        trained(g.constant(X, [B, D]))
        raise ZeroDivisionError
    np.testing.assert_array_equal(run.read("dense/weight"), before)
    assert "step" in run.variables
    assert run.read("step") == 0


def test_finish_without_with() -> None:
    run = new()
    g = run.step()
    trained(g.constant(X, [B, D]))
    assert run.read("step") == 0
    g.finish()
    assert run.read("step") == 1


def test_gradients_are_values() -> None:
    with new().step() as g:
        x = g.constant(X, [B, D])
        (dx,) = mtf.gradients(mtf.reduce_sum(mtf.square(x)), [x])
        np.testing.assert_allclose(dx.numpy(), 2 * X)
        assert dx.layout == mtf.Layout("batch:data")


@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_eager_staged_and_mixed_training_give_the_same_numbers(engine: str) -> None:
    run, mixed = new(engine), new(engine)
    staged = new(engine)
    step, half = staged.staged(trained), mixed.staged(trained)
    losses = []
    for number in range(4):
        with run.step() as g, staged.step() as h, mixed.step() as m:
            of_mixed = trained if number % 2 else half
            losses.append(
                [
                    float(trained(g.constant(X, [B, D]))),
                    float(step(h.constant(X, [B, D]))),
                    float(of_mixed(m.constant(X, [B, D]))),
                ]
            )
    for one, two, three in losses:
        assert one == pytest.approx(two, rel=1e-6)
        assert one == pytest.approx(three, rel=1e-6)
    assert losses[3][0] < 0.9 * losses[0][0]
    assert step.programs == 1
    for name in run.variables:
        np.testing.assert_allclose(run.read(name), staged.read(name), atol=1e-6)
        np.testing.assert_allclose(run.read(name), mixed.read(name), atol=1e-6)


def test_a_batch_is_read_by_name() -> None:
    def build(g: mtf.Graph) -> mtf.Tensor:
        return loss_of(g.input("x", [B, D], "float32"))

    model = mtf.Model(build(mtf.Graph("dense")))
    trainer = mtf.Trainer(model, "data:2;model:2", "batch:data;d_ff:model", engine="lockstep")
    with new().step({"x": X}) as g:
        assert float(build(g)) == trainer.step({"x": X})["loss"]


def test_two_updates_of_one_variable_are_an_error() -> None:
    run = new()
    step = run.staged(trained)
    g = run.step()
    trained(g.constant(X, [B, D]))
    step(g.constant(X, [B, D]))
    with pytest.raises(
        mtf.UserError,
        match=r"finish: this step and a staged function or another step both assigned dense/weight/adam_m, ",
    ):
        g.finish()
    assert run.read("step") == 1


def test_a_variable_cannot_change_its_type() -> None:
    run = new()
    with run.step() as g:
        g.variable("w", [B], mtf.ZEROS)
    with (
        run.step() as g,
        pytest.raises(
            mtf.UserError,
            match=r"give the new variable another name, or use a new mtf.Eager",
        ),
    ):
        g.variable("w", [D], mtf.ZEROS)
    with pytest.raises(mtf.UserError, match="give an array of the variable's shape"):
        run.write("w", np.zeros(3))
    with pytest.raises(mtf.UserError, match="there is no variable 'v' yet"):
        run.read("v")


# -- loops --


def stacked(g: mtf.Graph, seen: list[float] | None = None) -> mtf.Tensor:
    """A scan whose body has a variable per iteration, random numbers, and an assigned average."""

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        w = g.variable("w", [D], mtf.Normal(1.0))
        average = g.variable("average", [D], mtf.ZEROS, trainable=False)
        y = mtf.dropout(x * w, 0.5)
        g.assign(g.lookup("average"), average + mtf.reduce_mean(y, [B]))
        if seen is not None:
            seen.append(float(mtf.reduce_sum(y)))
        return y + mtf.random_normal(g.random_key(), [D])

    x = mtf.scan(layer, g.input("x", [B, D], "float32"), L)
    return mtf.reduce_sum(mtf.square(mtf.dropout(x, 0.5)))


@pytest.mark.parametrize("unroll", [False, True])
def test_loops_make_the_numbers_of_the_staged_program(unroll: bool) -> None:
    model = mtf.Model(stacked(mtf.Graph("stack")), mtf.SGD(0.1))
    trainer = mtf.Trainer(model, "data:2", "batch:data", engine="lockstep")
    run = mtf.Eager("data:2", "batch:data", "lockstep")
    for _ in range(2):
        seen: list[float] | None = [] if unroll else None
        with run.step({"x": X}, unroll) as g:
            loss = stacked(g, seen)
            mtf.minimize(loss, mtf.SGD(0.1))
        assert float(loss) == pytest.approx(trainer.step({"x": X})["loss"], rel=1e-6)
        assert seen is None or len(seen) == 3
    for name in ("w", "average"):
        np.testing.assert_allclose(run.read(name), trainer.engine.read(name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("limit", [0.0, 40.0])
def test_while_loop_and_cond(unroll: bool, limit: float) -> None:
    def count(g: mtf.Graph) -> dict[str, mtf.Tensor]:
        x = g.input("x", [B, D], "float32") * 0.0 + 1.0
        done = mtf.while_loop(
            lambda n, x: mtf.reduce_sum(x) < limit,
            lambda n, x: (n + 1, x * 2.0 + mtf.random_uniform(g.random_key(), [D])),
            [mtf.reduce_max(g.step()), x],
            max_steps=9,
        )
        chosen = mtf.cond(done[0] > 1, lambda: done[1], lambda: -done[1])
        return {"n": done[0], "x": done[1], "chosen": mtf.dropout(chosen, 0.5)}

    graph = mtf.Graph("count")
    built = mtf.lower(graph, mtf.Mesh("data:2"), mtf.Layout("batch:data"), count(graph))
    from mesh_tf_core.engines import open_engine

    want = open_engine(built, "lockstep").step({"x": X})
    with mtf.Eager("data:2", "batch:data", "lockstep").step({"x": X}, unroll) as g:
        for name, value in count(g).items():
            np.testing.assert_allclose(value.numpy(), want[name], rtol=1e-6)
    assert (want["n"] == 0) == (limit == 0.0)


def test_loops_inside_branches_and_branches_inside_loops() -> None:
    def nested(g: mtf.Graph) -> mtf.Tensor:
        def layer(x: mtf.Tensor) -> mtf.Tensor:
            return mtf.cond(
                mtf.reduce_sum(x) > 0.0, lambda: mtf.scan(lambda y: y * 2.0, x, L), lambda: x + 1.0
            )

        return mtf.scan(layer, g.input("x", [B, D], "float32"), mtf.Dim("outer", 2))

    for unroll in (False, True):
        with mtf.Eager("data:2", "batch:data", "lockstep").step({"x": X + 0.01}, unroll) as g:
            np.testing.assert_allclose(nested(g).numpy(), 64 * (X + 0.01), rtol=1e-6)
        with mtf.Eager("data:2", "batch:data", "lockstep").step({"x": X - 0.01}, unroll) as g:
            np.testing.assert_allclose(nested(g).numpy(), 8 * (X + 0.99), rtol=1e-6)


def test_part_of_a_stack_that_nothing_reads_has_zero_gradient() -> None:
    for unroll in (False, True):
        with mtf.Eager("data:2", "batch:data", "lockstep").step(unroll=unroll) as g:
            xs = g.constant(np.array([1.0, np.inf, 3.0], np.float32), [L])
            _, (ys,) = mtf.scan(lambda s, x: (s, [x]), g.constant(0.0), L, [xs])
            (dx,) = mtf.gradients(mtf.reduce_sum(mtf.slice_dim(ys, L, 0, 1)), [xs])
            np.testing.assert_array_equal(dx.numpy(), [1, 0, 0])


# -- staged functions --


def test_one_program_per_signature() -> None:
    calls: list[Any] = []
    run = new()

    @run.staged
    def scaled(x: mtf.Tensor, by: float, more: dict[str, list[mtf.Tensor]] | None = None) -> Any:
        """Says what it does."""
        calls.append(x)
        return {"y": x * by, "both": (x, [x + more["z"][0]] if more else None)}

    with run.step() as g:
        x, short = g.constant(X, [B, D]), g.constant(X[0], [D])
        assert scaled(x, 2.0)["both"][1] is None
        np.testing.assert_array_equal(scaled(x, 2.0)["y"].numpy(), 2 * X)
        np.testing.assert_array_equal(scaled(x, 3.0)["y"].numpy(), 3 * X)
        np.testing.assert_array_equal(scaled(x=short, by=2.0)["y"].numpy(), 2 * X[0])
        y = scaled(x, 2.0, more={"z": [x]})["both"][1][0]
        np.testing.assert_array_equal(y.numpy(), 2 * X)
        assert y.layout == mtf.Layout("batch:data")
    assert len(calls) == scaled.programs == 4
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Says what it does.")


def test_a_staged_function_inside_another_and_in_a_loop_is_traced_into_it() -> None:
    run = new()
    inner = run.staged(lambda x: x * 2.0)
    outer = run.staged(lambda x: mtf.scan(inner, inner(x), L))
    with run.step() as g:
        np.testing.assert_array_equal(outer(g.constant(X, [B, D])).numpy(), 16 * X)
    assert inner.programs == 0


def test_a_staged_function_sends_what_its_program_says() -> None:
    run = new()
    with run.step() as g:
        run.staged(trained)(g.constant(X, [B, D]))
        assert g.communication_bytes["data"] > 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda f, g, h: f(), "staged f: found no tensor among the arguments; pass at least one"),
        (lambda f, g, h: f(g, g.numpy()), "staged f: each argument must be a tensor or a hashable value"),
        (lambda f, g, h: f(g, h), r"staged f: .* belong to different steps"),
        (lambda f, g, h: f(h), "and the function belong to different mtf.Eager objects; copy"),
        (lambda f, g, h: f(g, key=print), r"'f' .*|f\(\) got an unexpected keyword argument 'key'"),
    ],
)
def test_wrong_calls(call: Any, text: str) -> None:
    run = new()

    def f(*xs: mtf.Tensor) -> mtf.Tensor:
        return xs[0] + 1.0

    g, h = run.step().constant(X, [B, D]), new().step().constant(X, [B, D])
    with pytest.raises((mtf.UserError, TypeError), match=text):
        call(run.staged(f), g, h)


def test_a_staged_function_cannot_read_values_or_tensors_from_outside() -> None:
    run = new()
    with run.step() as g:
        x = g.constant(X, [B, D])
        with pytest.raises(mtf.UserError, match="has no value while the model is being built"):
            run.staged(lambda x: x if x > 0.0 else -x)(mtf.reduce_sum(x))
        with pytest.raises(mtf.UserError, match=r"belongs to graph 'eager step', not to '<lambda>'"):
            run.staged(lambda y: y + x)(x)


@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_a_staged_function_may_return_nothing(engine: str) -> None:
    run = new(engine)
    step = run.staged(lambda x: mtf.minimize(loss_of(x), mtf.SGD(0.1)))
    with run.step() as g:
        assert step(g.constant(X, [B, D])) is None
    assert run.read("step") == 1
    run.close()
    assert not run.variables


def test_a_staged_function_does_not_run_in_a_step_that_is_over() -> None:
    run = new()
    with run.step() as g:
        x = g.constant(X, [B, D])
        loss_of(x)
    before = run.read("dense/weight")
    with pytest.raises(mtf.UserError, match="staged trained: this eager step has"):
        run.staged(trained)(x)
    np.testing.assert_array_equal(run.read("dense/weight"), before)


def test_steps_are_graphs() -> None:
    assert isinstance(new().step(), mtf.Graph)
    assert isinstance(new().step(), EagerStep)
