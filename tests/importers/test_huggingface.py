"""Models of Hugging Face configurations: parameters as published, losses as transformers computes them."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from layoutopt.importers.huggingface import from_huggingface, is_configuration, names_of
from layoutopt.importers.huggingface.configuration import FORMS, chosen, class_defaults
from layoutopt.importers.huggingface.decoder import LayerKind, runs
from layoutopt.importers.huggingface.fields import ConfiguredTraining
from layoutopt.models.loading import load_model
from layoutopt.optimize.evaluation.evaluator import evaluate
from mesh_tf_core import layers as nn
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.lower import Options
from mesh_tf_core.training.weights import read_weights
from tests.importers.huggingface_classics import FAMILIES as CLASSICS
from tests.importers.huggingface_classics import classic
from tests.importers.huggingface_media import media
from tests.importers.huggingface_weights import ours

DATA = Path(__file__).parents[1] / "data"
COUNTS = json.loads((DATA / "huggingface_counts.json").read_text())["models"]
LOSSES = json.loads((DATA / "huggingface_losses.json").read_text())["models"]
PUBLISHED = json.loads((DATA / "published_configurations.json").read_text())["models"]
TINY = LOSSES["llama"]["config"]
HEADS = mtf.Dim("heads", 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    assert from_huggingface(COUNTS[name]["config"]).parameters == COUNTS[name]["parameters"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_built_as_they_are(name: str) -> None:
    """Or the message names what the model has and layoutopt lacks."""
    if not PUBLISHED[name].get("built", True):
        with pytest.raises(mtf.UserError, match=r"is not supported.*; layoutopt lacks [a-z]"):
            from_huggingface(PUBLISHED[name]["config"])
        return
    assert from_huggingface(PUBLISHED[name]["config"]).parameters == PUBLISHED[name]["parameters"]


def test_what_is_lacking_is_on_the_page_and_no_family() -> None:
    page = (DATA.parents[1] / "docs" / "guides" / "huggingface.md").read_text(encoding="utf-8")
    for family, lacks in class_defaults()["lacks"].items():
        assert family not in FORMS and f"`{family}`" in page and lacks in page, family


def test_counts_are_those_of_the_model_cards() -> None:
    """What their authors and other libraries say, where they say it exactly."""
    published = {
        "Llama-3-8B": 8_030_261_248,
        "Mistral-7B-v0.1": 7_241_732_096,
        "Mixtral-8x7B": 46_702_792_704,
        "Gemma-2-2B": 2_614_341_888,
        "ViT-B/16-224": 86_567_656,
        "DeepSeek-V2-Lite": 15_706_484_224,
    }
    assert {n: COUNTS[n]["parameters"] for n in published} == published


def shaped(arrays: dict[str, Any], model: mtf.Model) -> dict[str, Any]:
    """Arrays with the dimensions of the variables."""
    variables = model.graph.variables
    return {n: np.ascontiguousarray(x).reshape(variables[n].shape.sizes) for n, x in arrays.items()}


def taken_apart(weights: dict[str, Any], config: Any) -> dict[str, Any]:
    """Weights of modules that join some, under the names of variables."""
    if config["model_type"] in ("siglip", "whisper"):
        return media(weights)
    return (classic if config["model_type"] in CLASSICS else ours)(weights, config, 12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.one_in(4)
def test_losses_are_those_of_transformers(name: str) -> None:
    """With the same weights, loaded by the names that checkpoints have."""
    case = LOSSES[name]
    rng = np.random.default_rng(0)
    batch = {
        n: rng.integers(0, below, shape).astype(np.int32)
        if below
        else rng.normal(size=shape).astype(np.float32)
        for n, (shape, below) in case["inputs"].items()
    }
    if name == "bert":
        batch["targets"][:, ::3] = -100
    asked = {"batch": 2, "length": 12}
    model = from_huggingface(case["config"], **asked)
    weights = {
        n: np.random.default_rng(zlib.crc32(n.encode())).normal(scale=0.5, size=shape).astype(np.float32)
        for n, shape in case["weights"].items()
    }
    names = {}
    if case.get("joined"):
        found = taken_apart(weights, case["config"])
        weights = shaped(found, model)
    else:
        names = names_of(case["config"], **asked)
    found, said = read_weights(model.graph.variables.values(), weights, names)
    assert not said.unused and not said.new
    engine = LockstepEngine(mtf.lower(model.graph, mtf.Mesh("one:1"), mtf.Layout(""), {"loss": model.loss}))
    engine.initialize()
    for variable, array in found:
        engine.write(variable, array)
    assert float(engine.step(batch)["loss"]) == pytest.approx(case["loss"], rel=5e-6)


def check_parts(name: str) -> None:
    """Texts know nothing of each other, so that parts of a batch give the same gradients."""
    model = from_huggingface(LOSSES[name]["config"], batch=4, length=12)
    model.lower(mtf.Mesh("one:1"), mtf.Layout(""), Options(microbatches=2))


@pytest.mark.one_in(30)
@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("siglip", "clip")])  # all pairs
def test_every_family_takes_microbatches(name: str) -> None:
    check_parts(name)


def test_an_indexer_of_keys_takes_microbatches() -> None:
    check_parts("deepseek_v32")


def test_stages_of_a_short_loop_name_the_long_one() -> None:
    config = LOSSES["deepseek_v3"]["config"] | {"num_hidden_layers": 5, "first_k_dense_replace": 1}
    model = from_huggingface(config, batch=4, length=16)
    with pytest.raises(mtf.LayoutError, match=r"a loop of 1 layer; .*, or split 'layers_1', a loop of 4"):
        model.lower(mtf.Mesh("pipe:2"), mtf.Layout("layers:pipe"), Options(microbatches=2))


def changed(**more: Any) -> dict[str, Any]:
    return {**TINY, **more}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma3", "jamba", "kimi_linear", "falcon_h1"])
def test_models_are_the_same_however_a_framework_writes_them(family: str) -> None:
    """Gates at hidden units or results, norms as one operation or in steps, scans in steps or as a kernel,
    routers in the model's type or in float32: losses and steps agree."""
    rng, losses = np.random.default_rng(0), []
    config = LOSSES[family]["config"]
    batch = {
        n: rng.integers(0, config["vocab_size"], (2, 12)).astype(np.int32) for n in ("tokens", "targets")
    }
    forms = ("hidden", "library", "steps"), ("results", "library", "kernel"), ("results", "steps", "kernel")
    for number, (gates, norms, scans) in enumerate(forms):
        router = ("", "model", "float32")[number]
        written = {"gates": gates, "norms": norms, "scans": scans, "router": router}
        model = from_huggingface(config, batch=2, length=12, dtype="float32", **written)
        run = mtf.Trainer(model, "x:1", "", engine="lockstep")
        losses.append([run.step(batch)["loss"] for _ in range(2)])
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)
    with pytest.raises(mtf.UserError, match="gates='result' is unknown; did you mean 'results'"):
        from_huggingface(config, gates="result")


