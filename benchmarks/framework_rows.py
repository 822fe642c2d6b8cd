"""Published runs as questions to `layoutopt.cost`: model, mesh, layout and options as each source states.

Sources and units: the comments of each table in `benchmarks/data/published`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from benchmarks.framework_models import (
    BUILDERS,
    FLOAT8,
    CannotError,
    built,
    family_of,
    number,
    recomputed,
    sizes_of,
)

DATA = Path(__file__).parent / "data"
PRESETS = {
    "h100_80gb": "h100",
    "a100_80gb": "a100",
    "a800_80gb": "a100",
    "v100_32gb": "v100",
    "a100_40gb": "a100-40",
    "h800_80gb": "h100, node_bandwidth=164GB/s",  # NVLink of 400 for 900 GB/s
    "DGX-H100": "h100",
    "DGX-B200": "b200",
    "DGX-GB200": "gb200",
    "DGX-GB300": "gb300",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
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
EVERY = {"vtrain_a100_h1024": 16, "vtrain_a100_h2048": 16, "vtrain_a100_multi": 3}
"""Tables of a few numbers many times over (`benchmarks.published_layers`), of which one row in so many is
priced."""
LESS = "without the recipe's "
"""How a run differs whose recipe holds less, by what no layout asks: it moves values of some of its layers to
the host, or recomputes norms and activations."""
EGRESS = {("fms_fsdp_llama2", "a100_80gb"): "50", ("fms_fsdp_llama2", "h100_80gb"): "100"}
"""Tables whose source states the network of a node once, for all rows of a chip -> GB/s."""
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

    def model_built(self) -> mtf.Model:
        """Its model; rows of equal sizes share one."""
        return built(self.family, tuple(self.sizes.items()))


NO_STEPS, UNTIMED = "moe_layer", "golden"
"""Words in the names of tables that are of no step, or whose times say nothing: tests of a few steps, whose
small peaks are mostly workspaces."""
SMALL = 8.0  # GiB
UNKNOWN, SHORT = "flash (Triton)", 2048
"""A kernel of attention whose rate on its chip is not known; the length up to which it takes little time."""


def tables() -> list[str]:
    """The tables of steps."""
    names = sorted(path.stem for path in (DATA / "published").glob("*.csv"))
    return [name for name in names if NO_STEPS not in name]


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
    ("torch", "attention", "flash_attentionv1", "attention=fa1"),
    ("torch", "attention", "RMS kernel", "kernels=norms"),
    ("torchtitan", "framework", "async TP", "tensor_messages=async"),
    ("torchtitan", "source", "202412", "loss=torch"),
    ("megatron", "framework", "Megatron-DeepSpeed", "kernels=2022"),
    ("megatron", "framework", "InternEvo", "optimizer=flat"),
    ("megatron", "framework", "InternEvo", "gradients=bfloat16"),
    ("megatron", "framework", "Megatron-Bridge", "gradients=bfloat16"),
    ("megatron", "optimizer_states", "grads bfloat16", "gradients=bfloat16"),
    ("megatron", "dtype", "^float16", "gradients=bfloat16"),
    ("torch", "framework", "nanotron", "gradients=buffer"),
    ("torch", "framework", "nanotron", "loss=in_place"),
    ("torch", "framework", "nanotron", "optimizer=fused"),
    ("torch", "framework", "nanotron", "kernels=norms"),
    ("torch", "extra_args", "tp_linear_async_communication", "tensor_messages=async"),
    ("megatron", "extra_args", "no tp_comm_overlap", "tensor_messages=plain"),
    ("deepspeed", "framework", "XTuner", "kernels=norms"),
    ("torch", "framework", "LLM Foundry", "loss=fused"),
    ("torch", "framework", "LLM Foundry", "optimizer=fused"),
    ("torch", "framework", "AA-Scaling", "gradients=bfloat16"),
    ("torch", "framework", "AA-Scaling", "checkpoint=whole"),
    ("megatron", "moe_comm_overlap", "1", "exchange=overlapped"),
    ("megatron", "dispatcher", "ep", "dispatcher=flex"),
)
"""Framework, column of a row, a pattern in it, and the variant that it names.

