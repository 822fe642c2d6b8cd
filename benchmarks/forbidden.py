"""What each decision is worth: the best step where everything may be chosen, and where one thing may not.

    .venv/bin/python -m benchmarks.forbidden [--only CASE ...]

Every case is a model of 96 layers on 512 devices, on a machine and with a batch where some decision matters.
It is searched with these free, then once without each, as `layoutopt explain PLAN --without NAME` does; the
last one with everything free. CPU seconds of the free search are of a process of its own, from its start
to the plan.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import layoutopt
from examples import transformer_lm
from layoutopt.analysis.explain import without
from layoutopt.plan.build import Plan
from layoutopt.plan.units import seconds_text
from layoutopt.space.decisions import ARGUMENTS, SearchSpace
from mesh_tf_core.errors import InfeasibleError
from mesh_tf_core.ir.schedules import ONE_WAY

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results" / "forbidden.json"
SELECTIVE, LENGTH, LAYERS = (False, "selective", True), ("length",), ("layers",)
FORMS, HOSTS = ("gather", "ring", "zigzag", "all_to_all"), ("optimizer", "activations")
PRODUCTS = ("d_ff", "heads", "vocab")
EVERYTHING = SearchSpace(
    recompute=SELECTIVE,
    elsewhere=LENGTH,
    context=FORMS,
    pipeline=LAYERS,
    offload=HOSTS,
    collective_matmul=PRODUCTS,
)
SIZES: dict[str, Any] = {"layers": 96, "d_kv": 128, "dtype": "bfloat16", "optimizer": "adam"}
GPT3 = {**SIZES, "d_model": 12288, "heads": 96, "d_ff": 49152, "vocab": 51200, "length": 2048}
SMALLER = {**SIZES, "d_model": 4096, "heads": 32, "d_ff": 16384, "vocab": 32768}
"""The language model of `benchmarks/search.py`."""


@dataclass(frozen=True)
class Case:
    """A question.

    Attributes:
      sizes: of `examples/transformer_lm.py`.
      devices: instead of a mesh, of up to three axes.
      forbidden: each in turn.
      asked: what is free.
    """

    name: str
    sizes: dict[str, Any]
    hardware: str
    mesh: str | None = None
    devices: int | None = None
    forbidden: tuple[str, ...] = ()
    asked: SearchSpace = EVERYTHING


TORUS = "data:8;model:8;more:8"
CASES = (
    Case(
        "GPT-3 on little memory, TPU v5e",
        {**GPT3, "batch": 512},
        "tpu-v5e",
        TORUS,
        forbidden=("offload", "selective"),
        asked=SearchSpace(recompute=SELECTIVE, elsewhere=LENGTH, offload=HOSTS),
    ),
    Case(
        "GPT-3 on a slow network, H100 with 50 GB/s a node",
        {**GPT3, "batch": 256},
        "h100, node_egress=50GB/s",
        "data:8;pipe:8;model:8",
        forbidden=("pipeline", "interleaved"),
        asked=SearchSpace(recompute=SELECTIVE, pipeline=LAYERS, schedule=ONE_WAY),
    ),
    Case(
        "GPT-3 with few sequences, H100",
        {**GPT3, "batch": 64},
        "h100",
        "data:8;pipe:8;model:8",
        forbidden=("pipeline", "interleaved"),
        asked=SearchSpace(recompute=SELECTIVE, pipeline=LAYERS, schedule=ONE_WAY),
    ),
    Case(
        "long sequences, TPU v5p",
        {**SMALLER, "length": 131072, "batch": 16},
        "tpu-v5p",
        TORUS,
        forbidden=("context",),
        asked=SearchSpace(recompute=SELECTIVE, context=FORMS),
    ),
    Case(
        "GPT-3 with few sequences, TPU v4",
        {**GPT3, "batch": 64},
        "tpu-v4",
        TORUS,
        forbidden=("sequence",),
        asked=SearchSpace(elsewhere=LENGTH),
    ),
    Case(
        "44 billion parameters with few sequences, TPU v4",
        {**SIZES, "d_model": 6144, "heads": 48, "d_ff": 24576, "vocab": 32768, "length": 2048, "batch": 128},
        "tpu-v4",
        "data:128;model:4",
        forbidden=("sequence", "collective_matmul"),
        asked=SearchSpace(elsewhere=LENGTH, collective_matmul=PRODUCTS),
    ),
    Case(
        "the language model of `benchmarks/search.py`, TPU v4",
        {**SMALLER, "length": 1024, "batch": 512},
        "tpu-v4",
        TORUS,
    ),
)
HEAD = """\
Every model has 96 layers and is searched on 512 devices. The search always decides splits, ZeRO, full
recomputation and microbatches; *options* lists what else it decides. Then the search is repeated with
one kind of decision forbidden, as by `layoutopt explain PLAN --without NAME`. CPU seconds of the first
search are in parentheses. The last row only shows the time of a search with all these options.
"""


def solved(case: Case) -> dict[str, Any]:
    """The best step with everything free, and without each decision."""
    model = transformer_lm.model(**case.sizes)
    where: dict[str, Any] = {"mesh": case.mesh, "devices": case.devices, "max_axes": 3}
    where |= {"hardware": case.hardware, "alternatives": False}

    def best(asked: SearchSpace) -> Plan:
        return layoutopt.search(model, space=asked.but(allow=("usual",)), **where)

    plan = best(case.asked)
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        **{k: v for k, v in asdict(case).items() if k not in ("name", "asked", "forbidden")},
        "parameters": model.parameters,
        "cpu_seconds": round(time.process_time(), 1),
        "layouts": plan.solver.layouts_considered,
        **_of(plan),
        "without": {},
    }
    for name in case.forbidden:
        began = time.process_time()
        try:
            other = _of(best(without(case.asked, name)))
        except InfeasibleError:
            other = {"status": "INFEASIBLE"}
        found["without"][name] = {**other, "cpu_seconds": round(time.process_time() - began, 1)}
    return found


def _of(plan: Plan) -> dict[str, Any]:
    return {
        "status": plan.solver.status,
        "gap": plan.solver.gap,
        "seconds": plan.predicted.step_seconds,
        "peak_bytes": plan.predicted.peak_memory_bytes,
        "plan": f"`{plan.mesh}`: `{plan.layout}`; {plan.data.in_short()}",
    }


def page(results: dict[str, Any]) -> Iterator[str]:
    """docs/results/decisions.md."""
    yield "# What each decision is worth\n"
    yield HEAD
    dates = max(found["date"] for found in results.values())
    yield f"Source: `python -m benchmarks.forbidden` (`benchmarks/results/forbidden.json`, {dates}).\n"
    yield "| model and machine | options | fastest step | forbidden | fastest step without it | slower by |"
    yield "|---|---|---|---|---|---|"
    for name, found in results.items():
        size = f"{found['parameters'] / 1e9:,.0f} B parameters"
        best = f"{seconds_text(found['seconds'])}, {_proof(found)} ({found['cpu_seconds']:.0f} s)"
        first = f"| {name}, {size} | {_free(name)} | {best} |"
        for word, other in found["without"].items():
            if "seconds" in other:
                more = other["seconds"] / found["seconds"] - 1
                then = f"{seconds_text(other['seconds'])}, {_proof(other)} | {100 * max(more, 0):.1f} %"
            else:
                then = "nothing fits |"
            yield f"{first} {word} | {then} |"
            first = "| | | |"
        if not found["without"]:
            yield f"{first} | | |"


def _free(name: str) -> str:
    """What a case leaves free that searches do not by themselves, as one types it."""
    asked, usual = next(case.asked for case in CASES if case.name == name), SearchSpace()
    more = {k: v for k in ARGUMENTS if (v := getattr(asked, k)) != getattr(usual, k)}
    return ", ".join(f"`--{k.replace('_', '-')} {_typed(v)}`" for k, v in more.items())


def _typed(values: tuple[bool | str, ...]) -> str:
    return ",".join(v for v in values if isinstance(v, str))


def _proof(found: dict[str, Any]) -> str:
    return "OPTIMAL" if found["status"] == "OPTIMAL" else f"not proven (gap {found['gap']:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="parts of the names of cases")
    parser.add_argument("--here", help="search one case in this process, and print what was found")
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(solved(next(case for case in CASES if case.name == asked.here))))
        return
    results = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    for case in CASES:
        if asked.only is None or any(part in case.name for part in asked.only):
            command = [sys.executable, "-m", "benchmarks.forbidden", "--here", case.name]
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
            results[case.name] = json.loads(told.splitlines()[-1])
            print(case.name, json.dumps(results[case.name], indent=1), flush=True)
            ordered = {c.name: results[c.name] for c in CASES if c.name in results}
            OUT.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
