"""Figures and tables as files, named after the figure or table; several plans are lettered a, b, c."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import letter
from mesh_tf_core.errors import UserError
from mesh_tf_core.files import unwritable, write_file
from reports import figures, tables
from reports.figures.sheet import settings
from reports.reader import plan_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

FORMATS = ("svg", "png", "pdf")
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Beginnings of cells that spreadsheets take for formulas."""
METADATA: Mapping[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
"""No dates: the same plan gives the same file."""


def write_figures(
    plans: Mapping[str, Any] | PlanFile | Sequence[Mapping[str, Any] | PlanFile],
    directory: str | Path,
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """Writes every figure for which the plans have data, one file per format; returns the paths.

    Raises:
      UserError: the format is unknown, or the directory cannot be written.
    """
    unknown = [f for f in formats if f not in FORMATS]
    if unknown:
        raise UserError(f"unknown figure format {unknown[0]!r}; choose one of {', '.join(FORMATS)}")
    found = _plans(plans)
    at = _directory(directory)
    written: list[Path] = []
    for prefix, plan in _lettered(found):
        for chart in figures.ALL:
            if chart.missing(plan):
                continue
            written += _save(chart(plan), at / f"{prefix}{chart.name}", formats)
    for several in (figures.plans_time, figures.plans_memory) if len(found) > 1 else ():
        written += _save(several(found), at / several.__name__, formats)
    return written


def _save(figure: Figure, path: Path, formats: Sequence[str]) -> list[Path]:
    paths = [path.with_suffix(f".{kind}") for kind in formats]
    for kind, to in zip(formats, paths, strict=True):
        drawn = io.BytesIO()
        with settings():
            figure.savefig(drawn, format=kind, dpi=200, metadata=METADATA[kind])
        write_file(to, drawn.getvalue(), "the figure")
    return paths


def write_tables(
    plans: Mapping[str, Any] | PlanFile | Sequence[Mapping[str, Any] | PlanFile], directory: str | Path
) -> list[Path]:
    """Every table that has rows as a CSV file; returns the paths.

    Raises:
      UserError: a directory that cannot be written.
    """
    found = _plans(plans)
    at = _directory(directory)
    written = []
    for prefix, plan in _lettered(found):
        for build in tables.ALL:
            frame = build(plan)
            if len(frame):
                path = at / f"{prefix}{build.__name__}.csv"
                written.append(write_file(path, csv_text(frame), "the table"))
    return written


def csv_text(frame: DataFrame) -> str:
    """A table as CSV, in which no text is a formula.

    Spreadsheets evaluate a cell that begins with =, +, -, @, a tab or a line's end, and names come from other
    people's models and plans. An apostrophe before it makes it text (OWASP, "CSV Injection"). Numbers stay.
    """
    texts = frame.select_dtypes(exclude=["number", "bool"]).columns
    cells = frame.assign(**{name: frame[name].map(_inert) for name in texts})
    return str(cells.rename(columns=_inert).to_csv(index=False))


def _inert(cell: Any) -> Any:
    if not (isinstance(cell, str) and cell.startswith(FORMULAS)):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def _plans(plans: Mapping[str, Any] | PlanFile | Sequence[Mapping[str, Any] | PlanFile]) -> list[PlanFile]:
    many = [plans] if isinstance(plans, Mapping | PlanFile) else list(plans)
    return [plan_of(p, f"plan {i + 1}" if len(many) > 1 else "the plan") for i, p in enumerate(many)]


def _lettered(plans: Sequence[PlanFile]) -> list[tuple[str, PlanFile]]:
    return [(f"{letter(i).lower()}-" if len(plans) > 1 else "", plan) for i, plan in enumerate(plans)]


def _directory(directory: str | Path) -> Path:
    """The folder, made if it is missing; none above it is."""
    path = Path(directory)
    try:
        path.mkdir(exist_ok=True)
    except (OSError, ValueError) as error:
        raise unwritable(path / "*", error, "figures and tables") from None
    return path
