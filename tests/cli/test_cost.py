"""`cost`, `lower` and `hardware`: the contract's JSON, tables that add up, what people see."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import mesh_tf_core as mtf
from costmodels.hardware import hardware_names, load_hardware, preset_content, write_profile
from costmodels.hardware.profiles import made_profiles_directory, profiles_directory
from costmodels.kernels.fusion import Fuses
from costmodels.liveness import MemoryRules, memory
from costmodels.pricing.hidden import Hidden
from costmodels.pricing.pricer import price
from examples.transformer_lm import model as transformer
from mesh_tf_core.ir.program import text
from mesh_tf_core.written import program_from_json
from tests.marks import by_day

LM = "examples/transformer_lm.py"
MESH, LAYOUT = "data:2;model:4", "batch:data;d_ff:model;heads:model"
COST = ("cost", LM, "--mesh", MESH, "--layout", LAYOUT)

# The language models of Shazeer et al. 2018, "Mesh-TensorFlow", table 2: heads, d_ff, parameters (widths:
# tensor2tensor/models/mtf_transformer.py, mtf_transformer_paper_lm).
PAPER = (
    (4, 4096, 142_881_792),
    (8, 8192, 218_379_264),
    (16, 16384, 369_374_208),
    (32, 32768, 671_364_096),
    (64, 65536, 1_275_343_872),
    (128, 131072, 2_483_303_424),
    (256, 262144, 4_899_222_528),
)


def test_the_json_is_the_contracts(result: Callable[..., dict[str, Any]]) -> None:
    found = result(*COST, "--hardware", "tpu-v2", "--set", "layers=2")
    assert list(found) == [
        "format",
        "model",
        "mesh",
        "layout",
        "hardware",
        "framework",
        "predicted",
        "feasible",
        "reason",
        "findings",
        "notes",
    ]
    assert list(found["model"]) == ["name", "fingerprint", "hparams", "parameters", "frozen", "batch"]
    assert found["model"]["hparams"]["layers"] == 2
    assert (found["mesh"], found["hardware"]) == ({"data": 2, "model": 4}, "tpu-v2")
    assert found["layout"] == {"batch": ["data"], "d_ff": ["model"], "heads": ["model"]}
    assert (found["feasible"], found["reason"]) == (True, None)
    assert set(found["predicted"]) == {
        "step_seconds",
        "compute_seconds",
        "communication_seconds",
        "exposed_communication_seconds",
        "peak_memory_bytes",
        "usable_memory_bytes",
        "flops_per_device",
        "communication_bytes_per_device",
        "mfu",
        "model_flops",
        "examples_per_second",
        "tokens_per_second",
        "tokens_per_second_per_chip",
        "model_flops_per_second_per_chip",
    }


def test_the_numbers_are_the_cost_models(result: Callable[..., dict[str, Any]]) -> None:
    program = transformer().lower(mtf.Mesh(MESH), mtf.Layout(LAYOUT))
    cost = price(program, load_hardware("tpu-v3"))
    found = result(*COST, "--hardware", "tpu-v3")["predicted"]
    assert found["step_seconds"] == pytest.approx(cost.step_seconds, rel=1e-12)
    assert found["peak_memory_bytes"] == memory(program, MemoryRules(fuses=Fuses.ALL)).peak
    assert found["flops_per_device"] == cost.flops
    assert found["communication_bytes_per_device"] == program.communication_bytes()


def test_every_line_can_be_opened(result: Callable[..., dict[str, Any]]) -> None:
    found = result(*COST, "--hardware", "tpu-v5e", "--lines")
    lines, predicted = found["lines"], found["predicted"]
    assert sum(x["exposed_seconds"] * x["runs"] for x in lines) == pytest.approx(predicted["step_seconds"])
    assert sum(x["flops"] * x["runs"] for x in lines) == pytest.approx(predicted["flops_per_device"])
    products = [x for x in lines if "einsum" in x["fused"] or x["operation"] == "attention"]
    for line in products:
        assert (
            " for padding, at " in line["formula"]
            or " elements passing through registers " in line["formula"]
        )
        assert " GB/s); bound by " in line["formula"]
    assert any(" for padding, at " in line["formula"] for line in products)
    assert any(x["fused"] for x in products) and any(not x["fused"] for x in products)
    sums = [x for x in lines if x["class"] == "gradient"]
    assert sums and all("50% of this time is hidden behind " in x["formula"] for x in sums)
    assert any("hidden behind backward" in x["formula"] for x in sums)
    assert all("torus: " in x["formula"] for x in lines if x["axes"])


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("heads", "d_ff", "parameters"), PAPER)
def test_the_papers_parameter_counts(
    result: Callable[..., dict[str, Any]], heads: int, d_ff: int, parameters: int
) -> None:
    sizes = {
        "layers": 6,
        "d_model": 1024,
        "d_kv": 256,
        "heads": heads,
        "d_ff": d_ff,
        "vocab": 32768,
        "batch": 256,
    }
    sets = [word for name, size in sizes.items() for word in ("--set", f"{name}={size}")]
    found = result(
        "cost", LM, "--set", "length=256", *sets, "--mesh", "batch:2;model:2", "--layout", "batch:batch"
    )
    assert found["model"]["parameters"] == parameters


def test_what_does_not_fit_is_priced(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]]
) -> None:
    found = result(*COST, "--memory", "10MiB")
    assert found["feasible"] is False
    assert re.search(
        r"over the limit of 10 MiB; largest tensors: .*float32\[layers:4 batch:16/data", found["reason"]
    )
    assert found["predicted"]["step_seconds"] == result(*COST)["predicted"]["step_seconds"]
    assert "no: peak memory" in run(*COST, "--memory", "10MiB").stdout


def test_storage_recompute_and_microbatches(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], refused: Callable[..., str]
) -> None:
    plain = ("cost", LM, "--mesh", "data:8", "--layout", "batch:data")
    more = (*plain, "--storage", "zero1", "--storage", "output/projection=zero3", "--recompute", "layers")
    found = result(*more, "--microbatches", "2")
    assert (found["recompute"], found["microbatches"]) == (["layers"], 2)
    assert found["storage"]["output/projection"] == "zero3"
    assert set(found["storage"].values()) == {"zero1", "zero3"}
    assert len(found["storage"]) == 12
    before = result(*plain)["predicted"]
    assert found["predicted"]["peak_memory_bytes"] < before["peak_memory_bytes"]
    assert found["predicted"]["flops_per_device"] > before["flops_per_device"]
    assert re.search(r"^recompute +layers", run(*more).stdout, re.MULTILINE)
    assert "zero1: 11 variables; zero3: output/projection" in run(*more).stdout
    assert "'zero4'; did you mean 'zero" in refused(*plain, "--storage", "zero4")
    assert "no variable 'output/projecton'; did you mean 'output/projection'?" in refused(
        *plain, "--storage", "output/projecton=zero1"
    )
    assert "the model has no loop over 'layer'; did you mean 'layers'?" in refused(
        *plain, "--recompute", "layer"
    )
    word_of_search = refused(*plain, "--recompute", "selective")
    assert (
        "known: always, layers, never (to keep some values instead of recomputing them, write e.g. layers:"
        in word_of_search
    )
    kept = result(*plain, "--recompute", "layers:keep=attention+products")
    assert kept["recompute"] == ["layers:keep=products+attention"]
    all_again = result(*plain, "--recompute", "layers")["predicted"]
    peaks = [found["peak_memory_bytes"] for found in (all_again, kept["predicted"], before)]
    flops = [found["flops_per_device"] for found in (before, kept["predicted"], all_again)]
    assert peaks == sorted(peaks) and flops == sorted(flops)
    assert "did you mean 'products'?" in refused(*plain, "--recompute", "layers:keep=product")
    assert "--microbatches" in refused(*plain, "--microbatches", "0")


def seconds(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


def rows(shown: str, title: str) -> list[list[str]]:
    """The cells of the table under `title`."""
    lines = shown.split(title + "\n", 1)[-1] if f"\n{title}" not in shown else shown.split(f"\n{title}", 1)[1]
    table = lines.splitlines()[1:]
    end = next((i for i, line in enumerate(table) if not line.strip()), len(table))
    return [[c.strip() for c in line.split("│")] for line in table[:end] if "│" in line]


@pytest.mark.parametrize(("title", "column"), [("Per operation", 4), ("Per phase", 4), ("Per axis", 4)])
def test_the_rows_of_a_table_add_up_to_its_last(run: Callable[..., Result], title: str, column: int) -> None:
    *parts, total = (seconds(row[column]) for row in rows(run(*COST).stdout, title))
    assert sum(parts) == pytest.approx(total, rel=0.02)


def test_what_hides_behind_what(run: Callable[..., Result]) -> None:
    """Gradients are summed while backward runs; what is hidden and what is exposed is all of their time."""
    words = ("--hardware", "tpu-v4", "--storage", "zero3")
    found = {row[0]: row for row in rows(run(*COST, *words).stdout, "Overlap")}
    assert found.keys() == {"gradient", "parameter", "activation"}
    for _, time, hidden, exposed, *_ in found.values():
        assert seconds(hidden) + seconds(exposed) == pytest.approx(seconds(time), rel=0.02)
    assert "backward" in found["gradient"][4] and seconds(found["activation"][2]) == 0
    assert "too short to hide this" not in found["gradient"][5]
    assert not Hidden("gradient", 2.0, 1.5, "backward", 1.0).fits


def test_people_see_the_layout_the_time_and_the_largest_tensors(run: Callable[..., Result]) -> None:
    shown = run(*COST, "--hardware", "tpu-v2").stdout
    assert "transformer_lm, 3,311,872 parameters" in shown
    assert "data:2;model:4 (8 devices)" in shown
    assert re.search(r"step +[\d.]+ ms predicted = ", shown)
    assert re.search(r"memory +[\d.]+ MiB of 7\.48 GiB \([\d.]+%\) per device", shown)
    assert "float32[layers:4 batch:16/data length:128 d_model:256]" in shown
    assert "\x1b[" not in shown


def test_without_collectives_it_says_so(run: Callable[..., Result]) -> None:
    shown = run("cost", LM, "--mesh", MESH).stdout
    assert "replicated (nothing is split)" in shown
    assert "No collectives: the devices do not communicate." in shown


def test_lower_prints_the_program(run: Callable[..., Result], result: Callable[..., dict[str, Any]]) -> None:
    program = transformer().lower(mtf.Mesh(MESH), mtf.Layout(LAYOUT))
    args = ("lower", LM, "--mesh", MESH, "--layout", LAYOUT)
    assert run(*args).stdout == text(program)
    found = result(*args)
    assert (found["emit"], found["program"]) == ("program", text(program))
    plain, started = (text(program).count(f"= all_reduce{how}(") for how in ("", "_start"))
    assert found["instructions"]["all_reduce"] == plain + started and plain and started
    assert program_from_json(json.loads(run(*args, "--emit", "json").stdout)) == program


def test_a_stage_of_a_pipeline_may_run_again(
    result: Callable[..., dict[str, Any]], refused: Callable[..., str]
) -> None:
    asked = ("cost", LM, "--set", "layers=2", "--set", "batch=8", "--layout", "layers:pipe")
    held = [
        result(*asked, "--mesh", "pipe:2", "--microbatches", "4", *words)["predicted"]["peak_memory_bytes"]
        for words in ((), ("--recompute", "tick"))
    ]
    assert held[1] < held[0]
    assert "the model has no loop over" in refused("cost", LM, "--mesh", "pipe:2", "--recompute", "tick")
    alone, split = (result(*asked[:-1], words, "--mesh", "pipe:1") for words in ("", "layers:pipe"))
    assert alone["predicted"]["step_seconds"] == split["predicted"]["step_seconds"]


def test_hardware_is_listed(run: Callable[..., Result], result: Callable[..., dict[str, Any]]) -> None:
    found = result("hardware")["hardware"]
    assert [machine["name"] for machine in found] == list(hardware_names())
    shown = run("hardware").stdout
    assert all(name in shown for name in hardware_names())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", by_day(hardware_names(), every=4))
def test_every_number_is_shown_with_its_source(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], name: str
) -> None:
    found = result("hardware", name)
    assert found["name"] == name
    assert found["numbers"] and all(n["source"] and n["date"] and n["path"] for n in found["numbers"])
    assert all(number["path"] in run("hardware", name).stdout for number in found["numbers"][:5])


def test_a_profile_in_the_cache_stands_for_its_preset(
    result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    before = result(*COST)["predicted"]["compute_seconds"]
    content = preset_content("cpu-local")
    content["summary"] = "calibrated for this test"
    content["chip"]["peak_flops"]["float32"]["value"] /= 100
    write_profile(content, made_profiles_directory() / "cpu-local.json")
    assert str(profiles_directory()).startswith(str(tmp_path))
    assert result("hardware", "cpu-local")["summary"] == "calibrated for this test"
    assert result(*COST)["predicted"]["compute_seconds"] > before
    copied = tmp_path / "copied.json"
    copied.write_text(json.dumps(content), encoding="utf-8")
    assert result("hardware", str(copied))["summary"] == "calibrated for this test"


def test_relative_cache_directories_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert profiles_directory() == Path.home() / ".cache/layoutopt/profiles"


def test_what_collective_matmul_does_not_change_is_told(result: Callable[..., dict[str, Any]]) -> None:
    words = ("cost", LM, "--mesh", "model:2", "--hardware", "tpu-v3", "--collective-matmul", "d_ff")
    for rule, idle in (("", 1), (";length@elsewhere:model", 0)):
        found = result(*words, "--layout", f"d_ff:model;heads:model{rule}")
        notes = [
            n for n in found.get("notes", ()) if n.startswith("--collective-matmul d_ff changes nothing")
        ]
        assert len(notes) == idle and found["collective_matmul"] == ["d_ff"]


def test_a_doubt_is_said_once(run: Callable[..., Result], result: Callable[..., dict[str, Any]]) -> None:
    """That no kernel takes this attention is a finding of lint and a note of the price."""
    asked = (*COST, "--hardware", "a100", "--set", "layers=2")
    found = result(*asked)
    (doubt,) = [f["message"] for f in found["findings"] if f["kind"] == "no kernel"]
    assert doubt not in found.get("notes", [])
    assert run(*asked).stdout.replace("\n", " ").count("no library kernel on NVIDIA GPUs") == 1


@pytest.mark.nightly
def test_repeated_work_of_experts_is_said_as_lint_says_it(
    result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A mixture under FSDP's batch:data: the experts' own batch is not split."""
    file = tmp_path / "config.json"
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "norm_topk_prob": True}
    named = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16"}
    file.write_text(json.dumps({**named, **sizes, **experts, **heads}))
    asked = ("--mesh", "data:2", "--layout", "batch:data", "--storage", "zero3", "--hardware", "h100")
    said = [
        result(command, str(file), *asked, "--set", "batch=8", "--set", "length=32")["findings"]
        for command in ("cost", "lint")
    ]
    work = [[f for f in found if f["kind"] == "repeated work"] for found in said]
    assert work[0] == work[1] and "experts" in work[0][0]["message"]
    assert "split 'expert_batch' over data" in work[0][0]["fix"]
