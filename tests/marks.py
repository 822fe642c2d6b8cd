"""Markers: which cases of a long list run by day, and which tests are about a kind of decision.

`pytest -m pipeline` runs the tests whose file, name, cases or text name pipelines. There is a marker for each
field of a search space and for each feature of a kind; none is written at a test.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import pytest


def by_day(cases: Iterable[Any], every: int = 2, first: int = 0) -> list[Any]:
    """All cases: those at places `first`, `first + every`, … run by day, the others by night.

    A case that is a tuple is the values of several parameters.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if place % every == first else pytest.mark.nightly,
        )
        for place, case in enumerate(cases)
    ]


@cache
def features() -> Mapping[str, re.Pattern[str]]:
    """Marker -> what names its subject in a text. A field with one feature has one subject with it."""
    from layoutopt.space.decisions import ARGUMENTS, FEATURES, KINDS

    subjects = {name: [name] for name in ARGUMENTS}
    for kind in KINDS:
        subjects |= {name: [*subjects[name], kind.__name__] for name in kind.asks}
    of_field: dict[str, list[str]] = {}
    for feature in FEATURES.values():
        of_field.setdefault(feature.field, []).append(feature.name)
    for field, names in of_field.items():
        if len(names) == 1:
            subjects[field] = subjects[names[0]] = [*dict.fromkeys((*names, *subjects[field]))]
        else:
            subjects |= {name: [name] for name in names if name not in subjects}
    return {name: _pattern(words) for name, words in subjects.items()}


def _pattern(words: Iterable[str]) -> re.Pattern[str]:
    some = "|".join(re.escape(word).replace("_", "[_ -]?") for word in words)
    return re.compile(rf"(?<![A-Za-z])(?:{some})s?(?![A-Za-z])", re.IGNORECASE)


def about(item: pytest.Item) -> list[str]:
    """The markers of a test."""
    text = f"{item.nodeid}\n{_source(getattr(item, 'function', None))}"
    return [name for name, pattern in features().items() if pattern.search(text)]


def _source(function: Any) -> str:
    """The text of a test function."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    lines = [line for *_, line in code.co_lines() if line is not None]
    return "".join(linecache.getlines(code.co_filename)[min(lines) - 1 : max(lines)])
