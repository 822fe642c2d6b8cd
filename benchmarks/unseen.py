"""Predictions against published runs that had no part in any constant: `python -m benchmarks.unseen`.

Every row of `benchmarks/data/unseen/*.csv` is priced by `layoutopt.cost` on a preset as it ships, with the
model of an example. Sources and units: the comments of each table. A row that is not exactly its run says how
it differs. Results: `benchmarks/results/unseen.json`.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import layoutopt
import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.lines import Cost
from examples import bert, moe_lm, transformer_lm
from mesh_tf_core.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data" / "unseen"
OUT = ROOT / "benchmarks" / "results" / "unseen.json"
NANOTRON = "nanotron_llama1b_h100"
REVISED = ("dgxc_pipelines_h100", "maxtext_multislice_tpu", NANOTRON)
"""Tables that were read when rules were made (schedules of pipelines, which axes lie over slices, memory as
nanotron holds it); no number was fitted to them."""
EXAMPLES = {"dense": transformer_lm, "encoder": bert, "moe": moe_lm}
PRESETS = {"h100_80gb": "h100", "a100_80gb": "a100", "v100_32gb": "v100"}
EAGER = ("PyTorch, eager", "Megatron-LM (PyTorch)", "nanotron", "NeMo")
"""Frameworks that launch kernels one by one."""
POLICIES = {"none": [""], "full": ["layers"], "minimal": ["layers:keep=products"]}
ATTENTION = ["layers:keep=products+others"]
"""Megatron's selective recomputation, of attention alone (Korthikanti et al. 2022)."""


@dataclass(frozen=True)
class Row:
    """A published run as a question to `layoutopt.cost`.

    Attributes:
      recomputes: the values of `--recompute`; the mean of the predictions is compared.
      differs: how the question differs from the run.
      ran: it did not run out of memory.
      seconds: published, of a step; None where a source has none.
      gib: published, of the fullest device; None where a source has none.
    """

    table: str
    name: str
    family: str
    sizes: dict[str, Any] = field(repr=False)
    mesh: str
    layout: str
    hardware: str
    decided: dict[str, Any]
    recomputes: list[str]
    differs: list[str]
    ran: bool
    seconds: float | None
    gib: float | None


def rows(table: str) -> Iterator[Row]:
    """The rows of a table."""
    with (DATA / f"{table}.csv").open(encoding="utf-8") as f:
        for row in csv.DictReader(line for line in f if not line.startswith("#")):
            yield _row(table, row)


def _row(table: str, row: Mapping[str, str]) -> Row:
    tp, pp, cp, vpp = (int(row[n] or 1) for n in ("tp", "pp", "cp", "vpp"))
    data, differs = int(row["gpus"]) // (tp * pp * cp), list[str]()
    batch, ep = int(row["global_batch"]), int(row["ep"] or 1)
    stage = int(row["zero"] or 0)
    split, over = _data_axes(row, data, ep, stage)
    rules = {"layers": (pp, "pipe"), "batch": (data, over), "length": (cp, "context")}
    rules |= {"memory_length": (cp, "context"), "heads": (tp, "model"), "d_ff": (tp, "model")}
    rules |= {"vocab": (tp, "model")}
    if tp > 1 and row["sequence_parallel"] == "1":
        rules["length@elsewhere"] = (tp, "model")
    if row["family"] == "moe":
        rules["experts"] = (ep, "data")
        wide = {"replica": split.get("replica", 1), "context": cp}
        rules["expert_batch"] = (max(wide.values()), "+".join(a for a, n in wide.items() if n > 1))
    decided: dict[str, Any] = {}
    if stage and data > 1:
        hybrid = stage == 3 and "replica" in split
        decided["storage"] = f"zero{stage}@data" if hybrid else f"zero{stage}"
    if cp > 1:
        decided["context"] = "zigzag"
    if pp > 1:
        decided["schedule"] = "1f1b" if vpp == 1 else f"interleaved:{vpp}"
    parts = batch // (data * int(row["micro_batch"]))
    if parts > 1:
        decided["microbatches"] = parts
    eager = any(name in row["framework"] for name in EAGER)
    if not row["gpu"].startswith("tpu") and eager:
        differs.append("kernels launched by PyTorch, priced as the preset launches them")
    recomputes = POLICIES.get(row["recompute"])
    if recomputes is None and row["attention"].startswith("plain"):
        recomputes = ATTENTION
    if recomputes is None:
        recomputes = ["", "layers"]
        differs.append("some layers recomputed, a share that is not stated: mean of none and all")
    axes = {"pipe": pp, **split, "context": cp, "model": tp}
    return Row(
        table,
        row["case"],
        row["family"],
        _sizes(row, tp),
        ";".join(f"{a}:{n}" for a, n in axes.items() if n > 1) or "data:1",
        ";".join(f"{d}:{a}" for d, (n, a) in rules.items() if n > 1),
        PRESETS.get(row["gpu"], row["gpu"]),
        decided,
        recomputes,
        differs,
        row["outcome"] == "ran",
        float(row["step_s"]) if row["step_s"] else None,
        float(row["memory_gib"]) if row["memory_gib"] else None,
    )


