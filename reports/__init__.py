"""Figures, tables and HTML pages of plain result data.

    import reports

    plan = reports.read_plan("plan.json")
    reports.write_report([plan], "report.html")
    reports.figures.step_time(plan)            # a matplotlib Figure
    reports.tables.layouts(plan)               # a pandas frame
    reports.write_figures(plan, "figures/")
    reports.write_tables(plan, "tables/")

Importing this loads neither matplotlib nor pandas.
"""

from __future__ import annotations

from reports import figures, tables
from reports.files import write_figures, write_tables
from reports.page.render import report_html, write_report
from reports.page.size import size_html, write_size_report
from reports.reader import FORMAT, plan_of, read_plan

__all__ = [
    "FORMAT",
    "figures",
    "plan_of",
    "read_plan",
    "report_html",
    "size_html",
    "tables",
    "write_figures",
    "write_report",
    "write_size_report",
    "write_tables",
]
