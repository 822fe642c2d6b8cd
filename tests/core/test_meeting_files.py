"""What lies in a directory where replicas meet and is none of their files, or a damaged one."""

from __future__ import annotations

import functools
import io
import json
import os
import random
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.training.decoupled import Decoupled, Met
from mesh_tf_core.training.outer_step_files import ABOUT, MeetWarning
from mesh_tf_core.training.outer_step_rounds import Meetings
from mesh_tf_core.training.trainer import Trainer
from tests.core.test_replicas import data, model

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of mutated numbers

POST, STATE = "round-00000000-replica-1", "state-00000000"


@functools.cache
def program() -> Any:
    return Trainer(model(mtf.Adam(3e-2)), "x:1", engine="lockstep").program


def replica(where: Path, number: int = 0, **more: Any) -> Meetings:
    """One of two that meets in every step and waits for nobody, after a step."""
    how = {"directory": where, "replica": number, "count": 2, "period": 1, "patience": 0.0, **more}
    engine = LockstepEngine(program())
    its = Meetings(Decoupled(**how), engine, program())
    engine.step(next(data(number)))
    return its


def content(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as found:
        return dict(found)


def write(path: Path, arrays: dict[str, Any], packed: bool = False) -> None:
    path.unlink(missing_ok=True)
    (np.savez_compressed if packed else np.savez)(path, **arrays)


def told(**said: Any) -> Callable[[dict[str, Any]], None]:
    """Changes what a file says of itself; of None, nothing is said."""

    def change(arrays: dict[str, Any]) -> None:
        about = {**json.loads(arrays[ABOUT].tobytes()), **said}
        about = {name: value for name, value in about.items() if value is not None}
        arrays[ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)

    return change


def put(name: str, make: Callable[[np.ndarray], Any]) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        arrays[name] = make(arrays[name])

    return change


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        arrays = content(path)
        change(arrays)
        write(path, arrays)

    return harm


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def bomb(path: Path) -> None:
    """An array of 8 GiB in a file of a hundredth of that."""
    arrays = content(path)
    path.unlink()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            held = io.BytesIO()
            if name == "wi":
                head = {"descr": "<f4", "fortran_order": False, "shape": (1 << 31,)}
                np.lib.format.write_array_header_1_0(held, head)
            else:
                np.lib.format.write_array(held, array)
            archive.writestr(f"{name}.npy", held.getvalue())


NAN = put("wi", lambda x: np.where(x == x.flat[3], np.nan, x))
BOTH: dict[str, tuple[Callable[[Path], None], str]] = {
    "torn": (lambda p: p.write_bytes(p.read_bytes()[:-40]), "cannot be read"),
    "nothing": (lambda p: p.write_bytes(b""), "cannot be read"),
    "a pipe": (pipe, "it is a named pipe"),
    "a device": (device, "it is a device, not a regular file"),
    "a link to nothing": (nowhere, "the file is a broken symbolic link"),
    "a folder": (folder, "Is a directory"),
    "an array of 8 GiB": (bomb, "which do not fit an array float32[2147483648]"),
    "not finite": (edited(NAN), "contains NaN or infinite numbers"),
    "infinite": (edited(put("wi", lambda x: x + np.inf)), "contains NaN or infinite numbers"),
    "a variable less": (edited(lambda a: a.pop("wo")), "'wo' is missing"),
    "another shape": (edited(put("wi", lambda x: x[:1])), "'wi' is float64[1, 4, 8], not float32[2, 4, 8]"),
    "complex": (edited(put("wi", lambda x: x.astype(complex))), "'wi' is complex128[2, 4, 8], not"),
    "text": (edited(put("wi", lambda x: x.astype(str))), "'wi' is <U32[2, 4, 8], not"),
    "the other order": (edited(put("wi", lambda x: x.astype(">f8"))), "'wi' is >f8[2, 4, 8], not"),
    "objects": (edited(put("wi", lambda x: np.array([None]))), "'wi' is object[1], not"),
    "nothing of itself": (edited(lambda a: a.pop(ABOUT)), "the file has no valid description"),
    "a list": (
        edited(lambda a: a.update({ABOUT: np.frombuffer(b"[]", np.uint8)})),
        "invalid description: ",
    ),
    "no JSON": (
        edited(lambda a: a.update({ABOUT: np.arange(9, dtype=np.uint8)})),
        "invalid description: ",
    ),
    "too much of itself": (
        edited(lambda a: a.update({ABOUT: np.zeros(2 << 20, np.uint8)})),
        "the file has no valid description",
    ),
    "another run": (edited(told(run="other")), "other"),
    "another round": (edited(told(round=5)), "5"),
    "a round that is text": (edited(told(round="x")), "'round' must be a whole number"),
    "no round": (edited(told(round=None)), "'round' is missing"),
}
POSTS = {
    **BOTH,
    "of another replica": (edited(told(replica=0)), "the file belongs to replica"),
    "no bits": (edited(told(bits=None)), "'bits' is missing"),
    "other bits": (edited(told(bits=8)), "'wi/codes' is missing"),
    "bits that are none": (edited(told(bits=5)), "unsupported bits=5"),
    "too large": (edited(put("wi", lambda x: np.full_like(x, 1.7e308))), "the numbers are too large"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("harm", POSTS)
def test_a_post_that_cannot_be_used_stops_nobody(harm: str, tmp_path: Path) -> None:
    """It is left out, and every replica is told why: who closed the round, and who posted it."""
    other, own = (replica(tmp_path, number, learning_rate=3.0) for number in (1, 0))
    other.directory.put_post(0, 0, other._made(0)[0])
    change, said = POSTS[harm]
    change(other.directory.post(0, 1))
    met = own.meet()
    assert met is not None and (met.round, met.present, met.dropped) == (1, (0,), False)
    assert said in met.left[1] and "\n" not in met.words(2)
    assert f"the update of replica 1 is excluded: {met.left[1]}" in met.words(2)
    alone = replica(tmp_path / "alone", learning_rate=3.0)
    assert alone.meet() == Met(1, (0,), False, met.bytes)
    for name in ("wi", "wo"):
        np.testing.assert_array_equal(own.engine.read(name), alone.engine.read(name))
    # A sound one of it counts in the next round.
    again = other.meet()
    assert again is not None and (again.present, again.dropped) == ((1,), False)


STATES = {
    **BOTH,
    "another count": (edited(told(present=[0, 7])), "the file belongs to replica"),
    "present is none": (edited(told(present="x")), "'present' must be a list"),
    "as written before": (edited(told(shared=None)), "'shared' is missing"),
}


@pytest.mark.parametrize("harm", STATES)
def test_a_state_of_other_content_is_one_line(harm: str, tmp_path: Path) -> None:
    replica(tmp_path)
    change, said = STATES[harm]
    change(tmp_path / f"{STATE}.npz")
    if harm == "another run":
        return  # of a directory's first state every run is right
    with pytest.raises(mtf.UserError) as caught:
        replica(tmp_path, 1)
    text = str(caught.value)
    assert text.startswith("meet: ") and said in text and STATE in text and "\n" not in text


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """An array that nobody asks for, however large it is, harms nobody."""
    replica(tmp_path)
    path = tmp_path / f"{STATE}.npz"
    arrays = content(path)
    archive = zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED)
    with archive, archive.open("more.npy", "w", force_zip64=True) as entry:
        head = {"descr": "|u1", "fortran_order": False, "shape": (1 << 26,)}
        np.lib.format.write_array_header_1_0(entry, head)
        for _ in range(64):
            entry.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 18
    its = replica(tmp_path, 1)
    np.testing.assert_array_equal(its._began["wi"], arrays["wi"])


def test_a_stray_copy_of_a_state_is_not_counted(tmp_path: Path) -> None:
    """It ends nothing, is named once, and nothing is removed because of it."""
    its = replica(tmp_path)
    for name in ("state-99999999.npz", "state-00000007.npz"):
        (tmp_path / name).write_bytes((tmp_path / f"{STATE}.npz").read_bytes())
    theirs = {"notes-state-00000000.npz", "state-00000000.npz.bak", "state-00000001-best.npz"}
    for name in theirs:
        (tmp_path / name).write_text("mine")
    with pytest.warns(MeetWarning) as caught:
        rounds = [its.meet().round for _ in range(4)]  # type: ignore[union-attr]
    assert rounds == [1, 2, 3, 4]
    assert sorted(str(one.message).split()[1] for one in caught) == [
        "state-00000007.npz",
        "state-99999999.npz",
    ]
    names = {path.name for path in tmp_path.iterdir()}
    assert {*theirs, "state-99999999.npz", "state-00000007.npz"} < names
    assert f"{STATE}.npz" not in names and "state-00000002.npz" in names
    with pytest.raises(
        mtf.UserError,
        match=r"state-00000005.npz' cannot be used: the file contains state 4; remove the file",
    ):
        (tmp_path / "state-00000005.npz").write_bytes((tmp_path / "state-00000004.npz").read_bytes())
        its.meet()


def test_posts_of_a_run_before_are_not_waited_with(tmp_path: Path) -> None:
    """States were removed and posts were left: they neither count nor close a round before its time."""
    before = replica(tmp_path, 1)
    before.directory.put_post(0, 0, before._made(0)[0])
    (tmp_path / f"{STATE}.npz").unlink()
    its = replica(tmp_path)
    assert not its.directory.has_post(0, 1)
    met = its.meet()
    assert met is not None and met.present == (0,) and "the file belongs to run" in met.left[1]


@pytest.mark.parametrize("patience", [3600.0])
def test_who_waits_is_stopped_at_once(patience: float, tmp_path: Path) -> None:
    its, stopped, found = replica(tmp_path, patience=patience), threading.Event(), list[Any]()
    threading.Timer(0.3, stopped.set).start()
    began = time.monotonic()
    found.append(its.meet(stopped.is_set))
    assert found == [None] and its.pending and time.monotonic() - began < 3.0
    other = replica(tmp_path, 1)
    assert other.meet() is not None  # its post is there, and counts
    met = its.meet()
    assert met is not None and met.present == (0, 1) and not its.pending


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.nightly)])
def test_mutated_posts_and_states(count: int, tmp_path: Path) -> None:
    """Bytes of the file, or numbers, types and shapes in it, are changed at random. A post is used or left
    out, and a state read or refused in one line; the variables stay finite, and nothing else is raised."""
    rng, seen = random.Random(7), {"used": 0, "left out": 0, "read": 0, "refused": 0}
    for number in range(count):
        where = tmp_path / str(number)
        other, own = replica(where, 1), replica(where)
        other.directory.put_post(0, 0, other._made(0)[0])
        is_post = rng.random() < 0.6
        mutate(other.directory.post(0, 1) if is_post else where / f"{STATE}.npz", rng)
        try:
            met = own.meet()
        except mtf.UserError as error:
            assert str(error).startswith("meet: ") and "\n" not in str(error)
            seen["refused"] += 1
            assert not is_post
        else:
            assert met is not None
            seen["used" if is_post and 1 in met.present else "left out" if is_post else "read"] += 1
        for name in ("wi", "wo"):
            assert np.isfinite(own.engine.read(name)).all()
    assert sum(seen.values()) == count and seen["left out"] > count / 5 and seen["refused"] > count / 12


