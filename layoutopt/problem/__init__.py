"""Finite choices, cost tables over a few of them, resource rows: the general form of layout problems, and its solvers."""

from __future__ import annotations

from layoutopt.problem.answer import Evaluation, Solution, Status, Violation, evaluate
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
from layoutopt.problem.solve import solve

__all__ = [
    "Choices",
    "Entry",
    "Evaluation",
    "Intervals",
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
    "evaluate",
    "solve",
]
