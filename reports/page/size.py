"""The page of a sizing: the size for each machine, loss against compute, time against money, all
candidates."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from layoutopt.plan.size_results import Accuracy, SizeResult
from layoutopt.plan.units import count, mesh_text, percent, rounded, shorten
from mesh_tf_core.files import write_file
from reports.figures import size as figures
from reports.page.answers import ENOUGH, GOOD_ERROR, PageAnswer
from reports.page.cells import LEADS, PageBlock, Panel, Section, grid
from reports.page.render import environment, script, style
from reports.svg import figure_svg
from reports.tables.sizes import candidates
from reports.views.layouts import record


def size_html(found: SizeResult, written: str | None = None) -> str:
    """Renders the report of a result of `layoutopt size`.

    `written` is the date at the end (None: today, '': no date).
    """
    date = datetime.date.today().isoformat() if written is None else written
    return environment().get_template("size.html.j2").render(_context(found, date))


def write_size_report(found: SizeResult, path: str | Path) -> None:
    """Writes `size_html` to a file; UserError if it cannot be written."""
    write_file(path, size_html(found), "the report")


def _context(found: SizeResult, written: str) -> dict[str, Any]:
    heading = shorten(found.model, 160)
    return {
        "title": f"{shorten(heading, 80)} · layoutopt size",
        "heading": heading,
        "subject": f"Best model size, kind and number of chips, and training time for {found.asked()}",
        "answers": _answers(found),
        "sections": _sections(found),
        "style": style(),
        **script(),
        "written": written,
    }


def _answers(found: SizeResult) -> tuple[PageAnswer, ...]:
    best = found.best
    interval = ""
    if best.loss_interval is not None and None not in best.loss_interval:
        interval = " to ".join(f"{x:.3f}" for x in best.loss_interval)
    return (
        PageAnswer("Which size", rounded(count(best.parameters)), f"on {count(best.tokens or 0)} tokens"),
        PageAnswer(
            "What loss", f"{best.loss:.3f}", interval or "nats per token", "warn" if best.beyond else ""
        ),
        PageAnswer(
            "Which chips",
            f"{best.devices:,} × {best.hardware}",
            f"{mesh_text(best.mesh)}, {percent(best.mfu or 0.0)} MFU",
        ),
        PageAnswer("How long", best.lasts(), best.costs()),
        PageAnswer(
            "Certainty of the loss",
            "Beyond the runs" if best.beyond else "Within the runs",
            f"law: {found.law.name}; layout {best.status}",
            "warn" if best.beyond else "good",
        ),
        _sure(found.accuracy_of(best.hardware)),
    )


def _sure(times: Accuracy) -> PageAnswer:
    """What stands behind the times of the answer's hardware."""
    question = "Certainty of the time"
    if times.mean is None:
        return PageAnswer(question, "Not compared", times.words, "warn")
    good = times.steps >= ENOUGH and times.mean <= GOOD_ERROR
    return PageAnswer(question, times.in_short(), times.words, "good" if good else "warn")


def _sections(found: SizeResult) -> list[Section]:
    rows = candidates(found)
    drawn = figure_svg(figures.loss_compute(found), "size-loss", "Loss against compute", rows.in_words())
    loss = PageBlock(figures.find_loss_compute(found), drawn)
    sections = [_section("loss", "Loss against compute", loss)]
    if len(figures.of_best(found)) > 1:
        time = PageBlock(
            figures.find_time_money(found),
            figure_svg(figures.time_money(found), "size-time", "Time against cost", rows.in_words()),
            notes=tuple(f"{sweep.hardware} {sweep.in_words()}" for sweep in found.sweeps),
        )
        sections.append(_section("time", "Time against cost", time))
    sections.append(_section("candidates", "Candidates", PageBlock(grid=grid(rows))))
    sections.append(_section("law", "The law", _law(found)))
    return sections


def _section(id: str, title: str, block: PageBlock) -> Section:
    return Section(id, title, LEADS["size"][id], (Panel("", "", (block,)),))


def _law(found: SizeResult) -> PageBlock:
    law = found.law
    pairs = [("Sizes differ in", family)] if (family := found.family()) else []
    pairs += [("Law", law.name), ("Source", law.source), ("It counts", f"{law.counts} parameters")]
    pairs += [(name, law.constant(name, 6)) for name in law.constants]
    if law.exponents is not None:
        pairs.append(("Exponents of the compute", "N {:.3g}, D {:.3g}".format(*law.exponents)))
    pairs += [(f"Runs: {name}", f"{count(low)} to {count(high)}") for name, (low, high) in law.ranges.items()]
    times = (f"Times of {each.hardware}: {each.words}" for each in found.accuracy)
    notes = (*filter(None, [law.note]), *law.sources, *times, *found.notes)
    unfit = [f"Cannot: {each.in_words()}" for each in found.unfit]
    return PageBlock(grid=grid(record(pairs, "The law")), notes=(*notes, *unfit))
