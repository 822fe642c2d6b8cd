"""Published runs on GPUs: model, mesh, layout and options as their sources state them.

What a source does not say is taken as its software does by default, and the run is marked `assumed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import mesh_tf_core as mtf
from benchmarks.published_megatron import gpt
from benchmarks.published_models import language_model as published_model
from benchmarks.published_rows import CUSTOM, PIPELINED, Run, lowered, read
from mesh_tf_core.ir.instructions import GRADIENT
from mesh_tf_core.ir.program import Collective

MEGATRON_2022 = "megatron:kernels=2022"
COMPILED, LAUNCHED = "GPUs, few large kernels", "GPUs, kernels launched from Python"
MEGATRON = "batch:data;heads:model;d_ff:model;vocab:model;layers:pipe"
VOCAB_GPT = 51200
VOCAB_VTRAIN = 50257
"""Not padded: vTrain divides it by the ways of tensor parallelism and drops the rest
(VIA-Research/vTrain src/config.py, src/model/gpt_modeling.py @f8dda84)."""
SIZES = ("layers", "d_model", "heads", "vocab", "length", "batch")
"""Arguments of `published_megatron.gpt`."""
PRAXIS: dict[str, Any] = {"one_hot": True, "biases": True, "activation": "gelu"}
"""GPT of Paxml: `EMBEDDING_LOOKUP_STYLE` matmul, `USE_BIAS`, GELU (google/paxml paxml/tasks/lm/params/c4.py,
`TransformerLmSpmdAdam`; paxml/contrib/gpu/scripts_gpu/configs.py @04516ac, `GPT126M`)."""
COMMON = ("dgxc_benchmarking_h100", "jax_toolbox_pax", "torchtitan")
LEFT_OUT = {"published/jax_toolbox_t5x.csv": "T5: encoder and decoder of different lengths"}
VTRAIN = ("vtrain_a100_h1024.csv", "published/vtrain_a100_h2048.csv", "published/vtrain_a100_multi.csv")


def common() -> Iterator[Run]:
    """Tables in one set of columns: MaxText, Paxml, NeMo, torchtitan; bfloat16 runs of dense decoders."""
    for table in COMMON:
        for row in read(f"published/{table}.csv"):
            if row["dtype"] == "bfloat16" and row["family"] == "dense" and row["outcome"] == "ran":
                yield common_run(table, row)


def common_run(table: str, row: Mapping[str, str]) -> Run:
    """A row of these columns, priced in bfloat16.

    torchtitan adds gradients up in float32 (`mixed_precision_reduce`), gathers by FSDP2, and compiles where a
    row says so
    (`compile = false` in train_configs/llama2_13b.toml, llama3_8b.toml and llama3_405b.toml).
    """
    ways = {name: int(row[name] or 1) for name in ("dp", "fsdp", "cp", "tp", "pp")}
    data, batch = ways["dp"] * ways["fsdp"], int(row["global_batch"])
    split, stage, over = stored_over(table, row, ways)
    split |= {"context": ways["cp"], "model": ways["tp"]}
    named = recomputation(row)
    keep = kept(named, row)
    torch = row["framework"].startswith("torchtitan")
    sizes = {
        "layers": int(row["layers"]),
        "d_model": int(row["d_model"]),
        "d_kv": int(row["d_head"]),
        "heads": int(row["heads"]),
        "kv_heads": 0 if row["kv_heads"] == row["heads"] else int(row["kv_heads"]),
        "d_ff": int(row["d_ff"]),
        "gated": row["gated"] == "1",
        "vocab": int(row["vocab"]),
        "tied": row["tied"] == "1",
        "batch": batch,
        "length": int(row["seq"]),
        "dtype": "bfloat16",
        "attention": "fused" if fused(row) else "plain",
        "float32_softmax": written_out_by_praxis(row),
        "rotary": row["positions"].startswith("rotary"),
        **(PRAXIS if row["framework"].startswith("Paxml") and row["model"].startswith("gpt") else {}),
    }
    rules = f"batch:{over};length:context;memory_length:context;heads:model;d_ff:model;vocab:model"
    if ways["tp"] > 1:
        sizes["rows"] = "rows"
        rules += ";rows:context+model" if ways["cp"] > 1 else ";rows:model"
    parts = batch // (int(row["micro_batch"]) * data) if row["micro_batch"] else 1

    def program() -> mtf.Program:
        mesh, layout = mesh_and_layout(split, rules)
        again, stays = named != "none" and keep is not None, keep or ""
        found = lowered(
            published_model, sizes, mesh, layout, stage=stage, recompute=again, keep=stays, microbatches=parts
        )
        return summed_in_float32(found) if torch else found

    return Run(
        f"published/{table}.csv",
        row["case"],
        row["model"],
        "",
        float(row["step_s"]),
        program,
        machine(row["gpu"]),
        COMPILED,
        PIPELINED if ways["pp"] > 1 else CUSTOM if keep is None else "",
        assumed="" in (row["recompute"], row["attention"]),
        keeps=keep or "",
        compiled=not torch or "torch.compile" in row["framework"],
        buffers=torch,
        gib=float(row["memory_gib"]) if row["memory_gib"] else None,
    )


def stored_over(
    table: str, row: Mapping[str, str], ways: Mapping[str, int]
) -> tuple[dict[str, int], int | str, str]:
    """The data-parallel axes of a row, how its variables are stored, and the axes that split the batch.

    Where variables are split over a part of the devices and repeated on the others (hybrid sharding), the
    repeated ones lie apart.
    """
    stage = int(row["zero"] or 1) if table != "dgxc_benchmarking_h100" or row["zero"] != "0" else 1
    if stage == 3 and min(ways["dp"], ways["fsdp"]) > 1:
        return {"replica": ways["dp"], "data": ways["fsdp"]}, "zero3@data", "replica+data"
    return {"data": ways["dp"] * ways["fsdp"]}, stage, "data"


def summed_in_float32(program: mtf.Program) -> mtf.Program:
    """With gradients that are converted before they are summed over devices, not after."""
    found = (x for x, _ in program.walk() if isinstance(x, Collective) and x.rule == GRADIENT)
    wide = {i for x in found for i in (*x.inputs, *x.outputs)}
    values = (replace(v, dtype="float32") if v.id in wide else v for v in program.values)
    return replace(program, values=tuple(values))


def recomputation(row: Mapping[str, str]) -> str:
    """'none', 'full', or a policy. Where it is not stated: none, but for GPT-3 175B of Paxml, whose
    activations would not fit (praxis saves nothing by default)."""
    if not row["recompute"]:
        return "full" if row["model"] == "gpt-175b" else "none"
    return row["recompute"]


POLICIES = {
    "SAVE_DOT": "products",
    "minimal_flash": "products+attention",
    "save_qkv_proj": "q+k+v",
    "custom: attention and mlpwo products": "q+k+v+o",
    "selective (every other layer)": None,
    "selective": "q+v+wi+attention",
}
"""How a policy of recomputation begins -> what it keeps of a layer (None cannot be said).

