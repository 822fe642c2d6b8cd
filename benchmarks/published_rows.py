"""Published runs as programs of ours: model, mesh, layout and options as their authors state them.

A row that the layout language cannot express is left out, with the reason in `LEFT_OUT`. Tables and their
sources: `benchmarks/data/*.csv`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mesh_tf_core as mtf
from benchmarks.published_models import language_model as published_model
from costmodels import Hardware, load_hardware
from costmodels.hardware import Cluster
from costmodels.kernels.compute import MATMUL_CLASSES
from costmodels.pricing.items import Computed
from costmodels.pricing.pricer import Cost, Line, Pricer, pricer
from examples.transformer_lm import model as language_model
from examples.transformer_seq2seq import model as translation_model

DATA = Path(__file__).parent / "data"
EXPERT = "batch:batch;vocab:model;d_ff:model;heads:model"
MEGATRON = "batch:data;heads:model;d_ff:model;vocab:model"
SPLIT = MEGATRON + ";width:model"
VOCAB_GPT = 51200
GSPMD = ("gspmd_tpuv3.csv", "gspmd_tpuv3_more.csv")

LEFT_OUT = {
    "maxtext_tpu.csv": "several slices: variables are split over one slice and repeated on the others; our "
    "storage splits over all spare axes",
    "vtrain_a100_h1024.csv": "pipeline stages",
    "oneflow_megatron_v100.csv": "pipeline stages",
    "megatron_recompute_a100.csv": "times and activations of pipelined runs (175B, 530B, 1T)",
    "tpu_v2_v3_small.csv": "rows without layout, batch or time",
}

Pricers = dict[tuple[Hardware, str], Pricer]


@dataclass(frozen=True)
class Run:
    """One published row.

    Attributes:
      table: the file it is from.
      family: what is left out together when constants are fitted: the model.
      workload: runs of one workload compete with each other (ranking, regret); "" if it has no rivals.
      seconds: published (or derived from published throughput), of one step.
      program: builds the program.
      hardware: the preset, or what its runtime changes in it.
      keeps: backward finds the results of products with weights, although the program computes everything
        again: they, and what they need sent, are not paid again.
    """

    table: str
    name: str
    family: str
    workload: str
    seconds: float
    program: Callable[[], mtf.Program]
    hardware: Hardware = field(repr=False)
    keeps: bool = False

    def cost(self, known: Pricers | None = None) -> Cost:
        """The price of its program; `known` are pricers that other runs have used."""
        program = self.program()
        prices = {} if known is None else known
        key = (self.hardware, str(program.mesh))
        if key not in prices:
            prices[key] = pricer(self.hardware, program)
        found = prices[key].cost(program)
        return Cost(tuple(x for x in found.lines if not _kept(x))) if self.keeps else found


def _kept(line: Line) -> bool:
    """Whether a line is a product with weights that runs again, or a collective for one."""
    dims = line.item.quantity.matmul_dims if isinstance(line.item, Computed) else None
    product = line.kind in MATMUL_CLASSES and dims is not None and dims[3] == 1
    return line.origin.phase == "recompute" and (product or line.is_communication)


def read(name: str) -> list[dict[str, str]]:
    """Rows of a table; lines that begin with '#' say where it is from."""
    with (DATA / name).open() as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def runs() -> Iterator[Run]:
    """All rows that can be expressed."""
    for source in (mesh_tensorflow, gspmd, maxtext, small, vtrain, oneflow, megatron):
        yield from source()


def stored(model: mtf.Model, stage: int) -> dict[str, int]:
    """All trained variables at one stage of storage."""
    _ = model.step_graph
    return {v.name: stage for v in model.graph.variables.values() if v.trainable and len(v.shape)}


def lowered(
    build: Callable[..., mtf.Model],
    sizes: dict[str, Any],
    mesh: str,
    layout: str,
    *,
    stage: int = 0,
    recompute: bool = False,
    microbatches: int = 1,
) -> mtf.Program:
    """The step of a model under a layout; `recompute` runs every layer again in backward."""
    model = build(**sizes)
    loops = {b.dim.name for b in model.graph.blocks if b.dim is not None}
    options = mtf.Options(
        stored(model, stage) if stage else {}, frozenset(loops if recompute else ()), microbatches
    )
    return model.lower(mtf.Mesh(mesh), mtf.Layout(layout), options)


def mesh_tensorflow() -> Iterator[Run]:
    """The paper's two large models (Shazeer et al. 2018): Adafactor, dropout 0.1.

    Activations are float32: tensor2tensor's `mtf_transformer_base` says so wherever it lists the paper's
    results, from d998beb (2018-10-02) to 4a460cf (2018-10-26); bfloat16 came with 02e3bd8 (2018-10-31).
    """
    common = {"d_model": 1024, "length": 256, "dtype": "float32", "optimizer": "adafactor", "dropout": 0.1}
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
        yield Run(
            "mesh_tf_runs.csv", row["model"], row["model"], "", seconds, program, load_hardware("tpu-v2")
        )


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
        yield Run(table, name, name, "dense", float(row["step_s"]), program, load_hardware("tpu-v3"))


def maxtext() -> Iterator[Run]:
    """MaxText on one slice: variables split over `fsdp`, activations between layers over both axes. "minimal"
    keeps the products with weights (`Run.keeps`). Attention is one kernel, tokens are embedded by a product.

    It counts 6 FLOPs per weight of the model and token, and for attention 12 L S H d, of which only the
    causal half on v5p (train.py of 76bd53b, 2023-12-15). The runs on v4 are older (README of 281e04b,
    2023-04-27): of 1,024 tokens (base.yml of that commit; 2,048 since 5b0e28e, which brought attention in
    one kernel, 2023-09-06), and attention was not counted (it is since 0e65013, 2023-06-02).
    """
    counted = {"v4": 0, "v5e": 12, "v5p": 6}
    for row in read("maxtext_tpu.csv"):
        if row["slices"] != "1":
            continue
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
            "attention": "plain" if old else "fused",
            "dtype": "bfloat16",
        }
        mesh = f"data:{fsdp}" + (f";model:{tensor}" if tensor > 1 else "")
        layout = SPLIT if tensor > 1 else "batch:data"

        def program(sizes: Any = sizes, mesh: str = mesh, layout: str = layout) -> mtf.Program:
            return lowered(published_model, sizes, mesh, layout, stage=3, recompute=True)

        width, feed, layers = sizes["d_model"], sizes["d_ff"], sizes["layers"]
        inner = sizes["heads"] * sizes["d_kv"]
        weights = layers * (4 * width * inner + (2 if old else 3) * width * feed)
        weights += (1 if old else 2) * sizes["vocab"] * width
        attended = counted[generation] * layers * length * inner
        flops = (6 * weights + attended) * sizes["batch"] * length
        seconds = flops / (float(row["tflops_per_chip"]) * 1e12 * chips)
        name = f"{row['slice']} {row['model']} {row['layout'].split(';')[0]}"
        family = f"{generation} {row['model']}"
        hardware = load_hardware(f"tpu-{generation}")
        keeps = row["remat"] == "minimal"
        yield Run("maxtext_tpu.csv", name, family, "", seconds, program, hardware, keeps)


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
        yield Run(
            "tpu_v2_v3_small.csv", name, words[0], "", float(row["step_s"]), program, load_hardware("tpu-v3")
        )


def gpt(hidden: int, heads: int, layers: int, length: int, batch: int) -> dict[str, Any]:
    """GPT as Megatron builds it: tied embeddings, learned positions, Adam in mixed precision."""
    return {
        "layers": layers,
        "d_model": hidden,
        "d_kv": hidden // heads,
        "heads": heads,
        "d_ff": 4 * hidden,
        "vocab": VOCAB_GPT,
        "length": length,
        "batch": batch,
        "tied": True,
        "dtype": "float16",
    }


def megatron_program(sizes: dict[str, Any], data: int, tensor: int, parts: int, again: bool) -> mtf.Program:
    """Tensor and data parallel, without pipeline."""
    axes = [f"{n}:{k}" for n, k in (("data", data), ("model", tensor)) if k > 1]
    rules = [r for r in MEGATRON.split(";") if f"{r.partition(':')[2]}:" in ";".join(axes)]
    mesh, layout = ";".join(axes) or "data:1", ";".join(rules)
    return lowered(language_model, sizes, mesh, layout, recompute=again, microbatches=parts)


def vtrain() -> Iterator[Run]:
    """Megatron-DeepSpeed on A100, one pipeline stage, activations checkpointed per layer."""
    for row in read("vtrain_a100_h1024.csv"):
        if row["pipeline parallelism"] != "1":
            continue
        hidden, heads, layers, length, batch, micro, tensor, data, gpus = (
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
                "n_gpus",
            )
        )
        sizes = gpt(hidden, heads, layers, length, batch)
        parts = batch // (micro * data)

        def program(sizes: Any = sizes, how: tuple[int, int, int] = (data, tensor, parts)) -> mtf.Program:
            return megatron_program(sizes, *how, again=True)

        workload = f"{layers} layers, {gpus} GPUs, batch {batch}"
        yield Run(
            "vtrain_a100_h1024.csv",
            f"{workload}: tensor {tensor}, data {data}, micro batch {micro}",
            f"{layers} layers",
            workload,
            float(row["iteration time (ms)"]) / 1e3,
            program,
            load_hardware("a100-eager"),
        )


def oneflow() -> Iterator[Run]:
    """OneFlow and Megatron-LM on V100, four nodes of eight; Megatron's times are the ones compared.

    A node has one network card of 100 Gb/s for all of its GPUs, not four (Oneflow-Inc/DLPerf, test
    environment).
    """
    hardware = load_hardware("v100-eager")
    assert isinstance(hardware.topology, Cluster)
    cluster = replace(hardware.topology, node_egress=hardware.topology.nic_bandwidth)
    heads = {768: 12, 1536: 16, 2304: 24, 3072: 32}
    for row in read("oneflow_megatron_v100.csv"):
        if row["pp"] != "1" or row["case"].startswith("MP_1x1x1_8"):
            continue
        hidden, layers, batch, gpus = (int(row[n]) for n in ("hidden", "layers", "global_batch", "gpus"))
        sizes = gpt(hidden, heads[hidden], layers, 2048, batch)

        def program(
            sizes: Any = sizes, how: tuple[int, int] = (int(row["dp"]), int(row["tp"]))
        ) -> mtf.Program:
            return megatron_program(sizes, *how, 1, again=True)

        workload = f"{hidden}x{layers}, {gpus} GPUs, batch {batch}"
        yield Run(
            "oneflow_megatron_v100.csv",
            f"{workload}: tensor {row['tp']}, data {row['dp']}",
            f"{hidden}x{layers}",
            workload,
            batch / float(row["megatron_seq_s"]),
            program,
            replace(hardware, topology=cluster),
        )


def megatron() -> Iterator[Run]:
    """The 22-billion-parameter model of Korthikanti et al. 2022, on 8 A100, all layers recomputed."""
    row = read("megatron_recompute_a100.csv")[0]
    sizes = gpt(int(row["hidden"]), int(row["heads"]), int(row["layers"]), int(row["seq"]), int(row["batch"]))

    def program() -> mtf.Program:
        return megatron_program(sizes, 1, 8, 1, again=True)

    yield Run(
        "megatron_recompute_a100.csv",
        f"{row['model']}, all recomputed",
        row["model"],
        "",
        float(row["time_full_s"]),
        program,
        load_hardware("a100-eager"),
    )