OWN_COUNTS = [
    ("solar_open", {"first_k_dense_replace": 1}, 14_576),
    ("lfm2", {"tie_embedding": False}, 40_920),
    ("lfm2", {"layer_types": None, "full_attn_idxs": None}, 39_816),
    ("bamba", {"mamba_proj_bias": True}, 10_544),
    ("helium", {"attention_bias": True}, 6_992),
]
"""Parameters in transformers 5.24.0."""


@pytest.mark.parametrize(("family", "fields", "count"), OWN_COUNTS)
def test_fields_change_what_they_change_in_transformers(family: str, fields: Any, count: int) -> None:
    assert from_huggingface({**LOSSES[family]["config"], **fields}).parameters == count


def test_the_text_part_of_a_file_is_planned_with_what_the_whole_says() -> None:
    """It has the dtype of the whole, and what it omits, its class has."""
    sparse = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "model_type": "gemma3_text",
    }
    whole = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "text_config": sparse,
        "vision_config": {"hidden_size": 8},
    }
    heads = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    made = from_huggingface(whole, length=16)
    assert made.hparams["dtype"] == "bfloat16"
    assert (
        made.fingerprint == from_huggingface({**sparse, **heads, "dtype": "bfloat16"}, length=16).fingerprint
    )
    assert made.notes(mtf.Options())[:2] == (
        "only text_config of the configuration is planned, without its vision_config",
        "the file omits vocab_size 262,208, num_attention_heads 8, num_key_value_heads 4, head_dim 256, "
        "sliding_window 4,096: the defaults of Gemma3TextConfig (transformers 5.24.0)",
    )


SIZED = [n for n in FORMS if "hidden_size" in class_defaults()["families"][n]]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", SIZED)
def test_a_file_may_omit_the_sizes_of_its_class(family: str) -> None:
    least: dict[str, Any] = {"model_type": family, "num_hidden_layers": 2}
    least |= {"num_experts_per_tok": 2} if family in ("deepseek_v2", "dots1") else {}
    least |= {"n_routed_experts": 4, "n_shared_experts": 1} if family == "dots1" else {}
    least |= {"head_dim": 128} if family in ("glm4v_moe_text", "qwen3_omni_moe_text") else {}
    fields = chosen(least, "the file").fields()
    FORMS[family][1].read(fields, ConfiguredTraining(batch=1, length=1))
    sizes = {n: v for n, v in class_defaults()["families"][family].items() if n in fields.asked}
    assert from_huggingface(least).parameters == from_huggingface({**sizes, **least}).parameters


