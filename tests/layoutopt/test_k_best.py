"""The K best layouts are those of an enumeration, over all shapes and microbatches, each under one name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from examples.mlp import model as mlp
from layoutopt.optimize.evaluator import Evaluator
from layoutopt.optimize.k_best import k_best
from layoutopt.optimize.search import LayoutSearch
from layoutopt.optimize.subproblems import subproblems
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.mesh_shapes import meshes
from mesh_tf_core.errors import LayoutError
from tests.layoutopt.every_kind import question_of
from tests.marks import by_day
from tests.searching import search

AGREE = 1e-6
STAGES, PARTS = ("layout", "zero3"), (1, 2)
ALLOWED = SearchSpace(storage=STAGES, recompute=(False,), microbatches=PARTS)


@pytest.fixture(scope="module")
def model() -> mtf.Model:
    return mlp(batch=64, hidden=512, layers=1)


def priced(model: mtf.Model, hardware: str, devices: int) -> Iterator[tuple[float, int, str]]:
    """Seconds, bytes and what is decided but for the names of axes, of every layout."""
    machine = load_hardware(hardware)
    evaluator = Evaluator(model, machine)
    shapes = meshes(None, devices, 2, machine)
    for space in subproblems(model, shapes, ALLOWED):
        names = space.decided.free
        for chosen in itertools.product(*(space.decided.options[n] for n in names)):
            layout, options = space.decided.read(dict(zip(names, chosen, strict=True)))
            try:
                evaluation = evaluator(space.mesh, layout, options)
            except LayoutError:
                continue
            orders = itertools.permutations(space.mesh.names)
            called = min(
                str(sorted((n, sorted(order.index(a) for a in axes)) for n, axes in layout.items()))
                for order in orders
            )
            decided = f"{sorted(s for _, s in space.mesh.axes)} {called} {options}"
            yield evaluation.cost.step_seconds, evaluation.memory.peak, decided


@pytest.mark.parametrize("hardware", by_day(["tpu-v3", "cpu-local"]))
def test_they_are_those_of_an_enumeration(model: mtf.Model, hardware: str) -> None:
    plan = search(
        model, devices=4, hardware=hardware, storage=STAGES, recompute=(False,), microbatches=PARTS, top=8
    )
    every = sorted(set(priced(model, hardware, 4)))
    found = [plan.predicted, *(a.predicted for a in plan.alternatives if a.name.startswith("number "))]
    assert [p.step_seconds for p in found if p] == pytest.approx([s for s, _, _ in every[:8]], rel=1e-9)


def test_of_the_least_memory_they_hold_no_more(model: mtf.Model) -> None:
    plan = search(
        model,
        mesh="a:2;b:2",
        storage=STAGES,
        recompute=(False,),
        microbatches=PARTS,
        top=3,
        objective="memory",
    )
    others = [a.predicted for a in plan.alternatives if a.name.startswith("number ")]
    for other in others:
        assert other is not None
        assert other.peak_memory_bytes == plan.predicted.peak_memory_bytes
        assert other.step_seconds >= plan.predicted.step_seconds
    assert not any("tables sum" in note for note in plan.data.notes)


def distinct(points: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """Seconds and bytes, each once: a decision that changes nothing of a program makes another layout."""
    found: list[tuple[float, int]] = []
    for seconds, peak in sorted(points):
        if not any(abs(seconds - s) <= AGREE * s and peak == p for s, p in found):
            found.append((seconds, peak))
    return found


@pytest.mark.parametrize("seed", by_day(range(12), every=6, first=4))
def test_of_every_kind_they_are_those_of_an_enumeration(seed: int) -> None:
    """All kinds of decisions are free at once; a random model, mesh and machine."""
    question = question_of(seed, 24)
    every = distinct((e.cost.step_seconds, e.memory.peak) for e in question.evaluated())
    found = LayoutSearch(question.request(math.inf, "time"))
    if not every:
        with pytest.raises(mtf.InfeasibleError):
            found.run(question.problems)
        return
    best = found.run(question.problems)
    others = itertools.islice(k_best(found, best), 7)
    got = distinct((each.seconds, each.peak) for each in (best, *others))
    assert got == [(pytest.approx(s, rel=AGREE), peak) for s, peak in every[: len(got)]]
    assert len(got) > 1 or len(every) == 1
