"""`calibrate_tpu`: a TPU's profile from its compiler's estimates, without a TPU.

The profile is the preset with four numbers fitted to the compiler's estimates (`costmodels.calibration.
tpu_fit`). It has no measured curves, so it stays analytic, as the search's bounds need it. The compiled text
has no times of collectives, so the network's numbers remain those of the preset.

A chip's numbers from the TPU compiler's estimates: launch, memory, registers, matrix units.

The seconds of a probe are predicted as those of any program: kernel by kernel (`costmodels.kernels.fused`),
each by equation (1) of `costmodels.kernels.compute`. Four numbers of that equation are fitted:

(1) launch: seconds of the chains without products ≈ launch · kernels + a · bytes; both >= 0, least relative
    squares. It is what is left of a kernel that has next to nothing to do
(2) efficiency of a product = padded FLOPs / (peak · (seconds - launch)), at most 1. Where products have a
    launch of their own, that one counts, and those products are left out that wait for memory when they are
    compiled alone, but not in a step: whose operands and result are small, or take longer to move than the
    compiler's seconds
(3) the curve: the non-decreasing one over padded FLOPs that is nearest to (2); where it would rise faster
    than the FLOPs it is lowered, so that more FLOPs never take less time
(4) memory efficiency in (0, 1] and the time of an element: those with the least sum of
    |log(predicted / compiler's)| over all chains. An optimizer's step moves many bytes for each element, a
    normalisation few: that tells them apart. Absolute values, since what stays in the core's own memory is
    predicted too slow, and must not pull at what does not
(5) held out: every fifth probe in turn is predicted by a fit of the others; checks by the fit of all
(6) uncertainty: of the curve, the typical error at a point when it is fitted without that point; of the
    others, their relative spread over the fits of (5) or, for memory, the chains' typical error, if larger

Nothing is negative and nothing exceeds the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from costmodels.calibration.fit import FittedCurve, curve_of, products
from costmodels.calibration.runner import OnProbe, version_of
from costmodels.calibration.tpu_compiled import CompiledProbes, compile_probes, known_target, shipped_probes
from costmodels.calibration.tpu_probes import CHAIN, CHECK, PRODUCT, TpuProbe, tpu_probes
from costmodels.hardware import Curve, Hardware, load_hardware, preset_content
from costmodels.kernels.compute import MATMUL_CLASSES, Quantity, compute_cost
from costmodels.kernels.padding import padding_ratio
from costmodels.pricing.items import Computed
from costmodels.pricing.pricer import pricer
from mesh_tf_core.errors import UserError

FOLDS = 5
SMALL = 1 << 21
"""Bytes of a product's operands and result that stay on the chip in a step, equation (2)."""
ROUNDED = 1 - 1e-9
"""Keeps (3) true of numbers that are rounded."""
LEAST = 0.05
"""The smallest memory efficiency that is tried."""
ELEMENT = (1e-13, 1e-10)
"""Seconds of an element that are tried, and 0."""
STEPS = (1.1, 1.01, 1.001)
"""Factors between values that are tried, first over the whole range, then around the best."""
AROUND = 12
"""Number of neighbours on either side."""


@dataclass(frozen=True)
class ProbeSample:
    """A probe with the compiler's seconds, and the inputs of the prediction: kernels and the number of their
    runs.
    """

    name: str
    kind: str
    seconds: float
    kernels: tuple[tuple[Quantity, float], ...]

    @property
    def launches(self) -> float:
        return sum(times for _, times in self.kernels)

    @property
    def bytes(self) -> float:
        return sum(quantity.bytes * times for quantity, times in self.kernels)

    @property
    def flops(self) -> float:
        return sum(quantity.flops * times for quantity, times in self.kernels)

    @property
    def multiplies(self) -> bool:
        return any(quantity.op_class in MATMUL_CLASSES for quantity, _ in self.kernels)


@dataclass(frozen=True)
class Numbers:
    """The fitted numbers: seconds of a kernel's start, a fraction of the bandwidth, seconds of an element,
    and a fraction of the peak over padded FLOPs."""

    launch: float
    memory: float
    element: float
    curve: Curve


