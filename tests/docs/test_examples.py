"""The examples in docstrings run and print what they show; the names that people meet first have one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("layoutopt", "costmodels", "mesh_tf_core", "mesh_tf_core.layers", "layoutopt.solver", "reports")
FIRST = {
    "layoutopt": "Limits Plan SearchSpace cost explain from_huggingface from_jax lint load_plan search size",
    "costmodels": "Hardware collective_seconds compute_seconds hardware_names load_hardware place",
    "mesh_tf_core": "Adam Dim DiLoCo Eager Graph Layout Mesh Model Options Shape Tensor Trainer attention "
    "einsum gradients lower reduce_sum rename scan softmax_cross_entropy",
    "mesh_tf_core.layers": "Dense",
    "reports": "write_report",
}
"""Package -> the names that people meet first."""


def examples() -> Iterator[tuple[str, str]]:
    """(package, name) of every public name whose docstring has an example."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            if ">>>" in (inspect.getdoc(getattr(module, name)) or ""):
                yield package, name


def failures(text: str, name: str) -> list[str]:
    """The reports of the examples of a docstring that do not print what they show."""
    found: list[str] = []
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    doctest.DocTestRunner(verbose=False).run(test, out=found.append)
    assert test.examples
    return found


@pytest.mark.parametrize(("package", "name"), [*examples()])
def test_the_example_prints_what_it_shows(
    package: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(importlib.import_module(package), name)) or ""
    assert not failures(text, f"{package}.{name}")


def test_the_names_that_people_meet_first_have_an_example() -> None:
    first = {(package, name) for package, names in FIRST.items() for name in names.split()}
    assert len(first) >= 30
    assert first - {*examples()} == set()


def test_a_wrong_example_is_seen() -> None:
    assert failures(">>> 1 + 1\n3", "sum")
