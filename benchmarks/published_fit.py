"""Three constants per software stack, fitted to published runs with one model left out at a time.

XLA on TPUs, per run:
  (1) step = compute a + (gradient and parameter communication) (1 - b) + (activation communication) (1 - c)
PyTorch on GPUs (Megatron-LM, Megatron-DeepSpeed, OneFlow), which launches kernel by kernel from the host:
  (2) step = sum over kernels of max(seconds a, b) + communication c
Quantities are priced from the hardware preset and the model's dimensions. The constants are the same for all
models, sizes and generations of a stack; least mean absolute error of the logarithm.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize
from scipy.stats import spearmanr

from benchmarks.published_rows import GSPMD, Pricers, Run
from costmodels.pricing.overlap import ACTIVATION

Constants = Sequence[float]


@dataclass(frozen=True)
class Priced:
    """A run and its quantities.

    Attributes:
      shipped: predicted with the preset as it is; nothing fitted.
      seconds, times: of every kind of kernel, without the wait for its launch, and how often one runs.
      hideable, exposed: seconds of gradients' and parameters' communication, and of all other.
    """

    run: Run
    shipped: float
    seconds: np.ndarray
    times: np.ndarray
    hideable: float
    exposed: float

    @staticmethod
    def of(run: Run, known: Pricers | None = None) -> Priced:
        """A run, priced; `known` as in `Run.cost`."""
        shipped = cost = run.cost(known)
        chip = run.hardware.chip
        if chip.launch_interval is not None:
            patient = replace(run.hardware, chip=replace(chip, launch_interval=None))
            cost = replace(run, hardware=patient).cost(known)
        kernels: Counter[float] = Counter()
        hideable = exposed = 0.0
        for x in cost.lines:
            if not x.is_communication:
                kernels[float(f"{x.seconds:.4g}")] += x.times  # type: ignore[assignment]
            elif x.purpose == ACTIVATION:
                exposed += x.seconds * x.times
            else:
                hideable += x.seconds * x.times
        seconds, times = np.array(list(kernels)), np.array(list(kernels.values()), float)
        return Priced(run, shipped.step_seconds, seconds, times, hideable, exposed)


@dataclass(frozen=True)
class Stack:
    """A software stack: equation, its constants' names, and where a fit starts."""

    name: str
    tables: tuple[str, ...]
    constants: tuple[str, str, str]
    starts: tuple[Constants, ...]
    step: Callable[[Constants, Priced], float]


def _bounded(fraction: float) -> float:
    return min(1.0, max(0.0, fraction))


def _compiled(k: Constants, p: Priced) -> float:
    """Equation (1)."""
    compute = float((p.times * p.seconds).sum())
    return abs(k[0]) * compute + p.hideable * (1 - _bounded(k[1])) + p.exposed * (1 - _bounded(k[2]))


def _launched(k: Constants, p: Priced) -> float:
    """Equation (2); the second constant in microseconds."""
    kernels = np.maximum(abs(k[0]) * p.seconds, abs(k[1]) * 1e-6)
    return float((p.times * kernels).sum()) + abs(k[2]) * (p.hideable + p.exposed)


STACKS = (
    Stack(
        "XLA on TPUs",
        ("mesh_tf_runs.csv", *GSPMD, "maxtext_tpu.csv", "tpu_v2_v3_small.csv"),
        ("compute x", "hidden gradients and parameters", "hidden activations"),
        ((1, 0.5, 0.5), (1.1, 0.1, 0.1), (0.95, 0.9, 0.1), (1, 0.1, 0.9)),
        _compiled,
    ),
    Stack(
        "PyTorch on GPUs",
        ("vtrain_a100_h1024.csv", "oneflow_megatron_v100.csv", "megatron_recompute_a100.csv"),
        ("compute x", "microseconds a kernel at least", "communication x"),
        ((1.3, 40, 1), (1, 20, 1.5)),
        _launched,
    ),
)


def fit(stack: Stack, rows: Sequence[Priced]) -> tuple[float, ...]:
    """Constants of least mean absolute log error."""

    def error(k: Constants) -> float:
        return statistics.fmean(abs(np.log(stack.step(k, p) / p.run.seconds)) for p in rows)

    options = {"maxiter": 400, "xatol": 1e-3, "fatol": 1e-5}
    tried = [minimize(error, start, method="Nelder-Mead", options=options) for start in stack.starts]
    return tuple(float(x) for x in min(tried, key=lambda m: m.fun).x)


def without_own(stack: Stack, rows: Sequence[Priced]) -> list[float]:
    """Every row predicted with constants that its model had no part in."""
    found: dict[str, tuple[float, ...]] = {}
    for family in {p.run.family for p in rows}:
        found[family] = fit(stack, [p for p in rows if p.run.family != family])
    return [stack.step(found[p.run.family], p) for p in rows]


@dataclass(frozen=True)
class Quality:
    """How good predictions of some rows are; `spearman` and `regret` are means over workloads of at least
    three runs (None: there are none)."""

    rows: int
    mape: float
    worst: float
    spearman: float | None
    regret: float | None
    worst_regret: float | None


def quality(rows: Sequence[Priced], predicted: Sequence[float]) -> Quality:
    """Errors of steps, and of choices within workloads."""
    errors = [abs(o / p.run.seconds - 1) for p, o in zip(rows, predicted, strict=True)]
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for p, o in zip(rows, predicted, strict=True):
        if p.run.workload:
            groups[p.run.workload].append((o, p.run.seconds))
    ranked = [g for g in groups.values() if len(g) >= 3]
    ranks = [float(spearmanr(*zip(*g, strict=True)).statistic) for g in ranked]
    regrets = [min(g)[1] / min(m for _, m in g) - 1 for g in ranked]
    return Quality(
        len(rows),
        statistics.fmean(errors),
        max(errors),
        _mean(ranks),
        _mean(regrets),
        max(regrets, default=None),
    )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None
