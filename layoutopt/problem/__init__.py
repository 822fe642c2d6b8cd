"""Finite choices, cost tables over a few of them, resource rows: the general form, and its solvers."""

from __future__ import annotations

from layoutopt.problem.answer import TOLERANCE, Evaluation, Solution, Status, Violation, cost, evaluate
from layoutopt.problem.conflict import Conflict, Facts, conflict
from layoutopt.problem.elimination import Elimination, eliminate
from layoutopt.problem.files import dump, load
from layoutopt.problem.form import (
    Choices,
    Entry,
    Intervals,
    Problem,
    ProblemError,
    Row,
    Sparse,
    Term,
    Usage,
    Variable,
)
from layoutopt.problem.several import Frontier, Point, pareto, top_k
from layoutopt.problem.solve import solve

__all__ = [
    "TOLERANCE",
    "Choices",
    "Conflict",
    "Elimination",
    "Entry",
    "Evaluation",
    "Facts",
    "Frontier",
    "Intervals",
    "Point",
    "Problem",
    "ProblemError",
    "Row",
    "Solution",
    "Sparse",
    "Status",
    "Term",
    "Usage",
    "Variable",
    "Violation",
    "conflict",
    "cost",
    "dump",
    "eliminate",
    "evaluate",
    "load",
    "pareto",
    "solve",
    "top_k",
]
