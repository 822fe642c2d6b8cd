"""Configurations that cannot be honoured are refused by the name of the field; the remedies lead on."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mesh_tf_core as mtf
from layoutopt.importers.huggingface import from_huggingface, is_configuration, names_of
from layoutopt.models.loading import load_model

DATA = Path(__file__).parents[1] / "data"
LOSSES = json.loads((DATA / "huggingface_losses.json").read_text())["models"]
TINY = LOSSES["llama"]["config"]


def test_checkpoints_of_deepseek_are_refused() -> None:
    with pytest.raises(
        mtf.UserError, match="checkpoints of model_type 'deepseek_v2' combine arrays that are"
    ):
        names_of(LOSSES["deepseek_v2"]["config"])


def changed(**more: Any) -> dict[str, Any]:
    return {**TINY, **more}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {**TINY, "model_type": "zamba", "architectures": None},
        r"model_type 'zamba' is not supported; layoutopt lacks one block.*; nearest: mamba, .*; write this",
    ),
    (
        {"hidden_size": 4},
        r"it has no model_type; all \d+ are in docs/guides/huggingface.md; write",
    ),
    (
        changed(architectures=["LlamaForSequenceClassification"]),
        r"for model_type 'llama' layoutopt builds only LlamaForCausalLM",
    ),
    (
        {
            "model_type": "blip",
            "text_config": {**TINY, "model_type": "blip_text_model", "architectures": None},
        },
        r"'blip' is not supported, nor is its text_config \('blip_text_model'\); nearest: clip, siglip",
    ),
    (
        changed(strange_gate=True, other=3),
        r"unknown fields .*: strange_gate, other; .* --set ignore=strange_gate,other",
    ),
    (changed(hidden_size="4096"), r'hidden_size is "4096"; give a whole number of at least 1'),
    (changed(num_hidden_layers=True), r"num_hidden_layers is true; give a whole number"),
    (changed(rms_norm_eps=float("nan")), r"rms_norm_eps is NaN; give a number"),
    (changed(hidden_act="situ"), r'hidden_act is "situ"; did you mean .silu.|known: gelu'),
    (
        changed(rope_scaling={"rope_type": "resonance"}),
        r'rope_type is "resonance"; known: default, linear, llama3',
    ),
    (
        changed(rope_scaling={"type": "dynamic", "factor": 2.0}),
        r'rope_scaling: type is "dynamic"; known: default, linear, llama3',
    ),
    (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "novel": 1}},
        r"text_config: unknown fields for model_type 'gemma3_text': novel",
    ),
    (
        changed(rope_scaling={"rope_type": "linear", "factor": 2.0, "fast": 1}),
        r"rope_scaling: unknown fields: fast",
    ),
    (
        {**LOSSES["minimax"]["config"], "postnorm": False},
        r"postnorm is false; only true is supported",
    ),
    (
        changed(torch_dtype="float8_e4m3fn"),
        r"torch_dtype 'float8_e4m3fn'; did you mean 'float32'|known: bfloat16",
    ),
    (changed(head_dim=None, hidden_size=18), r"hidden_size is 18; give a multiple of"),
    (changed(num_key_value_heads=3), r"num_key_value_heads is 3; give a divisor of num_attention_heads \("),
    (
        {k: v for k, v in LOSSES["deepseek_v2"]["config"].items() if k != "num_experts_per_tok"},
        r"has no field 'num_experts_per_tok'; add the field with a whole number",
    ),
    (
        {**LOSSES["gemma2"]["config"], "layer_types": ["full_attention"]},
        r"layer_types .* 1 entries for 4 layers",
    ),
    (
        {**LOSSES["gemma2"]["config"], "query_pre_attn_scalar": 0},
        r"query_pre_attn_scalar is 0; give a number above 0",
    ),
    (
        {**LOSSES["mixtral"]["config"], "output_router_logits": True},
        r"output_router_logits is true; only false",
    ),
    ({**LOSSES["qwen3_moe"]["config"], "use_qk_norm": False}, r"use_qk_norm is false; only true"),
    ({**LOSSES["bailing_hybrid"]["config"], "kda_lower_bound": "x"}, r"kda_lower_bound .* at most 0"),
    ({**LOSSES["step3p5"]["config"], "swiglu_limits": "x"}, r"swiglu_limits .* or one for each layer"),
    ({**LOSSES["step3p5"]["config"], "gating": False}, r'gating is false; only true or "per-head" or '),
    ({**LOSSES["step3p5"]["config"], "mlp_bias": True}, r"mlp_bias is true; only false"),
    ({**LOSSES["bamba"]["config"], "z_loss_coefficient": 0.1}, r"z_loss_coefficient is 0.1; only 0.0"),
]
REFUSED += [
    (changed(num_hidden_layers=None), r"has no field 'num_hidden_layers'; add the field with a whole number"),
    (changed(rope_theta=0), r"rope_theta is 0; give a number above 1"),
    (
        changed(rope_scaling={"rope_type": "linear"}),
        r"rope_scaling has no field 'factor'; add the field with a number",
    ),
]
UNREAD = {"mistral": "mlp_bias", "apertus": "mlp_bias", "gpt_neox": "num_key_value_heads"}
"""Family -> a field that others read, and its class does not."""
LISTED: list[tuple[str, dict[str, Any], str]] = [
    ("laguna", {"num_attention_heads_per_layer": [4, 6, 6, 4]}, "give all layers of a kind the same value"),
    (
        "exaone_moe",
        {"mlp_layer_types": ["sparse"]},
        "mlp_layer_types .*; give one entry for each of the 5 layers",
    ),
    ("deepseek_v3", {"moe_layer_freq": [1]}, "moe_layer_freq .*; only 1 is supported"),
    ("ernie4_5_moe", {"moe_layer_end_index": [1]}, "moe_layer_end_index .*; give a whole number"),
    ("llama", {"hidden_size": [16]}, "hidden_size .*; give a whole number"),
    ("llama", {"num_attention_heads": [2, 2]}, "num_attention_heads .*; give a whole number"),
    ("bamba", {"time_step_limit": [0.1, 1]}, r"time_step_limit .* only \[0.0, Infinity\] or "),
    ("siglip", {"vision_config": 5}, "vision_config is 5; give an object"),
    ("siglip", {"text_config": [None]}, "text_config .*; give an object"),
]


@pytest.mark.parametrize("family", UNREAD)
def test_a_field_that_the_class_does_not_read_is_refused_or_as_if_missing(family: str) -> None:
    config, name = LOSSES[family]["config"], UNREAD[family]
    other = {**config, name: 1}
    with pytest.raises(mtf.UserError, match=f"unknown fields for model_type '{family}': {name}; "):
        from_huggingface(other)
    assert from_huggingface(other, ignore=name).fingerprint == from_huggingface(config).fingerprint


@pytest.mark.parametrize(("family", "fields", "said"), LISTED)
def test_lists_and_parts_of_other_forms_are_refused(family: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(mtf.UserError, match=said):
        from_huggingface({**LOSSES[family]["config"], **fields})


@pytest.mark.parametrize(("config", "said"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(mtf.UserError, match=said):
        from_huggingface(config)


FINAL = ("write this model with mesh_tf_core.layers", "one entry per layer")
"""Remedies that are no change of a value."""


def followed(said: str, config: dict[str, Any], changes: dict[str, Any]) -> None:
    """Does what a message advises."""
    config = config["text_config"] if ": text_config: " in said else config
    if found := re.search(r"add hyperparameter ignore=(\S+)|add --set ignore=(\S+)", said):
        changes["ignore"] = found[1] or found[2]
    elif found := re.search(r'write ("architectures": .*\])', said):
        config |= json.loads(f"{{{found[1]}}}")
    elif found := re.search(r"has no field '(\w+)'; add the field with a whole number", said):
        config[found[1]] = 2
    elif found := re.search(r"(rope_scaling) has no field '(\w+)'; add the field with a number", said):
        config[found[1]][found[2]] = 2.0
    else:
        found = re.search(r"(?:: (rope_\w+))?: (\w+) (?:is )?(?:'.*?'|\".*?\"|\S+); (.*)", said)
        assert found is not None, said
        inner = config[found[1]] if found[1] else config
        inner[found[2]] = advised(found[3])


def advised(text: str) -> Any:
    """The first value that a message offers."""
    forms: tuple[tuple[str, Callable[[str], Any]], ...] = (
        (r"did you mean '(\w+)'", str),
        (r"use (\w+); known", str),
        (r"known: (\w+)", str),
        (r"only (\S+) ", json.loads),
        (r"give a multiple of \w+ \((\d+)\)", lambda n: 8 * int(n)),
        (r"give a divisor of \w+ \((\d+)\)", int),
        (r"give a whole number of at least (\d+)", int),
        (r"give a number above (\d)", lambda n: 1.0 + int(n)),
        (r"give a number of at least (\d+)", float),
        (r"give a number of at most (\S+)", float),
    )
    return next(value(found[1]) for form, value in forms if (found := re.search(form, text)))


def refusal(config: dict[str, Any], changes: dict[str, Any]) -> str:
    """The message about a configuration; '' if it is built."""
    try:
        from_huggingface(config, **changes)
    except mtf.UserError as error:
        return str(error)
    return ""


def numbers_of(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The numbers in a configuration: the object, and the name there."""
    for at in (config, *(part for part in config.values() if isinstance(part, dict))):
        yield from ((at, n) for n, v in at.items() if isinstance(v, int | float) and not isinstance(v, bool))


