"""A Hugging Face configuration wherever a MODEL is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import layoutopt
from layoutopt.cli.plans import open_plan
from layoutopt.models.loading import load_model

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


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("devices", "batch"), [(1, 8), (3, 9), (8, 8), (64, 64)])
def test_the_batch_that_nobody_chose_follows_the_devices(place: Path, devices: int, batch: int) -> None:
    """At least one sequence per device; what is set wins."""
    model = load_model("config.json", (), devices).model
    assert model.batch == {"batch": batch, "length": 2048}
    notes = layoutopt.cost(model, f"data:{devices}", "batch:data", hardware="h100").notes
    (note,) = (note for note in notes if "by default" in note)
    assert note.startswith(f"batch is {batch} ({batch // devices} example") and "--set batch=" in note
    chosen = load_model("config.json", ["batch=2", "length=16", "dtype=float32"], devices).model
    assert chosen.batch == {"batch": 2, "length": 16}
    assert not any("by default" in note for note in layoutopt.cost(chosen, "a:1", hardware="h100").notes)


@pytest.mark.nightly
def test_batch_and_length_stand_with_every_answer(run: Callable[..., Result], place: Path) -> None:
    """In text and JSON; a plan records them for the commands that take it."""
    small, machine = ("--set", "num_hidden_layers=1"), ("--hardware", "h100", "--quiet")
    plain = ("--storage", "layout", "--recompute", "never", "--microbatches", "1")
    searched = ("search", "config.json", "--mesh", "data:10", *machine, *small, *plain)
    commands = (
        (*searched, "--out", "plan.json"),
        ("lint", "config.json", "--mesh", "data:10", "--layout", "batch:data", *machine, *small),
        ("cost", "config.json", "--layout", "plan.json", *machine),
        ("cost", "config.json", "--layout", "plan.json", *machine, "--json"),
        ("explain", "plan.json", "--quiet"),
    )
    for command in commands:
        found = run(*command)
        assert found.exit_code == 0, found.stderr
        said = (
            r'"batch": *10,\s*"length": *2048'
            if "--json" in command
            else r"per step +batch 10, length 2,048\n"
        )
        assert re.search(said, found.stdout), command


def test_a_default_batch_below_the_devices_is_a_note(run: Callable[..., Result], tmp_path: Path) -> None:
    command = (
        "cost",
        "examples/transformer_lm.py",
        "--mesh",
        "data:64",
        "--set",
        "layers=1",
        "--hardware",
        "h100",
    )
    note = "batch is 16 by default, less than the 64 devices; set the batch that you train with"
    assert note in run(*command).stdout
    assert "by default" not in run(*command, "--set", "batch=16").stdout


def test_errors_are_one_line(run: Callable[..., Result], place: Path) -> None:
    (place / "config.json").write_text(json.dumps({**SMALL, "hash_layers": 3}))
    done = run("search", "config.json", *MESH)
    assert done.exit_code == 2
    assert (
        done.stderr.count("\n") == 1 and "unknown fields for model_type 'qwen3': hash_layers" in done.stderr
    )


@pytest.mark.parametrize("family", ["gpt2", "roberta", "bart"])
def test_the_length_that_a_note_offers_is_one_that_the_model_has(family: str) -> None:
    """Learned positions end where the default length does."""
    data = Path(__file__).parents[1] / "data" / "huggingface_losses.json"
    losses = json.loads(data.read_text())["models"]
    config = losses[family]["config"]
    (note,) = (
        n for n in layoutopt.cost(layoutopt.from_huggingface(config), "a:1").notes if "by default" in n
    )
    (length,) = re.findall(r"--set length=(\d+)", note)
    assert layoutopt.from_huggingface(config, length=int(length)).parameters
