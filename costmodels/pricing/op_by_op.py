"""The op-by-op model: seconds of the array functions that the local engine calls, on hardware with measured
curves of them (`costmodels.kernels.array_functions`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from costmodels.hardware import ComputeCurve, Hardware
from costmodels.kernels.array_functions import calls
from costmodels.kernels.calls import Call, call_seconds
from costmodels.pricing.items import Called, Started


def is_measured(hardware: Hardware) -> bool:
    """True if the hardware's file has curves of array functions."""
    return any(c.op_class == "kernel" for c in hardware.compute_curves)


@lru_cache(maxsize=1 << 14)
def array_functions(item: Called) -> tuple[Call, ...]:
    """The array functions that the local engine calls; NoArrayFunctionError as of `calls`."""
    return tuple(calls(item.op, item.inputs, item.outputs, item.split))


@dataclass
class OpByOp:
    """Predicts array functions on one mesh, with a cache."""

    hardware: Hardware
    devices: int
    _seconds: dict[Called, float] = field(default_factory=dict)

    @cached_property
    def _curves(self) -> dict[str, ComputeCurve]:
        return {c.op_class: c for c in self.hardware.compute_curves if c.op_class.split(".")[0] == "kernel"}

    def started(self, item: Started) -> float:
        """The fixed seconds of a step under every layout: its start, and storing its variables."""
        return self._constant("kernel.step") + item.writes * self._constant("kernel.store")

    def called(self, item: Called) -> float:
        """Seconds of an instruction's array functions."""
        seconds = self._seconds.get(item)
        if seconds is None:
            found = array_functions(item)
            seconds = self._seconds[item] = sum(call_seconds(c, self._curve, item.stays) for c in found)
        return seconds

    def _curve(self, op_class: str) -> Callable[[float], float] | None:
        """Seconds of a class of array functions against its bytes or FLOPs; None if it was not measured."""
        found = self._curves.get(op_class)
        if found is None:
            return None
        share = self.hardware.contention(self.devices) / self.hardware.contention(found.devices)
        return lambda amount: found.seconds(amount) * share

    def _constant(self, name: str) -> float:
        curve = self._curve(name)
        return 0.0 if curve is None else curve(0.0)
