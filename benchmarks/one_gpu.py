"""One GPU: do steps there give NumPy's numbers, and do predictions for its chip hold?

    python benchmarks/one_gpu.py --out one_gpu.json [--parts steps,operations,training,kernels,calibration]
        [--hardware h100] [--seconds 500] [--share 0/1]

`operations`: every operation of tests/conformance on the GPU, in float32 with products at full precision,
against the dense NumPy result; `--share 0/4` takes every fourth. `training`: the losses of a Transformer,
also with its layers recomputed, against NumPy's. `steps`: `layoutopt measure` of models, with the predicted
time and memory beside what was measured; nothing was fitted to these. `kernels`: where a step spends its
time, by JAX's profiler. `calibration`: `layoutopt calibrate --engine jax`, and its profile.

Results are written after every item, so that what a time limit cuts short is kept. Anywhere else,
`--join PARTS.json... --out benchmarks/results/one_gpu.json` puts them together and adds the predictions.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GPT = "examples/transformer_lm.py"
SIZES = {
    "124M": {"layers": 12, "d_model": 768, "d_ff": 3072, "heads": 12, "d_kv": 64, "vocab": 50304},
    "350M": {"layers": 24, "d_model": 1024, "d_ff": 4096, "heads": 16, "d_kv": 64, "vocab": 50304},
}
LLAMA = {
    "layers": 16,
    "d_model": 2048,
    "d_ff": 8192,
    "heads": 32,
    "kv_heads": 8,
    "d_kv": 64,
    "gated": True,
    "vocab": 128256,
    "tied": True,
    "positions": "rotary",
    "norm": "rms",
}
BF16 = {"dtype": "bfloat16"}
TRACED = 5
"""Steps under the profiler."""
STEPS: Mapping[str, tuple[str, Mapping[str, Any], Sequence[str]]] = {
    "GPT 124M": (GPT, {**SIZES["124M"], **BF16, "batch": 16, "length": 1024}, ()),
    "GPT 350M": (GPT, {**SIZES["350M"], **BF16, "batch": 16, "length": 1024}, ()),
    "Llama 1.2B": (GPT, {**LLAMA, **BF16, "batch": 4, "length": 2048}, ()),
    "Llama 1.2B, layers recomputed": (
        GPT,
        {**LLAMA, **BF16, "batch": 8, "length": 2048},
        ("--recompute", "layers"),
    ),
    "GPT 350M, layers recomputed": (
        GPT,
        {**SIZES["350M"], **BF16, "batch": 32, "length": 1024},
        ("--recompute", "layers"),
    ),
    "GPT 350M, optimizer on the host": (
        GPT,
        {**SIZES["350M"], **BF16, "batch": 16, "length": 1024},
        ("--offload", "optimizer"),
    ),
    "GPT 124M in float32": (GPT, {**SIZES["124M"], "batch": 16, "length": 1024}, ()),
    "mixture of 8 experts": (
        "examples/moe_lm.py",
        {
            "layers": 8,
            "d_model": 1024,
            "d_ff": 4096,
            "heads": 16,
            "d_kv": 64,
            "vocab": 50304,
            **BF16,
            "batch": 16,
            "length": 1024,
        },
        (),
    ),
}


def operations(left: Callable[[], float], share: str) -> Iterator[tuple[str, Any]]:
    """Each sample on the device: "" or what was wrong."""
    import jax

    import mesh_tf_core as mtf
    from tests.conformance.helper import Built
    from tests.conformance.jax_cases import compare
    from tests.conformance.samples import SAMPLES

    jax.config.update("jax_default_matmul_precision", "highest")
    first, every = map(int, share.split("/"))
    for sample in list(SAMPLES)[first::every]:
        if left() < 20:
            yield sample.name, "not run: the time was over"
            continue
        try:
            built = Built(sample, "float32")
            compare(built, mtf.Mesh("all:1"), mtf.Layout(""), built.dense(), None)
            yield sample.name, ""
        except Exception as error:  # every sample reports
            yield sample.name, f"{type(error).__name__}: {error}"[:500]


def training(left: Callable[[], float]) -> Iterator[tuple[str, Any]]:
    """Twenty losses on the device and in NumPy, and their largest relative difference."""
    import jax

    from layoutopt.models.loading import load_model
    from mesh_tf_core import Layout, Mesh
    from mesh_tf_core.engines import open_engine
    from mesh_tf_core.lower import Options

    jax.config.update("jax_default_matmul_precision", "highest")
    sizes = {"layers": 2, "d_model": 64, "d_ff": 128, "heads": 4, "d_kv": 16, "batch": 8, "length": 32}
    loaded = load_model(GPT, sizes)
    for name, options in {
        "plain": Options(),
        "recomputed": Options(recompute=frozenset({"layers"})),
    }.items():
        losses = {}
        for engine in ("jax", "lockstep"):
            program = loaded.model.lower(Mesh("all:1"), Layout(""), options)
            running = open_engine(program, engine)
            feeds = loaded.data()
            losses[engine] = [float(np.asarray(running.step(next(feeds))["loss"])) for _ in range(20)]
            running.close()
        pairs = zip(losses["jax"], losses["lockstep"], strict=True)
        yield name, {**losses, "largest": max(abs(a - b) / abs(b) for a, b in pairs)}


def steps(left: Callable[[], float], hardware: str) -> Iterator[tuple[str, Any]]:
    """Each model's `layoutopt measure`, by its own process."""
    for name, (file, sizes, options) in STEPS.items():
        given = [x for key, value in sizes.items() for x in ("--set", f"{key}={value}")]
        command = ["measure", file, "--mesh", "data:1", "--engine", "jax", "--hardware", hardware]
        yield name, _run([*command, *given, *options, "--steps", "10", "--json"], left)


