"""The schema of hardware files. It follows from the fields of `costmodels.hardware.model`.

`read` checks everything and reports every fault at once, each with its path in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, reduce
from itertools import pairwise
from operator import or_
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

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

from costmodels.frameworks.framework import Text
from costmodels.hardware import links, model, numbers
from costmodels.hardware.curve import Curve, curve_fault
from costmodels.hardware.peaks import peaks_fault
from mesh_tf_core.faults import at_path
from mesh_tf_core.ir.program import COLLECTIVES

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


class _Form(_File):
    """The form of a dataclass of the model or its links: its fields, numbers as sources print them, and the
    points of its curve."""

    frozen_as: ClassVar[type]

    @model_validator(mode="after")
    def _possible(self) -> _Form:
        if self.frozen_as in _CHECKS and (fault := _CHECKS[self.frozen_as](self)):
            raise ValueError(fault)
        return self


@cache
def _form(cls: type) -> Any:
    hints, own = get_type_hints(cls, include_extras=True), dict[str, Any](_MARKS.get(cls, {}))
    for field in fields(cls):
        name, hint = field.name, hints[field.name]
        missing = None if _optional(hint) else ... if field.default is MISSING else field.default
        own[POINTS if hint is Curve else name] = (Date if name == "date" else _field(hint), missing)
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
    if parts and all(part in links.TOPOLOGIES for part in parts):
        return Annotated[reduce(or_, map(_form, parts)), Field(discriminator="kind")]
    if hint in _OTHERS:
        return _OTHERS[hint]
    return _form(hint) if isinstance(hint, type) and is_dataclass(hint) else hint


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if fault := curve_fault(points):
        raise ValueError(fault)
    return points


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


def _efficiency(efficiency: Any) -> str | None:
    points = efficiency.points
    if points[-1][1] > 1 or points[0][1] <= 0:
        return "every y value (a fraction of the peak) must be above 0 and at most 1"
    for (x0, y0), (x1, y1) in pairwise(points):
        if x1 / y1 < x0 / y0:
            return (
                f"the efficiency rises so fast that a matmul of {x1:g} FLOPs would take less time "
                f"than one of {x0:g} FLOPs"
            )
    return None


def _collective(curve: Any) -> str | None:
    if curve.collective not in COLLECTIVES:
        return f"collective must be one of {', '.join(COLLECTIVES)}, found {curve.collective!r}"
    if curve.processes > curve.group_size or curve.group_size < 2:
        least = max(2, curve.processes)
        return f"group_size is {curve.group_size}, which is fewer than the {least} processes"
    return None


def _honest(hardware: Any) -> str | None:
    lacks = hardware.calibrated and hardware.calibration is None
    return "'calibrated' is true but 'calibration' is missing" if lacks else None


_CHECKS: dict[type, Callable[[Any], str | None]] = {
    model.Hardware: _honest,
    model.Efficiency: _efficiency,
    model.CollectiveCurve: _collective,
    model.Chip: _chip,
    links.Wraparound: _wraparound,
    links.Torus: _torus,
    links.GpuCluster: _cluster,
}


class _CalibrationFile(_File):
    """How a profile came about. `fit` should name its method and held-out error, `machine` its noise."""

    date: Date
    machine: dict[str, Any]
    versions: dict[str, Any]
    fit: dict[str, Any]
    measurements: list[dict[str, Any]]
    base: Text


FORMAT, POINTS = "format", "points"
_MARKS: dict[type, dict[str, Any]] = {
    model.Hardware: {FORMAT: (Literal["layoutopt-hardware/1"], ...)},
    **{each: {"kind": (Literal[each.kind], ...)} for each in links.TOPOLOGIES},
}
"""The fields that only files have."""
_OTHERS: dict[Any, Any] = {
    str: Text,
    int: PositiveInt,
    Curve: Annotated[list[tuple[float, float]], AfterValidator(_rising)],
    model.Calibration: _CalibrationFile,
}
"""What files hold for these types."""


def read(content: Any) -> tuple[model.Hardware | None, list[str]]:
    """The hardware in parsed JSON `content`, and its faults as 'path: fault'; one of the two is empty."""
    try:
        return _freeze(_form(model.Hardware).model_validate(content)), []
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
    if isinstance(value, _CalibrationFile):
        texts = {
            k: v if isinstance(v, str) else json.dumps(v, sort_keys=True)
            for k, v in value.model_dump().items()
        }
        return model.Calibration(**texts)
    if isinstance(value, _Form):
        own = {name: _freeze(getattr(value, name, None)) for name in value.frozen_as.__annotations__}
        hints = get_type_hints(value.frozen_as)
        own |= {name: Curve(tuple(getattr(value, POINTS))) for name in own if hints[name] is Curve}
        return value.frozen_as(**own)
    if isinstance(value, dict):
        return tuple((key, _freeze(item)) for key, item in sorted(value.items()))
    if isinstance(value, list):
        return tuple(_freeze(item) for item in value)
    return value
