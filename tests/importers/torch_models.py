"""Small PyTorch modules, and the comparison of what is imported with PyTorch itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import layoutopt
import mesh_tf_core as mtf
from layoutopt.importers.torch.model import TorchModel
from mesh_tf_core.engines.lockstep import LockstepEngine

VOCAB, LENGTH, BATCH, CLASSES = 64, 16, 4, 10
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


class Convolutions(nn.Module):
    """A residual network with BatchNorm, pooling and a depthwise filter."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image, label):
        x = F.relu(self.norm(self.stem(image)))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 1).flatten(1)), label)


def tokens(length: int = LENGTH, device: str = "cpu") -> torch.Tensor:
    made = torch.randint(0, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(length))
    return made.to(device)


def _texts(config: Any, kind: Any = None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    module = transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    return module.train(), {"input_ids": tokens(), "labels": tokens()}


def _images(config: Any, kind: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    labels = torch.arange(BATCH) % CLASSES
    return kind(config).train(), {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": labels}


def llama(**more: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return _texts(transformers.LlamaConfig(**{**_DECODER, **more}))


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
    return _texts(transformers.GPT2Config(**sizes, **drops))


def qwen3() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return _texts(transformers.Qwen3Config(**_DECODER, head_dim=8))


def mixtral() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}
    return _texts(transformers.MixtralConfig(**_DECODER, **experts))


_CHOSEN = {**_DECODER, "experts_implementation": "grouped_mm", "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
_SMALL = {"num_experts": 8, "moe_intermediate_size": 16}
MIXTURES: Mapping[str, Any] = {
    "mixtral": transformers.MixtralConfig(**_CHOSEN, num_local_experts=4),
    "qwen3": transformers.Qwen3MoeConfig(**_CHOSEN, **_SMALL, head_dim=8, norm_topk_prob=True),
    "qwen2": transformers.Qwen2MoeConfig(**_CHOSEN, **_SMALL, shared_expert_intermediate_size=16),
    "gpt-oss": transformers.GptOssConfig(
        **{**_CHOSEN, "num_hidden_layers": 4}, head_dim=8, num_local_experts=4, sliding_window=8
    ),
    "deepseek-v2": transformers.DeepseekV2Config(**{**_CHOSEN, **_LATENT}, topk_method="greedy"),
    "deepseek-v3": transformers.DeepseekV3Config(**{**_CHOSEN, **_LATENT}, n_group=2, topk_group=1),
    "olmoe": transformers.OlmoeConfig(**_CHOSEN, num_experts=8),
}
"""Configurations of mixtures of experts by family."""


def gemma3() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Five layers with a window, then one without."""
    more = {"num_hidden_layers": 6, "head_dim": 8, "sliding_window": 8}
    return _texts(transformers.Gemma3TextConfig(**{**_DECODER, **more}))


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.BertConfig(vocab_size=VOCAB, max_position_embeddings=32, **_ENCODER)
    return _texts(config, transformers.BertForMaskedLM)


def vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=CLASSES, **_ENCODER)
    return _images(config, transformers.ViTForImageClassification)


def t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    config = transformers.T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0)
    module, batch = _texts(config, transformers.T5ForConditionalGeneration)
    return module, {**batch, "labels": tokens(12)}


def resnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": CLASSES}
    module, batch = _images(transformers.ResNetConfig(**sizes), transformers.ResNetForImageClassification)
    return module.double(), {**batch, "pixel_values": batch["pixel_values"].double()}


def perceptron() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Perceptron(), {"x": torch.randn(8, 12), "y": torch.arange(8) % CLASSES}


def convolutions() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    labels = torch.arange(BATCH) % CLASSES
    return Convolutions(), {"image": torch.randn(BATCH, 3, 16, 16), "label": labels}


MODULES: Mapping[str, tuple[Callable[[], Any], list[int]]] = {
    "llama": (llama, [3]),
    "gpt2": (gpt2, [3]),
    "qwen3": (qwen3, [3]),
    "mixtral": (mixtral, [3]),
    "bert": (bert, [3]),
    "vit": (vit, [3]),
    "t5": (t5, [2, 2]),
    "resnet": (resnet, []),
    "gemma3": (gemma3, [5]),
    "perceptron": (perceptron, []),
    "convolutions": (convolutions, [3]),
}
"""Name -> the module with its batch, and the layers of the loops that are found in it."""


def classified(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(outputs, batch["y"])


def numpy_of(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return x.numpy() if x.is_floating_point() else x.numpy().astype("int32")


def compared(
    module: nn.Module,
    batch: Mapping[str, torch.Tensor],
    loss: Callable[..., Any] | None = None,
    mesh: str = "data:1",
    layout: str = "",
) -> tuple[TorchModel, float]:
    """The imported model, and the largest relative difference of loss and gradients from PyTorch's."""
    model, off = differences(module, batch, loss, mesh, layout)
    return model, float(np.max([*off.values()]))  # NaN if one is


def differences(
    module: nn.Module,
    batch: Mapping[str, torch.Tensor],
    loss: Callable[..., Any] | None = None,
    mesh: str = "data:1",
    layout: str = "",
) -> tuple[TorchModel, dict[str, float]]:
    """The imported model, and the relative differences of loss and of gradients by parameter."""
    model = layoutopt.from_torch(module, dict(batch), loss=loss)
    graph = model.graph
    trained = [v.name for v in graph.variables.values() if v.trainable]
    slopes = mtf.gradients(model.loss, [graph.read(graph.variables[name]) for name in trained])
    outs = {name: d for name, d in zip(trained, slopes, strict=True) if d is not None}
    program = mtf.lower(graph, mtf.Mesh(mesh), mtf.Layout(layout), {"loss": model.loss, **outs})
    engine = LockstepEngine(program)
    engine.initialize()
    with np.errstate(invalid="ignore"):  # what a mask selects away, as the logarithm of 0
        found = engine.step({path: numpy_of(batch[path]) for path in program.feeds})
    own = {k: v for k, v in batch.items() if loss is None or k != "y"}
    module.zero_grad()
    outputs = module(**own)
    expected = loss(outputs, batch) if loss is not None else getattr(outputs, "loss", outputs)
    expected.backward()
    off = {"loss": abs(float(found["loss"]) / float(expected.detach()) - 1)}
    largest = max(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None)
    assert model.origin is not None
    for path, array in model.origin.parameters.items():
        if array.variable not in outs:
            continue
        got = np.asarray(found[array.variable])
        got = (got if array.layer is None else got[array.layer]).reshape(array.shape)
        wanted = module.get_parameter(path.replace("/", ".")).grad
        assert wanted is not None, path
        # The slope of a key's bias is 0 but for rounding.
        scale = max(float(wanted.abs().max()), largest / 100)
        off[path] = float(np.abs(got - wanted.numpy()).max()) / scale
    return model, off
