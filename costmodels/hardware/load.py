"""Finds and reads hardware files: the presets of the package, the user's own, calibrated profiles."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodels.hardware.model import Hardware
from costmodels.hardware.profiles import profiles_directory
from costmodels.hardware.settings import HardwareError, changed, split_name, with_settings
from mesh_tf_core.errors import known_names
from mesh_tf_core.files import write_file
from mesh_tf_core.reading import read_json, reading

_PRESETS = Path(__file__).parent / "data"


def hardware_names() -> tuple[str, ...]:
    """The names of the hardware presets, sorted.

    Example:
      >>> import costmodels
      >>> "tpu-v5p" in costmodels.hardware_names()
      True
    """
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.json")))


def preset_of_device(kind: str) -> str | None:
    """The preset of a device by the name that JAX gives it (`jax.Device.device_kind`), if there is one."""
    return next((name for name in hardware_names() if kind in load_hardware(name).jax_devices), None)


def load_hardware(name_or_path: str | Path, *, profiles: Path | None = None) -> Hardware:
    """Reads the hardware of a preset or of a file.

    Args:
      name_or_path: a name of `hardware_names()`, or the path of a hardware file (`calibrate` writes such
        files). Settings of numbers may follow, as in "a100, node_egress=100GB/s".
      profiles: a directory of calibrated profiles, in which `NAME.json` replaces the preset NAME.

    Raises:
      HardwareError: the name is unknown, the file cannot be read or is invalid (the message lists every
        fault), or a setting names a number that does not exist.

    Example:
      >>> import costmodels
      >>> costmodels.load_hardware("a100, node_egress=100GB/s").name
      'a100, node_egress=100GB/s'
    """
    text, settings = split_name(str(name_or_path))
    if profiles is not None and text in hardware_names() and (profile := profiles / f"{text}.json").is_file():
        return read_hardware(profile, settings)
    if text in hardware_names():
        return read_hardware(_PRESETS / f"{text}.json", settings) if settings else _preset(text)
    path = Path(text)
    if os.path.isfile(path):
        return read_hardware(path, settings)
    if path.suffix == ".json" or len(path.parts) > 1:
        raise HardwareError(
            f"hardware file {text!r} does not exist; give an existing file, or the name of a preset "
            f"({_known(text)})"
        )
    raise HardwareError(
        f"hardware {text!r} is not known; {_known(text)}; to use your own hardware, give the path of a "
        "hardware file"
    )


def machine_of(hardware: str | Path | Hardware) -> Hardware:
    """The hardware that a user names: `load_hardware` of a name or a file, where a profile that the user
    calibrated replaces its preset; a Hardware itself.

    Raises:
      HardwareError: as `load_hardware`, and for values of other types.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str | Path):
        raise HardwareError(
            f"hardware is {hardware!r}; give the name of a preset, the path of a hardware file, or a Hardware"
        )
    return load_hardware(hardware, profiles=profiles_directory())


def read_hardware(path: Path, settings: Sequence[str] = ()) -> Hardware:
    """The hardware in the file at `path` with some numbers set; HardwareError names every fault."""
    from costmodels.hardware.schema import read

    with reading(f"hardware file {str(path)!r}", error=HardwareError):
        content = _completed(read_json(path), path)
    hardware, faults = read(content)
    if hardware is not None and settings:
        hardware, faults = read(changed(content, settings))
        if hardware is None:
            raise HardwareError(f"hardware {with_settings(path.stem, settings)!r}: {'; '.join(faults)}")
    if hardware is None:
        many = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise HardwareError(f"hardware file {str(path)!r} has {many}: {'; '.join(faults)}")
    return hardware


@lru_cache
def _preset(name: str) -> Hardware:
    return read_hardware(_PRESETS / f"{name}.json")


def _known(asked: str) -> str:
    return known_names(asked, hardware_names())


def preset_content(name: str) -> dict[str, Any]:
    """The parsed file of a preset, from which a calibration starts (a copy)."""
    if name not in hardware_names():
        raise HardwareError(f"hardware {name!r} is not known; {_known(name)}")
    path = _PRESETS / f"{name}.json"
    content: dict[str, Any] = _completed(read_json(path), path)
    return content


def _completed(content: Any, path: Path) -> Any:
    """The content of a file; one that is `like` a preset has all of that preset that it does not say itself.

    Numbers and curves are replaced whole, with their sources.
    """
    if not isinstance(content, dict) or "like" not in content:
        return content
    like, own = content["like"], {k: v for k, v in content.items() if k != "like"}
    if like not in hardware_names():
        found = f'hardware file {str(path)!r} has "like": {like!r}, which is not a preset'
        raise HardwareError(f"{found}; {_known(str(like))}")
    if own.get("name", like) == like:  # the errors of predictions are known by name
        raise HardwareError(
            f'hardware file {str(path)!r} is "like" {like!r}, but has no name of its own; add "name"'
        )
    return _merged(preset_content(like), own)


def _merged(base: Any, own: Any) -> Any:
    whole = not isinstance(base, dict) or not isinstance(own, dict) or {"value", "points"} & own.keys()
    return own if whole else {**base, **{k: _merged(base.get(k), v) for k, v in own.items()}}


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
