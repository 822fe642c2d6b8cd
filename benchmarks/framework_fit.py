"""Constants of frameworks, fitted to published runs of half of the models and judged on the others.

    python -m benchmarks.framework_fit [FRAMEWORK …]

The models of a framework, by name, are fitted and judged in turn (`judged`); no model is in both halves. At
most six constants of a framework, in equation (1):
  (1) kernel = max(interval, start + max(FLOP seconds / sustained, bytes seconds / efficiency))
      step = sum of kernels + sum over messages of (launch + seconds) (1 - hidden)
Least mean absolute error of the logarithm, where each table, model and release counts by the root of its
rows, and a constant pays for leaving what physics and sources say (`Constant.around`). The interval of 90 %
is of fits to models drawn with replacement. Results, with what ships beside what was found:
`benchmarks/results/framework_fit.json`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from benchmarks.errors import errors_of, order
from benchmarks.framework_parts import bare, parts
from benchmarks.framework_rows import Row, rows, tables
from costmodels import Hardware, load_hardware
from costmodels.hardware import GpuCluster
from costmodels.kernels.compute import compute_cost
from costmodels.pricing.items import Computed, Sent
from costmodels.pricing.overlap import ACTIVATION, CLASSES, GRADIENT
from costmodels.pricing.pricer import Pricer
from mesh_tf_core.errors import UserError

OUT = Path(__file__).parent / "results" / "framework_fit.json"
SUSTAINED, EFFICIENCY = "chip.sustained", "chip.memory_efficiency"
INTERVAL, LAUNCH = "chip.launch_interval", "topology.launch"
HIDDEN, TENSOR = f"overlap.{GRADIENT}", f"overlap.{ACTIVATION}"
BOARD = {"h100-hbm2e": 0.894}
"""Chips of another power limit: the cube root of 500 W / 700 W."""
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
      tables: how the names of the tables begin whose rows they are fitted to; '': all rows of this
        framework.
      adopted: what was found ships; if not, as the judged rows would be further off, none has a part.
    """

    constants: tuple[Constant, ...]
    tables: str = ""
    adopted: bool = True


A100, H100, V100 = ("a100",), ("h100", "h100-hbm2e"), ("v100",)
TPUS, GPUS = ("tpu-v5e", "tpu-v5p"), A100 + H100 + V100
FITS = {
    "torch": Fit((
        Constant(A100, SUSTAINED, 0.85, 0.1),
        Constant(H100, SUSTAINED, 0.75, 0.1),
        Constant(GPUS, EFFICIENCY, 0.7, 0.2),
        Constant(A100, HIDDEN, 0.5, 0.2),
        Constant(H100, HIDDEN, 0.5, 0.2),
        Constant(GPUS, INTERVAL, 10e-6, 10e-6),
    )),
    "torch-compile": Fit((
        Constant(A100, SUSTAINED, 0.85, 0.1),
        Constant(H100, SUSTAINED, 0.75, 0.1),
        Constant(H100, EFFICIENCY, 0.8, 0.15),
        Constant(GPUS, HIDDEN, 0.5, 0.25),
    )),
    "megatron": Fit((
        Constant(A100 + V100, SUSTAINED, 0.8, 0.1),
        Constant(H100, SUSTAINED, 0.85, 0.1),
        Constant(A100 + V100, EFFICIENCY, 0.7, 0.2),
        Constant(A100 + V100, INTERVAL, 20e-6, 20e-6),
        Constant(GPUS, HIDDEN, 0.5, 0.2),
        Constant(H100, TENSOR, 0.7, 0.3),
    )),
    "megatron:kernels=2022": Fit(
        (
            Constant(A100 + V100, INTERVAL, 44e-6, 20e-6),
            Constant(A100 + V100, EFFICIENCY, 0.6, 0.2),
            Constant(A100 + V100, LAUNCH, 100e-6, 50e-6),
        ),
        "vtrain",
        adopted=False,
    ),
    "maxtext": Fit((
        Constant(H100, SUSTAINED, 0.88, 0.1),
        Constant(TPUS, SUSTAINED, 0.95, 0.05),
        Constant(TPUS, TENSOR, 0.3, 0.3),
    )),
    "jax": Fit(
        (
            Constant(A100, SUSTAINED, 0.85, 0.1),
            Constant(H100, SUSTAINED, 0.85, 0.1),
            Constant(GPUS, EFFICIENCY, 0.8, 0.15),
            Constant(GPUS, HIDDEN, 0.5, 0.25),
        ),
        adopted=False,
    ),
}  # fmt: skip
SAME = {"torchtitan": "torch-compile"}
"""Frameworks that are fitted as another."""
LATER = "megatron_bridge"
"""How tables begin that were priced after the fits. Only shares of hidden exchanges were fitted to them."""


def chip_of(row: Row) -> str:
    return row.hardware.split(",")[0]


def family(row: Row) -> str:
    """The model of a row; a model that was cut to fewer layers is the model."""
    return row.model.split(" cut")[0]


def judged(found: Iterable[Row]) -> set[str]:
    """The models that are judged: every second one by name."""
    return set(sorted({family(row) for row in found})[1::2])


def base_of(row: Row) -> str:
    """The framework whose constants a row is fitted with."""
    name = row.framework.partition(":")[0]
    return SAME.get(name, name)


def timed() -> list[Row]:
    """The rows that fits may have: those that ran and have a time."""
    return [r for t in tables() for r in rows(t) if r.seconds and r.ran]


def rows_of(name: str, every: Iterable[Row]) -> list[Row]:
    """The rows of a fit, fitted and judged, as that framework runs them."""
    asked = FITS[name].tables
    if asked:
        return [replace(row, framework=name) for row in every if row.table.startswith(asked)]
    return [row for row in every if base_of(row) == name and not row.table.startswith(LATER)]


def halves() -> Callable[[Row], str]:
    """Says of a row of any table: judged, fitted, or no part, as a row of a fitted model without a time."""
    every = timed()
    shares = {family(row) for row in every if "exchange=" in row.framework}
    apart = {name: judged(rows_of(name, every)) for name, fit in FITS.items() if fit.adopted}

    def half(row: Row) -> str:
        if row.table.startswith(LATER):
            return "fitted" if family(row) in shares else "judged"
        name = base_of(row)
        if name not in apart or family(row) in apart[name]:
            return "judged"
        return "fitted" if row.seconds and row.ran else "no part"

    return half


class Sums:
    """The quantities of equation (1) for a row.

    Attributes:
      kernels: a row each: FLOP seconds, whether of a product, bytes seconds (all at the full rate), whether
        these follow each other, start, times.
      sent: seconds of messages without their launch, by class; `launches`: how many are launched.
      longer: seconds of messages and transfers beyond the products between their start and their done.
    """

    def __init__(self, row: Row) -> None:
        kept = parts(row)
        self.row, self.shipped = row, load_hardware(row.hardware, row.framework)
        machine, prices, known = bare(self.shipped), Pricer(self.shipped, kept.placement), {}
        devices, kernels, launch = kept.placement.mesh.devices, [], launch_of(self.shipped)
        self.sent, self.launches, self.longer = np.zeros(len(CLASSES)), np.zeros(len(CLASSES)), 0.0
        for times, item in kept.items:
            if isinstance(item, Computed):
                cost = known.get(item.quantity)
                if cost is None:
                    cost = known[item.quantity] = compute_cost(machine, item.quantity, devices)
                product = item.quantity.op_class == "matmul"
                most = max(cost.flop_seconds, cost.memory_seconds)
                turn = cost.seconds > cost.launch_seconds + most * (1 + 1e-9)
                both = cost.flop_seconds, product, cost.memory_seconds, turn
                kernels.append((*both, cost.launch_seconds, times))
            elif isinstance(item, Sent) and not item.between:
                own = CLASSES.index(item.purpose if item.purpose in CLASSES else ACTIVATION)
                seconds = prices.seconds_of(item)[0]
                alone = 0 if item.joined else 1
                count = (alone if item.together else len(item.payloads)) if seconds else 0
                self.sent[own] += (seconds - count * launch) * times
                self.launches[own] += count * times
            else:
                self.longer += prices.seconds_of(item)[1] * times
        alike, index = np.unique(np.array(kernels)[:, :5], axis=0, return_inverse=True)
        times = np.bincount(index.ravel(), weights=np.array(kernels)[:, 5])
        self.kernels = np.column_stack([alike, times])

    def constants(self, k: Mapping[str, float]) -> np.ndarray:
        """Sustained, efficiency, interval, launch and what is hidden of each class: of `k`, else as
        shipped."""
        shipped = shipped_constants(self.shipped)
        k = {**k, SUSTAINED: k[SUSTAINED] * BOARD.get(chip_of(self.row), 1.0)} if SUSTAINED in k else k
        hidden = (f"overlap.{each}" for each in CLASSES)
        paths = SUSTAINED, EFFICIENCY, INTERVAL, LAUNCH, *hidden
        return np.array([k.get(path, shipped[path]) for path in paths])


def launch_of(machine: Hardware) -> float:
    return machine.topology.launch.value if isinstance(machine.topology, GpuCluster) else 0.0


def shipped_constants(machine: Hardware) -> dict[str, float]:
    """The constants of equation (1) as a machine has them."""
    chip = machine.chip
    return {
        SUSTAINED: 1.0 if chip.sustained is None else chip.sustained.value,
        EFFICIENCY: chip.memory_efficiency.value,
        INTERVAL: 0.0 if chip.launch_interval is None else chip.launch_interval.value,
        LAUNCH: launch_of(machine),
        **{f"overlap.{each}": machine.hidden_fraction(each) for each in CLASSES},
    }


class Fitter:
    """Equation (1) for many rows at once."""

    def __init__(self, constants: Sequence[Constant], sums: Sequence[Sums]) -> None:
        self.sums = sums
        groups = [(s.row.table, family(s.row), s.row.software) for s in sums]
        count = Counter(groups)
        self.weights = np.array([count[g] ** -0.5 for g in groups])
        self.seconds = np.array([s.row.seconds for s in sums])
        self.used = [c for c in constants if any(chip_of(s.row) in c.chips for s in sums)]
        lengths = [len(s.kernels) for s in sums]
        self.first, self.of = np.cumsum([0, *lengths])[:-1], np.repeat(np.arange(len(sums)), lengths)
        columns = np.concatenate([s.kernels for s in sums]).T
        self.flops, product, self.moved, turn, self.start, self.times = columns
        self.product, self.turn = product > 0, turn > 0
        self.sent, self.launches = np.array([s.sent for s in sums]), np.array([s.launches for s in sums])
        self.longer = np.array([s.longer for s in sums])
        self.machines = {(chip_of(s.row), s.row.hardware, s.row.framework): s for s in sums}
        names = list(self.machines)
        self.kind = np.array([names.index((chip_of(s.row), s.row.hardware, s.row.framework)) for s in sums])

    def values(self, scaled: Sequence[float]) -> list[float]:
        bound = zip(self.used, scaled, strict=True)
        return [min(c.most, max(c.least, c.around + t * c.width)) for c, t in bound]

    def predicted(self, values: Sequence[float]) -> np.ndarray:
        """Seconds of every row."""
        kinds = [s.constants(of_chip(self.used, values, chip)) for (chip, *_), s in self.machines.items()]
        of_row = np.array(kinds)[self.kind]
        sustained, efficiency, interval = of_row[self.of, :3].T
        worked = np.where(self.product, self.flops / sustained, self.flops)
        moved = self.moved / efficiency
        kernel = self.start + np.where(self.turn, worked + moved, np.maximum(worked, moved))
        computed = np.add.reduceat(np.maximum(kernel, interval) * self.times, self.first)
        sent = self.sent + self.launches * of_row[:, 3:4]
        found: np.ndarray = computed + self.longer + (sent * (1 - of_row[:, 4:])).sum(axis=1)
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
    """The constants of a chip; what is hidden of gradients is hidden of parameters too."""
    found = {c.name: v for c, v in zip(constants, values, strict=True) if chip in c.chips}
    return found | ({"overlap.parameter": found[HIDDEN]} if HIDDEN in found else {})


def quality(found: Sequence[tuple[Row, float]]) -> dict[str, Any]:
    """Errors of rows with their predicted seconds."""
    tokens = [row.sizes["batch"] * row.sizes["length"] for row, _ in found]
    pairs = zip(found, tokens, strict=True)
    tau = order((r.model, r.hardware, s, r.seconds or 1.0, n) for (r, s), n in pairs)
    return {**(errors_of(s / (r.seconds or 1.0) - 1 for r, s in found) or {}), "tau": tau}


def priceable(found: Iterable[Row]) -> list[Sums]:
    sums = []
    for row in found:
        with suppress(UserError):
            sums.append(Sums(row))
    return sums


def fitted(name: str, every: Iterable[Row]) -> dict[str, Any]:
    """The constants of a framework and the errors with them and with those that ship, judged rows first."""
    own = rows_of(name, every)
    apart, sums = judged(own), priceable(own)
    part = [s for s in sums if family(s.row) not in apart]
    fitter, whole = Fitter(FITS[name].constants, part), Fitter(FITS[name].constants, sums)
    values, ends = fitter.best(fitter.weights), fitter.intervals()
    told: dict[str, Any] = {"adopted": FITS[name].adopted, "judged_models": sorted(apart), "constants": []}
    told["fitted_models"] = sorted({family(s.row) for s in part})
    for c, value, low, high in zip(fitter.used, values, *ends, strict=True):
        chip = next(chip for chip in c.chips if any(chip_of(s.row) == chip for s in part))
        ships = shipped_constants(load_hardware(chip, name))[c.name]
        found = {"chips": c.chips, "name": c.name, "ships": ships, "value": value, "interval": [low, high]}
        told["constants"].append(found)
    by_name = {(c.chips, c.name): v for c, v in zip(fitter.used, values, strict=True)}
    new = whole.predicted([by_name.get((c.chips, c.name), c.around) for c in whole.used]).tolist()
    whole.used = []
    groups = defaultdict[str, dict[str, list[tuple[Row, float]]]](lambda: {"found": [], "ships": []})
    for s, *seconds in zip(sums, new, whole.predicted([]).tolist(), strict=True):
        half = "judged" if family(s.row) in apart else "fitted"
        stages = ", stages" if s.row.stages else ""
        for table in ("all", s.row.table):
            of = groups[f"{half}, {table}, {chip_of(s.row)}{stages}"]
            for which, each in zip(of, seconds, strict=True):
                of[which].append((s.row, each))
    told["errors"] = {
        key: {which: quality(found) for which, found in of.items()}
        for key, of in sorted(groups.items(), key=lambda each: (not each[0].startswith("judged"), each[0]))
    }
    return told


def shown(name: str, told: Mapping[str, Any]) -> Iterable[str]:
    for c in told["constants"]:
        low, high = c["interval"]
        value = f"{c['value']:.4g} ({low:.3g} to {high:.3g}), ships {c['ships']:.4g}"
        yield f"{name:14} {'+'.join(c['chips']):28} {c['name']:24} {value}"
    for key, of in told["errors"].items():
        for which, q in of.items():
            tau = "" if q["tau"] is None else f"tau {q['tau']:.2f}"
            signed = f"signed {q['signed_mean']:+6.1%} worst {q['worst']:+5.0%}"
            said = f"{q['rows']:3} mean {q['mean']:5.1%} {signed}"
            yield f"    {key if which == 'found' else '':62} {which} {said} {tau}"


def main() -> None:
    every = timed()
    stored = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {"frameworks": {}}
    for name in sys.argv[1:] or FITS:
        told = stored["frameworks"][name] = fitted(name, every)
        print(*shown(name, told), sep="\n", flush=True)
    stored["date"] = datetime.now(UTC).date().isoformat()
    OUT.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
