"""`layoutopt lint`: of a layout, and of a program's own placements."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

MODEL = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import layoutopt

def loss(params, batch):
    h = jax.nn.relu(batch["x"] @ params["up"])
    return jnp.square(h @ params["down"] - batch["y"]).mean()

def model(batch=64):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    params = {"up": of(512, 2048), "down": of(2048, 256)}
    return layoutopt.from_jax(loss, params, {"x": of(batch, 512), "y": of(batch, 256)}, optimizer="sgd")

def shardings():
    return {"up": P(None, "model"), "down": P()}, {"x": P("data"), "y": P("data")}
"""


@pytest.fixture
def jax_file(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(MODEL)
    return path


def test_a_layout_that_wastes_an_axis(result: Callable[..., dict[str, Any]]) -> None:
    mesh = ("--mesh", "data:2;model:2", "--layout", "batch:data", "--hardware", "tpu-v5e")
    found = result("lint", "examples/mlp.py", *mesh)
    assert "wasted axis" in [doubt["kind"] for doubt in found["findings"]]
    assert found["best"]["status"] == "OPTIMAL"
    assert found["best"]["step_seconds"] <= found["predicted"]["step_seconds"]


def test_shardings_that_disagree_about_a_dimension(run: Callable[..., Result], jax_file: Path) -> None:
    done = run("lint", str(jax_file), "--mesh", "data:2;model:2", "--hardware", "tpu-v5e")
    said = " ".join(done.stdout.split())
    assert "placed unlike: 'down': placed P(None, None), but train.py:8 reads it as P('model', None)" in said
    assert "place it P('model', None): step " in said
    assert "layout batch:data;up:model;up@down:none" in said
    assert "proven best" in said


@pytest.mark.parametrize(
    "down, rules, storage, reads",
    [
        ('P(None, "fsdp")', {"down": {"up": [], "y": ["fsdp"]}}, {}, "P('fsdp', None)"),
        ('P("dp", "fsdp")', {"down": {"up": [], "y": ["fsdp"]}}, {"down": "zero3"}, "P('fsdp', None)"),
        ('P(("dp", "fsdp"), None)', {}, {"down": "zero3"}, ""),
    ],
)
def test_an_array_that_lies_otherwise_is_priced_where_it_lies(
    result: Callable[..., dict[str, Any]],
    jax_file: Path,
    down: str,
    rules: dict[str, Any],
    storage: dict[str, str],
    reads: str,
) -> None:
    """No rule is refused that the user did not write."""
    text = MODEL.replace('P(None, "model"), "down": P()', f'P(None, "fsdp"), "down": {down}')
    jax_file.write_text(text.replace('P("data")', 'P("dp")'))
    found = result("lint", str(jax_file), "--mesh", "dp:2;fsdp:2", "--hardware", "tpu-v5e")
    assert found.get("refined", {}) == rules and found.get("storage", {}) == storage
    unlike = [f for f in found["findings"] if f["kind"] == "placed unlike"]
    assert len(unlike) == bool(reads) and all(
        f["message"].endswith(reads) or reads in f["message"] for f in unlike
    )
    assert all("reads it as" in f["message"] and "train.py:8" in f["message"] for f in unlike)


def test_weights_over_some_of_the_batchs_axes_are_hybrid(
    result: Callable[..., dict[str, Any]], jax_file: Path
) -> None:
    split = MODEL.replace('P(None, "model"), "down": P()', 'P("fsdp", None), "down": P("fsdp", None)')
    jax_file.write_text(split.replace('P("data")', 'P(("dp", "fsdp"))'))
    found = result("lint", str(jax_file), "--mesh", "dp:2;fsdp:2", "--hardware", "tpu-v5e")
    assert found["storage"] == {"up": "zero3@fsdp", "down": "zero3@fsdp"}
    assert not [f for f in found["findings"] if f["kind"] == "placed unlike"]


def test_layers_that_are_not_placed_alike_are_named(run: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        CHECKPOINTED
        + """
def shardings(**_):
    from jax.sharding import PartitionSpec as P
    one, other = {"up": P(None, "model"), "down": P("model")}, {"up": P(), "down": P("model")}
    return {"blocks": [one, other]}, {"x": P("data")}
"""
    )
    done = run("lint", str(file), "--mesh", "data:2;model:2", "--hardware", "tpu-v5e")
    said = " ".join(done.stdout.split())
    assert "placed unlike: 'blocks/1/up': placed P(None, None), but 'blocks/0/up' P(None, 'model')" in said


def test_a_layout_that_does_not_fit_says_what_does(run: Callable[..., Result]) -> None:
    asked = ("lint", "examples/mlp.py", "--mesh", "data:2", "--layout", "batch:data", "--hardware")
    done = run(*asked, "tpu-v5e, memory_reserve=0B, memory=380KiB")
    said = " ".join(done.stdout.split())
    assert "fits no" in said and "but it does not fit" in said and "no likely mistake" not in said
    assert "does not fit: peak memory " in said and "largest tensors: " in said
    assert "does: " in said or "; zero" in said or "; recompute" in said or "on hosts: " in said


@pytest.mark.parametrize(
    "change, said",
    [
        (('"down": P()', '"dawn": P()'), "shardings(): the model has no parameter 'dawn'"),
        (('P(None, "model")', 'P(None, "modal")'), "modal"),
        (('"down": P()', '"down": 7'), "give a PartitionSpec or a NamedSharding"),
        (("return {", "return [], {"), "shardings() must return two pytrees"),
        (
            ('down": P()', "down\": P('data', 'data')"),
            "parameter 'down' has P('data', 'data'), which names mesh",
        ),
        (
            ('down": P()', "down\": P(None, None, 'data')"),
            "with 3 entries, but its shape (2048, 256) has 2 axes",
        ),
        (("batch=64", "batch=63"), "size 63, which the 2 devices of data do not divide"),
    ],
)
def test_shardings_that_do_not_fit(
    refused: Callable[..., str], jax_file: Path, change: tuple[str, str], said: str
) -> None:
    jax_file.write_text(MODEL.replace(*change))
    assert said in refused("lint", str(jax_file), "--mesh", "data:2;model:2", "--hardware", "tpu-v5e")


def test_options_beside_shardings_are_priced_too(
    result: Callable[..., dict[str, Any]], jax_file: Path
) -> None:
    """What shardings store split (FSDP) is said, and what they do not say is taken from the options."""
    jax_file.write_text(MODEL.replace('"down": P()', '"down": P("data", None)').replace("sgd", "adam"))
    given = ("lint", str(jax_file), "--mesh", "data:2;model:2", "--hardware", "tpu-v5e")
    assert result(*given)["storage"] == {"down": "zero3@data"}
    found = result(*given, "--storage", "zero1", "--microbatches", "2")
    assert found["storage"] == {"up": "zero1", "down": "zero3@data"} and found["microbatches"] == 2


def test_a_layout_that_takes_longer_says_where(run: Callable[..., Result], jax_file: Path) -> None:
    jax_file.write_text(MODEL.replace('P(None, "model"), "down": P()', 'P("model", None), "down": P()'))
    done = run(
        "lint", str(jax_file), "--mesh", "data:2;model:2", "--hardware", "tpu-v5e", "--storage", "zero3"
    )
    said = " ".join(done.stdout.split())
    assert "zero3 ×2" in said
    assert "slower: train.py(7) takes " in said and "no likely mistake" not in said


CHECKPOINTED = """
import jax, jax.numpy as jnp
import layoutopt

def part(h, w):
    return jnp.tanh(h @ w)

def layer(h, p):
    return h + jax.checkpoint(part)(h, p["up"]) @ p["down"]

def model(whole=True, batch=64):
    def loss(params, batch):
        h = batch["x"]
        for p in params["blocks"]:
            h = (jax.checkpoint(layer) if whole else layer)(h, p)
        return jnp.square(h).mean()

    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    params = {"blocks": [{"up": of(256, 1024), "down": of(1024, 256)} for _ in range(2)]}
    return layoutopt.from_jax(loss, params, {"x": of(batch, 256)}, optimizer="sgd")
"""


def test_every_command_knows_a_programs_own_checkpoints(
    result: Callable[..., dict[str, Any]], run: Callable[..., Result], tmp_path: Path
) -> None:
    file, plan, on = (
        tmp_path / "train.py",
        tmp_path / "plan.json",
        ("--mesh", "data:2", "--layout", "batch:data"),
    )
    file.write_text(CHECKPOINTED)
    priced = result("cost", str(file), *on, "--hardware", "tpu-v5e")
    assert priced["recompute"] == ["layers"] and "notes" not in priced
    assert result("lint", str(file), *on, "--hardware", "tpu-v5e")["recompute"] == ["layers"]
    words = ("--mesh", "data:2", "--hardware", "tpu-v5e", "--recompute", "never", "--out", str(plan))
    assert run("search", str(file), *words).exit_code == 0
    said = " ".join(run("explain", str(plan), "--model", str(file)).stdout.split())
    assert "the loop over layers: this jax.checkpoint of the function is not applied" in said
    parts = result("cost", str(file), *on, "--hardware", "tpu-v5e", "--set", "whole=false")
    line = 1 + CHECKPOINTED.splitlines().index('    return h + jax.checkpoint(part)(h, p["up"]) @ p["down"]')
    assert "recompute" not in parts
    assert any(
        f"train.py:{line}: this jax.checkpoint covers only part of a layer" in n for n in parts["notes"]
    )


PLACED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tests.importers.test_torch_written import net, read

def model():
    return read(net())

def shardings():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return fully_shard(net(), mesh=mesh["data"]), "data"
"""


def test_lint_of_a_script_reads_its_shardings(result: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "train.py"
    file.write_text(PLACED)
    found = result("lint", str(file), "--mesh", "data:2;model:2", "--hardware", "h100", "--time-limit", "5")
    assert found["layout"] == {"batch": ["data"]}
    assert set(found["storage"].values()) == {"zero2@data"}  # one group, which stays whole until backward
    assert "wasted axis" in {f["kind"] for f in found["findings"]}
    assert not import_module("torch.distributed").is_initialized()
