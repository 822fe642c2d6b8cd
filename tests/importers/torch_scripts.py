"""Training steps as people write them: a module, its batch, and the loss of its outputs.

Each is plain PyTorch in the words of a public kind of script: nanoGPT, a LoRA finetune, a classifier of
images, a diffusion step, a speech model, direct preference optimization, CLIP, a generator, a value head, and
a mixture that is added up by hand.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROWS, LENGTH, WIDTH, WORDS = 8, 16, 64, 96


Script = tuple[nn.Module, dict[str, torch.Tensor]]
"""A module, and what its training loop calls it with."""


def words(*shape: int) -> torch.Tensor:
    return torch.randint(0, WORDS, shape or (ROWS, LENGTH))


# -- 1: nanoGPT ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = q.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = v.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList([Block() for _ in range(3)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def hidden(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.ln_f(x)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits = self.lm_head(self.hidden(idx))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def nanogpt() -> Script:
    return (GPT(), {"idx": words(), "targets": words()})


# -- 2: LoRA by hand -----------------------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: int = 8) -> None:
        super().__init__()
        self.base = base
        self.base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_B = nn.Parameter(torch.randn(base.out_features, rank) * 0.02)
        self.scaling = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.lora_A.t() @ self.lora_B.t()) * self.scaling


def lora() -> Script:
    model = GPT()
    for p in model.parameters():
        p.requires_grad = False
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn)
        block.mlp[0] = LoRA(block.mlp[0])
    return (model, {"idx": words(), "targets": words()})


# -- 3: a classifier of images -------------------------------------------------------------------------------


def drop_path(x: torch.Tensor, drop_prob: float = 0.0, training: bool = False) -> torch.Tensor:
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    random_tensor = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep_prob)
    return x * random_tensor.div_(keep_prob)


class LayerScale(nn.Module):
    def __init__(self, dim: int, init: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(init * torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class VisionAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class VisionBlock(nn.Module):
    def __init__(self, dim: int, rate: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.ls1, self.ls2 = VisionAttention(dim), LayerScale(dim), LayerScale(dim)
        self.fc1, self.fc2, self.rate = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + drop_path(self.ls1(self.attn(self.norm1(x))), self.rate, self.training)
        return x + drop_path(self.ls2(self.fc2(F.gelu(self.fc1(self.norm2(x))))), self.rate, self.training)


class VisionTransformer(nn.Module):
    def __init__(self, rate: float = 0.0, classes: int = 10) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 8, 8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*[VisionBlock(WIDTH, rate) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def images() -> Script:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    batch = {"image": torch.randn(ROWS, 3, 32, 32), "target": torch.randint(0, 10, (ROWS,))}

    class Classifier(VisionTransformer):
        def forward(self, image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return criterion(super().forward(image), target)

    return (Classifier(), batch)


# -- 4: a diffusion step -------------------------------------------------------------------------------------


def timestep_embedding(timesteps: torch.Tensor, dim: int) -> torch.Tensor:
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
    args = timesteps[:, None].float() * freqs[None].to(timesteps.device)
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, emb: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, c_in), nn.Conv2d(c_in, c_out, 3, padding=1)
        self.emb = nn.Linear(emb, c_out)
        self.norm2, self.conv2 = nn.GroupNorm(8, c_out), nn.Conv2d(c_out, c_out, 3, padding=1)
        self.skip = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.emb(F.silu(emb))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, c: int = 16) -> None:
        super().__init__()
        emb = 4 * c
        self.c = c
        self.time = nn.Sequential(nn.Linear(c, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.conv_in = nn.Conv2d(3, c, 3, padding=1)
        self.downs = nn.ModuleList([ResBlock(c, c, emb), ResBlock(c, 2 * c, emb)])
        self.down = nn.Conv2d(c, c, 3, stride=2, padding=1)
        self.mid = ResBlock(2 * c, 2 * c, emb)
        self.ups = nn.ModuleList([ResBlock(4 * c, c, emb), ResBlock(2 * c, c, emb)])
        self.norm, self.conv_out = nn.GroupNorm(8, c), nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        emb = self.time(timestep_embedding(t, self.c).to(x.dtype))
        h = self.conv_in(x)
        skips = [h0 := self.downs[0](h, emb)]
        h = self.downs[1](self.down(h0), emb)
        skips.append(h)
        h = self.mid(h, emb)
        h = self.ups[0](torch.cat([h, skips.pop()], dim=1), emb)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        h = self.ups[1](torch.cat([h, skips.pop()], dim=1), emb)
        return self.conv_out(F.silu(self.norm(h)))


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet()
        betas = torch.linspace(1e-4, 0.02, 100)
        self.register_buffer("alphas_cumprod", torch.cumprod(1.0 - betas, dim=0))

    def forward(self, x0: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        a = self.alphas_cumprod[t].view(-1, 1, 1, 1)
        noisy = a.sqrt() * x0 + (1 - a).sqrt() * noise
        return F.mse_loss(self.unet(noisy, t), noise)


def diffusion() -> Script:
    image = torch.randn(ROWS, 3, 16, 16)
    return (Diffusion(), {"x0": image, "noise": torch.randn_like(image), "t": torch.randint(0, 100, (ROWS,))})


# -- 5: a speech model of transformers -----------------------------------------------------------------------


def whisper() -> Script:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 128}
    more = {
        "vocab_size": WORDS,
        "num_mel_bins": 16,
        "max_source_positions": 32,
        "max_target_positions": LENGTH,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(
        **sizes, **more, **tokens, suppress_tokens=None, begin_suppress_tokens=None, dropout=0.0
    )
    model = WhisperForConditionalGeneration(config)
    model.freeze_encoder()
    labels = words()
    labels[:, LENGTH - 4 :] = -100
    return (model, {"input_features": torch.randn(ROWS, 16, 64), "labels": labels})


# -- 6: direct preference optimization -----------------------------------------------------------------------


class DPO(nn.Module):
    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.policy = GPT()
        self.reference = copy.deepcopy(self.policy).eval().requires_grad_(False)
        self.beta = beta

    def logps(self, model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = model(ids)[:, :-1]
        labels, mask = ids[:, 1:], mask[:, 1:]
        picked = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
        return (picked * mask).sum(-1)

    def forward(self, chosen: Any, rejected: Any, chosen_mask: Any, rejected_mask: Any) -> torch.Tensor:
        ids, mask = torch.cat([chosen, rejected]), torch.cat([chosen_mask, rejected_mask])
        policy = self.logps(self.policy, ids, mask)
        with torch.no_grad():
            reference = self.logps(self.reference, ids, mask)
        n = chosen.shape[0]
        logits = (policy[:n] - policy[n:]) - (reference[:n] - reference[n:])
        return -F.logsigmoid(self.beta * logits).mean()


def dpo() -> Script:
    mask = (torch.arange(LENGTH) < 12).long().expand(ROWS, -1).clone()
    batch = {"chosen": words(), "rejected": words(), "chosen_mask": mask, "rejected_mask": mask.clone()}
    return (DPO(), batch)


# -- 7: CLIP -------------------------------------------------------------------------------------------------


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = VisionTransformer(classes=32), GPT()
        self.text_projection = nn.Parameter(torch.randn(WIDTH, 32) * WIDTH**-0.5)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.text.hidden(text)
        t = x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection
        i, t = F.normalize(self.visual(image), dim=-1), F.normalize(t, dim=-1)
        logits = self.logit_scale.exp() * i @ t.t()
        labels = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def clip() -> Script:
    return (CLIP(), {"image": torch.randn(ROWS, 3, 32, 32), "text": words()})


# -- 8: a generator against a discriminator ------------------------------------------------------------------


class Adversaries(nn.Module):
    def __init__(self, z: int = 16, c: int = 16) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(z, 2 * c, 4, 1, 0, bias=False), nn.BatchNorm2d(2 * c), nn.ReLU(True),
            nn.ConvTranspose2d(2 * c, c, 4, 2, 1, bias=False), nn.BatchNorm2d(c), nn.ReLU(True),
            nn.ConvTranspose2d(c, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, c, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(c, 2 * c, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * c, 1, 4, 1, 0, bias=False),
        )  # fmt: skip

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        fake = self.generator(noise[:, :, None, None])
        d_real, d_fake = self.discriminator(real).view(-1), self.discriminator(fake.detach()).view(-1)
        loss_d = F.binary_cross_entropy_with_logits(d_real, torch.ones_like(d_real))
        loss_d = loss_d + F.binary_cross_entropy_with_logits(d_fake, torch.zeros_like(d_fake))
        g = torch.func.functional_call(
            self.discriminator, {k: v.detach() for k, v in self.discriminator.named_parameters()}, (fake,)
        ).view(-1)
        return loss_d + F.binary_cross_entropy_with_logits(g, torch.ones_like(g))


def adversaries() -> Script:
    return (Adversaries(), {"real": torch.randn(ROWS, 3, 16, 16), "noise": torch.randn(ROWS, 16)})


# -- 9: a policy with a value head ---------------------------------------------------------------------------


class ValueHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()
        self.v_head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Any, old: Any, advantages: Any, returns: Any, mask: Any) -> torch.Tensor:
        hidden = self.model.hidden(ids)
        logits, values = self.model.lm_head(hidden), self.v_head(hidden).squeeze(-1)
        logprob = torch.gather(F.log_softmax(logits[:, :-1], -1), -1, ids[:, 1:, None]).squeeze(-1)
        ratio = torch.exp(logprob - old)
        pg = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2))
        vf = 0.5 * (values[:, :-1] - returns) ** 2
        entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
        count = mask.sum()
        return (
            (pg * mask).sum() / count
            + 0.1 * (vf * mask).sum() / count
            - 0.01 * (entropy * mask).sum() / count
        )


def value_head() -> Script:
    shape = ROWS, LENGTH - 1
    mask = (torch.arange(LENGTH - 1) < 10).float().expand(ROWS, -1).clone()
    batch = {"ids": words(), "old": -torch.rand(shape) - 4, "advantages": torch.randn(shape)}
    return (ValueHead(), batch | {"returns": torch.randn(shape), "mask": mask})


# -- 10: a mixture that is added up by hand ------------------------------------------------------------------


class Mixture(nn.Module):
    def __init__(self, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
                for _ in range(experts)
            ]
        )
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = torch.topk(F.softmax(self.gate(flat), dim=-1), self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == i)
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, nth, None])
        return out.view_as(x)


def mixture() -> Script:
    model = GPT()
    for block in model.transformer.h:
        block.mlp = Mixture()
    return (model, {"idx": words(), "targets": words()})


SCRIPTS: dict[str, Callable[[], Script]] = {
    "nanoGPT": nanogpt,
    "LoRA": lora,
    "images": images,
    "diffusion": diffusion,
    "whisper": whisper,
    "DPO": dpo,
    "CLIP": clip,
    "GAN": adversaries,
    "value head": value_head,
    "mixture": mixture,
}
