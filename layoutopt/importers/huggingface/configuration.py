"""From a configuration file to a model function, as a model file has one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from dataclasses import fields as fields_of
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from layoutopt.importers.huggingface import encoders, families
from layoutopt.importers.huggingface.decoder import LanguageModel
from layoutopt.importers.huggingface.fields import Fields, read
from layoutopt.importers.huggingface.training import ConfiguredTraining
from layoutopt.importers.huggingface.weights import decoder_names, encoder_names
from layoutopt.plan.units import plural
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.graph import graph_of
from mesh_tf_core.training.weights import Source

ReadConfiguration = Callable[[Fields, ConfiguredTraining], LanguageModel | Model]
FAMILIES: dict[str, tuple[str, ReadConfiguration]] = {
    "bert": ("BertForMaskedLM", encoders.bert),
    "deepseek_v2": ("DeepseekV2ForCausalLM", families.deepseek_v2),
    "deepseek_v3": ("DeepseekV3ForCausalLM", families.deepseek_v3),
    "gemma": ("GemmaForCausalLM", families.gemma),
    "gemma2": ("Gemma2ForCausalLM", families.gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", families.gemma3),
    "llama": ("LlamaForCausalLM", families.llama),
    "mistral": ("MistralForCausalLM", families.mistral),
    "mixtral": ("MixtralForCausalLM", families.mixtral),
    "qwen2": ("Qwen2ForCausalLM", families.qwen2),
    "qwen3": ("Qwen3ForCausalLM", families.qwen3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", families.qwen3_moe),
    "vit": ("ViTForImageClassification", encoders.vit),
}
"""model_type -> the architecture and its reader."""
LENGTH = 2048
"""Default number of tokens of a text; fewer if the model has fewer positions."""
OURS = "layoutopt's choice"
"""Why a hyperparameter has its value, where a configuration has none."""
_COUNTS = {"tokens": "vocab", "targets": "vocab", "segments": "segment_kinds", "label": "classes"}
"""Input -> the dimension whose elements it names."""
_OWN_DTYPES = ("float32", "bfloat16", "float16")


def from_huggingface(config: str | Path | Mapping[str, Any], **changes: Any) -> Model:
    """Builds the model that a Hugging Face configuration describes.

    Args:
      config: the path of a config.json, or its parsed content.
      changes: hyperparameters of training (`ConfiguredTraining`), such as `batch=8`, and new values for
        fields of the configuration.

    Raises:
      UserError: the architecture or a field is not supported, or a hyperparameter is unknown.

    Example:
      >>> import layoutopt
      >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
      >>> config = {"model_type": "llama", "vocab_size": 256, "num_hidden_layers": 2, **sizes}
      >>> layoutopt.from_huggingface({**config, "max_position_embeddings": 128}, batch=8).parameters
      115008
    """
    values, source = _read(config)
    known = _hyperparameters(values, source)
    for name in changes:
        if name not in known:
            raise UserError(f"{source} has no hyperparameter {name!r}; {known_names(name, known)}")
    given = {**known, **changes}
    model = _built(values, source, given)
    model.hparams = given
    model.assumed = {n: OURS if n in ("batch", "length") else "" for n in known if n not in changes}
    return model


def names_of(config: str | Path | Mapping[str, Any], **changes: Any) -> dict[str, Source]:
    """The locations in a Hugging Face checkpoint of the weights of `from_huggingface(config, **changes)`: the
    argument `names` of `Trainer.load(folder, names)`.

    Raises:
      UserError: the checkpoints of the family are not supported.
    """
    model = from_huggingface(config, **changes)
    values, source = _read(config)
    variables = {n: v for n, v in graph_of(model.loss).variables.items() if v.trainable}
    fields = Fields({**values, **model.hparams}, source)
    name, reads = _family(fields)
    made = reads(fields, ConfiguredTraining(batch=1, length=1))
    if isinstance(made, LanguageModel) and made.latent:
        raise UserError(
            f"{source}: checkpoints of model_type {name!r} combine arrays that are separate variables in "
            "layoutopt, so their weights cannot be mapped; split the arrays and load them by the names "
            "of the variables"
        )
    if not isinstance(made, LanguageModel):
        return dict(encoder_names(name, variables))
    return dict(decoder_names(made, name, model.hparams["length"], variables))


def module_of(path: Path, shown: str) -> ModuleType:
    """A module with the functions `model` and `data` of a configuration, as a model file would have them.

    Args:
      shown: the file's name in errors.
    """
    values = read(path, shown)
    known = _hyperparameters(values, shown)

    def model(**hparams: Any) -> Model:
        return _built(values, shown, hparams)

    parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=v) for n, v in known.items()]
    model.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def data(split: str = "train", **hparams: Any) -> Iterator[dict[str, np.ndarray]]:
        return _random(_built(values, shown, hparams), split)

    def assumed(devices: int | None) -> dict[str, tuple[Any, str]]:
        """What no configuration says: hyperparameter -> its value on so many devices, and why."""
        ways = max(1, devices or 1)
        batch = -(-known["batch"] // ways) * ways
        each = f"{plural(batch // ways, 'example')} per device" if devices else OURS
        return {"batch": (batch, each), "length": (known["length"], OURS)}

    made = ModuleType("configuration", f"The model of {shown}.")
    made.model, made.data, made.assumed = model, data, assumed  # type: ignore[attr-defined]
    return made


def _read(config: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What is in a configuration, and its name in errors."""
    if isinstance(config, Mapping):
        return dict(config), "the configuration"
    return read(Path(config).expanduser(), str(config)), str(config)