def mutate(path: Path, rng: random.Random) -> None:
    """One change of a file, at random."""
    if rng.random() < 0.5:
        found = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 1, 3, 20))):
            found[rng.randrange(len(found))] = rng.randrange(256)
        if rng.random() < 0.3:
            found = found[: rng.randrange(len(found))]
        path.write_bytes(bytes(found))
        return
    arrays = content(path)
    name = rng.choice([*arrays])
    array = arrays[name]
    changes: list[Callable[[], Any]] = [
        lambda: array.astype(rng.choice(["f4", ">f4", "c8", "i8", "U8", "?", "f2"])),
        lambda: array.reshape(-1)[: rng.randrange(array.size)],
        lambda: array[None],
        lambda: np.array(rng.choice([np.nan, np.inf, -1e300, 0])),
        lambda: np.frombuffer(_flipped(array, rng), array.dtype).reshape(array.shape),
        lambda: np.zeros((0,)),
    ]
    with np.errstate(all="ignore"):
        try:
            arrays[name] = rng.choice(changes)()
        except ValueError:  # letters are not numbers
            del arrays[name]
    if rng.random() < 0.2:
        del arrays[rng.choice([*arrays])]
    write(path, arrays, rng.random() < 0.5)


def _flipped(array: np.ndarray, rng: random.Random) -> bytes:
    """Some bits of an array's bytes."""
    found = bytearray(np.ascontiguousarray(array).tobytes())
    for _ in range(rng.choice((1, 8))):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)
