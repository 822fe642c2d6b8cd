"""Words of the sensitivity curves: their factors, and a letter for every layout that is best somewhere."""

from __future__ import annotations

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import bytes_text, count, digits, rounded

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FACTORS = {
    "bandwidth": "link bandwidth, relative to this hardware",
    "memory": "memory per device",
    "devices": "number of devices",
}


def factor_value(factor: str, value: float) -> str:
    """A factor's value in its unit."""
    if factor == "memory" and value > 64:
        return rounded(bytes_text(value))
    return count(value) if factor == "devices" else f"{rounded(digits(value))}×"


def layout_letters(plan: PlanFile) -> dict[str, str]:
    """A letter for every layout of the sensitivity curves, in order of appearance."""
    names = dict.fromkeys(t.layout for s in plan.details.sensitivity for t in s.trials if t.layout)
    return {name: LETTERS[i % 26] * (1 + i // 26) for i, name in enumerate(names)}
