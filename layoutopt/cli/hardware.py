"""`layoutopt hardware`: the machines that programs can be priced for, and where their numbers come from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli import options
from layoutopt.cli.terminal import Terminal, facts
from layoutopt.plan.units import bytes_text, rate_text
from reports.views.view import BYTES, Column, Kind, View, texts

if TYPE_CHECKING:
    from costmodels.hardware import Hardware


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME_OR_FILE]",
            help="Name of a preset, or a profile file, to show.",
            autocompletion=options.complete_hardware,
        ),
    ] = None,
    set_hardware: options.SetHardwareOption = None,
    framework: options.FrameworkOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """List the hardware presets, or show one with the source of each number."""
    terminal = Terminal(as_json)
    if name is None:
        _list(terminal)
    else:
        _one(terminal, options.read_hardware(name, set_hardware, framework))


def _list(terminal: Terminal) -> None:
    from costmodels.hardware import hardware_names
    from layoutopt.plan.hardware_results import HardwareList, HardwareSummary

    machines = [options.read_hardware(name) for name in hardware_names()]
    terminal.result(HardwareList(hardware=[HardwareSummary(**_summary(m)) for m in machines]))
    columns = (
        *texts("name", device="a device is"),
        Column("peak_flops", "peak (bfloat16)", Kind(lambda rate: rate_text(rate, "FLOP/s"))),
        Column("memory_bytes", "memory", BYTES),
        Column("memory_bandwidth", "memory bandwidth", Kind(lambda rate: rate_text(rate, "B/s"))),
        *texts("topology", "calibrated"),
    )
    rows = [
        (
            *(m.name, m.device, m.peak_flops("bfloat16"), m.memory_bytes, m.memory_bandwidth),
            *(m.topology.kind, m.calibration.date if m.calibration else "no"),
        )
        for m in machines
    ]
    terminal.show(View("Hardware, per device", columns, rows))
    terminal.show("", "layoutopt hardware NAME shows every number with its source.")
    terminal.show("NAME-eager, of a GPU, is NAME with --framework torch (see `layoutopt frameworks`).")


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
        ("framework", machine.framework),
        ("memory", f"{bytes_text(machine.usable_memory_bytes)} of {bytes_text(machine.memory_bytes)} usable"),
        ("calibrated", _calibration(machine)),
        *(("note", note) for note in machine.notes),
    ]
    terminal.show(facts(rows), "")
    columns = (
        Column("number", "what"),
        Column("value", "value", Kind(str)),
        Column("uncertainty", "±", Kind(lambda share: f"{100 * share:.0f}%")),
        *texts("date", "source"),
    )
    numbers = [(path, n.given, n.uncertainty, n.date, n.source) for path, n in machine.numbers()]
    curves = [(path, "curve", c.uncertainty, c.date, c.source) for path, c in machine.curves()]
    title = "Numbers in the units of their sources (per chip)"
    terminal.show(View(title, columns, [*numbers, *curves]))


def _summary(machine: Hardware) -> dict[str, Any]:
    return {
        "name": machine.name,
        "kind": machine.kind,
        "summary": machine.summary,
        "device": machine.device,
        "topology": machine.topology.kind,
        "calibrated": machine.calibrated,
        "memory_bytes": int(machine.memory_bytes),
        "usable_memory_bytes": int(machine.usable_memory_bytes),
        "memory_bandwidth": machine.memory_bandwidth,
        "peak_flops": {dtype: n.value / machine.devices_per_chip for dtype, n in machine.chip.peak_flops},
    }


def _calibration(machine: Hardware) -> str:
    if machine.calibration is None:
        return "no; run `layoutopt calibrate` to measure this machine" if machine.kind == "cpu" else "no"
    return f"{machine.calibration.date}, from {machine.calibration.base}"
