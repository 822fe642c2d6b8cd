"""Frameworks: chip files are physics, the software's numbers are overlays, and files of users win."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from costmodels import (
    FrameworkError,
    HardwareError,
    framework_names,
    hardware_names,
    load_framework,
    load_hardware,
)
from costmodels.frameworks import DEFAULT, Framework
from costmodels.hardware import machine_of, numbers_of, preset_content
from costmodels.presets import PRESETS
from costmodels.pricing.compilers import COMPILERS
from layoutopt.cli import app

SOFTWARE = (
    "attention_efficiency", "grouped_efficiency", "launch_interval", "memory_doubt", "memory_reserve",
    "published_mfu", "sustained", "unaligned_efficiency",
)  # fmt: skip
"""Numbers of a chip's file that depend on what runs on it."""
CHIPS = [name for name in hardware_names() if load_hardware(name).kind != "cpu"]


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_file_is_physics(chip: str) -> None:
    content = json.loads((PRESETS / f"{chip}.json").read_text())
    assert not {"compiler", "overlap"} & content.keys()
    assert not set(SOFTWARE) & content["chip"].keys()


@pytest.mark.parametrize("name", framework_names())
def test_every_framework_completes_every_chip_that_it_runs_on(name: str) -> None:
    runs = [chip for chip in CHIPS if load_hardware(chip).kind in load_framework(name).kinds]
    assert runs
    for chip in runs:
        check_chip(name, chip)


def check_chip(name: str, chip: str) -> None:
    machine, software = load_hardware(chip, name), load_framework(name)
    assert (machine.name, machine.framework) == (chip, name)
    assert machine.compiler in COMPILERS and 0 < machine.usable_memory_bytes < machine.memory_bytes * 1.0001
    for path, number in machine.numbers():
        assert number.source.strip() and number.date[:2] == "20", path
    for variant, each in software.variants.items():
        for option, overlay in each.options.items():
            text = f"{name}:{variant}={option}"
            if overlay.has(chip):
                assert load_framework(load_hardware(chip, text).framework).options()[variant] == option
                continue
            with pytest.raises(
                HardwareError, match=f"{variant}={option} is of .*, not of {chip}; choose one of "
            ):
                load_hardware(chip, text)


def test_no_option_is_taken_in_silence() -> None:
    """One with numbers of single chips has some of each chip that has it, or is what the chip does anyhow."""
    anyhow = {("attention", "fa2"), ("attention", "cudnn")}
    for name in framework_names():
        software = load_framework(name)
        gpus = (
            [chip for chip in CHIPS if load_hardware(chip).kind == "gpu"] if "gpu" in software.kinds else []
        )
        for variant, each in software.variants.items():
            numbers = ((o, overlay) for o, overlay in each.options.items() if overlay.on)
            for option, overlay in numbers if variant != "tensor_messages" else ():
                assert overlay.only or overlay.kinds, (name, variant, option)
                for chip in filter(overlay.has, gpus):
                    found = load_hardware(chip, f"{name}:{variant}={option}")
                    plain = replace(load_hardware(chip, name), framework=found.framework)
                    assert found != plain or (variant, option) in anyhow, (name, variant, option, chip)


def test_a_file_of_ones_own_has_what_its_preset_has(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"like": "a100", "name": "ours"}))
    assert load_hardware(own, "torch:attention=fa1").framework == "torch:attention=fa1"
    with pytest.raises(
        HardwareError, match="not of a100; choose one of attention=sdpa, attention=fa2, attention=fa1"
    ):
        load_hardware(own, "torch:attention=fa3")


@pytest.mark.parametrize("name", framework_names())
def test_what_a_framework_says_of_a_chip_is_there(name: str) -> None:
    """Also of a chip that is `like` another one, and by each option of a variant."""
    software = load_framework(name)
    usual = {f"{variant}={option}" for variant, option in software.options().items()}
    numbers = [*software.numbers()]
    later = {(n.chip, n.path) for n in numbers if n.option in usual}
    for each in numbers:
        runs = each.chip in CHIPS and load_hardware(each.chip).kind in software.kinds
        if runs and (each.option or (each.chip, each.path) not in later):
            found = load_hardware(each.chip, f"{name}{':' * bool(each.option)}{each.option}")
            known = {path: number.given for path, number in found.numbers()}
            assert known.get(each.path, each.value) == each.value, each


@pytest.mark.parametrize("name", framework_names())
def test_a_framework_is_found_again_by_its_text(name: str) -> None:
    found = load_framework(name)
    assert found.text == name == found.name and found.kinds
    for number in found.numbers():
        assert number.value and (number.source or isinstance(number.value, str)), number
    for variant, each in found.variants.items():
        for option in each.options:
            said = load_framework(f"{name}:{variant}={option}")
            assert load_framework(said.text) == said and said.options()[variant] == option


