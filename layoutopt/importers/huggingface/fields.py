"""The fields of a configuration file: read by type, and none passed over in silence."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mesh_tf_core import model
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.layers.moe import GATED
from mesh_tf_core.reading import read_json, reading

LARGEST_FILE = 4_000_000
"""Bytes: published configurations have a few thousand."""
LARGEST_NUMBER = 1e38
"""The largest number of a field; float32 holds it."""
NOTHING: Mapping[str, int] = {}
LARGEST, MOST_LAYERS = 2**40, 10_000
"""The largest whole number, and the largest number of layers: a larger one is taken for a typing error."""


WRITTEN: Mapping[str, Sequence[str]] = {"gates": GATED, "norms": ("library", "steps")}
WRITTEN = {**WRITTEN, "scans": ("steps", "kernel"), "router": ("model", "float32")}
"""Hyperparameters of how frameworks write parts of models -> their values."""


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:60]


class Fields:
    """The fields of a configuration.

    Attributes:
      source: the file, for errors.
      sizes: of the family's class, for fields that a file omits.
      known: those that its class reads; others are as if missing, and errors if they say anything, except the
        `idle`, which change nothing. Empty: all.
      asked: names of the fields that were read, and their values; counted: those that are sizes.
      parts: fields inside fields, by name. names: that some are read by -> their own.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        sizes: Mapping[str, int] = NOTHING,
        known: Collection[str] = (),
        idle: Collection[str] = (),
    ) -> None:
        self.source, self.sizes, self.known, self.idle = source, sizes, known, idle
        self.values = {n: v for n, v in values.items() if not known or n in known}
        self.others = {n: v for n, v in values.items() if n not in self.values and n not in idle}
        self.names: Mapping[str, str] = {}
        self.asked: dict[str, Any] = {}
        self.counted: set[str] = set()
        self.parts: dict[str, Fields] = {}

    def wrong(self, name: str, what: str) -> UserError:
        """The error for an unsupported value of a field."""
        found = self.values.get(name := self._own(name), self.sizes.get(name))
        return UserError(f"{self.source}: {name} is {_shown(found)}; {what}")

    def under(self, names: Mapping[str, str]) -> Fields:
        """The same fields, some read by other names (the keys) than they have."""
        other = copy(self)
        other.names = names
        return other

    def of_kind(self, by_layer: Mapping[str, str], kinds: Sequence[str], kind: str) -> Fields:
        """The fields of the layers of a kind: of `by_layer`, field with a value for each layer -> what it is
        for that layer."""
        other = copy(self)
        for name, own in by_layer.items():
            listed = each if isinstance(each := self.raw(name), list) else []
            found = [v for v, k in zip(listed, kinds, strict=False) if k == kind]
            if any(value != found[0] for value in found):
                raise self.wrong(name, "give all layers of a kind the same value")
            other.values = {**other.values, own: found[0]} if found else other.values
        return other

    def _own(self, name: str) -> str:
        """The name that a field has."""
        own = self.names.get(name, name)
        return own if own in self.values or own in self.sizes else name

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors of layers are of this file, with the fields that have the numbers of their text."""
        try:
            yield
        except UserError as error:
            if (said := str(error)).startswith(self.source):
                raise
            numbers = {n for n in re.findall(r"(?<![\w.])\d+", said) if n not in "01"}
            found = [f"{n}={v}" for n, v in self.asked.items() if str(v) in numbers]
            of = f" (of {', '.join(found)})" if found else ""
            raise UserError(f"{self.source}: {said}{of}") from None

    def raw(self, name: str, default: Any = None) -> Any:
        """The field unchanged; a missing one is its class's; null counts as missing."""
        if not name:
            return default
        found = self.values.get(name := self._own(name), self.sizes.get(name))
        found = default if found is None else found
        self.asked[name] = found
        return found

    def skip(self, *names: str) -> None:
        """Takes note of fields that change nothing here."""
        for name in names:
            self.raw(name)

    def has(self, name: str) -> bool:
        """True if there is such a field that is not null, in the file or else in its class."""
        return self.values.get(name := self._own(name), self.sizes.get(name)) is not None

    def first(self, *names: str) -> str:
        """The name of the first field that the file has, or else its class; else the first name."""
        told = next((n for n in names if self.values.get(n) is not None), None)
        return told or next((n for n in names if self.has(n)), names[0])

    def factor(self, name: str | float) -> float:
        """A factor, from the field of this name; a number is one, and so is a missing field."""
        return name if isinstance(name, float) else self.number(name, 1.0) if name else 1.0

    def count(
        self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST, layers: int = 0
    ) -> int:
        """A whole number from `least` to `most`; without a default it must be there. The same one for each of
        so many layers is one."""
        if default is None and not self.has(name):
            raise UserError(f"{self.source} has no field {name!r}; add the field with a whole number")
        self.counted.add(self._own(name))
        found = self.raw(name, default)
        if isinstance(found, list) and layers == found.count(found[0] if found else None) == len(found) > 0:
            found = found[0]
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

    def positive(self, name: str, default: float | None = None, above: float = 0.0) -> float:
        """A number above `above`; without a default it must be there."""
        if default is None and not self.has(name):
            raise UserError(f"{self.source} has no field {name!r}; add the field with a number")
        if (found := self.number(name, default or 0.0)) <= above:
            raise self.wrong(name, f"give a number above {above:g}")
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        found = self.raw(name, default)
        if not isinstance(found, bool):
            raise self.wrong(name, "give true or false")
        return found

    def either(self, said: bool | str, default: bool = False) -> bool:
        """True or false, or what the field of this name says."""
        return self.flag(said, default) if isinstance(said, str) else said

    def text(self, name: str, default: str, known: Mapping[str, Any] | Sequence[str]) -> str:
        """One of the texts that are known."""
        found = self.raw(name, default)
        if not isinstance(found, str) or found not in known:
            raise self.wrong(name, known_names(str(found)[:60], known))
        return str(found)

    def only(self, name: str, *known: Any) -> None:
        """UserError unless the field is missing or has a value that the model is built for."""
        if name in self.others:
            self.values[name] = self.others.pop(name)
        if self.raw(name, known[0]) not in known:
            said = " or ".join(dict.fromkeys(map(json.dumps, known)))
            raise self.wrong(
                name,
                f"only {said} is supported; to use another value, write the model with mesh_tf_core.layers",
            )

    @property
    def omitted(self) -> tuple[str, ...]:
        """A sentence about what the file leaves to its class, if it does."""
        sizes = {n: v for n, v in self.sizes.items() if n in self.counted and n not in self.values}
        told, library = ", ".join(f"{n} {v:,}" for n, v in sizes.items()), class_defaults()["library"]
        said = f"the file omits {told}: the defaults of {self.sizes.get('class')} ({library})"
        return (said,) if sizes else ()

    def part(self, name: str, values: Any, sizes: Mapping[str, int] = NOTHING) -> Fields:
        """The fields inside a field; `sizes`: of its class."""
        if not isinstance(values, Mapping):
            raise UserError(f"{self.source}: {name} is {_shown(values)}; give an object")
        return self.parts.setdefault(name, Fields(values, f"{self.source}: {name}", sizes, idle=self.idle))

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """UserError for fields that no reader used, here or inside others, unless they are off or empty."""
        read, every = {*self.asked, *self.idle} - self.others.keys(), {**self.values, **self.others}
        left = [
            n
            for n, v in every.items()
            if v and n not in read and n[:1] != "_" and not n.endswith("_token_id")
        ]
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


