"""Numbers of a batch that are none of the model's: beyond their dtype, or beyond the dimension they count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines import open_engine
from mesh_tf_core.engines.feeds import Feeds, widened

BATCH, CLASSES = mtf.Dim("batch", 4), mtf.Dim("classes", 10)
Build = Callable[[mtf.Tensor, mtf.Tensor, Callable[..., mtf.Tensor]], mtf.Tensor]


def entropy(logits: mtf.Tensor, labels: mtf.Tensor) -> mtf.Tensor:
    return mtf.softmax_cross_entropy(logits, labels, CLASSES)


def left_out(loss: mtf.Tensor, kept: mtf.Tensor) -> mtf.Tensor:
    return loss * kept.cast("float32")


def one_hot(x: mtf.Tensor, y: mtf.Tensor) -> mtf.Tensor:
    return -mtf.reduce_sum(mtf.one_hot(y, CLASSES) * mtf.log_softmax(x, CLASSES), [CLASSES])


def compared(x: mtf.Tensor, y: mtf.Tensor) -> mtf.Tensor:
    """A one-hot as other libraries write it."""
    marks = mtf.equal(y, mtf.mtf_range(x.graph, CLASSES)).cast("float32")
    return -mtf.reduce_sum(marks * mtf.log_softmax(x, CLASSES), [CLASSES])


def wrapped(y: mtf.Tensor) -> mtf.Tensor:
    """Negative numbers from the end, as NumPy and JAX count."""
    return mtf.where(y < 0, y + 10, y)


def picked(x: mtf.Tensor, y: mtf.Tensor) -> mtf.Tensor:
    return -mtf.pick(mtf.log_softmax(x, CLASSES), y, CLASSES)


def embedded(x: mtf.Tensor, y: mtf.Tensor) -> mtf.Tensor:
    table = x.graph.variable("table", [CLASSES, mtf.Dim("d", 3)], mtf.ONES)
    return mtf.reduce_sum(mtf.gather(table, y, CLASSES), ["d"]) + mtf.reduce_sum(x, [CLASSES])


def table_of(graph: mtf.Graph, trained: bool) -> mtf.Tensor:
    return graph.variable("weights", [CLASSES], mtf.ONES, trainable=trained)


MODELS: dict[str, tuple[Build, list[int], list[int]]] = {
    "labels": (lambda x, y, fed: entropy(x, y), [0, 9], [10, 99, -1, -100]),
    "cast": (lambda x, y, fed: entropy(x, mtf.rename(y.cast("int64"), batch="batch")), [9], [10, -1]),
    "labels >= 0": (lambda x, y, fed: left_out(entropy(x, y), y >= 0), [-1, -100], [10, 99]),
    "labels != -1": (lambda x, y, fed: left_out(entropy(x, y), mtf.not_equal(y, -1)), [-1], [-2, 10, 255]),
    "labels != 255": (lambda x, y, fed: left_out(entropy(x, y), mtf.not_equal(y, 255)), [255], [-1, 10]),
    "labels < 10": (lambda x, y, fed: left_out(entropy(x, y), y < 10), [10, 255], [-1]),
    "labels != 0": (lambda x, y, fed: left_out(entropy(x, y), mtf.not_equal(y, 0)), [0], [-1, 10]),
    "replaced": (
        lambda x, y, fed: left_out(entropy(x, mtf.where(y < 0, 0, y)), mtf.not_equal(y, -1)), [-1, -7], [10],
    ),
    "another mask": (lambda x, y, fed: entropy(x, y) * fed("mask", [BATCH], "float32"), [-1, 99], []),
    "contracted": (
        lambda x, y, fed: mtf.einsum([entropy(x, y), fed("mask", [BATCH], "float32")], []), [-1, 99], [],
    ),
    "a factor of the logits": (lambda x, y, fed: entropy(x * fed("mask", [BATCH], "float32"), y), [9], [10]),
    "contracted with its own": (
        lambda x, y, fed: mtf.einsum([entropy(x, y), (y >= 0).cast("float32")], []), [-1], [10],
    ),
    "a factor": (lambda x, y, fed: left_out(entropy(x, y), mtf.clip(y + 1, 0, 1)), [-1, -100], [10]),
    "a sign": (lambda x, y, fed: left_out(entropy(x, y), mtf.sign(y + 1)), [-1], [-2, 10]),
    "a factor of all": (lambda x, y, fed: left_out(entropy(x, y), y + 1), [9], [10, -2]),
    "taken along": (lambda x, y, fed: mtf.take_along(x, y, CLASSES), [-1, 9], [10, 99]),
    "another input": (lambda x, y, fed: entropy(x + fed("mask", [BATCH], "float32"), y), [9], [-1, 99]),
    "one-hot": (lambda x, y, fed: one_hot(x, y), [-1, 9], [10, 99]),
    "compared": (lambda x, y, fed: compared(x, y), [-1, 9], [10, 99]),
    "wrapped": (lambda x, y, fed: picked(x, wrapped(y)), [-1, -10, 9], [10, -11]),
    "wrapped and left out": (
        lambda x, y, fed: left_out(picked(x, wrapped(y)), mtf.not_equal(y, -100)), [-100, -10], [10, -11],
    ),
    "clipped": (lambda x, y, fed: picked(x, mtf.minimum(mtf.maximum(y, 0), 9)), [-1, 99], []),
    "looked up": (lambda x, y, fed: embedded(x, y), [-1, 9], [10, 2**31 - 1]),
    "read off a table": (
        lambda x, y, fed: entropy(x, y) * mtf.gather(table_of(x.graph, False), y, CLASSES), [-1], [10, 99],
    ),
    "read off a trained table": (
        lambda x, y, fed: entropy(x, y) * mtf.gather(table_of(x.graph, True), y, CLASSES), [9], [-1, 99],
    ),
    "not looked up": (lambda x, y, fed: x * y.cast("float32"), [-1, 99], []),
}  # fmt: skip
"""Model -> what it makes of (logits, labels, further inputs), labels that train, labels that are refused."""


def program(name: str, mesh: str = "data:1", layout: str = "", microbatches: int = 1) -> Any:
    graph = mtf.Graph()
    x, y = graph.input("x", [BATCH, CLASSES], "float32"), graph.input("label", [BATCH])
    made = MODELS[name][0](x * graph.variable("w", [CLASSES], mtf.ONES), y, graph.input)
    model = mtf.Model(mtf.reduce_mean(made), mtf.SGD(0.1))
    return model.lower(mtf.Mesh(mesh), mtf.Layout(layout), mtf.Options(microbatches=microbatches))


def batch(labels: Any, parts: int = 1) -> dict[str, Any]:
    found = {"x": np.ones((4, 10), np.float32), "label": np.asarray(labels), "mask": np.ones(4, np.float32)}
    return found if parts == 1 else {n: a.reshape(parts, -1, *a.shape[1:]) for n, a in found.items()}


def refused(feeds: Feeds, given: dict[str, Any]) -> str:
    try:
        feeds.checked(given)
    except mtf.UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "how", [("data:1", "", 1), ("data:2", "classes:data", 1), ("data:2", "batch:data", 2)]
)
@pytest.mark.parametrize("name", MODELS)
def test_numbers_that_name_nothing_are_refused(name: str, how: tuple[str, str, int]) -> None:
    """Whatever the layout, unless the model may leave them out."""
    _, right, wrong = MODELS[name]
    feeds = Feeds(program(name, *how))
    assert [v for v in right if refused(feeds, batch([0, v, 1, 2], how[2]))] == []
    for v in wrong:
        assert f"contains the id {v}, but the ids of dimension 'classes' must be from 0 to 9; " in refused(
            feeds, batch([0, 1, v, 2], how[2])
        )


def test_what_stands_behind_a_mark_is_looked_at() -> None:
    feeds = Feeds(program("labels >= 0"))
    assert "contains the id 99," in refused(feeds, batch([-100, 1, -1, 99]))
    feeds = Feeds(program("labels != -1"))
    assert "contains the id -2," in refused(feeds, batch([-1, -2, 3, 3]))
    feeds = Feeds(program("labels != 255"))
    assert "contains the id 77," in refused(feeds, batch([255, 1, 77, 3]))


def test_rows_of_other_processes_name_something() -> None:
    whole = widened(np.array([9, 3]), np.array([1, 3]), 4)
    assert whole.tolist() == [0, 9, 0, 3]
    assert refused(Feeds(program("labels")), batch(whole)) == ""


def test_numbers_without_a_sign_name_elements_too() -> None:
    graph = mtf.Graph()
    x, y = graph.input("x", [BATCH, CLASSES], "float32"), graph.input("label", [BATCH], "uint32")
    loss = mtf.reduce_mean(entropy(x * graph.variable("w", [CLASSES], mtf.ONES), y))
    feeds = Feeds(mtf.Model(loss, mtf.SGD(0.1)).lower(mtf.Mesh("data:1"), mtf.Layout("")))
    assert refused(feeds, batch([0, 9, 1, 2])) == ""
    assert "contains the id 10," in refused(feeds, batch([0, 10, 1, 2]))


def test_fractions_that_are_cast_name_elements_too() -> None:
    graph = mtf.Graph()
    x, y = graph.input("x", [BATCH, CLASSES], "float32"), graph.input("label", [BATCH], "float32")
    loss = mtf.reduce_mean(entropy(x * graph.variable("w", [CLASSES], mtf.ONES), y.cast("int32")))
    feeds = Feeds(mtf.Model(loss, mtf.SGD(0.1)).lower(mtf.Mesh("data:1"), mtf.Layout("")))
    assert refused(feeds, batch([0.0, 9.5, 1, 2])) == ""
    assert "contains the id 10.0," in refused(feeds, batch([0.0, 10.0, 1, 2]))
    assert "contains the id -1.0," in refused(feeds, batch([0.0, -1.0, 1, 2]))


@pytest.mark.parametrize("engine", ["lockstep", "local", "jax"])
def test_every_engine_refuses_what_its_dtype_does_not_have(engine: str) -> None:
    """2**40 more is 0 more in 32 bits: it trained with the loss of other labels."""
    running = open_engine(program("labels"), engine)
    running.initialize()
    labels = np.array([0, 1, 2, 3])
    loss = float(running.step(batch(labels))["loss"])
    assert np.isfinite(loss)
    said = r"input 'label': the model expects int32 \(-2147483648 to 2147483647\), found numbers from "
    for wide in (
        labels + 2**40,
        labels - 2**33,
        (labels + 2**31).astype("uint32"),
        labels.astype("uint64") + 2**63,
    ):
        with pytest.raises(mtf.UserError, match=f"{said}{wide.min()} to {wide.max()}; "):
            running.step(batch(wide))
    with pytest.raises(mtf.UserError, match="input 'label' contains the id 99, "):
        running.step(batch([0, 1, 2, 99]))


def test_wide_numbers_of_a_wide_input_stay() -> None:
    graph = mtf.Graph()
    y = graph.input("y", [BATCH], "int64")
    loss = mtf.reduce_mean((mtf.mod(y, 7)).cast("float32") * graph.variable("w", [], mtf.ONES))
    running = open_engine(mtf.lower(graph, mtf.Mesh("data:1"), mtf.Layout(""), {"loss": loss}), "lockstep")
    running.initialize()
    wide = np.arange(4) + 2**40
    assert float(running.step({"y": wide})["loss"]) == np.mean(wide % 7)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("engine", ["lockstep", "local", "jax"])
def test_a_number_that_a_mask_leaves_out_changes_nothing(engine: str) -> None:
    """Neither the loss nor a weight; where the mask counts it, it is read as an element of zeros."""

    def trained(label: int, counts: float) -> tuple[float, Any]:
        running = open_engine(program("another mask"), engine)
        running.initialize()
        given = batch([0, 1, 2, label])
        given["x"] = np.arange(40, dtype=np.float32).reshape(4, 10) / 40
        given["mask"][3] = counts
        return float(running.step(given)["loss"]), running.read("w")

    loss, weights = trained(3, 0.0)
    for wrong in (-9, 10, 99):
        left_out, after = trained(wrong, 0.0)
        assert left_out == loss and np.array_equal(after, weights)
        assert trained(wrong, 1.0)[0] > loss