@dataclass(frozen=True)
class TpuFit:
    """The numbers and how sure they are.

    Attributes:
      uncertainty: relative, by the names of the numbers.
      fitted, held_out: predicted / compiler's - 1 of the probes, by the fit of all and when left out.
    """

    numbers: Numbers
    uncertainty: dict[str, float]
    fitted: dict[str, float]
    held_out: dict[str, float]


def fit_tpu(hardware: Hardware, samples: Sequence[ProbeSample]) -> TpuFit:
    """Fits the numbers to samples of one TPU; `hardware` is the preset that has everything else."""
    seen = [s for s in samples if s.kind != CHECK]
    numbers = fit_numbers(hardware, seen)
    machine = with_numbers(hardware, numbers)
    fitted = {s.name: error(machine, s) for s in samples}
    held_out = {s.name: fitted[s.name] for s in samples if s.kind == CHECK}
    others = []
    for fold in range(FOLDS):
        others.append(fit_numbers(hardware, [s for i, s in enumerate(seen) if i % FOLDS != fold]))
        without = with_numbers(hardware, others[-1])
        held_out.update({s.name: error(without, s) for s in seen[fold::FOLDS]})
    chains = [abs(held_out[s.name]) for s in seen if s.kind == CHAIN]
    sure = {
        "launch_overhead": _spread([n.launch for n in others], numbers.launch),
        "memory_efficiency": max(median(chains), _spread([n.memory for n in others], numbers.memory)),
        "element_time": _spread([n.element for n in others], numbers.element),
        "matmul_efficiency": _nearest(hardware, seen, numbers.launch).uncertainty,
    }
    return TpuFit(numbers, sure, fitted, held_out)


def fit_numbers(hardware: Hardware, samples: Sequence[ProbeSample]) -> Numbers:
    """Equations (1) to (4)."""
    plain = [s for s in samples if s.kind == CHAIN and not s.multiplies]
    launch, _ = products([(s.launches, s.bytes) for s in plain], [s.seconds for s in plain])
    curve = efficiency(hardware, samples, launch)
    chains = _Chains(
        with_numbers(hardware, Numbers(launch, 1.0, 0.0, curve)), [s for s in samples if s.kind == CHAIN]
    )
    low, high = ELEMENT
    memories = _range(LEAST, 1.0, STEPS[0])
    memory, element = chains.best(memories, (0.0, *_range(low, high, STEPS[0])))
    for step in STEPS[1:]:
        near = [step**i for i in range(-AROUND, AROUND + 1)]
        memory, element = chains.best([min(1.0, memory * f) for f in near], [element * f for f in near])
    return Numbers(launch, memory, element, curve)


def _range(low: float, high: float, step: float) -> list[float]:
    """From `high` down to `low` by a factor."""
    return [high / step**i for i in range(int(math.log(high / low) / math.log(step)) + 1)]


class _Chains:
    """Chains under many values of memory efficiency and of an element's time: equations (1) and (6) of
    `costmodels.kernels.compute`, kernel by kernel, on a machine that has 1 and 0."""

    def __init__(self, machine: Hardware, chains: Sequence[ProbeSample]) -> None:
        kernels = [(q, times) for s in chains for q, times in s.kernels]
        costs = [compute_cost(machine, q) for q, _ in kernels]
        self.times = np.array([times for _, times in kernels])
        self.launch = np.array([c.launch_seconds for c in costs])
        self.flops = np.array([c.flop_seconds for c in costs])
        self.memory = np.array([c.memory_seconds for c in costs])
        self.elements = np.array([float(q.elements) for q, _ in kernels])
        self.multiplies = np.array([q.op_class in MATMUL_CLASSES for q, _ in kernels])
        self.starts = np.cumsum([0, *(len(s.kernels) for s in chains[:-1])])
        self.seconds = np.array([s.seconds for s in chains])

    def best(self, memories: Sequence[float], elements: Sequence[float]) -> tuple[float, float]:
        return min(((m, e) for m in memories for e in elements), key=lambda pair: self._off(*pair))

    def _off(self, memory: float, element: float) -> float:
        moved, passed = self.memory / memory, self.elements * element
        beside = np.maximum(moved, passed)
        work = np.maximum(self.flops, np.where(self.multiplies, beside, moved + passed))
        found = np.add.reduceat(self.times * (self.launch + work), self.starts)
        return float(np.abs(np.log(found / self.seconds)).sum())


