"""Training steps on one GPU."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pages.tables import caption, prose, share, stored, table
from layoutopt.plan.units import bytes_text, seconds_text

HEAD = """\
# Steps on one GPU

Steps of the engine `jax` on one {device}, with JAX {version}. One GPU sends no messages: layouts over
several GPUs, NCCL and calibration were not tried on hardware. `train`, resuming, `generate` and
`--offload activations` also ran.
"""
STEPS = """\
## Predictions

The preset `{hardware}` predicts these steps as it ships; no constant used these runs. Products are in
bfloat16 except in the row that says float32. That row is predicted at the peak of TF32, and the measured
rate is far below it. Memory is the peak that JAX reports, libraries included. `--offload optimizer` saved
no memory: its peak is that of the same step without it.
"""
KERNELS = """\
## Where the time goes

Milliseconds of a step by kind of kernel: predicted, and measured by JAX's profiler. The preset's rate of
products was fitted to whole steps and therefore includes a part of the other kernels: products are
predicted too slow, other kernels too fast.
"""
NUMBERS = """\
## Numbers

{right} of {run} operations of the conformance tests give NumPy's results and gradients (float32, products
at full precision). {wrong}The losses of 20 steps of a small Transformer differ from NumPy's by at most
{largest} (relative), with recomputed layers too.
"""
WRONG = """\
`{name}` gave a gradient that was not finite. XLA may have chosen float16 where no 8-bit kernel fits the
shape; the engine therefore gives XLA bfloat16 there, which was tested on the CPU only.
"""


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
    heads = ("model", *(f"{kind}: predicted, measured" for kind in kinds))
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
