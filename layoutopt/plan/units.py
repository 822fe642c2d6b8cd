"""Numbers and names in the form of terminals, pages and messages: three digits, SI time, bytes in powers of
1024 and rates of 1000.

A plain space separates a number from its unit; pages keep the two on one line (`glued`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

GLUE = re.compile(r"(?<=\d) (?=(?:[kMGTPE]?i?B|[kMGTPE]?FLOP|[nµm]?s|min|h|[kMT])\b|%)")
"""The space between a number and its unit."""
_TIMES = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
TRAILING = re.compile(r"(\.\d*?)0+(?=\D|$)")
_COUNT = ("", "k", "M", "B", "T")
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def digits(value: float, significant: int = 3) -> str:
    """`value` with that many significant digits, never with an exponent: 0.0123, 4.56, 78.9, 1230."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    exponent = int(f"{value:.{significant - 1}e}".partition("e")[2])
    return f"{value:,.{min(max(0, significant - 1 - exponent), 12)}f}"


def _scaled(value: float, base: float, names: Sequence[str]) -> str:
    power = 0
    while abs(value) >= base * 0.9995 and power < len(names) - 1:
        value, power = value / base, power + 1
    name = names[power]
    text = digits(value) if name != names[0] or value != int(value) else str(int(value))
    return f"{text} {name}".rstrip()


NO_TIME = 1e-13
"""Seconds that rounding makes of equal sums."""


def seconds_text(value: float) -> str:
    """A duration: '38.1 µs', '412 ms', '1.24 s', '3.20 h'; 'unknown' where it is not finite."""
    if not math.isfinite(value):
        return "unknown"
    if abs(value) < NO_TIME:
        return "0 s"
    for scale, unit, least in ((3600.0, "h", 5400.0), (60.0, "min", 120.0)):
        if abs(value) >= least:
            return f"{digits(value / scale)} {unit}"
    scale, unit = next((t for t in reversed(_TIMES) if abs(value) >= t[0] * 0.9995), _TIMES[0])
    return f"{digits(value / scale)} {unit}"


def bytes_text(value: float) -> str:
    """Bytes held or sent, in powers of 1024: '11.2 GiB'."""
    return _scaled(value, 1024.0, _BINARY)


def memory_option(value: float) -> str:
    """Bytes as `--memory` takes them, rounded down: '14.9GiB', '31.2MiB'."""
    power = max(0, min(3, int(math.log(max(value, 1.0), 1024))))
    return f"{math.floor(value / 1024**power * 10) / 10:g}{('B', 'KiB', 'MiB', 'GiB')[power]}"


def count(value: float) -> str:
    """A count: 512, 4.9 B."""
    return _scaled(value, 1000.0, _COUNT) if abs(value) >= 1e4 else f"{value:,.0f}"


def number(value: float | None) -> str:
    """Any number in three digits: 1.87 T, 12.3, 0.0163; '–' for none."""
    if value is None or not math.isfinite(value):
        return "–"
    return count(value) if abs(value) >= 1e4 else digits(value)


def rate_text(value: float, unit: str) -> str:
    """2.3e13 FLOP/s as '23.0 TFLOP/s'."""
    return _scaled(value, 1000.0, tuple(prefix + unit for prefix in _PREFIXES))


def quantity(value: float, unit: str) -> str:
    """A number with the unit of a data file: 4.5e13 FLOP/s is '45 TFLOP/s', 1e-6 s is '1 µs'."""
    if unit in ("1", "count", ""):
        return rounded(digits(value, 4)) if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.4g}"
    if unit in ("B", "byte", "bytes"):
        return rounded(bytes_text(value))
    if unit == "s":
        return rounded(seconds_text(value))
    if abs(value) < 1e3:
        return f"{rounded(digits(value, 4))} {unit}"
    return rounded(rate_text(value, {"bytes/s": "B/s", "byte/s": "B/s"}.get(unit, unit)))


def percent(share: float) -> str:
    """A share of one: 0.083 is '8.3 %'; below a tenth of a percent '<0.1 %'."""
    value = 100 * share
    if 0 < abs(value) < 0.1:
        return "<0.1 %"
    text = f"{value:.0f}" if abs(value) >= 9.95 or value == 0 else f"{value:.1f}"
    return f"{text} %"


def gap_text(gap: float) -> str:
    """The relative gap of a bound, in percent; however small, it is never shown as 0."""
    value = 100 * abs(gap)
    return f"{value:.1f}%" if value >= 10 else f"{value:.2g}%"


