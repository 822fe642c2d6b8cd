"""Every field of a configuration does here what it does in transformers, or is refused by name."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from transformers import CONFIG_MAPPING

import mesh_tf_core as mtf
from layoutopt.importers.huggingface import from_huggingface
from layoutopt.importers.huggingface.configuration import FORMS, chosen, class_defaults, headless
from layoutopt.importers.huggingface.fields import ConfiguredTraining
from layoutopt.models.loading import load_model

DATA = Path(__file__).parents[1] / "data"
OTHERS = ("bert", "vit", "siglip", "whisper", "modernbert", "mimo_v2_flash", "dbrx")
"""Other models, one whose files have the fields of its authors' code, and one that has them in parts."""
CASES = {
    name: case["config"]
    for name, case in json.loads((DATA / "huggingface_losses.json").read_text())["models"].items()
    if case["config"]["model_type"] not in OTHERS
}
"""Tiny language models."""
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(0, 32, (2, 12)))


def theirs(config: dict[str, Any]) -> tuple[int, float] | None:
    """Trained parameters, and the loss with weights that follow from their names; None: refused."""
    kept = {n: v for n, v in config.items() if n not in ("architectures", "dtype", "torch_dtype")}
    made = CONFIG_MAPPING[config["model_type"]]
    also = {*made().to_dict(), *made.attribute_map}
    for old, ours in class_defaults()["renamed"].get(config["model_type"], {}).items():
        kept |= {old: kept.pop(ours)} if ours in kept and old in also else {}
    try:
        found = transformers.AutoConfig.for_model(kept.pop("model_type"), **kept)
        found._attn_implementation = found._experts_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(found).eval()
        with torch.no_grad():
            for name, t in (*model.named_parameters(), *model.named_buffers()):
                # A mask in a buffer stays as it is.
                if "inv_freq" not in name and ".attn.bias" not in name and t.is_floating_point():
                    rng = np.random.default_rng(zlib.crc32(name.encode()))
                    # A large bias of a router would choose the same experts for all tokens.
                    scale = 0.02 if name.endswith(("correction_bias", "expert_bias")) else 0.5
                    t.copy_(torch.from_numpy(rng.normal(scale=scale, size=tuple(t.shape)).astype(np.float32)))
            loss = float(model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss)
    except Exception:
        return None
    return sum(p.numel() for p in model.parameters() if p.requires_grad), loss


def ours(config: dict[str, Any]) -> tuple[int, str] | None:
    """Trained parameters, and the program; None: refused."""
    try:
        model = from_huggingface(config, batch=2, length=12)
    except mtf.UserError:
        return None
    return model.parameters, model.fingerprint


def changed(value: Any) -> Any:
    """Another value of a field, of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * (1000 if 0 < value < 1e-2 else 2) or 1
    return {"silu": "gelu", "gelu": "silu"}.get(str(value))


def fields_of(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields that are read, or said to have no effect, with another value."""
    family = config["model_type"]
    sizes = class_defaults()["families"].get(family, {})
    fields = chosen(config, "the file").fields()
    FORMS[family][1].read(fields, ConfiguredTraining(batch=2, length=12))
    every = {*fields.asked, *sizes, *class_defaults()["without_effect"].get(family, ())}
    usual = {"mlp_bias", "attention_bias", "tie_word_embeddings", "head_dim", "num_key_value_heads"}
    for name in sorted((every | usual) - class_defaults()["renamed"].get(family, {}).keys()):
        found = config.get(name, fields.asked.get(name, sizes.get(name, False)))
        if name not in UNSEEN and (other := changed(found)) is not None:
            yield name, other


UNSEEN = ("vocab_size", "initializer_range", "attention_dropout", "max_position_embeddings", "dtype")
UNSEEN += ("use_expert_bias",)
"""Fields that a loss of the same tokens without dropout doesn't show; a bias that starts at 0 and no gradient
changes."""


def wrong(config: dict[str, Any], name: str, value: Any, base: Any) -> str:
    """How a field differs from transformers; '': it doesn't."""
    known, made = base
    also = class_defaults()["renamed"].get(config["model_type"], {})
    new = {n: v for n, v in config.items() if also.get(n) != name} | {name: value}
    if (here := ours(new)) is None or (there := theirs(new)) is None:
        return ""
    moved = there[0] != known[0] or abs(there[1] - known[1]) > 1e-6
    if here[0] - made[0] != there[0] - known[0]:
        return f"{name}={value}: {here[0] - made[0]:+} parameters, {there[0] - known[0]:+} in transformers"
    if moved != (here[1] != made[1]):
        return f"{name}={value}: {'without' if moved else 'with'} effect here alone"
    return ""


def faults(name: str) -> list[str]:
    config = CASES[name]
    base = theirs(config), ours(config)
    if None in base:
        return []
    return [said for field, value in fields_of(config) if (said := wrong(config, field, value, base))]


DECODERS = [n for n, c in CASES.items() if FORMS[c["model_type"]][0].endswith(("CausalLM", "LMHeadModel"))]


@pytest.mark.nightly
@pytest.mark.parametrize("name", DECODERS)
def test_every_field_does_what_it_does_in_transformers(name: str) -> None:
    assert not faults(name)


