"""Round numbers for axes: linear, logarithmic, and of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def round_steps(high: float, count: int = 4) -> list[float]:
    """0 and the multiples of a round step up to `high`, about `count` of them."""
    if high <= 0:
        return [0.0]
    raw = high / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((s * power for s in STEPS if s * power >= raw * 0.999), 10 * power)
    return [step * i for i in range(int(high / step + 1e-9) + 1)]


def byte_steps(high: float, count: int = 4) -> list[float]:
    """As `round_steps`, round in the binary unit that `high` is written in."""
    unit = 1024.0 ** max(0, math.floor(math.log(max(high, 1.0), 1024)))
    return [unit * v for v in round_steps(high / unit, count)]


def log_steps(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers inside [low, high] for a logarithmic axis, at most about `most` of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for mantissas in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        found = [
            m * 10.0**e
            for e in range(first, last + 1)
            for m in mantissas
            if low * 0.999 <= m * 10.0**e <= high * 1.001
        ]
        if len(found) <= most:
            break
    stride = max(1, math.ceil(len(found) / most))
    return found[::stride] if len(found) > 1 else _multiples(low, high)


def _multiples(low: float, high: float) -> list[float]:
    """Two or more multiples of the largest round step that has so many in a narrow range."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10(high - low))
    found: list[float] = []
    for step in (s * power for s in (5.0, 2.5, 2.0, 1.0, 0.5, 0.25)):
        found = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(found) > 1:
            break
    return found


def padded(values: Sequence[float], share: float = 0.08) -> tuple[float, float]:
    """The range of positive values on a logarithmic axis with room on both sides."""
    low, high = min(values), max(values)
    room = max((high / low) ** share, 1.06)
    return low / room, high * room
