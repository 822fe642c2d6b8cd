"""What a search picks under each framework, and what the framework leaves: common models on common chips.

    .venv/bin/python -m benchmarks.framework_picks [--only QUESTION ...] [--time-limit SECONDS] [--again]

Each pair is searched twice with the framework's prices: over what it can express, and over all layouts. A
pair is stored when both have ended. A run goes on where an earlier one ended: pairs that were stored with
the prices of today (`prices_of`) are left as they are, but for `--again`; those of other prices are removed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import layoutopt
from costmodels.frameworks import DEFAULT, load_framework
from costmodels.hardware import Hardware, load_hardware
from examples.moe_lm import model as mixture
from examples.transformer_lm import model as transformer
from examples.vit import model as vision
from layoutopt.plan.build import Plan, decided
from layoutopt.plan.export import FORMATS, export
from layoutopt.plan.exported import Exported, placed
from layoutopt.plan.units import layout_text
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.model import Model

OUT = Path(__file__).parent / "results" / "framework_picks.json"
LLAMA: dict[str, Any] = {
    "kv_heads": 8, "d_kv": 128, "vocab": 128256, "length": 8192, "gated": True, "positions": "rotary",
    "norm": "rms", "dtype": "bfloat16",
}  # fmt: skip
SMALL: dict[str, Any] = {**LLAMA, "layers": 32, "d_model": 4096, "heads": 32, "d_ff": 14336}
LARGE: dict[str, Any] = {**LLAMA, "layers": 80, "d_model": 8192, "heads": 64, "d_ff": 28672}
GPT2: dict[str, Any] = {
    "layers": 12, "d_model": 768, "d_kv": 64, "heads": 12, "d_ff": 3072, "activation": "gelu",
    "vocab": 50257, "length": 1024, "tied": True, "batch": 512, "dtype": "bfloat16",
}  # fmt: skip
VIT: dict[str, Any] = {
    "layers": 32, "d_model": 1280, "heads": 16, "d_ff": 5120, "size": 224, "patch": 14, "colours": 3,
    "classes": 1000, "dtype": "bfloat16",
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "layers": 32, "d_model": 4096, "d_kv": 128, "heads": 32, "kv_heads": 8, "d_ff": 14336, "gated": True,
    "experts": 8, "vocab": 32000, "length": 4096, "positions": "rotary", "batch": 256, "dtype": "bfloat16",
}  # fmt: skip
GPU = ("torchtitan", "megatron", "deepspeed", "maxtext", "jax")
TPU = ("maxtext", "jax")


@dataclass(frozen=True)
class Question:
    """A model on some chips."""

    name: str
    build: Callable[..., Model]
    sizes: dict[str, Any]
    devices: int
    hardware: str

    @property
    def title(self) -> str:
        """The model and the chips."""
        return f"{self.name}, {self.devices} {self.hardware}"

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Those that run on these chips."""
        return GPU if load_hardware(self.hardware).kind == "gpu" else TPU


QUESTIONS = (
    Question("GPT-2", transformer, GPT2, 8, "h100"),
    Question("Llama 3 8B", transformer, {**SMALL, "batch": 32}, 8, "h100"),
    Question("Llama 3 8B", transformer, {**SMALL, "batch": 32}, 8, "tpu-v6e"),
    Question("ViT-H", vision, {**VIT, "batch": 1024}, 8, "h100"),
    Question("Mixtral 8x7B", mixture, MIXTRAL, 64, "h100"),
    Question("Llama 3 70B", transformer, {**LARGE, "batch": 128}, 64, "h100"),
    Question("Llama 3 8B", transformer, {**SMALL, "batch": 128}, 64, "h100"),
    Question("Llama 3 70B", transformer, {**LARGE, "batch": 128}, 64, "tpu-v5p"),
    Question("GPT-2", transformer, GPT2, 8, "tpu-v6e"),
    Question("GPT-2", transformer, GPT2, 64, "h100"),
    Question("Mixtral 8x7B", mixture, MIXTRAL, 64, "tpu-v5p"),
    Question("ViT-H", vision, {**VIT, "batch": 4096}, 64, "h100"),
)


def searched(
    model: Model, of: Question, machine: Hardware, limit: float
) -> tuple[Plan | None, dict[str, Any]]:
    """A plan, and what is stored of it."""
    began = time.process_time()
    try:
        plan = layoutopt.search(
            model, devices=of.devices, hardware=machine, time_limit=limit, alternatives=False, allow="usual"
        )
    except (InfeasibleError, LimitError) as error:
        return None, {"found": type(error).__name__, "cpu": time.process_time() - began}
    return plan, {
        "found": plan.solver.status,
        "cpu": time.process_time() - began,
        "seconds": plan.predicted.step_seconds,
        "bytes": plan.predicted.peak_memory_bytes,
        "bound": plan.solver.bound,
        "mesh": str(plan.mesh),
        "layout": layout_text(plan.data.layout),
        "decided": plan.data.in_short(),
        "parallelism": plan.data.details.parallelism,
    }


def written(model: Model, plan: Plan, framework: str) -> str:
    """Why a plan cannot be exported; '' if it can."""
    said = decided(plan.options, plan.layout, model.stages(plan.mesh, plan.layout))
    tensors = placed(model.lower(plan.mesh, plan.layout, plan.options))
    what = Exported("", plan.mesh, plan.layout, *tensors, said, slices=plan.slices, framework=framework)
    try:
        export(what, load_framework(framework).says)
    except UserError as error:
        return str(error)
    return ""


def prices_of(machine: Hardware) -> str:
    """A short name of the numbers that a machine has under a framework."""
    numbers = repr([(path, number.value) for path, number in machine.numbers()])
    return hashlib.sha1(numbers.encode()).hexdigest()[:12]


def answer(of: Question, name: str, limit: float) -> dict[str, Any]:
    """What a framework picks."""
    model, machine = of.build(**of.sizes), load_hardware(of.hardware, name)
    plan, own = searched(model, of, machine, limit)
    _, free = searched(of.build(**of.sizes), of, replace(machine, framework=DEFAULT), limit)
    refused = None if plan is None or name not in FORMATS else written(model, plan, name)
    date, prices = datetime.now(UTC).date().isoformat(), prices_of(machine)
    about = {"limit": limit, "date": date, "prices": prices}
    return {"own": own, "unrestricted": free, "refused": refused, **about}


def stored() -> dict[str, Any]:
    """The pairs of earlier runs that have the prices of today."""
    known = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    for each in QUESTIONS:
        pairs = known.get(each.title, {"frameworks": {}})["frameworks"]
        for name, found in [*pairs.items()]:
            if found.get("prices") != prices_of(load_hardware(each.hardware, name)):
                del pairs[name]
    return {title: case for title, case in known.items() if case["frameworks"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[each.title for each in QUESTIONS])
    parser.add_argument("--time-limit", type=float, default=300.0)
    parser.add_argument("--again", action="store_true", help="also pairs that are stored")
    asked = parser.parse_args()
    for each in QUESTIONS:
        for name in each.frameworks if each.title in asked.only else ():
            known = stored()
            case = known.setdefault(each.title, {"batch": each.sizes["batch"], "frameworks": {}})
            if name in case["frameworks"] and not asked.again:
                continue
            found = case["frameworks"][name] = answer(each, name, asked.time_limit)
            OUT.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            cpu = (f"{found[k]['cpu']:.0f}" for k in ("own", "unrestricted"))
            print(each.title, name, found["own"]["found"], *cpu, found["refused"], flush=True)


if __name__ == "__main__":
    main()
