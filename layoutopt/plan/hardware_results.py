"""The objects that `hardware` and `calibrate` print with `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costmodels.frameworks.framework import OverlaidNumber, Programs
from layoutopt.plan.fields import Data, Figure, Flag
from layoutopt.plan.results import CommandResult


class HardwareSummary(Data):
    """A machine in short, per device."""

    name: str
    kind: str
    summary: str
    device: str
    topology: str
    calibrated: Flag
    memory_bytes: int
    usable_memory_bytes: int
    memory_bandwidth: Figure
    peak_flops: Mapping[str, Figure]


class HardwareList(CommandResult):
    """`hardware`."""

    command = "hardware"
    hardware: list[HardwareSummary]


class SourcedNumber(Data):
    """A number in SI units, and as its source prints it."""

    path: str
    value: Figure
    given: str
    source: str
    date: str
    uncertainty: Figure


class SourcedCurve(Data):
    """The source of a measured curve."""

    path: str
    source: str
    date: str
    uncertainty: Figure


class HardwareResult(HardwareSummary, CommandResult):
    """`hardware NAME`: every number with its source."""

    command = "hardware"
    notes: list[str]
    numbers: list[SourcedNumber]
    curves: list[SourcedCurve]


class CalibrateResult(CommandResult):
    """`calibrate`: the profile of this machine in short."""

    command = "calibrate"
    profile: str
    hardware: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    held_out_error: Figure
    measurements: int


class CalibrateTpuResult(CommandResult):
    """`calibrate --target`: the profile of a TPU in short; without --out there is no file."""

    command = "calibrate"
    profile: str | None
    hardware: str
    topology: str
    versions: dict[str, Any]
    date: str
    shipped: Flag
    launch_seconds: Figure
    memory_efficiency: Figure
    element_time: Figure
    matmul_efficiency: list[tuple[Figure, Figure]]
    uncertainty: Mapping[str, Figure]
    held_out_error: Figure
    typical_error: dict[str, Mapping[str, Figure]]
    measurements: int


class FrameworkVariant(Data):
    """A choice of a framework's user: option -> what it is."""

    summary: str
    default: str
    options: Mapping[str, str]


class FrameworkSummary(Data):
    """Training software in short.

    Attributes:
      chips: kinds of chips that it runs on.
    """

    name: str
    summary: str
    chips: list[str]
    variants: Mapping[str, FrameworkVariant]


class FrameworkList(CommandResult):
    """`frameworks`."""

    command = "frameworks"
    frameworks: list[FrameworkSummary]


class FrameworkResult(FrameworkSummary, CommandResult):
    """`frameworks NAME`: the programs that it runs (null: any), and what it sets, with the source of each
    number."""

    command = "frameworks"
    notes: list[str]
    runs: Programs | None
    numbers: list[OverlaidNumber]
