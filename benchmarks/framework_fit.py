"""Constants of frameworks, fitted to published runs of half of the models and judged on the others.

    python -m benchmarks.framework_fit [FRAMEWORK …]

The models of a framework, by name, are fitted and judged in turn (`judged`); no model is in both halves. At
most six constants of a framework, in equation (1):
  (1) kernel = max(interval, start + max(FLOP seconds / sustained, bytes seconds / efficiency))
      step = sum of kernels + sum over messages of seconds (1 - hidden)
Least mean absolute error of the logarithm, where each table, model and release counts by the root of its
rows, and a constant pays for leaving what physics and sources say (`Constant.around`). The interval of 90 %
is of fits to models drawn with replacement. Results: `benchmarks/results/framework_fit.json`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.stats import kendalltau

from benchmarks.framework_parts import parts
from benchmarks.framework_rows import Row, rows, tables
from costmodels import Hardware, load_hardware
from costmodels.hardware import GpuCluster
from costmodels.kernels.compute import compute_cost
from costmodels.pricing.items import Computed, Sent
from costmodels.pricing.overlap import ACTIVATION, CLASSES
from costmodels.pricing.pricer import Pricer
from mesh_tf_core.errors import UserError

OUT = Path(__file__).parent / "results" / "framework_fit.json"
SUSTAINED, EFFICIENCY, INTERVAL, HIDDEN, TENSOR = (
    "chip.sustained",
    "chip.memory_efficiency",
    "chip.launch_interval",
    "overlap.gradient",
    "overlap.activation",
)
FA1 = 0.3, 0.35
"""FlashAttention 1 on A100, heads of 64 and 128: 25 to 40 % of the peak (Dao 2023, arXiv 2307.08691)."""
BOARD = {"h100-hbm2e": 0.894}
"""Chips of another power limit than the one of their name: the cube root of 500 W / 700 W."""
SHRINK = 0.004
"""Error that a constant must save to leave what is expected of it by one width."""
DRAWS = 30


@dataclass(frozen=True)
class Constant:
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

    @property
    def least(self) -> float:
        return 0.3 if self.name in (SUSTAINED, EFFICIENCY) else 0.0


@dataclass(frozen=True)
class Fit:
    """The constants of a framework.

    Attributes:
      compiler: profile of its kernels.
      stages: runs with pipeline stages have a part.
      attention: chip -> efficiency of attention by head that its kernel has; else the chip file's.
    """

    compiler: str
    constants: tuple[Constant, ...]
    stages: bool = True
    attention: Mapping[str, tuple[float, float]] = None  # type: ignore[assignment]


A100, H100, V100 = ("a100",), ("h100", "h100-hbm2e"), ("v100",)
TPUS = "tpu-v5e", "tpu-v5p"
GPUS = A100 + H100 + V100
FA2 = {"h100": (0.284, 0.316), "h100-hbm2e": (0.284, 0.316)}
"""FlashAttention-2 on H100, heads of 64 and 128 (Shah et al. 2024, figures 5 and 6)."""
COMPILED = Fit(
    "launched",
    (
        Constant(A100, SUSTAINED, 0.85, 0.1),
        Constant(H100, SUSTAINED, 0.75, 0.1),
        Constant(H100, EFFICIENCY, 0.8, 0.15),
        Constant(GPUS, HIDDEN, 0.5, 0.25),
    ),
    attention=FA2,
)
FITS = {
    "torch": Fit(
        "eager",
        (
            Constant(A100, SUSTAINED, 0.85, 0.1),
            Constant(H100, SUSTAINED, 0.75, 0.1),
            Constant(A100, EFFICIENCY, 0.8, 0.2),
            Constant(H100, EFFICIENCY, 0.6, 0.2),
            Constant(GPUS, HIDDEN, 0.4, 0.2),
            Constant(GPUS, INTERVAL, 10e-6, 10e-6),
        ),
        stages=False,
        attention=FA2,
    ),
    "torch-compile": COMPILED,
    "megatron": Fit(
        "launched",
        (
            Constant(A100 + V100, SUSTAINED, 0.8, 0.1),
            Constant(H100, SUSTAINED, 0.85, 0.1),
            Constant(A100 + V100, EFFICIENCY, 0.7, 0.2),
            Constant(A100 + V100, INTERVAL, 20e-6, 20e-6),
            Constant(GPUS, HIDDEN, 0.5, 0.2),
            Constant(H100, TENSOR, 0.7, 0.3),
        ),
    ),
    "maxtext": Fit(
        "xla-gpu",
        (
            Constant(H100, SUSTAINED, 0.88, 0.1),
            Constant(TPUS, SUSTAINED, 0.95, 0.05),
            Constant(TPUS, TENSOR, 0.3, 0.3),
        ),
    ),
}
SAME = {"torchtitan": "torch-compile"}
"""Frameworks that are fitted as another."""


def chip_of(row: Row) -> str:
    return row.hardware.split(",")[0]


def family(row: Row) -> str:
    """The model of a row; a model that was cut to fewer layers is the model."""
    return row.model.split(" cut")[0]


def judged(found: Sequence[Row]) -> set[str]:
    """The models that are judged: every second one by name."""
    return set(sorted({family(row) for row in found})[1::2])


def base_of(row: Row) -> str:
    """The framework whose constants a row is fitted with."""
    name = row.framework.partition(":")[0]
    return SAME.get(name, name)


def in_fit(row: Row, fit: Fit) -> bool:
    """Whether a row that is not judged has a part in a fit."""
    return bool(row.seconds) and row.ran and (fit.stages or not row.stages)


def fitted_before() -> set[tuple[str, str]]:
    """Rows, by table and name, that had a part in the fit of the presets (`benchmarks.published_fit`)."""
    stored = json.loads(OUT.with_name("published.json").read_text(encoding="utf-8"))["tables"]
    return {(Path(table).stem, r["run"]) for table, own in stored.items() for r in own["rows"] if r["fitted"]}


def halves() -> Callable[[Row], str]:
    """Says of a row of any table whether it is judged, had a part in a fit, or had none though its model
    had."""
    timed = [r for t in tables() for r in rows(t) if r.seconds and r.ran]
    apart = {name: judged([r for r in timed if base_of(r) == name]) for name in FITS}
    before = fitted_before()

    def half(row: Row) -> str:
        name = base_of(row)
        if name not in FITS:  # it has layoutopt's own numbers
            return "fitted" if (row.table, row.name) in before else "judged"
        if family(row) in apart[name]:
            return "judged"
        return "fitted" if in_fit(row, FITS[name]) else "no part"

    return half


class Sums:
    """The quantities of equation (1) for a row.

    Attributes:
      kernels: a row each: FLOP seconds, whether of a product, bytes seconds (all at the full rate), whether
        these follow each other, start, times.
      sent: seconds of messages by class.
      longer: seconds that messages take beyond the products between their start and their done.
    """

    def __init__(self, row: Row, fit: Fit) -> None:
        compiler, attention = kernels_of(row, fit)
        self.row, self.shipped = row, load_hardware(row.hardware)
        gpu = isinstance(self.shipped.topology, GpuCluster)
        machine = _bare(self.shipped, compiler if gpu else self.shipped.compiler, attention)
        kept = parts(row, compiler if gpu else "")
        prices, known = Pricer(machine, kept.placement), {}
        devices, kernels = kept.placement.mesh.devices, []
        self.sent, self.longer = np.zeros(len(CLASSES)), 0.0
        for _, _, times, item in kept.items:
            if isinstance(item, Computed):
                cost = known.get(item.quantity)
                if cost is None:
                    cost = known[item.quantity] = compute_cost(machine, item.quantity, devices)
                product = item.quantity.op_class == "matmul"
                most = max(cost.flop_seconds, cost.memory_seconds)
                turn = cost.seconds > cost.launch_seconds + most * (1 + 1e-9)
                both = cost.flop_seconds, product, cost.memory_seconds, turn
                kernels.append((*both, cost.launch_seconds, times))
            elif isinstance(item, Sent) and item.between:
                self.longer += prices.seconds_of(item)[1] * times
            elif isinstance(item, Sent):
                seconds = prices.seconds_of(item)[0]
                purpose = item.purpose if item.purpose in CLASSES else ACTIVATION
                self.sent[CLASSES.index(purpose)] += seconds * times
        self.kernels = np.array(kernels)

    def constants(self, k: Mapping[str, float]) -> np.ndarray:
        """Sustained, efficiency, interval and what is hidden of each class: of `k`, else the chip's own."""
        chip = self.shipped.chip
        own = chip.sustained.value if chip.sustained else 1.0
        sustained = k[SUSTAINED] * BOARD.get(chip_of(self.row), 1.0) if SUSTAINED in k else own
        hidden = (
            k.get(TENSOR if p == ACTIVATION else HIDDEN, self.shipped.hidden_fraction(p)) for p in CLASSES
        )
        return np.array(
            [sustained, k.get(EFFICIENCY, chip.memory_efficiency.value), k.get(INTERVAL, 0.0), *hidden]
        )


def kernels_of(row: Row, fit: Fit) -> tuple[str, tuple[float, float] | None]:
    """The compiler profile of a row's kernels, and its attention: those of its variants."""
    attention = FA1 if "attention=flash1" in row.framework else (fit.attention or {}).get(chip_of(row))
    return ("launched" if "kernels=fused" in row.framework else fit.compiler), attention


def _bare(machine: Hardware, compiler: str, attention: tuple[float, float] | None) -> Hardware:
    """A machine whose products and memory are at the full rate."""
    chip = replace(
        machine.chip,
        sustained=None,
        launch_interval=None,
        memory_efficiency=replace(machine.chip.memory_efficiency, value=1.0),
    )
    if attention and chip.attention_efficiency:
        (a, x), (b, y) = chip.attention_efficiency
        small, large = attention
        chip = replace(
            chip, attention_efficiency=((a, replace(x, value=small)), (b, replace(y, value=large)))
        )
    gpu = isinstance(machine.topology, GpuCluster)
    return replace(machine, chip=chip, compiler=compiler if gpu else machine.compiler)


class Fitter:
    """Equation (1) for many rows at once."""

    def __init__(self, fit: Fit, sums: Sequence[Sums]) -> None:
        self.fit, self.sums = fit, sums
        groups = [(s.row.table, family(s.row), s.row.software) for s in sums]
        count = Counter(groups)
        self.weights = np.array([count[g] ** -0.5 for g in groups])
        self.seconds = np.array([s.row.seconds for s in sums])
        self.used = [c for c in fit.constants if any(chip_of(s.row) in c.chips for s in sums)]
        lengths = [len(s.kernels) for s in sums]
        self.first, self.of = np.cumsum([0, *lengths])[:-1], np.repeat(np.arange(len(sums)), lengths)
        columns = np.concatenate([s.kernels for s in sums]).T
        self.flops, product, self.moved, turn, self.start, self.times = columns
        self.product, self.turn = product > 0, turn > 0
        self.sent, self.longer = np.array([s.sent for s in sums]), np.array([s.longer for s in sums])
        self.chips = {(chip_of(s.row), s.shipped.name): s for s in sums}
        names = list(self.chips)
        self.kind = np.array([names.index((chip_of(s.row), s.shipped.name)) for s in sums])

    def values(self, scaled: Sequence[float]) -> list[float]:
        bound = zip(self.used, scaled, strict=True)
        return [min(c.most, max(c.least, c.around + t * c.width)) for c, t in bound]

    def predicted(self, values: Sequence[float]) -> np.ndarray:
        """Seconds of every row."""
        kinds = [s.constants(of_chip(self.used, values, chip)) for (chip, _), s in self.chips.items()]
        of_row = np.array(kinds)[self.kind]
        sustained, efficiency, interval = of_row[self.of, :3].T
        worked = np.where(self.product, self.flops / sustained, self.flops)
        moved = self.moved / efficiency
        kernel = self.start + np.where(self.turn, worked + moved, np.maximum(worked, moved))
        computed = np.add.reduceat(np.maximum(kernel, interval) * self.times, self.first)
        found: np.ndarray = computed + self.longer + (self.sent * (1 - of_row[:, 3:])).sum(axis=1)
        return found

    def best(self, weights: np.ndarray) -> list[float]:
        """Constants of the least error."""

        def error(scaled: np.ndarray) -> float:
            off = np.abs(np.log(self.predicted(self.values(scaled)) / self.seconds))
            return float(np.average(off, weights=weights) + SHRINK * (scaled**2).sum())

        start = np.zeros(len(self.used))
        corners = np.vstack([start, np.eye(len(self.used)) * 0.7])
        options = {"xatol": 5e-3, "fatol": 1e-5, "maxfev": 400, "initial_simplex": corners}
        return self.values(minimize(error, start, method="Nelder-Mead", options=options).x)

    def intervals(self) -> np.ndarray:
        """5 % and 95 % of every constant over fits to models drawn with replacement."""
        rng, names = np.random.default_rng(0), sorted({family(s.row) for s in self.sums})
        index = np.array([names.index(family(s.row)) for s in self.sums])
        drawn = []
        for _ in range(DRAWS):
            count = np.bincount(rng.integers(len(names), size=len(names)), minlength=len(names))
            if (weights := count[index] * self.weights).sum():
                drawn.append(self.best(weights))
        ends: np.ndarray = np.quantile(drawn, [0.05, 0.95], axis=0)
        return ends


def of_chip(constants: Sequence[Constant], values: Sequence[float], chip: str) -> dict[str, float]:
    return {c.name: v for c, v in zip(constants, values, strict=True) if chip in c.chips}


def order(found: Iterable[tuple[str, str, float, float, int]]) -> float | None:
    """Kendall's tau of predicted and published seconds per token, the mean over models of a chip with at
    least four runs; None: there are none.

    Args:
      found: model, hardware, predicted and published seconds, tokens of a step.
    """
    models = defaultdict(list)
    for model, hardware, predicted, seconds, tokens in found:
        models[model, hardware].append((predicted / tokens, seconds / tokens))
    taus = [kendalltau(*zip(*pairs, strict=True)).statistic for pairs in models.values() if len(pairs) > 3]
    known = [float(t) for t in taus if t == t]
    return float(np.mean(known)) if known else None


def quality(found: Sequence[tuple[Row, float]]) -> dict[str, Any]:
    """Errors of rows with their predicted seconds."""
    errors = [seconds / (row.seconds or 1.0) - 1 for row, seconds in found]
    tokens = [row.sizes["batch"] * row.sizes["length"] for row, _ in found]
    pairs = zip(found, tokens, strict=True)
    return {
        "rows": len(errors),
        "mean": float(np.mean(np.abs(errors))),
        "signed": float(np.mean(errors)),
        "worst": max(errors, key=abs),
        "tau": order((r.model, r.hardware, s, r.seconds or 1.0, n) for (r, s), n in pairs),
    }


def main() -> None:
    asked = sys.argv[1:] or list(FITS)
    every = [r for t in tables() for r in rows(t) if r.seconds and r.ran]
    stored = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {"frameworks": {}}
    for name in asked:
        fit = FITS[name]
        own = [r for r in every if base_of(r) == name]
        apart, sums = judged(own), []
        for row in own:
            try:
                sums.append(Sums(row, fit))
            except UserError:
                continue
        part = [s for s in sums if family(s.row) not in apart and in_fit(s.row, fit)]
        fitter = Fitter(fit, part)
        values, ends = fitter.best(fitter.weights), fitter.intervals()
        told: dict[str, Any] = {"judged_models": sorted(apart), "constants": [], "tables": {}}
        told["fitted_models"] = sorted({family(s.row) for s in part})
        for c, value, low, high in zip(fitter.used, values, *ends, strict=True):
            told["constants"].append(
                {"chips": c.chips, "name": c.name, "value": value, "interval": [low, high]}
            )
            print(f"{name:14} {'+'.join(c.chips):28} {c.name:24} {value:.4g} ({low:.3g} to {high:.3g})")
        groups = defaultdict(list)
        every_fitter = Fitter(fit, sums)
        by_name = {(c.chips, c.name): v for c, v in zip(fitter.used, values, strict=True)}
        shipped = [by_name.get((c.chips, c.name), c.around) for c in every_fitter.used]
        for s, seconds in zip(sums, every_fitter.predicted(shipped).tolist(), strict=True):
            half = "judged" if family(s.row) in apart else "fitted" if s in part else "no part"
            stages = "stages" if s.row.stages else "no stages"
            for key in ((s.row.table, chip_of(s.row), stages, half), ("all", chip_of(s.row), stages, half)):
                groups[key].append((s.row, seconds))
        for key, found in sorted(groups.items()):
            told["tables"][", ".join(key)] = q = quality(found)
            tau = "" if q["tau"] is None else f"tau {q['tau']:.2f}"
            errors = (
                f"{q['rows']:3} mean {q['mean']:5.1%} signed {q['signed']:+6.1%} worst {q['worst']:+5.0%}"
            )
            print(f"    {', '.join(key):62} {errors} {tau}")
        stored["frameworks"][name] = told
    stored["date"] = datetime.now(UTC).date().isoformat()
    OUT.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
