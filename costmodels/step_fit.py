"""Constants of a framework, fitted to measured steps.

A step is the sum of its kernels and exposed messages (`costmodels.pricing.pricer`), whose parts are computed
once; constants come last in each, so that the price of a step is that of the product whatever they are.
Least mean absolute error of the logarithm, where a constant pays for leaving what is expected of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from costmodels.hardware import GpuCluster, Hardware
from costmodels.kernels.compute import KernelParts, Quantity, kernel_parts
from costmodels.pricing.hidden import is_launched
from costmodels.pricing.items import Computed, Item, Sent, Transferred
from costmodels.pricing.overlap import ACTIVATION, CLASSES
from costmodels.pricing.pricer import Pricer
from mesh_tf_core.ir.instructions import GRADIENT, PARAMETER

SUSTAINED, EFFICIENCY = "chip.sustained", "chip.memory_efficiency"
INTERVAL, LAUNCH = "chip.launch_interval", "topology.launch"
HIDDEN, TENSOR = f"overlap.{GRADIENT}", f"overlap.{ACTIVATION}"
GATHERED = f"overlap.{PARAMETER}"  # hidden as gradients are
PATHS = (SUSTAINED, EFFICIENCY, INTERVAL, LAUNCH, *(f"overlap.{each}" for each in CLASSES))
"""The constants, by their paths in a hardware file."""
SHRINK = 0.004
"""Error that a constant must save to leave what is expected of it by one width."""
DRAWS = 30


@dataclass(frozen=True)
class FittedConstant:
    """A number of a framework.

    Attributes:
      chips: that have it.
      name: its path in a hardware file; gradient stands for parameter too.
      around, width: what physics or sources let expect.
      most: bound.
    """

    chips: tuple[str, ...]
    name: str
    around: float
    width: float
    most: float = 1.0

    def at(self, scaled: float) -> float:
        """Its value so many widths from what is expected, within bounds."""
        least = 0.3 if self.name in (SUSTAINED, EFFICIENCY) else 0.0
        return min(self.most, max(least, self.around + scaled * self.width))


def constants_of(machine: Hardware) -> dict[str, float]:
    """The constants as a machine has them."""
    chip, topology = machine.chip, machine.topology
    return {
        SUSTAINED: 1.0 if chip.sustained is None else chip.sustained.value,
        EFFICIENCY: chip.memory_efficiency.value,
        INTERVAL: 0.0 if chip.launch_interval is None else chip.launch_interval.value,
        LAUNCH: topology.launch.value if isinstance(topology, GpuCluster) else 0.0,
        **{f"overlap.{each}": machine.hidden_fraction(each) for each in CLASSES},
    }


class StepSums:
    """The quantities that make the price of a step, without the constants of `PATHS`.

    Args:
      prices: of its machine and mesh.
      items: how often each runs in the step.
      seconds: measured.
      chip: as constants name it.
      board: what the clocks of this chip keep of those that constants are of.

    Attributes:
      kernels: how often each runs.
      sent: seconds without launches, and launches, of all messages of a class (its number in `CLASSES`; one
        more: those that nothing hides), and of each that products between its start and done hide.
      between: seconds of a kernel that hide a message, in runs of the kernel.
    """

    def __init__(
        self,
        prices: Pricer,
        items: Iterable[tuple[float, Item]],
        seconds: float,
        chip: str = "",
        board: float = 1.0,
    ) -> None:
        self.machine, self.seconds, self.chip, self.board = prices.hardware, seconds, chip, board
        self.known, self.devices, self.host = constants_of(self.machine), prices.devices, 0.0
        self.kernels = defaultdict[Quantity, float](float)
        self.between = defaultdict[tuple[Hashable, Quantity], float](float)
        self.sent = defaultdict[Hashable, np.ndarray](lambda: np.zeros(2))
        for times, item in items:
            self.host += times * prices.interval * is_launched(item)
            if isinstance(item, Computed):
                self.kernels[item.quantity] += times
                continue
            key: Hashable = len(CLASSES)
            launches, taken = 0, prices.seconds_of(item)[0]
            if isinstance(item, Sent):
                if prices.hidden in item.axes:
                    continue
                alone = 0 if item.joined else 1
                launches = (alone if item.together else len(item.payloads)) if taken else 0
                key = CLASSES.index(item.purpose) if item.purpose in CLASSES else key
            if isinstance(item, Sent | Transferred) and item.between:
                key = item
                for product, part in item.between:
                    self.kernels[product.quantity] += 0
                    self.between[item, product.quantity] += part * times
            self.sent[key] += np.array([taken - launches * self.known[LAUNCH], launches]) * times

    def constants(self, k: Mapping[str, float]) -> np.ndarray:
        """The values of `PATHS`: of `k`, else as the machine has them."""
        k = {**k, SUSTAINED: k[SUSTAINED] * self.board} if SUSTAINED in k else k
        return np.array([k.get(path, self.known[path]) for path in PATHS])


class StepFit:
    """The prices of many steps at once.

    Args:
      constants: those that no step has are left out.
      weights: how much each step counts; all alike by default.
    """

    def __init__(
        self,
        constants: Sequence[FittedConstant],
        sums: Sequence[StepSums],
        weights: Sequence[float] = (),
        shrink: float = SHRINK,
    ) -> None:
        self.sums, self.shrink, self.loss = sums, shrink, 0.0
        self.weights = np.array(weights or np.ones(len(sums)))
        self.seconds, self._host = np.array([s.seconds for s in sums]), np.array([s.host for s in sums])
        self.used = [c for c in constants if any(s.chip in c.chips for s in sums)]
        kernels = [(at, s, q) for at, s in enumerate(sums) for q in s.kernels]
        messages = [(at, key) for at, s in enumerate(sums) for key in s.sent]
        self._of, self._message_of = (np.array([at for at, *_ in of], int) for of in (kernels, messages))
        parts = [astuple(kernel_parts(s.machine, q, s.devices))[:8] for _, s, q in kernels]
        self._kernels = KernelParts(*np.array(parts or np.zeros((0, 8))).T)
        self._times = np.array([s.kernels[q] for _, s, q in kernels])
        self._launched = np.array([not q.joins for *_, q in kernels])
        self._sent = np.array([sums[at].sent[key] for at, key in messages]).reshape(-1, 2).T
        self._class = np.array([k if isinstance(k, int) else len(CLASSES) for _, k in messages], int)
        place = {(at, q): n for n, (at, _, q) in enumerate(kernels)}
        index = {each: n for n, each in enumerate(messages)}
        every = [
            (index[at, key], place[at, q], x)
            for at, s in enumerate(sums)
            for (key, q), x in s.between.items()
        ]
        hidden, product, self._runs = np.array(every or np.zeros((0, 3))).T
        self._hidden, self._product = hidden.astype(int), product.astype(int)
        keys = [(s.chip, s.machine.name, s.machine.framework) for s in sums]
        self._machines = dict(zip(keys, sums, strict=True))
        self._kind = np.array([list(self._machines).index(key) for key in keys])

    def predicted(self, values: Sequence[float]) -> np.ndarray:
        """Seconds of every step, with values of the constants in `used`."""
        kinds = [s.constants(self._on(chip, values)) for (chip, *_), s in self._machines.items()]
        of_row = np.pad(np.array(kinds), ((0, 0), (0, 1)))[self._kind]
        sustained, efficiency, interval = of_row[self._of, :3].T
        k = replace(self._kernels, interval=interval * self._launched)
        worked, moved = k.flops(sustained, np.minimum, np.maximum), k.memory(efficiency)
        kernels = k.seconds(worked, moved, np.minimum, np.maximum)
        own = of_row[self._message_of]
        sent = (self._sent[0] + self._sent[1] * own[:, 3]) * (1 - own[range(len(own)), 4 + self._class])
        under = np.zeros(len(own))
        np.add.at(under, self._hidden, kernels[self._product] * self._runs)
        found: np.ndarray = np.bincount(self._of, kernels * self._times, len(self.sums))
        found += np.bincount(self._message_of, np.maximum(sent - under, 0.0), len(self.sums))
        return np.maximum(found, self._host)

    def _on(self, chip: str, values: Sequence[float]) -> dict[str, float]:
        found = {c.name: v for c, v in zip(self.used, values, strict=True) if chip in c.chips}
        return found | ({GATHERED: found[HIDDEN]} if HIDDEN in found else {})

    def best(self, weights: np.ndarray | None = None) -> list[float]:
        """Constants of the least error; `loss` is then what was made least."""
        from scipy.optimize import minimize

        counted = self.weights if weights is None else weights

        def values(scaled: np.ndarray) -> list[float]:
            return [c.at(t) for c, t in zip(self.used, scaled, strict=True)]

        def loss(scaled: np.ndarray) -> float:
            off = np.abs(np.log(self.predicted(values(scaled)) / self.seconds))
            return float(np.average(off, weights=counted) + self.shrink * (scaled**2).sum())

        corners = np.vstack([np.zeros(len(self.used)), np.eye(len(self.used)) * 0.7])
        if not self.used:
            self.loss = loss(corners[0])
            return []
        options = {"xatol": 5e-3, "fatol": 1e-5, "maxfev": 400, "initial_simplex": corners}
        found = minimize(loss, corners[0], method="Nelder-Mead", options=options)
        self.loss = float(found.fun)
        return values(found.x)

    def intervals(self, groups: Sequence[Hashable]) -> np.ndarray:
        """5 % and 95 % of every constant over fits to groups of steps drawn with replacement."""
        if not self.used:
            return np.zeros((2, 0))
        rng, names = np.random.default_rng(0), sorted({*groups}, key=str)
        index = np.array([names.index(each) for each in groups])
        drawn = []
        for _ in range(DRAWS):
            count = np.bincount(rng.integers(len(names), size=len(names)), minlength=len(names))
            if (weights := count[index] * self.weights).sum():
                drawn.append(self.best(weights))
        ends: np.ndarray = np.quantile(drawn, [0.05, 0.95], axis=0)
        return ends