torchtitan's saves attention and every second product of those that a layer makes, in this order: q, k, v, o,
w1 (activated, `wi`), w3, w2 (torchtitan/parallelisms/parallelize_llama.py, `_get_custom_policy` @4d88a8a44);
the reduce-scatters of tensor parallelism too. MaxText's "custom" keeps the products of these names on the
device, and not what its attention kernel hands to backward."""


def kept(named: str, row: Mapping[str, str]) -> str | None:
    """What a layer keeps that runs again; '' if nothing."""
    if named in ("none", "full"):
        return ""
    keep = next(keep for begins, keep in POLICIES.items() if named.startswith(begins))
    return f"{keep}+outputs" if keep and named.startswith("selective") and int(row["tp"] or 1) > 1 else keep


def fused(row: Mapping[str, str]) -> bool:
    """Whether attention is one kernel. Where it is not stated: with TransformerEngine and heads of 128."""
    if row["attention"]:
        return row["attention"].startswith("flash")
    return "TransformerEngine" in row["framework"] and row["d_head"] == "128"


def written_out_by_praxis(row: Mapping[str, str]) -> bool:
    """Whether attention is written out by praxis, whose logits are float32 from the mask to the softmax
    (google/praxis praxis/layers/attentions.py @feeaff1, `_dot_atten`); TransformerEngine's are not."""
    return row["framework"].startswith("Paxml") and "Transformer" not in row["framework"] and not fused(row)


def machine(gpu: str) -> str:
    """The preset of a GPU as published; torchtitan's H100s are slower ones."""
    if "HBM2e" in gpu:
        return "h100-hbm2e"
    return gpu.partition("_")[0].lower()


def mesh_and_layout(split: Mapping[str, int], rules: str) -> tuple[str, str]:
    """Axes of more than one device, and the rules that name only them."""
    axes = {name: n for name, n in split.items() if n > 1} or {"data": 1}
    kept = []
    for rule in rules.split(";"):
        _, _, over = rule.partition(":")
        if all(axes.get(axis, 1) > 1 for axis in over.split("+")):
            kept.append(rule)
    return ";".join(f"{name}:{n}" for name, n in axes.items()), ";".join(kept)


