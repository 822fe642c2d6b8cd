"""The fields of a configuration file: read by type, and none passed over in silence."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.reading import read_json, reading

LARGEST_FILE = 4_000_000
"""Bytes: published configurations have a few thousand."""
LARGEST_NUMBER = 1e38
"""The largest number of a field; float32 holds it."""
NOTHING: Mapping[str, int] = {}
LARGEST, MOST_LAYERS = 2**40, 10_000
"""The largest whole number, and the largest number of layers: a larger one is taken for a typing error."""
# fmt: off
WITHOUT_EFFECT = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "auto_map",
    "begin_suppress_tokens", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "decoder_start_token_id", "early_stopping", "eoi_token_index", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "id2label", "is_llama_config", "label2id", "length_penalty", "max_length",
    "max_position_embeddings", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "quantization_config",
    "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tokenizer_class", "top_k", "top_p", "transformers_version", "typical_p", "use_cache",
))
# fmt: on
"""Fields of every configuration that change nothing of a training step, whose weights are not quantised."""


class Fields:
    """The fields of a configuration.

    Attributes:
      source: the file, for errors.
      sizes: of the family's class, for fields that a file omits.
      asked: names of the fields that were read, and their values; counted: those that are sizes.
      parts: fields inside fields, by name.
    """

    def __init__(self, values: Mapping[str, Any], source: str, sizes: Mapping[str, int] = NOTHING) -> None:
        self.values, self.source, self.sizes = dict(values), source, sizes
        self.asked: dict[str, Any] = {}
        self.counted: set[str] = set()
        self.parts: dict[str, Fields] = {}

    def wrong(self, name: str, what: str) -> UserError:
        """The error for an unsupported value of a field."""
        found = self.values.get(name, self.sizes.get(name))
        return UserError(f"{self.source}: {name} is {str(found)[:60]!r}; {what}")

    def raw(self, name: str, default: Any = None) -> Any:
        """The field unchanged; a missing one is its class's; null counts as missing."""
        found = self.values.get(name, self.sizes.get(name))
        found = default if found is None else found
        self.asked[name] = found
        return found

    def has(self, name: str) -> bool:
        """True if there is such a field that is not null, in the file or else in its class."""
        return self.values.get(name, self.sizes.get(name)) is not None

    def first(self, *names: str) -> str:
        """The name of the first field that the file has, or else its class; else the first name."""
        told = next((n for n in names if self.values.get(n) is not None), None)
        return told or next((n for n in names if self.has(n)), names[0])

    def factor(self, name: str | float) -> float:
        """A factor, from the field of this name; a number is one, and so is a missing field."""
        return name if isinstance(name, float) else self.number(name, 1.0) if name else 1.0

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """A whole number from `least` to `most`; without a default it must be there."""
        if default is None and not self.has(name):
            raise UserError(f"{self.source} has no field {name!r}; add the field with a whole number")
        self.counted.add(name)
        found = self.raw(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise self.wrong(name, f"give a whole number of at least {least}")
        if found > most:
            raise self.wrong(name, f"give a whole number of at most {most:,}")
        return found

    def layers(self) -> int:
        """The number of layers."""
        return self.count("num_hidden_layers", most=MOST_LAYERS)

    def listed(self, name: str) -> list[Any]:
        """A list; a missing one is empty."""
        found = self.raw(name, [])
        if not isinstance(found, list):
            raise self.wrong(name, "give a list")
        return found

    def number(self, name: str, default: float = 0.0) -> float:
        """A number from 0 to LARGEST_NUMBER."""
        found = self.raw(name, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or not found >= 0:
            raise self.wrong(name, "give a number of at least 0")
        if found > LARGEST_NUMBER:
            raise self.wrong(name, f"give a number of at most {LARGEST_NUMBER:g}")
        return float(found)

    def positive(self, name: str, default: float) -> float:
        """A number above 0."""
        if not (found := self.number(name, default)):
            raise self.wrong(name, "give a number above 0")
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        found = self.raw(name, default)
        if not isinstance(found, bool):
            raise self.wrong(name, "give true or false")
        return found

    def text(self, name: str, default: str, known: Mapping[str, Any] | Sequence[str]) -> str:
        """One of the texts that are known."""
        found = self.raw(name, default)
        if not isinstance(found, str) or found not in known:
            raise self.wrong(name, known_names(str(found)[:60], known))
        return str(found)

    def only(self, name: str, *known: Any) -> None:
        """UserError unless the field is missing or has a value that the model is built for."""
        if self.raw(name, known[0]) not in known:
            said = " or ".join(json.dumps(k) for k in known)
            raise self.wrong(
                name,
                f"only {said} is supported; to use another value, write the model with mesh_tf_core.layers",
            )

    def part(self, name: str, values: Mapping[str, Any]) -> Fields:
        """The fields inside a field."""
        return self.parts.setdefault(name, Fields(values, f"{self.source}: {name}"))

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """UserError for fields that no reader used, here or inside others, unless they are off (null, false,
        0 or empty)."""
        read = self.asked.keys() | WITHOUT_EFFECT
        left = [n for n, v in self.values.items() if v and n not in read and not n.endswith("_token_id")]
        strange = [n for n in left if n not in ignored]
        if strange:
            kind = self.values.get("model_type")
            of = f" for model_type {kind!r}" if kind else ""
            raise UserError(
                f"{self.source}: unknown fields{of}: {', '.join(strange[:5])}; if they do not affect the "
                f"training step, add --set ignore={','.join([*filter(None, ignored), *strange])}"
            )
        for part in self.parts.values():
            part.finish(ignored)


def read(path: Path, shown: str) -> dict[str, Any]:
    """The object in a configuration file.

    Args:
      shown: the file's name in errors.
    """
    with reading(shown):
        found = read_json(path, LARGEST_FILE)
    if not isinstance(found, dict):
        raise UserError(
            f"{shown} is a JSON {type(found).__name__}, not an object; give a JSON object with the "
            "model's fields"
        )
    if str(found.get("format", "")).startswith("layoutopt-"):
        do = "give a model file (.py) or a Hugging Face config.json"
        if str(found["format"]).startswith("layoutopt-plan/"):
            do = "give the MODEL of the plan, and pass the plan with --layout"
        raise UserError(f"{shown} is a {found['format']} file, not a model; {do}")
    return found


def is_configuration(source: str) -> bool:
    """True if a file is the configuration of a model, and not a plan or anything else."""
    path = Path(os.path.expanduser(source))
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        return "model_type" in read(path, source)
    except UserError:
        return False
