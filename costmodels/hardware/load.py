"""Finds and reads hardware files: the presets of the package, the user's own, calibrated profiles.

Numbers of a hardware file set by name: "a100, node_egress=100GB/s" is the a100 with another network.

Such a text is a name like any other: plans keep it, and whoever reads one again gets the same machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from costmodels.frameworks import DEFAULT, KINDS, Framework, framework_names, load_framework, merged
from costmodels.frameworks.framework import OverlaidNumber
from costmodels.hardware import links, model, numbers
from costmodels.hardware.model import Hardware
from costmodels.hardware.profiles import profiles_directory
from costmodels.presets import PRESETS, hardware_names
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.files import write_file
from mesh_tf_core.reading import read_json, reading

_VALUE = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*)", re.ASCII)


class HardwareError(UserError):
    """A hardware name is unknown, or a hardware file is invalid or has no value for a required number."""


def with_settings(name: str, settings: Sequence[str]) -> str:
    """The name of a machine with some of its numbers set."""
    return ", ".join((name, *(s.strip() for s in settings)))


def split_name(text: str) -> tuple[str, tuple[str, ...]]:
    """A machine's own name or file, and the numbers that are set."""
    if os.path.isfile(text):
        return text, ()
    name, *settings = (part.strip() for part in text.split(","))
    return name, tuple(settings)


