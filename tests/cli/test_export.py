"""`export`: every form is read back by the library it is for, or by its rules."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import mesh_tf_core as mtf
from layoutopt.cli import app
from layoutopt.models.loading import load_model
from layoutopt.plan.decided import Decided
from layoutopt.plan.export import FORMATS, export
from layoutopt.plan.exported import Exported, ExportedTensor
from tests.cli.exported import matrices, two_axes

LM = "examples/transformer_lm.py"
SIZES = ("layers=2", "d_model=64", "d_ff=128", "length=32", "batch=8")
PLAIN = ("--storage", "layout", "--recompute", "never", "--microbatches", "1")
RULES = "batch:data;heads:model;d_ff:model;vocab:model"


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan under RULES, as `search --json` prints it."""
    pins = [word for rule in RULES.split(";") for word in ("--pin", rule)]
    sets = [word for size in SIZES for word in ("--set", size)]
    args = ["search", LM, "--mesh", "data:2;model:4", *sets, *pins, "--pin", "length:none", *PLAIN, "--json"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.stderr
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(done.stdout, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def stored_plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan that stores every variable at zero3, recomputes its layers and has two microbatches."""
    sets = [word for size in SIZES for word in ("--set", size)]
    decided = ("--storage", "zero3", "--recompute", "always", "--microbatches", "2")
    pins = [word for rule in (*RULES.split(";"), "positions:none") for word in ("--pin", rule)]
    done = CliRunner().invoke(
        app, ["search", LM, "--mesh", "data:2;model:2", *sets, *pins, *decided, "--json"]
    )
    assert done.exit_code == 0, done.stderr
    path = tmp_path_factory.mktemp("stored") / "plan.json"
    path.write_text(done.stdout, encoding="utf-8")
    return str(path)


def splits() -> dict[str, tuple[tuple[str, ...], ...]]:
    """What lowering says of every variable."""
    model = load_model(LM, SIZES).model
    program = model.lower(mtf.Mesh("data:2;model:4"), mtf.Layout(RULES))
    return {name: stored.splits for name, stored in program.variables.items()}


def names(text: str) -> dict[str, Any]:
    """The names that exported Python defines."""
    found: dict[str, Any] = {}
    exec(compile(text, "exported", "exec"), found)
    return found


def test_mesh_tensorflow(run: Callable[..., Result], plan_file: str) -> None:
    found = names(run("export", plan_file, "--to", "mesh-tensorflow").stdout)
    # The grammar of mesh_tensorflow.ops.convert_to_shape and convert_to_layout_rules: pairs "name:size" or
    # "dimension:axis", separated by ';' or ','.
    mesh = dict(pair.split(":") for pair in found["mesh_shape"].split(";"))
    assert mesh == {"data": "2", "model": "4"}
    rules = dict(pair.split(":") for pair in found["layout"].split(";"))
    assert rules == dict(rule.split(":") for rule in RULES.split(";"))


def test_jax_takes_every_spec(run: Callable[..., Result], plan_file: str) -> None:
    from jax.sharding import AbstractMesh, NamedSharding

    found = names(run("export", plan_file, "--to", "jax").stdout)
    mesh = AbstractMesh(found["MESH_SHAPE"], found["MESH_AXES"])
    model = load_model(LM, SIZES).model
    program = model.lower(mtf.Mesh("data:2;model:4"), mtf.Layout(RULES))
    assert set(found["VARIABLES"]) == set(program.variables)
    for name, stored in program.variables.items():
        sharding = NamedSharding(mesh, found["VARIABLES"][name])
        local = [
            size // program.mesh.group_size(axes)
            for size, axes in zip(stored.variable.shape.sizes, stored.splits, strict=True)
        ]
        assert list(sharding.shard_shape(stored.variable.shape.sizes)) == local
    assert tuple(found["INPUTS"]["tokens"]) == ("data", None)


DTENSOR = """
import sys, json
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
from tensorflow.experimental import dtensor
found = {}
exec(sys.stdin.read(), found)
mesh = dtensor.create_mesh(found["MESH_AXES"], devices=[f"CPU:{i}" for i in range(8)])
layouts = found["layouts"](mesh)
x = dtensor.call_with_layout(tf.zeros, layouts["attention/q"], [2, 64, 8, 32])
print(json.dumps({name: list(layout.sharding_specs) for name, layout in layouts.items()}))
print(json.dumps([list(piece.shape) for piece in dtensor.unpack(x)]))
"""


@pytest.mark.nightly
def test_dtensor_takes_every_layout(run: Callable[..., Result], plan_file: str) -> None:
    text = run("export", plan_file, "--to", "tf-dtensor").stdout
    done = subprocess.run(
        [sys.executable, "-c", DTENSOR], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    specs, pieces = (json.loads(line) for line in done.stdout.splitlines())
    for name, found in splits().items():
        assert specs[name] == ["".join(axes) or "unsharded" for axes in found]
    assert specs["tokens"] == ["data", "unsharded"]
    assert pieces == [[2, 64, 2, 32]] * 8


def test_haliax(run: Callable[..., Result], plan_file: str) -> None:
    found = names(run("export", plan_file, "--to", "haliax").stdout)
    assert (found["MESH_SHAPE"], found["MESH_AXES"]) == ((2, 4), ("data", "model"))
    assert found["AXIS_MAPPING"] == {"batch": "data", "heads": "model", "d_ff": "model", "vocab": "model"}


def test_maxtext(run: Callable[..., Result], plan_file: str) -> None:
    text = run("export", plan_file, "--to", "maxtext").stdout
    head, rules = text.split("logical_axis_rules: ")
    table = dict(json.loads(rules))
    assert table["activation_batch"] == ["data"]
    assert table["mlp"] == table["q_heads"] == table["vocab"] == ["tensor"]
    sizes = dict(line.split(": ") for line in head.splitlines() if line.startswith("ici_"))
    assert (
        sizes["ici_data_parallelism"],
        sizes["ici_tensor_parallelism"],
        sizes["ici_fsdp_parallelism"],
    ) == (
        "2",
        "4",
        "1",
    )


def test_written_to_a_file_and_as_json(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], plan_file: str, tmp_path: Path
) -> None:
    out = tmp_path / "layout.txt"
    done = run("export", plan_file, "--to", "haliax", "--out", str(out))
    assert (done.stdout, done.stderr) == ("", f"wrote the layout to {out}\n")
    found = result("export", plan_file, "--to", "haliax")
    assert found.pop("format") == "layoutopt-export/1"
    assert found == {"to": "haliax", "mesh": {"data": 2, "model": 4}, "text": out.read_text(encoding="utf-8")}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("to", ["haliax", "mesh-tensorflow"])
def test_storage_that_a_form_cannot_say_is_refused(
    refused: Callable[..., str], stored_plan: str, to: str
) -> None:
    line = refused("export", stored_plan, "--to", to)
    assert f"{to} cannot express this plan, in which the storage of attention/k, attention/o" in line
    instead = "--storage layout" if to == "haliax" else "--framework mesh-tensorflow"
    assert "is zero3" in line and f"search with {instead}" in line


@pytest.mark.parametrize("to", ["jax", "tf-dtensor", "haliax", "mesh-tensorflow"])
def test_recompute_and_microbatches_are_names(to: str) -> None:
    decided = Decided(recompute=["layers"], microbatches=4)
    what = Exported("title", mtf.Mesh("a:2"), mtf.Layout("batch:a"), (), (), decided)
    text = export(what, to)
    found = names(text.split("def layouts")[0].replace("from tensorflow.experimental import dtensor", ""))
    assert (found["RECOMPUTE"], found["MICROBATCHES"]) == (("layers",), 4)
    assert "RECOMPUTE" not in export(replace(what, decided=Decided()), to)


def test_a_whole_plan_in_jax(run: Callable[..., Result], stored_plan: str) -> None:
    done = run("export", stored_plan, "--to", "jax")
    found = names(done.stdout)
    assert (found["RECOMPUTE"], found["MICROBATCHES"], done.stderr) == (("layers",), 2, "")


def test_maxtext_says_storage_recompute_and_microbatches(
    run: Callable[..., Result], stored_plan: str
) -> None:
    done = run("export", stored_plan, "--to", "maxtext")
    assert done.stderr == ""
    head, rules = done.stdout.split("logical_axis_rules: ")
    table = dict(json.loads(rules))
    assert "ici_fsdp_parallelism: 2\n" in head and "ici_tensor_parallelism: 2\n" in head
    # MaxText counts the examples of a device in one part: 8 of four devices in two parts.
    assert "remat_policy: full\n" in head and "gradient_accumulation_steps: 2\n" in head
    assert re.search(r"per_device_batch_size: 1\nmax_target_length: \d+\n", head)
    assert table["activation_batch"] == table["embed"] == ["fsdp"] and table["mlp"] == ["tensor"]


def test_sequence_parallelism_is_said_or_refused() -> None:
    further = Decided(refined={"elsewhere": {"length": ["c"]}})
    what = replace(matrices("", "", layout="batch:a;d_ff:c"), decided=further)
    table = dict(json.loads(export(what, "maxtext").split("logical_axis_rules: ")[1]))
    assert table["activation_norm_length"] == [table["mlp"][0]] and "activation_length" not in table
    for to in ("haliax", "mesh-tensorflow"):
        with pytest.raises(
            mtf.UserError,
            match=r"cannot express this plan, in which dimensions are also split "
            ".*length:c",
        ):
            export(what, to)
    other = replace(what, decided=Decided(refined={"elsewhere": {"batch": ["c"]}}))
    with pytest.raises(mtf.UserError, match=r"maxtext cannot express this plan.* also split .*\(batch:c\)"):
        export(other, "maxtext")


def test_only_what_a_form_leaves_out_is_not_expressed(
    run: Callable[..., Result], plan_file: str, tmp_path: Path
) -> None:
    """Forms of settings express sequence parallelism, or refuse it."""
    plan, path, said = json.loads(Path(plan_file).read_text(encoding="utf-8")), tmp_path / "plan.json", set()
    path.write_text(json.dumps({**plan, "refined": {"elsewhere": {"length": ["model"]}}}), encoding="utf-8")
    for to, form in FORMATS.items():
        if (done := run("export", str(path), "--to", to)).exit_code == 0:
            assert ("not expressed" in done.stderr) == form.every_variable
            said.add(to)
    assert {"jax", "maxtext", "megatron"} <= said


def test_what_is_kept_is_said_or_refused() -> None:
    def exported(to: str, *texts: str) -> str:
        return export(matrices("", "", recompute=texts), to)

    for keep, policy in (("products", "minimal"), ("products+attention", "minimal_with_context")):
        assert f"remat_policy: {policy}\n" in exported("maxtext", f"layers:keep={keep}")
    assert "RECOMPUTE = ('layers:keep=products',)" in exported("jax", "layers:keep=products")
    with pytest.raises(mtf.UserError, match=r"recomputed block are kept \(layers:keep=outputs"):
        exported("maxtext", "layers:keep=outputs")
    with pytest.raises(mtf.UserError, match="one remat_policy for all layers, but this plan recomputes a, b"):
        exported("maxtext", "a", "b:keep=products")
    for to in ("haliax", "mesh-tensorflow", "tf-dtensor"):
        with pytest.raises(
            mtf.UserError, match=f"{to} cannot express this plan, in which some values of a recomputed block"
        ):
            export(replace(matrices("", "", layout="batch:a", recompute=("layers:keep=products",))), to)


def test_stages_are_those_of_the_layout(run: Callable[..., Result], plan_file: str, tmp_path: Path) -> None:
    """A file that names others is refused, and so is a pipeline that a file keeps silent about."""
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**plan, "pipeline": {"layers": 2}}), encoding="utf-8")
    done = run("export", str(path), "--to", "haliax")
    assert done.exit_code == 2
    assert "2 pipeline stages of 'layers', but its layout splits 'layers' over no axis of" in done.stderr
    silent = {**plan, "mesh": {"pipe": 2}, "layout": {"layers": ["pipe"]}, "microbatches": 2}
    path.write_text(json.dumps(silent), encoding="utf-8")
    done = run("export", str(path), "--to", "haliax", "--model", LM)
    assert done.exit_code == 2
    assert "cannot express this plan, in which 'layers' is split into 2 pipeline stages" in done.stderr


@pytest.mark.parametrize("to", ["mesh-tensorflow", "tf-dtensor"])
def test_what_a_library_cannot_say_is_refused(to: str) -> None:
    with pytest.raises(
        mtf.UserError,
        match=f"{to} splits a dimension over one mesh axis, but this plan splits 'd_ff' over a\\+b",
    ):
        export(two_axes(d_ff=("a", "b")), to)


@pytest.mark.parametrize("to", ["jax", "haliax"])
def test_two_axes_on_one_dimension(to: str) -> None:
    found = names(export(two_axes(d_ff=("a", "b")), to))
    spec = found["VARIABLES"]["w"][0] if to == "jax" else found["AXIS_MAPPING"]["d_ff"]
    assert spec == ("a", "b")


def test_names_cannot_break_out_of_the_text() -> None:
    evil = 'x\'\n"""\nraise SystemExit'
    weight = ExportedTensor(evil, (evil,), ((),), (8,))
    what = Exported(evil, mtf.Mesh("a:2"), mtf.Layout(), (weight,), (weight,))
    for to in ("jax", "tf-dtensor", "haliax", "mesh-tensorflow"):
        compile(export(what, to), to, "exec")
    assert set(names(export(what, "jax"))["VARIABLES"]) == {evil}


def test_the_predicted_step(
    result: Callable[..., Any], run: Callable[..., Result], plan_file: str, tmp_path: Path
) -> None:
    """As `cost` prices it, in a file or printed."""
    out = tmp_path / "step.json.gz"
    said = result("export", plan_file, "--to", "perfetto", "--out", str(out))
    assert gzip.decompress(out.read_bytes()).decode() == said["text"]
    assert run("export", plan_file, "--to", "perfetto").stdout == said["text"]
    (step,) = (e for e in json.loads(said["text"])["traceEvents"] if e["name"] == "step")
    seconds = json.loads(Path(plan_file).read_text(encoding="utf-8"))["predicted"]["step_seconds"]
    assert step["dur"] == pytest.approx(1e6 * seconds, rel=1e-6)


def test_unknown_forms(refused: Callable[..., str], plan_file: str) -> None:
    assert "is not one of 'mesh-tensorflow', 'tf-dtensor', 'dtensor', 'jax'" in refused(
        "export", plan_file, "--to", "pytorch"
    )
    assert "framework layoutopt has no format of its own; add --to with one of" in refused(
        "export", plan_file
    )
    with pytest.raises(mtf.UserError, match="no such format; did you mean 'jax'"):
        export(two_axes(), "jaxx")
    own = {"maxtext", "torchtitan", "megatron", "deepspeed", "transformers", "accelerate"}
    assert set(FORMATS) == {"mesh-tensorflow", "tf-dtensor", "jax", "haliax", *own}


def test_dtensor_is_another_name(run: Callable[..., Result], plan_file: str) -> None:
    """With a note, as PyTorch has a DTensor too."""
    old, new = (run("export", plan_file, "--to", to) for to in ("dtensor", "tf-dtensor"))
    assert old.stdout == new.stdout
    assert (old.stderr, new.stderr) == (
        "dtensor is tf-dtensor, that of TensorFlow's DTensor; for PyTorch, use torchtitan or transformers\n",
        "",
    )


def test_the_model_of_a_plan(refused: Callable[..., str], plan_file: str, tmp_path: Path) -> None:
    bare = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    del bare["details"]
    file = tmp_path / "bare.json"
    file.write_text(json.dumps(bare), encoding="utf-8")
    assert "does not record its model file; name the model with --model MODEL" in refused(
        "export", str(file), "--to", "jax"
    )
    line = refused("export", str(file), "--to", "jax", "--model", "examples/mlp.py")
    assert f"{file}: examples/mlp.py has no hyperparameter" in line


@pytest.mark.one_in(2)
@pytest.mark.parametrize("damage", [5, {"lines": [3]}, {"memory": "much", "dims": []}])
def test_a_layout_is_used_though_the_details_of_its_plan_are_damaged(
    run: Callable[..., Result], plan_file: str, tmp_path: Path, damage: Any
) -> None:
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    plan["details"] = {**plan.get("details", {}), **damage} if isinstance(damage, dict) else damage
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(plan), encoding="utf-8")

    def exported(plan: str) -> Result:
        return run("export", plan, "--to", "jax", "--model", LM)

    def priced(plan: str) -> Result:
        return run("cost", LM, "--layout", plan, *(word for size in SIZES for word in ("--set", size)))

    for use in (exported, priced):
        whole, found = use(plan_file), use(str(path))
        assert (found.exit_code, found.stdout) == (0, whole.stdout)
        (said,) = found.stderr.splitlines()
        assert said.startswith(f"warning: plan {str(path)!r}: 'details")
        assert said.endswith("the plan is used without this part")
    refused = run("explain", str(path), "--model", LM)
    assert refused.exit_code == 2 and "'details" in refused.stderr
