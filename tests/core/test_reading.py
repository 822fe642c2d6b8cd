"""One door to files that are read: each reader refuses every kind of bad file at once, in one line."""

from __future__ import annotations

import ast
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.calibration.runner import Partial
from costmodels.hardware import HardwareError, read_hardware
from examples import mlp
from layoutopt.cli.defaults import _read as read_targets
from layoutopt.cli.defaults import _settings
from layoutopt.cli.learn import read_runs as measured_runs
from layoutopt.cli.terminal import Terminal
from layoutopt.importers.huggingface import from_huggingface
from layoutopt.importers.huggingface.fields import Fields
from layoutopt.models.loading import load_model
from layoutopt.plan.build import load_plan
from layoutopt.sizing.fitting import read_runs
from layoutopt.solver import load
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.stages import on_mesh
from mesh_tf_core import reading
from mesh_tf_core.engines.jax.codes import _read_private
from mesh_tf_core.errors import UserError
from mesh_tf_core.training.manifest import read as read_manifest
from mesh_tf_core.training.weights import _arrays
from reports import read_plan

ROOT = Path(__file__).resolve().parents[2]
READERS: dict[str, Callable[[Path], Any]] = {
    "plan.json": load_plan,
    "report.json": read_plan,
    "hardware.json": read_hardware,
    "problem.json": load,
    "config.json": from_huggingface,
    "runs.csv": read_runs,
    "measured.csv": lambda path: [*measured_runs(path)],
    "partial.json": lambda path: Partial(path, {}) if path.is_file() else reading.read_file(path),
    "layoutopt.toml": read_targets,
    "model.py": lambda path: load_model(str(path)),
    "secret": lambda path: _read_private(str(path)),
    "manifest.json": read_manifest,
    "weights.npz": _arrays,
    "weights.safetensors": _arrays,
}


def unreadable(path: Path) -> None:
    path.symlink_to("/proc/self/mem")  # its bytes cannot be read, by the superuser neither


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


BAD: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a directory": lambda path: path.mkdir(),
    "a named pipe": lambda path: os.mkfifo(path),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "unreadable": unreadable,
    "too large": large,
    "empty": lambda path: path.write_text(""),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00\x80"),
    "broken": lambda path: path.write_text("[{(\x1b[31m"),
    "very nested": lambda path: path.write_text("a = " * path.name.endswith("toml") + "[" * 100_000),
    "long number": lambda path: path.write_text("a = " * path.name.endswith("toml") + "9" * 5000),
}


@pytest.fixture
def soon() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_every_bad_file_in_one_line(
    name: str, bad: str, tmp_path: Path, soon: None
) -> None:
    path = tmp_path / name
    BAD[bad](path)
    try:
        READERS[name](path)
    except (UserError, OSError, ValueError) as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        # A manifest's errors, and those of files, are put into a line where they are known by name.
        assert isinstance(error, UserError) or name in ("manifest.json", "partial.json"), error
    else:
        assert name == "secret" and bad not in ("missing", "a directory", "a named pipe", "endless")


WHOLE = {"open", "os.open", "io.open", "gzip.open", "np.load", "np.fromfile", "json.load", "tomllib.load"}
METHODS = {"read_text", "read_bytes", "expanduser"}
PATHS: dict[str, Any] = {"open": ast.Constant, "ZipFile": ast.Attribute, "memmap": ast.Attribute}
"""Ways to read a file: functions, methods of a path, and those whose argument may be one."""
NOT_READ = ("'w'", "'wb'", "'xb'", "O_WRONLY", "O_CREAT", "os.devnull", "opened(", "os.path.expanduser")


def bypasses(tree: ast.AST) -> Iterator[str]:
    """Calls that read a named file; data that comes with the package, and files for writing, are none."""
    packaged = {
        ast.unparse(node.targets[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "__file__" in ast.unparse(node.value)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner, _, way = called.rpartition(".")
            path = bool(node.args) and isinstance(node.args[0], PATHS.get(way, ()))
            reads = called in WHOLE or (owner and way in METHODS) or (way in PATHS and path)
            if not reads or "__file__" in owner or owner in packaged:
                continue
            said = ast.unparse(node)
            if not any(word in said for word in ("resources.files", *NOT_READ)):
                yield f"line {node.lineno}: {said[:80]}"


def test_no_reader_bypasses_the_door() -> None:
    doors = {ROOT / "mesh_tf_core/reading.py", ROOT / "mesh_tf_core/files.py"}
    for package in ("mesh_tf_core", "costmodels", "layoutopt", "reports"):
        for file in sorted({*(ROOT / package).rglob("*.py")} - doors):
            found = [*bypasses(ast.parse(file.read_text(encoding="utf-8")))]
            assert not found, (str(file), found, "read files with mesh_tf_core.reading")
    for line in ("open(p).read()", "Path(p).read_text()", "np.load(p)", "json.load(f)", "p.open('rb')",
                 "os.open(p, os.O_RDONLY)", "ZipFile(self.path)", "Path(p).expanduser()"):  # fmt: skip
        assert [*bypasses(ast.parse(line))], line
    for line in ("open(p, 'w')", "read_text(p)", "team.open(program)", "zipfile.ZipFile(opened(p))"):
        assert not [*bypasses(ast.parse(line))], line


def test_a_file_with_control_characters_is_named_without_them(tmp_path: Path) -> None:
    path = tmp_path / "hardware\x1b[31m.json"
    path.write_text(json.dumps({"like": "\x1b[2J"}), encoding="utf-8")
    with pytest.raises(HardwareError) as caught:
        read_hardware(path)
    assert str(caught.value).isprintable()


def test_recorded_texts_and_numbers_that_nobody_wrote_are_refused() -> None:
    """A plan's command with an open quotation; a field of 10**59; a warm-up of 10**400 steps."""
    for use, said in (
        (lambda: _settings("layoutopt search 'x --set"), "give MODEL, and its options, instead of --like"),
        (
            lambda: Fields({"rope_theta": 1e59}, "config.json").number("rope_theta"),
            r"a number of at most 1e\+38",
        ),
        (lambda: mtf.WarmupRsqrt(0.1, 10**400), "warmup must be 1 to"),
        (
            lambda: on_mesh(mlp.model(), mtf.Mesh("x:2"), SearchSpace(pipeline=("none",))),
            "no loop over layers",
        ),
    ):
        with pytest.raises(UserError, match=said):
            use()


def test_names_do_not_control_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.say("model \x1b[31mred\x07")
    terminal.show("layout \x1b[2J", "two\nlines")
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).splitlines()) and "two\nlines\n" in out
