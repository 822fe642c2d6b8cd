"""Plans in notebooks. Reports are imported here on first use, so a search does not load them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any


class Shown:
    """A result that a notebook shows as its words above its frame."""

    @property
    def data(self) -> Any:
        """The object that the command of the same name prints as JSON."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        found: dict[str, Any] = self.data.to_json()
        return found

    def to_frame(self) -> Any:
        """As a pandas frame."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.to_frame().to_html(index=False, max_rows=12)}"


def card(plan: Any) -> str:
    """A plan's first screen for a notebook, as HTML."""
    from reports.page.card import card_html

    return card_html(plan)


def frame(plan: Any) -> Any:
    """The answer and its alternatives as a frame."""
    import reports

    return reports.tables.layouts(plan)


def report(plans: Sequence[Any], path: str | Path | None, validation: Mapping[str, Any] | None) -> str:
    """The page of some plans; written where a path is given."""
    import reports

    if path is not None:
        reports.write_report(plans, path, validation)
    return reports.report_html(plans, validation)


def table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a frame."""
    import pandas as pd

    return pd.DataFrame([dict(row) for row in rows])