def changed(content: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A copy of the content of a hardware file with numbers set, named after them.

    Args:
      settings: "key=value" each: a number's path, or the end of one; a value with its unit.

    Raises:
      HardwareError: no such number, several of that name, or no value.
    """
    content = deepcopy(content)
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        found = _VALUE.fullmatch(value)
        if not key or found is None:
            raise HardwareError(
                f"hardware setting {setting!r} is not NAME=NUMBER with a unit, e.g. node_egress=100GB/s"
            )
        for place in _places(content, key, setting):
            _set(content, place, float(found[1]), found[2])
    content["name"] = with_settings(content["name"], settings)
    return content


def _set(content: dict[str, Any], path: tuple[str, ...], value: float, unit: str) -> None:
    *parents, last = path
    room: Any = content
    for part in parents:
        room = room[int(part)] if isinstance(room, list) else room.setdefault(part, {})
    own: Any = int(last) if isinstance(room, list) else last
    known = "1" if isinstance(room, dict) and not room.get(own) else room[own]["unit"]
    room[own] = {
        "value": value,
        "unit": unit or (known if known == "count" else "1"),
        "source": "set by the user",
        "date": datetime.now(UTC).date().isoformat(),
    }


def _places(content: dict[str, Any], key: str, setting: str) -> list[tuple[str, ...]]:
    """Paths of the numbers that a key names: one, or one for every group size."""
    known, wanted = [*_numbers(content, ()), *_unset(content)], tuple(key.split("."))
    named_by: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path in known:
        for end in range(len(wanted), len(path) + 1):
            if path[:end][-len(wanted) :] == wanted:
                named_by.setdefault(path[:end], []).append(path)
    exact = {k: v for k, v in named_by.items() if k == wanted} or named_by
    places = [path for paths in exact.values() for path in paths]
    if not places:
        # Without its room, and without a group's size.
        short = {".".join(p for p in path[1:] if not p.isdecimal()) or path[0] for path in known}
        raise HardwareError(
            f"hardware setting {setting!r}: {content['name']} has no number {key!r}; "
            f"{known_names(key, sorted(short))}"
        )
    sizes = len(exact) == 1 and all(path[-1].isdecimal() for path in places)
    if len(places) > 1 and not sizes:
        names = ", ".join(".".join(path) for path in places)
        raise HardwareError(
            f"hardware setting {setting!r} is ambiguous: it could mean {names}; give one of these names"
        )
    return places


def _numbers(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths of the numbers that a file has."""
    if path and path[0] not in ("chip", "topology", "overlap"):
        return
    if isinstance(value, dict) and "value" in value:
        yield path
    elif isinstance(value, dict | list):
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(item, (*path, str(part)))


def _unset(content: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Paths of the numbers that a file may have and has not."""
    for purpose in get_args(model.Purpose):
        if purpose not in content.get("overlap", {}):
            yield "overlap", purpose
    rooms = (
        ("chip", model.Chip),
        ("topology", links.TOPOLOGIES.get(content["topology"].get("kind"), NoneType)),
    )
    for room, cls in rooms:
        for name, hint in get_type_hints(cls).items() if cls is not NoneType else ():
            if get_args(hint) == (numbers.Number, NoneType) and not content[room].get(name):
                yield room, name


def preset_of_device(kind: str) -> str | None:
    """The preset of a device by the name that JAX gives it (`jax.Device.device_kind`), if there is one."""
    return next((name for name in hardware_names() if kind in load_hardware(name).jax_devices), None)


def load_hardware(
    name_or_path: str | Path, framework: str | None = None, *, profiles: Path | None = None
) -> Hardware:
    """Reads the hardware of a preset or of a file, as the software of a framework uses it.

    Args:
      name_or_path: a name of `hardware_names()`, or the path of a hardware file (`calibrate` writes such
        files). Settings of numbers may follow, as in "a100, node_egress=100GB/s". NAME-eager is NAME under
        the framework `torch`.
      framework: as in `costmodels.load_framework` (None: `layoutopt`). A file that names its compiler keeps
        its own numbers.
      profiles: a directory of calibrated profiles, in which `NAME.json` replaces the preset NAME.

    Raises:
      HardwareError: the name is unknown, the file cannot be read or is invalid (the message lists every
        fault), a setting names a number that does not exist, or the framework does not run on such chips.
      FrameworkError: as `costmodels.load_framework`.

    Example:
      >>> import costmodels
      >>> costmodels.load_hardware("a100, node_egress=100GB/s").name
      'a100, node_egress=100GB/s'
      >>> costmodels.load_hardware("h100", "torch").compiler
      'eager'
    """
    text, settings = split_name(str(name_or_path))
    text, framework = _without_software(text, framework)
    if profiles is not None and text in hardware_names() and (profile := profiles / f"{text}.json").is_file():
        return read_hardware(profile, settings, framework)
    if text in hardware_names():
        if settings or (framework and load_framework(framework).file):  # which may be written again
            return read_hardware(PRESETS / f"{text}.json", settings, framework)
        return _preset(text, framework)
    path = Path(text)
    if os.path.isfile(path):
        return read_hardware(path, settings, framework)
    if path.suffix == ".json" or len(path.parts) > 1:
        raise HardwareError(
            f"hardware file {text!r} does not exist; give an existing file, or the name of a preset "
            f"({_known(text)})"
        )
    raise HardwareError(
        f"hardware {text!r} is not known; {_known(text)}; to use your own hardware, give the path of a "
        "hardware file"
    )


EAGER = "-eager"
"""The end of names of chips under PyTorch, as `--hardware` has taken them since before `--framework`."""


def _without_software(name: str, framework: str | None) -> tuple[str, str | None]:
    """The chip of a name, and its framework."""
    chip = name.removesuffix(EAGER)
    if chip == name or chip not in hardware_names():
        return name, framework
    if framework is not None:
        raise HardwareError(
            f"hardware {name!r} is {chip} under the framework torch; with --framework {framework} give "
            f"--hardware {chip}"
        )
    return chip, "torch"


def machine_of(hardware: str | Path | Hardware, framework: str | None = None, own: str = DEFAULT) -> Hardware:
    """The hardware that a user names: `load_hardware` of a name or a file, where a profile that the user
    calibrated replaces its preset; a Hardware itself.

    Args:
      framework: as in `load_hardware`.
      own: the framework of the model, where neither the user nor the hardware's name says one.

    Raises:
      HardwareError: as `load_hardware`, for values of other types, and for a Hardware under another
        framework.
    """
    if isinstance(hardware, Hardware):
        if framework is not None and load_framework(framework).text != hardware.framework:
            raise HardwareError(
                f"the hardware {hardware.name} is loaded under the framework {hardware.framework}, but "
                f"framework is {framework!r}; pass its name, or load it under {framework!r}"
            )
        return hardware
    if not isinstance(hardware, str | Path):
        raise HardwareError(
            f"hardware is {hardware!r}; give the name of a preset, the path of a hardware file, or a Hardware"
        )
    if framework is None and own != DEFAULT and not split_name(str(hardware))[0].endswith(EAGER):
        framework = own
    return load_hardware(hardware, framework, profiles=profiles_directory())


def read_hardware(path: Path, settings: Sequence[str] = (), framework: str | None = None) -> Hardware:
    """The hardware in the file at `path` under a framework, with some numbers set; HardwareError names every
    fault."""
    from costmodels.hardware.schema import read

    with reading(f"hardware file {str(path)!r}", error=HardwareError):
        found = _shipped(path.stem) if path.parent == PRESETS else read_json(path)
        content = _described(found, path, framework)
    hardware, faults = read(content)
    if hardware is not None and settings:
        hardware, faults = read(changed(content, settings))
        if hardware is None:
            raise HardwareError(f"hardware {with_settings(path.stem, settings)!r}: {'; '.join(faults)}")
    if hardware is None:
        many = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        whose = f"hardware file {str(path)!r}"
        if framework is not None and load_framework(framework).file:
            whose = f"hardware {path.stem} under framework {framework!r}"
        raise HardwareError(f"{whose} has {many}: {'; '.join(faults)}")
    return hardware


@lru_cache
def _preset(name: str, framework: str | None) -> Hardware:
    return read_hardware(PRESETS / f"{name}.json", framework=framework)


def _known(asked: str) -> str:
    return known_names(asked, hardware_names())


def preset_content(name: str) -> dict[str, Any]:
    """The parsed file of a preset under the default framework, from which a calibration starts (a copy)."""
    if name not in hardware_names():
        raise HardwareError(f"hardware {name!r} is not known; {_known(name)}")
    content: dict[str, Any] = _described(_shipped(name), PRESETS / f"{name}.json", None)
    return deepcopy(content)


@cache
def _shipped(name: str) -> Any:
    """The parsed file of a preset; nobody changes it."""
    return read_json(PRESETS / f"{name}.json")


def _described(content: Any, path: Path, framework: str | None) -> Any:
    """The content of a file with what a framework changes.

    A file that is `like` a preset has all of that preset, under the framework, that it does not say itself.
    Numbers and curves are replaced whole, with their sources. A whole file that names its compiler has the
    numbers of that software already, as a machine's that was calibrated; a framework changes none of them.
    """
    if not isinstance(content, dict):
        return content
    like, own = content.get("like"), {k: v for k, v in content.items() if k != "like"}
    if like is None:
        base, own = own, {}
    elif like not in hardware_names():
        found = f'hardware file {str(path)!r} has "like": {like!r}, which is not a preset'
        raise HardwareError(f"{found}; {_known(str(like))}")
    elif own.get("name", like) == like:  # the errors of predictions are known by name
        raise HardwareError(
            f'hardware file {str(path)!r} is "like" {like!r}, but has no name of its own; add "name"'
        )
    else:
        base = _shipped(like)
    software = load_framework(framework or str(own.pop("framework", base.get("framework", DEFAULT))))
    kind, chips = base.get("kind"), [str(base.get("name")), str(own.get("name"))]
    if kind in KINDS and kind not in software.kinds:
        runs = [name for name in framework_names() if kind in load_framework(name).kinds]
        raise HardwareError(
            f"framework {software.name} does not run on {chips[0]}, a {kind}; give other --hardware, or one "
            f"of the frameworks that do: {', '.join(runs)}"
        )
    # A file of one's own stands for the preset that it is like.
    preset = next((chip for chip in reversed(chips) if chip in hardware_names()), chips[0])
    if lacks := software.lacking(preset):
        raise HardwareError(f"framework {lacks}")
    if "compiler" not in base:
        for overlay in software.overlays():
            for _, part in overlay.parts(str(kind), chips):
                base = merged(base, part)
    return {**merged(base, own), "framework": software.text}


def check_framework(text: str) -> Framework:
    """Reads a framework as `load_framework`, and every chip under it with each of its options.

    Raises:
      HardwareError: what it changes of a chip is not valid there.
    """
    found = load_framework(text)
    texts = [f"{name}={option}" for name, each in found.variants.items() for option in each.options]
    for chip in hardware_names() if found.file else ():
        if load_hardware(chip).kind in found.kinds:
            for each in ("", *texts):
                text = f"{found.file}{':' * bool(each)}{each}"
                if not load_framework(text).lacking(chip):
                    load_hardware(chip, text)
    return found


def numbers_of(preset: str, framework: Framework) -> list[OverlaidNumber]:
    """The numbers that a preset has from a framework and its options; HardwareError if it has none."""
    kind = preset_content(preset)["kind"]
    load_hardware(preset, framework.text)
    return framework.taken(kind, (_shipped(preset).get("like", ""), preset))


def profile_of(content: Mapping[str, Any], path: Path) -> Hardware:
    """The hardware that a profile for `path` describes; HardwareError, naming every fault, if it is none."""
    from costmodels.hardware.schema import read

    hardware, faults = read(content)
    if hardware is None:
        raise HardwareError(f"the profile for {str(path)!r} is invalid: {'; '.join(faults)}")
    return hardware


def write_profile(content: Mapping[str, Any], path: Path) -> Hardware:
    """Checks a profile, writes it to `path` in one step, and returns it as it will be read.

    Raises:
      HardwareError: as `profile_of`.
      UserError: `path` cannot be written.
    """
    hardware = profile_of(content, path)
    write_file(path, json.dumps(content, indent=1) + "\n", "the profile")
    return hardware
