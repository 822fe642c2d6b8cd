"""Published runs as questions to `layoutopt.cost`: model, mesh, layout and options as each source states.

Sources and units: the comments of each table in `benchmarks/data/published`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mesh_tf_core as mtf
from examples import bert, moe_lm, transformer_lm

DATA = Path(__file__).parent / "data"
EXAMPLES = {"dense": transformer_lm, "encoder": bert, "moe": moe_lm}
PRESETS = {
    "h100_80gb": "h100",
    "a100_80gb": "a100",
    "a800_80gb": "a100",
    "v100_32gb": "v100",
    "a100_40gb": "a100-40",
}
SOFTWARE = {
    "MaxText": "maxtext",
    "Paxml": "jax",
    "T5X": "jax",
    "torchtitan": "torchtitan",
    "torch.compile": "torch-compile",
    "NeMo": "megatron",
    "Megatron": "megatron",
    "DeepSpeed": "deepspeed",
    "InternEvo": "megatron",
    "LiBai": "megatron",
    "nanotron": "torch",
    "PyTorch": "torch",
}
"""Words in the name of the software that ran a row -> the framework that it is priced under; the first that
is found counts. InternEvo and LiBai have Megatron's parallelism and kernels; nanotron, FSDP and YaFSDP are
eager PyTorch. What torchtitan did not compile is eager PyTorch (`framework_of`)."""
EVERY = {"vtrain_a100_h2048": 16, "vtrain_a100_multi": 3}
"""Tables of a few numbers many times over (`benchmarks.published_layers`), of which one row in so many is
priced."""
VTRAIN = "iteration time (ms)"
LATENT = "latent attention"


@dataclass(frozen=True)
class Row:
    """A published run as a question to `layoutopt.cost`.

    Attributes:
      framework: that it is priced under, with variants; `software`: as published.
      ways: what is compared: (part, recompute) with parts that add up to 1; the mean is the prediction.
      differs: how the question differs from the run.
      ran: it did not run out of memory.
      seconds: published, of a step; None where a source has none.
      gib: published, of the fullest device; None where a source has none.
    """

    table: str
    name: str
    model: str
    framework: str
    software: str
    family: str
    sizes: dict[str, Any] = field(repr=False)
    mesh: str
    layout: str
    hardware: str
    decided: dict[str, Any]
    ways: tuple[tuple[float, tuple[str, ...]], ...]
    differs: tuple[str, ...]
    ran: bool
    seconds: float | None
    gib: float | None
    attention: str = ""
    published: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def stages(self) -> bool:
        return "layers:" in self.layout


class CannotError(Exception):
    """Why a row is no question."""


UNTIMED = re.compile("golden|moe_layer")
"""Tables whose times say nothing (tests of a few steps), or are of no step."""


def tables() -> list[str]:
    """The tables of steps."""
    names = sorted(path.stem for path in (DATA / "published").glob("*.csv"))
    return [name for name in names if not UNTIMED.search(name)]


def read(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8-sig") as f:
        yield from csv.DictReader(line for line in f if not line.startswith("#"))


def rows(table: str) -> Iterator[Row]:
    """The rows of a table that are questions."""
    for row in [*read(DATA / "published" / f"{table}.csv")][:: EVERY.get(table, 1)]:
        try:
            yield _row(table, vtrain(row) if VTRAIN in row else row)
        except CannotError:
            continue


def vtrain(row: Mapping[str, str]) -> dict[str, str]:
    """A row of vTrain's columns in the common ones."""
    width, heads = int(row["hidden size"]), int(row["attention heads"])
    tp, dp, pp = (row[f"{k} parallelism"] for k in ("tensor", "data", "pipeline"))
    of = f"{width}x{row['n_layers']}"
    found = {
        "case": f"{of} x{row['n_gpus']} b{row['global batch']}: tp{tp} dp{dp} pp{pp} mb{row['micro batch']}",
        "model": f"gpt {of}",
        "family": "dense",
        "layers": row["n_layers"],
        "d_model": width,
        "heads": heads,
        "kv_heads": heads,
        "d_head": width // heads,
        "d_ff": 4 * width,
        "gated": 0,
        "vocab": 51200,
        "tied": 1,
        "positions": "learned",
        "seq": row["sequence length"],
        "gpu": "a100_80gb",
        "gpus": row["n_gpus"],
        "tp": tp,
        "pp": pp,
        "cp": 1,
        "dp": dp,
        "fsdp": 1,
        "zero": 0,
        "micro_batch": row["micro batch"],
        "global_batch": row["global batch"],
        "recompute": "full",
        "attention": "plain",
        "vpp": 1,
        "ep": 1,
        "framework": "Megatron-DeepSpeed (PyTorch)",
        "dtype": "float16",
        "outcome": "ran",
        "memory_gib": "",
        "step_s": float(row[VTRAIN]) / 1e3,
        "sequence_parallel": 0,
        "note": "",
        "node_gbps": 100 if int(row["n_gpus"]) > 8 else "",
    }
    return {k: str(v) for k, v in found.items()}


