"""The schema of hardware files. It follows from the fields of `costmodels.hardware.model`.

`read` checks everything and reports every fault at once, each with its path in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache, reduce
from itertools import pairwise
from operator import or_
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    StringConstraints,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails

from costmodels.frameworks import DEFAULT
from costmodels.frameworks.framework import ChipKind, Text
from costmodels.hardware import links, model, numbers
from costmodels.hardware.curve import Curve, curve_fault
from costmodels.hardware.peaks import peaks_fault
from mesh_tf_core.faults import at_path
from mesh_tf_core.ir.program import COLLECTIVES

if TYPE_CHECKING:
    Collective = str
else:
    Collective = Literal[tuple(COLLECTIVES)]


# unit -> (what it measures, factor to the SI unit). A file's field asks for one quantity, never for one unit.
UNITS: dict[str, tuple[str, float]] = {
    "FLOP/s": ("compute rate", 1.0), "GFLOP/s": ("compute rate", 1e9), "TFLOP/s": ("compute rate", 1e12),
    "PFLOP/s": ("compute rate", 1e15), "TOP/s": ("compute rate", 1e12),
    "B": ("memory", 1.0), "MB": ("memory", 1e6), "GB": ("memory", 1e9), "KiB": ("memory", 2.0**10),
    "MiB": ("memory", 2.0**20), "GiB": ("memory", 2.0**30),
    "B/s": ("bandwidth", 1.0), "GB/s": ("bandwidth", 1e9), "GiB/s": ("bandwidth", 2.0**30),
    "TB/s": ("bandwidth", 1e12), "Gb/s": ("bandwidth", 1e9 / 8),
    "s": ("time", 1.0), "ms": ("time", 1e-3), "us": ("time", 1e-6), "ns": ("time", 1e-9),
    "1": ("fraction", 1.0),
    "count": ("count", 1.0),
}  # fmt: skip

SI = {quantity: unit for unit, (quantity, factor) in UNITS.items() if factor == 1.0}


Date = Annotated[str, StringConstraints(pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class _NumberFile(_File):
    value: float
    unit: str
    source: Text
    date: Date
    uncertainty: Annotated[float, Field(ge=0)] | None = None

    @property
    def si(self) -> float:
        return self.value * UNITS[self.unit][1]


def _number(measures: numbers.Measures) -> Any:
    """A number that measures something, within its limits."""

    def check(number: _NumberFile) -> _NumberFile:
        quantity, low, high = measures.quantity, measures.low, measures.high
        if number.unit not in UNITS or UNITS[number.unit][0] != quantity:
            known = ", ".join(unit for unit, (measured, _) in UNITS.items() if measured == quantity)
            raise ValueError(f"{number.unit!r} is not a unit of {quantity}; use one of {known}")
        if not low <= number.si <= high:
            bound = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
            raise ValueError(f"the {quantity} must be {bound}, found {number.value:g} {number.unit}")
        return number

    return Annotated[_NumberFile, AfterValidator(check)]


class _CurveFile(_File):
    points: list[tuple[float, float]]
    source: Text
    date: Date
    uncertainty: float | None = None

    @model_validator(mode="after")
    def _monotone(self) -> _CurveFile:
        if fault := curve_fault(self.points):
            raise ValueError(fault)
        return self


class _EfficiencyFile(_CurveFile):
    @model_validator(mode="after")
    def _bounded(self) -> _EfficiencyFile:
        if self.points[-1][1] > 1 or self.points[0][1] <= 0:
            raise ValueError("every y value (a fraction of the peak) must be above 0 and at most 1")
        for (x0, y0), (x1, y1) in pairwise(self.points):
            if x1 / y1 < x0 / y0:
                raise ValueError(
                    f"the efficiency rises so fast that a matmul of {x1:g} FLOPs would take less time "
                    f"than one of {x0:g} FLOPs"
                )
        return self


class _Form(_File):
    """The form of a dataclass of the model or its links: its fields, numbers as sources print them."""

    frozen_as: ClassVar[type]

    @model_validator(mode="after")
    def _possible(self) -> _Form:
        if self.frozen_as in _CHECKS and (fault := _CHECKS[self.frozen_as](self)):
            raise ValueError(fault)
        return self


@cache
def _form(cls: type) -> Any:
    hints = get_type_hints(cls, include_extras=True)
    own: dict[str, Any] = {"kind": (Literal[_KINDS[cls]], ...)} if cls in _KINDS else {}
    for name, hint in hints.items():
        own[name] = (_field(hint), None if _optional(hint) else ...)
    form: Any = create_model(f"_{cls.__name__}Form", __base__=_Form, **own)
    form.frozen_as = cls
    return form


def _optional(hint: Any) -> bool:
    return NoneType in get_args(hint)


def _field(hint: Any) -> Any:
    """What a file holds for a field of the model."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        base, limit = parts
        if isinstance(limit, numbers.Measures):
            return _number(limit)
        return Annotated[_field(base), Field(min_length=limit.least, max_length=limit.most)]
    if _optional(hint):
        return _field(next(part for part in parts if part is not NoneType)) | None
    if origin is tuple:
        pair = get_args(parts[0]) if get_origin(parts[0]) is tuple else ()
        return dict[_field(pair[0]), _field(pair[1])] if pair else list[_field(parts[0])]  # type: ignore[misc]
    if hint is model.Efficiency:
        return _EfficiencyFile
    if isinstance(hint, type) and is_dataclass(hint):
        return _form(hint)
    return {str: Text, int: PositiveInt}.get(hint, hint)