def _data_axes(row: Mapping[str, str], data: int, ep: int, stage: int) -> tuple[dict[str, int], str]:
    """The axes that split the batch: hybrid sharding and experts need a part of the devices as an axis."""
    whole, part = int(row["dp"] or 1), int(row["fsdp"] or 1)
    if stage == 3 and min(whole, part) > 1:
        return {"replica": whole, "data": part}, "replica+data"
    if row["family"] == "moe" and ep < data:
        return {"replica": data // ep, "data": ep}, "replica+data"
    return {"data": data}, "data"


def _sizes(row: Mapping[str, str], tp: int) -> dict[str, Any]:
    vocab = int(row["vocab"])
    found: dict[str, Any] = {
        "layers": int(row["layers"]),
        "d_model": int(row["d_model"]),
        "d_kv": int(row["d_head"]),
        "heads": int(row["heads"]),
        "d_ff": int(row["d_ff"]),
        "vocab": vocab if vocab % tp == 0 else -(-vocab // (128 * tp)) * 128 * tp,
        "batch": int(row["global_batch"]),
        "length": int(row["seq"]),
        "dtype": row["dtype"],
        "optimizer": "adam",
    }
    if row["attention"].startswith("plain"):
        found["attention"] = "plain"
    if row["family"] == "encoder":
        return found
    found["positions"] = row["positions"].split()[0]
    if row["kv_heads"] != row["heads"]:
        found["kv_heads"] = int(row["kv_heads"])
    if row["tied"] == "1":
        found["tied"] = True
    if row["gated"] == "1":
        found["gated"] = True
    if row["family"] == "moe":
        experts = re.search(r"experts (\d+), chosen (\d+), capacity factor ([\d.]+)", row["note"])
        assert experts is not None, row["case"]
        found |= {"experts": int(experts[1]), "chosen": int(experts[2]), "capacity_factor": float(experts[3])}
    elif row["gated"] == "1":
        found["norm"] = "rms"
    return found


@cache
def _model(family: str, sizes: tuple[tuple[str, Any], ...]) -> mtf.Model:
    return EXAMPLES[family].model(**dict(sizes))


def priced(row: Row) -> dict[str, Any]:
    """A row with its prediction, or with why it cannot be priced."""
    found = asdict(row)
    try:
        built = _model(row.family, tuple(row.sizes.items()))
        answers = [
            layoutopt.cost(
                built,
                row.mesh,
                row.layout,
                row.hardware,
                **row.decided,
                **({"recompute": [again]} if again else {}),
            )
            for again in row.recomputes
        ]
    except UserError as error:
        return {**found, "why_not": str(error)}
    predicted = [a.evaluation.predicted for a in answers]
    exact = len(answers) == 1
    if row.decided.get("schedule"):
        found["seconds_by_kind"] = by_kind(answers[0].evaluation.cost)
    if row.table == NANOTRON:
        eager = replace(load_hardware(row.hardware), compiler="eager")
        sizes = row.sizes | {"layers": _layers_of_first_stage(row)}
        answer = layoutopt.cost(
            _model(row.family, tuple(sizes.items())), row.mesh, row.layout, eager, **row.decided
        )
        peak = answer.evaluation.predicted.peak_memory_bytes
        found["held"] = {"gib": peak / 2**30, "fits": answer.evaluation.known.fits(peak, answer.limit)}
    return {
        **found,
        "predicted_seconds": fmean(p.step_seconds for p in predicted),
        "predicted_gib": predicted[0].peak_memory_bytes / 2**30 if exact else None,
        "fits": predicted[0].peak_memory_bytes <= answers[0].limit if exact else None,
    }


def _layers_of_first_stage(row: Row) -> int:
    """The layers of a model in which every stage has as many as nanotron's first one, whose memory is logged:
    that takes blocks until their cost passes its share; a layer costs its weights, the head its own, the
    embedding nothing (huggingface/nanotron @f1adf520, `build_model` of src/nanotron/models/base.py and
    `get_block_compute_costs` of llama.py)."""
    layers, width, inner, vocab = (int(row.sizes[n]) for n in ("layers", "d_model", "d_ff", "vocab"))
    stages = mtf.Mesh(row.mesh).size("pipe") if "pipe" in row.mesh else 1
    one = 4 * width * width + 3 * inner * width
    share = (layers * one + vocab * width) / stages
    return min(int(share // one) + 1, layers) * stages if stages > 1 else layers


def by_kind(cost: Cost) -> dict[str, float]:
    """Seconds that a step waits for: products and attention, messages by mesh axis, what loops write to
    stacks and add to sums, all other kernels."""
    found = defaultdict[str, float](float)
    for line in cost.lines:
        kind = "others"
        if line.is_communication:
            kind = "messages over " + "+".join(line.axes)
        elif line.kind in ("matmul", "attention"):
            kind = "products and attention"
        elif line.kind == "data":
            kind = "stacks and sums"
        found[kind] += line.exposed * line.times
    return dict(found)


def quality(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of rows: predicted over published, less 1."""
    timed = [r for r in found if r["seconds"] and "predicted_seconds" in r]
    errors = [r["predicted_seconds"] / r["seconds"] - 1 for r in timed]
    held = [r["predicted_gib"] / r["gib"] - 1 for r in found if r["gib"] and r.get("predicted_gib")]
    known = [r for r in found if r.get("fits") is not None]
    lost, ran = [r for r in known if not r["ran"]], [r for r in known if r["ran"]]
    return {
        "rows": len(found),
        "priced": sum("predicted_seconds" in r for r in found),
        "time": _of(errors),
        "memory": _of(held),
        "out_of_memory": len(lost),
        "out_of_memory_called_fitting": sum(r["fits"] for r in lost),
        "ran": len(ran),
        "ran_called_too_large": sum(not r["fits"] for r in ran),
    }


def as_held(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Memory of rows under the profile `eager`: errors, and how many rows that ran out of memory fit, plainly
    or barely."""
    lost = [r["held"]["fits"] for r in found if not r["ran"]]
    ran = [r["held"]["fits"] for r in found if r["ran"]]
    return {
        "memory": _of([r["held"]["gib"] / r["gib"] - 1 for r in found if r["gib"]]),
        "out_of_memory_called_fitting": lost.count("yes"),
        "out_of_memory_called_barely_fitting": lost.count("barely"),
        "ran_called_too_large": ran.count("no"),
    }


def _of(errors: list[float]) -> dict[str, Any] | None:
    if not errors:
        return None
    sizes = [abs(e) for e in errors]
    return {
        "rows": len(errors),
        "mean": fmean(sizes),
        "median": median(sizes),
        "signed_mean": fmean(errors),
        "worst": max(errors, key=abs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", help="only this table, printed and not stored")
    asked = parser.parse_args()
    names = [asked.table] if asked.table else sorted(path.stem for path in DATA.glob("*.csv"))
    tables = dict[str, Any]()
    for name in names:
        found = [priced(row) for row in rows(name)]
        for row in found:
            row.pop("sizes")
        tables[name] = {"looked_at": name in REVISED, **quality(found), "found": found}
        if name == NANOTRON:
            tables[name]["as_held"] = as_held(found)
        told = {k: v for k, v in tables[name].items() if k != "found"}
        print(name, json.dumps(told, indent=1), flush=True)
        why = defaultdict[str, int](int)
        for row in found:
            why[row.get("why_not", "")] += 1
        print({k: n for k, n in why.items() if k}, flush=True)
    if not asked.table:
        content = {"date": datetime.now(UTC).date().isoformat(), "tables": tables}
        OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