SWITCHES = ("attention_bias", "gating", "mlp_bias", "tie_word_embeddings")
"""Fields that give a model other parameters, or none of its own."""
TOLD = ("t5", "mt5", "umt5")
"""Families that transformers ties whatever the file says, as a remark tells."""


def trained(config: dict[str, Any]) -> int | None:
    """Trained parameters of the class of transformers; None: it refuses the fields, or there is none."""
    family = config["model_type"]
    try:
        with torch.device("meta"):
            made = getattr(transformers, FORMS[family][0])(CONFIG_MAPPING[family](**config))
    except Exception:
        return None
    return sum(p.numel() for p in made.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", [n for n in FORMS if n in CONFIG_MAPPING and n not in TOLD])
@pytest.mark.one_in(18)
def test_switches_are_read_as_in_transformers_or_refused(family: str) -> None:
    """Of the classes' defaults, with two layers where they allow it."""
    said = CONFIG_MAPPING[family]().to_dict()
    for config in ({"model_type": family, "num_hidden_layers": 2}, {"model_type": family}):
        if None not in (base := (ours(config), trained(config))):
            break
    else:
        return
    for name in SWITCHES[:-1] if FORMS[family][0].endswith("TextModel") else SWITCHES:  # without a head
        new = {**config, name: not said.get(name)}
        if name in said and (here := ours(new)) is not None and (there := trained(new)) is not None:
            assert here[0] - base[0][0] == there - base[1], name


ALSO_CALLED = [
    (name, other, known)
    for name, config in CASES.items()
    for pair in CONFIG_MAPPING[config["model_type"]].attribute_map.items()
    for other, known in (pair, pair[::-1])
    if known in config
]
"""Case, another name that transformers has for a field, and its name there."""


@pytest.mark.parametrize(("name", "other", "known"), ALSO_CALLED)
@pytest.mark.one_in(10)
def test_fields_have_the_other_names_of_transformers(name: str, other: str, known: str) -> None:
    config = CASES[name]
    renamed = {n: v for n, v in config.items() if n not in (other, known)} | {other: config[known]}
    assert ours(renamed) == ours(config)


@pytest.mark.parametrize("family", ["vit", "dinov2"])
def test_classes_are_those_that_the_file_names(family: str) -> None:
    """Published files name classes by `id2label` and omit `num_labels`."""
    for count in (1, 10):
        labels = {str(i): f"kind {i}" for i in range(count)}
        model = from_huggingface({"model_type": family, "id2label": labels})
        assert model.graph.dims()["classes"] == {count}


WRITTEN = [n for n in FORMS if n in CONFIG_MAPPING]
UNSAID = ("deepseek_v2", "dots1", "glm4v_moe_text", "qwen3_omni_moe_text")
"""Families whose classes have defaults of which transformers builds no model, or another one."""


@pytest.mark.parametrize("family", [n for n in WRITTEN if n not in UNSAID])
@pytest.mark.one_in(18)
def test_files_that_transformers_writes_are_built(family: str) -> None:
    """All fields of a class, or those that differ from its defaults; for the class without a head too."""
    made = CONFIG_MAPPING[family]()
    wanted = FORMS[family][0]
    for found in (made.to_dict(), made.to_diff_dict()):
        fields = {**json.loads(json.dumps(found)), "model_type": family, "_a_private_name": 3}
        model = from_huggingface({**fields, "architectures": [wanted]}, batch=1, length=16)
        base = from_huggingface({**fields, "architectures": [headless(wanted)]}, batch=1, length=16)
        assert model.fingerprint == base.fingerprint
        assert any("has no loss" in remark for remark in base.remarks) == (headless(wanted) != wanted)


@pytest.mark.parametrize("family", [n for n in class_defaults()["renamed"] if n in CASES])
@pytest.mark.one_in(8)
def test_hyperparameters_have_the_names_of_the_file_too(family: str, tmp_path: Path) -> None:
    known = from_huggingface(CASES[family], length=12).hparams
    names = {
        old: new
        for old, new in class_defaults()["renamed"][family].items()
        if isinstance(CASES[family].get(old), int) and new in known
    }
    (tmp_path / "config.json").write_text(json.dumps(CASES[family]), encoding="utf-8")

    def built(*settings: str) -> str:
        try:
            return load_model(str(tmp_path / "config.json"), ["length=12", *settings]).model.fingerprint
        except mtf.UserError as error:
            return str(error).partition(": ")[2]

    plain = built()
    for old, new in names.items():
        value = 2 * CASES[family][old]
        assert plain != built(f"{old}={value}") == built(f"{new}={value}")
        with suppress(mtf.UserError):
            one, two = (from_huggingface(CASES[family], **{n: value}) for n in (old, new))
            assert one.hparams == two.hparams and one.hparams[new] == value


def test_what_a_file_says_of_single_layers_is_what_it_says_of_their_kind() -> None:
    config = CONFIG_MAPPING["gemma4_text"](num_hidden_layers=6).to_dict()
    (number,) = (n for n in config["per_layer_config"])
    for said in ({number: {"head_dim": 8}}, {"99": {"head_dim": 512}}, {number: 512}, [512]):
        with pytest.raises(mtf.UserError, match=r"per_layer_config is .*; give each layer what"):
            from_huggingface({**config, "per_layer_config": said})
