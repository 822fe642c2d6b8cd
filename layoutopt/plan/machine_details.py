"""The hardware's part of a plan file: numbers with sources, placement of the mesh, calibration."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from costmodels.network.topology import MeshPlacement
    from layoutopt.plan.details import HardwareInfo
    from layoutopt.plan.evidence import CalibrationEvidence
    from layoutopt.plan.known import Known
    from mesh_tf_core import Mesh
    from mesh_tf_core.model import Model

LEVELS = {
    "core": "{} cores of a chip",
    "slice": "{} slices",
    "node": "{} inside a node",
    "network": "{} nodes",
}
"""Levels of hardware in words; a torus axis is marked if it is a ring."""


def hardware_details(machine: Hardware, mesh: Mesh, known: Known) -> HardwareInfo:
    """The part `hardware` of a plan's details."""
    from costmodels.network.topology import place
    from layoutopt.plan.details import HardwareInfo, HardwareNumber

    placed = place(machine, mesh)
    shape = " × ".join(map(str, placed.shape))
    return HardwareInfo(
        name=machine.name,
        summary=machine.summary,
        device=machine.device,
        memory_bytes=machine.usable_memory_bytes,
        assumptions=(*machine.notes, *placed.assumptions),
        placement=f"The mesh uses {shape} chips of a torus." if shape else "",
        lies={axis: " × ".join(_lies(placed, axis)) for axis in mesh.names if mesh.size(axis) > 1},
        numbers=tuple(
            HardwareNumber(path=path, value=n.given, source=n.source, date=n.date)
            for path, n in machine.numbers()
        ),
        known=known,
    )


def errors_known(machine: Hardware, model: Model, stages: Collection[str]) -> Known:
    """The known errors of predictions of a plan's kind, and the memory that plans should leave free.

    Args:
      stages: dimensions of layers that are pipeline stages.
    """
    from costmodels.frameworks import load_framework
    from costmodels.hardware import split_name
    from costmodels.hardware.known import compared, known_kinds
    from layoutopt.plan.known import Compiled, Known, Margin, Runs, kind_words
    from layoutopt.space.parallelism import parallelism

    said, found = machine.chip.memory_doubt, compared(machine)
    doubt = None if said is None else Margin(share=said.value, source=said.source)
    compiler = None if found is None else Compiled.model_validate(found)
    if machine.kind == "cpu":  # a user measures his own
        return Known(memory=doubt, compiler=compiler)
    kinds, mixture = known_kinds(machine), bool(parallelism(model).experts)
    known = Known.of(
        kinds, machine.framework, stages=bool(stages), mixture=mixture, compiler=compiler, doubt=doubt
    )
    framework = load_framework(machine.framework)
    learnt = framework.errors.get(split_name(machine.name)[0], {}) if framework.as_learned else {}
    if (own := learnt.get(kind_words(mixture, bool(stages)))) is None:
        return known
    runs = Runs(rows=own.rows, mean=own.mean, worst=own.worst, fitted=True)
    return known.model_copy(update={"runs": runs})


def sure(machine: Hardware, known: Known) -> str:
    """The evidence behind a predicted step on this machine, in words."""
    from layoutopt.plan.details import HardwareNumber, sources_text

    if machine.calibrated:
        return "calibrated on this hardware; run `layoutopt validate MODEL` to check whole steps"
    if known.runs or known.compiler:
        return known.words
    numbers = [HardwareNumber(path=path, value=n.given, source=n.source) for path, n in machine.numbers()]
    sources = sources_text(numbers)
    if machine.kind == "cpu":
        return f"not calibrated ({sources}); run `layoutopt calibrate` to measure this machine"
    return f"{known.words}; {sources}"


def _lies(placed: MeshPlacement, axis: str) -> Iterator[str]:
    """Where the devices along a mesh axis are, level by level, the innermost first."""
    route = placed.route([axis])
    for level in route.levels:
        for part in level.segments:
            far = f", {part.stride} links apart" if part.stride > 1 else ""
            yield f"{part.size} along {part.axis} ({'ring' if part.ring else 'line'}{far})"
        if level.name == "memory":
            yield "one machine's memory" if route.processes == 1 else f"{route.processes} processes"
        elif level.name in LEVELS:
            yield LEVELS[level.name].format(level.size)


def calibration_details(machine: Hardware) -> CalibrationEvidence | None:
    """The part `calibration`: each measurement of a calibrated profile beside its fit; None for others."""
    if machine.calibration is None:
        return None
    from costmodels.calibration.residuals import residuals
    from layoutopt.plan.evidence import CalibrationEvidence, Fitted, Sample

    made = machine.calibration
    on = json.loads(made.machine)
    measured = on.get("measured", True)
    where = (
        f"Measured on {made.date}: {on['processor']}, {on['cores']} cores, mesh {on['mesh']}; {on['noise']}."
        if measured
        else f"Not measured: estimated on {made.date} by the compiler for {on['compiled_for']}."
    )
    return CalibrationEvidence(
        of="measurement" if measured else "compiler estimate",
        measurements=tuple(Sample(**asdict(each)) for each in residuals(machine)),
        fit=tuple(
            Fitted(name=name, value=value, unit=unit)
            for name, value, unit in (_measured(machine) if measured else _estimated(machine))
        ),
        notes=(where,),
    )


NumberInUnit = tuple[str, float, str]
"""A number's name, value and unit."""


def _measured(machine: Hardware) -> Iterator[NumberInUnit]:
    yield "matmuls, float32, one core", machine.peak_flops("float32"), "FLOP/s"
    yield "memory, one core", machine.memory_bandwidth, "B/s"
    names = {"kernel.step": "start of a step", "kernel.store": "reading and storing a variable"}
    for c in machine.compute_curves:
        if c.op_class in names:
            yield names[c.op_class], c.seconds(0.0), "s"


def _estimated(machine: Hardware) -> Iterator[NumberInUnit]:
    chip = machine.chip
    best = machine.peak_flops("bfloat16") * chip.matmul_efficiency.curve.points[-1][1]
    best *= chip.sustained.value if chip.sustained else 1.0
    yield "large matmuls, bfloat16", best, "FLOP/s"
    yield "memory", machine.memory_bandwidth * chip.memory_efficiency.value, "B/s"
    yield "kernel launch", chip.launch_overhead.value, "s"
