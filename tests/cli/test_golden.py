"""What every command says is what its golden file says."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.cli import golden


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run."""
    found = tmp_path_factory.mktemp("golden")
    golden.made(found)
    return found


def test_every_command_has_its_lines() -> None:
    assert [*golden.LINES] and {*golden.LINES} == {*golden.NAMES}
    assert {path.stem for path in golden.FOLDER.glob("*.txt")} == {*golden.NAMES}


@pytest.mark.usefixtures("everything_after")
@pytest.mark.parametrize("name", golden.NAMES)
def test_a_command_says_what_its_file_says(name: str, folder: Path) -> None:
    kept = (golden.FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    now = golden.text_of(name, folder).splitlines()
    differs = [*difflib.unified_diff(kept, now, "golden", "now", lineterm="", n=0)]
    assert not differs, "\n".join([*differs, "if that is meant: python -m tests.cli.golden"])
