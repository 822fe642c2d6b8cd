"""Wrong input of every kind: what was asked, what was found, and what to type instead."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import mesh_tf_core as mtf
from layoutopt.cli.units import parse_seconds
from layoutopt.models.loading import load_model
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.mesh import MOST_DEVICES

MLP = "examples/mlp.py"
ON = (MLP, "--mesh", "data:2")
TWENTY, MANY = "9" * 20, "9" * 5000


@pytest.mark.parametrize(
    ("args", "said"),
    [
        pytest.param(
            ["cost", *ON, "--memory", "16"],
            "has no unit; write the unit, for example --memory 16GiB",
            id="GiB",
        ),
        pytest.param(["cost", *ON, "--memory", "81920"], "for example --memory 81920MiB", id="MiB"),
        pytest.param(["cost", *ON, "--hardware", "H100"], "did you mean 'h100'? known:", id="H100"),
        pytest.param(
            ["search", *ON, "--batch", "64"], "to set a hyperparameter, write --set batch=64; see", id="batch"
        ),
        pytest.param(
            ["cost", *ON, "--dtype=bfloat16"],
            "to set a hyperparameter, write --set dtype=bfloat16",
            id="dtype",
        ),
        pytest.param(["cost", *ON, "--learning-rate"], "write --set learning_rate=VALUE", id="no value"),
        pytest.param(["search", MLP, "--gpus", "8"], "write --devices 8; see", id="gpus"),
        pytest.param(
            ["cost", *ON, "--storage", "fsdp"], "unknown storage 'fsdp'; use zero3; known:", id="fsdp"
        ),
        pytest.param(
            ["search", *ON, "--storage", "layout,ZeRO-3"], "'ZeRO-3'; did you mean 'zero3'?", id="ZeRO-3"
        ),
        pytest.param(
            ["cost", *ON, "--set", "dtype=float8_e4m3fn"],
            "dtype 'float8_e4m3fn' is not supported; use bfloat16; known: bfloat16, bool,",
            id="float8",
        ),
        pytest.param(["cost", *ON, "--set", "dtype=bf16"], "use bfloat16; known", id="bf16"),
        pytest.param(
            ["export", "plan.json", "--to", "pytorch"],
            "; write --to torchtitan; see",
            id="pytorch",
        ),
        pytest.param(["export", "plan.json", "--to=TF"], "; write --to tf-dtensor; see", id="TensorFlow"),
    ],
)
def test_what_to_type(refused: Callable[..., str], args: list[str], said: str) -> None:
    assert said in refused(*args)


OTHERS = """
tensor-model-parallel-size=2 pipeline-model-parallel-size=2 expert-model-parallel-size=2
context-parallel-size=2
tp=2 pp=2 dp=2 cp=2 ep=2 parallelism.tensor_parallel_degree=2 ici_fsdp_parallelism=8 data-parallel-size=8
micro-batch-size=2 global-batch-size=512 gradient_accumulation_steps=8 per_device_train_batch_size=1
training.local_batch_size=1 seq-length=4096 training.seq_len=4096 recompute-granularity=full bf16 fp16
activation_checkpoint.mode=selective remat_policy=full gradient-checkpointing sequence-parallel zero_stage=3
fsdp fsdp_sharding_strategy=FULL_SHARD use-distributed-optimizer nproc-per-node=8 nnodes=2 nodes=2
gpus-per-node=8
num_gpus=8 num_processes=8 num_machines=2 gpus=8 world-size=64 mixed_precision=bf16 hbm=80GB gpu=h100
pipeline_parallel_schedule=1F1B
"""
"""Options of Megatron, torchrun, DeepSpeed, torchtitan, accelerate, transformers and MaxText."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("command", ["search", "cost"])
@pytest.mark.parametrize("word", OTHERS.split())
def test_options_of_other_tools(refused: Callable[..., str], command: str, word: str) -> None:
    name, _, value = word.partition("=")
    line = refused(command, "examples/transformer_lm.py", f"--{name}", *filter(None, [value]))
    ours = {*re.findall(r"--[a-z-]+", line.partition("; see")[0].removeprefix(f"No such option: --{name}"))}
    assert ours and ours <= options_of(command), line
    for stated in re.findall("--(?:storage|recompute|schedule) ([a-z0-9-]+)", line):
        assert stated in "zero3 always selective 1f1b", line
    assert "dtype" not in line or "dtype=bfloat16" in line or "dtype=float16" in line