@pytest.mark.parametrize("part", range(4))
@pytest.mark.one_in(4)
def test_odd_numbers_are_refused_in_the_name_of_the_file(part: int) -> None:
    """Not of layers or lines of this package, whatever the family."""
    for number, config in enumerate(case["config"] for case in LOSSES.values()):
        for place in range((part + number) % 4, len([*numbers_of(config)]), 4):
            other = copy.deepcopy(config)
            at, name = [*numbers_of(other)][place]
            at[name] = (None, 0, 7)[(number + place) % 3]
            said = refusal(other, {})
            assert not said or said.startswith("the configuration"), (config["model_type"], name, said)
    mixture = {**LOSSES["mixtral"]["config"], "num_experts_per_tok": 9}
    assert "num_experts_per_tok=9" in refusal(mixture, {})


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_every_remedy_leads_on(number: int) -> None:
    """To a model, or to another message, until one that says that the model cannot be built."""
    config, changes, heard = copy.deepcopy(REFUSED[number][0]), dict[str, Any](), set[str]()
    while (said := refusal(config, changes)) and not any(final in said for final in FINAL):
        assert said not in heard, "the advice leads to the same message"
        heard.add(said)
        followed(said, config, changes)


def written(folder: Path, config: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "config.json is not valid JSON: "),
        ("[1]", r"config.json is \[1\]; give a JSON object"),
        ('{"format": "layoutopt-plan/1"}', "is a layoutopt-plan/1 file, not a model"),
        ("[" * 100_000, "config.json is nested too deeply"),
        ('{"a": "\\ud800"}', "has no model_type"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(mtf.UserError, match=said):
        load_model(str(path))
    assert not is_configuration(str(path))


def test_other_names_of_files(tmp_path: Path) -> None:
    source = written(tmp_path, TINY)
    with pytest.raises(mtf.UserError, match=r"confg.json' does not exist; did you mean 'config.json'"):
        load_model(str(tmp_path / "confg.json"))
    with pytest.raises(mtf.UserError, match="has no function 'other' to build a model; "):
        load_model(f"{source}:other")
    with pytest.raises(
        mtf.UserError, match="has no hyperparameter 'num_layers'; use num_hidden_layers; known"
    ):
        load_model(source, ["num_layers=3"])
