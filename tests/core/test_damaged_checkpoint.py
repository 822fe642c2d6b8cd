"""Checkpoints that are torn, edited or lie are passed over, and it is said why."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh_tf_core.errors import UserError
from mesh_tf_core.training import checkpoint, manifest
from tests.core.saved import VALUES, cut, flip, whole


def edited(path: Path) -> None:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**manifest, "step": manifest["step"] + 1}), encoding="utf-8")


FILE = "00000.safetensors"
DAMAGE = {
    "a cut file": (
        lambda p: cut(p / FILE),
        "has 383 bytes, but its arrays end at byte",
    ),
    "a flipped bit": (lambda p: flip(p / FILE), "does not match its checksum"),
    "a lost file": (lambda p: (p / FILE).unlink(), "00000.safetensors cannot be read"),
    "a damaged header": (
        lambda p: (p / FILE).write_bytes(b"\2" + bytes(7) + b"[]"),
        "the JSON value is not an object",
    ),
    "a header without its arrays": (lambda p: (p / FILE).write_bytes(b"\2" + bytes(7) + b"{}"), "lacks 'w'"),
    "a cut manifest": (lambda p: cut(p / manifest.MANIFEST), "Expecting"),
    "an edited manifest": (
        lambda p: edited(p / manifest.MANIFEST),
        "does not match its checksum",
    ),
    "a lost manifest": (lambda p: (p / manifest.MANIFEST).unlink(), "manifest.json cannot be read"),
    "another format": (lambda p: (p / manifest.MANIFEST).write_text('{"format": "x"}'), "format 'x'"),
    "no format": (lambda p: (p / manifest.MANIFEST).write_text("{}"), "lacks 'format'"),
    "an empty manifest": (
        lambda p: (p / manifest.MANIFEST).write_text(""),
        "manifest.json is not valid JSON: ",
    ),
}


def passed_over(directory: Path, harm: Callable[[Path], object]) -> str:
    """The line that is said of the newer of two checkpoints after something was done to it."""
    for step in (1, 2):
        checkpoint.write(directory, step, whole(VALUES), {})
    harm(directory / "step-000000002")
    found = checkpoint.newest(directory)
    assert found is not None and found.step == 1
    (line,) = found.skipped
    assert line.startswith("step-000000002: ")
    return line


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(damage: str, tmp_path: Path) -> None:
    harm, said = DAMAGE[damage]
    assert said in passed_over(tmp_path, harm)
    harm(tmp_path / "step-000000001")
    with pytest.raises(
        UserError,
        match=r"no complete checkpoint .step-000000002: .*; "
        "step-000000001: ",
    ):
        checkpoint.newest(tmp_path)


def signed(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes a manifest as its own writer might have: the digest is right."""

    def change(folder: Path) -> None:
        path = folder / manifest.MANIFEST
        content = json.loads(path.read_text(encoding="utf-8"))
        edit(content)
        path.write_text(json.dumps({**content, "sha256": manifest._digest(content)}), encoding="utf-8")

    return change


def nested(folder: Path) -> None:
    (folder / manifest.MANIFEST).write_text("[" * 100_000 + "]" * 100_000, encoding="utf-8")


def shaped(*shape: int) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["variables"]["w"] |= {"shape": list(shape), "part": list(shape)}

    return change


def placed(*begins: list[int], part: tuple[int, int] = (2, 3)) -> Callable[[dict[str, Any]], None]:
    """w, float64[4, 3], in pieces."""

    def change(content: dict[str, Any]) -> None:
        entry = content["variables"]["w"]
        entry |= {"part": list(part), "parts": [{**entry["parts"][0], "begin": begin} for begin in begins]}

    return change


LIES = {
    "nested": (nested, "is nested too deeply, or too large"),
    "no object": (lambda p: (p / manifest.MANIFEST).write_text("[]"), "must contain a JSON object, found"),
    "a list of variables": (signed(lambda m: m.update(variables=[])), "'variables' must be a JSON object"),
    "an endless step": (signed(lambda m: m.update(step=math.inf)), "'step' must be a whole number"),
    "a step of 400 digits": (signed(lambda m: m.update(step=10**400)), "'step' must be below "),
    "a number too long": (lambda p: (p / manifest.MANIFEST).write_text("9" * 5000), "Exceeds the limit"),
    "another step": (signed(lambda m: m.update(step=7)), "manifest.json is of step 7"),
    "a foreign path": (
        signed(lambda m: m["variables"]["w"]["parts"][0].update(file="../step-000000001/00000.npy")),
        "'variables.w.parts.0.file' must match the pattern",
    ),
    "a missing file": (
        signed(lambda m: m["variables"]["w"]["parts"][0].update(file="00009.safetensors")),
        "cannot be read",
    ),
    "another shape": (signed(shaped(2, 6)), f"is float64[2, 6] in manifest.json, float64[4, 3] in {FILE}"),
    "a piece too few": (signed(placed([0, 0])), "do not fill shape"),
    "a piece twice": (signed(placed([0, 0], [0, 0])), "do not fill shape"),
    "pieces that overlap": (signed(placed([0, 0], [1, 0])), "do not fill shape"),
    "pieces that stand out": (signed(placed([0, 0], [3, 0], part=(3, 3))), "do not fill shape"),
    "do not fill shape": (signed(placed([0, 0], part=(0, 3))), "do not fill shape"),
    "a piece that is not there": (signed(placed([0, 0], [2, 0])), "00000.safetensors lacks 'w[0:2,0:3]'"),
    "a huge shape": (
        signed(shaped(1 << 40, 1 << 40)),
        f"is float64[1099511627776, 1099511627776] in manifest.json, float64[4, 3] in {FILE}",
    ),
    "a negative size": (
        signed(lambda m: m["variables"]["w"].update(shape=[-1, 12])),
        "must be at least 0",
    ),
    "another dtype": (
        signed(lambda m: m["variables"]["w"].update(dtype="int64")),
        f"is int64[4, 3] in manifest.json, float64[4, 3] in {FILE}",
    ),
    "objects": (signed(lambda m: m["variables"]["w"].update(dtype="object")), "'variables.w.dtype' must be"),
    "no variables": (signed(lambda m: m.pop("variables")), "'variables' is missing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_is_believed_only_when_all_of_it_is_right(lie: str, tmp_path: Path) -> None:
    tell, said = LIES[lie]
    line = passed_over(tmp_path, tell)
    assert said in line and "\n" not in line


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 1, whole(VALUES), {})
    words = {FILE: r"cannot be read \(it is a named pipe", manifest.MANIFEST: "is not a regular file"}
    for name, said in words.items():
        (tmp_path / "step-000000001" / name).unlink()
        os.mkfifo(tmp_path / "step-000000001" / name)
        with pytest.raises(UserError, match=f"step-000000001: {name} {said}"):
            checkpoint.newest(tmp_path)
