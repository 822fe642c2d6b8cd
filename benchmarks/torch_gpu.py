"""PyTorch modules on one GPU: steps and memory as predicted, beside what was measured.

    python benchmarks/torch_gpu.py --predict --out predicted.json [--hardware h200]
    python benchmarks/torch_gpu.py --out measured.json [--seconds 400] [NAME...]
    python benchmarks/torch_gpu.py --join first.json measured.json predicted.json \
        --out benchmarks/results/torch_gpu.json

The machine that measures needs torch, transformers and a GPU, and nothing of this project. Modules are
unmodified ones of transformers in a bare training loop: AdamW with its defaults, gradients set to None. A row
is written when it ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import torch_modules_plain as plain

WARM, STEPS = 3, 8
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_MOE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "experts_implementation": "grouped_mm",
}
GEMMA3_1B = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "vocab_size": 262144,
}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
WHISPER = {
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
}
T5 = {
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 3072,
    "num_layers": 12,
    "num_heads": 12,
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True)
class Run:
    """A module and how it trains.

    Attributes:
      kind, sizes: of transformers: the model and the arguments of its configuration; "plain.NAME": of
        `torch_modules_plain`.
      batch: name -> shape of whole numbers below `vocab`, or (shape, "float").
      types: "bf16": everything; "autocast": float32 parameters under torch.autocast; "fsdp": fully_shard with
        MixedPrecisionPolicy(param_dtype=bfloat16) on one device.
      compiled: by torch.compile.
      checkpoint: gradient_checkpointing_enable().
    """

    kind: str
    sizes: Mapping[str, Any]
    batch: Mapping[str, Any]
    vocab: int = 32000
    types: str = "bf16"
    compiled: bool = False
    checkpoint: bool = False
    config: str = ""

    @property
    def framework(self) -> str:
        return "torch-compile" if self.compiled else "torch"

    def module(self, device: str) -> Any:
        """The module in training mode, with values unless the device is meta."""
        made: Any
        if self.kind.startswith("plain."):
            with torch.device(device):
                made = getattr(plain, self.kind.removeprefix("plain."))(**self.sizes)
            return made.bfloat16().train() if self.types == "bf16" else made.train()
        name = self.config or self.kind.split("For")[0].removesuffix("LMHeadModel") + "Config"
        config = getattr(transformers, name)(**{"use_cache": False, **self.sizes})
        torch.manual_seed(0)
        with torch.device(device):
            made = getattr(transformers, self.kind)._from_config(config)
        if self.checkpoint:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        if self.types == "bf16":
            made = made.bfloat16()
        return made.train()

    def given(self, device: str) -> dict[str, torch.Tensor]:
        """A batch."""
        found = {}
        for name, shape in self.batch.items():
            if shape[-1] == "float":
                kind = torch.bfloat16 if self.types == "bf16" else torch.float32
                found[name] = torch.randn(*shape[:-1], device=device, dtype=kind)
            else:
                found[name] = torch.randint(0, self.vocab, shape, device=device)
        return found

    def cast(self, device: str) -> AbstractContextManager[Any]:
        if self.types != "autocast":
            return nullcontext()
        return torch.autocast(device, dtype=torch.bfloat16)


def text(rows: int, length: int, *names: str) -> dict[str, tuple[int, int]]:
    return dict.fromkeys(names or ("input_ids", "labels"), (rows, length))


def image(rows: int) -> dict[str, Any]:
    return {"pixel_values": (rows, 3, 224, 224, "float"), "labels": (rows,)}


LLAMA = "LlamaForCausalLM"
VIT = ("ViTForImageClassification", {**LARGE, "num_labels": 1000})
RUNS: dict[str, Run] = {
    "GPT-2 124M": Run("GPT2LMHeadModel", {}, text(16, 1024)),
    "GPT-2 355M": Run("GPT2LMHeadModel", {"n_embd": 1024, "n_layer": 24, "n_head": 16}, text(16, 1024)),
    "GPT-2 124M, autocast": Run("GPT2LMHeadModel", {}, text(16, 1024), types="autocast"),
    "Llama 1B": Run(LLAMA, LLAMA_1B, text(4, 4096)),
    "Llama 1B, autocast": Run(LLAMA, LLAMA_1B, text(4, 4096), types="autocast"),
    "Llama 1B, FSDP": Run(LLAMA, LLAMA_1B, text(4, 4096), types="fsdp"),
    "Llama 1B, checkpoint": Run(LLAMA, LLAMA_1B, text(8, 4096), checkpoint=True),
    "Llama 1B, length 16k, checkpoint": Run(LLAMA, LLAMA_1B, text(2, 16384), checkpoint=True),
    "Llama 8B, checkpoint": Run(LLAMA, LLAMA_8B, text(2, 4096), checkpoint=True),
    "Qwen3 0.6B": Run("Qwen3ForCausalLM", QWEN3, text(8, 2048)),
    "Qwen3 0.6B, small batch": Run("Qwen3ForCausalLM", QWEN3, text(1, 1024)),
    "Gemma 3 1B": Run("Gemma3ForCausalLM", GEMMA3_1B, text(4, 2048), config="Gemma3TextConfig"),
    "Qwen3 mixture, 6 layers": Run("Qwen3MoeForCausalLM", QWEN3_MOE, text(4, 4096)),
    "BERT-large": Run("BertForMaskedLM", LARGE, text(32, 512), vocab=30000),
    "T5-base": Run(
        "T5ForConditionalGeneration", T5, {**text(32, 512, "input_ids"), **text(32, 128, "labels")}
    ),
    "ViT-L/16": Run(*VIT, image(128), vocab=1000),
    "ViT-L/16, autocast": Run(*VIT, image(128), vocab=1000, types="autocast"),
    "Whisper-small": Run(
        "WhisperForConditionalGeneration",
        WHISPER,
        {"input_features": (16, 80, 3000, "float"), **text(16, 448, "labels")},
    ),
    "ConvNeXt-B": Run(
        "ConvNextForImageClassification",
        {"hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3], "num_labels": 1000},
        image(128),
        vocab=1000,
    ),
    "ResNet-50": Run("ResNetForImageClassification", {"num_labels": 1000}, image(256), vocab=1000),
    "GPT-2 124M, compiled": Run("GPT2LMHeadModel", {}, text(16, 1024), compiled=True),
    "Llama 1B, compiled": Run(LLAMA, LLAMA_1B, text(4, 4096), compiled=True),
    "Llama 1B, autocast, compiled": Run(LLAMA, LLAMA_1B, text(4, 4096), types="autocast", compiled=True),
    "Qwen3 0.6B, compiled": Run("Qwen3ForCausalLM", QWEN3, text(8, 2048), compiled=True),
    "ViT-L/16, compiled": Run(*VIT, image(128), vocab=1000, compiled=True),
    "BERT-large, compiled": Run("BertForMaskedLM", LARGE, text(32, 512), vocab=30000, compiled=True),
    # What follows was measured after the rules and constants were settled on the runs above.
    "OPT 1.3B": Run(
        "OPTForCausalLM",
        {
            "hidden_size": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "word_embed_proj_dim": 2048,
        },
        text(4, 2048),
    ),
    "Pythia 1.4B": Run(
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50304,
        },
        text(4, 2048),
    ),
    "OLMo 2 1B": Run(
        "Olmo2ForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 100352,
        },
        text(4, 2048),
    ),
    "Mistral, 12 layers, autocast": Run(
        "MistralForCausalLM",
        {**LLAMA_8B, "num_hidden_layers": 12, "vocab_size": 32768, "sliding_window": None},
        text(2, 4096),
        types="autocast",
    ),
    "Mixtral, 2 layers": Run(
        "MixtralForCausalLM",
        {
            **LLAMA_8B,
            "num_hidden_layers": 2,
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "experts_implementation": "grouped_mm",
        },
        text(4, 4096),
    ),
    "Phi-3 mini, 16 layers, checkpoint": Run(
        "Phi3ForCausalLM",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "pad_token_id": 0,
        },
        text(4, 4096),
        checkpoint=True,
    ),
    "RoBERTa-large, autocast": Run(
        "RobertaForMaskedLM",
        {**LARGE, "max_position_embeddings": 514},
        text(32, 384),
        vocab=30000,
        types="autocast",
    ),
    "DINOv2-L": Run(
        "Dinov2ForImageClassification",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_labels": 1000},
        image(96),
        vocab=1000,
    ),
    "DiT-XL/2": Run(
        "plain.DiT",
        {},
        {
            "x": (48, 4, 32, 32, "float"),
            "t": (48,),
            "y": (48,),
            "noise": (48, 4, 32, 32, "float"),
        },
        vocab=1000,
        types="autocast",
    ),
    "nanoGPT 124M": Run("plain.GPT", {}, text(24, 1024, "idx", "targets"), vocab=50000),
    "ViT-L/16, autocast, compiled": Run(*VIT, image(128), vocab=1000, types="autocast", compiled=True),
    "nanoGPT 124M, compiled": Run(
        "plain.GPT", {}, text(24, 1024, "idx", "targets"), vocab=50000, compiled=True
    ),
    "Pythia 1.4B, compiled": Run(
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50304,
        },
        text(4, 2048),
        compiled=True,
    ),
}
SEEN = 26
"""How many of the runs, the first ones, were looked at while rules and constants were revised."""


def predicted(run: Run, hardware: str) -> dict[str, Any]:
    """Seconds and bytes of a step, and milliseconds by kind of kernel."""
    import layoutopt

    began = time.process_time()
    kind = torch.bfloat16 if run.types == "fsdp" else None
    with run.cast("cpu"):
        model = layoutopt.from_torch(run.module("meta"), run.given("meta"), param_dtype=kind)
    found = layoutopt.cost(model, "data:1", hardware=hardware, framework=run.framework)
    lines = found.to_frame()
    kinds = lines.operation.str.split().str[0]
    by_kind = (1e3 * lines.seconds * lines.runs).groupby(kinds).sum().sort_values(ascending=False)
    return {
        "framework": run.framework,
        "step_seconds": found.predicted.step_seconds,
        "peak_memory_bytes": found.predicted.peak_memory_bytes,
        "milliseconds": {"all": float(by_kind.sum()), **by_kind.head(12).to_dict()},
        "launches": int(lines.runs.sum()),
        "notes": list(model.origin.notes if model.origin else ()),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def measured(run: Run, profile: bool) -> dict[str, Any]:
    """Seconds of a step (the median), bytes at its peak, and the kernels of one step."""
    began = time.monotonic()
    step = _step(run)
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    ready, times = time.monotonic(), []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    free, total = torch.cuda.mem_get_info()
    found = {
        "step_seconds": statistics.median(times),
        "spread": [min(times), max(times)],
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "used_bytes": total - free,
        "ready_seconds": ready - began,
    }
    return {**found, "kernels": _kernels(step)} if profile else found


def _step(run: Run) -> Callable[[], None]:
    """One training step."""
    module, batch = run.module("cuda"), run.given("cuda")
    if run.types == "fsdp":
        _fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    call = torch.compile(module) if run.compiled else module

    def step() -> None:
        with run.cast("cuda"):
            found = call(**batch)
            loss = found.loss if hasattr(found, "loss") else found[-1] if isinstance(found, tuple) else found
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _empty() -> None:
    """Gives back the memory of the run before."""
    import torch._dynamo as dynamo

    gc.collect()
    dynamo.reset()
    torch.cuda.empty_cache()


def _fully_shard(module: nn.Module) -> None:
    """FSDP2 of each layer on a mesh of one device."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not distributed.is_initialized():
        distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in module.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def _kernels(step: Callable[[], None]) -> list[list[Any]]:
    """[name, launches, milliseconds] of the longest kernels of a step, and of all together."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    rows = [
        [e.key[:160], e.count, e.self_device_time_total / 1e3]
        for e in seen.key_averages()
        if e.device_type == DeviceType.CUDA
    ]
    rows.sort(key=lambda r: -r[2])
    return [["all", sum(r[1] for r in rows), sum(r[2] for r in rows)], *rows[:60]]


def results(args: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of the runs that were asked for, as long as there is time."""
    ends = time.monotonic() + args.seconds
    for name in args.names or RUNS:
        try:
            if args.predict:
                yield name, predicted(RUNS[name], args.hardware)
            elif time.monotonic() < ends:
                _empty()
                yield name, measured(RUNS[name], not args.no_kernels)
        except Exception as error:  # every run reports
            yield name, {"error": f"{type(error).__name__}: {error}"[:2000]}


