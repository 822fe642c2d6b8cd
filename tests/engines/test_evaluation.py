"""Evaluation beside training: every example counts once, under every layout; training is not disturbed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.training.evaluation import forward
from mesh_tf_core.training.rows import Rows

B, D, H = mtf.Dim("batch", 8), mtf.Dim("features", 4), mtf.Dim("hidden", 16)
LAYOUTS = {
    "one device": ("a:1", "", mtf.Options()),
    "rows split": ("a:4", "batch:a", mtf.Options()),
    "both split": ("a:2;b:2", "batch:a;hidden:b", mtf.Options()),
    "stored split": ("a:4", "batch:a", mtf.Options(storage={"w": 3, "v": 1}, microbatches=2)),
    "columns split": ("a:4", "hidden:a", mtf.Options()),
}


def scores(g: mtf.Graph, dropout: float = 0.2, dtype: str = "float64") -> tuple[mtf.Tensor, mtf.Tensor]:
    """Squared errors [batch features] of a small network, and a weight per row."""
    x, y = (g.input(name, [B, D], dtype) for name in "xy")
    w, v = g.variable("w", [D, H], mtf.Normal(0.5), dtype), g.variable("v", [H, D], mtf.Normal(0.5), dtype)
    hidden = mtf.dropout(mtf.tanh(mtf.einsum([x, w], [B, H])), dropout)
    return mtf.square(mtf.einsum([hidden, v], [B, D]) - y), g.input("weight", [B], dtype)


def model(**metrics: object) -> mtf.Model:
    g = mtf.Graph("judged")
    error, weight = scores(g)
    weighted = mtf.einsum([error, weight], []) * 0.5 / mtf.reduce_sum(weight)
    penalty = mtf.reduce_sum(mtf.square(g.read(g.lookup("w")))) * 0.01
    loss = mtf.reduce_mean(error) + penalty + 0.125
    small = mtf.reduce_sum((mtf.reduce_mean(error, D) < 1.0).cast("float64"))
    named = {"weighted": weighted, "small": small, "negative": -loss}
    named.update({name: made(error) for name, made in metrics.items()})  # type: ignore[operator]
    return mtf.Model(loss, mtf.Adam(0.05), named, name="judged")


def examples(count: int = 21) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(count)
    return {"x": rng.normal(size=(count, 4)), "y": rng.normal(size=(count, 4)), "weight": rng.random(count)}


def cut(data: dict[str, np.ndarray], size: int = 8) -> list[dict[str, np.ndarray]]:
    count = len(data["weight"])
    return [{n: a[i : i + size] for n, a in data.items()} for i in range(0, count, size)]


def trained(layout: str, **metrics: object) -> mtf.Trainer:
    run = mtf.Trainer(model(**metrics), *LAYOUTS[layout])
    rng = np.random.default_rng(7)
    for name in ("w", "v"):
        run.engine.write(name, 0.3 * rng.normal(size=run.engine.read(name).shape))
    return run


def expected(run: mtf.Trainer, data: dict[str, np.ndarray]) -> dict[str, float]:
    w, v = run.engine.read("w"), run.engine.read("v")
    error = (np.tanh(data["x"] @ w) @ v - data["y"]) ** 2
    loss = error.mean() + 0.01 * (w**2).sum() + 0.125
    return {
        "loss": loss,
        "negative": -loss,
        "weighted": 0.5 * (error.sum(1) * data["weight"]).sum() / data["weight"].sum(),
        "small": 8 * (error.mean(1) < 1.0).mean(),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_example_counts_once(layout: str) -> None:
    run, data = trained(layout), examples()
    found = run.evaluate(cut(data))
    assert found == pytest.approx(expected(run, data), rel=1e-12)
    # However the examples are cut into batches, and in whatever order: the same numbers to the last bit.
    assert run.evaluate(cut(data, 3)) == pytest.approx(found, rel=1e-15)
    turned = {n: a[::-1] for n, a in data.items()}
    assert run.evaluate(cut(turned, 8)) == pytest.approx(found, rel=1e-15)
    assert list(found) == ["loss", "weighted", "small", "negative"]


def test_several_devices_give_what_one_gives() -> None:
    data = cut(examples())
    one = trained("one device").evaluate(data)
    assert one["small"] > 0
    for layout in ("rows split", "stored split"):
        found = trained(layout).evaluate(data)
        assert found["small"] == one["small"]
        assert found == pytest.approx(one, rel=1e-14)


def test_training_is_not_disturbed() -> None:
    data = cut(examples(16))
    run, alone = trained("both split"), trained("both split")
    history = [run.step(data[0])["loss"]]
    judged = run.evaluate(data)
    history.append(run.step(data[1])["loss"])
    assert history == [alone.step(batch)["loss"] for batch in data]
    assert run.evaluate(data) != judged
    again = run.evaluate(data)
    assert run.evaluate(iter(data)) == again == pytest.approx(expected(run, examples(16)), rel=1e-12)


@pytest.mark.parametrize("turned", [False, True])
def test_a_mean_over_weights_may_have_a_least_divisor(turned: bool) -> None:
    """maximum(sum of weights, 1.0): a batch without any is not a division by 0, and counts nothing."""
    g = mtf.Graph("guarded")
    error, weight = scores(g)
    total = mtf.reduce_sum(weight)
    least = mtf.maximum(1.0, total) if turned else mtf.maximum(total, 1.0)
    run = mtf.Trainer(
        mtf.Model(mtf.einsum([error, weight], []) * 0.5 / least), *LAYOUTS["rows split"], engine="lockstep"
    )
    data = examples()
    data["weight"][8:16] = 0.0
    w, v = run.engine.read("w"), run.engine.read("v")
    sums = 0.5 * (((np.tanh(data["x"] @ w) @ v - data["y"]) ** 2).sum(1) * data["weight"])
    assert run.evaluate(cut(data))["loss"] == pytest.approx(sums.sum() / data["weight"].sum(), rel=1e-12)
    few = {n: a[:1] * (0.25 if n == "weight" else 1.0) for n, a in data.items()}
    assert run.evaluate([few])["loss"] == pytest.approx(0.25 * sums[0], rel=1e-12)
    none = {n: a[8:16] for n, a in data.items()}
    assert run.evaluate([none])["loss"] == 0.0


def test_results_that_mix_rows_need_whole_batches() -> None:
    run = trained("rows split", spread=lambda e: mtf.reduce_mean(mtf.square(e - mtf.reduce_mean(e, B))))
    data = examples(16)
    found = run.evaluate(cut(data))
    w, v = run.engine.read("w"), run.engine.read("v")
    error = (np.tanh(data["x"] @ w) @ v - data["y"]) ** 2
    assert found["spread"] == pytest.approx(np.mean([e.var(0).mean() for e in (error[:8], error[8:])]))
    with pytest.raises(
        mtf.UserError, match=r"a batch has 5 rows instead of 8, and 'spread' is not a sum over rows \(sub"
    ):
        run.evaluate(cut(examples(21)))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda e: mtf.sqrt(mtf.reduce_mean(e)), "sqrt"),
        (lambda e: mtf.reduce_max(e), "reduce_max"),
        (lambda e: mtf.reduce_mean(mtf.shift(e, 1, B)), "shift"),
        (lambda e: mtf.reduce_mean(mtf.cumsum(e, B)), "cumsum"),
        (lambda e: mtf.reduce_mean(e) * mtf.reduce_mean(e), "mul"),
        (
            lambda e: mtf.reduce_mean(mtf.einsum([e, mtf.rename(e, batch="c")], [B, mtf.Dim("c", 8)])),
            "einsum",
        ),
        (lambda e: mtf.reduce_mean(mtf.softmax(e, B)), "softmax"),
        (lambda e: mtf.reduce_mean(mtf.slice_dim(e, B, 0, 4)), "slice"),
        (lambda e: mtf.reduce_mean(mtf.cond(mtf.reduce_mean(e) > 0.5, lambda: e * 2.0, lambda: e)), "gt"),
        (lambda e: mtf.scan(lambda c: c * 0.5, mtf.reduce_mean(e), mtf.Dim("i", 3)), "scan"),
    ],
)
def test_what_mixes_rows_is_named(made: object, why: str) -> None:
    built = model(mixed=made)
    graph = forward(built.graph)
    rows = Rows(graph, "batch", 8)
    assert rows.of(graph.tensor(built.metrics["mixed"].id)) is None
    assert why in rows.why
    assert rows.of(graph.tensor(built.loss.id)) is not None and rows.why == ""


@pytest.mark.parametrize(
    "made",
    [
        lambda e: mtf.reduce_mean(mtf.scan(lambda c: c * 0.5 + e, e, mtf.Dim("i", 3))),
        lambda e: mtf.reduce_mean(mtf.softmax(e, D)) - mtf.reduce_mean(e) / 3.0,
        lambda e: mtf.reduce_mean(mtf.rename(e, batch="other")),
        lambda e: mtf.reduce_mean(mtf.reduce_mean(e, B) * e.graph.read(e.graph.lookup("w")).cast(e.dtype)),
        lambda e: mtf.reduce_sum(mtf.add_n([mtf.reduce_mean(e), mtf.stop_gradient(mtf.reduce_sum(e))])),
    ],
)
def test_sums_over_rows_are_found(made: object) -> None:
    """A short batch gives what its rows give alone: the mean over three batches of one row each."""
    run, data = trained("rows split", odd=made), examples(3)
    together = run.evaluate(cut(data))["odd"]
    single = [run.evaluate([batch])["odd"] for batch in cut(data, 1)]
    assert together == pytest.approx(math.fsum(single) / 3, rel=1e-12)
    filled = {n: np.repeat(a[:1], 8, 0) for n, a in data.items()}
    assert single[0] == pytest.approx(run.evaluate([filled])["odd"], rel=1e-12)


def test_a_model_in_the_form_in_which_it_is_judged() -> None:
    run = trained("rows split")
    g = mtf.Graph("other")
    error, weight = scores(g, dropout=0)
    judged = mtf.Model(mtf.einsum([error, weight], []))
    data = examples(16)
    w, v = run.engine.read("w"), run.engine.read("v")
    error = (np.tanh(data["x"] @ w) @ v - data["y"]) ** 2
    found = run.evaluate(cut(data), judged)
    assert found == pytest.approx({"loss": (error.sum(1) * data["weight"]).sum() / 2}, rel=1e-12)
    g = mtf.Graph("narrow")
    x = g.input("x", [B, D], "float64")
    u = g.variable("u", [D], mtf.ONES, "float64")
    with pytest.raises(
        mtf.UserError,
        match="reads variable 'u', which the program that stores the variables does not have; known: ",
    ):
        run.evaluate(cut(data), mtf.Model(mtf.reduce_mean(x * u)))


def test_bad_batches_are_told() -> None:
    run, data = trained("one device"), examples(16)
    for bad, said in (
        ([], "evaluate: the data have no batches; give at least one"),
        ([data], "evaluate: a batch has 16 rows; all inputs must have the same"),
        ([{**data, "x": data["x"][:3]}], "a batch has 3 and 16 rows"),
        ([{"x": data["x"][:8]}], "the batch has no array for the model's input"),
    ):
        with pytest.raises(mtf.UserError, match=said):
            run.evaluate(bad)


def test_no_more_is_taken_than_what_is_asked_for() -> None:
    run, data = trained("one device"), itertools.cycle(cut(examples(16)))
    run.fit(data, 1)
    second = next(data)
    assert second["x"] is not None and run.step_number == 1


@pytest.mark.parametrize(
    ("counts", "others", "whole"),
    [
        ([4, 4, 0], [8, 8, 3], [8, 8, 3]),  # the last batch ends before this process's rows
        ([4, 2], [4, 4], [8, 6]),
        ([4, 0], [8, 7], None),  # the batch has rows 4 to 6, but they were not given
        ([4], [4, 4], None),
    ],
)
def test_a_short_batch_of_several_processes(
    counts: list[int], others: list[int], whole: list[int] | None
) -> None:
    """Of which each gives its own rows: as many are true as the process that has the last one says."""
    run = trained("rows split")
    run.evaluate(cut(examples()))
    assert run._evaluation is not None
    judged = run._evaluation[2]

    class Others:
        """The other process has rows 0 to 3, and perhaps says that there are more."""

        def gather(self, what: str, ends: list[int], patient: bool) -> list[list[int]]:
            return [others, ends]

    judged.cluster = Others()  # type: ignore[assignment]
    rows = np.arange(4, 8)
    if whole is None:
        with pytest.raises(
            mtf.UserError, match="evaluate: the data did not return all rows of this process; for"
        ):
            judged._of_all(rows, counts)
    else:
        assert judged._of_all(rows, counts) == whole


def test_rows_that_a_process_has_not_are_zeros_on_its_devices() -> None:
    """Those of other processes hold anything, and none of a short batch is like having none."""
    run = trained("rows split")
    run.evaluate(cut(examples()))
    assert run._evaluation is not None
    data, counts = examples(8), list[int]()
    mine = [{n: a[4:8] for n, a in data.items()}, {n: a[4:6] for n, a in data.items()}]
    mine += [{n: a[:0] for n, a in data.items()}]
    fed = list(run._evaluation[2]._counted(iter(mine), counts, np.arange(4, 8)))
    assert counts == [4, 2, 0] and [b["x"].shape for b in fed] == [(8, 4)] * 3
    np.testing.assert_array_equal(fed[0]["x"][4:], data["x"][4:])
    np.testing.assert_array_equal(fed[1]["x"][4:], data["x"][[4, 5, 5, 5]])
    np.testing.assert_array_equal(fed[2]["x"][4:], np.zeros((4, 4)))
    with pytest.raises(mtf.UserError, match="evaluate: a batch has 5 rows; all inputs must have the same"):
        list(run._evaluation[2]._counted(iter(cut(data, 5)), [], np.arange(4, 8)))
