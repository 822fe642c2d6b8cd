"""The directory of a job's checkpoints: its owner, its content, and its readers.

Other files there belong to others: only exact names of this format are read, counted or removed, and no link
is followed.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.training.locking import locked

STEP = "([0-9]{9}|[1-9][0-9]{9,17})"
NAME = re.compile(f"step-{STEP}")
UNFINISHED = re.compile(rf"\.step-{STEP}\.[0-9a-f]{{1,16}}")
"""Left by a process that was ended while it wrote."""
REPLACED = re.compile(rf"\.step-{STEP}\.replaced")
"""The older one of the same step, for the moment between two renamings."""


def read_mode(text: str) -> int:
    """An octal mode of folders as a number; UserError if it is none that lets the owner write."""
    mode = int(text, 8) if re.fullmatch("[0-7]{1,4}", text) else 0
    check_mode(mode, repr(text))
    return mode


def check_mode(mode: int, called: str) -> None:
    """UserError unless it is a mode of folders that lets the owner write."""
    if not 0o700 <= mode <= 0o777:
        raise UserError(
            f"checkpoint mode {called} must be an octal number that gives the owner full access, e.g. "
            "0700 (only you), 0750 (your group can read) or 0755 (everyone can read)"
        )


def make(folder: Path, mode: int | None) -> None:
    """Makes a folder of this mode, or as the process's umask has it."""
    folder.mkdir(0o777 if mode is None else mode)
    if mode is not None:
        folder.chmod(mode)


def check_directory(directory: str | Path, mode: int | None = None) -> None:
    """Raises UserError unless checkpoints can be written there; makes the directory (of this mode), and the
    one around it, but none above."""
    if not str(directory):
        raise UserError("checkpoint '' is empty; name a directory, e.g. build/run")
    root = Path(directory)
    try:
        for folder in (root.parent, root):
            if not folder.is_dir():
                make(folder, mode if folder == root else None)
    except FileExistsError as error:
        kind = "a broken link" if os.path.islink(error.filename) else "a file"
        raise UserError(
            f"checkpoint {str(directory)!r}: {str(error.filename)!r} is {kind}; give another path"
        ) from None
    except FileNotFoundError as error:
        if root.parent.parent.is_dir():
            raise unwritable(directory, error) from None
        raise UserError(
            f"checkpoint {str(directory)!r} cannot be created: there is no folder "
            f"{str(root.parent.parent)!r}; create the folder, or choose another path"
        ) from None
    except (OSError, ValueError) as error:
        raise unwritable(directory, error) from None
    if not os.access(root, os.W_OK | os.X_OK):
        raise UserError(
            f"checkpoint {str(directory)!r} cannot be written: permission denied; change the permissions, or "
            "give another directory"
        )


@contextlib.contextmanager
def owned(directory: str | Path, mode: int | None = None) -> Iterator[str]:
    """Within it checkpoints can be written there, by this job alone. Yields a problem of the lock, or
    nothing. A directory that is made gets this mode.

    Raises:
      UserError: it cannot be written, or another job writes there.
    """
    check_directory(directory, mode)
    with contextlib.ExitStack() as stack:
        try:
            trouble = stack.enter_context(locked(directory))
        except OSError as error:
            raise unwritable(directory, error) from None
        yield trouble


def unwritable(directory: str | Path, error: Exception) -> UserError:
    """The user's error for an error of the operating system."""
    said, todo = (
        (error.strerror if isinstance(error, OSError) else None) or error,
        "give a directory with enough free space",
    )
    if isinstance(error, FileNotFoundError):
        said, todo = (
            "another process removed the directory",
            "do not remove it during training, or give another directory",
        )
    left = listed(directory)
    kept = f"; the checkpoint {left[0][1].name} is still complete" if left else ""
    return UserError(f"checkpoint {str(directory)!r} cannot be written: {said}; {todo}{kept}")


def listed(directory: str | Path) -> list[tuple[int, Path]]:
    """Steps and paths of the checkpoints in a directory, the newest first, whole or not."""
    ours = {}
    for pattern in (REPLACED, NAME):  # the later one stands
        for path in _entries(Path(directory)):
            if found := pattern.fullmatch(path.name):
                ours[int(found[1])] = path
    return sorted(ours.items(), reverse=True)


def _entries(root: Path) -> list[Path]:
    """The directories in a directory; a link is somebody's own."""
    try:
        with os.scandir(root) as found:
            return [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]
    except (OSError, ValueError):
        return []


def tidy(root: Path) -> None:
    """Removes files of ended processes; a file that one had moved aside gets its name back."""
    for path in _entries(root):
        if found := REPLACED.fullmatch(path.name):
            named = root / f"step-{found[1]}"
            if not named.exists():
                path.rename(named)
                continue
        if found or UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def named(step: int) -> str:
    """The name of a whole checkpoint."""
    return f"step-{step:09d}"


def begun(directory: str | Path, step: int, name: Any) -> Path:
    """The folder that another process made with `beginning`; UserError if it sent no such name."""
    found = UNFINISHED.fullmatch(name) if isinstance(name, str) else None
    if found is None or int(found[1]) != step:
        raise UserError(
            f"checkpoint {str(directory)!r}: worker 0 named the folder {str(name)[:80]!r}, which is not "
            f"an unfinished checkpoint of step {step}; nothing is written"
        )
    return Path(directory) / found[0]
