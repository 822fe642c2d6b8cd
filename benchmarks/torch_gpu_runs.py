"""The runs of `torch_gpu.py`: modules, their batches and how they train."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from benchmarks import torch_modules_made as made
from benchmarks import torch_modules_plain as plain

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
QWEN3_MOE = {**made.QWEN3, **made.MIXED, "num_hidden_layers": 6, "tie_word_embeddings": False}
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
PYTHIA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 50304,
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
T5 = {**made.T5, "decoder_start_token_id": 0}


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
        found: Any
        if self.kind.startswith("plain."):
            with torch.device(device):
                found = getattr(plain, self.kind.removeprefix("plain."))(**self.sizes)
            return found.bfloat16().train() if self.types == "bf16" else found.train()
        name = self.config or self.kind.split("For")[0].removesuffix("LMHeadModel") + "Config"
        config = getattr(transformers, name)(**{"use_cache": False, **self.sizes})
        torch.manual_seed(0)
        with torch.device(device):
            found = getattr(transformers, self.kind)._from_config(config)
        if self.checkpoint:
            found.gradient_checkpointing_enable({"use_reentrant": False})
        if self.types == "bf16":
            found = found.bfloat16()
        return found.train()

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
    "Llama 8B, checkpoint": Run(LLAMA, made.LLAMA_8B, text(2, 4096), checkpoint=True),
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
    # What follows is predicted and not measured yet: no rule or constant was chosen by it.
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
        PYTHIA,
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
        {**made.LLAMA_8B, "num_hidden_layers": 12, "vocab_size": 32768, "sliding_window": None},
        text(2, 4096),
        types="autocast",
    ),
    "Mixtral, 2 layers": Run(
        "MixtralForCausalLM",
        {**made.MIXTRAL, **made.MIXED, "num_hidden_layers": 2},
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
        PYTHIA,
        text(4, 2048),
        compiled=True,
    ),
}
