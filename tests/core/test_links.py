"""Nothing of ours is opened through a link that we did not make, and a lock that was removed is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from layoutopt.models.loading import load_model
from mesh_tf_core.errors import UserError
from mesh_tf_core.files import check_writable, create, write_file
from mesh_tf_core.training import checkpoint, locking
from mesh_tf_core.training.folders import check_directory
from mesh_tf_core.training.locking import locked
from mesh_tf_core.training.saving import Saver
from tests.core.saved import VALUES, whole
from tests.core.test_checkpoint import HOLDER

NOBODY = 65534


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("link", "a symbolic link"),
        ("dangling", "a symbolic link"),
        ("second name", "a file with a second hard link"),
        ("file", "a file of another program"),
        ("json", "a file of another program"),
        ("pipe", "no regular file"),
        ("folder", "no regular file"),
    ],
)
def test_a_lock_that_is_not_ours_is_not_touched(tmp_path: Path, kind: str, said: str) -> None:
    folder, precious = tmp_path / "ck", tmp_path / "precious.txt"
    folder.mkdir()
    lock = folder / locking.FILE
    content = b'["package-lock"]' if kind == "json" else b"all my work"
    precious.write_bytes(content)
    if kind == "link":
        lock.symlink_to("../precious.txt")
    elif kind == "dangling":
        lock.symlink_to("../new.txt")
    elif kind == "second name":
        os.link(precious, lock)
    elif kind in ("file", "json"):
        precious.rename(lock)
        precious = lock
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with (
        pytest.raises(UserError, match=rf"ck': \.lock, the name of the lock file, is {said}; remove \.lock"),
        checkpoint.owned(folder),
    ):
        pass
    assert precious.read_bytes() == content and not (tmp_path / "new.txt").exists()
    assert not locking._handles and not locking._counts


@pytest.mark.parametrize("content", [b"", b"\0" * 60, b'{"host": "a", "pid": 1, "since": "then"}'])
def test_a_lock_that_a_dead_process_left_is_taken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / locking.FILE).write_bytes(content)
    with locked(tmp_path) as trouble:
        assert trouble == "" and str(os.getpid()).encode() in (tmp_path / locking.FILE).read_bytes()


def test_a_lock_that_was_removed_is_taken_again_and_said(tmp_path: Path) -> None:
    saver = Saver()
    with checkpoint.owned(tmp_path):
        saver.save(tmp_path, 1, whole(VALUES), {})
        saver.wait()
        (tmp_path / locking.FILE).unlink()
        said = r"its lock file \.lock was removed .* has been created again; do not remove"
        with pytest.warns(checkpoint.CheckpointWarning, match=said):
            saver.save(tmp_path, 2, whole(VALUES), {})
        saver.wait()
        saver.save(tmp_path, 3, whole(VALUES), {})
        saver.wait()
        second = [sys.executable, "-c", HOLDER, str(tmp_path), "alone"]
        done = subprocess.run(second, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        assert "is in use" in done.stderr
    assert not locking._handles and [step for step, _ in checkpoint.listed(tmp_path)] == [3, 2, 1]


def test_a_job_that_came_in_when_the_lock_was_removed_is_named(tmp_path: Path) -> None:
    with checkpoint.owned(tmp_path):
        (tmp_path / locking.FILE).unlink()
        words = [sys.executable, "-c", HOLDER, str(tmp_path), "alone"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            pid = other.stdout.readline().strip()
            said = rf"its lock file \.lock was removed .*; now .* is in use by process {pid} on "
            for _ in range(2):
                with pytest.raises(UserError, match=said):
                    Saver().save(tmp_path, 1, whole(VALUES), {})
            other.kill()
        with pytest.warns(
            checkpoint.CheckpointWarning,
            match="and has been created again; do not remove the file, because it",
        ):
            (saver := Saver()).save(tmp_path, 1, whole(VALUES), {})
        saver.wait()
    assert not locking._handles and not locking._counts


def test_files_of_a_checkpoint_are_new(tmp_path: Path) -> None:
    """In a folder in which others can write, a link may lie where a file is to come."""
    precious = tmp_path / "precious"
    precious.write_text("all my work")
    with pytest.raises(FileExistsError), checkpoint.beginning(tmp_path, 1) as folder:
        (folder / "00000.safetensors").symlink_to(precious)
        checkpoint.write_pieces(folder, 0, whole(VALUES))
    with pytest.raises(FileExistsError), checkpoint.beginning(tmp_path, 1) as folder:
        written = checkpoint.write_pieces(folder, 0, whole(VALUES))
        (folder / "manifest.json").symlink_to(precious)
        checkpoint.finish(folder, 1, written, {})
    with (
        pytest.raises(
            UserError, match=r"step 1 is not saved: 00000\.safetensors is a symbolic link, although"
        ),
        checkpoint.beginning(tmp_path, 1) as folder,
    ):
        written = checkpoint.write_pieces(folder, 0, whole(VALUES))
        (folder / "00000.safetensors").rename(tmp_path / "moved")
        (folder / "00000.safetensors").symlink_to(tmp_path / "moved")
        checkpoint.finish(folder, 1, written, {})
    assert precious.read_text() == "all my work" and checkpoint.listed(tmp_path) == []


def test_what_is_new_replaces_nothing(tmp_path: Path) -> None:
    precious, link = tmp_path / "precious", tmp_path / "state.npz"
    precious.write_text("all my work")
    for target in (precious, tmp_path / "nothing"):
        link.symlink_to(target)
        with pytest.raises(FileExistsError):
            create(link)
        link.unlink()
    with pytest.raises(FileExistsError):
        create(precious)
    assert precious.read_text() == "all my work" and [*tmp_path.iterdir()] == [precious]


def test_a_link_of_the_users_own_is_followed(tmp_path: Path) -> None:
    place, link = tmp_path / "place", tmp_path / "plan.json"
    link.symlink_to(place)
    check_writable(link)
    write_file(link, "ours")
    assert place.read_text() == "ours" and link.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    precious, link = tmp_path / "precious", tmp_path / "plan.json"
    precious.write_text("all my work")
    link.symlink_to(precious)
    os.lchown(link, NOBODY, NOBODY)
    for write in (lambda: write_file(link, "ours"), lambda: check_writable(link)):
        with pytest.raises(UserError, match="it is a symbolic link of another user"):
            write()
    assert precious.read_text() == "all my work"


def test_a_link_that_goes_round_is_called_a_link(tmp_path: Path) -> None:
    loop = tmp_path / "loop.py"
    loop.symlink_to(loop)
    with pytest.raises(UserError, match=r"loop.py' is a broken link; give another path"):
        check_directory(loop)
    with pytest.raises(UserError, match=r"loop.py' is a broken symbolic link; point the link"):
        load_model(str(loop))