VARIANTS = (
    ("torch", "attention", "flash_attentionv1", "attention=flash1"),
    ("torch", "attention", "RMS kernel", "kernels=fused"),
    ("torchtitan", "framework", "async TP", "tensor_messages=async"),
)
"""Framework, column of a row, words in it, and the variant that they name."""


def framework_of(row: Mapping[str, str]) -> str:
    """The framework that stands for the software of a row, with the variants that the row names."""
    software = row["framework"]
    found = next((name for word, name in SOFTWARE.items() if word in software), "torch")
    if found == "torchtitan" and "compile" not in software:
        found = "torch"
    chosen = [option for of, column, word, option in VARIANTS if of == found and word in row[column]]
    return f"{found}:{','.join(chosen)}" if chosen else found


def _number(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = str(row.get(name) or "").strip()
    if not text:
        if default is None:
            raise CannotError(f"{name} is not stated")
        return default
    return int(float(text))


def _row(table: str, row: Mapping[str, str]) -> Row:
    if row["dtype"] not in ("bfloat16", "float16") or row["family"] not in EXAMPLES:
        raise CannotError("type or family")
    gpu = row["gpu"]
    hardware = PRESETS.get(gpu) or ("h100-hbm2e" if "HBM2e" in gpu else gpu)
    if not (gpu.startswith("tpu") or hardware != gpu):
        raise CannotError(f"no preset for {gpu}")
    tp, pp, cp, vpp = (_number(row, n, 1) for n in ("tp", "pp", "cp", "vpp"))
    gpus, batch, micro = (_number(row, n) for n in ("gpus", "global_batch", "micro_batch"))
    data, ep = gpus // (tp * pp * cp), _number(row, "ep", 1)
    if data < 1 or data * tp * pp * cp != gpus or batch % (data * micro):
        raise CannotError("ways do not divide")
    heads, kv, ff = (_number(row, n) for n in ("heads", "kv_heads", "d_ff"))
    if heads % tp or kv % tp or ff % tp:
        raise CannotError("tensor ways do not divide heads")
    layers = _number(row, "layers")
    zero = str(row["zero"]).strip() or "1"
    stage, _, inside = zero.partition("@")
    split, over = _data_axes(row, data, ep, stage, int(inside or 0))
    rules = {"layers": (pp, "pipe"), "batch": (data, over), "length": (cp, "context")}
    rules |= {"memory_length": (cp, "context"), "heads": (tp, "model"), "d_ff": (tp, "model")}
    rules |= {"vocab": (tp, "model")}
    if tp > 1 and row["sequence_parallel"] == "1":
        rules["length@elsewhere"] = (tp, "model")
    if row["family"] == "moe":
        rules["experts"] = (ep, "data")
        rules |= {"expert_batch": (split.get("replica", 1), "replica"), "expert_length": (cp, "context")}
        if "length@elsewhere" in rules:
            rules["expert_length@elsewhere"] = rules["length@elsewhere"]
    decided: dict[str, Any] = {}
    if int(stage) and data * cp > 1:
        decided["storage"] = (
            f"zero{stage}@data" if "replica" in split and row["family"] != "moe" else f"zero{stage}"
        )
    if cp > 1:
        decided["context"] = row.get("cp_form") or "zigzag"
    if pp > 1:
        decided["schedule"] = row.get("schedule") or ("1f1b" if vpp == 1 else f"interleaved:{vpp}")
    if batch // (data * micro) > 1:
        decided["microbatches"] = batch // (data * micro)
    ways, differs = _recomputed(row, layers)
    axes = {"pipe": pp, **split, "context": cp, "model": tp}
    if row.get("node_gbps"):
        hardware += f", node_egress={row['node_gbps']}GB/s"
    return Row(
        table,
        row["case"],
        row["model"],
        framework_of(row),
        row["framework"],
        row["family"],
        _sizes(row, tp),
        ";".join(f"{a}:{n}" for a, n in axes.items() if n > 1) or "data:1",
        ";".join(f"{d}:{a}" for d, (n, a) in rules.items() if n > 1),
        hardware,
        decided,
        ways,
        differs,
        row["outcome"] == "ran",
        float(row["step_s"]) if row.get("step_s") else None,
        float(row["memory_gib"]) if row.get("memory_gib") else None,
        row.get("attention", ""),
        row,
    )


def _data_axes(
    row: Mapping[str, str], data: int, ep: int, stage: str, inside: int
) -> tuple[dict[str, int], str]:
    """The axes that split the batch: hybrid sharding and experts need a part of the devices as an axis."""
    whole, part = _number(row, "dp", 1), _number(row, "fsdp", 1)
    if stage == "3" and min(whole, part) > 1:
        return {"replica": whole, "data": part}, "replica+data"
    if row["family"] == "moe" and ep < data:
        return {"replica": data // ep, "data": ep}, "replica+data"
    if inside and data > inside:
        return {"replica": data // inside, "data": inside}, "replica+data"
    return {"data": data}, "data"


def _recomputed(
    row: Mapping[str, str], layers: int
) -> tuple[tuple[tuple[float, tuple[str, ...]], ...], tuple[str, ...]]:
    """The parts of a step that recompute, each with what; and how that differs from the run."""
    said, plain = row["recompute"].strip(), row["attention"].startswith("plain")
    if said == "none":
        return ((1.0, ()),), ()
    if said == "full":
        return ((1.0, ("layers",)),), ()
    if said.startswith("layersfrac:"):
        some, every = map(int, said.split(":")[1].split("/"))
        return ((1 - some / every, ()), (some / every, ("layers",))), ()
    keeps = (
        ("SAVE_DOT", "products"),
        ("minimal_flash", "products+attention"),
        ("minimal", "products"),
        ("save_qkv_proj", "q+k+v"),
        ("custom: attention and mlpwo", "q+k+v+o"),
        ("selective (per op)", "q+v+wi+attention"),
        ("selective (default: per op)", "q+v+wi+attention"),
    )
    for word, keep in keeps:
        if said.startswith(word):
            return ((1.0, (f"layers:keep={keep}",)),), ()
    if said == "selective" and plain and "PyTorch" in row["framework"]:
        return ((1.0, ("layers:keep=products+others",)),), ()
    if said.startswith("selective (every other"):
        return ((0.5, ()), (0.5, ("layers",))), ()
    if said.startswith("selective"):
        return ((0.5, ()), (0.5, ("layers",))), ("part of the layers, not stated: mean of none and all",)
    if not said:
        return ((1.0, ("layers",) if row["model"] == "gpt-175b" else ()),), ("recomputation not stated",)
    raise CannotError(f"recompute {said}")


def _written_out(row: Mapping[str, str]) -> bool:
    """Whether attention that is not stated is written out: by praxis, but with TransformerEngine and heads of
    128 (google/praxis praxis/layers/attentions.py @feeaff1)."""
    fused = "TransformerEngine" in row["framework"] and row["d_head"] == "128"
    return not row["attention"] and row["framework"].startswith("Paxml") and not fused


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
    if row["attention"].startswith("plain") or _written_out(row):
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
        experts = re.search(r"experts (\d+), chosen (\d+)", row["note"])
        if experts is None:
            raise CannotError("experts are not stated")
        found |= {"experts": int(experts[1]), "chosen": int(experts[2])}
    elif row["gated"] == "1":
        found["norm"] = "rms"
    return found


def built(row: Row) -> mtf.Model:
    """The model of a row."""
    return _model(row.family, tuple(row.sizes.items()))


@cache
def _model(family: str, sizes: tuple[tuple[str, Any], ...]) -> mtf.Model:
    return EXAMPLES[family].model(**dict(sizes))
