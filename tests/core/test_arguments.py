"""What scripts give where something else is asked for: one line each, which names the argument."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import layoutopt
import mesh_tf_core as mtf
from examples.mlp import model as mlp

MODEL = mlp()
BATCH = {name: np.zeros(x.shape.sizes, x.dtype) for name, x in MODEL.graph.inputs.items()}
WRONG: dict[str, Callable[[Any], Any]] = {
    "Layout: rules is None; give": lambda _: mtf.Layout(None),
    "layout: 3 is not the name of a mesh axis; give": lambda _: mtf.Layout({"batch": 3}),
    "layout: a list is not the name of a mesh axis; give": lambda _: mtf.Layout({"batch": [3]}),
    "layout: 3 is not the name of a dimension; give the name as a": lambda _: mtf.Layout({3: "data"}),
    "mesh is None; give": lambda _: mtf.Mesh(None),
    "mesh is a list; give": lambda _: mtf.Mesh([3]),
    "dimension 'a': size must be a positive integer, found True": lambda _: mtf.Dim("a", True),
    "Trainer: model is None; give": lambda _: mtf.Trainer(None, "data:2"),
    "Trainer: mesh is None; give": lambda _: mtf.Trainer(MODEL, None),
    "Trainer: layout is None; give": lambda _: mtf.Trainer(MODEL, "data:2", None),
    "Trainer: options is 3; give": lambda _: mtf.Trainer(MODEL, "data:2", "", 3),
    "Trainer: checkpoint_mode is '0700'; give": lambda _: mtf.Trainer(
        MODEL, "data:2", checkpoint_mode="0700"
    ),
    "checkpoint mode -0o1 must be an octal number that gives the": lambda _: mtf.Trainer(
        MODEL, "data:2", engine="local", checkpoint_mode=-1
    ),
    "SGD: learning_rate is '1'; give": lambda _: mtf.SGD("1"),
    "Adam: clip_norm is None; give": lambda _: mtf.Adam(0.1, clip_norm=None),
    "SGD: rates is a list; give": lambda _: mtf.SGD(0.1, rates=[0.1]),
    "Options: microbatches is '2'; give": lambda _: mtf.Options(microbatches="2"),
    "Options: storage is 'zero3'; give": lambda _: mtf.Options(storage="zero3"),
    "meet: text is 3; give": lambda _: mtf.Decoupled.parse(3),
    "Source: name is a list; give": lambda _: mtf.Source(["w"]),
    "unknown engine 3; known": lambda _: mtf.Trainer(MODEL, "data:2", "", engine=3),
    "fit: batches is None; give": lambda run: run.fit(None, 2),
    "fit: batches is a dict; give": lambda run: run.fit(BATCH, 2),
    "training: batch is 1; give": lambda run: run.fit([1], 2),
    "training: batch is None; give": lambda run: run.step(None),
    "fit: batches is a ndarray; give": lambda run: run.fit(np.array(3.0), 2),
    "evaluate: batches is a ndarray; give": lambda run: run.evaluate(np.array(3.0)),
    f"evaluate: the batch's {next(iter(BATCH))!r} is a single number; give": lambda run: run.evaluate(
        [dict.fromkeys(BATCH, 3.0)]
    ),
    "load: weights is a ndarray; give": lambda run: run.load(np.array(3.0)),
    "fit: steps is '2'; give": lambda run: run.fit([BATCH], "2"),
    "fit: steps is 2.5; give": lambda run: run.fit([BATCH], 2.5),
    "fit: steps is True; give": lambda run: run.fit([BATCH], True),
    "fit: every is 0; give": lambda run: run.fit([BATCH], 2, every=0),
    "fit: evaluate_every is 0; give": lambda run: run.fit([BATCH], 2, evaluate_every=0),
    "fit: checkpoint is 3; give": lambda run: run.fit([BATCH], 2, checkpoint=3),
    "fit: on_step is 3; give": lambda run: run.fit([BATCH], 2, on_step=3),
    "fit: stop is None; give": lambda run: run.fit([BATCH], 2, stop=None),
    "fit: evaluate is 3; give": lambda run: run.fit([BATCH], 2, evaluate=3),
    "fit: meet is 'x'; give": lambda run: run.fit([BATCH], 2, meet="x"),
    "save: directory is None; give": lambda run: run.save(None),
    "save: directory is 3; give": lambda run: run.save(3),
    "restore: directory is None; give": lambda run: run.restore(None),
    "load: weights is None; give": lambda run: run.load(None),
    "load: weights is 3; give": lambda run: run.load([3]),
    "load: names is 3; give": lambda run: run.load({}, 3),
    "load: new is '('; give": lambda run: run.load({}, new="("),
    "save_weights: path is 3; give": lambda run: run.save_weights(3),
    "evaluate: batches is None; give": lambda run: run.evaluate(None),
    "evaluate: batches is a dict; give": lambda run: run.evaluate(BATCH),
    "evaluate: batch is 'x'; give": lambda run: run.evaluate(["x"]),
    "load_plan: path is 0; give": lambda _: layoutopt.load_plan(0),
    "load_plan: path is None; give": lambda _: layoutopt.load_plan(None),
    "the plan: path is None; give": lambda _: layoutopt.search(MODEL, "data:2").save(None),
    "mesh is empty; give its axes": lambda _: layoutopt.search(MODEL, mesh=""),
    "mesh is None; give the axes": lambda _: layoutopt.cost(MODEL, None),
    "devices is True; give a whole number": lambda _: layoutopt.search(MODEL, devices=True),
    "top is True; give a whole number": lambda _: layoutopt.search(MODEL, "data:2", top=True),
    "time_limit is True; give": lambda _: layoutopt.search(MODEL, "data:2", time_limit=True),
    "memory is True; give": lambda _: layoutopt.search(MODEL, "data:2", memory=True),
    "input 'image': the model expects float32, found complex64; feed": lambda run: run.step(
        {**BATCH, "image": BATCH["image"] * 1j}
    ),
    "input 'image': the model expects float32, found <U1; feed an": lambda run: run.step(
        {**BATCH, "image": np.full(BATCH["image"].shape, "a")}
    ),
}
"""How the line begins, and what is done, with a trainer at hand."""


@pytest.fixture(scope="module")
def run() -> mtf.Trainer:
    return mtf.Trainer(MODEL, "data:2", "", engine="lockstep")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("said", WRONG)
def test_one_line_names_the_argument(said: str, run: mtf.Trainer) -> None:
    with pytest.raises(mtf.UserError) as found:
        WRONG[said](run)
    assert str(found.value).startswith(said) and "\n" not in str(found.value)
    assert run.step_number == 0


def test_whole_numbers_of_numpy_are_whole_numbers(tmp_path: Path) -> None:
    """They become Python's, so that plans and programs can be written as JSON."""
    assert mtf.Dim("a", np.int32(3)) == mtf.Dim("a", 3) and type(mtf.Dim("a", np.int32(3)).size) is int
    mesh = mtf.Mesh({"data": np.int64(2)})
    assert mesh == mtf.Mesh("data:2") and type(mesh.devices) is int
    assert layoutopt.search(MODEL, devices=np.int64(2)).mesh.devices == 2
    run = mtf.Trainer(MODEL, "data:2", "", engine="lockstep")
    assert len(run.fit(itertools.repeat(BATCH), np.int64(2), every=np.int32(1), checkpoint=tmp_path)) == 2
