"""What nobody writes on purpose: values and texts that break readers."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning

from mesh_tf_core.errors import UserError

NIGHTLY = 40
"""Times as many cases as in `make test`."""


def nested(levels: int) -> Any:
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


TEXTS = (
    "", " ", "none", "-", "None", "null", "nan", "inf", "²", "٣", "0", "-1", "1e999", "9" * 20, "9" * 5000,
    "\0", "a\0b", "\ud800", "'", '"', "\\", "a\nb", "‮", "é", "x" * 300, "data:²", "data:2;data:2", "model:",
    ":", "+", ";;", "batch:data", "os:system", "../up.json", "layout", "zero3", "float8_e4m3fn", "{}", "[1",
)  # fmt: skip
"""Digits that are not ASCII, numbers that no machine word holds, quotes, names that mean something else."""
NUMBERS = (0, -1, 1, 2**31, 2**53 + 1, 2**63, 10**20, 10**400, 0.5, -0.0, 1e-320, 1e308)
VALUES = (
    None,
    True,
    [],
    {},
    [[]],
    {"": {}},
    {"x": None},
    float("nan"),
    float("inf"),
    nested(70),
    nested(600),
)

small = st.recursive(
    st.sampled_from([*VALUES, *NUMBERS, *TEXTS]) | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
"""Values that JSON can hold, or that Python's reader takes for such."""


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value; of a list the first two items."""
    yield at
    inside = (
        value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    )
    for key, inner in inside:
        yield from places(inner, (*at, key))


def changed(whole: Any, place: tuple[Any, ...], how: str, value: Any) -> Any:
    """A JSON value with one place set, left out, doubled, or under another name."""
    if not place:
        return value
    found = copy.deepcopy(whole)
    at = found
    for step in place[:-1]:
        at = at[step]
    if how == "left out":
        del at[place[-1]]
    elif how == "renamed" and isinstance(at, dict):
        at[str(value)[:50]] = at.pop(place[-1])
    elif how == "doubled" and isinstance(at, list):
        at.append(at[place[-1]])
    else:
        at[place[-1]] = value
    return found


def damaged(whole: Any) -> st.SearchStrategy[bytes]:
    """The bytes of a JSON file with up to three faults in its values, or one in its text."""
    fault = st.tuples(
        st.sampled_from(sorted(places(whole), key=str)),
        st.sampled_from(["set", "set", "set", "left out", "renamed", "doubled"]),
        small,
    )

    def apply(faults: list[tuple[tuple[Any, ...], str, Any]]) -> bytes:
        found = whole
        for place, how, value in faults:
            try:
                found = changed(found, place, how, value)
            except (LookupError, TypeError):  # an earlier fault has taken this place away
                continue
        return json.dumps(found).encode()

    text = json.dumps(whole).encode()
    cut = st.integers(0, len(text)).map(lambda n: text[:n])
    byte = st.tuples(st.integers(0, len(text) - 1), st.binary(max_size=3)).map(
        lambda found: text[: found[0]] + found[1] + text[found[0] + 1 :]
    )
    noise = st.sampled_from([b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf" + text, b"[" * 5000, b"9" * 5000])
    return st.one_of(st.lists(fault, min_size=1, max_size=3).map(apply), cut, byte, noise | st.binary())


def one_clear_line(error: UserError) -> None:
    """What every refusal is: a line that terminals can show, and no message of a library."""
    line = str(error)
    assert line.strip() and "\n" not in line, line
    assert len(line) < 20_000 and "Traceback" not in line and "pydantic" not in line, line[:2000]


def hunt(cases: int, more: bool, what: st.SearchStrategy[Any], look: Callable[[Any], object]) -> None:
    """Looks at so many values, the same ones in every run; with `more`, at many that are new every time (what
    hypothesis prints repeats a failure)."""
    seen = 0

    @settings(
        max_examples=cases * (NIGHTLY if more else 1),
        derandomize=not more,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(what)
    def each(value: Any) -> None:
        nonlocal seen
        seen += 1
        look(value)

    with warnings.catch_warnings():  # a large case must not hide what is wrong with it
        warnings.simplefilter("ignore", HypothesisWarning)
        each()
    assert seen >= cases
