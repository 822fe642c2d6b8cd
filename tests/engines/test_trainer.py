"""Training: resumed runs equal undisturbed ones, the same seed gives the same numbers, errors in words."""

from __future__ import annotations

import fcntl
import math
import threading
from pathlib import Path

import numpy as np
import pytest

import layoutopt
import mesh_tf_core as mtf
from mesh_tf_core.training import auto, checkpoint
from mesh_tf_core.training.checkpoint import CheckpointWarning
from tests.engines.programs import network
from tests.marks import by_day
from tests.searching import search

STORED = mtf.Options(storage={"wi": 3, "wo": 1}, recompute=frozenset({"layers"}))
LAYOUTS = {
    "data": ("a:2", "batch:a", mtf.Options()),
    "both": ("a:2;b:2", "batch:a;hidden:b", mtf.Options()),
    "stored": ("a:4", "batch:a", STORED),
    "parts": ("a:2", "batch:a", mtf.Options(microbatches=2)),
}


def trainer(layout="data", **hparams):
    mesh, rules, options = LAYOUTS[layout]
    return mtf.Trainer(network(**hparams), mesh, rules, options)


def batches(seed=0):
    """Without end, and without a place."""
    rng = np.random.default_rng(seed)
    while True:
        yield {name: rng.normal(size=(8, 4)).astype(np.float32) for name in "xy"}


class Placed:
    """Batches that know their place, and count how many were made."""

    def __init__(self, end=1000):
        self.at, self.made, self.end = 0, 0, end

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.end:
            raise StopIteration
        self.at, self.made = self.at + 1, self.made + 1
        return next(batches(self.at))

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def losses(history):
    return [found["loss"] for found in history]


@pytest.mark.parametrize("layout", by_day(LAYOUTS))
@pytest.mark.one_in(2)
def test_a_resumed_run_equals_the_undisturbed_one(layout: str, tmp_path: Path) -> None:
    """With dropout and the optimizer's state; the interruption is an error in the middle of a run."""
    whole = losses(trainer(layout).fit(batches(), 6))

    def stop(step, found, seconds):
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(layout).fit(batches(), 6, tmp_path, every=3, on_step=stop)
    assert losses(trainer(layout).fit(batches(), 6, tmp_path)) == whole[3:]
    other = trainer("both" if layout != "both" else "data")
    assert other.fit(batches(), 6, tmp_path) == [] and other.step_number == 6


@pytest.mark.parametrize(
    ("first", "second"), by_day([("data", "both"), ("both", "stored"), ("stored", "data")])
)
@pytest.mark.one_in(2)
def test_a_run_goes_on_under_another_layout(first: str, second: str, tmp_path: Path) -> None:
    """Random numbers do not depend on the layout, so dropout stays (with other microbatches it would
    differ)."""
    whole = losses(trainer(first).fit(batches(), 5))
    trainer(first).fit(batches(), 3, tmp_path)
    resumed = trainer(second)
    assert losses(resumed.fit(batches(), 5, tmp_path)) == pytest.approx(whole[3:], rel=2e-5)
    again = trainer(first)
    again.restore(tmp_path)
    for name in again.program.variables:
        np.testing.assert_array_equal(again.engine.read(name), resumed.engine.read(name))


def test_data_that_knows_its_place_is_set_there(tmp_path: Path) -> None:
    whole = losses(trainer().fit(Placed(), 6))
    data = Placed()
    run = trainer()
    run.fit(data, 4, tmp_path)
    assert (run.position, data.made) == ({"at": 4}, 4)
    data = Placed()
    assert losses(trainer().fit(data, 6, tmp_path)) == whole[4:]
    assert data.made == 2
    # Data without a place is skipped over, also after a checkpoint that holds one.
    counted = [next(batches(i)) for i in range(1, 8)]
    assert losses(trainer().fit(counted, 7, tmp_path)) == losses(run.fit(Placed(), 7))[-1:]


@pytest.mark.nightly
def test_the_same_seed_gives_the_same_numbers() -> None:
    runs = [trainer("both") for _ in range(2)]
    assert runs[0].fit(batches(), 4) == runs[1].fit(batches(), 4)
    for name in runs[0].program.variables:
        np.testing.assert_array_equal(runs[0].engine.read(name), runs[1].engine.read(name))
    stepped = trainer("both")
    data = batches()
    assert [stepped.step(next(data))["loss"] for _ in range(4)] == losses(trainer("both").fit(batches(), 4))