def _chip(chip: Any) -> str | None:
    if chip.memory_reserve.si >= chip.memory.si:
        return "memory_reserve must be less than memory"
    return peaks_fault(chip.peak_flops)


def _wraparound(ends: Any) -> str | None:
    needed = ends.rule in ("axis_size", "multiples") and ends.value is None
    return f'the rule {ends.rule!r} requires the field "value"' if needed else None


def _torus(torus: Any) -> str | None:
    spec = torus.link_bandwidth_spec
    above = spec is not None and torus.link_bandwidth.si > spec.si * (1 + 1e-9)
    return "link_bandwidth must not be above link_bandwidth_spec, the physical limit" if above else None


def _cluster(cluster: Any) -> str | None:
    for size, number in cluster.node_bandwidth.items():
        if number.si > cluster.node_bandwidth_spec.si * (1 + 1e-9):
            return f"node_bandwidth.{size} must not be above node_bandwidth_spec, the physical limit"
    return None


_CHECKS: dict[type, Callable[[Any], str | None]] = {
    model.Chip: _chip,
    links.Wraparound: _wraparound,
    links.Torus: _torus,
    links.GpuCluster: _cluster,
}
_KINDS: dict[type, str] = {each: each.kind for each in links.TOPOLOGIES}
_ChipForm: Any = _form(model.Chip)
_TopologyForm: Any = Annotated[reduce(or_, map(_form, _KINDS)), Field(discriminator="kind")]
_Fraction: Any = _field(numbers.Fraction)
_Held: Any = _field(numbers.Count)


class _CollectiveCurveFile(_CurveFile):
    collective: Collective
    group_size: Annotated[int, Field(ge=2)]
    devices: PositiveInt
    processes: PositiveInt = 1

    @model_validator(mode="after")
    def _spread(self) -> _CollectiveCurveFile:
        if self.processes > self.group_size:
            raise ValueError(
                f"group_size is {self.group_size}, which is fewer than the {self.processes} processes"
            )
        return self


class _ComputeCurveFile(_CurveFile):
    op_class: Text
    dtype: Text
    against: Literal["flops", "bytes"]
    devices: PositiveInt