def efficiency(hardware: Hardware, samples: Sequence[ProbeSample], launch: float) -> Curve:
    """Equation (3)."""
    nearest = _nearest(hardware, samples, launch).curve
    points = [nearest.points[0]]
    for (x0, _), (x, y) in pairwise(nearest.points):
        points.append((x, min(y, points[-1][1] * x / x0 * ROUNDED)))
    inner = [
        p
        for before, p, after in zip(points, points[1:], points[2:], strict=False)
        if not before[1] == p[1] == after[1]  # it is more than one on a level
    ]
    return Curve((points[0], *inner, *points[1:][-1:]))


def _nearest(hardware: Hardware, samples: Sequence[ProbeSample], launch: float) -> FittedCurve:
    """The curve of (3) before it is lowered, through the points of (2)."""
    points, own = [], hardware.chip.product_launch
    launch = launch if own is None else own.value
    for s in samples:
        if s.kind == PRODUCT:
            ((quantity, _),) = s.kernels
            waits = quantity.bytes < SMALL or quantity.bytes / hardware.memory_bandwidth > s.seconds
            if own is not None and waits:
                continue
            padded = quantity.flops * padding_ratio(hardware.chip.matrix_unit, quantity.matmul_dims)
            least = padded / hardware.peak_flops(quantity.dtype)
            points.append((padded, least / max(s.seconds - launch, least), 0.0))
    return curve_of("matmul", points)


def with_numbers(hardware: Hardware, numbers: Numbers) -> Hardware:
    """The hardware with its numbers replaced by fitted ones."""
    chip = hardware.chip
    return replace(
        hardware,
        chip=replace(
            chip,
            launch_overhead=replace(chip.launch_overhead, value=numbers.launch),
            memory_efficiency=replace(chip.memory_efficiency, value=numbers.memory),
            element_time=replace(chip.launch_overhead, value=numbers.element),
            matmul_efficiency=replace(chip.matmul_efficiency, curve=numbers.curve),
        ),
    )


def predicted(hardware: Hardware, sample: ProbeSample) -> float:
    """Seconds of a probe."""
    return sum(compute_cost(hardware, quantity).seconds * times for quantity, times in sample.kernels)


def error(hardware: Hardware, sample: ProbeSample) -> float:
    """Predicted / compiler's - 1."""
    return predicted(hardware, sample) / sample.seconds - 1.0


def _spread(values: Sequence[float], whole: float) -> float:
    """Half of the range, relative."""
    return (max(values) - min(values)) / 2 / whole if whole else 0.0


METHOD = (
    "all constants are fitted to the TPU compiler's estimates for single kernels: matrix products, and "
    "chains of other operations. The launch time (>= 0) minimises the squared relative error on the chains. "
    "The efficiency of matrix products is a non-decreasing function of padded FLOPs, at most 1, fitted by "
    "pool adjacent violators. The memory efficiency, in (0, 1], and the time per element (>= 0) "
    "minimise the sum of |log(predicted / estimated)| over the chains"
)
KINDS = {PRODUCT: "matmuls", CHAIN: "chains", CHECK: "checks"}


@dataclass(frozen=True)
class TpuCalibration:
    """A profile and its origin.

    Attributes:
      content: of a hardware file.
      shipped: the probes' results shipped with the project; nothing was compiled.
      typical: kind of probe -> median relative error of the preset, of the fit, and held out.
    """

    content: dict[str, Any]
    compiled: CompiledProbes
    shipped: bool
    fit: TpuFit
    typical: dict[str, dict[str, float]]


