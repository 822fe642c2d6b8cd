"""`size`: the contract's JSON, what people see, wrong input in one line, what cannot be with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import Result

from costmodels import load_hardware
from costmodels.hardware.known import known_kinds
from layoutopt.cli.units import parse_count
from layoutopt.plan.build import load_plan
from mesh_tf_core.errors import UserError

LM = "examples/transformer_lm.py"
SIZES = ("layers=1", "length=32", "batch=4", "d_model=64", "heads=2")
TINY = tuple(word for each in SIZES for word in ("--set", each))
SMALL = (LM, *TINY, "--hardware", "tpu-v5e", "--max-axes", "1")
ASKED = ("size", *SMALL, "--budget", "1e14", "--devices", "2", "--candidates", "2", "--law", "kaplan")
CONTRACT = {
    "hparams", "parameters", "tokens", "loss", "flops", "hardware", "devices", "mesh", "layout",
    "step_seconds", "mfu", "days", "chip_hours", "money",
}  # fmt: skip


def test_the_json_is_the_contracts(result: Callable[..., dict[str, Any]]) -> None:
    found = result(*ASKED, "--price", "1.2")
    assert {"law", "best", "candidates"} <= set(found)
    assert all(set(each) >= CONTRACT for each in (found["best"], *found["candidates"]))
    assert found["best"] in found["candidates"]
    assert found["law"]["name"] == "kaplan" and "2001.08361" in found["law"]["source"]
    assert found["question"] == {"budget": 1e14, "devices": [2]}
    assert found["best"]["money"] == pytest.approx(1.2 * found["best"]["chip_hours"])


@pytest.mark.nightly
def test_times_say_how_sure(run: Callable[..., Result], result: Callable[..., dict[str, Any]]) -> None:
    """Per hardware: of v5e runs of this kind were compared, of v6e none, whatever its compiler says."""
    asked = (*ASKED, "--candidates", "1", "--sizes", "200k:200k", "--hardware", "tpu-v6e", "--every")
    found = {each["hardware"]: each for each in result(*asked)["accuracy"]}
    kinds = known_kinds(load_hardware("tpu-v5e"))
    alike = [k for k in kinds if not (k["stages"] or k["mixture"] or k["fitted"])]
    errors = [abs(error) for kind in alike for error in kind["seconds"]]
    assert found["tpu-v5e"]["steps"] == len(errors) > 0
    assert found["tpu-v5e"]["mean"] == pytest.approx(fmean(errors))
    assert f"{len(errors)} runs of this kind" in found["tpu-v5e"]["words"]
    assert (
        found["tpu-v6e"]["mean"] is None and "against the compiler's estimates" in found["tpu-v6e"]["words"]
    )
    said = run(*asked).stdout
    assert f"accuracy tpu-v5e: {len(errors)} runs of this kind" in said
    assert "accuracy tpu-v6e: no published run of this kind" in said
    assert f"±{100 * fmean(errors):.2g}%" in said and "not compared" in said.replace("\n", " ")


def test_people_see_what_to_train_where_and_the_plan_is_kept(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    done = run(*ASKED, "--candidates", "1", "--sizes", "200k:200k", "--out", str(out))
    assert done.exit_code == 0, done.stderr
    for words in ("1e+14 FLOP", "nats per token", "chip-hours", "Kaplan et al. 2020", "frontier"):
        assert words in done.stdout, words
    assert load_plan(out).data.details.source == LM
    for words in (f"next: layoutopt cost {LM}", "--set length=32", f"--layout {out} --hardware tpu-v5e"):
        assert words in done.stderr, words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "size requires a target; give --budget FLOP"),
        (("--budget", "lots"), "--budget 'lots' is not a number; write for example --budget 1e22"),
        (("--budget", "1e20", "--tokens", "3B"), "--budget and --tokens cannot be combined"),
        (
            ("--money", "1e6"),
            "--money requires the price of a chip-hour of tpu-v5e; give the price, e.g. --price tpu-v5e=4.2",
        ),
        (("--money", "1e6", "--price", "h100=3"), "'h100' is not the hardware"),
        (("--budget", "1e20", "--devices", "many"), "--devices 'many': write whole numbers"),
        (
            ("--budget", "1e20", "--sizes", "2B:1B"),
            "--sizes is 2e+09:1e+09; give the smallest and the largest",
        ),
        (("--budget", "1e20", "--sizes", "large"), "--sizes 'large' is not a number; write for example"),
        (("--tokens", "1M", "--sizes", "1B:2B"), "--tokens requires a single size"),
        (("--budget", "1e20", "--law", "moore"), "--law moore is not a known scaling law"),
        (("--budget", "1e20", "--fit", "README.md"), "--fit 'README.md'"),
        (("--budget", "1e20", "--fit", "none.csv"), "No such file"),
        (("--budget", "1e20", "--characters", "nan"), "--characters is nan; give the number of characters"),
    ],
)
def test_wrong_input_is_one_line(refused: Callable[..., str], words: tuple[str, ...], said: str) -> None:
    assert said in refused("size", *SMALL, *words)


def test_what_cannot_be_is_said_with_its_reason(refused: Callable[..., str]) -> None:
    assert "no size reaches this loss" in refused("size", *SMALL, "--loss", "1.5", code=3)
    said = refused("size", *SMALL, "--tokens", "1M", "--devices", "1", "--memory", "1MiB", code=3)
    assert "none of the 1 searched candidates meets the target;" in said and "no layout of" in said


@pytest.mark.parametrize(
    ("text", "number"), [("300B", 3e11), ("1.5T", 1.5e12), ("1e22", 1e22), ("70_000", 7e4), ("2k", 2e3)]
)
def test_counts_are_read_as_people_write_them(text: str, number: float) -> None:
    assert parse_count(text, "--tokens", "300B") == number


@pytest.mark.parametrize("text", ["", "B", "3GiB", "-1", "0", "1e99", "nan"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--tokens"):
        parse_count(text, "--tokens", "300B")


@pytest.mark.nightly
def test_chips_are_named(run: Callable[..., Result]) -> None:
    said = run("size", LM, *TINY, "--tokens", "1M", "--max-axes", "1", "--sizes", "200k:200k").stderr
    assert "without --hardware the answer is for cpu-local; compare chips with --hardware" in " ".join(
        said.split()
    )


@pytest.mark.nightly
def test_one_size_of_the_family_is_trained_on_tokens(result: Callable[..., dict[str, Any]]) -> None:
    own = result("size", *SMALL, "--tokens", "1M", "--devices", "2")["best"]
    wanted = 20 * own["parameters"]
    args = ("size", *SMALL, "--tokens", "1M", "--devices", "2")
    found = result(*args, "--sizes", str(wanted))
    sizes = {each["parameters"] for each in found["candidates"]}
    assert len(sizes) == 1 and sizes.pop() == pytest.approx(wanted, rel=0.2)
    assert found["scaled"] and found["best"]["hparams"]["layers"] > 1


@pytest.mark.nightly
def test_defaults_that_nobody_chose_are_named(result: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """A search on as many devices has the same batch, and says so."""
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    path.write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-6, **sizes, **heads}), "utf-8")
    on = ("--hardware", "tpu-v5e", "--allow", "usual", "--set", "length=8")
    sized = result("size", str(path), "--tokens", "1e6", "--devices", "2", *on)
    searched = result("search", str(path), "--devices", "2", *on)
    said = next(note for note in searched["notes"] if "by default" in note)
    assert f"layout of the best size: {said}" in sized["notes"]
    assert sized["best"]["step_seconds"] == searched["predicted"]["step_seconds"]
    free = result("size", str(path), "--tokens", "1e6", *on)
    assert free["best"]["batch"] == {"batch": 64, "length": 8}
    assert any("batch is 64 (layoutopt's choice) by default" in note for note in free["notes"])
