"""What a search picks under each framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.framework_picks import QUESTIONS, Question
from benchmarks.pages.tables import caption, prose, share, stored, table
from layoutopt.plan.units import bytes_text, seconds_text

HEAD = """\
# Plans under a framework

The best plan of common models that each framework can run, and what an unrestricted plan with the same
prices would save (`left`). Length 1,024 for GPT-2, 8,192 for Llama 3, 4,096 for Mixtral, 224 × 224 pixels for
ViT-H; bfloat16, Adam, float32 master weights. Every search had at most {limit:.0f} seconds on a shared
machine; `proven` is that of this time. `CPU` is that of the search divided by that of the unrestricted
search. Mixtral's experts have a capacity factor of 1.25.
"""
MISSING = """\
Not run: {missing}.
"""


def page() -> Iterator[str]:
    """docs/results/frameworks.md."""
    found = stored("framework_picks")
    limits = {each["limit"] for case in found.values() for each in case["frameworks"].values()}
    yield prose(HEAD, limit=max(limits))
    yield caption("python -m benchmarks.framework_picks", "framework_picks")
    heads = ("framework", "step", "memory", "parallelism", "proven", "left", "CPU", "exported")
    for question in QUESTIONS:
        if (case := found.get(question.title)) is not None:
            yield f"## {question.title}, batch {case['batch']:,}\n"
            rows = {name: _row(each) for name, each in case["frameworks"].items()}
            yield from table(
                heads, [(f"`{name}`", *rows[name]) for name in question.frameworks if name in rows]
            )
    missing = [text for each in QUESTIONS if (text := _missing(each, found))]
    if missing:
        yield prose(MISSING, missing="; ".join(missing))


def _missing(question: Question, found: Mapping[str, Any]) -> str:
    """The frameworks under which a question was not asked."""
    have = found.get(question.title, {"frameworks": {}})["frameworks"]
    names = [name for name in question.frameworks if name not in have]
    every = len(names) == len(question.frameworks)
    return question.title if every else f"{question.title} under {', '.join(names)}" if names else ""


def _row(each: Mapping[str, Any]) -> tuple[str, ...]:
    own, free = each["own"], each["unrestricted"]
    if "seconds" not in own:
        return (WORDS[own["found"]], *[""] * 6)
    ended = own["found"] == free["found"] == "OPTIMAL"
    known = "seconds" in free
    left = max(0.0, 1 - free["seconds"] / own["seconds"]) if known else 0.0
    return (
        seconds_text(own["seconds"]),
        bytes_text(own["bytes"]),
        "; ".join(f"{axis}: {form}" for axis, form in own["parallelism"].items()),
        "yes" if own["found"] == "OPTIMAL" else f"within {share(1 - own['bound'] / own['seconds'])}",
        (share(left) if ended else f"{share(left)} found") if known else "",
        f"{own['cpu'] / free['cpu']:.2f} of {free['cpu']:.0f} s",
        "no form" if each["refused"] is None else each["refused"] or "yes",
    )


WORDS = {"InfeasibleError": "nothing fits", "LimitError": "not found in time"}
"""Why there is no plan."""
