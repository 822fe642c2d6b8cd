"""A framework as a record: what its software changes in the description of a chip; reads those of the package
and the user's own.

A chip's file is physics. The compiler profile, the share of its peaks that whole steps keep, overlap,
launches and the memory that a process takes beside the step are the software's. A framework's file holds them
as *overlays*: parts of a hardware file, which replace the chip's, as those of a file that is `like` another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from costmodels.presets import hardware_names
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.faults import at_path
from mesh_tf_core.reading import json_value, read_text, reading

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
ChipKind = Literal["gpu", "tpu", "trainium", "cpu"]
KINDS: tuple[str, ...] = get_args(ChipKind)
"""The kinds of chips."""
VERSION = "version"
"""The variant that `NAME@VERSION` chooses."""
PLAIN = ("1", "count")
"""Units that are not printed."""


@dataclass(frozen=True)
class OverlaidNumber:
    """A number, or a name, that an overlay sets: its path in a hardware file, and its source.

    Attributes:
      option: the variant and its option, as `attention=fa2`; '' for the framework itself.
      chip: a chip, or a kind of chips.
    """

    option: str
    chip: str
    path: str
    value: str
    source: str = ""
    date: str = ""
    uncertainty: float | None = None


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Programs(_Record):
    """The programs that a framework runs.

    Attributes:
      libraries: it runs programs that users write with these (`layoutopt.front_ends`).
      families: of its own models, as the `model_type` of a config.json; None: it has none.
      dtype: in which it multiplies unless it is told otherwise, and its setting; "": the program's.
    """

    libraries: tuple[Text, ...] = ()
    families: tuple[Text, ...] | None = None
    dtype: str = ""
    setting: str = ""
    source: str = ""
    date: str = ""


class ModelChoice(_Record):
    """How a framework writes a part of the models that it builds from a configuration."""

    value: Text
    source: Text
    date: Text


class Overlay(_Record):
    """Parts of hardware files that a framework, or one of its options, changes.

    Attributes:
      summary: in words, for who must choose.
      runs: its programs, if they are not those of the framework; of a framework, None: any.
      builds: hyperparameter of a configuration's model (`ConfiguredTraining`) -> its value where the user
        gave none.
      kinds: kind of chip -> parts of the files of all chips of that kind.
      on: preset -> parts of its file, also for files that are `like` it. They replace those of its kind.
      only: the presets that have it; empty: all.
    """

    summary: Text
    runs: Programs | None = None
    builds: Mapping[str, ModelChoice] = {}
    kinds: Mapping[ChipKind, dict[str, Any]] = {}
    on: Mapping[str, dict[str, Any]] = {}
    only: tuple[str, ...] = ()

    @field_validator("on", "only")
    @classmethod
    def _presets(cls, on: Any) -> Any:
        for chip in on:
            if chip not in (known := hardware_names()):
                raise ValueError(f"{chip!r} is no hardware preset; {known_names(chip, known)}")
        return on

    def has(self, chip: str) -> bool:
        """True if a chip has it, or is no preset."""
        return not self.only or chip in self.only or chip not in hardware_names()

    def parts(self, kind: str, chips: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The parts of a kind, then of `chips`: of the one that the last is `like`, and of the last."""
        named: dict[Any, Any] = {**self.kinds, **self.on}
        return ((name, named[name]) for name in (kind, *chips) if named.get(name) is not None)


class Variant(_Record):
    """One choice of a framework's user, such as the attention kernel; `default` is one of its options."""

    summary: Text
    default: Text
    options: Mapping[str, Overlay]

    @model_validator(mode="after")
    def _known(self) -> Variant:
        if self.default not in self.options:
            raise ValueError(
                f"the default {self.default!r} is not among the options: {', '.join(self.options)}"
            )
        return self


class LearnedError(_Record):
    """The errors of measured runs, each predicted by a fit without it, as shares."""

    rows: int
    mean: float
    worst: float


class Padding(_Record):
    """A dimension of a framework's own models is as long as a multiple."""

    multiple: int
    source: Text
    date: Text


