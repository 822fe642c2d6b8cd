"""Small PyTorch modules, each with a batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import layoutopt

Given = tuple[nn.Module, dict[str, torch.Tensor]]


def llama(kind: str = "llama", tied: bool = False, layers: int = 2) -> Given:
    """Of transformers, with padding in half of the rows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    more: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": 64, "head_dim": 8}
    more["max_position_embeddings"] = 16
    if kind == "qwen3_moe":
        more |= {"num_experts": 8, "moe_intermediate_size": 16, "experts_implementation": "grouped_mm"}
        more |= {"num_experts_per_tok": 2}
    config = AutoConfig.for_model(kind, **sizes, **more, tie_word_embeddings=tied, use_cache=False)
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (8, 16))
    labels = ids.clone()
    labels[:3, 5:] = -100
    labels[6, 12:] = -100
    return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": labels}


def gpt2() -> Given:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (8, 16))
    module = GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0))
    return module, {"input_ids": ids, "labels": ids.clone()}


def images() -> Given:
    """A classifier of images by transformers, of five layers."""
    from transformers import ViTConfig, ViTForImageClassification

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 5}
    torch.manual_seed(0)
    module = ViTForImageClassification(ViTConfig(**sizes, **off, image_size=16, patch_size=8, num_labels=8))
    return module, {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.arange(8)}


class Mixer(nn.Module):
    def __init__(self, width: int = 32, tokens: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_tokens": nn.LayerNorm(width),
                    "tokens_in": nn.Linear(tokens, 64),
                    "tokens_out": nn.Linear(64, tokens),
                    "norm": nn.LayerNorm(width),
                    "wide": nn.Linear(width, 128),
                    "narrow": nn.Linear(128, width),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for b in self.blocks:
            mixed = functional.gelu(b["tokens_in"](b["norm_tokens"](x).transpose(1, 2)))
            x = x + b["tokens_out"](mixed).transpose(1, 2)
            x = x + b["narrow"](functional.gelu(b["wide"](b["norm"](x))))
        return functional.cross_entropy(self.head(x.mean(1)), y)


def mixer() -> Given:
    torch.manual_seed(0)
    return Mixer(), {"x": torch.randn(8, 16, 32), "y": torch.randint(0, 8, (8,))}


class Convolutions(nn.Module):
    """With batch normalisation."""

    def __init__(self, channels: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
            for _ in range(layers)
        )
        self.head = nn.Linear(channels, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), y)


class NormByCall(nn.Module):
    """Of no class of PyTorch's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.mean, self.var, self.scale, training=self.training)


class OwnNorm(nn.BatchNorm2d):
    """Without PyTorch's forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        known = input, self.weight, self.bias, self.running_mean, self.running_var
        return torch.batch_norm(*known, self.training, self.momentum, self.eps, False)


class NormRunAgain(NormByCall):
    """Recomputed by its own code."""

    def __init__(self, channels: int, reentrant: bool) -> None:
        super().__init__(channels)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def convolutions() -> Given:
    torch.manual_seed(0)
    module = Convolutions(layers=7)
    module.layers[5][1], module.layers[6][1] = NormRunAgain(16, False), NormRunAgain(16, True)
    module.layers[1][1] = nn.BatchNorm2d(16, affine=False, momentum=0.5)
    module.layers[3][1], module.layers[4][1] = NormByCall(16), OwnNorm(16)
    module.layers[2][1] = nn.BatchNorm2d(16, track_running_stats=False)
    return module, {"x": torch.randn(8, 3, 8, 8), "y": torch.randint(0, 8, (8,))}


class Encoder(nn.Module):
    """Convolutions of growing widths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(c, 2 * c, 3, stride=2, padding=1) for c in (3, 6, 12))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return functional.cross_entropy(x.mean((2, 3)), y)


class Perceptron(nn.Module):
    """A part of the parameters is frozen, and a norm of d_ff lies between products if `normed`."""

    def __init__(self, width: int = 32, inner: int = 64, layers: int = 4, normed: bool = False) -> None:
        super().__init__()
        between = [nn.LayerNorm(inner)] if normed else []
        self.first = nn.Linear(12, width)
        self.first.requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), *between, nn.GELU(), nn.Linear(inner, width))
            for _ in range(layers)
        )
        self.out = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return functional.mse_loss(self.out(x), y)


def perceptron(normed: bool = False) -> Given:
    torch.manual_seed(0)
    return Perceptron(normed=normed), {"x": torch.randn(16, 12), "y": torch.randn(16, 4)}


class Scalar(nn.Module):
    """A parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(12, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.linear(x) * self.scale, y)