class _CalibrationFile(_File):
    """How a profile came about. `fit` should name its method and held-out error, `machine` its noise."""

    date: Date
    machine: dict[str, Any]
    versions: dict[str, Any]
    fit: dict[str, Any]
    measurements: list[dict[str, Any]]
    base: Text


class _HardwareFile(_Form):
    frozen_as = model.Hardware
    format: Literal["layoutopt-hardware/1"]
    name: Text
    kind: ChipKind
    summary: Text
    device: Text
    jax_devices: list[Text] = []
    calibrated: bool
    compiler: model.CompilerName = "none"
    tf32: model.Tf32 = "products"
    framework: Text = DEFAULT
    chip: _ChipForm
    topology: _TopologyForm
    overlap: dict[model.Purpose, _Fraction] = {}
    holds: dict[model.HeldRule, _Held] = {}
    collective_curves: list[_CollectiveCurveFile] = []
    compute_curves: list[_ComputeCurveFile] = []
    calibration: _CalibrationFile | None = None
    notes: list[str] = []

    @model_validator(mode="after")
    def _honest(self) -> _HardwareFile:
        if self.calibrated and self.calibration is None:
            raise ValueError("'calibrated' is true but 'calibration' is missing")
        return self


def read(content: Any) -> tuple[model.Hardware | None, list[str]]:
    """The hardware in parsed JSON `content`, and its faults as 'path: fault'; one of the two is empty."""
    try:
        return _freeze(_HardwareFile.model_validate(content)), []
    except ValidationError as error:
        return None, [_fault(e) for e in error.errors()]


NUMBER = '{"value": 80, "unit": "GB", "source": "…", "date": "2026-01"}'


def _fault(error: ErrorDetails) -> str:
    location, message = error["loc"], error["msg"]
    if error.get("ctx", {}).get("class_name") == _NumberFile.__name__:
        message = f"must be a JSON object such as {NUMBER}"
    elif error["type"] == "string_pattern_mismatch":
        message = "must be a date such as 2026-01-31, 2026-01 or 2026"
    kinds = ("torus", "cluster", "shared_memory")  # pydantic names the chosen variant after 'topology'
    parts = [
        " ".join(str(p).split())  # a key may be anything, also several lines
        for i, p in enumerate(location)
        if not (i == 1 and location[0] == "topology" and p in kinds)
    ]
    return at_path(".".join(parts) or "the file", message)


def _freeze(value: Any) -> Any:
    """The frozen value of a checked part of a file: same names, SI units, tuples for lists and mappings."""
    if isinstance(value, _NumberFile):
        given = (
            f"{value.value:.10g} {value.unit}" if value.unit not in ("1", "count") else f"{value.value:.10g}"
        )
        return numbers.Number(value.si, given, value.source, value.date, value.uncertainty)
    if isinstance(value, _EfficiencyFile):
        return model.Efficiency(Curve(tuple(value.points)), value.source, value.date, value.uncertainty)
    if isinstance(value, _CurveFile):
        own = value.model_dump(exclude={"points"})
        cls = model.CollectiveCurve if isinstance(value, _CollectiveCurveFile) else model.ComputeCurve
        return cls(seconds=Curve(tuple(value.points)), **own)
    if isinstance(value, _CalibrationFile):
        texts = {
            k: v if isinstance(v, str) else json.dumps(v, sort_keys=True)
            for k, v in value.model_dump().items()
        }
        return model.Calibration(**texts)
    if isinstance(value, _Form):
        names = [
            n
            for n in type(value).model_fields
            if n != "format" and not (n == "kind" and value.__class__ is not _HardwareFile)
        ]
        return value.frozen_as(**{name: _freeze(getattr(value, name)) for name in names})
    if isinstance(value, dict):
        return tuple((key, _freeze(item)) for key, item in sorted(value.items()))
    if isinstance(value, list):
        return tuple(_freeze(item) for item in value)
    return value
