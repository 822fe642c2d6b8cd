"""What a plan claims: OPTIMAL only where the tables that were proven on and the lowered program agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import layoutopt.optimize.answers.planning as planning
import mesh_tf_core as mtf
from costmodels.pricing.pricer import Pricer
from examples.mlp import model as mlp
from layoutopt.formulation.memory_constraints import MemoryConstraints
from layoutopt.optimize.evaluation.evaluator import TablePrices
from layoutopt.plan.build import Plan
from layoutopt.plan.units import gap_text, seconds_text
from layoutopt.solver import TOLERANCE, ResourceRow, RowTerm
from layoutopt.space.kind import Decision
from layoutopt.space.splits import Split
from layoutopt.space.storage import Storage
from mesh_tf_core.ir.program import Program
from mesh_tf_core.lower.verify import ProgramError
from tests.layoutopt.models import EXAMPLES
from tests.searching import search

ASKED: dict[str, Any] = {
    "mesh": "data:2",
    "hardware": "tpu-v3",
    "storage": ("layout", "zero1"),
    "recompute": (False,),
    "microbatches": (1,),
}


WIDER: dict[str, Any] = {"mesh": "data:2;model:2", "hardware": "tpu-v3", "microbatches": (1,)}


def small() -> mtf.Model:
    return mlp(batch=8, hidden=16, layers=1)


def told(
    monkeypatch: pytest.MonkeyPatch,
    factor: float,
    model: Callable[[], mtf.Model] = small,
    asked: dict[str, Any] = ASKED,
    **more: Any,
) -> tuple[Plan, float]:
    """A plan where tables come to `factor` times what programs cost, and the least seconds there are."""
    least = search(model(), **asked).predicted.step_seconds
    true = Pricer.total
    monkeypatch.setattr(Pricer, "total", lambda self, cost: factor * true(self, cost))
    return search(model(), **asked, **more), least


@pytest.mark.parametrize("factor", [1.01, 0.99])
@pytest.mark.one_in(2)
def test_where_tables_and_program_differ_nothing_is_called_optimal(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    plan, least = told(monkeypatch, factor, EXAMPLES["mlp"], WIDER)
    said = plan.solver
    assert said.status == "FEASIBLE"
    assert 0 < said.bound <= least * (1 + 1e-12)
    assert said.gap == pytest.approx((said.objective - said.bound) / said.objective)
    if factor < 1:  # the tables' bound holds; else only what no program can be below does
        assert 0.009 <= said.gap <= 0.012
    assert any("the search's cost tables predict" in note for note in plan.data.notes)
    condition = "the cost tables predict at most 1.2 % more than the lowered program"
    notes = [note for note in plan.data.notes if condition in note]
    assert bool(notes) == (factor > 1)
    for note in notes:  # the gap under the condition is in the plan too, beside the one that holds without it
        assert said.likely_gap == pytest.approx(1 - said.likely_bound / said.objective) and said.gap > 0.1
        least, gap = seconds_text(said.likely_bound), gap_text(said.likely_gap)
        assert f"takes less than {least} and the gap is {gap}" in note, "as the line of the proof"
    assert (said.likely_gap is None) == (factor < 1)


def test_tables_above_the_program_of_a_layout_that_nobody_evaluated_prove_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best = search(small(), **ASKED)
    true = TablePrices.seconds

    def seconds(self: TablePrices, layout: mtf.Layout, options: mtf.Options) -> float:
        return true(self, layout, options) * (1 if layout == best.layout else 1.01)

    monkeypatch.setattr(TablePrices, "seconds", seconds)
    plan = search(small(), **ASKED)
    assert plan.solver.status == "FEASIBLE" and plan.solver.gap > 0.1
    assert plan.solver.likely_gap == pytest.approx(1 - 1 / 1.01)
    assert any("more time than the lowered program of another layout" in note for note in plan.data.notes)


def counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows count twice what they should."""
    rows = MemoryConstraints._row

    def more(self: MemoryConstraints, *about: Any) -> ResourceRow:
        found = rows(self, *about)
        return replace(found, entries=found.entries * 2)

    monkeypatch.setattr(MemoryConstraints, "_row", more)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_memory_rows_above_the_program_of_an_evaluated_layout_prove_nothing(
    monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    asked = {**WIDER, "memory": search(small(), **WIDER).predicted.peak_memory_bytes - 1}
    asked["objective"] = objective
    assert search(small(), **asked).solver.status == "OPTIMAL"
    counted_twice(monkeypatch)
    plan = search(small(), **asked)
    assert plan.solver.status == "FEASIBLE" and plan.solver.gap > 0
    assert any("memory rows count" in note for note in plan.data.notes)


@pytest.mark.parametrize("kind", [Split, Storage])
@pytest.mark.one_in(2)
def test_rows_are_held_against_layouts_that_no_solver_proposes(
    monkeypatch: pytest.MonkeyPatch, kind: type[Decision]
) -> None:
    asked = {**WIDER, "memory": search(small(), **WIDER).predicted.peak_memory_bytes - 1}
    asked |= {"storage": ("layout", "zero1")}
    best = search(small(), **asked)
    rows = MemoryConstraints._row

    def more(self: MemoryConstraints, *about: Any) -> ResourceRow:
        """What differs from the answer in a decision counts as too large, so no solver proposes it."""
        found, own = rows(self, *about), self.decided.write(best.layout, best.options)
        more = [
            RowTerm((i,), np.array([1e9 * (o != own[n]) for o in self.decided.options[n]]))
            for i, n in enumerate(self.names)
            if n in self.decided.of(kind)
        ]
        return replace(found, entries=(*found.entries, *more))

    monkeypatch.setattr(MemoryConstraints, "_row", more)
    assert search(small(), **asked).solver.status == "FEASIBLE"


def test_that_nothing_fits_is_not_proven_by_rows_above_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    counted_twice(monkeypatch)
    with pytest.raises(mtf.InfeasibleError, match=r"memory rows count .* not proven"):
        search(small(), **ASKED, memory=9e3, alternatives=True)


def test_within_the_tolerance_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = told(monkeypatch, 1 + TOLERANCE / 4)
    assert plan.solver.status == "OPTIMAL" and plan.solver.gap <= TOLERANCE
    assert any("the search's cost tables predict" in note for note in plan.data.notes)


def test_bytes_are_proven_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = told(monkeypatch, 1.01, objective="memory")
    assert plan.solver.status == "OPTIMAL" and plan.solver.bound == plan.predicted.peak_memory_bytes


def test_an_answer_by_name_is_held_against_the_tables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = told(monkeypatch, 1.5)  # by its tables nothing is as fast as the programs of layouts by name
    assert plan.solver.status == "FEASIBLE" and plan.solver.gap > 0
    assert any("the search's cost tables predict" in note for note in plan.data.notes)


def test_the_program_of_the_answer_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Program] = []

    def verify(program: Program) -> Program:
        checked.append(program)
        raise ProgramError("a planted fault")

    monkeypatch.setattr(planning, "verify", verify)
    with pytest.raises(ProgramError, match="a planted fault"):
        search(small(), **ASKED)
    assert len(checked) == 1


@pytest.mark.parametrize("check", [True, False])
def test_whole_programs_are_checked_where_they_are_lowered(
    monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    def refused(program: Program) -> Program:
        raise ProgramError("a planted fault")

    # The package's `lower` is the function, so its modules are reached by their names.
    monkeypatch.setattr(import_module("mesh_tf_core.lower.pipeline"), "verify", refused)
    model, mesh = small(), mtf.Mesh("x:2")
    if check:
        with pytest.raises(ProgramError, match="a planted fault"):
            model.lower(mesh, mtf.Layout())
    else:
        assert model.lower(mesh, mtf.Layout(), check=False).code
