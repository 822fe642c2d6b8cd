"""Measured curves of a machine with their sources."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from costmodels.frameworks.framework import Text
from costmodels.hardware.curve import Curve
from costmodels.hardware.numbers import Checked, Date, ReadAs
from mesh_tf_core.ir.program import COLLECTIVES

Points = Annotated[
    Curve, Field(alias="points"), ReadAs(list[tuple[float, float]], lambda found: Curve(tuple(found)))
]


@dataclass(frozen=True, slots=True)
class Efficiency(Checked):
    """Fraction of the peak that one product reaches: a curve over its FLOPs, never above 1."""

    curve: Points
    source: Text
    date: Date
    uncertainty: float | None = None

    def fault(self) -> str | None:
        points = self.curve.points
        if points[-1][1] > 1 or points[0][1] <= 0:
            return "every y value (a fraction of the peak) must be above 0 and at most 1"
        for (x0, y0), (x1, y1) in pairwise(points):
            if x1 / y1 < x0 / y0:
                return (
                    f"the efficiency rises so fast that a matmul of {x1:g} FLOPs would take less time "
                    f"than one of {x0:g} FLOPs"
                )
        return None


@dataclass(frozen=True, slots=True)
class CollectiveCurve(Checked):
    """Measured seconds of one collective over groups of `group_size`, against bytes of the FULL array.

    `devices` is the number of devices that took part at once (in all groups together), `processes` the number
    of processes of each group.
    """

    collective: Text
    group_size: PositiveInt
    devices: PositiveInt
    seconds: Points
    source: Text
    date: Date
    uncertainty: float | None = None
    processes: PositiveInt = 1

    def fault(self) -> str | None:
        if self.collective not in COLLECTIVES:
            return f"collective must be one of {', '.join(COLLECTIVES)}, found {self.collective!r}"
        if self.processes > self.group_size or self.group_size < 2:
            least = max(2, self.processes)
            return f"group_size is {self.group_size}, which is fewer than the {least} processes"
        return None


@dataclass(frozen=True, slots=True)
class ComputeCurve:
    """Measured seconds of one class of local operation on one device, against its FLOPs or its bytes."""

    op_class: Text
    dtype: Text
    against: Literal["flops", "bytes"]
    devices: PositiveInt
    seconds: Points
    source: Text
    date: Date
    uncertainty: float | None = None
