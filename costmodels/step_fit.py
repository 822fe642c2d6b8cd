"""Constants of a framework, fitted to measured steps.

(1) kernel = max(interval, start + max(FLOP seconds / sustained, bytes seconds / efficiency))
    step = sum of kernels + sum over messages of (launch + seconds) (1 - hidden)
Least mean absolute error of the logarithm, where a constant pays for leaving what is expected of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.hardware import GpuCluster, Hardware
from costmodels.kernels.compute import ComputeCost, Quantity, compute_cost
from costmodels.network.topology import MeshPlacement
from costmodels.pricing.items import Computed, Item, Sent
from costmodels.pricing.overlap import ACTIVATION, CLASSES
from costmodels.pricing.pricer import Pricer
from mesh_tf_core.ir.instructions import GRADIENT, PARAMETER

SUSTAINED, EFFICIENCY = "chip.sustained", "chip.memory_efficiency"
INTERVAL, LAUNCH = "chip.launch_interval", "topology.launch"
HIDDEN, TENSOR = f"overlap.{GRADIENT}", f"overlap.{ACTIVATION}"
GATHERED = f"overlap.{PARAMETER}"  # hidden as gradients are
PATHS = (SUSTAINED, EFFICIENCY, INTERVAL, LAUNCH, *(f"overlap.{each}" for each in CLASSES))
"""The constants of equation (1), by their paths in a hardware file."""
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


def bare(machine: Hardware) -> Hardware:
    """A machine whose products and memory are at the full rate, without the numbers that fits choose."""
    whole = replace(machine.chip.memory_efficiency, value=1.0, given="", source="", date="")
    chip = replace(machine.chip, sustained=None, launch_interval=None, memory_efficiency=whole)
    return replace(machine, chip=chip)


def constants_of(machine: Hardware) -> dict[str, float]:
    """The constants of equation (1) as a machine has them."""
    chip, topology = machine.chip, machine.topology
    return {
        SUSTAINED: 1.0 if chip.sustained is None else chip.sustained.value,
        EFFICIENCY: chip.memory_efficiency.value,
        INTERVAL: 0.0 if chip.launch_interval is None else chip.launch_interval.value,
        LAUNCH: topology.launch.value if isinstance(topology, GpuCluster) else 0.0,
        **{f"overlap.{each}": machine.hidden_fraction(each) for each in CLASSES},
    }


class StepSums:
    """The quantities of equation (1) for a step.

    Args:
      machine: that it is predicted for.
      items: how often each runs in the step.
      seconds: measured.
      chip: as constants name it.
      board: what the clocks of this chip keep of those that constants are of.

    Attributes:
      kernels: a row each: FLOP seconds, whether of a product, bytes seconds (all at the full rate), whether
        these follow each other, start, times.
      sent: seconds of messages without their launch, by class; `launches`: how many are launched.
      longer: seconds of messages and transfers beyond the products between their start and their done.
    """

    def __init__(
        self,
        machine: Hardware,
        placement: MeshPlacement,
        items: Iterable[tuple[float, Item]],
        seconds: float,
        chip: str = "",
        board: float = 1.0,
    ) -> None:
        self.machine, self.seconds, self.chip, self.board = machine, seconds, chip, board
        self.known = constants_of(machine)
        full, prices, known = bare(machine), Pricer(machine, placement), dict[Quantity, ComputeCost]()
        devices, kernels = placement.mesh.devices, list[tuple[float, ...]]()
        self.sent, self.launches, self.longer = np.zeros(len(CLASSES)), np.zeros(len(CLASSES)), 0.0
        for times, item in items:
            if isinstance(item, Computed):
                if (cost := known.get(item.quantity)) is None:
                    cost = known[item.quantity] = compute_cost(full, item.quantity, devices)
                product = item.quantity.op_class == "matmul"
                most = max(cost.flop_seconds, cost.memory_seconds)
                turn = cost.seconds > cost.launch_seconds + most * (1 + 1e-9)
                both = cost.flop_seconds, product, cost.memory_seconds, turn
                kernels.append((*both, cost.launch_seconds, times))
            elif isinstance(item, Sent) and not item.between:
                own = CLASSES.index(item.purpose if item.purpose in CLASSES else ACTIVATION)
                taken = prices.seconds_of(item)[0]
                alone = 0 if item.joined else 1
                count = (alone if item.together else len(item.payloads)) if taken else 0
                self.sent[own] += (taken - count * self.known[LAUNCH]) * times
                self.launches[own] += count * times
            else:
                self.longer += prices.seconds_of(item)[1] * times
        every = np.array(kernels or np.zeros((1, 6)))
        alike, index = np.unique(every[:, :5], axis=0, return_inverse=True)
        self.kernels = np.column_stack([alike, np.bincount(index.ravel(), weights=every[:, 5])])

    def constants(self, k: Mapping[str, float]) -> np.ndarray:
        """The values of `PATHS`: of `k`, else as the machine has them."""
        k = {**k, SUSTAINED: k[SUSTAINED] * self.board} if SUSTAINED in k else k
        return np.array([k.get(path, self.known[path]) for path in PATHS])


class StepFit:
    """Equation (1) for many steps at once.

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
        self.seconds = np.array([s.seconds for s in sums])
        self.used = [c for c in constants if any(s.chip in c.chips for s in sums)]
        lengths = [len(s.kernels) for s in sums]
        self._first, self._of = np.cumsum([0, *lengths])[:-1], np.repeat(np.arange(len(sums)), lengths)
        columns = np.concatenate([s.kernels for s in sums]).T
        self._flops, product, self._moved, turn, self._start, self._times = columns
        self._product, self._turn = product > 0, turn > 0
        self._sent, self._launches = np.array([s.sent for s in sums]), np.array([s.launches for s in sums])
        self._longer = np.array([s.longer for s in sums])
        keys = [(s.chip, s.machine.name, s.machine.framework) for s in sums]
        self._machines = dict(zip(keys, sums, strict=True))
        self._kind = np.array([list(self._machines).index(key) for key in keys])

    def predicted(self, values: Sequence[float]) -> np.ndarray:
        """Seconds of every step, with values of the constants in `used`."""
        kinds = [s.constants(self._on(chip, values)) for (chip, *_), s in self._machines.items()]
        of_row = np.array(kinds)[self._kind]
        sustained, efficiency, interval = of_row[self._of, :3].T
        worked = np.where(self._product, self._flops / sustained, self._flops)
        moved = self._moved / efficiency
        kernel = self._start + np.where(self._turn, worked + moved, np.maximum(worked, moved))
        computed = np.add.reduceat(np.maximum(kernel, interval) * self._times, self._first)
        sent = self._sent + self._launches * of_row[:, 3:4]
        found: np.ndarray = computed + self._longer + (sent * (1 - of_row[:, 4:])).sum(axis=1)
        return found

    def _on(self, chip: str, values: Sequence[float]) -> dict[str, float]:
        """The constants of a chip."""
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
