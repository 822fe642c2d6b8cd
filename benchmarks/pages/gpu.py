"""Training steps on one GPU."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pages.tables import caption, share, stored, table
from layoutopt.plan.units import bytes_text, seconds_text

HEAD = """\
# Steps on one GPU

Steps of the engine `jax` on one {device}, with JAX {version}. One GPU sends no messages: layouts over
several GPUs, NCCL and calibration were not tried on hardware. `train`, resuming, `generate` and
`--offload activations` ran too.
"""
NUMBERS = """\
## Numbers

{right} of {run} operations of the conformance tests give NumPy's results and gradients (float32, products at
full precision). {wrong}Losses of 20 steps of a small Transformer differ from NumPy's by at most {largest}
(relative), with recomputed layers too.
"""
WRONG = """\
`{name}` gave a gradient that was not finite; float16, which XLA can take where no
8-bit kernel fits a shape, would explain it. The engine gives XLA bfloat16 on GPUs since, which was checked on
the CPU only.
"""
STEPS = """\
## Predictions

Predictions with the preset `{hardware}` as it ships; no constant used these runs. Products are in bfloat16
but in the row that says float32, which is predicted at the peak of TF32 and measured far below it. Memory is
the peak that JAX reports, about 0.1 GB of libraries included. `--offload optimizer` saved no memory: the peak
is that of the same step without it.
"""
KERNELS = """\
## Where the time goes

Milliseconds of a step by kind of kernel: predicted, and measured by JAX's profiler. The preset's rate of
products was fitted to whole steps, so it carries a part of the others: products come out too slow, the
kernels beside them too fast.
"""


def page() -> Iterator[str]:
    """docs/results/gpu.md."""
    found = stored("one_gpu")
    yield HEAD.format(device=found["machine"]["device"], version=found["machine"]["jax"])
    yield caption("python benchmarks/one_gpu.py", "one_gpu")
    tried = found["operations"]
    yield NUMBERS.format(
        run=tried["run"],
        right=tried["run"] - len(tried["wrong"]),
        wrong="".join(WRONG.format(name=name) for name in tried["wrong"]),
        largest=f"{max(found['training'].values()):.0e}",
    )
    yield STEPS.format(hardware=found["hardware"])
    heads = ("model", "predicted", "measured", "error", "predicted memory", "measured", "error")
    yield from table(heads, (_row(name, run) for name, run in found["steps"].items()))
    yield KERNELS
    kinds = list(next(iter(found["kernels"].values()))["measured"])
    heads = ("model", *(f"{kind}: predicted, measured" for kind in kinds))
    yield from table(heads, (_kinds(name, run, kinds) for name, run in found["kernels"].items()))


def _kinds(name: str, run: dict[str, dict[str, float]], kinds: list[str]) -> tuple[object, ...]:
    return name, *(f"{run['predicted'][kind]:.1f}, {run['measured'][kind]:.1f}" for kind in kinds)


def _row(name: str, run: dict[str, dict[str, float]]) -> tuple[object, ...]:
    said, seen = run["predicted"], run["measured"]
    cells: list[object] = [name]
    for what, text in (("step_seconds", seconds_text), ("peak_memory_bytes", bytes_text)):
        off = said[what] / seen[what] - 1
        cells += [text(said[what]), text(seen[what]), f"{'+' if off > 0 else '-'}{share(abs(off))}"]
    return tuple(cells)
