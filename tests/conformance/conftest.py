"""Prints after a run what the conformance tests tried, by family, also when several processes shared the
work."""

from __future__ import annotations

from collections import Counter
from typing import Any

KEYS = ("legal layouts", "illegal layouts", "comparisons")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    families: dict[str, Counter[str]] = {}
    for report in terminalreporter.stats.get("passed", ()):
        found = dict(report.user_properties).get("conformance")
        if report.when == "call" and found:
            family, *numbers = found
            families.setdefault(family, Counter()).update(dict(zip(KEYS, numbers, strict=True)))
    if not families:
        return
    terminalreporter.section("conformance: programs run and compared with the dense result")
    total = sum(families.values(), Counter())
    for name, counts in [*sorted(families.items()), ("all", total)]:
        terminalreporter.write_line(f"{name:12s} " + "  ".join(f"{counts[k]:7d} {k}" for k in KEYS))