@cache
def class_defaults() -> dict[str, Any]:
    """Sizes that the classes of transformers have where a file omits them, by family, with their source."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "defaults.json").read_text(encoding="utf-8"))
    return found


def read(path: Path, shown: str) -> dict[str, Any]:
    """The object in a configuration file.

    Args:
      shown: the file's name in errors.
    """
    with reading(shown):
        found = read_json(path, LARGEST_FILE)
    if not isinstance(found, dict):
        raise UserError(f"{shown} is {_shown(found)}; give a JSON object with the model's fields")
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


@dataclass(frozen=True)
class ConfiguredTraining(model.Training):
    """Hyperparameters of training.

    Attributes:
      batch: the number of sequences (images) per step.
      length: the number of tokens per sequence.
      attention: "fused" (one operation that never stores all logits) or "plain" (separate operations).
      capacity_factor: 0: the experts drop no tokens, as in Hugging Face's own code; otherwise their capacity,
        relative to an even distribution of tokens.
      imbalance: tokens of the device with most of them over the mean, where devices share the experts; time
        and memory are predicted with it.
      balance: the weight of the experts' load-balance loss (Fedus et al. 2022, equation 4).
      mtp: the number of layers that predict further tokens (multi-token prediction), with `mtp_weight` times
        their mean loss.
      ignore: names of fields of the configuration to ignore, separated by commas.
      gates: where gates of experts multiply, of `MixtureOfExperts`; norms: "steps" (`forms.Norm`) or
        "library"; scans: of states, in "steps" or by a "kernel" (`layers.recurrent`); router: its
        products are in the "model"'s type or in "float32"; "": as the framework's modules do, else "hidden",
        "library", "steps" and as the family's.
    """

    learning_rate: float = 1e-4
    batch: int = 8
    length: int = 2048
    attention: str = "fused"
    capacity_factor: float = 0.0
    imbalance: float = 1.0
    balance: float = 0.0
    mtp: int = 0
    mtp_weight: float = 0.3
    ignore: str = ""
    gates: str = ""
    norms: str = ""
    scans: str = ""
    router: str = ""

    def __post_init__(self) -> None:
        for name in ("batch", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")
        for name, known in WRITTEN.items():
            if (value := getattr(self, name)) not in ("", *known):
                raise UserError(f"{name}={value!r} is unknown; {known_names(value, known)}")
        if not 0 <= self.mtp <= 16:
            raise UserError(f"mtp is {self.mtp}; give the number of further tokens to predict, at most 16")
