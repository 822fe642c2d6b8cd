"""`layoutopt check`: whether a plan, or a layout of a model, keeps its bounds of time and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli import options
from layoutopt.cli.given import PLAIN, LayoutByHand, read_source
from layoutopt.cli.grouped import grouped
from layoutopt.cli.plans import ON_PLANNED, ModelOption, OnPlannedHardware, SourceArgument
from layoutopt.cli.terminal import BAD, FITS, facts
from layoutopt.cli.units import parse_bytes, parse_seconds
from layoutopt.plan.units import bytes_text, seconds_text, times_text

if TYPE_CHECKING:
    from layoutopt.plan.layout_results import CheckedBound

STEP, MEMORY, HOST = "step", "memory", "host memory"
TEXTS = {STEP: seconds_text, MEMORY: bytes_text, HOST: bytes_text}


@grouped
def check(
    source: SourceArgument,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="AMOUNT",
            help="Most memory of a device, e.g. 90% of the hardware's, or 60GiB.",
            show_default="all that the hardware has",
        ),
    ] = None,
    max_step: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Longest step, e.g. 2.5s, or 1.05x=BASELINE.json: 1.05 times the step that a plan file "
            "predicts.",
            show_default="none",
        ),
    ] = None,
    asked: LayoutByHand = PLAIN,
    machine_on: OnPlannedHardware = ON_PLANNED,
    model: ModelOption = None,
    output: options.Output = options.OUTPUT,
) -> None:
    """Check bounds on a plan's or layout's step time and memory; exit code 6 if one is broken."""
    from layoutopt.api.pricing import cost
    from layoutopt.plan.build import given_fields
    from layoutopt.plan.layout_results import CheckedBound, CheckResult
    from mesh_tf_core.errors import BrokenBoundError

    longest = None if max_step is None else longest_step(max_step)
    loaded, given = read_source(source, model, asked)
    machine = machine_on.read(loaded.model, given.plan)
    most = most_memory(max_memory, machine.usable_memory_bytes)
    of = cost(loaded.model, given.mesh, given.layout, machine, options=given.options).evaluation
    found = {
        MEMORY: (most, of.memory.peak),
        HOST: (machine.host_memory_bytes if of.program.host_bytes else None, of.program.host_bytes),
        STEP: (longest, of.predicted.step_seconds),
    }
    bounds = [
        CheckedBound(name=name, bound=bound, found=value, ok=value <= bound)
        for name, (bound, value) in found.items()
        if bound is not None
    ]
    broken = [each for each in bounds if not each.ok]
    terminal = output.terminal
    terminal.result(
        CheckResult(
            **given_fields(of.model, of.program.mesh, of.layout, of.decided),
            hardware=machine.name,
            framework=machine.framework,
            ok=not broken,
            bounds=bounds,
        )
    )
    if not output.as_json:
        rows = [("hardware", machine.name), ("framework", machine.framework)]
        colours = {each.name: FITS["yes"] if each.ok else BAD for each in bounds}
        terminal.show(facts([*rows, *((each.name, _words(each)) for each in bounds)], colours))
    if broken:
        said = ", ".join(f"{each.name} {_words(each)}" for each in broken)
        raised = [f"--max-{each.name}" for each in broken if each.name != HOST]
        more = f", or raise {' and '.join(raised)}" if raised else ""
        raise BrokenBoundError(f"{source}: {said}; choose another layout{more}")


def most_memory(text: str | None, usable: float) -> float:
    """Bytes of `--max-memory`: an amount, or a share of what a device has.

    Raises:
      UserError: neither.
    """
    from mesh_tf_core.errors import UserError

    if text is None or not text.strip().endswith("%"):
        return usable if text is None else parse_bytes(text, "--max-memory")
    try:
        share = float(text.strip()[:-1])
    except ValueError:
        share = 0.0
    if not 0 < share <= 100:
        raise UserError(f"--max-memory {text!r} is not a share above 0 % and up to 100 %; write e.g. 90%")
    return usable * share / 100


def longest_step(text: str) -> float:
    """Seconds of `--max-step`: a time, or a multiple of the step that a plan file predicts.

    Raises:
      UserError: neither, or the file is not a plan.
    """
    from layoutopt.plan.schema import read_plan_file
    from mesh_tf_core.errors import UserError

    times, equals, baseline = text.partition("x=")
    if not equals:
        if text.endswith(".json"):
            raise UserError(f"--max-step {text!r}: write a factor before the plan, e.g. 1.05x=baseline.json")
        return parse_seconds(text, "--max-step")
    try:
        factor = float(times)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6 or not baseline:
        raise UserError(f"--max-step {text!r}: write a factor and a plan file, e.g. 1.05x=baseline.json")
    return factor * read_plan_file(baseline).predicted.step_seconds


def _words(each: CheckedBound) -> str:
    text = TEXTS[each.name]
    found, bound = text(each.found), text(each.bound)
    return f"{found} ≤ {bound}" if each.ok else f"{found} > {bound} ({times_text(each.found, each.bound)})"
