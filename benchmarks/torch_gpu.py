"""PyTorch modules on one GPU: steps and memory as predicted, beside what was measured.

    python benchmarks/torch_gpu.py --predict --out predicted.json [--hardware h200]
    python benchmarks/torch_gpu.py --out measured.json [--seconds 400] [NAME...]
    python benchmarks/torch_gpu.py --join first.json measured.json predicted.json \
        --out benchmarks/results/torch_gpu.json

The machine that measures needs torch, transformers and a GPU, and nothing of this project. Modules are
unmodified ones of transformers in a bare training loop: AdamW with its defaults, gradients set to None. A row
is written when it ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.torch_gpu_runs import RUNS, Run

WARM, STEPS = 3, 8


def predicted(run: Run, hardware: str) -> dict[str, Any]:
    """Seconds and bytes of a step, and milliseconds by kind of kernel."""
    import layoutopt

    began = time.process_time()
    kind = torch.bfloat16 if run.types == "fsdp" else None
    with run.cast("cpu"):
        model = layoutopt.from_torch(run.module("meta"), run.given("meta"), param_dtype=kind)
    found = layoutopt.cost(model, "data:1", hardware=hardware, framework=run.framework)
    lines = found.to_frame()
    kinds = lines.operation.str.split().str[0]
    by_kind = (1e3 * lines.seconds * lines.runs).groupby(kinds).sum().sort_values(ascending=False)
    return {
        "framework": run.framework,
        "step_seconds": found.predicted.step_seconds,
        "peak_memory_bytes": found.predicted.peak_memory_bytes,
        "milliseconds": {"all": float(by_kind.sum()), **by_kind.head(12).to_dict()},
        "launches": int(lines.runs.sum()),
        "notes": list(model.origin.notes if model.origin else ()),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def measured(run: Run, profile: bool) -> dict[str, Any]:
    """Seconds of a step (the median), bytes at its peak, and the kernels of one step."""
    began = time.monotonic()
    step = _step(run)
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    ready, times = time.monotonic(), []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    free, total = torch.cuda.mem_get_info()
    found = {
        "step_seconds": statistics.median(times),
        "spread": [min(times), max(times)],
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "used_bytes": total - free,
        "ready_seconds": ready - began,
    }
    return {**found, "kernels": _kernels(step)} if profile else found


def _step(run: Run) -> Callable[[], None]:
    """One training step."""
    module, batch = run.module("cuda"), run.given("cuda")
    if run.types == "fsdp":
        _fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    call = torch.compile(module) if run.compiled else module

    def step() -> None:
        with run.cast("cuda"):
            found = call(**batch)
            loss = found.loss if hasattr(found, "loss") else found[-1] if isinstance(found, tuple) else found
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _empty() -> None:
    """Gives back the memory of the run before."""
    import torch._dynamo as dynamo

    gc.collect()
    dynamo.reset()
    torch.cuda.empty_cache()


def _fully_shard(module: nn.Module) -> None:
    """FSDP2 of each layer on a mesh of one device."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not distributed.is_initialized():
        distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in module.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def _kernels(step: Callable[[], None]) -> list[list[Any]]:
    """[name, launches, milliseconds] of the longest kernels of a step, and of all together."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    rows = [
        [e.key[:160], e.count, e.self_device_time_total / 1e3]
        for e in seen.key_averages()
        if e.device_type == DeviceType.CUDA
    ]
    rows.sort(key=lambda r: -r[2])
    return [["all", sum(r[1] for r in rows), sum(r[2] for r in rows)], *rows[:60]]


def results(args: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of the runs that were asked for, as long as there is time."""
    ends = time.monotonic() + args.seconds
    for name in args.names or RUNS:
        try:
            if args.predict:
                yield name, predicted(RUNS[name], args.hardware)
            elif time.monotonic() < ends:
                _empty()
                yield name, measured(RUNS[name], not args.no_kernels)
        except Exception as error:  # every run reports
            yield name, {"error": f"{type(error).__name__}: {error}"[:2000]}


def joined(parts: Sequence[str], hardware: str) -> dict[str, Any]:
    """Measurements beside the predictions that were made before them, and those of today, which are of runs
    that were not measured too."""
    first, seen, today = (json.loads(Path(part).read_text(encoding="utf-8")) for part in parts)
    rows = {}
    for name, said in today["rows"].items():
        of_run = {"first": first, "measured": seen}
        found = {what: of["rows"][name] for what, of in of_run.items() if name in of["rows"]}
        if "kernels" in found.get("measured", {}):
            found["measured"] = {**found["measured"], "kernels": _by_kind(found["measured"]["kernels"])}
        rows[name] = {"predicted": said, **found}
    dates = {"date": seen["date"], "predicted": today["date"], "hardware": hardware}
    return {**dates, "machine": seen["machine"], "rows": rows}


def _by_kind(kernels: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Milliseconds of the longest kernels by kind, and of all."""
    found: dict[str, float] = {"all": kernels[0][2]}
    for name, _, milliseconds in kernels[1:]:
        kind = next((k for k, parts in KINDS.items() if any(part in name for part in parts)), "others")
        found[kind] = found.get(kind, 0.0) + milliseconds
    return found


KINDS = {
    "attention": ("flash", "fmha", "sdpa", "compute_dot_do_o"),
    "products": ("nvjet", "gemm", "cutlass", "cublas"),
    "optimizer": ("multi_tensor",),
}
"""Kind of kernels -> words in their names."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--join", nargs=3)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--no-kernels", action="store_true")
    args = parser.parse_args()
    if args.join:
        args.out.write_text(json.dumps(joined(args.join, args.hardware), indent=1) + "\n", encoding="utf-8")
        return
    machine = {"torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        machine["device"] = torch.cuda.get_device_name(0)
    found: dict[str, Any] = {"date": str(date.today()), "machine": machine, "rows": {}}
    for name, row in results(args):
        found["rows"][name] = row
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        brief = {k: v for k, v in row.items() if k not in ("milliseconds", "kernels", "notes")}
        print(name, json.dumps(brief)[:300], flush=True)


if __name__ == "__main__":
    main()
