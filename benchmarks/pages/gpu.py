"""Training steps on one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.pages.tables import caption, prose, share, stored, table
from costmodels import load_hardware
from layoutopt.plan.units import bytes_text, seconds_text

HEAD = """\
# Steps on one GPU

Training steps of PyTorch modules, and of our own models by the engine `jax`, on one GPU. Runs on several
GPUs, NCCL and calibration were not tested on hardware.
"""
TORCH = """\
## PyTorch

Unmodified modules of transformers {transformers} in a bare training loop with PyTorch {torch}, on one
{device}: AdamW with its defaults, bfloat16 unless the name says `autocast` (float32 parameters) or `FSDP`
(`fully_shard` of each layer, `param_dtype` bfloat16). *First* is the prediction made before any measurement,
under `--framework torch`, or `torch-compile` for compiled modules. Its mean error was {first_eager} over
{eager} eager runs and {first_compiled} over {compiled} compiled runs. The column *predicted* has the rules
that follow from these runs: each call of PyTorch is one kernel and keeps its operands, the optimizer's
kernels are shared by all variables, RMSNorm as transformers writes it is several kernels, PyTorch 2.11 takes
cuDNN's attention, and products run at {sustained:.0%} of the rate of single products. *Error* compares
*predicted* with *measured*: for eager runs, it shows how well the rules fit these runs, not how well they
predict others.

*Memory* is the most that arrays took (`max_memory_allocated`). PyTorch's allocator reserved {reserved} more
on average.
"""
TORCH_NOTES = """\
T5 is another program there: transformers 5.17 computes its attention in float32 step by step, the module that
was imported (5.24) calls `scaled_dot_product_attention`. The small batch waits for the host, which takes
about 30 μs for each kernel of this model (`host_interval`; answers say where that is longer than the step).
Under `torch.compile`, transformers hands
attention a mask in place of `is_causal`, and cuDNN's kernels take three times as long
(`torch-compile:attention=masked`). The constants of `torch-compile` were fitted to published steps: they have
slower products than these runs and no mask, and here the two errors nearly cancel.

These modules were predicted at the same time, and have no measurement:
"""
JAX = """\
## Our own models

The engine `jax` ran these models on one {device} and one H200, with JAX {version}. `train`, resuming,
`generate` and `--offload activations` ran successfully on the H100.
"""
STEPS = """\
Presets are used as they ship, under `--framework layoutopt`. Its `memory_efficiency` on GPUs was fitted to
the times of the dense models in bfloat16; the mixture and the float32 row had no part in it. Matrix products
are in bfloat16, except in the float32 row. That row is predicted at the peak of TF32, and the measured rate
was far below this peak. Measured memory is the peak that JAX reports, including libraries. `--offload
optimizer` saved no memory: the peak was the same without it.
"""
KERNELS = """\
## Where the time goes

The table shows milliseconds of a step by kind of kernel, as predicted and as measured by JAX's
profiler. XLA runs what follows a matrix product as a kernel of its own. One kernel is predicted for both, so
matrix products are predicted too slow and other kernels too fast. The low
`memory_efficiency` makes up for this.
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
    found, other = stored("one_gpu"), stored("one_gpu_h200")
    yield prose(HEAD)
    yield from _torch()
    yield prose(JAX, device=found["machine"]["device"], version=found["machine"]["jax"])
    yield caption("python benchmarks/one_gpu.py", "one_gpu")
    yield prose(STEPS)
    heads = ("model", "predicted", "measured", "error", "predicted memory", "measured", "error")
    runs = [(f"{name}, {of['hardware']}", run) for of in (found, other) for name, run in of["steps"].items()]
    yield from table(heads, (_row(name, run) for name, run in runs))
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


def _torch() -> Iterator[str]:
    found = stored("torch_gpu")
    rows: dict[str, Any] = found["rows"]
    measured = {name: row for name, row in rows.items() if "step_seconds" in row.get("measured", {})}
    compiled = [name for name in measured if name.endswith("compiled")]
    eager = [name for name in measured if name not in compiled]

    def off(names: Sequence[str]) -> str:
        errors = (_off(measured[n]["first"], measured[n]["measured"], "step_seconds") for n in names)
        return share(mean(map(abs, errors)))

    seen = [row["measured"] for row in measured.values()]
    more = mean(r["reserved_bytes"] / r["allocated_bytes"] - 1 for r in seen)
    torch = load_hardware(found["hardware"], "torch").chip.sustained
    assert torch is not None
    yield prose(
        TORCH,
        **found["machine"],
        eager=len(eager),
        compiled=len(compiled),
        first_eager=off(eager),
        first_compiled=off(compiled),
        sustained=torch.value,
        reserved=share(more),
    )
    yield caption("python benchmarks/torch_gpu.py", "torch_gpu")
    heads = ("module", "first", "predicted", "measured", "error", "memory predicted", "measured", "error")
    yield from table(heads, (_torch_row(name, row) for name, row in measured.items()))
    yield prose(TORCH_NOTES)
    waiting = {name: row["predicted"] for name, row in rows.items() if name not in measured}
    yield from table(
        ("module", "predicted", "memory predicted"),
        (
            (name, seconds_text(said["step_seconds"]), bytes_text(said["peak_memory_bytes"]))
            for name, said in waiting.items()
        ),
    )


def _torch_row(name: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    said, seen = row["predicted"], row["measured"]
    first = seconds_text(row["first"]["step_seconds"])
    cells = [name, first, seconds_text(said["step_seconds"]), seconds_text(seen["step_seconds"])]
    cells += [_signed(_off(said, seen, "step_seconds")), bytes_text(said["peak_memory_bytes"])]
    held = seen["allocated_bytes"]
    return (*cells, bytes_text(held), _signed(said["peak_memory_bytes"] / held - 1))


def _off(said: Mapping[str, float], seen: Mapping[str, float], what: str) -> float:
    return said[what] / seen[what] - 1


def _signed(off: float) -> str:
    return f"{'+' if off > 0 else '-'}{share(abs(off))}"


def _kinds(name: str, run: dict[str, dict[str, float]], kinds: list[str]) -> tuple[object, ...]:
    return name, *(f"{run['predicted'][kind]:.1f}, {run['measured'][kind]:.1f}" for kind in kinds)


def _row(name: str, run: dict[str, dict[str, float]]) -> tuple[object, ...]:
    said, seen = run["predicted"], run["measured"]
    cells: list[object] = [name]
    for what, text in (("step_seconds", seconds_text), ("peak_memory_bytes", bytes_text)):
        cells += [text(said[what]), text(seen[what]), _signed(_off(said, seen, what))]
    return tuple(cells)