def test_an_architecture_that_is_known_is_built_under_any_name() -> None:
    config = LOSSES["deepseek_v3"]["config"]
    renamed = {**config, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    made = from_huggingface(renamed)
    assert made.fingerprint == from_huggingface(config).fingerprint
    assert (
        "'kimi_k2' is built as DeepseekV3ForCausalLM, the architecture that the file names" in made.remarks[0]
    )


def test_layers_of_further_predictions_are_said_to_be_left_out() -> None:
    config = LOSSES["deepseek_v3"]["config"]
    made = from_huggingface({**config, "num_nextn_predict_layers": 1})
    assert "1 layer of multi-token prediction is not planned; add it with --set mtp=1" in made.remarks
    assert not any("prediction" in r for r in from_huggingface(config).remarks)


def test_a_mixture_of_no_experts_is_said_to_be_dense() -> None:
    """As in granite-4.0-h-1b; transformers builds the shared block alone."""
    config = LOSSES["granitemoehybrid"]["config"]
    made = from_huggingface({**config, "num_local_experts": 0})
    assert "num_local_experts is 0, so all layers are dense" in made.remarks
    assert not any("dense" in remark for remark in from_huggingface(config).remarks)


def test_activations_have_the_dtype_that_trainers_give_them() -> None:
    """Where a file names none, quantised weights mean bfloat16; a note says it until one is set."""
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    for more, dtype in (
        (quantised, "bfloat16"),
        ({}, "float32"),
        ({**quantised, "torch_dtype": "float16"}, "float16"),
    ):
        made, other = from_huggingface(changed(**more)), "float32" if dtype == "bfloat16" else "bfloat16"
        assert made.hparams["dtype"] == dtype
        assert bool(made.assumed["dtype"]) == ("torch_dtype" not in more)
        assert "dtype" not in from_huggingface(changed(**more), dtype=other).assumed
        hardware = load_hardware("a100", "deepspeed")
        notes = evaluate(made, mtf.Mesh("data:2"), mtf.Layout("batch:data"), hardware).notes
        said = [note for note in notes if f"dtype is {dtype} (the file names none" in note]
        assert len(said) == bool(made.assumed["dtype"])
        assert all(("of bfloat16 is 16 times as high" in note) == (dtype == "float32") for note in said)


def test_fields_of_published_files_that_training_does_not_read() -> None:
    """Their weights may be quantised; old fields have no reader in transformers either."""
    more = {"is_llama_config": True, "quantization_config": {"quant_method": "fp8"}}
    made = from_huggingface(changed(**more), dtype="float32")
    assert made.fingerprint == from_huggingface(TINY).fingerprint
    assert any("quantization_config is ignored" in remark for remark in made.remarks)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    both = [from_huggingface(changed(rope_scaling={**yarn, **more})) for more in ({}, {"attn_factor": 0.9})]
    assert both[0].fingerprint == both[1].fingerprint


def test_a_field_inside_a_field_is_ignored_by_the_same_option() -> None:
    scaled = {"rope_type": "linear", "factor": 2.0}
    strange = changed(rope_scaling={**scaled, "comment": "see card"})
    found = from_huggingface(strange, ignore="comment")
    assert found.fingerprint == from_huggingface(changed(rope_scaling=scaled)).fingerprint


def test_hyperparameters() -> None:
    model = from_huggingface(TINY, num_hidden_layers=5, batch=4, optimizer="adafactor", clip_norm=1.0)
    assert model.tokens == 4 * 64 and model.graph.dims()["layers"] == {5}
    assert model.optimizer == mtf.Adafactor(1e-4, clip_norm=1.0)
    with pytest.raises(mtf.UserError, match="has no hyperparameter 'depth'; "):
        from_huggingface(TINY, depth=3)
    assert from_huggingface(changed(novel=1), ignore="novel").parameters == from_huggingface(TINY).parameters
    # Fields that are off say nothing, whatever they are.
    assert (
        from_huggingface(changed(novel=None, other=False)).fingerprint == from_huggingface(TINY).fingerprint
    )


def test_balance_adds_the_loss_of_the_routers() -> None:
    config = LOSSES["qwen3_moe"]["config"]
    model = from_huggingface(config, balance=0.01)
    assert set(model.metrics) == {"cross_entropy", "unbalance"}
    assert not from_huggingface(config).metrics


def test_layers_are_loops_of_their_shortest_period() -> None:
    full, near = (LayerKind(nn.Attention(HEADS, HEADS, window=n)) for n in (0, 4))
    assert list(runs((full,) * 5)) == [((full,), 5)]
    assert list(runs((near, full) * 3)) == [((near, full), 3)]
    assert list(runs(((near,) * 5 + (full,)) * 4 + (near, near))) == [((*(near,) * 5, full), 4), ((near,), 2)]
    assert list(runs((full, near, near, near))) == [((full,), 1), ((near,), 3)]
    assert list(runs((full,))) == [((full,), 1)]


def written(folder: Path, config: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_a_file_is_a_model(tmp_path: Path) -> None:
    source = written(tmp_path, TINY)
    loaded = load_model(source, ["batch=2", "length=8", "num_hidden_layers=1", "hidden_act=relu"])
    assert loaded.hparams["num_hidden_layers"] == 1
    assert [*loaded.hashes()] == ["config.json"]
    batch = next(loaded.data())
    assert {n: x.shape for n, x in batch.items()} == {"tokens": (2, 8), "targets": (2, 8)}
    assert (batch["tokens"] != next(loaded.data("held-out"))["tokens"]).any()
    assert is_configuration(source)
