"""Figures, tables and HTML pages of plain result data.

    import reports

    plan = reports.read_plan("plan.json")
    reports.write_report([plan], "report.html")
    reports.figures.step_time(plan)            # a matplotlib Figure
    reports.tables.layouts(plan)               # a pandas frame
    reports.write_figures(plan, "figures/")
    reports.write_tables(plan, "tables/")

Names are loaded on first use; none of them loads matplotlib or pandas before it is called.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes longer to import than everything else here
if TYPE_CHECKING:
    from typing import Any

    from reports import figures, tables
    from reports.files import write_figures, write_tables
    from reports.page.render import report_html, write_report
    from reports.page.size import size_html, write_size_report
    from reports.reader import FORMAT, plan_of, read_plan

# fmt: off
__all__ = [
    "FORMAT", "figures", "plan_of", "read_plan", "report_html", "size_html", "tables", "write_figures",
    "write_report", "write_size_report", "write_tables",
]
# fmt: on


def __getattr__(name: str) -> Any:
    from mesh_tf_core.lazy import load

    return load(__name__, name)
