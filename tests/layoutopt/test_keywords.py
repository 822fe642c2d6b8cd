"""Refusals name keywords to Python, and options to the command line (`tests/cli`)."""

from __future__ import annotations

import re
from typing import Any

import pytest

import layoutopt
import mesh_tf_core as mtf
from examples.mlp import model as mlp
from layoutopt.optimize.entry import search
from layoutopt.space.keywords import in_keywords


@pytest.mark.parametrize(
    ("said", "in_python"),
    [
        ("--max-axes 9: a search supports at most 4 axes", "max_axes=9: a search supports at most 4 axes"),
        ("--top -1: needs at least 1", "top=-1: needs at least 1"),
        (
            "give a mesh (--mesh 'data:2') instead of --devices",
            "give a mesh (mesh='data:2') instead of devices",
        ),
        ("--pin heads:model, or --set layers=4", "pins heads:model, or hyperparameter layers=4"),
        (
            "`layoutopt calibrate --mesh data:2` measures it",
            "`layoutopt calibrate --mesh data:2` measures it",
        ),
        ("a--b - --, 'x'--", "a--b - --, 'x'--"),
        ("(--allow everything --diloco AXIS)", "(allow=everything diloco=AXIS)"),
    ],
)
def test_options_as_keywords(said: str, in_python: str) -> None:
    assert in_keywords(said) == in_python


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"elsewhere": ["foo"]}, "elsewhere foo: no operation has this dimension"),
        ({"top": 0}, "top is 0; give a whole number of at least 1"),
        ({"devices": 8}, "give either a mesh (mesh='data:2;model:4') or a number of devices (devices=8)"),
    ],
)
def test_a_search_from_python(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(mtf.UserError, match=f"^{re.escape(said)}"):
        layoutopt.search(mlp(), "data:2", **asked)


def test_what_an_error_carries_stays() -> None:
    with pytest.raises(mtf.InfeasibleError) as found:
        layoutopt.search(mlp(), "data:2", memory=1000)
    assert found.value.nearest.predicted.peak_memory_bytes > 1000 and found.value.exit_code == 3
    assert layoutopt.search.__wrapped__ is search