class Framework(Overlay):
    """Training software, with its variants chosen.

    Attributes:
      kinds: as in `Overlay`; it runs on these kinds of chips.
      says: the framework whose layouts it can express: for a file that is `like` another, that one's.
      variants: name -> its options.
      pads: dimension of weights -> its padding.
      errors: chip, and kind of run (`layoutopt.plan.known.kind_words`) -> those of the user's own runs, to
        which its numbers were fitted.
      chosen: variant -> option, where the user said one.
      file: the whole path, if it is a user's own.
    """

    format: Literal["layoutopt-framework/1"]
    name: Text
    says: Text
    variants: Mapping[str, Variant] = {}
    pads: Mapping[str, Padding] = {}
    errors: Mapping[str, Mapping[str, LearnedError]] = {}
    notes: tuple[Text, ...] = ()
    chosen: Mapping[str, str] = Field(default={}, exclude=True)
    file: str = Field(default="", exclude=True)

    @property
    def text(self) -> str:
        """How a user names it: `load_framework` returns the same framework for this text."""
        said = dict(self.chosen)
        version = f"@{said.pop(VERSION)}" if VERSION in said else ""
        options = ",".join(f"{name}={option}" for name, option in said.items())
        return f"{self.file or self.name}{version}{':' * bool(options)}{options}"

    @property
    def as_learned(self) -> bool:
        """No option was chosen that replaces what `errors` were found with."""
        return all(self.variants[name].default == option for name, option in self.chosen.items())

    def options(self) -> dict[str, str]:
        """Every variant with its option."""
        return {name: self.chosen.get(name, each.default) for name, each in self.variants.items()}

    def numbers(self) -> Iterator[OverlaidNumber]:
        """Everything that the framework and every option of each variant set."""
        options = [(f"{name}={o}", its) for name, v in self.variants.items() for o, its in v.options.items()]
        for option, overlay in [("", self), *options]:
            for chip, part in (*overlay.kinds.items(), *overlay.on.items()):
                yield from (number for _, number in _said(option, chip, part) if number is not None)

    def taken(self, kind: str, chips: Sequence[str]) -> list[OverlaidNumber]:
        """The numbers of a chip under the framework and its options; arguments as of `Overlay.parts`."""
        found: dict[str, OverlaidNumber] = {}
        options = ("", *(f"{name}={option}" for name, option in self.options().items()))
        for option, overlay in zip(options, self.overlays(), strict=True):
            for chip, part in overlay.parts(kind, chips):
                for path, number in _said(option, chip, part):
                    found = {p: n for p, n in found.items() if not f"{p}.".startswith(f"{path}.")}
                    found |= {} if number is None else {path: number}
        return [*found.values()]

    def lacking(self, chip: str) -> str:
        """Why a chip cannot have what was chosen; "" if it can."""
        for name, option in self.chosen.items():
            options = self.variants[name].options
            if not options[option].has(chip):
                others = ", ".join(f"{name}={each}" for each, its in options.items() if its.has(chip))
                only = ", ".join(options[option].only)
                return f"{self.text!r}: {name}={option} is of {only}, not of {chip}; choose one of {others}"
        return ""

    @property
    def programs(self) -> Programs | None:
        """The programs that it runs with what was chosen; None: any."""
        return [each.runs for each in self.overlays() if each.runs is not None or each is self][-1]

    def choices(self) -> dict[str, ModelChoice]:
        """`builds` of the framework and its options."""
        return {name: choice for each in self.overlays() for name, choice in each.builds.items()}

    def overlays(self) -> Iterator[Overlay]:
        """The framework itself, then the option of each variant."""
        yield self
        for name, option in self.options().items():
            yield self.variants[name].options[option]


def _said(option: str, chip: str, part: Any) -> Iterator[tuple[str, OverlaidNumber | None]]:
    """The numbers of a part by their paths; None: what the chip has there is removed."""
    for path, found in _leaves(part, ""):
        said: Mapping[str, Any] = found if isinstance(found, Mapping) else {"value": found}
        unit = said.get("unit", "1")
        value = "curve" if "points" in said else f"{said['value']}{f' {unit}' * (unit not in PLAIN)}"
        sourced = {k: said[k] for k in ("source", "date", "uncertainty") if k in said}
        yield path, None if found is None else OverlaidNumber(option, chip, path, value, **sourced)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The numbers, curves, plain values and removals of a part of a hardware file, each with its path."""
    if isinstance(value, Mapping) and not {"value", "points"} & value.keys():
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value


_DATA = Path(__file__).parent / "data"
DEFAULT = "layoutopt"
"""The framework of a program that this project compiles and runs itself."""


class FrameworkError(UserError):
    """A framework, its variant or its option is unknown, or its file is invalid."""


@cache
def framework_names() -> tuple[str, ...]:
    """The names of the frameworks, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.json")))


