"""The whole command line, typed by somebody who reads no help: every case ends soon, with the right exit code
and one clear line.

Commands and options are those that there are, so a new option is tried without anybody's doing. Whatever
would start devices, processes or compilers ends a case as if it were done: all that is read before is real.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import typer
from hypothesis import strategies as st

import mesh_tf_core as mtf
from layoutopt.cli import app
from layoutopt.space.allow import found
from layoutopt.space.decisions import ARGUMENTS, KINDS, SearchSpace
from layoutopt.space.kind import Target
from layoutopt.space.recompute import SHOWN
from tests.fuzz import hostile
from tests.fuzz.test_formats import CONTEST, FORMATS
from tests.layoutopt.every_kind import whole_model

GROUP: Any = typer.main.get_command(app)
CASES = 120
SECONDS = 60
"""No case takes a tenth of it."""
CODES = (0, 2, 3, 4)

MODEL = """
import mesh_tf_core as mtf

def model(batch: int = 8, width: int = 4, dtype: str = "float32", rate: float = 0.1, tied=False, depth=None):
    g = mtf.Graph("little")
    b, d, o = mtf.Dim("batch", batch), mtf.Dim("d", width), mtf.Dim("out", 4)
    x, y = g.input("x", [b, d], "float32"), g.input("label", [b])
    w = g.variable("w", [d, o], mtf.Normal(0.1), activation_dtype=dtype)
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(mtf.einsum([x.cast(dtype), w], [b, o]), y, o))
    return mtf.Model(loss, mtf.SGD(rate), name="little")
"""


class Reached(Exception):
    """Everything was read, and the work would begin."""


class TooSlow(Exception):
    """A case that does not end."""


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a file of every kind, in which every case is run."""
    folder = tmp_path_factory.mktemp("place")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "little.py").write_text(MODEL)
    (folder / "contest.json").write_text(json.dumps(CONTEST))
    (folder / "notes.txt").write_text("this is not JSON")
    (folder / "deep.json").write_text("[" * 3000 + "]" * 3000)
    (folder / "folder").mkdir()
    code, _, err = run(["search", "little.py", "--mesh", "data:2", "--out", "plan.json"])
    assert code == 0, err
    evil = json.loads((folder / "plan.json").read_text())
    evil["details"]["source"] = "os:system"
    (folder / "evil.json").write_text(json.dumps(evil))
    for what in (
        "layoutopt.cli.running.Session.start",
        "layoutopt.runtime.launching.launch",
        "layoutopt.analysis.verify.verify",
        "costmodels.calibration.tpu.calibrate_tpu",
        "mesh_tf_core.engines.jax.compile.stablehlo",
        "mesh_tf_core.engines.Cluster",
    ):
        monkeypatch.setattr(what, reached)
    monkeypatch.setattr("reports.files.write_figures.__defaults__", (("svg",),))  # the others take seconds
    shutil.copytree(folder, folder / ".whole")
    yield folder


def reached(*_: object, **__: object) -> None:
    raise Reached


