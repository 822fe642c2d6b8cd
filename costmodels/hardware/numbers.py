"""The numbers of a hardware file with their sources, and how a file says them, mappings and texts.

`ReadAs` marks a field that a file holds in another form than the model; pydantic reads files by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, StringConstraints
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from costmodels.frameworks.framework import PLAIN, Text

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
Date = Annotated[str, StringConstraints(pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")]


class WrittenNumber(BaseModel):
    """A number as a file has it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    value: float
    unit: str
    source: Text
    date: Date
    uncertainty: Annotated[float, Field(ge=0)] | None = None


@dataclass(frozen=True, slots=True)
class Number:
    """One number and its source.

    Attributes:
      value: in SI units (FLOP/s, bytes, bytes/s, seconds), or a plain fraction or count.
      given: the number and unit as the source prints it.
      source: a paper, repository file at a commit, documentation page, or 'assumption: …'.
      date: of publication, of the commit, or of reading (ISO 8601, may stop at the month or year).
      uncertainty: relative standard error, if known.
    """

    value: float
    given: str
    source: str
    date: str
    uncertainty: float | None = None


@dataclass(frozen=True)
class ReadAs:
    """The form of a field in files, and what makes the field's value of it."""

    form: Any
    made: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self.made, handler.generate_schema(self.form))


class Checked:
    """A part of a hardware file with a check of its own, which other values of a program need not pass."""

    __slots__ = ()

    def fault(self) -> str | None:
        """Words on the impossible in it; None: there is nothing."""
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def sound(value: Checked) -> Checked:
            if fault := value.fault():
                raise ValueError(fault)
            return value

        return no_info_after_validator_function(sound, handler(source))


def measures(quantity: str, low: float, high: float = float("inf")) -> ReadAs:
    """A number that measures something, within its limits in SI units."""

    def made(number: WrittenNumber) -> Number:
        measured, factor = UNITS.get(number.unit, ("", 1.0))
        if measured != quantity:
            known = ", ".join(unit for unit, (measured, _) in UNITS.items() if measured == quantity)
            raise ValueError(f"{number.unit!r} is not a unit of {quantity}; use one of {known}")
        value = number.value * factor
        if not low <= value <= high:
            bound = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
            raise ValueError(f"the {quantity} must be {bound}, found {number.value:g} {number.unit}")
        given = f"{number.value:.10g}" + ("" if number.unit in PLAIN else f" {number.unit}")
        return Number(value, given, number.source, number.date, number.uncertainty)

    return ReadAs(WrittenNumber, made)


def mapping(keys: Any, values: Any, least: int = 0) -> ReadAs:
    """A frozen mapping: sorted pairs."""
    form = Annotated[dict[keys, values], Field(min_length=least)]
    return ReadAs(form, lambda found: tuple(sorted(found.items())))


def listing(items: Any, least: int, most: int | None = None) -> ReadAs:
    """A list of so many items."""
    return ReadAs(Annotated[list[items], Field(min_length=least, max_length=most)], tuple)


Rate = Annotated[Number, measures("compute rate", 1.0)]
Bandwidth = Annotated[Number, measures("bandwidth", 1.0)]
Memory = Annotated[Number, measures("memory", 0.0)]
Time = Annotated[Number, measures("time", 0.0)]
Fraction = Annotated[Number, measures("fraction", 0.0, 1.0)]
PositiveFraction = Annotated[Number, measures("fraction", 1e-6, 1.0)]
Count = Annotated[Number, measures("count", 1.0)]
ByGroup = Annotated[tuple[tuple[int, Number], ...], mapping(int, Bandwidth, 1)]
"""Bandwidths by the number of devices in a group."""
ByHead = Annotated[tuple[tuple[int, Number], ...], mapping(int, PositiveFraction, 1)]
"""Fractions of the peak by the size of an attention's heads."""
ByName = tuple[tuple[str, Number], ...]