def load_framework(text: str) -> Framework:
    """Reads a framework.

    Args:
      text: `NAME[@VERSION][:variant=option,…]`; NAME is of `framework_names()`, or the path of a framework
        file.

    Raises:
      FrameworkError: the name, a variant or an option is unknown, or the file is invalid.

    Example:
      >>> import costmodels
      >>> costmodels.load_framework("torch").text
      'torch'
    """
    head, _, tail = (text, "", "") if os.path.isfile(text) else text.partition(":")
    name, _, version = (head, "", "") if os.path.isfile(head) else map(str.strip, head.partition("@"))
    found = _parsed(*_files(name))
    if found.says not in (known := (found.name, *framework_names())):
        raise FrameworkError(f"framework {name!r} says {found.says!r}; {known_names(found.says, known)}")
    chosen = {VERSION: version} if version else {}
    for variant, _, option in (each.partition("=") for each in tail.split(",") if each.strip()):
        if (variant := variant.strip()) in chosen:
            raise FrameworkError(f"framework {text!r} gives {variant} twice; give it once")
        chosen[variant] = option.strip()
    for variant, option in chosen.items():
        _check(found, variant, option, text)
    # A plan that is opened in another folder finds it there.
    file = "" if name in framework_names() else os.path.abspath(name)
    return found.model_copy(update={"chosen": chosen, "file": file})


def _check(found: Framework, variant: str, option: str, text: str) -> None:
    if variant not in found.variants:
        raise FrameworkError(
            f"framework {text!r}: {found.name} has no variant {variant!r}; "
            f"{known_names(variant, found.variants)}"
        )
    if option not in (options := found.variants[variant].options):
        why = f"has no option {option!r}" if option else "needs an option"
        raise FrameworkError(f"framework {text!r}: {variant} {why}; {known_names(option, options)}")


def _files(name: str, *over: str) -> tuple[tuple[str, str], ...]:
    """The names and texts of a framework's file and of those that it is `like`; `over`: the files like it."""
    text = _shipped(name) if name in framework_names() else _own(name)
    if name in over:
        raise FrameworkError(
            f"framework file {over[0]!r} is like itself: {' is like '.join((*over, name))}; give one of them "
            "another `like`"
        )
    if (like := _content(name, text).get("like")) is None:
        return ((name, text),)
    beside = os.path.join(os.path.dirname(name), str(like))
    return ((name, text), *_files(beside if os.path.isfile(beside) else str(like), *over, name))


@cache
def _shipped(name: str) -> str:
    return read_text(_DATA / f"{name}.json")


def _own(name: str) -> str:
    if not os.path.isfile(name):
        missing = name.endswith(".json") or len(Path(name).parts) > 1
        found = "does not exist" if missing else "is not known"
        raise FrameworkError(f"framework {name!r} {found}; {known_names(name, framework_names())}")
    with reading(f"framework file {name!r}", error=FrameworkError):
        return read_text(name)


# Prices ask for a framework again and again; a file that was written again has another text.
@lru_cache(256)
def _content(name: str, text: str) -> Mapping[str, Any]:
    """The content of one file; nobody changes it."""
    with reading(f"framework file {name!r}", error=FrameworkError):
        content = json_value(text)
    if not isinstance(content, dict):
        raise FrameworkError(f"framework file {name!r} is not a JSON object")
    return content


@lru_cache(256)
def _parsed(*files: tuple[str, str]) -> Framework:
    """The framework of the first of `_files`, which has of the others all that it does not say."""
    content: Mapping[str, Any] = {}
    for name, text in reversed(files):
        own = {k: v for k, v in _content(name, text).items() if k != "like"}
        if not content or name in framework_names():
            own = {"says": own.get("name", name), **own}
        content = merged(content, own) if content else own
    try:
        return Framework.model_validate(content)
    except ValidationError as error:
        faults = [at_path(".".join(map(str, e["loc"])) or "the file", e["msg"]) for e in error.errors()]
        raise FrameworkError(
            f"framework {content.get('name', '?')!r} is invalid: {'; '.join(faults)}"
        ) from None


def merged(base: Any, own: Any) -> Any:
    """`base` with what `own` says in its place, without what is null there; numbers and curves are replaced
    whole, with their sources."""
    mappings = isinstance(base, Mapping) and isinstance(own, Mapping)
    if not mappings or {"value", "points"} & own.keys():
        return own
    said = {k: merged(base.get(k), v) for k, v in own.items() if v is not None}
    return {**{k: v for k, v in base.items() if k not in own}, **said}
