"""A plan is data: what it says of its model is run only if the user named it, or it still is what it was."""

from __future__ import annotations

import importlib
import json
import os
import py_compile
import shutil
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from layoutopt.cli import app
from layoutopt.models.recorded import closure, hashes
from tests.cli.conftest import ROOT

MODEL = """
from functools import partial

import mesh_tf_core as mtf
from parts import WIDTH

def model(batch: int = 8):
    with open("ran", "a") as ran:
        ran.write("ran ")
    g = mtf.Graph("little")
    b, d = mtf.Dim("batch", batch), mtf.Dim("d", WIDTH)
    x = g.input("x", [b, d], "float32")
    w = g.variable("w", [d, mtf.Dim("out", 4)], mtf.Normal(0.1))
    return mtf.Model(mtf.reduce_mean(mtf.einsum([x, w], [b, mtf.Dim("out", 4)])), mtf.SGD(0.1))

def remove(path: str = "."):
    with open("ran", "a") as ran:
        ran.write("removed ")

def wide(batch: int = 16) -> mtf.Model:
    return model(batch)

small = partial(model, batch=4)
removal = partial(remove, "here")
"""


class Place:
    """A folder with a model of two files, a plan with details, and the same plan as `--json` prints it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran = folder, folder / "ran"
        self.model, self.parts = folder / "model.py", folder / "parts.py"
        self.plan, self.printed = folder / "plan.json", folder / "printed.json"

    @property
    def times(self) -> int:
        """How often the model was built since the last look."""
        count = len(self.ran.read_text().split()) if self.ran.exists() else 0
        self.ran.unlink(missing_ok=True)
        return count

    def edit(self, **details: Any) -> None:
        """Changes the details of both plans."""
        for file in (self.plan, self.printed):
            found = json.loads(file.read_text())
            found["details"] |= details
            file.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a place."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "model.py").write_text(MODEL)
    (folder / "parts.py").write_text("WIDTH = 4\n")
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        here.setattr(sys, "path", list(sys.path))
        done = CliRunner().invoke(
            app, ["search", "model.py", "--mesh", "data:2", "--json", "--out", "plan.json"]
        )
    assert done.exit_code == 0, done.stderr
    (folder / "printed.json").write_text(done.stdout)
    (folder / "ran").unlink()
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    shutil.copytree(made, tmp_path / "work")
    for name in ("parts", "helper", "late_library"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path / "work")
    return Place(tmp_path / "work")


NEEDS = (["explain", "plan.json"], ["verify", "plan.json", "--topology", "v5e:2x2"])
"""Commands that cannot do without the model."""
ALONE = (["report", "plan.json"], ["export", "plan.json", "--to", "jax"])
"""Those that can, from a plan with details."""


def test_the_plan_records_the_hash_of_every_file(place: Place) -> None:
    for file in (place.plan, place.printed):
        details = json.loads(file.read_text())["details"]
        assert details["source"] == "model.py"
        assert details["source_sha256"] == hashes(place.model) and len(details["source_sha256"]) == 2


@pytest.mark.parametrize("source", ["os:system", "subprocess:run", "model:model", "parts"])
@pytest.mark.parametrize("command", NEEDS, ids=lambda c: c[0])
def test_a_module_that_a_plan_names_is_not_imported(
    refused: Callable[..., str], place: Place, command: list[str], source: str
) -> None:
    place.edit(source=source)
    line = refused(*command)
    assert f"the plan's model {source!r} is not a .py or .json file" in line
    assert line.endswith("name the model yourself, with --model MODEL")
    assert place.times == 0


@pytest.mark.parametrize("command", ALONE, ids=lambda c: c[0])
def test_what_a_plan_says_is_enough_for_reports_and_exports(
    run: Callable[..., Result], place: Place, command: list[str]
) -> None:
    for source in ("os:system", "model.py"):
        place.edit(source=source)
        assert run(*command).exit_code == 0
        assert place.times == 0


def test_a_plan_without_details_is_shown_as_far_as_it_goes(
    run: Callable[..., Result], refused: Callable[..., str], place: Place
) -> None:
    place.edit(source="os:system")
    done = run("report", "printed.json")
    assert done.exit_code == 0 and (place.folder / "report.html").is_file()
    assert "the plan's model 'os:system' is not a .py or .json file" in done.stderr
    assert "--model MODEL, to add variables, operations and memory to the report" in done.stderr
    for to in ("mesh-tensorflow", "haliax"):
        assert run("export", "printed.json", "--to", to).exit_code == 0
    for to in ("jax", "tf-dtensor", "maxtext"):
        assert "name the model yourself, with" in refused("export", "printed.json", "--to", to)
    assert place.times == 0
    assert run("report", "printed.json", "--model", "model.py").exit_code == 0
    assert place.times > 0


def test_the_same_file_is_run_and_a_changed_one_is_not(
    run: Callable[..., Result], refused: Callable[..., str], place: Place
) -> None:
    assert run("explain", "plan.json", "--quiet").exit_code == 0
    assert place.times > 0
    text = place.parts.read_text()
    place.parts.write_text(text + "# harmless\n")
    line = refused("explain", "plan.json")
    assert "'parts.py', which belongs to the plan's model, has changed: its SHA-256 differs" in line
    assert place.times == 0
    assert run("explain", "plan.json", "--model", "model.py", "--quiet").exit_code == 0
    assert place.times > 0
    place.parts.write_text(text)
    place.model.write_text(place.model.read_text() + "\n")
    assert "'model.py', which belongs to the plan's model, has changed: its SHA-256" in refused(
        "explain", "plan.json"
    )
    assert place.times == 0


@pytest.mark.parametrize("function", ["wide", "small"])
def test_a_function_that_builds_a_model_is_run_as_model_is(
    run: Callable[..., Result], refused: Callable[..., str], place: Place, function: str
) -> None:
    done = run("search", f"model.py:{function}", "--mesh", "data:2", "--out", "other.json")
    assert "next: layoutopt explain" not in done.stderr or "--model" not in done.stderr
    assert place.times > 0
    assert run("explain", "other.json", "--quiet").exit_code == 0
    assert place.times > 0
    place.model.write_text(place.model.read_text() + "\n")
    assert "has changed: its SHA-256" in refused("explain", "other.json")
    assert place.times == 0


def test_a_file_that_is_imported_and_not_recorded_is_not_run(
    refused: Callable[..., str], place: Place
) -> None:
    """Also one that now stands before an installed module of that name."""
    (place.folder / "mesh_tf_core.py").write_text(f"open({str(place.ran)!r}, 'a').write('shadow ')\n")
    assert "the plan records no SHA-256 of 'mesh_tf_core.py', which its model" in refused(
        "explain", "plan.json"
    )
    (place.folder / "mesh_tf_core.py").unlink()
    place.edit(source_sha256={name: h for name, h in hashes(place.model).items() if name == "model.py"})
    assert "the plan records no SHA-256 of 'parts.py', which its model" in refused("explain", "plan.json")
    assert place.times == 0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("model.py:remove", "the plan's model is the function 'remove' of 'model.py', and only 'model'"),
        ("model.py:removal", "the plan's model is the function 'removal' of 'model.py', and only 'model'"),
        ("model.py:WIDTH", "the plan's model is the function 'WIDTH' of 'model.py', and only 'model'"),
        ("gone.py", "the plan's model file 'gone.py' does not exist"),
        ("../outside.py", "the plan's model file '../outside.py' is not below the current folder"),
        ("link.py", "the plan's model file 'link.py' is not below the current folder"),
        ("a\0.py", "the plan's model file 'a\\x00.py' does not exist"),
        ("x" * 5000 + ".py", "does not exist"),
        (".py", "the plan's model '.py' is not a .py or .json file"),
    ],
)
def test_other_files_and_functions(refused: Callable[..., str], place: Place, source: str, said: str) -> None:
    outside = place.folder.parent / "outside.py"
    shutil.copy(place.model, outside)
    (place.folder / "link.py").symlink_to(outside)
    place.edit(source=source)
    assert said in refused("explain", "plan.json")
    assert place.times == 0


def test_a_plan_of_an_older_version_needs_its_model_named(
    run: Callable[..., Result], refused: Callable[..., str], place: Place
) -> None:
    place.edit(source_sha256={})
    line = refused("explain", "plan.json")
    assert "the plan records no SHA-256 of its model file 'model.py'" in line
    assert place.times == 0
    assert run("explain", "plan.json", "--model", "model.py", "--quiet").exit_code == 0


def test_recorded_names_are_only_compared(refused: Callable[..., str], place: Place) -> None:
    """Neither a pipe that nobody writes to, nor a device, nor a folder makes anything wait."""
    os.mkfifo(place.folder / "pipe")
    known = hashes(place.model)
    for name in ("pipe", "/dev/zero", "/", "..", "a\0b", "x" * 5000, ""):
        place.edit(source_sha256={**known, name: "0" * 64})
        assert "has changed: its SHA-256 differs from the one in the plan" in refused("explain", "plan.json")
    assert place.times == 0


def test_the_form_with_what_it_leaves_out_needs_no_model(run: Callable[..., Result], place: Place) -> None:
    found = json.loads(place.plan.read_text())
    found["refined"] = {"here": {"batch": []}}
    axis = next(iter(found["mesh"]))
    found["slices"] = {axis: 2}
    place.plan.write_text(json.dumps(found))
    place.edit(source="os:system")
    done = run("export", "plan.json", "--to", "jax", "--json")
    told = json.loads(done.stdout)
    assert told["not_said"] == {"refined": {"here": {"batch": []}}}
    assert (
        told["slices"] == {axis: 2}
        and f"not expressed in this format: axis {axis} spans 2 slices" in done.stderr
    )
    assert "not expressed in this format: batch:none in here" in done.stderr and place.times == 0


def test_exports_from_the_plan_and_from_its_model_are_the_same(
    run: Callable[..., Result], place: Place
) -> None:
    for to in ("mesh-tensorflow", "tf-dtensor", "jax", "haliax"):
        alone = run("export", "plan.json", "--to", to).stdout
        assert place.times == 0
        assert run("export", "plan.json", "--to", to, "--model", "model.py").stdout == alone
        assert place.times > 0


def test_splits_over_axes_that_are_not_there(refused: Callable[..., str], place: Place) -> None:
    found = json.loads(place.plan.read_text())
    found["details"]["variables"][0]["splits"][0] = ["nowhere"]
    place.plan.write_text(json.dumps(found))
    assert "over axis 'nowhere', which is not an axis of its mesh data:2" in refused(
        "export", "plan.json", "--to", "jax"
    )


# -- local imports -------------------------------------------------------------------------------------------


def names(folder: Path, main: str = "model.py") -> set[str]:
    return {str(p.relative_to(folder)) for p in closure((folder / main).resolve())}


def test_imports_are_followed_wherever_they_are_written(tmp_path: Path) -> None:
    for name, text in {
        "model.py": "import a\nimport b.c\nfrom d import e, f\nif a:\n    import g\n",
        "a.py": "def late():\n    import h\n",
        "b/__init__.py": "",
        "b/c.py": "from . import x\nfrom .x import y\nfrom ..a import z\n",
        "b/x.py": "import numpy, json, os.path\nimport mesh_tf_core\n",
        "d/e.py": "",
        "d/f/__init__.py": "from .inner import *\n",
        "d/f/inner.py": "this is not python\n",
        "g.py": "import model\n",
        "h.py": "",
        "unused.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    wanted = {"model.py", "a.py", "b/__init__.py", "b/c.py", "b/x.py", "d/e.py", "d/f/__init__.py"}
    assert names(tmp_path) == wanted | {"d/f/inner.py", "g.py", "h.py"}


def test_a_model_in_a_package_has_its_package(tmp_path: Path) -> None:
    package = tmp_path / "pack" / "models"
    package.mkdir(parents=True)
    for name, text in {
        "../__init__.py": "",
        "__init__.py": "from pack import setup\n",
        "little.py": "from ..shared import x\n",
        "../shared.py": "",
        "../setup.py": "",
    }.items():
        (package / name).write_text(text)
    found = hashes((package / "little.py").resolve())
    assert set(found) == {"little.py", "__init__.py", "../__init__.py", "../shared.py", "../setup.py"}


def test_what_a_running_model_imports_by_name_is_recorded_too(tmp_path: Path) -> None:
    from layoutopt.models.loading import load_model

    (tmp_path / "by_name_only.py").write_text("WIDTH = 3\n")
    text = (ROOT / "examples/mlp.py").read_text()
    late = "    import importlib\n    importlib.import_module('by_name_' + 'only')\n"
    (tmp_path / "found.py").write_text(text.replace("    g = mtf.Graph(", f"{late}    g = mtf.Graph(", 1))
    loaded = load_model(str(tmp_path / "found.py"))
    assert set(loaded.hashes()) == {"found.py", "by_name_only.py"}


def test_the_examples_are_small() -> None:
    """Neither this project nor what is installed is anybody's model."""
    found = names(ROOT, "examples/transformer_lm.py")
    assert found == {f"examples/{name}.py" for name in ("transformer_lm", "text", "training", "__init__")}