def test_kernels_of_attention_are_called_as_users_call_them() -> None:
    assert load_framework("torch:attention=fa2").options()["attention"] == "fa2"


def test_what_a_user_asks_is_answered_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "mine.json"
    broken.write_text(json.dumps({"like": "torch", "name": "mine", "variant": {}}))
    for asked, words in {
        "troch": "framework 'troch' is not known; did you mean 'torch'? known: deepspeed",
        "here/mine.json": "framework 'here/mine.json' does not exist; known:",
        "torchtitan@9": "framework 'torchtitan@9': version has no option '9'; known: 0.2, 0.3, main",
        "torchtitan:kernel=x": "torchtitan has no variant 'kernel'; known: ",
        "torchtitan:version": "torchtitan:version': version needs an option; known: ",
        "torch:attention=fa2, attention=fa3": "gives attention twice; give it once",
        "torchtitan@0.2:version=0.3": "gives version twice; give it once",
        str(broken): "framework 'mine' is invalid: variant is not a known field",
    }.items():
        with pytest.raises(FrameworkError) as caught:
            load_framework(asked)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(
        HardwareError, match=r"torch does not run on tpu-v4, a tpu; give other --hardware, or one "
    ):
        load_hardware("tpu-v4", "torch")


def test_chips_under_pytorch_have_a_name_of_their_own() -> None:
    for chip in CHIPS:
        if load_hardware(chip).kind == "gpu":
            assert load_hardware(f"{chip}-eager") == load_hardware(chip, "torch")
    set_too = load_hardware("a100-eager, node_egress=100GB/s")
    assert (set_too.name, set_too.framework) == ("a100, node_egress=100GB/s", "torch")
    with pytest.raises(
        HardwareError, match="'a100-eager' is a100 under the framework torch; with --framework jax"
    ):
        load_hardware("a100-eager", "jax")


def test_a_model_brings_its_framework_where_nothing_else_is_said() -> None:
    assert machine_of("h100", own="jax").framework == "jax"
    assert machine_of("h100", "torch", own="jax").framework == "torch"
    assert machine_of("h100-eager", own="jax").framework == "torch"
    loaded = load_hardware("h100")
    assert machine_of(loaded, own="jax") is loaded
    with pytest.raises(HardwareError, match="loaded under the framework layoutopt, but framework is 'torch'"):
        machine_of(loaded, "torch")


def test_a_file_that_names_its_compiler_keeps_its_numbers(tmp_path: Path) -> None:
    """A calibrated machine was measured with its software; a framework may say what runs there, no more."""
    path, content = tmp_path / "mine.json", preset_content("h100") | {"name": "mine"}
    path.write_text(json.dumps(content))
    own, other = load_hardware(path), load_hardware(path, "torch")
    assert other.framework == "torch" and own.framework == DEFAULT
    assert (other.compiler, other.chip, other.overlap) == (own.compiler, own.chip, own.overlap)


def test_a_file_that_is_like_a_preset_says_the_last_word(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    number = {"value": 0.5, "unit": "1", "source": "measured", "date": "2026-11"}
    path.write_text(json.dumps({"like": "h100", "name": "mine", "chip": {"sustained": number}}))
    for name in ("layoutopt", "torch", "megatron"):
        found, preset = load_hardware(path, name), load_hardware("h100", name)
        assert found.chip.sustained is not None and found.chip.sustained.value == 0.5
        assert (found.compiler, found.overlap) == (preset.compiler, preset.overlap)


def test_a_number_that_is_set_changes_no_other(tmp_path: Path) -> None:
    assert load_hardware("h100, launch_interval=20 us").compiler == load_hardware("h100").compiler


NUMBER = {"value": 0.5, "unit": "1", "source": "ours", "date": "2026-11"}


def chip(**number: Any) -> dict[str, Any]:
    """A file that sets one number of h100."""
    return {"on": {"h100": {"chip": {"sustained": {**NUMBER, **number}}}}}


def option(**own: Any) -> dict[str, Any]:
    """The same in an option of a variant that is not its default."""
    options = {"old": {"summary": "plain"}, "new": {"summary": "ours", **own}}
    return {"variants": {"kernel": {"summary": "kernel", "default": "old", "options": options}}}


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"on": []}, "on must be a JSON object"),
        ({"on": {"h10": {}}}, "on: 'h10' is no hardware preset; did you mean 'h100'?"),
        (option(on={"h10": {}}), "variants.kernel.options.new.on: 'h10' is no hardware preset"),
        ({"says": "torhc"}, "says 'torhc'; did you mean 'torch'?"),
        ({"kinds": {"gqu": {}}}, "kinds.gqu"),
        ({"on": {"h100": {"chip": {"sustaned": NUMBER}}}}, "chip.sustaned is not a known field"),
        ({"on": {"h100": {"chip": 3}}}, "chip must be a JSON object"),
        (chip(value="x"), "chip.sustained.value must be a number"),
        (chip(unit=3), "chip.sustained.unit must be text"),
        (chip(source=3), "chip.sustained.source must be text"),
        (chip(uncertainty="much"), "chip.sustained.uncertainty must be a number"),
        (option(**chip(value={"a": 1})), "chip.sustained.value must be a number"),
        ({"like": "torhc"}, "framework 'torhc' is not known; did you mean 'torch'?"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, own: dict[str, Any], words: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "torch", "name": "mine", "summary": "ours", **own}))
    done = CliRunner().invoke(app, ["frameworks", str(path)])
    said = " ".join(done.stderr.split())
    assert done.exit_code == 2 and words in said and said.count("error:") == 1, done.stderr
    assert not done.stdout


