"""A Hugging Face configuration wherever a MODEL is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from layoutopt.cli.plans import open_plan

SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    monkeypatch.chdir(tmp_path)
    return tmp_path


MESH = ("--mesh", "data:2", "--quiet")
SETTINGS = ("--set", "batch=4", "--set", "length=16", "--set", "num_hidden_layers=2")


def test_a_configuration_is_searched_and_its_plan_finds_it(run: Callable[..., Result], place: Path) -> None:
    done = run("search", "config.json", *MESH, *SETTINGS, "--out", "plan.json", "--json")
    assert done.exit_code == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["solver"]["status"] == "OPTIMAL"
    assert plan["model"]["name"] == "qwen3"
    assert plan["model"]["hparams"]["num_hidden_layers"] == 2
    # The plan is of this file, so that commands take the model from it.
    planned = open_plan(Path("plan.json"), None)
    assert planned.loaded.model.graph.dims()["layers"] == {2}
    (place / "config.json").write_text(json.dumps({**SMALL, "head_dim": 4}))
    refused = run("explain", "plan.json", "--quiet")
    assert (
        refused.exit_code == 2
        and "'config.json', which belongs to the plan's model, has changed: its SHA-256" in refused.stderr
    )


@pytest.mark.parametrize("command", ["cost", "lower"])
def test_other_commands(run: Callable[..., Result], place: Path, command: str) -> None:
    done = run(
        command, "config.json", "--mesh", "data:2;model:2", "--layout", "batch:data;heads:model", *SETTINGS
    )
    assert done.exit_code == 0, done.stderr


def test_errors_are_one_line(run: Callable[..., Result], place: Path) -> None:
    (place / "config.json").write_text(json.dumps({**SMALL, "hash_layers": 3}))
    done = run("search", "config.json", *MESH)
    assert done.exit_code == 2
    assert (
        done.stderr.count("\n") == 1 and "unknown fields for model_type 'qwen3': hash_layers" in done.stderr
    )