# -- what would run instead of a checked file ----------------------------------------------------------------

HOSTILE = """
with open("ran", "a") as ran:
    ran.write("hostile ")
WIDTH = 4
"""


def hostile_pyc(source: Path) -> None:
    """A .pyc that Python takes for a file without comparing the two."""
    harmless = source.read_bytes()
    source.write_text(HOSTILE)
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    source.write_bytes(harmless)


def test_a_checked_file_runs_from_the_text_that_was_checked(run: Callable[..., Result], place: Place) -> None:
    for source in (place.parts, place.model):
        hostile_pyc(source)
    assert run("explain", "plan.json", "--quiet").exit_code == 0
    assert "hostile" not in place.ran.read_text()


@pytest.mark.parametrize(
    "stands",
    [
        "parts.abi3.so",
        "parts.so",
        f"parts{EXTENSION_SUFFIXES[0]}",
        "parts/__init__.abi3.so",
        "parts/__init__.pyc",
    ],
)
def test_what_stands_before_a_checked_file_is_refused(
    refused: Callable[..., str], place: Place, stands: str
) -> None:
    (place.folder / stands).parent.mkdir(exist_ok=True)
    (place.folder / stands).write_bytes(b"no machine code")
    line = refused("explain", "plan.json")
    assert (
        "importing 'parts' would run " in line and f"{stands}', whose hash the plan does not record" in line
    )
    assert line.endswith("so give the model yourself with --model MODEL")
    assert place.times == 0


