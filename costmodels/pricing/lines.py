"""The predicted lines of a program, and their sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from costmodels.pricing.items import Computed, Item
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.program import Origin


@dataclass(frozen=True, slots=True)
class Line:
    """One item with its price.

    Attributes:
      times: how often it runs in a step, as far as that counts (`costmodels.stage_times`); every other number
        is of one run on one device.
      item: the source of its seconds (`costmodels.pricing.explanation`).
      seconds: all of it, hidden or not.
      exposed: seconds that the step waits for.
      value: of a message, the first value that it brings; -1 if another program than the step's sends it.
      ran: how often it runs in the program (`Loop.times`); 0 if all of it counts.
    """

    name: str
    text: str
    origin: Origin
    times: float
    item: Item
    seconds: float
    exposed: float
    value: int = -1
    ran: float = 0.0

    def counted(self, share: float) -> Line:
        """The same where only a share of its runs counts."""
        return replace(self, times=self.times * share, ran=self.times)

    @property
    def runs(self) -> float:
        """How often it runs in the program."""
        return self.ran or self.times

    @property
    def kind(self) -> str:
        """The class of the work; of a collective, its name."""
        return self.item.kind

    @property
    def flops(self) -> float:
        return self.item.flops

    @property
    def bytes(self) -> float:
        """Read and written by computation."""
        return self.item.bytes

    @property
    def axes(self) -> Axes:
        """The axes of a collective, or of a message over the host link."""
        return self.item.axes

    @property
    def sent(self) -> float:
        """Bytes that a device sends, or moves over its host link."""
        return self.item.sent

    @property
    def purpose(self) -> str:
        """The purpose of a collective, its rule (`costmodels.pricing.overlap`)."""
        return self.item.purpose

    @property
    def is_communication(self) -> bool:
        return bool(self.item.axes)


def is_launched(item: Item) -> bool:
    """True if a host launches a kernel for each run of an item, not one for many."""
    return not item.axes and not (isinstance(item, Computed) and item.quantity.joins)


@dataclass(frozen=True)
class Cost:
    """The price of a program on hardware; all numbers of one step, per device.

    Attributes:
      interval: seconds that a host needs for each kernel that it launches; 0: none launches them.
    """

    lines: tuple[Line, ...]
    interval: float = 0.0

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

    @cached_property
    def launched(self) -> float:
        """The number of kernels that a host launches in a step."""
        return sum(x.times for x in self.lines if is_launched(x.item))

    @property
    def device_seconds(self) -> float:
        """Seconds of what the device does."""
        return self.compute_seconds + self.exposed_communication_seconds

    @cached_property
    def host_seconds(self) -> float | None:
        """Seconds of the host that launches it, where it needs longer."""
        host = self.interval * self.launched if self.interval else 0.0
        return host if host > self.device_seconds else None

    @property
    def step_seconds(self) -> float:
        """The longer of both."""
        return self.host_seconds or self.device_seconds

    @cached_property
    def flops(self) -> float:
        return self._total(lambda x: x.flops, False)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Notes on work that was priced otherwise than this hardware runs it."""
        lacking = (x.item.lacks for x in self.lines if isinstance(x.item, Computed) and x.item.lacks)
        return tuple(
            f"{lacks}, so the time is predicted from FLOPs and bytes, not from measured array functions"
            for lacks in dict.fromkeys(lacking)
        )

    def by(self, key: Callable[[Line], str]) -> dict[str, float]:
        """Exposed seconds grouped by any property of the lines, the largest first."""
        out: dict[str, float] = {}
        for x in self.lines:
            out[key(x)] = out.get(key(x), 0.0) + x.exposed * x.times
        return dict(sorted(out.items(), key=lambda item: -item[1]))
