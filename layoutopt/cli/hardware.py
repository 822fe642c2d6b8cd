"""`layoutopt hardware`: the machines that programs can be priced for, and where their numbers come from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.options import JsonOption, SetHardwareOption, complete_hardware, examples, read_hardware
from layoutopt.cli.terminal import Terminal, facts, table
from layoutopt.plan.units import bytes_text, rate_text

if TYPE_CHECKING:
    from costmodels.hardware import Hardware

EXAMPLES = examples("layoutopt hardware", "layoutopt hardware tpu-v5e", "layoutopt hardware h100 --json")


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME_OR_FILE]",
            help="One of the list, or a file.",
            autocompletion=complete_hardware,
            show_default=False,
        ),
    ] = None,
    set_hardware: SetHardwareOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the machines to price for, or show one with the source of each number."""
    terminal = Terminal(as_json)
    if name is None:
        _list(terminal)
    else:
        _one(terminal, read_hardware(name, set_hardware))


def _list(terminal: Terminal) -> None:
    from costmodels.hardware import hardware_names
    from layoutopt.plan.hardware_results import HardwareList, HardwareSummary

    machines = [read_hardware(name) for name in hardware_names()]
    terminal.result(HardwareList(hardware=[HardwareSummary(**_summary(m)) for m in machines]))
    rows = [
        (
            m.name,
            m.device,
            rate_text(m.peak_flops("bfloat16"), "FLOP/s"),
            bytes_text(m.memory_bytes),
            rate_text(m.memory_bandwidth, "B/s"),
            type(m.topology).__name__.lower(),
            m.calibration.date if m.calibration else "no",
        )
        for m in machines
    ]
    columns = (
        "name",
        "a device is",
        "peak (bfloat16)",
        "memory",
        "memory bandwidth",
        "topology",
        "calibrated",
    )
    terminal.show(table("Hardware, per device", columns, rows, (2, 3, 4)))
    terminal.show("", "layoutopt hardware NAME shows every number with its source.")


def _one(terminal: Terminal, machine: Hardware) -> None:
    from layoutopt.plan.hardware_results import HardwareResult, SourcedCurve, SourcedNumber

    terminal.result(
        HardwareResult(
            **_summary(machine),
            notes=list(machine.notes),
            numbers=[SourcedNumber(path=path, **asdict(n)) for path, n in machine.numbers()],
            curves=[
                SourcedCurve(path=path, source=c.source, date=c.date, uncertainty=c.uncertainty)
                for path, c in machine.curves()
            ],
        )
    )
    rows = [
        ("name", machine.name),
        ("", machine.summary),
        ("a device is", machine.device),
        ("memory", f"{bytes_text(machine.usable_memory_bytes)} of {bytes_text(machine.memory_bytes)} usable"),
        ("calibrated", _calibration(machine)),
        *(("note", note) for note in machine.notes),
    ]
    terminal.show(facts(rows), "")
    numbers = [(path, n.given, _error(n.uncertainty), n.date, n.source) for path, n in machine.numbers()]
    curves = [(path, "curve", _error(c.uncertainty), c.date, c.source) for path, c in machine.curves()]
    title = "Numbers, as their sources print them (per chip)"
    terminal.show(table(title, ("what", "value", "±", "date", "source"), numbers + curves, (1, 2)))


def _summary(machine: Hardware) -> dict[str, Any]:
    return {
        "name": machine.name,
        "kind": machine.kind,
        "summary": machine.summary,
        "device": machine.device,
        "topology": type(machine.topology).__name__.lower(),
        "calibrated": machine.calibrated,
        "memory_bytes": int(machine.memory_bytes),
        "usable_memory_bytes": int(machine.usable_memory_bytes),
        "memory_bandwidth": machine.memory_bandwidth,
        "peak_flops": {dtype: machine.peak_flops(dtype) for dtype, _ in machine.chip.peak_flops},
    }


def _calibration(machine: Hardware) -> str:
    if machine.calibration is None:
        return "no: layoutopt calibrate measures this machine" if machine.kind == "cpu" else "no"
    return f"{machine.calibration.date}, from {machine.calibration.base}"


def _error(uncertainty: float | None) -> str:
    return "" if uncertainty is None else f"{100 * uncertainty:.0f}%"
