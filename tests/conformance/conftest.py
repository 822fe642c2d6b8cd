"""Prints after a run what the conformance tests tried, also when several processes shared the work.

By family; with -v also by operation and mesh (each legal layout is run in the dtypes of `helper.MESHES`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

KEYS = ("legal layouts", "illegal layouts", "comparisons")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    families: dict[str, Counter[str]] = {}
    rows: list[tuple[str, Counter[str]]] = []
    for report in terminalreporter.stats.get("passed", ()):
        found = dict(report.user_properties).get("conformance")
        if report.when == "call" and found:
            family, name, *numbers = found
            counts = Counter(dict(zip(KEYS, numbers, strict=True)))
            rows.append((name, counts))
            families.setdefault(family, Counter()).update(counts)
    if not families:
        return
    terminalreporter.section("conformance: programs run and compared with the dense result")
    total = sum(families.values(), Counter())
    listed = rows if terminalreporter.config.option.verbose > 0 else []
    for name, counts in [*listed, *sorted(families.items()), ("all", total)]:
        terminalreporter.write_line(f"{name:32s} " + "  ".join(f"{counts[k]:7d} {k}" for k in KEYS))