def _hyperparameters(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What may be set: of training, and the plain fields of the configuration that its family reads."""
    fields = Fields(values, source)
    _, reads = _family(fields)
    own = asdict(ConfiguredTraining(length=_length(fields), dtype=_dtype(fields)))
    reads(fields, ConfiguredTraining(batch=1, length=1))
    plain = {n: v for n, v in fields.asked.items() if isinstance(v, bool | int | float | str) and n in values}
    return {**own, **{n: v for n, v in plain.items() if n not in own}}


def _built(values: Mapping[str, Any], source: str, hparams: Mapping[str, Any]) -> Model:
    """The model of a configuration with changed values."""
    names = {f.name for f in fields_of(ConfiguredTraining)}
    own = {n: v for n, v in hparams.items() if n in names}
    training = ConfiguredTraining(**own)
    fields = Fields({**values, **{n: v for n, v in hparams.items() if n not in names}}, source)
    name, reads = _family(fields)
    made = reads(fields, training)
    for other in ("torch_dtype", "dtype"):
        fields.raw(other)
    fields.finish(training.ignore.replace(" ", "").split(","))
    return made.model(name, training) if isinstance(made, LanguageModel) else made


def _family(fields: Fields) -> tuple[str, ReadConfiguration]:
    """The family's name, and what reads its configurations; UserError for another architecture."""
    name, classes = fields.values.get("model_type"), fields.values.get("architectures") or []
    parts = [p for p in ("text_config", "vision_config", "audio_config") if p in fields.values]
    if parts and name not in FAMILIES:
        raise UserError(
            f"{fields.source}: model_type {name!r} combines several models; save the configuration of one "
            f"model ({', '.join(parts)}) as a file of its own and give that file"
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(
            f"{fields.source}: model_type {str(name)[:60]!r} is not supported; "
            f"{known_names(str(name)[:60], FAMILIES)}; write this model with mesh_tf_core.layers "
            "(layoutopt init), or import it from JAX"
        )
    wanted, reads = FAMILIES[name]
    if not isinstance(classes, list) or (classes and wanted not in classes):
        raise UserError(
            f"{fields.source}: architectures is {str(classes)[:100]}, but for model_type {name!r} "
            f'layoutopt builds only {wanted}; to plan {wanted}, write "architectures": ["{wanted}"]'
        )
    return name, reads


def _length(fields: Fields) -> int:
    longest = fields.values.get("max_position_embeddings")
    return min(LENGTH, longest) if isinstance(longest, int) and longest > 0 else LENGTH


def _dtype(fields: Fields) -> str:
    said = fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"
    if said not in _OWN_DTYPES:
        raise UserError(
            f"{fields.source}: torch_dtype {str(said)[:60]!r}; {known_names(str(said)[:60], _OWN_DTYPES)}"
        )
    return str(said)


def _random(model: Model, split: str) -> Iterator[dict[str, np.ndarray]]:
    """Random numbers for every input: enough for times and memory, and for a loss that is a number; nothing
    is learned from them."""
    rng, inputs, dims = np.random.default_rng(len(split)), model.graph.inputs, model.graph.dims()
    while True:
        yield {
            name: rng.integers(0, min(dims[_COUNTS[name]]), t.shape.sizes).astype(np.int32)
            if name in _COUNTS
            else rng.normal(size=t.shape.sizes).astype(np.float32)
            for name, t in inputs.items()
        }
