"""Markers of tests, made from the records of decisions."""

from __future__ import annotations

import pytest

from layoutopt.space.decisions import ARGUMENTS, FEATURES, KINDS
from layoutopt.space.kind import Decision
from tests.marks import about, features


def test_every_field_and_feature_has_a_marker() -> None:
    assert {*features()} == {*ARGUMENTS, *FEATURES}


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_of_a_kind_has_its_markers(kind: type[Decision], request: pytest.FixtureRequest) -> None:
    assert {*kind.asks} <= {*about(request.node)}


def test_a_text_names_what_a_test_is_about() -> None:
    words = ["test_pipelines.py", "schedule=zb-h1", "collective matmul", "all_to_all on elsewhere", "zero3"]
    named = [{name for name, pattern in features().items() if pattern.search(each)} for each in words]
    assert named[0] == {"pipeline"} and {"schedule", "zb-h1"} <= named[1]
    assert named[2] == {"collective_matmul"} and named[3] == {"elsewhere", "sequence"}
    assert named[4] == {"zero"}