def options_of(*commands: str) -> set[str]:
    import typer

    from layoutopt.cli import app

    every = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {o for each in commands or every for param in every[each].params for o in param.opts}


def test_every_word_of_other_tools_has_an_answer() -> None:
    """Each group of synonyms has one name that is ours, so that its others are pointed at it."""
    from costmodels.frameworks import framework_names
    from costmodels.hardware import hardware_names
    from layoutopt.cli.application import ADVICE, DEGREES
    from layoutopt.cli.units import SECONDS
    from layoutopt.models.loading import hyperparameters
    from layoutopt.plan.export import FORMATS
    from layoutopt.space.allow import EVERYTHING
    from layoutopt.space.context import WAYS
    from layoutopt.space.offload import KINDS
    from layoutopt.space.recompute import WORDS
    from mesh_tf_core.errors import _folded, _synonyms
    from mesh_tf_core.ir.dtypes import DTYPES
    from mesh_tf_core.ir.schedules import NAMES
    from mesh_tf_core.lower.storage import STAGES, WITHIN

    named = (framework_names(), hardware_names(), ADVICE, DEGREES, SECONDS, FORMATS, WAYS, KINDS, WORDS)
    values = (DTYPES, NAMES, STAGES, (WITHIN, EVERYTHING, "time", "adam", "data", "model"))
    ours = {_folded(name) for known in (*named, *values, options_of()) for name in known}
    ours |= {_folded(name) for name in hyperparameters("examples/moe_lm.py")}
    assert [group for group in _synonyms() if not ours & {*group}] == []
    for asked, known, found in (
        ("nemo", framework_names(), "megatron"),
        ("FULL_SHARD", STAGES, "zero3"),
        ("num_hidden_layers", ("layers", "length"), "layers"),
        ("layers", ("num_hidden_layers",), "num_hidden_layers"),
    ):
        assert f"use {found}; known: " in known_names(asked, known)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1m", 60), ("2min", 120), ("1.5 h", 5400), ("10 minutes", 600), ("1e1", 10)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--time-limit", "s") == seconds


@pytest.mark.parametrize("text", ["x", "-1", "0", "inf", "nan", "1w", "1m30", "²s"])
@pytest.mark.parametrize(
    "words",
    ["search 0 --time-limit", "explain 0 --time-limit", "lint 0 --time-limit", "train 0 --start-timeout"],
)
def test_times_that_are_none(refused: Callable[..., str], words: str, text: str) -> None:
    option = words.split()[-1]
    assert f"{option}: {text!r}" in refused(*words.split(), text)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        pytest.param(
            ["cost", MLP, "--mesh", "data:²"],
            "is not an axis NAME:SIZE; write e.g. 'data:8;model:4'",
            id="mesh",
        ),
        pytest.param(["cost", MLP, "--mesh", "data:٢"], "is not an axis NAME:SIZE", id="Arabic digits"),
        pytest.param(["cost", *ON, "--set", "batch=²"], "'²' is not a whole number", id="hyperparameter"),
        pytest.param(["cost", *ON, "--set", "learning_rate=٣"], "is not a finite number", id="float"),
        pytest.param(["cost", *ON, "--memory", "²GiB"], "is not an amount of memory", id="memory"),
        pytest.param(["cost", *ON, "--memory", "١٦GiB"], "is not an amount of memory", id="Arabic memory"),
        pytest.param(
            ["search", *ON, "--microbatches", "²"], "is not a list of positive numbers", id="microbatches"
        ),
        pytest.param(["search", *ON, "--top", "²"], "must be a whole number, found '²'", id="option"),
        pytest.param(
            ["cost", *ON, "--hardware", "a100", "--set-hardware", "node_egress=²GB/s"],
            "NAME=NUMBER",
            id="set",
        ),
        pytest.param(
            ["cost", MLP, "--mesh", f"data:{TWENTY}"],
            "more than 1,048,576 devices",
            id="20 digits",
        ),
        pytest.param(
            ["cost", MLP, "--mesh", f"data:{MANY}"],
            "more than 1,048,576 devices",
            id="5,000 digits",
        ),
        pytest.param(["cost", *ON, "--set", f"batch={TWENTY}"], "size must be at most 2^48", id="dimension"),
        pytest.param(["cost", *ON, "--set", f"batch={MANY}"], "is not a whole number", id="5,000 of one"),
        pytest.param(
            ["search", MLP, "--devices", TWENTY], "a search supports at most 1,048,576 devices", id="devices"
        ),
        pytest.param(
            ["search", MLP, "--devices", MANY], "exceeded maximum size, found '9999", id="5,000 of devices"
        ),
        pytest.param(["search", *ON, "--top", "2000000000"], "give at most 1,000", id="top"),
        pytest.param(
            ["validate", *ON, "--layouts", "2000000000"], "--layouts must be at most 1000", id="layouts"
        ),
        pytest.param(["search", MLP, "--devices", "8", "--max-axes", "2000000000"], "at most 8", id="axes"),
        pytest.param(
            ["launch", "-n", "2000000000", "train", MLP], "--processes must be at most 256", id="workers"
        ),
        pytest.param(["validate", *ON, "--seed", "-1"], "--seed must be at least 0", id="seed"),
        pytest.param(["train", *ON, "--timeout", "1e9"], "at most 10,000,000 seconds", id="years"),
        pytest.param(
            ["cost", MLP, "--mesh", "none:2"],
            "is reserved: in layout rules it means 'not split'; use another",
            id="none",
        ),
        pytest.param(
            ["cost", MLP, "--mesh", "-:2"],
            "is reserved: in layout rules it means 'not split'; use another",
            id="hyphen",
        ),
        pytest.param(["cost", MLP, "--mesh", "da\0ta:2"], "use a non-empty name without spaces", id="NUL"),
        pytest.param(["cost", *ON, "--layout", "x" * 5000], "is not a rule DIM:AXIS", id="a long layout"),
        pytest.param(["cost", *ON, "--hardware", "x" * 5000], "is not known", id="a long name"),
        pytest.param(["cost", "x" * 5000 + ".py"], "does not exist", id="a long file"),
        pytest.param(["cost", "a\0.py"], "does not exist", id="a file with NUL"),
        pytest.param(["solve-problem", "a\0"], "embedded null byte", id="a problem with NUL"),
        pytest.param(["cost", *ON, "--set", "layers=" + "(" * 300], "is not a whole number", id="nested"),
    ],
)
def test_numbers_and_names_that_nobody_means(refused: Callable[..., str], args: list[str], said: str) -> None:
    line = refused(*args)
    assert said in line and len(line) < 2000 and line.isprintable()


