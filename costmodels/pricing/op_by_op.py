"""Prices of the array functions that the local engine calls, on hardware whose file has measured them
(`costmodels.kernels.array_functions`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from costmodels.hardware import ComputeCurve, Hardware
from costmodels.kernels.array_functions import call_seconds, calls
from costmodels.pricing.lines import Called, KernelKey
from mesh_tf_core.ir.program import Local, Program, WriteVariable


@dataclass
class Calls:
    """Prices instructions of one mesh call by call, remembering what it has priced."""

    hardware: Hardware
    devices: int
    _seconds: dict[KernelKey, float | None] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether the hardware's file has curves of array functions."""
        return "kernel" in self._curves

    @cached_property
    def _curves(self) -> dict[str, ComputeCurve]:
        return {c.op_class: c for c in self.hardware.compute_curves if c.op_class.split(".")[0] == "kernel"}

    def of_step(self, program: Program) -> float:
        """What a step takes under every layout: its start, and storing its variables."""
        written = sum(isinstance(instr, WriteVariable) for instr in program.code)
        return sum(self._constant(name) * n for name, n in (("kernel.step", 1), ("kernel.store", written)))

    def of(self, program: Program, instr: Local) -> tuple[float | None, Called | None]:
        """Seconds of an instruction's array functions, and what they are; None if one is not known."""
        values = [program.values[i] for i in (*instr.inputs, *instr.outputs)]
        split = frozenset(
            name for v in values for name, axes in zip(v.shape.names, v.splits, strict=True) if axes
        )
        types = (tuple(map(program.local, instr.inputs)), tuple(map(program.local, instr.outputs)))
        stays = instr.origin.phase == "forward"
        key = (instr.op, *types, split, stays)
        if key not in self._seconds:
            try:
                found = calls(instr.op, *types, split)
            except NotImplementedError:
                self._seconds[key] = None
            else:
                self._seconds[key] = sum(call_seconds(c, self._curve, stays) for c in found)
        seconds = self._seconds[key]
        return seconds, None if seconds is None else Called(key)

    def _curve(self, op_class: str) -> Callable[[float], float] | None:
        """Seconds of a class of array functions against its bytes or FLOPs; None if it was not measured."""
        found = self._curves.get(op_class)
        if found is None:
            return None
        share = self._contended(found)
        return lambda amount: found.seconds(amount) * share

    def _constant(self, name: str) -> float:
        found = self._curves.get(name)
        return found.seconds(0.0) * self._contended(found) if found else 0.0

    def _contended(self, curve: ComputeCurve) -> float:
        return self.hardware.contention(self.devices) / self.hardware.contention(curve.devices)
