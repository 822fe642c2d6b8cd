"""The benchmark of the contest: its results file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import contest


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    if not contest.OUT.exists():
        pytest.skip("the contest has not been measured since its benchmark became this one")
    return json.loads(contest.OUT.read_text(encoding="utf-8"))["rows"]


def test_the_least_certain_come_first_and_other_files_are_left_out(tmp_path: Path) -> None:
    for name in ("A.json.gz", "asplos-2025-iopddl-V.json.gz", "out.json", "E.json.gz", "N.json"):
        (tmp_path / name).touch()
    assert [contest.letter(path) for path in contest.files([str(tmp_path)], None)] == ["V", "N", "A"]
    assert [path.name for path in contest.files([str(tmp_path)], "a")] == ["A.json.gz"]
    assert [path.name for path in contest.files([str(tmp_path / "out.json")], None)] == ["out.json"]
    with pytest.raises(SystemExit, match="no file of instance B"):
        contest.files([str(tmp_path)], "A,B")


def test_every_public_instance_has_an_answer_in_time(rows: list[dict[str, Any]]) -> None:
    assert sorted(row["instance"] for row in rows) == sorted(contest.ORDER)
    for row in rows:
        assert row["limit"] <= float(contest.published()[row["instance"]]["contest_timeout_s"])
        assert row["seconds"] <= row["limit"]
        assert row["status"] in ("OPTIMAL", "FEASIBLE")


def test_rows_are_what_was_published_and_counted(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        known = contest.best_published(row["instance"])
        assert row["best_published"] == known
        assert row["ratio"] == round(row["cost"] / known, 5)
        assert row["bound"] <= row["cost"]
        assert (row["status"] == "OPTIMAL") == (row["cost"] - row["bound"] <= 1e-6 * row["cost"])


def test_answers_are_near_the_best_published(rows: list[dict[str, Any]]) -> None:
    ratios = [row["ratio"] for row in rows]
    assert max(ratios) <= 1.10
    assert sum(ratio <= 1.02 for ratio in ratios) >= 12
