"""Renders plans as one page of HTML that needs no network and no other file."""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import glued, layout_text, letter, mesh_option, mesh_text, plural, shorten
from mesh_tf_core.errors import UserError
from mesh_tf_core.files import write_file
from reports import theme
from reports.page import compare
from reports.page.answers import answers, axis_uses, run, subject
from reports.page.cells import grid
from reports.page.sections import sections
from reports.reader import plan_of, validation_of

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

LONGEST = 1200
"""Number of characters on the first screen that can be copied."""
MOST = 12
"""Number of plans that can be distinguished side by side."""


def report_html(
    plans: Sequence[Mapping[str, Any] | PlanFile],
    validation: Mapping[str, Any] | None = None,
    written: str | None = None,
) -> str:
    """Renders the report of one plan, or of several side by side.

    Args:
      plans: dicts of plan files (`layoutopt-plan/1`, with an optional `details`), or read plans.
      validation: output of `layoutopt validate --json`, for plans without one.
      written: the date at the end; None: today, '': no date.

    Raises:
      UserError: there are no plans, too many, or one that cannot be read.
    """
    found = _read(plans, validation)
    date = datetime.date.today().isoformat() if written is None else written
    return environment().get_template("report.html.j2").render(_context(found, date))


def write_report(
    plans: Sequence[Mapping[str, Any] | PlanFile],
    path: str | Path,
    validation: Mapping[str, Any] | None = None,
) -> None:
    """Writes `report_html` to a file.

    Raises:
      UserError: as `report_html`, or the file cannot be written.

    Example:
      >>> import layoutopt, reports
      >>> from examples import mlp
      >>> plan = layoutopt.search(mlp.model(), mesh="data:4", hardware="tpu-v5e")
      >>> reports.write_report([plan], "report.html")
    """
    write_file(path, report_html(plans, validation), "the report")


def _read(plans: Sequence[Mapping[str, Any] | PlanFile], checked: Mapping[str, Any] | None) -> list[PlanFile]:
    if isinstance(plans, Mapping | PlanFile):
        plans = [plans]
    if not plans:
        raise UserError(
            "a report requires at least one plan, but no plan was given; write a plan with `layoutopt "
            "search MODEL --out FILE`"
        )
    if len(plans) > MOST:
        raise UserError(
            f"a report shows at most {MOST} plans side by side, but {len(plans)} were given; write "
            "several reports"
        )
    found = [plan_of(p, f"plan {letter(i)}" if len(plans) > 1 else "the plan") for i, p in enumerate(plans)]
    if checked is None:
        return found
    measured = validation_of(checked)
    return [p if p.details.validation else p.with_details(validation=measured) for p in found]


def _context(plans: list[PlanFile], written: str) -> dict[str, Any]:
    first, one = plans[0], len(plans) == 1
    names = {p.model.name for p in plans}
    heading = shorten(first.model.name, 160) if len(names) == 1 else plural(len(plans), "plan")
    return {
        "one": one,
        "title": f"{shorten(heading, 80)} · layoutopt report",
        "heading": heading,
        "subject": subject(first) if one else f"{plural(len(plans), 'plan')} side by side",
        "uses": axis_uses(first),
        "answers": answers(first),
        "run": run(first) if one else (),
        "typed": _typed(first),
        "verdict": compare.verdict(plans),
        "plans": []
        if len(names) == 1
        else [
            {"letter": letter(i), "name": shorten(p.model.name, 60), "mesh": shorten(mesh_text(p.mesh), 80)}
            for i, p in enumerate(plans)
        ],
        "pictures": () if one else compare.pictures(plans),
        "facts": None if one else grid(compare.facts(plans)),
        "sections": sections(plans),
        "style": style(),
        **script(),
        "written": written,
    }


def _typed(plan: PlanFile) -> list[tuple[str, str]]:
    """What readers take from the page to type it elsewhere."""
    command = plan.details.search.command if plan.details.search else ""
    places = (
        f"{dim}@{path}:{'+'.join(axes) or 'none'}"
        for path, rules in plan.refined.items()
        for dim, axes in rules.items()
    )
    layout = ";".join(filter(None, (layout_text(plan.layout), *places)))
    said = [("Mesh", mesh_option(plan.mesh)), ("Layout", layout), ("Options", plan.as_options())]
    said.append(("Command", command))
    return [(name, text) for name, text in said if text and len(text) <= LONGEST]


@cache
def environment() -> Environment:
    """Templates in which everything is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_glued,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["code"] = _code
    made.filters["typed"] = Markup.escape  # what readers copy stays as it is
    return made


def _glued(value: Any) -> Any:
    """Texts, in which no line ends between a number and its unit; markup is left alone."""
    from markupsafe import Markup

    return glued(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def style() -> Markup:
    """The style sheet with the theme's colours; paper is always light."""
    from markupsafe import Markup

    sheet = resources.files("reports").joinpath("templates/report.css").read_text(encoding="utf-8")
    light = f":root{{color-scheme:light;{theme.css(theme.LIGHT)}}}"
    dark = f":root{{color-scheme:dark;{theme.css(theme.DARK)}}}"
    return Markup(f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}{sheet}")


@cache
def script() -> Mapping[str, Markup]:
    """The page's one script, and its hash, by which browsers run it and no other."""
    from markupsafe import Markup

    text = resources.files("reports").joinpath("templates/report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"script": Markup(text), "script_hash": Markup(digest)}


def _code(text: str) -> Markup:
    """What stands between backquotes as code."""
    from markupsafe import Markup, escape

    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )
