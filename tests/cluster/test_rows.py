"""Every process feeds the rows that its devices read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mesh_tf_core as mtf
from layoutopt.models.loading import load_model
from mesh_tf_core.engines.feeds import rows_of, widened
from tests.cluster.job import ROOT
from tests.engines.programs import language_model


@pytest.mark.parametrize(
    ("mesh", "layout", "ranks", "rows"),
    [
        ("data:4", "batch:data", (2, 3), [4, 5, 6, 7]),
        ("data:2;model:2", "batch:data;d_ff:model", (2, 3), [4, 5, 6, 7]),
        ("model:2;data:2", "batch:data;d_ff:model", (2, 3), list(range(8))),
        ("a:2;b:2", "batch:b+a", (0, 1), [0, 1, 4, 5]),
        ("a:2;b:2", "batch:a+b", (0, 1), [0, 1, 2, 3]),
        ("data:4", "length:data", (0, 1), list(range(8))),
    ],
)
def test_rows_of_a_layout(mesh: str, layout: str, ranks: tuple[int, ...], rows: list[int]) -> None:
    program = language_model(mesh, layout, length=8)
    assert rows_of(program, "batch", ranks).tolist() == rows


def test_rows_of_microbatches() -> None:
    """Each of them is split, so a process reads a piece of every one."""
    g = mtf.Graph()
    b, d = mtf.Dim("batch", 8), mtf.Dim("d", 2)
    y = g.input("x", [b, d], "float32") * g.variable("w", [d], mtf.ONES)
    model = mtf.Model(mtf.reduce_mean(mtf.square(y)))
    program = model.lower(mtf.Mesh("data:2"), mtf.Layout("batch:data"), mtf.Options(microbatches=2))
    assert rows_of(program, "batch", [0]).tolist() == [0, 1, 4, 5]
    assert rows_of(program, "batch", [1]).tolist() == [2, 3, 6, 7]


def test_a_part_of_a_batch_stands_in_its_rows() -> None:
    whole = np.arange(12.0).reshape(6, 2)
    rows = np.array([1, 4])
    found = widened(whole[rows], rows, 6)
    assert found.shape == whole.shape and found.dtype == whole.dtype
    np.testing.assert_array_equal(found[rows], whole[rows])


DATA = """
from examples.mlp import data as digits
from examples.mlp import model


def data(batch=64, rows=None, **others):
    for whole in digits(batch):
        yield {name: array[ROWS] for name, array in whole.items()}
"""


def test_data_makes_the_rows_that_it_is_asked_for(tmp_path: Path) -> None:
    rows = np.array([0, 2, 5])
    file = tmp_path / "some.py"
    file.write_text(DATA.replace("ROWS", "... if rows is None else rows"), encoding="utf-8")
    some = load_model(str(file))
    whole = next(some.data())
    found = next(some.data(rows=rows))
    np.testing.assert_array_equal(found["image"], whole["image"][rows])
    file = tmp_path / "all.py"
    file.write_text(DATA.replace("ROWS", "..."), encoding="utf-8")
    text = r"'image' has shape \(64, 64\), but the shape of the 3 requested rows is \(3, 64\)"
    with pytest.raises(mtf.UserError, match=text):
        next(load_model(str(file)).data(rows=rows))
    plain = load_model(str(ROOT / "examples/mlp.py"))
    assert next(plain.data(rows=rows))["image"].shape == (64, 64)
