"""Published runs on TPUs: model, mesh, layout and options as their authors state them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mesh_tf_core as mtf
from benchmarks.published_models import language_model as published_model
from benchmarks.published_rows import Run, lowered, read
from examples.transformer_lm import model as language_model
from examples.transformer_seq2seq import model as translation_model

TPU = "XLA on TPUs"
GSPMD = ("gspmd_tpuv3.csv", "gspmd_tpuv3_more.csv")
EXPERT = "batch:batch;vocab:model;d_ff:model;heads:model"
MEGATRON = "batch:data;heads:model;d_ff:model;vocab:model"
SPLIT = MEGATRON + ";width:model"


def mesh_tensorflow() -> Iterator[Run]:
    """The paper's two large models (Shazeer et al. 2018): Adafactor, dropout 0.1.

    Activations are float32: tensor2tensor's `mtf_transformer_base` says so wherever it lists the paper's
    results, from d998beb (2018-10-02) to 4a460cf (2018-10-26); bfloat16 came with 02e3bd8 (2018-10-31).
    """
    common = {"d_model": 1024, "length": 256, "dtype": "float32", "optimizer": "adafactor", "dropout": 0.1}
    common["attention"] = "plain"
    lm = {**common, "layers": 6, "d_kv": 256, "heads": 256, "d_ff": 262144, "vocab": 32768, "batch": 256}
    tr = {**common, "layers": 6, "d_kv": 128, "heads": 128, "d_ff": 65536, "vocab": 32512, "batch": 128}
    for row, build, sizes, mesh in zip(
        read("mesh_tf_runs.csv"),
        (language_model, translation_model),
        (lm, tr),
        ("batch:16;model:32", "model:8;batch:16"),
        strict=True,
    ):

        def program(build: Any = build, sizes: Any = sizes, mesh: str = mesh) -> mtf.Program:
            return lowered(build, sizes, mesh, EXPERT)

        seconds = float(row["derived_step_s"])
        yield Run("mesh_tf_runs.csv", row["model"], row["model"], "", seconds, program, "tpu-v2", TPU)


def gspmd() -> Iterator[Run]:
    """Dense language models of GSPMD's open configurations: weights split over both axes, all recomputed,
    softmax in float32 (lingvo's synthetic_packed_input.py @095bbe1).

    They are different models, so of one "workload" only for the ranking; a regret means nothing here.
    """
    for table, row in ((t, r) for t in GSPMD for r in read(t)):
        one, other = row["device_mesh"].split("x")
        sizes = {
            "layers": int(row["layers"]),
            "d_model": int(row["model_dim"]),
            "d_kv": int(row["d_kv"]),
            "heads": int(row["heads"]),
            "d_ff": int(row["ff_dim"]),
            "gated": row["gated"] == "1",
            "vocab": int(row["vocab"]),
            "length": int(row["seq"]),
            "batch": int(row["batch"]),
            "tied": True,
            "dtype": "bfloat16",
            "optimizer": row["optimizer"].lower(),
            "float32_softmax": True,
            "width": "width",
        }

        parts = int(row.get("micro_batches", "1"))

        def program(
            sizes: Any = sizes, mesh: str = f"data:{one};model:{other}", parts: int = parts
        ) -> mtf.Program:
            return lowered(published_model, sizes, mesh, SPLIT, stage=3, recompute=True, microbatches=parts)

        name = row["config"]
        yield Run(table, name, name, "dense", float(row["step_s"]), program, "tpu-v3", TPU)


def maxtext() -> Iterator[Run]:
    """MaxText: variables split over `fsdp`, activations between layers over both axes. Tokens are embedded by
    a product. On v5 attention is one kernel. "minimal" keeps the products with weights.

    It counts 6 FLOPs per weight of the model and token, and for attention 12 L S H d, of which only the
    causal half on v5p (train.py of 76bd53b, 2023-12-15). The runs on v4 are older (README of 281e04b,
    2023-04-27): of 1,024 tokens (base.yml of that commit; 2,048 since 5b0e28e, which brought attention in
    one kernel, 2023-09-06), and attention was not counted (it is since 0e65013, 2023-06-02).
    """
    counted = {"v4": 0, "v5e": 12, "v5p": 6}
    for row in read("maxtext_tpu.csv"):
        chips = int(row["chips"])
        ways = dict(part.split("=") for part in row["layout"].split(";")[0].removeprefix("ici ").split())
        fsdp, tensor = int(ways["fsdp"]), int(ways.get("tp", 1))
        generation = row["slice"].split("-")[0]
        old = generation == "v4"
        length = 1024 if old else int(row["seq"])
        sizes = {
            "layers": int(row["layers"]),
            "d_model": int(row["emb"]),
            "d_kv": int(row["head_dim"]),
            "heads": int(row["heads"]),
            "d_ff": int(row["mlp"]),
            "vocab": int(row["vocab"]),
            "length": length,
            "batch": int(float(row["per_chip_batch"]) * chips),
            "gated": not old,
            "tied": old,
            "one_hot": not old,
            "width": "width",
            "dtype": "bfloat16",
            "attention": "plain" if old else "fused",
        }
        keeps = "" if row["remat"].startswith("full") else "products"
        mesh = f"data:{fsdp}" + (f";model:{tensor}" if tensor > 1 else "")
        layout = SPLIT if tensor > 1 else "batch:data"

        def program(
            sizes: Any = sizes,
            mesh: str = mesh,
            layout: str = layout,
            keep: str = keeps,
        ) -> mtf.Program:
            return lowered(published_model, sizes, mesh, layout, stage=3, recompute=True, keep=keep)

        width, feed, layers = sizes["d_model"], sizes["d_ff"], sizes["layers"]
        inner = sizes["heads"] * sizes["d_kv"]
        weights = layers * (4 * width * inner + (2 if old else 3) * width * feed)
        weights += (1 if old else 2) * sizes["vocab"] * width
        attended = counted[generation] * layers * length * inner
        flops = (6 * weights + attended) * sizes["batch"] * length
        seconds = flops / (float(row["tflops_per_chip"]) * 1e12 * chips)
        name = f"{row['slices']} x {row['slice']} {row['model']} {row['layout'].split(';')[0]}"
        family = f"{generation} {row['model']}"
        chip = f"tpu-{generation}"
        yield Run("maxtext_tpu.csv", name, family, "", seconds, program, chip, TPU, keeps=keeps)


def small() -> Iterator[Run]:
    """mesh-transformer-jax on TPU v3: one chip's two cores are two devices; layers recomputed, attention and
    feed-forward beside each other, one text at a time on every replica (its benchmarks.md). The one-hot
    embedding and the mask make activations float32 (its layers.py)."""
    for row in read("tpu_v2_v3_small.csv"):
        words = row["model"].split()
        if not row["step_s"] or not row["layout"].startswith(("dp", "mp")) or len(words) < 4:
            continue
        layers, width, heads = (int(w[1:]) for w in words[1:4])
        ways = {p[:2]: int(p[2:]) for p in row["layout"].split()}
        data, tensor = ways.get("dp", 1), ways["mp"]
        sizes = {
            "layers": layers,
            "d_model": width,
            "d_kv": width // heads,
            "heads": heads,
            "d_ff": 4 * width,
            "vocab": 50400,
            "length": int(row["seq"]),
            "batch": int(row["batch"]),
            "dtype": "float32",
            "parallel": True,
            "one_hot": True,
        }
        mesh = (f"data:{data};" if data > 1 else "") + f"model:{tensor}"
        layout = MEGATRON if data > 1 else MEGATRON.partition(";")[2]
        parts = int(row["batch"]) // data

        def program(
            sizes: Any = sizes, mesh: str = mesh, layout: str = layout, parts: int = parts
        ) -> mtf.Program:
            return lowered(published_model, sizes, mesh, layout, recompute=True, microbatches=parts)

        name = f"{row['system']} {words[0]} {row['layout']}"
        yield Run("tpu_v2_v3_small.csv", name, words[0], "", float(row["step_s"]), program, "tpu-v3", TPU)
