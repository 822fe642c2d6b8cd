"""Tables of a plan as pandas frames: `reports.tables.layouts(plan)`. Importing this loads no pandas.

Columns hold plain numbers in seconds and bytes, so that a frame or its CSV file can be worked with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

from layoutopt.plan.schema import PlanFile
from reports.reader import PlanLike, plan_of
from reports.tables import rows
from reports.views import layouts as tables
from reports.views.view import Cell, View

if TYPE_CHECKING:
    from pandas import DataFrame

Frame = Callable[[PlanLike], "DataFrame"]


def frame(view: View) -> DataFrame:
    """A view's plain values."""
    import pandas as pd

    shown = [i for i, column in enumerate(view.columns) if column.shown_on("data")]
    cells = [[row[i] for i in shown] for row in view.rows]
    values = [[c.value if isinstance(c, Cell) else c for c in row] for row in cells]
    return pd.DataFrame(values, columns=[view.columns[i].key for i in shown])


ALL: list[Frame] = []
"""Every table, in the order of the report."""


def _frame(build: Callable[[PlanFile], View]) -> Frame:
    @wraps(build)
    def made(plan: PlanLike) -> DataFrame:
        return frame(build(plan_of(plan)))

    ALL.append(made)
    return made


summary = _frame(rows.summary)
layouts = _frame(tables.layouts)
dims = _frame(rows.dims)
variables = _frame(rows.variables)
operations = _frame(rows.operations)
collectives = _frame(rows.collectives)
time_by_kind = _frame(rows.time_by_kind)
memory_timeline = _frame(rows.memory_timeline)
peak = _frame(rows.peak)
frontier = _frame(tables.frontier)
sensitivity = _frame(rows.sensitivity)
validation = _frame(rows.validation)
calibration = _frame(rows.calibration)
assumptions = _frame(rows.assumptions)

__all__ = ["ALL", "PlanLike", "frame", *(each.__name__ for each in ALL)]
