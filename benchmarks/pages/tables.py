"""What the generated pages share: stored results, their date, tables, numbers as text."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def stored(name: str) -> Any:
    """What `benchmarks/results/NAME.json` holds."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def date_of(result: Any) -> str:
    """The newest date in a result."""
    if isinstance(result, dict):
        found = [result["date"]] if isinstance(result.get("date"), str) else []
        return max([*found, *(date_of(v) for v in result.values() if isinstance(v, dict | list))], default="")
    return max((date_of(v) for v in result if isinstance(v, dict | list)), default="")


def caption(command: str, name: str, of: Any = None) -> str:
    """Where a table is from: the command, the file, one date."""
    date = date_of(stored(name) if of is None else of)
    when = f", {date}" if date else ""
    return f"Source: `{command}` (`benchmarks/results/{name}.json`{when}).\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """A Markdown table."""
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
    yield ""


def prose(text: str, **values: object) -> str:
    """Paragraphs and lists with values filled in, in lines of equal width."""
    return "\n\n".join(map(_wrapped, text.format(**values).strip("\n").split("\n\n"))) + "\n"


def _wrapped(paragraph: str) -> str:
    if paragraph.startswith(("#", "|")):
        return paragraph
    items = (" ".join(item.split()) for item in re.split(r"\n(?=- )", paragraph))
    return "\n".join(
        textwrap.fill(i, 110, subsequent_indent="  " * i.startswith("- "), **WHOLE) for i in items
    )


WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}


def share(value: float, digits: int = 1) -> str:
    """0.123 as `12.3 %`."""
    return f"{100 * value:.{digits}f} %"


def ratio(pair: dict[str, float], other: str) -> float:
    """Predicted over a reference."""
    return pair["predicted"] / pair[other]


def span(values: Sequence[float], form: str) -> str:
    """The least and the greatest of some values, as `1.2 to 3.4`."""
    return " to ".join(dict.fromkeys(form.format(v) for v in (min(values), max(values))))
