"""float16 as configurations of 2023 say it: priced as the chip computes it, and doubted in training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels import load_hardware
from layoutopt.models.loading import load_model
from layoutopt.optimize.evaluation.evaluator import evaluate

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
NOTE = "gradients are float16 and the loss is not scaled"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


@pytest.mark.parametrize("chip", ["tpu-v5e", "tpu-v5p", "tpu-v6e"])
def test_a_configuration_in_float16_is_no_faster_than_in_bfloat16(
    result: Callable[..., dict[str, Any]], config: str, chip: str
) -> None:
    asked = ("--mesh", "data:8", "--layout", "batch:data", "--storage", "zero3", "--set", "batch=32")
    half, brain = (
        result("cost", config, *asked, *more, "--hardware", chip)
        for more in ((), ("--set", "dtype=bfloat16"))
    )
    for name in ("step_seconds", "mfu"):
        assert half["predicted"][name] == pytest.approx(brain["predicted"][name], rel=0.01)
    per_chip = half["predicted"]["model_flops_per_second_per_chip"]
    assert per_chip < load_hardware(chip).peak_flops("bfloat16")
    assert any(NOTE in note and "--set dtype=bfloat16" in note for note in half["notes"])
    assert any("no peak FLOP/s for float16" in note for note in half["notes"])
    assert not any("float16 " in note.replace("bfloat16 ", "") for note in brain.get("notes", []))


def small(loss_scale: mtf.LossScale | None) -> mtf.Model:
    g, a, b = mtf.Graph(), mtf.Dim("batch", 4), mtf.Dim("d", 4)
    w = g.variable("w", [b], mtf.ONES, activation_dtype="float16")
    loss = mtf.reduce_mean((g.input("x", [a, b], "float16") * w).cast("float32"))
    return mtf.Model(loss, mtf.SGD(0.1, loss_scale=loss_scale))


def test_a_scaled_loss_has_no_note() -> None:
    assert [NOTE in note for note in small(None).notes(mtf.Options())] == [True]
    assert small(mtf.LossScale()).notes(mtf.Options()) == ()


def test_mfu_is_held_against_the_peak_of_the_type(config: str) -> None:
    """An MFU that is above the published one in bfloat16 is so in float16, which int8's peak hid."""
    chip = load_hardware("tpu-v6e, published_mfu=0.01")

    def noted(dtype: str) -> list[str]:
        model = load_model(config, {"batch": 32, "dtype": dtype}).model
        found = evaluate(model, mtf.Mesh("data:8"), mtf.Layout("batch:data"), chip)
        return [
            note.split(" is above")[0] for note in found.notes if "above the highest published one" in note
        ]

    assert noted("float16") == noted("bfloat16") and len(noted("float16")) == 1