AA-Scaling has a kernel for RMSNorm, and none for SwiGLU and rotary positions (Aleph-Alpha/scaling @737f855,
src/scaling/core/nn/mlp.py, rotary.py). FSDP1, LLM Foundry's, adds scattered gradients up in the type of
parameters (pytorch/pytorch torch/distributed/fsdp/_runtime_utils.py, `_accumulate_sharded_grad`); the step of
its optimizer has temporaries of one variable (mosaicml/composer composer/optim/decoupled_weight_decay.py).
"""


def framework_of(row: Mapping[str, str]) -> str:
    """The framework that stands for the software of a row, with the variants that the row names."""
    software = row["framework"]
    found = next((name for word, name in SOFTWARE.items() if word in software), "torch")
    if found == "torchtitan" and "compile" not in software:
        found = "torch"
    named = (opt for of, col, word, opt in VARIANTS if of == found and re.search(word, row.get(col, "")))
    chosen = list(dict.fromkeys(named))
    if found == "torch" and not any(option.startswith("attention=") for option in chosen):
        chosen.append("attention=fa2")  # All were published before PyTorch 2.11.
    if "AA-Scaling" in software:
        chosen.append("loss=outputs" if row.get("tp", "1") == "1" else "loss=gathered")
    if found == "megatron" and row.get("gpu") == "DGX-B200" and row.get("cuda_graph") == "":
        chosen.append("launches=each")
    return f"{found}:{','.join(chosen)}" if chosen else found


def _row(table: str, row: Mapping[str, str]) -> Row:
    narrow = row["dtype"] == "float8" and row.get("precision") in FLOAT8
    if not (narrow or row["dtype"] in ("bfloat16", "float16")) or row["family"] not in BUILDERS:
        raise CannotError("type or family")
    if row.get("fp8") or row.get("mode", "pretrain") != "pretrain":
        raise CannotError("float8 in part, samples that are packed, or frozen weights")
    if "cards" in table and not re.search("performance|weak_scaling", row["case"]):
        raise CannotError("a check of correctness, which the source says is not tuned")
    timed = UNTIMED not in table
    if not timed and (float(row["memory_gib"]) < SMALL or row["cuda_graph"] or row["offload"]):
        raise CannotError("small, or of what cannot be asked")
    gpu = row["gpu"]
    hardware = PRESETS.get(gpu) or ("h100-hbm2e" if "HBM2e" in gpu else gpu)
    if not (gpu.startswith("tpu") or hardware != gpu):
        raise CannotError(f"no preset for {gpu}")
    tp, pp, cp, vpp = (number(row, n, 1) for n in ("tp", "pp", "cp", "vpp"))
    gpus, batch, micro = (number(row, n) for n in ("gpus", "global_batch", "micro_batch"))
    data, ep = gpus // (tp * pp * cp), number(row, "ep", 1)
    if data < 1 or data * tp * pp * cp != gpus or batch % (data * micro):
        raise CannotError("ways do not divide")
    heads, kv, ff = (number(row, n) for n in ("heads", "kv_heads", "d_ff"))
    if heads % tp or kv % tp or ff % tp:
        raise CannotError("tensor ways do not divide heads")
    layers = number(row, "layers")
    zero = str(row["zero"]).strip() or "1"
    stage, _, inside = zero.partition("@")
    # Megatron's ranks of whole experts are those of tensor parallelism first (order in parallel_state.py).
    both = tp if row.get("etp") == "1" and ep % tp == 0 else 1
    split, over = _data_axes(row, data, ep // both, stage, int(inside or 0))
    rules = {"layers": (pp, "pipe"), "batch": (data, over), "length": (cp, "context")}
    rules |= {"memory_length": (cp, "context"), "heads": (tp, "model"), "d_ff": (tp, "model")}
    rules |= {"vocab": (tp, "model")}
    # torchtitan splits the sequence wherever it splits weights (parallelize_llama.py, `apply_tp`).
    sequence = row["sequence_parallel"] or ("1" if row["framework"].startswith("torchtitan") else "")
    if tp > 1 and sequence == "1":
        rules["length@elsewhere"] = (tp, "model")
    if row["family"] == "moe":
        rules["experts"] = (ep, "data")
        rules |= {"expert_batch": (split.get("replica", 1), "replica"), "expert_length": (cp, "context")}
        if both > 1:
            rules |= {"d_ff": (1, ""), "experts": (ep, "data+model" if ep > both else "model")}
        elif row.get("etp") == "1" and tp > 1:  # the tensor ranks share the tokens instead
            rules |= {"d_ff": (1, ""), "expert_length": (tp, "model")}
        elif "length@elsewhere" in rules:
            rules["expert_length@elsewhere"] = rules["length@elsewhere"]
    decided: dict[str, Any] = {}
    if int(stage) and data * cp > 1:
        decided["storage"] = (
            f"zero{stage}@data" if "replica" in split and row["family"] != "moe" else f"zero{stage}"
        )
    if cp > 1:
        decided["context"] = row.get("cp_form") or "zigzag"
    if tp > 1 and "AA-Scaling" in row["framework"]:
        rules["vocab@crossentropy"] = (tp, "none")
        if "length@elsewhere" in rules:  # the norm before the head gathers
            rules["length@crossentropy"] = (tp, "none")
    if pp > 1:
        decided["schedule"] = row.get("schedule") or ("1f1b" if vpp == 1 else f"interleaved:{vpp}")
        if counts := _stage_layers(row, layers, pp):
            decided["schedule"] += ":layers=" + "+".join(map(str, counts))
    if batch // (data * micro) > 1:
        decided["microbatches"] = batch // (data * micro)
    ways, differs = recomputed(row, layers)
    if row.get("offload"):
        differs = (*differs, f"{LESS}offload: {row['offload']}")
    if row.get("recompute_modules") and not row["recompute"]:
        differs = (*differs, f"{LESS}recomputation: {row['recompute_modules']}")
    if row["attention"] == UNKNOWN:
        if int(row["seq"]) > SHORT:
            raise CannotError("the rate of the kernel of attention is not known")
        differs = (*differs, "the rate of the kernel of attention is not known: as FlashAttention 2")
    if pp > 1 and "nanotron" in row["framework"] and _head_before_loss(row, layers, pp):
        differs = (*differs, "the stage of the head sends the logits to that of the loss")
    axes = {"pipe": pp, **split, "context": cp, "model": tp}
    if egress := row.get("node_gbps") or EGRESS.get((table, gpu)):
        hardware += f", node_egress={egress}GB/s"
    if row.get("node_gpus"):
        hardware += f", node_size={row['node_gpus']}"
    return Row(
        table,
        row["case"],
        row["model"],
        framework_of(row),
        row["framework"],
        family_of(row),
        sizes_of(row, tp),
        ";".join(f"{a}:{n}" for a, n in axes.items() if n > 1) or "data:1",
        ";".join(f"{d}:{a}" for d, (n, a) in rules.items() if n > 1),
        hardware,
        decided,
        ways,
        differs,
        row["outcome"] == "ran",
        float(row["step_s"]) if row.get("step_s") and timed else None,
        float(row["memory_gib"]) if row.get("memory_gib") else None,
        row.get("attention", ""),
        row,
    )


def _stage_layers(row: Mapping[str, str], layers: int, stages: int) -> list[int]:
    """The layers of stages, where the software gives them unequal numbers.

    AA-Scaling divides embedding, layers, norm and head equally (Aleph-Alpha/scaling @737f855,
    src/scaling/core/nn/parallel_module/pipeline_partitioning.py). nanotron goes on to the next stage once its
    costs pass their share, those of a layer and the head their parameters (huggingface/nanotron @2411b022,
    src/nanotron/models/base.py, build_model; models/llama.py, get_block_compute_costs).
    """
    found = [0] * stages
    if "AA-Scaling" in row["framework"]:
        parts = np.array_split(np.arange(layers + 3), stages)
        return [int(((part > 0) & (part <= layers)).sum()) for part in parts]
    if "nanotron" not in row["framework"]:
        return []
    for stage in _nanotron_stages(row, layers, stages)[:layers]:
        found[stage] += 1
    return found


def _nanotron_stages(row: Mapping[str, str], layers: int, stages: int) -> list[int]:
    """The stages of nanotron's layers, head and loss."""
    width, inner = int(row["d_model"]), int(row["d_ff"])
    one, head, cost = 4 * width**2 + 3 * width * inner, width * int(row["vocab"]), 0
    found = [0]
    for each in [one] * layers + [head]:
        cost += each
        found.append(found[-1] + (cost * stages > (found[-1] + 1) * (layers * one + head)))
    return found


def _head_before_loss(row: Mapping[str, str], layers: int, stages: int) -> bool:
    *_, head, loss = _nanotron_stages(row, layers, stages)
    return head < loss


def _data_axes(
    row: Mapping[str, str], data: int, ep: int, stage: str, inside: int
) -> tuple[dict[str, int], str]:
    """The axes that split the batch: hybrid sharding and experts need a part of the devices as an axis."""
    whole, part = number(row, "dp", 1), number(row, "fsdp", 1)
    if stage == "3" and min(whole, part) > 1:
        return {"replica": whole, "data": part}, "replica+data"
    if row["family"] == "moe" and ep < data:
        return {"replica": data // ep, "data": ep}, "replica+data"
    if inside and data > inside:
        return {"replica": data // inside, "data": inside}, "replica+data"
    return {"data": data}, "data"
