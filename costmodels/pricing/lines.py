"""The priced lines of a program, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from costmodels.kernels.compute import Quantity
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import Origin

KernelKey = tuple[Op, tuple[TensorType, ...], tuple[TensorType, ...], frozenset[str], bool]


@dataclass(frozen=True, slots=True)
class Called:
    """An instruction that the local engine runs call by call, with its operands."""

    key: KernelKey


@dataclass(frozen=True, slots=True)
class Sent:
    """The bytes of every message of a collective; messages that travel `together` share one latency."""

    payloads: tuple[int, ...]
    together: bool = True


Opened = Quantity | Called | Sent | None


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction's share of the price.

    Attributes:
      times: how often it runs in a step (`Loop.times`); every other number is of one run on one device.
      seconds: all of it, hidden or not.
      exposed: seconds that the step waits for.
      flops, bytes: of computation.
      axes, sent, purpose: of a collective: its mesh axes, the bytes a device sends, its class of
        `costmodels.pricing.overlap`.
      opened: what the seconds follow from (`costmodels.pricing.explanation`).
    """

    name: str
    text: str
    origin: Origin
    kind: str
    times: float
    seconds: float
    exposed: float
    flops: float = 0.0
    bytes: float = 0.0
    axes: Axes = ()
    sent: float = 0.0
    purpose: str = ""
    opened: Opened = None

    @property
    def is_communication(self) -> bool:
        return bool(self.axes)


@dataclass(frozen=True)
class Cost:
    """The price of a program on hardware; all numbers of one step, per device."""

    lines: tuple[Line, ...]

    def _total(self, value: Callable[[Line], float], communication: bool) -> float:
        return sum(value(x) * x.times for x in self.lines if x.is_communication == communication)

    @cached_property
    def compute_seconds(self) -> float:
        return self._total(lambda x: x.seconds, False)

    @cached_property
    def communication_seconds(self) -> float:
        return self._total(lambda x: x.seconds, True)

    @cached_property
    def exposed_communication_seconds(self) -> float:
        return self._total(lambda x: x.exposed, True)

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.exposed_communication_seconds

    @cached_property
    def flops(self) -> float:
        return self._total(lambda x: x.flops, False)

    def communication_bytes(self) -> dict[str, float]:
        """Bytes sent, by mesh axes joined with '+'."""
        out: dict[str, float] = {}
        for x in self.lines:
            if x.is_communication:
                key = "+".join(x.axes)
                out[key] = out.get(key, 0.0) + x.sent * x.times
        return out

    def by(self, key: Callable[[Line], str]) -> dict[str, float]:
        """Exposed seconds grouped by any property of the lines, the largest first."""
        out: dict[str, float] = {}
        for x in self.lines:
            out[key(x)] = out.get(key(x), 0.0) + x.exposed * x.times
        return dict(sorted(out.items(), key=lambda item: -item[1]))
