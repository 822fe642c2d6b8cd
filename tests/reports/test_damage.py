"""Plans that nobody wrote on purpose: every damage is one clear line, or a plan that can be shown."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from layoutopt.plan import details, results, schema
from layoutopt.plan.evidence import Validation
from layoutopt.plan.fields import Data, refusal
from layoutopt.plan.schema import plan_file
from mesh_tf_core.errors import UserError
from reports.page.answers import answers, axis_uses, subject
from reports.reader import plan_of, validation_of
from reports.tables import ALL
from tests.reports import sample

WHOLE = sample.full_plan()
WHOLE["details"] |= {
    "source": "model.py",
    "search": {"memory_bytes": 10, "pins": "batch:data", "recompute": [True], "microbatches": [1, 2]},
    "robustness": {"draws": 40, "wins": 33, "worst": 0.06, "runner_up": "greedy", "uncertain": 71},
    "proof": {"verified": True, "words": "1 problem", "problems": [{"mesh": "data:2", "bound": 0.4}]},
}


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value; of a list only its first two items."""
    yield at
    inside = (
        value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    )
    for key, inner in inside:
        yield from paths(inner, (*at, key))


def damaged(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(whole)
    if not path:
        return value
    at = found
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return found


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def is_one_clear_line(error: UserError, what: str) -> None:
    text = str(error)
    assert text.startswith(what) and text.isprintable() and len(text) < 500, text
    assert "again with `layoutopt " in text and "pydantic" not in text, text


@given(st.sampled_from(sorted(paths(WHOLE), key=str)), JSON)
def test_a_damaged_plan_is_refused_or_shown(path: tuple[Any, ...], value: Any) -> None:
    try:
        plan = plan_of(damaged(WHOLE, path, value), "plan 'x'")
    except UserError as error:
        is_one_clear_line(error, "plan 'x'")
        return
    assert plan_file(json.loads(json.dumps(plan.to_json()))) == plan
    assert answers(plan) and subject(plan) and len(axis_uses(plan)) == len(plan.mesh)
    for table in ALL:
        found = inspect.unwrap(table)(plan)
        assert all(len(row) == len(found.columns) for row in found.rows)


@given(st.sampled_from(sorted(paths(sample.validation()), key=str)), JSON)
def test_a_damaged_validation_is_refused_or_shown(path: tuple[Any, ...], value: Any) -> None:
    try:
        found = validation_of(damaged(sample.validation(), path, value))
    except UserError as error:
        is_one_clear_line(error, "the validation")
        return
    assert isinstance(found, Validation) and all(r.measured_seconds > 0 for r in found.timed)


@pytest.mark.parametrize(
    "path",
    [
        *((name,) for name in sample.plain_plan()),
        *(("predicted", name) for name in sample.plain_plan()["predicted"]),
        *(("solver", name) for name in sample.plain_plan()["solver"]),
        *(("alternatives", 0, name) for name in sample.plain_plan()["alternatives"][0]),
    ],
    ids=str,
)
def test_null_and_absence_are_the_same(path: tuple[Any, ...]) -> None:
    null = damaged(sample.plain_plan(), path, None)
    absent = copy.deepcopy(null)
    at = absent
    for step in path[:-1]:
        at = at[step]
    del at[path[-1]]
    outcomes = []
    for each in (null, absent):
        try:
            outcomes.append(plan_of(each).to_json())
        except UserError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


KINDS = sorted(
    {
        kind
        for module in (details, results, schema)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Data) and kind not in (Data, results.CommandResult)
    },
    key=lambda kind: kind.__name__,
)


@settings(max_examples=20)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.one_in(3)
def test_nothing_but_its_own_kind_fits_a_schema(kind: type[Data], data: st.DataObject) -> None:
    fields = st.fixed_dictionaries({}, optional=dict.fromkeys(kind.model_fields, JSON))
    value = data.draw(fields | JSON)
    try:
        found = kind.model_validate(value)
    except ValidationError as error:
        is_one_clear_line(refusal(error, "the file", "write it again with `layoutopt x`"), "the file")
        return
    assert kind.model_validate(found.to_json()) == found


def test_a_layout_is_checked_though_its_details_are_damaged() -> None:
    """What is checked last was not, for the details had been refused before; the fuzz suite found it."""
    found = damaged(damaged(WHOLE, ("details", "by_kind"), []), ("layout", "batch"), ["nowhere"])
    told: list[str] = []
    with pytest.raises(UserError, match="splits over 'nowhere', which is not an axis"):
        plan_file(found, "plan 'x'", told.append)
    assert len(told) == 1 and "details.by_kind" in told[0]


def test_what_a_newer_version_adds_is_kept() -> None:
    plan = sample.full_plan() | {"later": {"x": 1}}
    plan["details"]["lines"][0]["cache"] = "warm"
    found = plan_of(plan).to_json()
    assert found["later"] == {"x": 1} and found["details"]["lines"][0]["cache"] == "warm"
