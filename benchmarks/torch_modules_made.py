"""The modules of `torch_modules.py`: unmodified transformers and peft, and plain PyTorch, at full size
without values.

Each entry has the published number of parameters that are stored once, the number of layers of each loop, and
the axes of some parameters (a digit is `#`, the same word is the same dimension, the axes of one array in
order), all three written down before the first import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks import torch_modules_plain as plain

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Entry:
    """A module and what was expected of it.

    Attributes:
      note: how tables call it.
      make: the module, on meta.
      batch: name -> (shape, element type); whole numbers by default; another argument of the module as it is.
      loops: layers of loops.
      axes: path of a parameter -> its axes.
      parameters: published; 0: the module's own count is the only one.
    """

    note: str
    make: Callable[[], nn.Module]
    batch: dict[str, Any]
    parameters: int
    loops: tuple[int, ...]
    axes: dict[str, str] = field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """The batch."""
        made = {}
        for name, value in self.batch.items():
            if isinstance(value, tuple):
                shape, kind = value if len(value) > 1 else (*value, torch.int64)
                value = torch.empty(shape, dtype=kind, device="meta")
            made[name] = value
        return made


def auto(kind: Any, config: Any, dtype: torch.dtype | None = None) -> Callable[[], nn.Module]:
    """A module of transformers."""

    def make() -> nn.Module:
        with torch.device("meta"):
            module = kind(config)
        return module if dtype is None else module.to(dtype)

    return make


def text(rows: int, length: int, *names: str) -> dict[str, tuple[Any, ...]]:
    """Whole numbers of rows × length."""
    return dict.fromkeys(names or ("input_ids", "labels"), ((rows, length),))


def decoder(name: str, dtype: torch.dtype | None = None, **sizes: Any) -> Callable[[], nn.Module]:
    """A language model of transformers; `hidden_size` and others by name."""
    known = {"use_cache": False, "tie_word_embeddings": False, **sizes}
    config = getattr(transformers, f"{name}Config")(**known)
    return auto(transformers.AutoModelForCausalLM.from_config, config, dtype)


MIXED = {"experts_implementation": "grouped_mm"}


def lora() -> nn.Module:
    """Llama 3 8B with low-rank adapters of queries and values, the rest frozen."""
    import peft

    with torch.device("meta"):
        module = decoder("Llama", **LLAMA_8B)()
        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
        return peft.get_peft_model(module, config)


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3 = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
}
MIXTRAL = LLAMA_8B | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK_V2 = {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "topk_group": 4,
    "vocab_size": 129280,
}
DEEPSEEK_V3.pop("topk_method")
OSS = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
}
GEMMA = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
    "vocab_size": 262208,
    "tie_word_embeddings": True,
}
WHISPER = {
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "vocab_size": 51866,
    "use_cache": False,
}
T5 = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "use_cache": False}
MAMBA = {
    "hidden_size": 2560,
    "num_hidden_layers": 64,
    "num_heads": 80,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "vocab_size": 50288,
    "tie_word_embeddings": True,
}
GQA = {
    "self_attn/q_proj/weight": "(kv query parts d_kv) d_model",
    "self_attn/k_proj/weight": "(kv parts d_kv) d_model",
    "self_attn/v_proj/weight": "(kv d_v) d_model",
    "self_attn/o_proj/weight": "d_model (kv query d_v)",
}
GATED = {
    "mlp/gate_proj/weight": "d_ff d_model",
    "mlp/up_proj/weight": "d_ff d_model",
    "mlp/down_proj/weight": "d_model d_ff",
}
EXPERTS = {
    "mlp/experts/down_proj": "experts d_model d_expert",
    "mlp/experts/gate_up_proj": "experts (two d_expert) d_model",
}
HEADS = {"model/embed_tokens/weight": "vocab d_model", "lm_head/weight": "vocab d_model"}
NORM = {"input_layernorm/weight": "d_model"}


def under(prefix: str, axes: dict[str, str]) -> dict[str, str]:
    """Axes of the parameters of layers."""
    return {f"{prefix}/{path}": text for path, text in axes.items()}


LLAMA_AXES = HEADS | under("model/layers/#", GQA | GATED | NORM)
ENTRIES: dict[str, Entry] = {
    "llama3_8b": Entry(
        "Llama 3 8B", decoder("Llama", **LLAMA_8B), text(64, 4096), 8030261248, (32,), LLAMA_AXES
    ),
    "llama3_70b": Entry(
        "Llama 3 70B, bf16",
        decoder("Llama", BF16, **LLAMA_70B),
        text(64, 4096),
        70553706496,
        (80,),
        LLAMA_AXES,
    ),
    "qwen3_30b": Entry(
        "Qwen3-30B-A3B",
        decoder("Qwen3Moe", **QWEN3, **MIXED),
        text(64, 4096),
        30532122624,
        (48,),
        HEADS | under("model/layers/#", GQA | EXPERTS | NORM),
    ),
    "mixtral": Entry(
        "Mixtral 8x7B",
        decoder("Mixtral", **MIXTRAL, **MIXED),
        text(64, 4096),
        46702792704,
        (32,),
        HEADS | under("model/layers/#", GQA | EXPERTS | NORM),
    ),
    "deepseek_v2": Entry(
        "DeepSeek-V2, bf16",
        decoder("DeepseekV2", BF16, **DEEPSEEK_V2, **MIXED),
        text(64, 4096),
        235741434880,
        (59,),
        HEADS | under("model/layers/#", EXPERTS | NORM),
    ),
    "deepseek_v3": Entry(
        "DeepSeek-V3, bf16",
        decoder("DeepseekV3", BF16, **DEEPSEEK_V3, **MIXED),
        text(64, 4096),
        671026404352,
        (3, 58),
        HEADS | under("model/layers/#", EXPERTS | NORM),
    ),
    "gpt_oss": Entry(
        "gpt-oss-20b, bf16",
        decoder("GptOss", BF16, **OSS, **MIXED),
        text(64, 4096),
        20914757184,
        (12,),
        HEADS | under("model/layers/#", GQA | NORM),
    ),
    "gemma3": Entry(
        "Gemma 3 4B, text",
        auto(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**GEMMA, use_cache=False)),
        text(64, 4096),
        3880263168,
        (5,),
        {"model/embed_tokens/weight": "vocab d_model"} | under("model/layers/#", GQA | GATED | NORM),
    ),
    "gpt2": Entry(
        "GPT-2",
        auto(transformers.GPT2LMHeadModel, transformers.GPT2Config(use_cache=False)),
        text(512, 1024),
        124439808,
        (12,),
        {
            "transformer/wte/weight": "vocab d_model",
            "transformer/wpe/weight": "positions d_model",
            "transformer/h/#/attn/c_attn/weight": "d_model (three heads d_kv)",
            "transformer/h/#/mlp/c_fc/weight": "d_model d_ff",
            "transformer/h/#/mlp/c_proj/weight": "d_ff d_model",
        },
    ),
    "bert": Entry(
        "BERT-base",
        auto(transformers.BertForMaskedLM, transformers.BertConfig()),
        text(512, 512),
        109514298,
        (12,),
        {
            "bert/embeddings/word_embeddings/weight": "vocab d_model",
            "bert/encoder/layer/#/attention/self/query/weight": "(heads d_kv) d_model",
            "bert/encoder/layer/#/intermediate/dense/weight": "d_ff d_model",
            "bert/encoder/layer/#/output/dense/weight": "d_model d_ff",
        },
    ),
    "t5": Entry(
        "T5-base",
        auto(
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(**T5, decoder_start_token_id=0),
        ),
        text(512, 512, "input_ids") | text(512, 128, "labels"),
        222903552,
        (11, 11),
        {
            "shared/weight": "vocab d_model",
            "encoder/block/#/layer/0/SelfAttention/o/weight": "d_model (heads d_kv)",
            "encoder/block/#/layer/1/DenseReluDense/wi/weight": "d_ff d_model",
        },
    ),
    "vit": Entry(
        "ViT-B/16",
        auto(transformers.ViTForImageClassification, transformers.ViTConfig(num_labels=1000)),
        {"pixel_values": ((1024, 3, 224, 224), torch.float32), "labels": ((1024,),)},
        86567656,
        (12,),
        {
            "classifier/weight": "classes d_model",
            "vit/layers/#/mlp/fc1/weight": "d_ff d_model",
        },
    ),
    "clip": Entry(
        "CLIP ViT-B/32",
        auto(transformers.CLIPModel, transformers.CLIPConfig()),
        {
            "return_loss": True,
            "input_ids": ((1024, 77),),
            "pixel_values": ((1024, 3, 224, 224), torch.float32),
        },
        151277313,
        (12, 12),
        {
            "text_model/encoder/layers/#/mlp/fc1/weight": "d_ff_text text",
            "text_projection/weight": "shared text",
            "visual_projection/weight": "shared image",
            "vision_model/encoder/layers/#/mlp/fc1/weight": "d_ff_image image",
        },
    ),
    "whisper": Entry(
        "Whisper large v3",
        auto(transformers.WhisperForConditionalGeneration, transformers.WhisperConfig(**WHISPER)),
        {"input_features": ((256, 128, 3000), torch.float32), **text(256, 448, "labels")},
        1543490560,
        (32, 32),
        {
            "model/encoder/layers/#/fc1/weight": "d_ff d_model",
            "model/decoder/layers/#/fc1/weight": "d_ff_decoder d_model",
            "model/encoder/layers/#/self_attn/q_proj/weight": "(heads d_kv) d_model",
        },
    ),
    "mamba2": Entry(
        "Mamba-2 2.7B",
        auto(transformers.Mamba2ForCausalLM, transformers.Mamba2Config(**MAMBA, use_cache=False)),
        text(64, 2048),
        2702599680,
        (64,),
        {
            "backbone/embeddings/weight": "vocab d_model",
            "backbone/layers/#/mixer/out_proj/weight": "d_model (heads d_head)",
            "backbone/layers/#/norm/weight": "d_model",
        },
    ),
    "resnet": Entry(
        "ResNet-50",
        auto(transformers.ResNetForImageClassification, transformers.ResNetConfig(num_labels=1000)),
        {"pixel_values": ((1024, 3, 224, 224), torch.float32), "labels": ((1024,),)},
        25557032,
        (2, 3, 5, 2),
        {"classifier/1/weight": "classes channels"},
    ),
    "convnext": Entry(
        "ConvNeXt-B",
        auto(
            transformers.ConvNextForImageClassification,
            transformers.ConvNextConfig(
                hidden_sizes=[128, 256, 512, 1024], depths=[3, 3, 27, 3], num_labels=1000
            ),
        ),
        {"pixel_values": ((1024, 3, 224, 224), torch.float32), "labels": ((1024,),)},
        88591464,
        (3, 3, 27, 3),
        {"classifier/weight": "classes channels"},
    ),
    "unet": Entry(
        "UNet as of Stable Diffusion 1.5",
        lambda: plain.on_meta(plain.UNet),
        {
            "x": ((512, 4, 64, 64), torch.float32),
            "t": ((512,),),
            "context": ((512, 77, 768), torch.float32),
            "noise": ((512, 4, 64, 64), torch.float32),
        },
        859520964,
        (),
        {"time/2/weight": "time_out time"},
    ),
    "dit": Entry(
        "DiT-XL/2",
        lambda: plain.on_meta(plain.DiT),
        {
            "x": ((256, 4, 32, 32), torch.float32),
            "t": ((256,),),
            "y": ((256,),),
            "noise": ((256, 4, 32, 32), torch.float32),
        },
        675129632,
        (28,),
        {
            "blocks/#/qkv/weight": "(three heads d_kv) d_model",
            "blocks/#/mlp/#/weight": "d_ff d_model",
            "blocks/#/adaLN_modulation/1/weight": "(six d_model) d_cond",
        },
    ),
    "titan_llama3": Entry(
        "Llama 3 8B, plain, as torchtitan writes it",
        lambda: plain.on_meta(plain.titan_llama3),
        text(64, 4096, "tokens", "labels"),
        8030261248,
        (32,),
        {
            "inner/tok_embeddings/weight": "vocab d_model",
            "inner/layers/#/attention/wq/weight": "(kv query d_kv parts) d_model",
            "inner/layers/#/attention/wk/weight": "(kv d_kv parts) d_model",
            "inner/layers/#/feed_forward/w1/weight": "d_ff d_model",
            "inner/layers/#/feed_forward/w2/weight": "d_model d_ff",
            "inner/output/weight": "vocab d_model",
        },
    ),
    "titan_deepseek": Entry(
        "DeepSeek-V3 16B, plain, as torchtitan writes it",
        lambda: plain.on_meta(plain.titan_deepseek_v3),
        text(64, 4096, "tokens", "labels"),
        15706484224,
        (26,),
        {
            "inner/tok_embeddings/weight": "vocab d_model",
            "inner/layers/#/feed_forward/experts/w1": "experts d_expert d_model",
            "inner/layers/#/feed_forward/experts/w2": "experts d_model d_expert",
            "inner/layers/#/feed_forward/gate/weight": "experts d_model",
        },
    ),
    "nanogpt": Entry(
        "nanoGPT 124M",
        lambda: plain.on_meta(plain.GPT),
        text(512, 1024, "idx", "targets"),
        124475904,
        (12,),
        {
            "transformer/wte/weight": "vocab d_model",
            "transformer/wpe/weight": "positions d_model",
            "transformer/h/#/attn/c_attn/weight": "(three heads d_kv) d_model",
            "transformer/h/#/mlp/c_fc/weight": "d_ff d_model",
        },
    ),
    "translation": Entry(
        "Translation by torch.nn.Transformer",
        lambda: plain.on_meta(plain.Translation),
        text(512, 256, "src", "tgt", "labels"),
        0,
        (6, 6),
        {
            "source/weight": "vocab d_model",
            "transformer/encoder/layers/#/self_attn/in_proj_weight": "(three heads d_kv) d_model",
            "transformer/encoder/layers/#/linear1/weight": "d_ff d_model",
        },
    ),
    "lora": Entry(
        "Llama 3 8B with LoRA by peft",
        lora,
        text(64, 4096),
        8030261248 + 32 * 16 * (4096 + 4096 + 4096 + 1024),
        (32,),
        {"base_model/model/model/embed_tokens/weight": "vocab d_model"},
    ),
}
