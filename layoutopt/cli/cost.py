"""`layoutopt cost`: the price of a layout that the user gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layoutopt.cli import options
from layoutopt.cli.given import PLAIN, LayoutByHand
from layoutopt.cli.grouped import grouped
from layoutopt.cli.plans import ON_PLANNED, OnPlannedHardware
from layoutopt.cli.terminal import BAD, FITS, Terminal, facts, layout_text
from layoutopt.cli.training_cost import PriceOption, TokensOption, read_prices, read_tokens
from layoutopt.plan.units import seconds_text, used_text

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.api.pricing import PricedLayout
    from layoutopt.models.loading import Loaded
    from layoutopt.optimize.evaluation.evaluation import Evaluation
    from layoutopt.plan.results import CostLine, Finding


@grouped
def cost(
    model: options.ModelArgument,
    asked: LayoutByHand = PLAIN,
    machine_on: OnPlannedHardware = ON_PLANNED,
    memory: options.MemoryOption = None,
    tokens: TokensOption = None,
    price: PriceOption = None,
    lines: options.LinesOption = False,
    output: options.Output = options.OUTPUT,
) -> None:
    """Predict a layout's step time by operation, axis and phase, and its peak memory."""
    from layoutopt.api.pricing import cost as priced
    from layoutopt.cli import cost_tables

    terminal = output.terminal
    loaded, given = asked.load(model)
    machine = machine_on.read(loaded.model, given.plan)
    limit = options.read_memory(memory, machine)
    count, prices = read_tokens(tokens), read_prices(price or (), [machine.name])
    what = (loaded.model, given.mesh, given.layout, machine, limit, given.options)
    found = priced(*what, tokens=count, price=prices.get(machine.name))
    of, notes = found.evaluation, list(found.notes)
    opened = opened_lines(of) if lines else []
    more: dict[str, Any] = {"notes": notes} if notes else {}
    terminal.result(found.data.model_copy(update=more | ({"lines": opened} if lines else {})))
    if not output.as_json:
        _show(terminal, loaded, found, machine, limit)
        if lines:
            terminal.show("", cost_tables.line_table(opened))
        show_doubts(terminal, [f for f in found.findings if f.kind != "not expressed"])
        for note in notes:
            terminal.show("", f"note: {note}")


def opened_lines(found: Evaluation) -> list[CostLine]:
    """Every priced line with its formula, in the order of the program."""
    from costmodels.pricing.explanation import formula
    from costmodels.pricing.hidden import under
    from layoutopt.plan.results import CostLine

    meanwhile = under(found.program, found.cost)
    return [
        CostLine(
            operation=x.name,
            fused=x.text.split(" + ") if " + " in x.text else [],
            purpose=x.purpose,
            formula=formula(found.prices, x, meanwhile.get(x.value)),
            **x.facts(),
        )
        for x in found.cost.lines
    ]


def show_doubts(terminal: Terminal, doubts: Sequence[Finding]) -> None:
    """Likely mistakes, each with its fix."""
    for doubt in doubts:
        fix = f"; {doubt.fix}" if doubt.fix else ""
        terminal.show("", f"{doubt.kind}: {doubt.message}{fix}")


def _show(terminal: Terminal, loaded: Loaded, found: PricedLayout, machine: Hardware, limit: int) -> None:
    from layoutopt.cli import cost_tables
    from layoutopt.cli.plan_tables import decided_rows
    from layoutopt.plan.build import decided, model_info
    from layoutopt.plan.machine_details import sure
    from layoutopt.plan.trade_names import trade_names
    from reports.views import facts as told

    of, p, reason, total = found.evaluation, found.predicted, found.reason, found.training
    price, held = of.cost, of.memory
    said = decided(of.decided, of.layout, of.pipeline)
    forms = trade_names(loaded.model, of.program.mesh, of.layout, said)
    peak = held.points[held.at].origin if held.points else None
    fits = of.known.fits(held.peak, limit, machine.usable_memory_bytes)
    rows = [
        *told.model(model_info(loaded.model)),
        ("mesh", f"{of.program.mesh} ({of.program.mesh.devices} devices)"),
        ("layout", layout_text(of.layout.plain)),
        ("parallel", told.forms(forms)),
        *decided_rows(said, loaded.model),
        ("hardware", f"{machine.name}: a device is {machine.device}"),
        ("framework", machine.framework),
        ("step", f"{told.step(p)} (of {seconds_text(p.communication_seconds)})"),
        *told.achieved(p),
        *([("training", total.words)] if total else []),
        ("work", told.work(p)),
        (
            "memory",
            f"{used_text(held.peak, limit)} per device"
            + (f" of the {held.stage.value} stage" if held.stage else "")
            + (f", peak in {peak.scope or 'the model'} ({peak.phase})" if peak else ""),
        ),
        *([("host", p.host)] if p.host else []),
        ("accuracy", sure(machine, of.known)),
        ("fits", fits if reason is None else f"no: {reason}"),
        *((f.kind, f"{f.message}; {f.fix}") for f in found.findings if f.kind == "not expressed"),
    ]
    axes = cost_tables.axis_table(price)
    tables = [
        *(cost_tables.operation_table(price), axes, cost_tables.overlap_table(of)),
        *(cost_tables.phase_table(price), cost_tables.memory_table(held)),
    ]
    colour = BAD if reason is not None else FITS[fits]
    terminal.show(facts(rows, {"fits": colour, "memory": colour}))
    for part in tables:
        if part is not None:
            terminal.show("", part)
    if axes is None:
        terminal.show("", "No collectives: the devices do not communicate.")