@pytest.mark.parametrize("late", ["helper.py", "helper.pyc", "other/helper.py"])
def test_a_local_import_by_name_that_is_not_recorded_is_refused(
    refused: Callable[..., str], run: Callable[..., Result], place: Place, late: str
) -> None:
    """Neither of the model's folder nor of the current one."""
    text = "import importlib, sys\nsys.path.append('other')\nimportlib.import_module('hel' + 'per')\n"
    place.model.write_text(text + place.model.read_text())
    place.edit(source_sha256=hashes(place.model))
    source, file = place.folder / "hostile.py", place.folder / late
    file.parent.mkdir(exist_ok=True)
    source.write_text(HOSTILE)
    if late.endswith(".pyc"):
        py_compile.compile(str(source), str(file))
    else:
        shutil.copy(source, file)
    line = refused("explain", "plan.json")
    assert "importing 'helper' would run " in line and place.times == 0
    assert run("explain", "plan.json", "--model", "model.py", "--quiet").exit_code == 0
    assert place.times > 1


def test_a_library_that_we_import_late_is_not_taken_from_the_models_folder(
    refused: Callable[..., str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify` needs JAX once the model is loaded."""
    (place.folder / "late_library").mkdir()
    (place.folder / "late_library" / "__init__.py").write_text(HOSTILE)

    def late(*_: object) -> None:
        importlib.import_module("late_library")

    monkeypatch.setattr("layoutopt.plan.build.check_plan_model", late)
    assert "importing 'late_library' would run " in refused("explain", "plan.json")
    assert place.times == 1
