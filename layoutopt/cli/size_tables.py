"""An answer of `size` in the terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from layoutopt.cli.terminal import facts
from layoutopt.plan.units import (
    bytes_text,
    digits,
    layout_text,
    mesh_option,
    number,
    plural,
    seconds_text,
    share_text,
)
from reports.tables.sizes import candidates, changed, loss_text
from reports.views import facts as told
from reports.views.view import View

if TYPE_CHECKING:
    from layoutopt.cli.terminal import Terminal
    from layoutopt.plan.size_results import LawInfo, SizedCandidate, SizeResult

MOST = 40
"""Rows of the table."""


def show(terminal: Terminal, found: SizeResult) -> None:
    """Prints which model to train where, why, and the alternatives."""
    best = found.best
    terminal.show(facts(_answer(found, best)), "")
    terminal.show(_rows(found))
    for name, words in _remarks(found):
        terminal.show(f"{name}: {words}")


def law_text(law: LawInfo) -> str:
    """A law's name, its constants, and its source."""
    parts = [f"{name} {law.constant(name, 4)}" for name in law.constants]
    if law.exponents is not None:
        parts.append("N ~ C^{:.3g}, D ~ C^{:.3g}".format(*law.exponents))
    return f"{law.name}: {', '.join(parts)}; {law.source}"


def _answer(found: SizeResult, best: SizedCandidate) -> list[tuple[str, str]]:
    per = (best.tokens or 0) / max(best.parameters, 1)
    rows = [
        ("asked", found.asked()),
        ("train", f"{found.model}, {best.parameters:,} parameters ({changed(best)})"),
        ("on", f"{number(best.tokens)} tokens, {digits(per)} per parameter: {best.flops:.3g} FLOP"),
        ("per step", told.batch(best.batch)),
        ("loss", f"{loss_text(best)} nats per token"),
        (
            "with",
            f"{plural(best.devices, 'device')} of {best.hardware}, mesh {mesh_option(best.mesh)}, "
            f"{layout_text(best.layout) or 'nothing split'}"
            + (f"; {best.in_short()}" if best.in_short() else ""),
        ),
        (
            "step",
            f"{seconds_text(best.step_seconds or 0.0)}, {share_text(best.mfu or 0.0, 1)} MFU, "
            f"{number(best.tokens_per_second)} tokens/s, {bytes_text(best.peak_memory_bytes)} per "
            f"device, {best.status}",
        ),
        ("takes", f"{best.lasts()}, {best.costs()}"),
    ]
    if found.unsearched:
        rows.append(("not compared", f"{', '.join(found.unsearched)}: no time to search; raise --time-limit"))
    if found.flat is not None:
        rows.append(("flat", found.flat.in_words()))
    if found.optimum is not None:
        o = found.optimum
        rows.append(
            (
                "by the law",
                f"for {o.flops:.3g} FLOP, counted as 6 per parameter and token: "
                f"{number(o.parameters)} parameters, {number(o.tokens)} tokens, loss {o.loss:.4f}",
            )
        )
    rows.append(("law", law_text(found.law)))
    if family := found.family():
        rows.insert(2, ("sizes", f"differ in {family}; other hyperparameters are as given"))
    return rows


def _rows(found: SizeResult) -> View:
    """The candidates; of very many those of the frontier first."""
    made, every = candidates(found), found.candidates
    if len(every) <= MOST:
        return made
    first = sorted(range(len(every)), key=lambda i: (every[i] != found.best, not every[i].frontier, i))
    shown = sorted(first[:MOST])
    title = f"Candidates, {MOST} of {len(every)}, those on the Pareto frontier first (--json prints all)"
    strong = shown.index(made.strong) if made.strong in shown else None
    return replace(made, title=title, rows=[made.rows[i] for i in shown], strong=strong)


def _remarks(found: SizeResult) -> list[tuple[str, str]]:
    said = [(f"accuracy {each.hardware}", each.words) for each in found.accuracy]
    said += [(sweep.hardware, sweep.in_words()) for sweep in found.sweeps]
    batch, critical = found.best.batch_tokens, found.critical_batch_tokens
    if critical:
        said.append(
            ("batch", f"{batch:,} tokens; the critical batch is about {critical:,.0f} (Kaplan et al. 2020)")
        )
    said += [("cannot", unfit.in_words()) for unfit in found.unfit]
    return said + [("note", note) for note in found.notes]
