"""Amounts in users' notation, of memory and of other quantities."""

from __future__ import annotations

import re

BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_AMOUNT = re.compile(
    r"(?P<number>\d+(\.\d*)?(e[+-]?\d+)?|\.\d+)\s*(?P<unit>[A-Za-z]*)", re.IGNORECASE | re.ASCII
)
BARE = 1 << 20
"""A number without a unit below this is not a number of bytes that a device has."""


def parse_bytes(text: str, option: str = "--memory") -> int:
    """Bytes of '16GiB', '80 GB', '512MiB', or of a large number without a unit; UserError otherwise."""
    from mesh_tf_core.errors import UserError, known_names

    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{option} {text!r} is not an amount of memory; write for example {option} 16GiB")
    unit = match["unit"] or "B"
    exact = {name.lower(): factor for name, factor in BYTES.items()}
    if unit.lower() not in exact:
        raise UserError(f"{option} {text!r}: {unit!r} is not a unit of memory; {known_names(unit, BYTES)}")
    if not match["unit"] and 0 < float(match["number"]) < BARE:
        likely = "GiB" if float(match["number"]) < 1024 else "MiB"
        raise UserError(
            f"{option} {text!r} has no unit; write the unit, for example {option} {text.strip()}{likely}"
        )
    amount = float(match["number"]) * exact[unit.lower()]
    if not 1 <= amount < 2**63:
        raise UserError(f"{option} {text!r} must be at least 1 B and less than 8 EiB")
    return round(amount)


COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def parse_count(text: str, option: str, example: str) -> float:
    """The number of '300B', '1.5T', '1e22' or '70_000'; UserError otherwise."""
    from mesh_tf_core.errors import UserError

    match = _AMOUNT.fullmatch(text.strip().replace("_", ""))
    units = {name.lower(): factor for name, factor in COUNTS.items()}
    if match is None or match["unit"].lower() not in units:
        raise UserError(f"{option} {text!r} is not a number; write for example {option} {example}")
    found = float(match["number"]) * units[match["unit"].lower()]
    if not 0 < found < 1e40:
        raise UserError(f"{option} {text!r} must be a positive number, e.g. {option} {example}")
    return found


SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str, option: str, bare: str = "") -> float:
    """Seconds of '2.5s', '380 ms', '1m' or '1min'; UserError otherwise.

    Args:
      bare: the unit of a number without one; "": it must have one.
    """
    from mesh_tf_core.errors import UserError, known_names, meant

    match = _AMOUNT.fullmatch(text.strip().replace("µ", "u"))
    unit = match and (match["unit"] or bare)
    if match is None or not unit or not 0 < float(match["number"]) < 1e12:
        need = (
            f"; write e.g. {option} 90 (seconds) or 5min"
            if bare
            else f" with a unit; write e.g. {option} 2.5s"
        )
        raise UserError(f"{option} {text!r} is not a positive time{need}")
    if (known := unit if unit in SECONDS else meant(unit, SECONDS)) not in SECONDS:
        raise UserError(f"{option} {text!r}: {unit!r} is not a unit of time; {known_names(unit, SECONDS)}")
    return float(match["number"]) * SECONDS[known]