def megatron_program(
    sizes: dict[str, Any], data: int, tensor: int, parts: int, stages: int = 1
) -> mtf.Program:
    """Tensor, data and pipeline parallel, every layer computed again."""
    mesh, layout = mesh_and_layout({"pipe": stages, "data": data, "model": tensor}, MEGATRON)
    return lowered(gpt, sizes, mesh, layout, recompute=True, microbatches=parts)


def vtrain() -> Iterator[Run]:
    """Megatron-DeepSpeed on A100, activations checkpointed per layer, gradients summed after backward
    (`use_gradient_bucket` false in config/validation); several nodes with 100 GB/s each."""
    for table in VTRAIN:
        for row in read(table):
            hidden, heads, layers, length, batch, micro, tensor, data, stages, gpus = (
                int(row[n])
                for n in (
                    "hidden size",
                    "attention heads",
                    "n_layers",
                    "sequence length",
                    "global batch",
                    "micro batch",
                    "tensor parallelism",
                    "data parallelism",
                    "pipeline parallelism",
                    "n_gpus",
                )
            )
            vocab = VOCAB_VTRAIN // tensor * tensor
            sizes = dict(zip(SIZES, (layers, hidden, heads, vocab, length, batch), strict=True))
            parts = batch // (micro * data)

            def program(
                sizes: Any = sizes, how: tuple[int, ...] = (data, tensor, parts, stages)
            ) -> mtf.Program:
                return megatron_program(sizes, *how)

            workload = f"{hidden}x{layers}, {gpus} GPUs, batch {batch}"
            several = f", {stages} stages" if stages > 1 else ""
            yield Run(
                table,
                f"{workload}: tensor {tensor}, data {data}, micro batch {micro}{several}",
                f"GPT {hidden}x{layers}",
                workload,
                float(row["iteration time (ms)"]) / 1e3,
                program,
                "a100, node_egress=100GB/s" if gpus > 8 else "a100",
                LAUNCHED,
                PIPELINED if stages > 1 else "",
                framework=MEGATRON_2022,
            )


def oneflow() -> Iterator[Run]:
    """OneFlow and Megatron-LM on V100, four nodes of eight; Megatron's times are the ones compared.

    A node has one network card of 100 Gb/s for all of its GPUs, not four (Oneflow-Inc/DLPerf, test
    environment).
    """
    heads = {768: 12, 1536: 16, 2304: 24, 3072: 32}
    for row in read("oneflow_megatron_v100.csv"):
        hidden, layers, batch, gpus = (int(row[n]) for n in ("hidden", "layers", "global_batch", "gpus"))
        sizes = dict(zip(SIZES, (layers, hidden, heads[hidden], VOCAB_GPT, 2048, batch), strict=True))

        def program(
            sizes: Any = sizes, how: tuple[int, int] = (int(row["dp"]), int(row["tp"]))
        ) -> mtf.Program:
            return megatron_program(sizes, *how, 1)

        workload = f"{hidden}x{layers}, {gpus} GPUs, batch {batch}"
        yield Run(
            "oneflow_megatron_v100.csv",
            f"{workload}: tensor {row['tp']}, data {row['dp']}",
            f"GPT {hidden}x{layers}",
            workload,
            batch / float(row["megatron_seq_s"]),
            program,
            "v100, node_egress=12.5GB/s",
            LAUNCHED,
            "" if row["pp"] == "1" else PIPELINED,
            framework=MEGATRON_2022,
        )


def megatron() -> Iterator[Run]:
    """The models of Korthikanti et al. 2022 on A100, all layers computed again."""
    for row in read("megatron_recompute_a100.csv"):
        hidden, heads, layers, batch = (int(row[n]) for n in ("hidden", "heads", "layers", "batch"))
        sizes = dict(zip(SIZES, (layers, hidden, heads, VOCAB_GPT, int(row["seq"]), batch), strict=True))

        def program(sizes: Any = sizes) -> mtf.Program:
            return megatron_program(sizes, 1, 8, 1)

        yield Run(
            "megatron_recompute_a100.csv",
            f"{row['model']}, all recomputed",
            row["model"],
            "",
            float(row["time_full_s"]),
            program,
            "a100",
            LAUNCHED,
            "" if row["pp"] == "1" else PIPELINED,
            framework=MEGATRON_2022,
        )
