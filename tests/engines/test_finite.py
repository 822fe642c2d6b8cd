"""What is saved can be trained on: numbers that are not finite are no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.training import checkpoint, finite
from mesh_tf_core.training.checkpoint import CheckpointWarning
from tests.marks import by_day

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of such numbers

B, D = mtf.Dim("batch", 4), mtf.Dim("d", 4)


def model(rate: float = 0.1, smallest: bool = False) -> mtf.Model:
    """Where `bad` is 0 the loss is finite and its gradient is not: sqrt'(0) times 0."""
    g = mtf.Graph("finite")
    x, bad = g.input("x", [B, D], "float32"), g.input("bad", [B], "float32")
    w, s = g.variable("w", [D], mtf.ONES), g.variable("s", [], mtf.ONES)
    if smallest:
        least = g.variable("least", [], mtf.ONES, trainable=False)
        g.assign(g.lookup("least"), mtf.minimum(least, mtf.reduce_mean(x)))
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], [B]))) + mtf.reduce_mean(mtf.sqrt(bad * s))
    return mtf.Model(loss, mtf.Adam(rate))


def trainer(engine: str = "lockstep", **more: Any) -> mtf.Trainer:
    # JAX has as many devices in this process as the first test that ran it asked for: one at least.
    mesh = "a:1" if engine == "jax" else "a:2"
    return mtf.Trainer(model(**more), mesh, "batch:a", mtf.Options(storage={"w": 3}), engine)


def batches(worst: int = 0) -> Iterator[Mapping[str, Any]]:
    rng = np.random.default_rng(0)
    step = 0
    while True:
        step += 1
        bad = np.full(4, float(step != worst), np.float32)
        yield {"x": rng.normal(size=(4, 4)).astype(np.float32), "bad": bad}


def steps(place: Path) -> list[int]:
    return [step for step, _ in checkpoint.listed(place)]


@pytest.mark.parametrize("engine", by_day(["lockstep", "local", "jax"]))
def test_a_step_that_cannot_be_trained_on_is_not_saved(engine: str, tmp_path: Path) -> None:
    """Its loss is finite. The run ends with the checkpoint to go on from, and going on ends as if the step
    had been sound at first."""
    said = "the loss is nan in step 5;.*; resume from step 2, the newest checkpoint in"
    with pytest.raises(mtf.UserError, match=said):
        trainer(engine).fit(batches(worst=4), 8, tmp_path, every=2)
    assert steps(tmp_path) == [2]
    again = trainer(engine)
    again.fit(batches(), 8, tmp_path, every=2)
    whole = trainer(engine)
    whole.fit(batches(), 8)
    for name in whole.program.variables:
        np.testing.assert_array_equal(again.engine.read(name), whole.engine.read(name))


def test_a_step_that_is_not_saved_is_an_error_by_itself(tmp_path: Path) -> None:
    """Where no loss comes after it; nothing that was there is lost."""
    run = trainer()
    run.fit(batches(), 2, tmp_path)
    said = r"step 4 is not saved: variable '\w+.*' contains NaN or infinite numbers; resume from step 2"
    with pytest.raises(mtf.UserError, match=said):
        run.fit(batches(worst=4), 4, tmp_path)
    assert steps(tmp_path) == [2]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".step")]


def poisoned(place: Path, last: int) -> None:
    """Checkpoints of every second step, of which the last one is as they were written before."""
    run = trainer()
    run._finite = frozenset()
    run.fit(batches(worst=last), last, place, every=2)


def test_one_that_is_not_finite_is_passed_over(tmp_path: Path) -> None:
    poisoned(tmp_path, 4)
    said = "step-000000004: variable '.*' contains NaN or infinite numbers; step-000000002 is used"
    with pytest.warns(CheckpointWarning, match=said):
        run = trainer()
        run.fit(batches(), 6, tmp_path, every=2)
    assert steps(tmp_path) == [6, 4, 2]
    assert trainer().restore(tmp_path)  # without a warning: step 4 is another one
    poisoned(tmp_path / "only", 2)
    with pytest.raises(mtf.UserError, match=r"no complete checkpoint .*NaN or infinite numbers"):
        trainer().restore(tmp_path / "only")


def test_what_is_not_trained_may_hold_what_it_likes(tmp_path: Path) -> None:
    run = trainer(smallest=True)
    run.engine.write("least", np.float32(np.inf))
    assert "least" not in run._finite and {"w", "s"} < run._finite
    run.save(tmp_path)
    again = trainer(smallest=True)
    assert again.restore(tmp_path) and np.isinf(again.engine.read("least"))


def test_a_step_to_go_on_from_is_chosen(tmp_path: Path) -> None:
    """Later ones are the user's from then on: no name is lost, none is counted or removed."""
    run = trainer()
    run.fit(batches(), 6, tmp_path, every=2)
    other = trainer()
    with pytest.raises(
        mtf.UserError,
        match=r"resume=3: there is no checkpoint of step 3; the directory has checkpoints of steps 2, 4",
    ):
        other.restore(tmp_path, 3)
    for more in ("", "-2"):
        with pytest.warns(CheckpointWarning) as caught:
            assert other.restore(tmp_path, 2) and other.step_number == 2
        assert [str(one.message) for one in caught] == [
            f"checkpoint step-00000000{n} is renamed to step-00000000{n}.aside{more}" for n in (6, 4)
        ]
        assert steps(tmp_path) == [2]
        other.fit(batches(), 6, tmp_path, every=2)
    names = {path.name for path in tmp_path.iterdir()}
    aside = {f"step-00000000{n}.aside{more}" for n in (4, 6) for more in ("", "-2")}
    assert names == {".lock", *aside, *(f"step-00000000{n}" for n in (2, 4, 6))}
    with pytest.raises(mtf.UserError, match="resume=1: there is no checkpoint of step 1; the directory has"):
        other.restore(tmp_path / "nothing", 1)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16])
def test_every_element_is_looked_at(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "AT_ONCE", 8)
    array = np.linspace(-60000.0, 60000.0, 30).astype(dtype).reshape(5, 6)
    assert finite.is_finite(array) and finite.is_finite(array.T) and finite.is_finite(array[:0])
    for value in (np.nan, np.inf, -np.inf):
        for at in range(30):
            bad = array.copy()
            bad.reshape(-1)[at] = value
            assert not finite.is_finite(bad) and not finite.is_finite(bad.T)
    assert finite.is_finite(np.array(1.0, dtype)) and not finite.is_finite(np.array(np.nan, dtype))
    assert finite.is_finite(np.arange(3)) and finite.is_finite(np.array([True]))