def scalar() -> Given:
    torch.manual_seed(0)
    return Scalar(), {"x": torch.randn(16, 12), "y": torch.randn(16, 4)}


class Literal(nn.Module):
    """Attention with the number of heads written into its code."""

    def __init__(self, width: int = 32, heads: int = 4, rest: int = 0) -> None:
        super().__init__()
        self.heads, self.rest = heads, rest or width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            p(x).view(rows, length, self.heads, self.rest).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return functional.mse_loss(self.o(mixed.reshape(rows, length, -1)), y)


class Masked(Perceptron):
    """With a mean over a mask, which leaves some ranks nothing."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return ((self.out(x) - y).square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)


def masked() -> Given:
    torch.manual_seed(0)
    batch = {"x": torch.randn(16, 32), "y": torch.randn(16, 4), "mask": torch.arange(16) % 7 > 3}
    return Masked(), batch


def literal(rest: int = 0) -> Given:
    torch.manual_seed(0)
    return Literal(rest=rest), {"x": torch.randn(8, 6, 32), "y": torch.randn(8, 6, 32)}


class Biased(nn.Module):
    """Attention whose scores have a bias of each head, with gains inside of the heads and after them."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.each = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.bias = nn.Embedding(8, heads)
        self.inside, self.after = nn.Parameter(torch.ones(self.each)), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (p(x).view(rows, length, -1, self.each).transpose(1, 2) for p in (self.q, self.k, self.v))
        places = torch.arange(length)
        far = (places[:, None] - places[None, :]).abs().clamp(max=7)
        scores = (q * self.inside) @ k.transpose(2, 3) + self.bias(far).permute(2, 0, 1)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, -1)
        return x + self.o(mixed) * self.after


class Layers(nn.Module):
    """Layers between linear maps.

    Args:
      kept: the loss reads the results of all layers.
      places: an embedding of places, or "own": a parameter of this module.
    """

    def __init__(self, layer: Any, width: int = 32, kept: bool = False, places: str = "") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.kept = kept
        self.at = nn.Embedding(16, width) if places else None
        self.own = nn.Parameter(torch.ones(width)) if places == "own" else None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, kept = self.first(x), []
        if self.own is not None:
            x = x + self.own
        elif self.at is not None:
            x = x + self.at(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return functional.mse_loss(self.last(torch.stack(kept).mean(0) if self.kept else x), y)


def layered(layer: Any = Biased, length: int = 6, **more: Any) -> Given:
    torch.manual_seed(0)
    return Layers(layer, **more), {"x": torch.randn(8, length, 12), "y": torch.randn(8, length, 4)}


class Rereading(nn.Module):
    """Code that reads the weight of a module that it also calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(32, 16), nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = functional.linear(self.inner(self.table(ids)).relu(), self.table.weight)
        return functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


def rereading() -> Given:
    torch.manual_seed(0)
    return Rereading().double(), {"ids": torch.randint(32, (8, 4))}


MODULES: dict[str, Any] = {
    "llama": llama,
    "tied": lambda: llama(tied=True),
    "four layers": lambda: llama(layers=4),
    "images": images,
    "qwen3": lambda: llama("qwen3"),
    "mixture": lambda: llama("qwen3_moe"),
    "gpt2": gpt2,
    "mixer": mixer,
    "convolutions": convolutions,
    "encoder": lambda: (Encoder(), convolutions()[1]),
    "perceptron": perceptron,
    "masked": masked,
    "scalar": scalar,
    "rereading": rereading,
    "biased": layered,
}


@cache
def imported(name: str, **more: Any) -> tuple[Any, Given]:
    """A model of a module, and the module with its batch."""
    given = MODULES[name]()
    return layoutopt.from_torch(*given, **more), given
