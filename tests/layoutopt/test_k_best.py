"""The K best layouts are those of an enumeration, over all shapes and microbatches, each under one name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from examples.mlp import model as mlp
from layoutopt.optimize.answers.k_best import k_best, program_of
from layoutopt.optimize.driver.search import LayoutSearch
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.subproblems import subproblems
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.mesh_shapes import meshes
from mesh_tf_core.errors import LayoutError
from tests.layoutopt.every_kind import question_of
from tests.marks import by_day
from tests.searching import search

AGREE = 1e-6
STAGES, PARTS = ("layout",), (1, 2)
ALLOWED = SearchSpace(storage=STAGES, recompute=(False,), microbatches=PARTS)


@pytest.fixture(scope="module")
def model() -> mtf.Model:
    return mlp(batch=64, hidden=512, layers=1)


def priced(model: mtf.Model, hardware: str, devices: int) -> Iterator[tuple[float, int, Hashable]]:
    """Seconds, bytes and the program but for the names of axes, of every layout."""
    machine = load_hardware(hardware)
    evaluator = Evaluator(model, machine)
    shapes = meshes(None, devices, 2, machine)
    for space in subproblems(model, shapes, ALLOWED):
        names = space.decided.free
        for chosen in itertools.product(*(space.decided.options[n] for n in names)):
            layout, options = space.decided.read(dict(zip(names, chosen, strict=True)))
            if len(space.mesh.names) == 2 and all(len(axes) in (0, 2) for _, axes in layout.items()):
                continue  # a mesh of one axis has it, too
            try:
                evaluation = evaluator(space.mesh, layout, options)
            except LayoutError:
                continue
            orders = itertools.permutations(space.mesh.names)
            order = min(
                orders, key=lambda o: sorted((n, sorted(map(o.index, axes))) for n, axes in layout.items())
            )
            called = dict(zip(order, space.mesh.names, strict=True))
            alike = {n: tuple(sorted(called[a] for a in axes)) for n, axes in layout.items()}
            program = program_of(evaluator(space.mesh, mtf.Layout(alike), options))
            yield evaluation.cost.step_seconds, evaluation.memory.peak, program


@pytest.mark.parametrize("hardware", by_day(["tpu-v3", "cpu-local"]))
def test_they_are_those_of_an_enumeration(model: mtf.Model, hardware: str) -> None:
    plan = search(
        model, devices=4, hardware=hardware, storage=STAGES, recompute=(False,), microbatches=PARTS, top=8
    )
    every = sorted(set(priced(model, hardware, 4)), key=lambda each: each[:2])
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


@pytest.mark.nightly
@pytest.mark.parametrize("seed", by_day(range(12), every=6, first=4))
@pytest.mark.one_in(2)
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


def test_a_program_is_listed_once(model: mtf.Model) -> None:
    """Where no loop makes a gradient, it is scattered in zero1 as in zero2."""
    asked: dict[str, Any] = {"storage": ("zero1", "zero2"), "recompute": (False,), "microbatches": (1,)}
    mesh, evaluator = mtf.Mesh("data:4"), Evaluator(model, load_hardware("tpu-v3"))
    (problem,) = subproblems(model, [mesh], SearchSpace(**asked, pins={"batch": ("data",)}))
    every, free = [], problem.decided.free
    for chosen in itertools.product(*(problem.decided.options[n] for n in free)):
        with suppress(LayoutError):
            every.append(evaluator(mesh, *problem.decided.read(dict(zip(free, chosen, strict=True)))))
    programs = {program_of(each): each.cost.step_seconds for each in every}
    assert len(programs) < len(every)
    plan = search(model, mesh=mesh, hardware="tpu-v3", pins="batch:data", top=len(programs) + 1, **asked)
    found = [plan.predicted, *(a.predicted for a in plan.alternatives if a.name.startswith("number "))]
    seconds = [p.step_seconds for p in found if p]
    assert seconds == pytest.approx(sorted(programs.values()), rel=1e-9)
