"""Published runs on GPUs: model, mesh, layout and options as their sources state them.

What a source does not say is taken as its software does by default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mesh_tf_core as mtf
from benchmarks.published_megatron import gpt
from benchmarks.published_rows import Run, lowered, read
from mesh_tf_core.ir.schedules import GPIPE, ONE_F_ONE_B

MEGATRON_2022 = "megatron:kernels=2022"
LAUNCHED = "GPUs, kernels launched from Python"
MEGATRON = "batch:data;heads:model;d_ff:model;vocab:model;layers:pipe"
VOCAB_GPT = 51200
VOCAB_VTRAIN = 50257
"""Not padded: vTrain divides it by the ways of tensor parallelism and drops the rest
(VIA-Research/vTrain src/config.py, src/model/gpt_modeling.py @f8dda84)."""
SIZES = ("layers", "d_model", "heads", "vocab", "length", "batch")
"""Arguments of `published_megatron.gpt`."""
VTRAIN = (
    "published/vtrain_a100_h1024.csv",
    "published/vtrain_a100_h2048.csv",
    "published/vtrain_a100_multi.csv",
)


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
    """Tensor, data and pipeline parallel, every layer computed again; each stage is a program of its own."""
    mesh, layout = mesh_and_layout({"pipe": stages, "data": data, "model": tensor}, MEGATRON)
    schedule = ONE_F_ONE_B if stages > 1 else GPIPE
    how = {"recompute": True, "to_the_end": True, "microbatches": parts, "schedule": schedule}
    return lowered(gpt, sizes, mesh, layout, **how)


STAGED = 4
"""Of vTrain's runs with pipeline stages, one in so many is priced."""


def vtrain() -> Iterator[Run]:
    """Megatron-DeepSpeed on A100, activations checkpointed per layer, gradients summed after backward
    (`use_gradient_bucket` false in config/validation); several nodes with 100 GB/s each."""
    for table in VTRAIN:
        found = read(table)
        staged = [row for row in found if row["pipeline parallelism"] != "1"][::STAGED]
        for row in [row for row in found if row["pipeline parallelism"] == "1"] + staged:
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
                stages=stages,
                framework=MEGATRON_2022,
            )


def oneflow() -> Iterator[Run]:
    """OneFlow and Megatron-LM on V100, four nodes of eight; Megatron's times are the ones compared. Rows with
    pipeline stages do not state their microbatches.

    A node has one network card of 100 Gb/s for all of its GPUs, not four (Oneflow-Inc/DLPerf, test
    environment).
    """
    heads = {768: 12, 1536: 16, 2304: 24, 3072: 32}
    for row in (r for r in read("oneflow_megatron_v100.csv") if r["pp"] == "1"):
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
            framework=MEGATRON_2022,
        )


def megatron() -> Iterator[Run]:
    """The model of Korthikanti et al. 2022 on one node of A100, all layers computed again."""
    for row in (r for r in read("megatron_recompute_a100.csv") if r["pp"] == "1"):
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
            framework=MEGATRON_2022,
        )
