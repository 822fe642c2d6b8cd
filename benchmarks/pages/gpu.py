"""Training steps on one GPU."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pages.tables import caption, prose, share, stored, table
from layoutopt.plan.units import bytes_text, seconds_text

HEAD = """\
# Steps on one GPU

The engine `jax` ran training steps of these models on one {device}, with JAX {version}. Runs on several GPUs,
NCCL and calibration were not tested on hardware. `train`, resuming, `generate` and `--offload
activations` ran successfully.
"""
STEPS = """\
## Predictions

The preset `{hardware}` is used as it ships; no constant was fitted to these runs. Matrix products are
in bfloat16, except in the float32 row. That row is predicted at the peak of TF32, and the measured rate
was far below this peak. Measured memory is the peak that JAX reports, including libraries. `--offload
optimizer` saved no memory: the peak was the same without it.
"""
KERNELS = """\
## Where the time goes

The table shows milliseconds of a step by kind of kernel, as predicted and as measured by JAX's
profiler. The preset's rate of matrix products was fitted to whole steps, so it includes time of other
kernels: matrix products are predicted too slow and other kernels too fast.
"""
NUMBERS = """\
## Numbers

In the conformance tests (float32, products at full precision), {right} of {run} operations give NumPy's
results and gradients. {wrong}The losses of 20 steps of a small Transformer differ from NumPy's by at
most {largest} (relative), with and without recomputed layers.
"""
WRONG = """\
The gradient of `{name}` was not finite, probably because XLA chose float16 where no 8-bit kernel fits
the shape. The engine therefore uses bfloat16 for such shapes, which was tested on CPUs only.
"""
KINDS = {
    "products": "matrix products",
    "attention": "attention",
    "copies of whole arrays": "copies of whole arrays",
    "others, element by element": "other kernels",
}
"""Kind of kernels -> its name on the page."""


def page() -> Iterator[str]:
    """docs/results/gpu.md."""
    found = stored("one_gpu")
    yield prose(HEAD, device=found["machine"]["device"], version=found["machine"]["jax"])
    yield caption("python benchmarks/one_gpu.py", "one_gpu")
    yield prose(STEPS, hardware=found["hardware"])
    heads = ("model", "predicted", "measured", "error", "predicted memory", "measured", "error")
    yield from table(heads, (_row(name, run) for name, run in found["steps"].items()))
    yield prose(KERNELS)
    kinds = list(next(iter(found["kernels"].values()))["measured"])
    heads = ("model", *(f"{KINDS[kind]}: predicted, measured" for kind in kinds))
    yield from table(heads, (_kinds(name, run, kinds) for name, run in found["kernels"].items()))
    tried = found["operations"]
    yield prose(
        NUMBERS,
        run=tried["run"],
        right=tried["run"] - len(tried["wrong"]),
        wrong="".join(WRONG.format(name=name) for name in tried["wrong"]),
        largest=f"{max(found['training'].values()):.0e}",
    )


def _kinds(name: str, run: dict[str, dict[str, float]], kinds: list[str]) -> tuple[object, ...]:
    return name, *(f"{run['predicted'][kind]:.1f}, {run['measured'][kind]:.1f}" for kind in kinds)


def _row(name: str, run: dict[str, dict[str, float]]) -> tuple[object, ...]:
    said, seen = run["predicted"], run["measured"]
    cells: list[object] = [name]
    for what, text in (("step_seconds", seconds_text), ("peak_memory_bytes", bytes_text)):
        off = said[what] / seen[what] - 1
        cells += [text(said[what]), text(seen[what]), f"{'+' if off > 0 else '-'}{share(abs(off))}"]
    return tuple(cells)