def calibrate_tpu(
    target: str,
    refresh: bool = False,
    on_progress: OnProbe | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    resume: Path | None = None,
) -> TpuCalibration:
    """Fits the profile of a TPU that need not be there.

    Args:
      target: a preset, as tpu-v5e.
      refresh: compile the probes here, even if their results ship with the project.
      on_progress, around, resume: see `costmodels.calibration.tpu_compiled.compile_probes`.

    Raises:
      UserError: an unknown target; results are not shipped, or not wanted, and there is no JAX or libtpu.
    """
    known_target(target)
    probes = tpu_probes()
    found = None if refresh else shipped_probes(target)
    compiled = found or compile_probes(target, probes, on_progress, around, resume)
    missing = [p.name for p in probes if p.name not in compiled.cycles]
    if missing:
        raise UserError(
            f"the shipped results for {target} have no result for {len(missing)} probes, e.g. "
            f"{missing[0]!r}; compile all probes again with --refresh"
        )
    hardware = load_hardware(target)
    samples = tpu_samples(hardware, probes, compiled)
    fit = fit_tpu(hardware, samples)
    typical = _typical(hardware, samples, fit)
    content = _profile(target, compiled, samples, fit, typical)
    return TpuCalibration(content, compiled, found is not None, fit, typical)


def tpu_samples(
    hardware: Hardware, probes: Sequence[TpuProbe], compiled: CompiledProbes
) -> list[ProbeSample]:
    """Every probe with the compiler's seconds and the kernels that we see in it."""
    samples = []
    for probe in probes:
        program = probe.program(1)
        kernels: dict[Quantity, float] = {}
        for line in pricer(hardware, program).lines(program):
            if isinstance(line.item, Computed):
                kernels[line.item.quantity] = kernels.get(line.item.quantity, 0.0) + line.times
        samples.append(
            ProbeSample(probe.name, probe.kind, compiled.seconds[probe.name], tuple(kernels.items()))
        )
    return samples


def _typical(hardware: Hardware, samples: Sequence[ProbeSample], fit: TpuFit) -> dict[str, dict[str, float]]:
    preset = {s.name: error(hardware, s) for s in samples}
    return {
        words: {
            side: median(abs(errors[s.name]) for s in samples if s.kind == kind)
            for side, errors in (("preset", preset), ("fitted", fit.fitted), ("held_out", fit.held_out))
        }
        for kind, words in KINDS.items()
    }


def _profile(
    target: str,
    compiled: CompiledProbes,
    samples: Sequence[ProbeSample],
    fit: TpuFit,
    typical: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """The content of a hardware file (format layoutopt-hardware/1)."""
    content = preset_content(target)
    source = f"fitted to estimates of the TPU compiler ({compiled.compiler}) for {compiled.topology}"
    common = {"source": source, "date": compiled.date}
    held_out = median(abs(e) for e in fit.held_out.values())
    numbers, chip, sure = fit.numbers, content["chip"], fit.uncertainty
    chip["launch_overhead"] = {"value": numbers.launch, "unit": "s", **common}
    chip["memory_efficiency"] = {"value": numbers.memory, "unit": "1", **common}
    chip["element_time"] = {"value": numbers.element, "unit": "s", **common}
    chip["matmul_efficiency"] = {"points": [list(p) for p in numbers.curve.points], **common}
    for name, uncertainty in sure.items():
        chip[name]["uncertainty"] = uncertainty
    content["calibrated"] = True
    content["summary"] += f"; calibrated to estimates of the TPU compiler ({compiled.date})"
    content["calibration"] = {
        "date": compiled.date,
        "machine": {"compiled_for": compiled.topology, "measured": False},
        "versions": {**compiled.versions, "layoutopt": version_of("layoutopt")},
        "fit": {"method": METHOD, "held_out_error": held_out, "typical": typical, "uncertainty": sure},
        "measurements": [
            {
                "name": s.name,
                "kind": s.kind,
                "cycles": compiled.cycles[s.name],
                "seconds": s.seconds,
                "flops": s.flops,
                "bytes": s.bytes,
                "fitted": fit.fitted[s.name],
                "held_out": fit.held_out[s.name],
            }
            for s in samples
        ],
        "base": target,
    }
    content["notes"] = [
        *content["notes"],
        "These numbers are fitted to the compiler's estimates, not to measurements of a chip; the "
        "compiler uses its estimates for scheduling, and they may be far from real times, above all for "
        "element-wise operations.",
        "The probes have bfloat16 activations; predictions for float32 activations are too slow.",
        f"Median error on held-out probes, which had no part in the fit: {held_out:.1%}.",
    ]
    return content
