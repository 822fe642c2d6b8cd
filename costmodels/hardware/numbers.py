"""One number of a hardware file with its source, and the quantities of fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

T = TypeVar("T")
NamedPairs = tuple[tuple[str, T], ...]
"""A frozen mapping: pairs in the file's order."""


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


@dataclass(frozen=True, slots=True)
class Measures:
    """The quantity that a number of a file measures (`costmodels.hardware.schema`), and its limits in SI
    units."""

    quantity: str
    low: float
    high: float = float("inf")


@dataclass(frozen=True, slots=True)
class Length:
    """Number of elements of a list or mapping in a file."""

    least: int
    most: int | None = None


Rate = Annotated[Number, Measures("compute rate", 1.0)]
Bandwidth = Annotated[Number, Measures("bandwidth", 1.0)]
Memory = Annotated[Number, Measures("memory", 0.0)]
Time = Annotated[Number, Measures("time", 0.0)]
Fraction = Annotated[Number, Measures("fraction", 0.0, 1.0)]
PositiveFraction = Annotated[Number, Measures("fraction", 1e-6, 1.0)]
Count = Annotated[Number, Measures("count", 1.0)]
ByGroup = Annotated[tuple[tuple[int, Bandwidth], ...], Length(1)]
"""Bandwidths by the number of devices in a group."""
ByHead = Annotated[tuple[tuple[int, PositiveFraction], ...], Length(1)]
"""Fractions of the peak by the size of an attention's heads."""
