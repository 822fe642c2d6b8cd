"""The tables of features that exclude each other: each row is refused in the one sentence."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from layoutopt.space import exclusions as of_search
from mesh_tf_core.exclusions import EXCLUDED, Exclusion, refuse

ROWS = (*EXCLUDED, *of_search.EXCLUDED)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.first} and {row.second}")
def test_both_of_a_row_are_refused(row: Exclusion) -> None:
    said = f"this cannot be combined with that: {row.why}; remove one of them"
    with pytest.raises(mtf.LayoutError) as error:
        refuse({row.second: "that", row.first: "this"}, ROWS, mtf.LayoutError)
    assert str(error.value) == said
    for one in (row.first, row.second):
        refuse({one: "this"}, ROWS)
        refuse({**dict.fromkeys((row.first, row.second), ""), one: "this"}, ROWS)


def test_a_pair_stands_in_one_row() -> None:
    assert len({frozenset(row[:2]) for row in ROWS}) == len(ROWS)


def test_stages_of_two_loops_in_a_schedule_of_one() -> None:
    """As `Model` asks it of a layout."""
    g = mtf.Graph()
    batch, d, first, second = mtf.Dim("batch", 4), mtf.Dim("d", 4), mtf.Dim("first", 2), mtf.Dim("second", 2)

    def layer(name: str, h: mtf.Tensor) -> mtf.Tensor:
        return h * g.variable(name, [d], mtf.Normal(0.1))

    h = mtf.scan(lambda h: layer("one", h), g.input("x", [batch, d], "float32"), first)
    h = mtf.scan(lambda h: layer("two", h), h, second)
    model = mtf.Model(mtf.reduce_mean(mtf.square(h)), mtf.SGD(0.1))
    options = mtf.Options(microbatches=2, schedule="1f1b")
    with pytest.raises(mtf.UserError, match="split only one of these"):
        model.lower(mtf.Mesh("p:2;q:2"), mtf.Layout("first:p;second:q"), options)
