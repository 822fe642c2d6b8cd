"""`calibrate_tpu`: a TPU's profile from its compiler's estimates, without a TPU.

The profile is the preset with four numbers fitted to the compiler's estimates (`costmodels.calibration.
tpu_fit`). It has no measured curves, so it stays analytic, as the search's bounds need it. The compiled text
has no times of collectives, so the network's numbers remain those of the preset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from costmodels.calibration.machine import version_of
from costmodels.calibration.runner import OnProbe
from costmodels.calibration.tpu_compiled import CompiledProbes, compile_probes, known_target, shipped_probes
from costmodels.calibration.tpu_fit import ProbeSample, TpuFit, error, fit_tpu
from costmodels.calibration.tpu_probes import CHAIN, CHECK, PRODUCT, TpuProbe, tpu_probes
from costmodels.hardware import Hardware, load_hardware, preset_content
from costmodels.kernels.compute import Quantity
from costmodels.pricing.items import Computed
from costmodels.pricing.pricer import pricer
from mesh_tf_core.errors import UserError

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
