"""The constants of the presets that are fitted to published runs, with their intervals.

At most four for a stack of software, the same for all its machines, models and sizes:
  (1) kernel = max(interval, start + max(FLOP seconds / kept, bytes seconds / efficiency))
      step = sum of kernels + sum over collectives of (launch + seconds) (1 - hidden)
FLOP seconds are divided for products alone: kept = sustained, of unaligned ones sustained times what these
keep. Least mean absolute error of the logarithm; the interval of 90 %
is of fits to models drawn with replacement (bootstrap), as runs of one model are no independent evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from benchmarks.published_gpu import COMPILED, LAUNCHED, MEGATRON_2022
from benchmarks.published_rows import Prices, Run, copied_bytes, peak
from benchmarks.published_tpu import TPU
from costmodels import Hardware
from costmodels.frameworks import DEFAULT
from costmodels.hardware import GpuCluster
from costmodels.kernels.compute import compute_cost
from costmodels.pricing.items import Computed, Sent
from costmodels.pricing.overlap import CLASSES

DRAWS = 100
SUSTAINED, EFFICIENCY, INTERVAL = "sustained", "memory_efficiency", "launch_interval"
UNALIGNED, LAUNCH = "unaligned_efficiency", "launch"
HIDDEN = "gradient and parameter"


@dataclass(frozen=True)
class Priced:
    """A run, what it is predicted to take and to hold, and the quantities of equation (1).

    Attributes:
      shipped: seconds with the preset as it is.
      peak, limit: bytes that it holds, and that there are.
      kernels: a row each: FLOP seconds of products, of unaligned products and of all else, bytes seconds (all
        at the full rate), start, times.
      sent: seconds of collectives without their launch, by class.
      launches: how many collectives are launched, by class.
    """

    run: Run
    shipped: float
    peak: int
    limit: float
    kernels: np.ndarray
    sent: np.ndarray
    launches: np.ndarray

    @property
    def error(self) -> float:
        return self.shipped / self.run.seconds - 1

    @staticmethod
    def of(run: Run, prices: Prices) -> Priced:
        program = run.program()
        hardware, cost = prices.of(run, program)
        shipped = constants(hardware)
        kernels, sent, launches = [], np.zeros(len(CLASSES)), np.zeros(len(CLASSES))
        for x in cost.lines:
            if isinstance(x.item, Sent):
                own = CLASSES.index(x.purpose)
                count = (1 if x.item.together else len(x.item.payloads)) if x.seconds else 0
                sent[own] += (x.seconds - count * shipped[LAUNCH]) * x.times
                launches[own] += count * x.times
                continue
            assert isinstance(x.item, Computed)
            quantity = x.item.quantity
            found = compute_cost(hardware, quantity, program.mesh.devices)
            worked = [0.0, 0.0, 0.0]
            if x.kind != "matmul":
                worked[2] = found.flop_seconds
            elif quantity.unaligned:
                worked[1] = found.flop_seconds * shipped[SUSTAINED] * shipped[UNALIGNED]
            else:
                worked[0] = found.flop_seconds * shipped[SUSTAINED]
            moved = found.memory_seconds * shipped[EFFICIENCY]
            kernels.append((*worked, moved, found.launch_seconds, x.times))
        held = peak(hardware, program)
        limit = hardware.usable_memory_bytes
        rate = hardware.chip.memory_bandwidth.value * shipped[EFFICIENCY]
        seconds = cost.step_seconds + (copied_bytes(program) / rate if run.buffers else 0.0)
        return Priced(run, seconds, held, limit, np.array(kernels), sent, launches)


def constants(hardware: Hardware) -> dict[str, float]:
    """The constants of equation (1) as a preset has them."""
    chip, topology = hardware.chip, hardware.topology
    return {
        SUSTAINED: 1.0 if chip.sustained is None else chip.sustained.value,
        UNALIGNED: 1.0 if chip.unaligned_efficiency is None else chip.unaligned_efficiency.value,
        EFFICIENCY: chip.memory_efficiency.value,
        INTERVAL: 0.0 if chip.launch_interval is None else chip.launch_interval.value,
        LAUNCH: topology.launch.value if isinstance(topology, GpuCluster) else 0.0,
        **{purpose: hardware.hidden_fraction(purpose) for purpose in CLASSES},
    }


@dataclass(frozen=True)
class Stack:
    """A stack of software.

    Attributes:
      names: of the constants that are fitted; `HIDDEN` stands for two classes of collectives alike.
      starts: where a fit starts.
      machines: that have the constants, each with its framework.
      has_part: whether a run has a part in the fit.
      looked_at: whether a run was looked at when a shipped number was set apart from its fit, or without one.
    """

    name: str
    names: tuple[str, ...]
    starts: tuple[float, ...]
    machines: tuple[tuple[str, str], ...]
    has_part: Callable[[Run], bool]
    looked_at: Callable[[Run], bool] = lambda run: False


STACKS = (
    Stack(TPU, (HIDDEN,), (0.5,), (("tpu-v3", DEFAULT),), lambda run: run.table.startswith("gspmd")),
    Stack(
        COMPILED,
        (SUSTAINED,),
        (0.9,),
        (("h100", DEFAULT), ("a100", DEFAULT)),
        lambda run: "pax" in run.table or ("dgxc" in run.table and run.model == "llama3-8b"),
        lambda run: "dgxc" in run.table,  # how steps grow with the number of GPUs: what is hidden
    ),
    Stack(
        LAUNCHED,
        (INTERVAL, EFFICIENCY, LAUNCH),
        (45e-6, 0.6, 100e-6),
        (("a100", MEGATRON_2022), ("v100", MEGATRON_2022)),
        lambda run: "vtrain" in run.table,
        lambda run: (
            "oneflow" in run.table
        ),  # that nothing is hidden, which the sources say, was seen here first
    ),
)


def has_part(run: Run) -> bool:
    """Whether a run had a part in its stack's constants: in their fit, or in what ships instead of it. (Those
    that keep some values could not be priced then.)"""
    return not (run.unjudged or run.keeps) and any(
        s.name == run.stack and (s.has_part(run) or s.looked_at(run)) for s in STACKS
    )


class Fitter:
    """Equation (1) for many runs at once."""

    def __init__(self, stack: Stack, rows: Sequence[Priced], fixed: dict[str, float]) -> None:
        self.stack, self.rows, self.fixed = stack, rows, fixed
        self.first = np.cumsum([0, *(len(p.kernels) for p in rows)])[:-1]
        columns = np.concatenate([p.kernels for p in rows]).T
        self.product, self.unaligned, self.other, self.moved, self.start, self.times = columns
        self.sent = np.array([p.sent for p in rows])
        self.launches = np.array([p.launches for p in rows])
        self.seconds = np.array([p.run.seconds for p in rows])

    def predicted(self, values: Sequence[float]) -> np.ndarray:
        """Seconds of every run."""
        k = {**self.fixed, **dict(zip(self.stack.names, values, strict=True))}
        hidden = [k.get(HIDDEN, k[p]) if p != "activation" else k[p] for p in CLASSES]
        kept = _within(k[SUSTAINED])
        worked = self.product / kept + self.unaligned / (kept * _within(k[UNALIGNED])) + self.other
        kernel = np.maximum(worked, self.moved / _within(k[EFFICIENCY])) + self.start
        computed = np.add.reduceat(self.times * np.maximum(kernel, k[INTERVAL]), self.first)
        sent = self.sent + self.launches * max(0.0, k[LAUNCH])
        exposed: np.ndarray = computed + sent @ (1 - np.clip(hidden, 0.0, 1.0))
        return exposed

    def fit(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Constants of least mean absolute log error; models count alike unless `weights` says other."""
        weights = self.alike() if weights is None else weights

        def error(scaled: np.ndarray) -> float:
            off = np.abs(np.log(self.predicted(scaled * self.stack.starts) / self.seconds))
            return float(np.average(off, weights=weights))

        start = np.ones(len(self.stack.names))
        found = minimize(error, start, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-6})
        values: np.ndarray = found.x * self.stack.starts
        return values

    def alike(self) -> np.ndarray:
        """Weights of runs under which every model counts alike."""
        models = [p.run.model for p in self.rows]
        return np.array([1 / models.count(model) for model in models])

    def intervals(self) -> np.ndarray:
        """5 % and 95 % of every constant over fits to models drawn with replacement."""
        rng, models = np.random.default_rng(0), sorted({p.run.model for p in self.rows})
        index = np.array([models.index(p.run.model) for p in self.rows])
        drawn = []
        for _ in range(DRAWS):
            count = np.bincount(rng.integers(len(models), size=len(models)), minlength=len(models))
            drawn.append(self.fit(count[index] * self.alike()))
        ends: np.ndarray = np.quantile(drawn, [0.05, 0.95], axis=0)
        return ends


def _within(fraction: float) -> float:
    return min(1.0, max(0.05, fraction))
