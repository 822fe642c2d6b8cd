"""Amounts of memory as users write them, and numbers as people read them."""

from __future__ import annotations

import math
import re

BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_AMOUNT = re.compile(r"(?P<number>\d+(\.\d*)?(e[+-]?\d+)?|\.\d+)\s*(?P<unit>[A-Za-z]*)", re.IGNORECASE)


def parse_bytes(text: str, option: str = "--memory") -> int:
    """Bytes of '16GiB', '80 GB', '512MiB' or a plain number of bytes; UserError otherwise."""
    from mesh_tf_core.errors import UserError, known_names

    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{option} {text!r} is not an amount of memory; write for example {option} 16GiB")
    unit = match["unit"] or "B"
    exact = {name.lower(): factor for name, factor in BYTES.items()}
    if unit.lower() not in exact:
        raise UserError(f"{option} {text!r}: {unit!r} is not a unit of memory; {known_names(unit, BYTES)}")
    amount = float(match["number"]) * exact[unit.lower()]
    if not 1 <= amount < 2**63:
        raise UserError(f"{option} {text!r}: must be at least 1 B and less than 8 EiB")
    return round(amount)


def bytes_text(amount: float) -> str:
    """1536 as '1.50 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.{_digits(amount)}f} {unit}"


def seconds_text(seconds: float) -> str:
    """0.00186 as '1.86 ms'."""
    if not math.isfinite(seconds):
        return "unknown"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 1 or unit == "µs":
            break
    amount = seconds * factor
    return f"{amount:.{_digits(amount)}f} {unit}" if amount else "0 s"


def rate_text(amount: float, unit: str) -> str:
    """2.3e13 FLOP/s as '23.0 TFLOP/s'."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(amount) < 1000 or prefix == "P":
            break
        amount /= 1000
    return f"{amount:.{_digits(amount)}f} {prefix}{unit}"


def share_text(part: float, whole: float) -> str:
    """A part as a percentage of the whole."""
    return f"{100 * part / whole:.1f}%" if whole else "–"


def times_text(part: float, whole: float) -> str:
    """A part as a multiple of the whole."""
    if not whole:
        return "–"
    return f"{part / whole:.2f}×" if part < 10 * whole else f"{part / whole:.0f}×"


def duration_text(seconds: float) -> str:
    """Time left or spent, for people: '42 s', '3 min 05 s', '2 h 10 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _digits(amount: float) -> int:
    """Decimals that leave three significant digits."""
    return 2 if abs(amount) < 10 else 1 if abs(amount) < 100 else 0
