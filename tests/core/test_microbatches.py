"""Microbatches: any number of parts gives the numbers of the whole batch, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.instructions import Local
from mesh_tf_core.lower.verify import verify

B, L, D, V = mtf.Dim("batch", 8), mtf.Dim("length", 3), mtf.Dim("d", 4), mtf.Dim("vocabulary", 6)
Loss = Callable[[mtf.Tensor, mtf.Tensor, mtf.Tensor], mtf.Tensor]


def network(g: mtf.Graph) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Cross-entropies [batch length], which tokens are valid, and a state [batch length d]."""
    x, valid = g.input("x", [B, L, D], "float64"), g.input("valid", [B, L], "float64")
    labels = g.input("labels", [B, L], "int32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        e = mtf.Dim("e", 4)
        w = g.variable("w", [D, e], mtf.Normal(0.5), "float64")
        return h + mtf.rename(mtf.tanh(mtf.einsum([h, w], [B, L, e])), e="d")

    h = mtf.scan(layer, x, mtf.Dim("layers", 2))
    v = g.variable("v", [D, V], mtf.Normal(0.5), "float64")
    return mtf.softmax_cross_entropy(mtf.einsum([h, v], [B, L, V]), labels, V), valid, h


def penalty(ce: mtf.Tensor) -> mtf.Tensor:
    """0.01 |v|^2, by a loop over its rows, which carries the sum."""
    v = ce.graph.read(ce.graph.lookup("v"))
    start = mtf.zeros(ce.graph, [], "float64")
    return mtf.scan(lambda sum, row: sum + mtf.reduce_sum(mtf.square(row)) * 0.01, start, D, [v])


def gates(h: mtf.Tensor) -> mtf.Tensor:
    """A learned weight for every token."""
    return mtf.sigmoid(mtf.reduce_sum(h, D))


def carried(ce: mtf.Tensor, valid: mtf.Tensor, h: mtf.Tensor) -> mtf.Tensor:
    """A loop that carries the sum of the weights' squares beside the examples' states."""

    def layer(state: tuple[mtf.Tensor, mtf.Tensor]) -> tuple[mtf.Tensor, mtf.Tensor]:
        h, sum = state
        w = ce.graph.variable("u", [D], mtf.ONES, "float64")
        return mtf.tanh(h * w), sum + mtf.reduce_sum(mtf.square(w)) * 0.02

    h, sum = mtf.scan(layer, (h, mtf.zeros(ce.graph, [], "float64")), mtf.Dim("more", 2))
    return mtf.reduce_mean(ce) + mtf.reduce_mean(h) + mtf.square(sum)


def auxiliary(ce: mtf.Tensor, valid: mtf.Tensor, h: mtf.Tensor) -> mtf.Tensor:
    """A loop that carries a sum over the examples, as the losses of routers."""

    def layer(state: tuple[mtf.Tensor, mtf.Tensor]) -> tuple[mtf.Tensor, mtf.Tensor]:
        h, sum = state
        return mtf.tanh(h), sum + mtf.reduce_mean(mtf.square(h)) * 0.3

    _, sum = mtf.scan(layer, (h, mtf.zeros(ce.graph, [], "float64")), mtf.Dim("more", 2))
    return mtf.reduce_mean(ce) + sum


def bucketed(ce: mtf.Tensor, valid: mtf.Tensor, h: mtf.Tensor) -> mtf.Tensor:
    """Layers with a table each, of which all examples read the same rows, as relative positions."""
    buckets = mtf.Dim("buckets", 2)

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        table = ce.graph.variable("table", [buckets, D], mtf.Normal(0.5), "float64")
        return mtf.tanh(h + mtf.gather(table, mtf.constant(ce.graph, [0, 1, 1], [L], "int32"), buckets))

    return mtf.reduce_mean(ce) + mtf.reduce_mean(mtf.scan(layer, h, mtf.Dim("more", 2)))


LOSSES: dict[str, Loss] = {
    "mean": lambda ce, valid, h: mtf.reduce_mean(ce),
    "masked mean": lambda ce, valid, h: mtf.reduce_sum(ce * valid) / mtf.reduce_sum(valid),
    "at least one": lambda ce, valid, h: (
        mtf.reduce_sum(ce * valid) / mtf.maximum(mtf.reduce_sum(valid), 1.0)
    ),
    "by factors": lambda ce, valid, h: mtf.einsum([ce, valid], []) * mtf.reciprocal(mtf.reduce_sum(valid)),
    "learned weights": lambda ce, valid, h: mtf.einsum([ce, gates(h)], []) / mtf.reduce_sum(gates(h)),
    "penalty": lambda ce, valid, h: mtf.reduce_mean(ce) + penalty(ce),
    "masked and penalty": lambda ce, valid, h: (
        mtf.reduce_sum(ce * valid) / mtf.reduce_sum(valid) * 2.0 + penalty(ce) - 0.5
    ),
    "masked and mean": lambda ce, valid, h: (
        mtf.reduce_sum(ce * valid) / mtf.reduce_sum(valid) + 0.1 * mtf.reduce_mean(mtf.square(h))
    ),
    "two masked means": lambda ce, valid, h: (
        mtf.reduce_sum(ce * valid) / mtf.reduce_sum(valid)
        + mtf.reduce_sum(gates(h) * (1.0 - valid)) / mtf.reduce_sum(1.0 - valid)
        - mtf.reduce_mean(gates(h)) * 0.5
    ),
    "root": lambda ce, valid, h: mtf.sqrt(mtf.reduce_mean(mtf.square(ce))),
    "product": lambda ce, valid, h: mtf.reduce_mean(ce) * mtf.reduce_mean(valid),
    "middle": lambda ce, valid, h: (
        mtf.reduce_mean(ce) + mtf.reduce_sum(mtf.square(mtf.reduce_mean(h, [B, L])))
    ),
    "carried": carried,
    "bucketed": bucketed,
    "auxiliary": auxiliary,
    "per token": lambda ce, valid, h: mtf.reduce_sum(
        mtf.reduce_sum(ce * valid, B) / (mtf.reduce_sum(valid, B) + 1.0)
    ),
}  # fmt: skip


def batch(empty: slice = slice(0)) -> dict[str, np.ndarray]:
    """Examples, of which those in `empty` have no valid token."""
    rng = np.random.default_rng(3)
    valid = (rng.random((8, 3)) < 0.6).astype(float)
    valid[empty] = 0
    return {"x": rng.normal(size=(8, 3, 4)), "valid": valid, "labels": rng.integers(0, 6, (8, 3))}


def model(loss: Loss) -> mtf.Model:
    g = mtf.Graph()
    ce, valid, h = network(g)
    metrics = {
        "accuracy": mtf.reduce_sum((ce < 1.5).cast("float64") * valid) / mtf.reduce_sum(valid),
        "perplexity": mtf.exp(mtf.reduce_mean(ce)),
        "weights": mtf.reduce_sum(mtf.square(g.read(g.lookup("v")))),
        "tokens": mtf.reduce_sum(valid.cast("int32")),
    }
    return mtf.Model(loss(ce, valid, h), mtf.Adam(0.1), metrics)


def trained(
    built: mtf.Model, parts: int, data: dict[str, np.ndarray], mesh: str = "one:1", layout: str = ""
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Results of the second step, and the variables afterwards."""
    program = verify(built.lower(mtf.Mesh(mesh), mtf.Layout(layout), mtf.Options(microbatches=parts)))
    engine = LockstepEngine(program)
    fed = {n: np.reshape(data[n], program.values[i].shape.sizes) for n, i in program.feeds.items()}
    engine.step(fed)
    results = {n: float(value) for n, value in engine.step(fed).items()}
    return results, {n: engine.read(n) for n in program.variables}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.one_in(3)
def test_parts_give_what_the_whole_batch_gives(name: str) -> None:
    """Results and trained variables, where a part has no valid token too, split or not."""
    data = batch(slice(0, 2))
    results, variables = trained(model(LOSSES[name]), 1, data)
    for parts, mesh, layout in ((4, "one:1", ""), (2, "x:2;y:2", "batch:x;vocabulary:y")):
        found, after = trained(model(LOSSES[name]), parts, data, mesh, layout)
        assert found == pytest.approx(results, rel=1e-9), (name, parts, layout)
        for variable, value in after.items():
            np.testing.assert_allclose(value, variables[variable], rtol=1e-7, atol=1e-9, err_msg=variable)


def test_a_masked_mean_is_numpys() -> None:
    """Against NumPy, before any training: it was multiplied by the number of parts."""
    g = mtf.Graph()
    x, valid = g.input("x", [B, L], "float64"), g.input("valid", [B, L], "float64")
    w = g.variable("w", [L], mtf.ONES, "float64")
    built = mtf.Model(mtf.reduce_sum(x * w * valid) / mtf.reduce_sum(valid), mtf.SGD(0.5))
    data = {"x": batch()["x"][..., 0], "valid": batch(slice(4, 8))["valid"]}
    mean = (data["x"] * data["valid"]).sum() / data["valid"].sum()
    slope = (data["x"] * data["valid"]).sum(0) / data["valid"].sum()
    for parts in (1, 2, 4, 8):
        program = built.lower(mtf.Mesh("x:2"), mtf.Layout(""), mtf.Options(microbatches=parts))
        engine = LockstepEngine(program)
        fed = {n: np.reshape(data[n], program.values[i].shape.sizes) for n, i in program.feeds.items()}
        assert engine.step(fed)["loss"] == pytest.approx(mean, rel=1e-12)
        np.testing.assert_allclose(engine.read("w"), 1 - 0.5 * slope, rtol=1e-12)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"learned weights", "root", "product", "middle"}))
def test_the_loop_before_computes_only_what_has_to_be_whole(name: str) -> None:
    """As how many tokens are valid: no product of the network runs twice, except for losses whose gradient
    reads a sum of what the network computes."""
    built = mtf.Model(model(LOSSES[name]).loss, mtf.Adam(0.1))

    def flops(parts: int) -> float:
        program = built.lower(mtf.Mesh("one:1"), mtf.Layout(), mtf.Options(microbatches=parts))
        return sum(
            times * instr.op.flops(*map(program.local, instr.inputs))
            for instr, times in program.walk()
            if isinstance(instr, Local)
        )

    assert flops(4) == pytest.approx(flops(1), rel=0.05)


def test_a_scalar_beside_the_batch_is_fed_once() -> None:
    g = mtf.Graph()
    x, rate = g.input("x", [B], "float64"), g.input("rate", [], "float64")
    w = g.variable("w", [], mtf.ONES, "float64")
    built = mtf.Model(mtf.reduce_sum(x * w) * rate, mtf.SGD(1.0))
    data = {"x": np.arange(8.0), "rate": np.asarray(0.25)}
    run = mtf.Trainer(built, "one:1", "", mtf.Options(microbatches=4))
    assert run.step(data)["loss"] == 7.0 and run.engine.read("w") == -6.0


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda h: mtf.reduce_mean(mtf.square(mtf.cumsum(h, B))), "cumsum"),
        (lambda h: mtf.reduce_max(h), "reduce_max"),
        (lambda h: mtf.reduce_mean(h * mtf.mtf_range(h.graph, B, "float64")), "range"),
        (lambda h: mtf.reduce_mean(mtf.softmax(h, B) * h), "softmax"),
        (lambda h: mtf.reduce_mean(mtf.slice_dim(h, B, 0, 4)), "slice"),
        (lambda h: mtf.reduce_mean(mtf.avg_pool(h, [B], [3], 1, "same")), "sum_pool"),
        (
            lambda h: mtf.reduce_mean(mtf.cond(mtf.reduce_max(h) > 0.5, lambda: h * 2.0, lambda: h)),
            "reduce_max",
        ),
        (
            lambda h: mtf.reduce_mean(
                h * mtf.rsqrt(mtf.reduce_mean(mtf.square(h - mtf.reduce_mean(h, [B, L])), [B, L]) + 1e-3)
            ),
            "one after another",
        ),
    ],
)  # fmt: skip
def test_examples_that_meet_are_refused_with_the_operation(
    made: Callable[[mtf.Tensor], mtf.Tensor], why: str
) -> None:
    built = model(lambda ce, valid, h: mtf.reduce_mean(ce) + made(h))
    with pytest.raises(mtf.UserError, match=rf"^microbatches=2: .*{why}.*; use one microbatch$"):
        built.training_step(2)


def test_pairs_of_examples_are_refused() -> None:
    """Every example against every other: parts would never see each other's."""
    g = mtf.Graph()
    b, d = mtf.Dim("batch", 4), mtf.Dim("d", 2)
    x = g.input("x", [b, d], "float32")
    y = mtf.einsum([x, g.variable("w", [d, mtf.Dim("e", 2)], mtf.ONES)], [b, mtf.Dim("e", 2)])
    pairs = mtf.einsum([y, mtf.rename(y, batch="others")], [b, mtf.Dim("others", 4)])
    model = mtf.Model(mtf.reduce_mean(pairs))
    with pytest.raises(mtf.UserError, match=", but examples of different microbatches cannot be combined"):
        model.lower(mtf.Mesh("x:2"), mtf.Layout(""), mtf.Options(microbatches=2))