def test_a_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.json").write_text(
        json.dumps({"like": "torch", "name": "mine", "summary": "ours", **chip()})
    )
    monkeypatch.chdir(tmp_path)
    named = load_hardware("h100", "mine.json").framework
    monkeypatch.chdir("/")
    found = load_hardware("h100", named).chip.sustained
    assert found is not None and found.value == 0.5


def test_every_file_that_a_framework_is_like_may_be_written_again(tmp_path: Path) -> None:
    """A file is found beside the one that is `like` it, and read again each time, in chains of any length."""

    def written(name: str, like: str, **own: Any) -> str:
        content = {"like": like, "name": name, "summary": "ours", **own}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return str(tmp_path / f"{name}.json")

    first, _ = written("a", "b.json"), written("b", "c.json")
    for value in (0.5, 0.6):
        written("c", "torch", **chip(value=value))
        sustained = load_hardware("h100", first).chip.sustained
        assert sustained is not None and sustained.value == value
    assert load_framework(first).says == "torch"
    written("c", "a.json")
    with pytest.raises(
        FrameworkError, match=r"a\.json is like .*b\.json is like .*c\.json is like .*a\.json"
    ):
        load_framework(first)


def test_a_framework_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    part: dict[str, Any] = {"value": 0.7, "unit": "1", "source": "our runs", "date": "2026-11"}
    content = {
        "format": "layoutopt-framework/1",
        "like": "megatron",
        "name": "mine",
        "summary": "our fork",
        "on": {"h100": {"chip": {"sustained": part}, "topology": None}},
    }
    path.write_text(json.dumps(content))
    found = load_hardware("h100", str(path))
    assert found.framework == str(path) and found.chip.sustained is not None
    assert found.chip.sustained.value == 0.7 and found.compiler == load_hardware("h100", "megatron").compiler
    assert isinstance(load_framework(found.framework), Framework)


def test_exchanges_are_hidden_whole_by_dualpipes_trainer_alone() -> None:
    """No option of a framework of the package says that all-to-alls of experts cost nothing."""
    found = load_hardware("h100", "examples/frameworks/dualpipe.json")
    hidden = [found.hidden_fraction(each) for each in ("paired_experts", "experts")]
    assert hidden == [1, 0] and found.topology.dispatch == "once"
    assert load_hardware("h100", "megatron:exchange=overlapped").hidden_fraction("paired_experts") == 0.43
    for name in framework_names():
        for number in load_framework(name).numbers():
            if number.path in ("overlap.experts", "overlap.paired_experts"):
                assert float(number.value) < 1, (name, number.option)


@pytest.mark.nightly
def test_what_is_shown_of_a_chip_is_what_it_has() -> None:
    """`frameworks NAME --hardware CHIP`, of all that runs on it: each number once, as predictions take it."""
    for name, chip in itertools.product(framework_names(), CHIPS):
        done = CliRunner().invoke(app, ["frameworks", name, "--hardware", chip, "--json"])
        if (kind := load_hardware(chip).kind) not in load_framework(name).kinds:
            assert done.exit_code == 2 and f"framework {name} does not run on {chip}, a {kind}" in done.stderr
            continue
        shown = {n["path"]: n for n in json.loads(done.stdout)["numbers"]}
        has = {path: n for path, n in load_hardware(chip, name).numbers() if path in shown}
        assert len(shown) == len(json.loads(done.stdout)["numbers"]) and has
        assert {p: (n.given, n.source) for p, n in has.items()} == {
            p: (shown[p]["value"], shown[p]["source"]) for p in has
        }
    paths = [
        {n.path for n in numbers_of("h100", load_framework(f"torch:loss={o}"))} for o in ("torch", "in_place")
    ]
    assert paths[0] - paths[1] == {"holds.loss_copies"}, "an option that removes a number"
    listed = json.loads(CliRunner().invoke(app, ["frameworks", "--hardware", "tpu-v4", "--json"]).stdout)
    assert {"jax", "maxtext"} <= {f["name"] for f in listed["frameworks"]} < {*framework_names()}