def test_several_steps_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine likes it: results come in order, and none is out where a checkpoint is due."""
    whole, run = losses(trainer().fit(Placed(), 11)), trainer()
    begin, flying, most, told = run.engine.begin, [], [], []

    def begun(fed):
        found = begin(fed)
        flying.append(fed)
        most.append(len(flying))
        return lambda: flying.pop() and found()

    monkeypatch.setattr(run.engine, "in_flight", 3)
    monkeypatch.setattr(run.engine, "begin", begun)
    history = run.fit(Placed(), 11, tmp_path, every=4, on_step=lambda step, found, s: told.append(step))
    assert losses(history) == whole and told == list(range(1, 12))
    assert most == [1, 2, 3, 3, 1, 2, 3, 3, 1, 2, 3] and run.position == {"at": 11}
    assert [step for step, _ in checkpoint.listed(tmp_path)] == [11, 8, 4]
    with pytest.raises(mtf.UserError, match="the data ended after 13 of 17 steps"):
        run.fit(Placed(end=13), 17)


def test_a_step_that_fails_after_it_began_leaves_the_state_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer()

    def lost():
        raise RuntimeError("a device was lost")

    monkeypatch.setattr(run.engine, "begin", lambda fed: lost)
    with pytest.raises(RuntimeError, match="a device was lost"):
        run.step(next(batches()))
    assert run.torn


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """What is written is the state of the save, whatever steps do meanwhile."""
    run, data = trainer(), batches()
    run.step(next(data))
    before = {name: run.engine.read(name) for name in run.program.variables}
    kept = run.engine.snapshot()
    run.step(next(data))
    assert [piece.name for piece in kept] == list(before) and len(kept) == len(before)
    for piece, value in kept.items():
        np.testing.assert_array_equal(value, before[piece.name])
    assert len(kept) == 0
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(run.engine.read("wi"), before["wi"])


def test_a_damaged_checkpoint_is_said_and_passed_over(tmp_path: Path) -> None:
    trainer().fit(batches(), 3, tmp_path, every=2)
    whole = trainer().fit(batches(), 3)
    file = tmp_path / "step-000000003" / "00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    resumed = trainer()
    with pytest.warns(CheckpointWarning, match="step-000000003: .* checksum; step-000000002 is used"):
        assert losses(resumed.fit(batches(), 3, tmp_path)) == losses(whole[2:])
    found = checkpoint.newest(tmp_path)
    assert found is not None and (found.step, found.skipped) == (3, ())


@pytest.mark.parametrize("last", [2, 3])
def test_a_step_is_saved_before_it_is_evaluated(last: int, tmp_path: Path) -> None:
    """What ends an evaluation loses no step, the last one neither."""

    def judged(step: int) -> None:
        if step == last:
            raise RuntimeError("the power fails")

    with pytest.raises(RuntimeError):
        trainer().fit(batches(), 3, tmp_path, every=2, evaluate=judged, evaluate_every=1)
    assert checkpoint.listed(tmp_path)[0][0] == last


def test_an_error_in_writing_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    run = trainer()
    with pytest.raises(mtf.UserError, match="is a file; give another path"):
        run.fit(batches(), 4, tmp_path / "file")
    assert run.step_number == 0

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(mtf.UserError, match="cannot be written: No space left on device"):
        run.fit(batches(), 4, tmp_path / "run", every=2)
    assert run.step_number == 4  # where the next checkpoint was due


def test_an_interrupted_step_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables may be those of the next step already: a checkpoint would be of no step at all."""
    run = trainer()
    run.fit(batches(), 2, tmp_path)
    engine = run.engine.run

    def interrupted(fed):
        engine(fed)
        raise KeyboardInterrupt

    monkeypatch.setattr(run.engine, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.fit(batches(), 4, tmp_path)
    monkeypatch.undo()
    assert (run.step_number, run.torn) == (2, True)
    with pytest.raises(mtf.UserError, match="step 3 was interrupted, so the variables may"):
        run.save(tmp_path)
    run.restore(tmp_path)
    run.fit(batches(), 4, tmp_path)
    whole = trainer()
    whole.fit(batches(), 4)
    for name in whole.program.variables:
        np.testing.assert_array_equal(whole.engine.read(name), run.engine.read(name))


def test_a_run_that_is_told_to_stop_is_saved(tmp_path: Path) -> None:
    whole = losses(trainer().fit(batches(), 6))
    run, seen = trainer(), []
    history = run.fit(
        batches(), 6, tmp_path, every=2, on_step=lambda step, *_: seen.append(step), stop=lambda: 5 in seen
    )
    assert losses(history) == whole[:5] and run.step_number == 5
    assert [step for step, _ in checkpoint.listed(tmp_path)] == [5, 4, 2]
    assert losses(trainer().fit(batches(), 6, tmp_path)) == whole[5:]


def test_a_run_that_waits_for_data_hears_that_it_is_to_stop(tmp_path: Path) -> None:
    asked, end = [], threading.Event()

    def late():
        yield next(batches())
        end.wait(30)

    run = trainer()
    try:
        found = run.fit(late(), 3, tmp_path, stop=lambda: asked.append(run.step_number) or asked.count(1) > 2)
    finally:
        end.set()
    assert len(found) == 1 and [step for step, _ in checkpoint.listed(tmp_path)] == [1]


def test_one_job_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stands(handle, how):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    run = trainer()
    run.fit(batches(), 1, tmp_path)
    monkeypatch.setattr(fcntl, "flock", stands)
    for write in (lambda: run.fit(batches(), 2, tmp_path), lambda: run.save(tmp_path)):
        with pytest.raises(
            mtf.UserError, match=r"is in use by process \d+ on .*; wait until that process ends"
        ):
            write()
    assert trainer().restore(tmp_path)  # who reads needs no lock


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    run = trainer()
    with pytest.raises(mtf.UserError, match="the data ended after 2 of 3 steps; give more batches"):
        run.fit([next(batches())] * 2, 3)
    with pytest.raises(mtf.UserError, match="the batch has no array for the model's input 'y'; the inputs"):
        run.fit([{"x": np.zeros((8, 4), np.float32)}] * 3, 3)
    data = Placed()
    data.get_state = lambda: {"rng": np.random.default_rng(0)}
    with pytest.raises(mtf.UserError, match="dicts, lists, strings, numbers, bools, None"):
        run.fit(data, 4, tmp_path)
    run.position = None
    run.save(tmp_path)
    with pytest.raises(
        mtf.UserError,
        match=r"has shape \[2, 4, 8\] in the checkpoint, but \[.*\bhidden:6\] in the model",
    ):
        trainer(hidden=6).restore(tmp_path)
    with pytest.raises(mtf.UserError, match="has no variable 'bias': it was saved by another model"):
        trainer(bias=True).restore(tmp_path)


@pytest.mark.parametrize("scale", [False, True])
def test_a_loss_that_is_not_finite_ends_the_run(scale: bool) -> None:
    g = mtf.Graph("division")
    b = mtf.Dim("batch", 4)
    x, w = g.input("x", [b], "float32"), g.variable("w", [b], mtf.ONES)
    loss = mtf.reduce_mean(w / x)
    model = mtf.Model(loss, mtf.SGD(0.1, loss_scale=mtf.LossScale() if scale else None))
    run = mtf.Trainer(model, "a:2", "batch:a")
    good, bad = np.ones(4, np.float32), np.zeros(4, np.float32)
    with pytest.raises(mtf.UserError, match=r"the loss is inf in step \d+.*try a smaller learning rate"):
        run.fit([{"x": x} for x in [good, *[bad] * 30]], 31)
    assert run.step_number == (21 if scale else 2)
    if scale:
        run.fit([{"x": good}] * 23, 23)
        assert run.step_number == 23 and math.isfinite(run.engine.read("w")[0])


def test_a_plan_decides_everything() -> None:
    model = network()
    plan = search(model, mesh="a:2", hardware="cpu-local")
    run = mtf.Trainer(model, plan)
    assert (run.mesh, run.layout, run.options) == (plan.mesh, plan.layout, plan.options)
    with pytest.raises(
        mtf.UserError, match="Trainer: a plan already sets the layout and the options; remove"
    ):
        mtf.Trainer(model, plan, "batch:a")


def test_a_plan_of_another_model_is_refused() -> None:
    """As on the command line: its layout may be legal, and is not the best one of this model."""
    plan = search(network(), mesh="a:2", hardware="cpu-local")
    with pytest.raises(mtf.UserError, match="the plan was made for another model: "):
        mtf.Trainer(network(hidden=16), plan)
    with pytest.raises(mtf.UserError, match=r"Trainer: mesh is None; give a mesh, e.g. 'data:2"):
        mtf.Trainer(network(), None)  # type: ignore[arg-type]


def test_the_share_of_waiting_for_input_is_measured() -> None:
    run = trainer()
    assert run.waited == 0
    run.fit(batches(), 3)
    assert 0 < run.waited < 1


def test_auto_asks_the_search_of_layoutopt() -> None:
    found = mtf.Trainer(network(), "a:2", layout="auto", engine="lockstep")
    assert isinstance(found.plan, layoutopt.Plan) and found.plan.solver.status == "OPTIMAL"
    assert (found.layout, found.options) == (found.plan.layout, found.plan.options)


def test_auto_without_a_search_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "GROUP", "no package has this")
    with pytest.raises(mtf.UserError, match="layout='auto' needs an installed package with a search, and"):
        mtf.Trainer(network(), "a:2", layout="auto", engine="lockstep")


@pytest.mark.parametrize("where", [("plan.json",), ("data:2", "plan.json")])
def test_a_plan_file_in_place_of_a_plan(where: tuple[str, ...]) -> None:
    with pytest.raises(mtf.UserError, match="is the name of a file; load the plan first: Trainer"):
        mtf.Trainer(network(), *where)
