"""Tables of a plan as pandas frames: `reports.tables.layouts(plan)`. Importing this loads no pandas.

Columns hold plain numbers in seconds and bytes, so that a frame or its CSV file can be worked with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from layoutopt.plan.schema import PlanFile
from reports.reader import PlanLike, plan_of
from reports.tables import rows

if TYPE_CHECKING:
    from pandas import DataFrame


def _frame(plan: PlanLike, build: Callable[[PlanFile], rows.DataTable]) -> DataFrame:
    import pandas as pd

    found = build(plan_of(plan))
    return pd.DataFrame(list(found.rows), columns=list(found.columns))


def summary(plan: PlanLike) -> DataFrame:
    """What was chosen and what it costs, a row per fact."""
    return _frame(plan, rows.summary)


def layouts(plan: PlanLike) -> DataFrame:
    """The answer and its alternatives with their prices."""
    return _frame(plan, rows.layouts)


def dims(plan: PlanLike) -> DataFrame:
    """Dimensions, their axes and the size left on a device."""
    return _frame(plan, rows.dims)


def variables(plan: PlanLike) -> DataFrame:
    """Every variable and the piece that a device holds."""
    return _frame(plan, rows.variables)


def operations(plan: PlanLike) -> DataFrame:
    """Operations by what they add to the step."""
    return _frame(plan, rows.operations)


def collectives(plan: PlanLike) -> DataFrame:
    """Collectives with the operation that causes them."""
    return _frame(plan, rows.collectives)


def time_by_kind(plan: PlanLike) -> DataFrame:
    """Seconds by kind of work, a row per layout and kind."""
    return _frame(plan, rows.time_by_kind)


def memory_timeline(plan: PlanLike) -> DataFrame:
    """Bytes held at every instruction."""
    return _frame(plan, rows.memory_timeline)


def peak(plan: PlanLike) -> DataFrame:
    """Tensors held at the peak."""
    return _frame(plan, rows.peak)


def frontier(plan: PlanLike) -> DataFrame:
    """Layouts that no other beats in time and memory both, with the knees."""
    return _frame(plan, rows.frontier)


def sensitivity(plan: PlanLike) -> DataFrame:
    """The best step time as one factor changes."""
    return _frame(plan, rows.sensitivity)


def validation(plan: PlanLike) -> DataFrame:
    """Predicted and measured seconds by layout."""
    return _frame(plan, rows.validation)


def calibration(plan: PlanLike) -> DataFrame:
    """Measurements of the calibration with what the fit says."""
    return _frame(plan, rows.calibration)


def assumptions(plan: PlanLike) -> DataFrame:
    """Every hardware number with its source and date."""
    return _frame(plan, rows.assumptions)


ALL: tuple[Callable[[PlanLike], DataFrame], ...] = (
    summary,
    layouts,
    dims,
    variables,
    operations,
    collectives,
    time_by_kind,
    memory_timeline,
    peak,
    frontier,
    sensitivity,
    validation,
    calibration,
    assumptions,
)
"""Every table, in the order of the report."""

__all__ = ["ALL", "PlanLike", *(each.__name__ for each in ALL)]
