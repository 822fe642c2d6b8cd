"""Finite choices, cost tables over a few of them, resource rows: the general form, and its solvers."""

from __future__ import annotations

from layoutopt.solver.answer import TOLERANCE, AnswerCheck, Solution, Status, Violation, cost, evaluate
from layoutopt.solver.elimination import Elimination, eliminate
from layoutopt.solver.form import (
    Choices,
    ChoiceVariable,
    Intervals,
    Problem,
    ProblemError,
    ResourceRow,
    RowTerm,
    Sparse,
    Term,
    Usage,
)
from layoutopt.solver.solve import solve

TYPE_CHECKING = False  # typing's own takes longer to import than everything else here
if TYPE_CHECKING:
    from typing import Any

    from layoutopt.solver.conflicts import conflict
    from layoutopt.solver.files import load

# fmt: off
__all__ = [
    "TOLERANCE", "AnswerCheck", "ChoiceVariable", "Choices", "Elimination", "Intervals", "Problem",
    "ProblemError", "ResourceRow", "RowTerm", "Solution", "Sparse", "Status", "Term", "Usage", "Violation",
    "conflict", "cost", "eliminate", "evaluate", "load", "solve",
]
# fmt: on


def __getattr__(name: str) -> Any:
    """Loads what few ask for when it is first used."""
    from mesh_tf_core.lazy import load as loaded

    return loaded(__name__, name)