@pytest.mark.parametrize("levels", [100, 900, 1100, 100_000])
def test_deeply_nested_json(refused: Callable[..., str], tmp_path: Path, levels: int) -> None:
    """Wherever JSON is read: in whole files, and in one of their fields."""
    deep = "[" * levels + "]" * levels
    file = tmp_path / "deep.json"
    plan = {"format": "layoutopt-plan/1", "model": {"name": "x", "hparams": "DEEP"}, "mesh": "DEEP"}
    for content in (deep, f'{{"like": {deep}}}', json.dumps(plan).replace('"DEEP"', deep)):
        file.write_text(content, encoding="utf-8")
        refused("cost", MLP, "--layout", str(file))
        refused("cost", *ON, "--hardware", str(file))
        refused("explain", str(file))
        refused("report", str(file), "--out", str(tmp_path / "x.html"))
        refused("solve-problem", str(file))


def test_json_as_windows_writes_it(run: Callable[..., Result], tmp_path: Path) -> None:
    """With a mark of its byte order."""
    plan, hardware = tmp_path / "plan.json", tmp_path / "mine.json"
    assert run("search", *ON, "--out", str(plan), "--quiet").exit_code == 0
    hardware.write_text('{"like": "tpu-v2", "name": "mine"}', encoding="utf-8-sig")
    plan.write_text(plan.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert run("cost", MLP, "--layout", str(plan), "--hardware", str(hardware)).exit_code == 0


def test_a_user_without_a_home(
    run: Callable[..., Result], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that gives an unknown user id."""
    import pwd

    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert run("cost", *ON).exit_code == 0
    assert run("hardware").exit_code == 0
    assert "there is no home directory; give a file with --out" in refused("calibrate", "--mesh", "data:2")
    assert "model file '~/x.py' does not exist" in refused("cost", "~/x.py", "--mesh", "data:2")


def test_names_of_the_library_itself() -> None:
    for bad in ("a\0b", "none", "", "a b", "\x1b[31m", "a\x85"):
        with pytest.raises(UserError, match="mesh axis name"):
            mtf.Mesh({bad: 2})
    for bad in ("a\0b", "", "a b", "\x1b[31m"):
        with pytest.raises(UserError, match="dimension name"):
            mtf.Dim(bad, 2)
    with pytest.raises(UserError, match="more than 1,048,576 devices"):
        mtf.Mesh({"a": MOST_DEVICES, "b": 2})
    assert mtf.Mesh({"a": MOST_DEVICES}).devices == MOST_DEVICES
    with pytest.raises(UserError, match=r"at most 2\^48"):
        mtf.Dim("a", 2**48 + 1)


# -- batches -------------------------------------------------------------------------------------------------

LITTLE = """
import numpy as np
import mesh_tf_core as mtf

def model():
    g = mtf.Graph()
    b, c = mtf.Dim("batch", 4), mtf.Dim("classes", 10)
    x, y = g.input("x", [b, c], "float32"), g.input("label", [b])
    loss = mtf.softmax_cross_entropy(x * g.variable("w", [c], mtf.ONES), y, c)
    {mask}
    return mtf.Model(mtf.reduce_mean(loss), mtf.SGD(0.1))

def data():
    x, y = np.zeros((4, 10), np.float32), np.arange(4, dtype=np.int32)
    yield dict(x=x, label=y)
    yield {batch}
"""


def second_batch(folder: Path, batch: str, mask: str = "") -> Any:
    """The batch that a model file's data gives after a good one."""
    file = folder / "little.py"
    file.write_text(LITTLE.format(batch=batch, mask=mask))
    batches = load_model(str(file)).data()
    next(batches)
    return next(batches)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("None", "data() yielded a value of type NoneType; yield a dict"),
        ("'text'", "data() yielded a value of type str; yield a dict"),
        ("dict(x=None, label=y)", "batch input 'x' is nothing, not an array of numbers"),
        ("dict(x='text', label=y)", "batch input 'x' is a value of type str, not an array of numbers"),
        (
            "dict(x=x.tolist(), label=y)",
            "'x' is a value of type list, not an array of numbers; convert the input",
        ),
        ("dict(x=np.full((4, 10), 'a'), label=y)", "'x' is an array of <U1, not an array of numbers"),
        ("dict(x=np.full((4, 10), None), label=y)", "'x' is an array of object, not an array of numbers"),
        ("{0: x}", "data() yielded a batch without the input 'x'; known: 0"),
    ],
)
def test_batches_that_are_none(tmp_path: Path, batch: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        second_batch(tmp_path, batch)
    assert said in str(refusal.value) and str(refusal.value).startswith(str(tmp_path / "little.py"))


# -- exported names ------------------------------------------------------------------------------------------

QUOTES = """
import mesh_tf_core as mtf

def model():
    g = mtf.Graph("it's \\"quoted\\"\\n\\0 and more")
    a, b = mtf.Dim("batch", 4), mtf.Dim("d'\\"\\\\", 4)
    w = g.variable("w'\\"#\\\\", [b], mtf.ONES)
    return mtf.Model(mtf.reduce_mean(g.input("x'\\"", [a, b], "float32") * w), mtf.SGD(0.1))
"""


@pytest.mark.parametrize("to", ["mesh-tensorflow", "tf-dtensor", "jax", "haliax"])
def test_quotes_in_names_are_exported_as_they_are(
    run: Callable[..., Result], tmp_path: Path, to: str
) -> None:
    (tmp_path / "quotes.py").write_text(QUOTES)
    plan, axis = tmp_path / "plan.json", "m'\"\\"
    args = ("--mesh", f"{axis}:2", "--pin", f"d'\"\\:{axis}", "--out", str(plan), "--quiet")
    done = run("search", str(tmp_path / "quotes.py"), *args, "--storage", "layout", "--microbatches", "1")
    assert done.exit_code == 0, done.stderr
    text = run("export", str(plan), "--to", to).stdout
    found: dict[str, Any] = {}
    exec(compile(text.replace("from tensorflow.experimental import dtensor", ""), to, "exec"), found)
    if to == "mesh-tensorflow":
        assert found["mesh_shape"] == f"{axis}:2" and f"d'\"\\:{axis}" in found["layout"]
    elif to == "tf-dtensor":
        assert found["MESH_AXES"] == [(axis, 2)]
    else:
        assert found["MESH_AXES"] == (axis,) and math.prod(found["MESH_SHAPE"]) == 2
    if to == "jax":
        assert "w'\"#\\" in found["VARIABLES"] and tuple(found["INPUTS"]["x'\""]) == (None, axis)
