"""Files are whole or the old ones, whatever goes wrong."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh_tf_core import files
from mesh_tf_core.errors import UserError
from mesh_tf_core.files import check_writable, write_file
from mesh_tf_core.reading import read_file


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that is there already."""
    path = tmp_path / "plan.json"
    path.write_text("old", encoding="utf-8")
    return path


def refused(path: str | Path, content: str = "new", both: bool = True) -> str:
    """The one line with which a file is not written; the check before the work says the same."""
    with pytest.raises(UserError) as writing:
        write_file(path, content, "--out")
    line = str(writing.value)
    assert line.startswith("--out ") and " cannot be written: " in line and "\n" not in line
    if both:
        with pytest.raises(UserError) as checking:
            check_writable(path, "--out")
        assert str(checking.value) == line
    return line


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(old: Path) -> None:
    check_writable(old)
    assert old.read_text(encoding="utf-8") == "old"
    before = old.stat().st_ino
    assert write_file(old, "new ×") == old
    assert old.read_bytes() == "new ×".encode()
    assert old.stat().st_ino != before  # another file took its name: a reader of the old one keeps it
    assert list(old.parent.iterdir()) == [old]


def test_a_new_file_has_the_mode_that_the_user_gives_to_files(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_file(tmp_path / "new", b"x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_replaced_file_keeps_its_mode(old: Path) -> None:
    old.chmod(0o604)
    write_file(old, "new")
    assert stat.S_IMODE(old.stat().st_mode) == 0o604


def test_a_link_stays_a_link(old: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    link, broken = folder / "link.json", folder / "broken.json"
    link.symlink_to(old)
    write_file(link, "new")
    assert link.is_symlink() and old.read_text(encoding="utf-8") == "new"
    broken.symlink_to(tmp_path / "not yet")
    write_file(broken, "first")
    assert broken.is_symlink() and (tmp_path / "not yet").read_text(encoding="utf-8") == "first"
    assert sorted(folder.iterdir()) == [broken, link]


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_the_old_file_stays_when_the_disk_fails(
    old: Path, monkeypatch: pytest.MonkeyPatch, fails: str, number: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    if fails == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    else:
        monkeypatch.setattr(files.os, fails, fail)
    line = refused(old, both=False)
    assert os.strerror(number) in line and line.endswith("choose another path")
    monkeypatch.undo()
    assert old.read_text(encoding="utf-8") == "old" and list(old.parent.iterdir()) == [old]


def test_a_stop_in_the_middle_leaves_the_old_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_file(old, "new")
    monkeypatch.undo()
    assert old.read_text(encoding="utf-8") == "old" and list(old.parent.iterdir()) == [old]


def test_a_system_that_writes_in_pieces_writes_all(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(files.os, "write", lambda handle, data: write(handle, data[:3]))
    write_file(old, "in several pieces")
    monkeypatch.undo()
    assert old.read_text(encoding="utf-8") == "in several pieces"


def test_two_writers_share_no_temporary_name(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are in the middle of writing at the same time; one of them wins whole."""
    both, fsync, names = threading.Barrier(2), os.fsync, set()

    def together(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            both.wait(10)
            names.update(p.name for p in old.parent.iterdir())
            both.wait(10)
        fsync(handle)

    monkeypatch.setattr(files.os, "fsync", together)
    writers = [threading.Thread(target=write_file, args=(old, letter * 5000)) for letter in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(names) == 3 and old.read_text(encoding="utf-8") in ("a" * 5000, "b" * 5000)
    assert list(old.parent.iterdir()) == [old]


def test_a_killed_writer_leaves_the_old_file(old: Path) -> None:
    code = (
        "import os, sys\n"
        "from mesh_tf_core.files import write_file\n"
        "os.fsync = lambda handle: os._exit(9)\n"  # it ends where it would rename
        "write_file(sys.argv[1], 'new')\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(old)], check=False).returncode == 9
    assert old.read_text(encoding="utf-8") == "old"


def test_full_devices_folders_and_names(tmp_path: Path, old: Path) -> None:
    assert "No space left on device; free some space, or choose another path" in refused(
        "/dev/full", both=False
    )
    assert "it is a folder; name a file" in refused(tmp_path)
    assert "File name too long" in refused(tmp_path / ("x" * 300))
    assert "embedded null byte" in refused(f"{tmp_path}/a\0b")
    assert "Not a directory" in refused(old / "plan.json")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "symbolic links" in refused(loop)
    assert old.read_text(encoding="utf-8") == "old"


def test_the_longest_name_that_a_folder_takes_is_taken(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 127)
    write_file(path, "x")
    assert path.read_text(encoding="utf-8") == "x"


def test_only_the_files_own_folder_is_made(tmp_path: Path) -> None:
    check_writable(tmp_path / "build" / "plan.json")
    assert list(tmp_path.iterdir()) == []
    write_file(tmp_path / "build" / "plan.json", "x")
    line = refused(tmp_path / "tpyo" / "build" / "plan.json")
    assert f"there is no folder {str(tmp_path / 'tpyo')!r}; make the folder, or choose another path" in line
    assert [p.name for p in tmp_path.iterdir()] == ["build"]


@pytest.mark.parametrize("protected", ["file", "folder"])
def test_permissions_are_asked_for_first(old: Path, monkeypatch: pytest.MonkeyPatch, protected: str) -> None:
    """Asked of a system that says no; the superuser, who may run these tests, may write everywhere."""
    place = old if protected == "file" else old.parent
    allowed = os.access
    monkeypatch.setattr(files.os, "access", lambda path, mode: Path(path) != place and allowed(path, mode))
    with pytest.raises(UserError, match="permission denied; choose another path"):
        check_writable(old)
    if protected == "file":
        assert "permission denied; choose another path" in refused(old)
    assert old.read_text(encoding="utf-8") == "old"


def test_named_pipes_are_refused_at_once(tmp_path: Path) -> None:
    """Nobody may ever come to the other end; somebody is at that of what a shell opens, `>(gzip > x)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "it is a named pipe" in refused(pipe)
    with pytest.raises(OSError, match="it is a named pipe"):
        read_file(pipe)
    out, into = os.pipe()
    try:
        check_writable(f"/dev/fd/{into}")
        write_file(f"/dev/fd/{into}", "through it")
        os.close(os.dup(into))
        assert os.read(out, 100) == b"through it"
        os.write(into, b"back")
        os.close(into)
        assert read_file(f"/dev/fd/{out}") == b"back"
    finally:
        os.close(out)


def test_devices_are_written_as_they_are() -> None:
    write_file("/dev/null", "nowhere")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def as_stdout(to: int, work: Callable[[], object]) -> None:
    """Does something while this process prints to a handle."""
    kept = os.dup(1)
    os.dup2(to, 1)
    try:
        work()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_stdout_is_written_to_wherever_it_goes(tmp_path: Path) -> None:
    """A file that a shell has opened is not replaced: what is printed later must follow."""
    log = tmp_path / "log"
    with log.open("wb") as shell:

        def work() -> None:
            os.write(1, b"before\n")
            write_file("/dev/stdout", "the plan\n")
            write_file(log, "again\n")
            os.write(1, b"after\n")

        as_stdout(shell.fileno(), work)
    assert log.read_bytes() == b"before\nthe plan\nagain\nafter\n"
    out, into = os.pipe()
    as_stdout(into, lambda: write_file("/dev/stdout", "piped"))
    os.close(into)
    assert os.read(out, 100) == b"piped"
    os.close(out)


def test_a_reader_that_has_gone_is_no_fault_of_the_files() -> None:
    out, into = os.pipe()
    os.close(out)
    try:
        with pytest.raises(BrokenPipeError):
            as_stdout(into, lambda: write_file("/dev/stdout", "piped"))
    finally:
        os.close(into)


def test_what_may_never_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "five").write_bytes(b"12345")
    assert read_file(tmp_path / "five", 5) == b"12345"
    with pytest.raises(OSError, match="it is larger than 4 bytes"):
        read_file(tmp_path / "five", 4)
    with pytest.raises(OSError, match="it is a device"):
        read_file("/dev/zero", 1000)
    with pytest.raises(OSError, match="it is not a valid file name"):
        read_file("a\0b")
