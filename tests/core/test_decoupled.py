"""Replicas that are jobs of their own and meet in a directory: together they are DiLoCo, and nobody waits for
ever for one that is lost."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.ops.few_bits import quantised, restored
from mesh_tf_core.training import checkpoint
from mesh_tf_core.training.decoupled import Decoupled, Met
from mesh_tf_core.training.outer_step_files import _write, only
from mesh_tf_core.training.outer_step_rounds import Meetings
from mesh_tf_core.training.trainer import Trainer
from tests.core.test_replicas import alone, data, model

ROOT = Path(__file__).resolve().parents[2]


def trainer() -> Trainer:
    return Trainer(model(mtf.Adam(3e-2)), "data:2", "batch:data", engine="lockstep")


def state_of(its: Meetings, round: int) -> dict[str, Any]:
    return dict(np.load(its.directory.place(f"state-{round:08d}")))


class Lost(Exception):
    """A replica that is killed."""


def waits_alone(its: Meetings, *given: Any, waits: Any = Meetings._await) -> Any:
    """The first replica waits; another one is lost as it begins to."""
    if its.how.replica:
        raise Lost
    return waits(its, *given)


def meetings(one: Trainer, where: Path, replica: int = 0) -> Meetings:
    """Of a replica of two that meets in every step and waits for nobody."""
    return Meetings(Decoupled(where, replica, 2, 1, patience=0.0), one.engine, one.program)


def job(
    where: Path, replica: int, steps: int, found: dict[int, Any], place: Path | None = None, **more: Any
) -> threading.Thread:
    """A replica of two in a thread of its own."""
    how = Decoupled(where, replica, 2, **{"period": 3, "patience": 60.0, **more})

    def run() -> None:
        own, met = trainer(), list[Met]()
        history = own.fit(data(), steps, place, 5, meet=replace(how, on_met=lambda _, each: met.append(each)))
        found[replica] = own, [r["loss"] for r in history], met

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_in_time_they_are_replicas_of_one_job(tmp_path: Path) -> None:
    found: dict[int, Any] = {}
    threads = [job(tmp_path, replica, 7, found) for replica in range(2)]
    for thread in threads:
        thread.join()
    losses, outer = alone(2, 3, lambda: mtf.Adam(3e-2), 7)
    np.testing.assert_allclose(np.mean([found[r][1] for r in range(2)], axis=0), losses, rtol=1e-9)
    for _, _, met in found.values():
        assert [(m.round, m.present, m.dropped) for m in met] == [(1, (0, 1), False), (2, (0, 1), False)]
    newest = meetings(found[0][0], tmp_path)
    assert newest.round == 2
    state = state_of(newest, 2)
    for name, value in outer.items():
        np.testing.assert_allclose(state[name], value, rtol=1e-8)


def until(steps: int) -> Iterator[Mapping[str, np.ndarray]]:
    """Batches of both, that end in a kill."""
    yield from islice(data(), 2 * steps)
    raise Lost


def test_a_lost_replica_stops_nobody_and_takes_the_newest_state(tmp_path: Path) -> None:
    """Replica 1 is killed in step 5; the other waits for it once, and goes on. It comes back, and is there
    again."""
    found: dict[int, Any] = {}
    other = job(tmp_path, 0, 15, found, patience=0.5)
    with pytest.raises(Lost):
        trainer().fit(until(4), 9, meet=Decoupled(tmp_path, 1, 2, 3, patience=60.0))
    other.join()
    rounds = [m.present for m in found[0][2]]
    assert rounds == [(0, 1), (0,), (0,), (0,), (0,)]
    own, met = trainer(), list[Met]()
    history = own.fit(
        data(),
        3,
        meet=Decoupled(tmp_path, 1, 2, 3, patience=0.1, on_met=lambda _, each: met.append(each)),
    )
    # What it begins with is the other's last state, not its own first one.
    fresh = trainer()
    for name in ("wi", "wo"):
        fresh.engine.write(name, found[0][0].engine.read(name))
    batch = next(islice(data(), 1, None))
    assert history[0]["loss"] == pytest.approx(fresh.step(batch)["loss"], rel=1e-9)
    assert [(m.round, m.present) for m in met] == [(6, (1,))]


def saved(place: Path) -> dict[str, np.ndarray]:
    """The variables that a training ended with, and where its meetings stood."""
    found = checkpoint.newest(place)
    assert found is not None and not found.skipped
    return {"step": np.array(found.step), **{name: found.read(name) for name in found.variables}}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("after", "more"),
    [
        ("the post", {"bits": 4}),
        ("the meeting", {"period": 4, "fragments": 2}),
        ("a later save", {}),
        *(pytest.param(after, {}, marks=pytest.mark.nightly) for after in ("the post", "the meeting")),
    ],
)
def test_work_is_posted_once(after: str, more: dict[str, Any], tmp_path: Path) -> None:
    """A replica is killed when it has posted, when it has met, or in the steps that follow, and begins again
    from its checkpoint: it ends as undisturbed, and so does the other."""
    ends = {}
    for kind in ("whole", "killed"):
        place, found = tmp_path / kind, dict[int, Any]()
        place.mkdir()
        how: dict[str, Any] = {"period": 3, "patience": 60.0, **more}
        other = job(place / "meet", 0, 9, found, place / "saved-0", **how)
        own, words = Decoupled(place / "meet", 1, 2, **how), (9, place / "saved-1", 5)
        if kind == "killed":
            one = trainer()

            def die(*_: Any) -> None:
                raise Lost

            met = die if after == "the meeting" else lambda *_: None
            third = place / "meet" / "state-00000002.npz"
            stop = third.exists if after == "a later save" else bool
            with pytest.MonkeyPatch.context() as patch:
                if after == "the post":
                    patch.setattr(Meetings, "_await", waits_alone)
                with contextlib.suppress(Lost):
                    one.fit(data(), *words, meet=replace(own, on_met=met), stop=stop)
            assert 0 < one.step_number < 9
        trainer().fit(data(), *words, meet=own)
        other.join()
        ends[kind] = [saved(place / f"saved-{n}") for n in range(2)]
        names = {path.name for path in (place / "meet").iterdir() if path.name.startswith("state")}
        ends[kind].append({name: np.array(0) for name in names})
    for whole, killed in zip(*ends.values(), strict=True):
        assert whole.keys() == killed.keys()
        for name in whole:
            np.testing.assert_array_equal(killed[name], whole[name])


@pytest.mark.parametrize("kills", [5, pytest.param(80, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("how", [{}, pytest.param({"bits": 8}, marks=pytest.mark.nightly)])
def test_kills_change_nothing(tmp_path: Path, kills: int, how: dict[str, Any]) -> None:
    """Of both replicas, at any moment. In a process that has no threads: it forks."""
    code = "import dataclasses, json, pathlib, sys; from tests.core.killed_meetings import hunt; "
    code += "print(json.dumps(dataclasses.asdict("
    code += "hunt(pathlib.Path(sys.argv[1]), int(sys.argv[2]), **json.loads(sys.argv[3])))))"
    words = [sys.executable, "-c", code, str(tmp_path / "run"), str(kills), json.dumps(how)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    counts = json.loads(done.stdout)
    assert counts["kills"] >= kills and counts["faults"] == [] and counts["equal"] == counts["runs"] > 0


def test_a_replica_that_is_not_finite_ends_alone(tmp_path: Path) -> None:
    """It posts nothing, and the other goes on; what it posted is in no state."""
    its, other = meetings(trainer(), tmp_path, 1), meetings(trainer(), tmp_path)
    its.engine.write("wo", np.full((2, 8, 4), np.nan))
    with pytest.raises(mtf.UserError, match="meet: variable 'wo' contains NaN or infinite numbers, so this"):
        its.meet()
    met = other.meet()
    assert met == Met(1, (0,), False, 1024) and not its.directory.has_post(0, 1)


def test_what_is_too_old_is_dropped(tmp_path: Path) -> None:
    late = trainer()
    slow = meetings(late, tmp_path, 1)
    quick = trainer()
    ahead = meetings(quick, tmp_path)

    def trained(one: Trainer) -> None:
        one.step(next(data(7)))

    trained(late)
    trained(quick)
    assert ahead.meet().present == (0,)
    assert slow.meet() == Met(2, (1,), False, 1024)  # one round old: it joins the next one
    for _ in range(2):
        trained(quick)
        ahead.meet()
    trained(late)
    before = state_of(ahead, ahead.round)
    found = slow.meet()
    assert found.dropped and found.round == ahead.round
    np.testing.assert_array_equal(late.engine.read("wi"), before["wi"])
    assert (
        found.words(2)
        == f"round {found.round}, 1 of 2 replicas; the update of this replica was too old and is discarded"
    )


def test_nobody_reads_half_a_file(tmp_path: Path) -> None:
    """A file that is being written is not a post and no state, and a state that is there stays as it is."""
    one = trainer()
    its = meetings(one, tmp_path)
    (tmp_path / ".round-00000000-replica-1.npz.half").write_bytes(b"PK")
    (tmp_path / "state-00000001-by-1.npz").write_bytes(b"PK")
    one.step(next(data()))
    assert its.meet() == Met(1, (0,), False, 1024)
    said = (tmp_path / "state-00000001.npz").read_bytes()
    its.directory.put_state(1, {"wi": np.zeros(3)}, (1,))
    assert (tmp_path / "state-00000001.npz").read_bytes() == said


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.nightly), 4])
def test_few_bits_lose_nothing_in_the_long_run(bits: int, tmp_path: Path) -> None:
    """A post has bits / 8 bytes for each of the 2 x 64 elements and four for each row of eight or four of a
    variable; the errors of all posts but the last add up to nothing."""
    one = trainer()
    how = Decoupled(tmp_path, 0, 1, 1, 1.0, 0.0, patience=0.0, bits=bits)
    its, batches = Meetings(how, one.engine, one.program), data()
    began, moved = np.array(its._began["wi"]), np.zeros((2, 4, 8))
    for _ in range(6):
        before = np.array(its._began["wi"])
        one.step(next(batches))
        moved += before - one.engine.read("wi")
        met = its.meet()
        assert met.bytes == 2 * 64 * bits // 8 + 4 * 2 * (4 + 8)
        scales = np.load(its.directory.post(met.round - 1, 0))["wi/scales"]
        assert (np.abs(its._lost["wi"]) <= scales[..., None] / 2 * 1.001).all()
    np.testing.assert_allclose(began - its._began["wi"] + its._lost["wi"], moved, rtol=1e-5, atol=1e-6)


def test_fragments_meet_in_turn(tmp_path: Path) -> None:
    """Each layer is a fragment; every second step one of them meets, as in NumPy. A post is half."""
    found: dict[int, Any] = {}
    threads = [job(tmp_path, r, 9, found, period=4, fragments=2) for r in range(2)]
    for thread in threads:
        thread.join()
    replicas = [Trainer(model(mtf.Adam(3e-2)), "x:1", engine="lockstep") for _ in range(2)]
    outer = {n: np.array(replicas[0].engine.read(n)) for n in ("wi", "wo")}
    momentum, batches, losses = {n: np.zeros_like(x) for n, x in outer.items()}, data(), []
    for step in range(1, 10):
        losses.append(np.mean([r.step(next(batches))["loss"] for r in replicas]))
        for n in outer if step % 2 == 0 else ():
            layer = (step // 2 - 1) % 2
            came = outer[n][layer] - np.mean([r.engine.read(n)[layer] for r in replicas], axis=0)
            momentum[n][layer] = 0.9 * momentum[n][layer] + came
            outer[n][layer] -= 0.7 * (came + 0.9 * momentum[n][layer])
            for r in replicas:
                now = np.array(r.engine.read(n))
                now[layer] = outer[n][layer]
                r.engine.write(n, now)
    np.testing.assert_allclose(np.mean([found[r][1] for r in range(2)], axis=0), losses, rtol=1e-9)
    assert [m.bytes for m in found[0][2]] == [512] * 4
    late = trainer()
    Meetings(Decoupled(tmp_path, 1, 2, 4, fragments=2), late.engine, late.program)
    for name, value in outer.items():  # who returns takes the newest state of each
        np.testing.assert_allclose(late.engine.read(name), value, rtol=1e-8)


def test_codes() -> None:
    rng = np.random.default_rng(0)
    for shape in ((), (3,), (7, 73), (256,), (0, 4), (2, 3, 1)):
        array = rng.normal(size=shape).astype(np.float32)
        rows = array.size // (shape[-1] if shape else 1)
        for bits in (8, 4):
            codes, scales = quantised(array, bits)
            assert codes.nbytes == rows * -(-(shape or (1,))[-1] * bits // 8) and scales.size == rows
            found = restored(codes, scales, array.shape, bits)
            steps = scales[..., None]
            assert found.shape == shape and (np.abs(found - array) <= steps * 0.5001).all()
    flat = np.array([0.0, 7.0, -7.0, 3.0], np.float32)
    np.testing.assert_array_equal(restored(*quantised(flat, 4), (4,), 4), flat)
    assert quantised(flat, 4)[0].tolist() == [7 * 16, -7 + 3 * 16]
    assert not restored(*quantised(np.zeros(5), 8), (5,), 8).any()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("replica=0/2", "give the directory and the replica"),
        ("dir=/x", "give the directory and the replica"),
        ("dir=,replica=0/1", "give the directory and the replica"),
        ("dir=/x,replica=0/1,dir=/y", "dir is given twice; remove one of them"),
        ("dir=/x,replica=2/2", "replica 2/2 does not exist: use 0/2 to 1/2"),
        ("dir=/x,replica=0/2,period=0", "the period must be at least 1 step, found"),
        ("dir=/x,replica=0/2,patience=-1", "meet: patience=-1 and staleness=1 must both be at least 0"),
        ("dir=/x,replica=0/2,periode=3", "unknown setting 'periode'; did you mean 'period'"),
        ("dir=/x,replica=0/2,fragments=4", ", must divide the period of 30 steps; choose a divisor of 30"),
        ("dir=/x,replica=0/2,bits=5", "bits must be 32, 8 or 4, found 5"),
        ("dir=/x,replica=0/2,period=x", "period='x' is not a whole number; write e.g. period=30"),
        ("dir=/x,replica=0/2,rate=x", "rate='x' is not a number; write e.g. rate=0.7"),
        ("dir=/x,replica=0/0", "meet: the number of replicas must be at least 1, found"),
        ("dir=/x,replica=0/2,rate=inf", "learning rate must be positive and finite, found inf"),
    ],
)
def test_errors(text: str, error: str) -> None:
    with pytest.raises(mtf.UserError, match=error):
        Decoupled.parse(text)


def test_states_of_another_model_are_refused(tmp_path: Path) -> None:
    its = meetings(trainer(), tmp_path)
    about = its.directory.about(0)
    _write(its.directory.place("state-00000000"), {"wi": its._began["wi"]}, about)
    with pytest.raises(
        mtf.UserError, match=r"'wo' is missing.*or use the same hyperparameters and fragments"
    ):
        meetings(trainer(), tmp_path, 1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"count": 6, "replica": 5}, "use replica=…/2, but this replica uses replica=…/6"),
        ({"learning_rate": 0.5}, "use the same setting, or name another directory"),
    ],
)
def test_replicas_that_would_meet_otherwise_are_refused(
    more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    meetings(trainer(), tmp_path)
    one = trainer()
    how = Decoupled(**{"directory": tmp_path, "replica": 1, "count": 2, "period": 1, **more})
    with pytest.raises(mtf.UserError, match=said):
        Meetings(how, one.engine, one.program)


def test_nobody_is_a_replica_twice(tmp_path: Path) -> None:
    how = Decoupled(tmp_path / "run", 0, 2)
    code = "import sys; from mesh_tf_core.training.outer_step_files import *; "
    code += "from mesh_tf_core.training.decoupled import Met, Decoupled; "
    code += "only(Decoupled(sys.argv[1], 0, 2)).__enter__()"
    with only(how) as trouble:
        assert not trouble
        done = subprocess.run(
            [sys.executable, "-c", code, str(how.directory)], capture_output=True, text=True
        )
        assert "replica 0/2 " in done.stderr and "is in use" in done.stderr


def test_a_torn_state_is_named(tmp_path: Path) -> None:
    its = meetings(trainer(), tmp_path)
    its.directory.place("state-00000000").write_bytes(b"PK")
    with pytest.raises(mtf.UserError, match=r"state-00000000.npz' cannot be used: "):
        its.meet()


def test_a_directory_that_is_emptied_or_removed_in_between(tmp_path: Path) -> None:
    its = meetings(trainer(), where := tmp_path / "run")
    for path in where.iterdir():
        path.unlink()
    with pytest.raises(mtf.UserError, match="no longer has state 0"):
        its.meet()
    where.rmdir()
    with pytest.raises(mtf.UserError, match="run' cannot be read"):
        its.meet()