def run(words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TooSlow(words)

    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            GROUP.main(args=list(words), prog_name="layoutopt")
        raise AssertionError("a command ends with its exit code")
    except SystemExit as end:
        return int(end.code or 0), out.getvalue(), err.getvalue()
    except Reached:
        return 0, out.getvalue(), err.getvalue()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_command_line_of_anybody(place: Path) -> None:
    look_at(place, more=False)


@pytest.mark.nightly
def test_many_more_command_lines(place: Path) -> None:
    look_at(place, more=True)


def look_at(place: Path, more: bool) -> None:
    def look(words: list[str]) -> None:
        restore(place)
        code, out, err = run(words)
        assert code in CODES, (code, err)
        lines = err.splitlines()
        if code == 0:
            assert not any(line.startswith("error:") for line in lines), err
        else:
            one_error(lines, code, "--json" in words)
        if out and "--json" in words and not {"--help", "--version"} & {*words}:
            assert isinstance(json.loads(out, parse_constant=no_number), dict)
        nothing_half_written(place)

    hostile.hunt(CASES, more, command_lines(), look)


def one_error(lines: list[str], code: int, as_json: bool) -> None:
    """The last line says what is wrong, and no other one does."""
    assert lines, "an exit code without a word"
    if as_json:
        told = json.loads(lines[-1])
        assert told["exit"] == code and told["error"].strip() and "\n" not in told["error"]
        return
    assert lines[-1].startswith("error: ") and lines[-1].isprintable() and len(lines[-1]) < 5000, lines[-1]
    assert sum(line.startswith("error:") for line in lines) == 1


def no_number(text: str) -> None:
    raise AssertionError(f"JSON has no {text}")


def nothing_half_written(place: Path) -> None:
    left = [p for p in place.iterdir() if p.name.endswith(".part")]
    assert not left, left


def restore(place: Path) -> None:
    """The files as they were: a case may have written over them."""
    whole = place / ".whole"
    kept = {p.name for p in whole.iterdir()} | {".whole"}
    for path in place.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in whole.iterdir():
        if path.is_file():
            here = place / path.name
            if not here.is_file() or here.read_bytes() != path.read_bytes():
                shutil.copy(path, here)


# -- what is typed -------------------------------------------------------------------------------------------

FILES = [
    "little.py", "little.py:model", "little.py:no", "plan.json", "evil.json", "contest.json", "notes.txt",
    "deep.json", "folder", "folder/new.json", "no/such/folder/x.json", "missing.json", "missing.py",
    "out.html", "out.json", "/dev/full", "/dev/null", "os:system", "mine.py", "",
]  # fmt: skip
MESHES = ["data:2", "data:2;model:2", "data:4", "none:2", "data:²", "data:0", "data:2;data:2",
          "data:1048577", "data:" + "9" * 20, "data:" + "9" * 5000,
          "'\":2", "data", ":2", "-:2", "data:-2", "x:1"]  # fmt: skip
RULES = ["batch:data", "batch:none", "d:model", "batch:data;d:data", "none:data", "batch:nowhere", "batch",
         "batch:data+data", "plan.json", "out:data+model", "batch:-", ":", "²:²"]  # fmt: skip
COUNTS = ("every", "warm_up", "held_out", "processes", "restarts")
RIGHT = {
    "mesh": ["data:2", "data:2;model:2", "data:4", "x:1"],
    "layout": ["batch:data", "d:data", "batch:data;out:model", "", "auto", "plan.json"],
    "against": ["batch:data", "d:data", ""],
    "pin": ["batch:data", "batch:none", "d:none"],
    "forbid": ["batch:data", "d:data"],
    "settings": ["batch=4", "batch=16", "width=8", "rate=0.5", "dtype=bfloat16", "tied=yes"],
    "hardware": ["cpu-local", "tpu-v2", "h100", "a100, node_egress=1GB/s"],
    "name": ["tpu-v2", "h100"],
    "set_hardware": ["launch_overhead=1us"],
    "memory": ["16GiB", "1TiB", "1000B"],
    "storage": ["zero3", "layout", "zero1"],
    "recompute": ["auto", "never"],
    "microbatches": ["1", "2", "1,2"],
    "objective": ["time", "memory", "pareto"],
    "orders": ["mesh", "all"],
    "context": ["gather", "gather,ring,zigzag"],
    "elsewhere": ["batch", "d,batch"],
    "pipeline": ["layers"],
    "schedule": ["gpipe", "gpipe,1f1b"],
    "offload": ["weights", "weights,activations"],
    "collective_matmul": ["out", "d"],
    "keep": ["products", "others"],
    "diloco": ["never", "data:period=2", "free"],
    "accept_loss": ["0.1"],
    "to": ["jax", "tf-dtensor", "haliax", "maxtext", "mesh-tensorflow"],
    "topology": ["v5e:2x2", "v5e:2x4"],
    "target": ["tpu-v5e"],
    "time_limit": ["5"],
    "timeout": ["5"],
    "start_timeout": ["5"],
    "devices": ["2", "4", "6"],
    "max_axes": ["1", "3"],
    "top": ["1", "3"],
    "layouts": ["2", "5"],
    "steps": ["1", "5"],
    "command": ["train", "calibrate"],
    "checkpoint": ["folder", "new"],
    "solver": ["auto", "cp-sat", "highs"],
    "emit": ["program"],
    "model": ["little.py", "little.py:model"],
    "source": ["little.py", "plan.json", "evil.json"],
    "plan": ["plan.json", "evil.json"],
    "plans": ["plan.json", "evil.json"],
    "file": ["contest.json"],
    "path": ["mine.py"],
    "out": ["out.json", "folder/new.json"],
    "report": ["out.html"],
    "figures": ["folder"],
    "tables": ["folder", "tables"],
    "text": ["out.txt"],
    "prompt": ["once"],
    "seed": ["0", "7"],
    "budget": ["1e15", "1e22"],
    "loss": ["3", "2.5"],
    "money": ["1e3"],
    "tokens": ["1e6", "1B"],
    "days": ["3"],
    "price": ["4.2", "cpu-local=1"],
    "law": ["kaplan", "hoffmann"],
    "allow": ["usual", "everything", "+pipeline,-context", "recompute"],
    "fit": ["notes.txt"],
    "scale": ["both", "width:1"],
    "sizes": ["10:1k"],
    "candidates": ["2"],
    "unique": ["1M"],
    "inference": ["1M"],
    "pretrained": ["text"],
    "characters": ["4"],
    "replicas": ["2"],
    **{name: ["1", "2"] for name in COUNTS},
}
"""Of a parameter, by its name: what is meant."""


def widest() -> dict[str, list[str]]:
    """Of what a search may choose, whatever its kinds: each value, and all of them."""
    model = whole_model(0)
    wide = SearchSpace(**found([Target(model, mtf.Mesh("data:2;model:2"))], everything=True)).keywords
    values = {name: [*map(str, said)] for name, said in wide.items() if isinstance(said, tuple)}
    values["recompute"] = [*SHOWN]  # its words mean several values
    return {name: [*said, ",".join(said)] for name, said in values.items() if said}


RIGHT |= {name: [*RIGHT[name], *values] for name, values in widest().items()}
WRONG = {
    "mesh": MESHES,
    "layout": [*RULES, "missing.json", "contest.json"],
    "against": RULES,
    "pin": RULES,
    "forbid": RULES,
    "settings": ["batch=²", "batch=" + "9" * 20, "batch=" + "9" * 5000, "width=0", "width=-1", "x",
                 "rate=nan", "rate=1e999", "dtype=float8_e4m3fn", "tied=perhaps", "none=1", "depth=[[[[", "=",
                 "batch=1e3", "depth=" + "(" * 300, "dtype=bool", "batch=3", "width=" + "9" * 18],
    "hardware": ["H100", "none", "missing.json", "notes.txt", "deep.json", "plan.json", "a100,", "folder"],
    "name": ["H100", "none", "deep.json", "a100, memory=1B"],
    "set_hardware": ["launch_overhead=²", "memory=1", "=", "x=1", "launch_overhead=" + "9" * 400, "chip=1",
                     "launch_overhead=-1us", "node_egress=100GB/s", "launch_overhead=1GB"],
    "memory": ["16", "²GiB", "1e999B", "0", "-1", "none", "1B", "9" * 5000, "16000"],
    "storage": ["fsdp", "w=zero1", "x=zero1", "3", "layout,zero3", "", "zero3,²"],
    "recompute": ["always", "batch", "none"],
    "microbatches": ["²", "0", "-1", "9" * 20, "3", "1,,2", "1.5"],
    "objective": ["money"],
    "allow": ["+pipelines", "-", "", "all"],
    "to": ["pytorch", "none"],
    "topology": ["v5e:²x4", "v5e:9x9", "h100", "v5e", "v5e:0x0", "v5e:" + "9" * 30 + "x1"],
    "target": ["v5e", "h100", "none"],
    "time_limit": ["1e-9", "-1", "nan", "inf", "²", "0"],
    "timeout": ["nan", "inf", "0", "1e300"],
    "start_timeout": ["nan", "inf"],
    "devices": ["0", "-1", "²", "1048577", "9" * 30],
    "max_axes": ["0", "-1", "9" * 10],
    "top": ["0", "-1", "2000000000", "9" * 30],
    "layouts": ["1", "3000000000"],
    "seed": ["-1", "9" * 30],
    "steps": ["0", "²"],
    "budget": ["0", "-1", "²", "1e999", "nan", "9" * 400],
    "loss": ["0", "nan", "-1", "inf", "²"],
    "tokens": ["0", "1X", ""],
    "days": ["nan", "0"],
    "price": ["free", "h100=1", "=", "cpu-local=-1"],
    "law": ["chinchilla", ""],
    "scale": ["wide", "width:9", "width:nan", ":", ""],
    "sizes": ["1B", "2:1", ":", "0:0"],
    "candidates": ["0", "9999"],
    "pretrained": ["speech"],
    "characters": ["nan", "0", "-1"],
    "replicas": ["0"],
    "emit": ["hlo"],
    "solver": ["gurobi"],
    "command": ["search", "--", "", "train little.py"],
    "checkpoint": ["", "notes.txt"],
}  # fmt: skip
"""What somebody else means; of files, anything that is none of the kind."""
WORDS = [
    *FILES,
    *MESHES,
    *RULES,
    *hostile.TEXTS,
    "--batch",
    "--dtype",
    "-h",
    "--json",
    "--gpus",
    "--help",
    "64",
]


def command_lines() -> st.SearchStrategy[list[str]]:
    commands = list(GROUP.commands)
    named = st.sampled_from(commands).flatmap(command_line)
    return st.one_of(*[named] * 9, st.lists(text() | st.sampled_from(commands), max_size=3))


def text() -> st.SearchStrategy[str]:
    """A word; without '/', which could lead out of the folder."""
    free = st.text(st.characters(exclude_characters="/"), max_size=8)
    return st.sampled_from(WORDS) | free


@st.composite
def command_line(draw: st.DrawFn, name: str) -> list[str]:
    """A command with what it needs and some of its options, of which about one is wrong."""
    params = GROUP.commands[name].params
    both = {"mesh", "devices"} <= {param.name for param in params}
    where = draw(st.sampled_from(["mesh", "devices"])) if both else "mesh"
    words = [name]
    for param in params:
        if param.name == "help":
            continue
        asked = draw(st.integers(0, 49))
        if param.param_type_name == "argument":
            words += [draw(value(param.name))] if asked and (param.required or asked < 35) else []
            continue
        often = 48 if param.required else 45 if param.name == where else 2 if param.name == "mesh" else 7
        if asked >= often:
            continue
        for _ in range(2 if param.multiple and draw(st.booleans()) else 1):
            words += [draw(st.sampled_from(param.opts))]
            words += [] if param.is_flag else [draw(value(param.name))]
    if not draw(st.integers(0, 19)):
        words.insert(draw(st.integers(1, len(words))), draw(text()))
    return words


def value(name: str) -> st.SearchStrategy[str]:
    right = st.sampled_from(RIGHT.get(name, FILES))
    wrong = st.sampled_from(WRONG.get(name, FILES))
    return st.integers(0, 19).flatmap(lambda n: right if n < 15 else wrong if n < 19 else text())


def test_what_may_be_chosen_is_typed_as_it_is_meant() -> None:
    """Whatever there is to choose, with an option of its own or a field of one."""
    meant = {"pins": "pin"}
    assert {meant.get(name, name) for name in ARGUMENTS} <= RIGHT.keys()
    chosen = {name for kind in KINDS for name in kind.everything(Target(whole_model(0), mtf.Mesh("a:2;b:2")))}
    assert chosen - {"orders"} <= widest().keys()


def test_so_many_cases_are_tried() -> None:
    """`hunt` counts those of each test."""
    assert CASES + sum(cases for cases, _, _ in FORMATS.values()) >= 1800