def signed_percent(share: float) -> str:
    """A difference: '+8.3 %', '−4.0 %'; nothing to see is '±0 %'."""
    if abs(share) < 5e-4:
        return "±0 %"
    return ("+" if share > 0 else "−") + percent(abs(share))


def step_change(seconds: float, before: float) -> str:
    """A duration beside another: '8.3 % longer', '4.0 % shorter', 'as long', from twice on '2.1× as long'."""
    change = seconds / before - 1
    if abs(change) < 5e-4:
        return "as long"
    if change >= 1:
        return f"{times_text(seconds, before)} as long"
    return f"{percent(abs(change))} {'longer' if change > 0 else 'shorter'}"


def against(value: float, base: float) -> str:
    """A value relative to another: '+8.3 %', from twice on '2.1×'; '' without a base."""
    if base <= 0:
        return ""
    ratio = value / base
    return signed_percent(ratio - 1) if 0.5 < ratio < 2 else times_text(ratio)


def times_text(part: float, whole: float = 1.0) -> str:
    """A part as a multiple of the whole: '1.07×', '35×'; '–' where there is no whole."""
    if not whole:
        return "–"
    return f"{part / whole:.2f}×" if part < 10 * whole else f"{part / whole:.0f}×"


def glued(text: str) -> str:
    """The text, in which no line ends between a number and its unit."""
    return GLUE.sub("\u00a0", text)


def rounded(text: str) -> str:
    """A round number on an axis without its trailing zeros: '2.00 GiB' is '2 GiB'."""
    return TRAILING.sub(lambda m: m.group(1) if len(m.group(1)) > 1 else "", text)


def plural(number: int, word: str) -> str:
    """'1 device', '512 devices'."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def clean(text: str) -> str:
    """Text that every page, XML file and terminal can show: no controls, no marks that turn writing round."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters; the middle is cut, because names differ at their ends."""
    if len(text) <= limit:
        return text
    head = (limit - 1) * 3 // 5
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def some(names: Sequence[str], limit: int, each: int = 40) -> str:
    """The first names, and the number of the others: 'vocab, heads, d_ff and 3 more'."""
    shown = [shorten(n, each) for n in names[:limit]]
    if len(names) > limit:
        return f"{', '.join(shown)} and {len(names) - limit:,} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def words_of(pairs: Mapping[str, str]) -> str:
    """'layers: 8, batch: 512'."""
    return ", ".join(f"{name}: {value}" for name, value in pairs.items())


def letter(position: int) -> str:
    """A, B, …, Z, AA, AB: the names of plans side by side."""
    head, tail = divmod(position, 26)
    return (letter(head - 1) if head else "") + chr(65 + tail)


def mesh_option(mesh: Mapping[str, int]) -> str:
    """The mesh as the command line takes it: 'data:8;model:4'."""
    return ";".join(f"{axis}:{size}" for axis, size in mesh.items())


def mesh_text(mesh: Mapping[str, int]) -> str:
    """'data 8 × model 4'; a mesh of one device has no axes."""
    return " × ".join(f"{name} {size}" for name, size in mesh.items()) or "one device"


def layout_text(layout: Mapping[str, Sequence[str]]) -> str:
    """The layout as the command line takes it: 'batch:data+pod;heads:model'."""
    return ";".join(f"{dim}:{'+'.join(axes)}" for dim, axes in layout.items() if axes)


def size_text(amount: float) -> str:
    """Bytes in sentences, without trailing zeros: '16 GiB'."""
    return rounded(bytes_text(amount))


def used_text(amount: float, limit: float) -> str:
    """Bytes that are held of those that there are: '14.2 GiB of 15.8 GiB (89.9%)'."""
    return f"{bytes_text(amount)} of {bytes_text(limit)} ({share_text(amount, limit)})"


def throughput_text(rate: float, items: str) -> str:
    """123456.7 tokens a second as '123,457 tokens/s'."""
    return f"{rate:,.0f} {items}/s" if rate >= 100 else f"{digits(rate)} {items}/s"


def share_text(part: float, whole: float) -> str:
    """A part as a percentage of the whole."""
    return f"{100 * part / whole:.1f}%" if whole else "–"


def duration_text(seconds: float) -> str:
    """Time left or spent, for people: '42 s', '3 min 05 s', '2 h 10 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