def joined(parts: Sequence[str], hardware: str) -> dict[str, Any]:
    """Measurements beside the predictions that were made before them, and those of today, which are of runs
    that were not measured too."""
    first, seen, today = (json.loads(Path(part).read_text(encoding="utf-8")) for part in parts)
    rows = {}
    for name, said in today["rows"].items():
        of_run = {"first": first, "measured": seen}
        found = {what: of["rows"][name] for what, of in of_run.items() if name in of["rows"]}
        if "kernels" in found.get("measured", {}):
            found["measured"] = {**found["measured"], "kernels": _by_kind(found["measured"]["kernels"])}
        rows[name] = {"predicted": said, **found}
    dates = {"date": seen["date"], "predicted": today["date"], "hardware": hardware}
    return {**dates, "machine": seen["machine"], "rows": rows}


def _by_kind(kernels: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Milliseconds of the longest kernels by kind, and of all."""
    found: dict[str, float] = {"all": kernels[0][2]}
    for name, _, milliseconds in kernels[1:]:
        kind = next((k for k, parts in KINDS.items() if any(part in name for part in parts)), "others")
        found[kind] = found.get(kind, 0.0) + milliseconds
    return found


KINDS = {
    "attention": ("flash", "fmha", "sdpa", "compute_dot_do_o"),
    "products": ("nvjet", "gemm", "cutlass", "cublas"),
    "optimizer": ("multi_tensor",),
}
"""Kind of kernels -> words in their names."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--join", nargs=3)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--no-kernels", action="store_true")
    args = parser.parse_args()
    if args.join:
        args.out.write_text(json.dumps(joined(args.join, args.hardware), indent=1) + "\n", encoding="utf-8")
        return
    machine = {"torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        machine["device"] = torch.cuda.get_device_name(0)
    found: dict[str, Any] = {"date": str(date.today()), "machine": machine, "rows": {}}
    for name, row in results(args):
        found["rows"][name] = row
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        brief = {k: v for k, v in row.items() if k not in ("milliseconds", "kernels", "notes")}
        print(name, json.dumps(brief)[:300], flush=True)


if __name__ == "__main__":
    main()