def kernels(left: Callable[[], float]) -> Iterator[tuple[str, Any]]:
    """Seconds of a step in each kernel, by its profiler."""
    import jax

    from layoutopt.models.loading import load_model
    from mesh_tf_core import Layout, Mesh
    from mesh_tf_core.engines import open_engine

    for name in ("GPT 124M", "Llama 1.2B"):
        if left() < 60:
            return
        file, sizes, _ = STEPS[name]
        loaded = load_model(file, sizes)
        running = open_engine(loaded.model.lower(Mesh("all:1"), Layout("")), "jax")
        batch = next(loaded.data())
        for _ in range(3):
            running.step(batch)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(TRACED):
                    running.step(batch)
            yield name, _by_kernel(Path(folder))
        running.close()


def _by_kernel(folder: Path) -> dict[str, Any]:
    """Milliseconds a step on the device's streams, and the longest kernels with their share."""
    (file,) = folder.rglob("*.trace.json.gz")
    with gzip.open(file) as opened:
        events = json.load(opened)["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    found: dict[str, float] = {}
    for e in events:
        lane = lanes.get((e.get("pid"), e.get("tid")), "")
        if e.get("ph") == "X" and "GPU" in named.get(e["pid"], "") and lane.startswith("Stream"):
            key = f"{e['name']} | {e.get('args', {}).get('hlo_op', '')} | {lane}"
            found[key] = found.get(key, 0.0) + e["dur"] / 1e3 / TRACED
    longest = sorted(found.items(), key=lambda item: -item[1])[:60]
    return {"milliseconds": sum(found.values()), "lanes": sorted(set(lanes.values())), "longest": longest}


def calibration(left: Callable[[], float], folder: Path) -> Iterator[tuple[str, Any]]:
    """What calibrating takes; then the first models from its profile."""
    profile = folder / "profile.json"
    began = time.monotonic()
    said = _run(["calibrate", "--engine", "jax", "--mesh", "data:1", "--out", str(profile), "--json"], left)
    yield "calibrate", {"seconds": time.monotonic() - began, "said": said}
    if profile.exists():
        yield "profile", json.loads(profile.read_text())


def _machine() -> dict[str, str]:
    """The device and what runs it."""
    import jax

    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def _run(arguments: Sequence[str], left: Callable[[], float]) -> Any:
    """A command's JSON, or how it failed."""
    if left() < 20:
        return {"error": "not run: the time was over"}
    command = [sys.executable, "-m", "layoutopt", *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=left()
        )
    except subprocess.TimeoutExpired:
        return {"error": "stopped: the time was over", "took": time.monotonic() - began}
    try:
        return {**json.loads(done.stdout), "took": time.monotonic() - began}
    except ValueError:
        return {"error": done.stderr[-3000:], "code": done.returncode, "took": time.monotonic() - began}


def _cost(name: str, hardware: str, *more: str) -> dict[str, Any]:
    """A model's `layoutopt cost`."""
    file, sizes, options = STEPS[name]
    given = [x for key, value in sizes.items() for x in ("--set", f"{key}={value}")]
    command = ["cost", file, "--mesh", "data:1", "--hardware", hardware, *given, *options, "--json"]
    found: dict[str, Any] = _run([*command, *more], lambda: 600.0)
    return found


def predicted(name: str, hardware: str) -> dict[str, float]:
    """Seconds and peak bytes of a model's step."""
    found = _cost(name, hardware)["predicted"]
    return {"step_seconds": found["step_seconds"], "peak_memory_bytes": found["peak_memory_bytes"]}


def predicted_classes(name: str, hardware: str) -> dict[str, float]:
    """Milliseconds of a model's step by kind of kernel."""
    found = dict.fromkeys((*CLASSES, OTHERS), 0.0)
    for line in _cost(name, hardware, "--lines")["lines"]:
        kind = next((k for k, start in PRICED.items() if line["operation"].startswith(start)), OTHERS)
        found[kind] += 1e3 * line["seconds"] * line["runs"]
    return found


def joined(parts: Sequence[Path], hardware: str) -> dict[str, Any]:
    """Results of several runs on one machine, with predictions of today."""
    read = [json.loads(path.read_text()) for path in parts]
    found: dict[str, Any] = {}
    for part in read:
        for key, value in part.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    steps = {
        name: {
            "measured": {"step_seconds": run["step_seconds"], "peak_memory_bytes": run["peak_memory_bytes"]},
            "predicted": predicted(name, hardware),
        }
        for name, run in found["steps"].items()
        if "error" not in run
    }
    wrong = {name: said for name, said in found.get("operations", {}).items() if said}
    return {
        "date": found["date"],
        "hardware": hardware,
        "machine": found.get("machine", {}),
        "operations": {"run": len(found.get("operations", {})), "wrong": wrong},
        "training": {name: run["largest"] for name, run in found.get("training", {}).items()},
        "steps": steps,
        "kernels": {
            name: {"measured": _classes(run), "predicted": predicted_classes(name, hardware)}
            for name, run in found.get("kernels", {}).items()
        },
    }


CLASSES = {
    "products": ("nvjet", "gemm", "cutlass", "cublas"),
    "attention": ("sdpa", "cudnn"),
    "copies of whole arrays": ("memcpy",),
}
"""Kind of kernel -> what the names of its kernels contain."""
PRICED = {"products": "einsum", "attention": "attention", "copies of whole arrays": "stack"}
"""Kind of kernel -> how the names of its operations begin in a price."""
OTHERS = "others, element by element"


def _classes(run: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds by kind of kernel; of the kernels that are not listed, as others."""
    found = dict.fromkeys(CLASSES, 0.0)
    for name, milliseconds in run["longest"]:
        kind = next((k for k, parts in CLASSES.items() if any(p in name for p in parts)), None)
        if kind is not None:
            found[kind] += milliseconds
    return {**found, OTHERS: run["milliseconds"] - sum(found.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="training,operations,steps,kernels,calibration")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--join", type=Path, nargs="+", metavar="PARTS.json")
    args = parser.parse_args()
    if args.join:
        args.out.write_text(json.dumps(joined(args.join, args.hardware), indent=1) + "\n")
        return
    ends = time.monotonic() + args.seconds

    def left() -> float:
        return ends - time.monotonic()

    parts: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
        "steps": lambda: steps(left, args.hardware),
        "operations": lambda: operations(left, args.share),
        "training": lambda: training(left),
        "kernels": lambda: kernels(left),
        "calibration": lambda: calibration(left, args.out.parent),
    }
    found: dict[str, Any] = {"date": str(date.today()), "hardware": args.hardware, "machine": _machine()}
    for part in args.parts.split(","):
        found[part] = {}
        for name, value in parts[part]():
            found[part][name] = value
            args.out.write_text(json.dumps(found, indent=1) + "\n")
            print(part, name, json.dumps(value)[:400], flush=True)


if __name__ == "__main__":
    main()
