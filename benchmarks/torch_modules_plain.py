"""Modules in plain PyTorch, at published sizes, written as public training scripts write them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class TokenLoss(nn.Module):
    """Cross entropy of the next token, around a module that returns logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.inner(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


# nanoGPT's style: one matrix for queries, keys and values, learned positions, tied embedding.
class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = heads, width, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, dropout)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.dropout(self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(
        self, vocab: int = 50304, length: int = 1024, layers: int = 12, heads: int = 12, width: int = 768
    ) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(length, width),
                "h": nn.ModuleList(GPTBlock(width, heads, 0.0) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](pos)
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


# PyTorch's own layers, as in its tutorial of translation.
class Translation(nn.Module):
    def __init__(self, vocab: int = 32000, width: int = 1024, heads: int = 16, layers: int = 6) -> None:
        super().__init__()
        self.width = width
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.transformer = nn.Transformer(width, heads, layers, layers, 4 * width, 0.1, batch_first=True)
        self.generator = nn.Linear(width, vocab)
        places = torch.zeros(512, width)
        self.register_buffer("places", places, persistent=False)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], device=tgt.device)
        x = self.source(src) * math.sqrt(self.width) + self.places[: src.shape[1]]
        y = self.target(tgt) * math.sqrt(self.width) + self.places[: tgt.shape[1]]
        logits = self.generator(self.transformer(x, y, tgt_mask=mask))
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=1)


# torchtitan's style: weights named wq, wk; rotary embedding by complex numbers; experts as grouped products.
def freqs_cis(dim: int, length: int, theta: float) -> torch.Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
    angles = torch.outer(torch.arange(length), freqs).float()
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * cis.view(1, x.size(1), 1, pairs.size(-1))).flatten(3).type_as(x)


def repeat_kv(x: torch.Tensor, times: int) -> torch.Tensor:
    rows, length, heads, dim = x.shape
    return (
        x[:, :, :, None, :].expand(rows, length, heads, times, dim).reshape(rows, length, heads * times, dim)
    )


class TitanAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim, self.n_rep = dim // heads, heads // kv_heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        bs, seqlen, _ = x.shape
        xq = rotated(self.wq(x).view(bs, seqlen, -1, self.head_dim), cis)
        xk = rotated(self.wk(x).view(bs, seqlen, -1, self.head_dim), cis)
        xv = self.wv(x).view(bs, seqlen, -1, self.head_dim)
        keys, values = repeat_kv(xk, self.n_rep), repeat_kv(xv, self.n_rep)
        q, k, v = (t.transpose(1, 2) for t in (xq, keys, values))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        return self.wo(out.view(bs, seqlen, -1))


class TitanFeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TitanBlock(nn.Module):
    def __init__(self, dim: int, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)

    def forward(self, x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), cis)
        return h + self.feed_forward(self.ffn_norm(h))


class TitanTransformer(nn.Module):
    def __init__(self, vocab: int, dim: int, blocks: list[nn.Module], cis: torch.Tensor) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.norm, self.output = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, vocab, bias=False)
        self.register_buffer("freqs_cis", cis, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis[: tokens.shape[1]])
        return self.output(self.norm(h))


def titan_llama3(
    dim: int = 4096, layers: int = 32, heads: int = 32, hidden: int = 14336, length: int = 8192
) -> nn.Module:
    """Llama 3, 8B by default."""
    blocks: list[nn.Module] = [
        TitanBlock(dim, TitanAttention(dim, heads, 8), TitanFeedForward(dim, hidden)) for _ in range(layers)
    ]
    return TokenLoss(TitanTransformer(128256, dim, blocks, freqs_cis(dim // heads, length, 500000.0)))


class LatentAttention(nn.Module):
    """Keys and values through a narrow latent vector, without that of queries."""

    def __init__(self, dim: int, heads: int, latent: int, nope: int, rope: int, value: int) -> None:
        super().__init__()
        self.n_heads, self.latent, self.nope, self.rope, self.value = heads, latent, nope, rope, value
        self.wq = nn.Linear(dim, heads * (nope + rope), bias=False)
        self.wkv_a = nn.Linear(dim, latent + rope, bias=False)
        self.kv_norm = nn.RMSNorm(latent, eps=1e-5)
        self.wkv_b = nn.Linear(latent, heads * (nope + value), bias=False)
        self.wo = nn.Linear(heads * value, dim, bias=False)

    def forward(self, x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        bsz, seqlen, _ = x.size()
        q = self.wq(x).view(bsz, seqlen, -1, self.nope + self.rope)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        q = torch.cat([q_nope, rotated(q_pe, cis)], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [self.latent, self.rope], dim=-1)
        k_pe = rotated(k_pe.unsqueeze(2), cis)
        kv = self.wkv_b(self.kv_norm(kv)).view(bsz, seqlen, -1, self.nope + self.value)
        k_nope, v = torch.split(kv, [self.nope, self.value], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n_heads, -1)], dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scale = (self.nope + self.rope) ** -0.5
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
        return self.wo(out.contiguous().view(bsz, seqlen, -1))


class GroupedExperts(nn.Module):
    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        own = x.bfloat16()
        h = F.silu(torch._grouped_mm(own, self.w1.bfloat16().transpose(-2, -1), offs=offsets))
        h = h * torch._grouped_mm(own, self.w3.bfloat16().transpose(-2, -1), offs=offsets)
        return torch._grouped_mm(h, self.w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)


class TitanMoE(nn.Module):
    def __init__(self, dim: int, hidden: int, experts: int, chosen: int, shared: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = experts, chosen
        self.experts = GroupedExperts(dim, hidden, experts)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.shared_experts = TitanFeedForward(dim, hidden * shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bs, slen, dim = x.shape
        x = x.view(-1, dim)
        scores = F.softmax(self.gate(x).to(torch.float32), dim=1)
        top_scores, selected = torch.topk(scores, k=self.top_k, dim=1)
        counts = torch.histc(selected.view(-1), bins=self.num_experts, min=0, max=self.num_experts)
        order = torch.argsort(selected.view(-1), stable=True)
        ordered_scores = top_scores.view(-1)[order]
        tokens = order // self.top_k
        indices = tokens.reshape(-1, 1).expand(-1, dim)
        routed = torch.gather(x, dim=0, index=indices)
        routed = (routed.to(torch.float32) * ordered_scores.reshape(-1, 1)).to(x.dtype)
        out = self.shared_experts(x).scatter_add(dim=0, index=indices, src=self.experts(routed, counts))
        return out.reshape(bs, slen, dim)


def titan_deepseek_v3(layers: int = 27, length: int = 4096) -> nn.Module:
    """DeepSeek-V3's architecture at the size of 16B."""
    dim, heads = 2048, 16

    def feed_forward(i: int) -> nn.Module:
        return TitanFeedForward(dim, 10944) if i < 1 else TitanMoE(dim, 1408, 64, 6, 2)

    blocks: list[nn.Module] = [
        TitanBlock(dim, LatentAttention(dim, heads, 512, 128, 64, 128), feed_forward(i))
        for i in range(layers)
    ]
    return TokenLoss(TitanTransformer(102400, dim, blocks, freqs_cis(64, length, 10000.0)))


# A transformer of latent images (DiT), conditioned by a scale and a shift of each block.
class DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        B, N, C = x.shape
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        h = self.norm1(x) * (1 + scale_a.unsqueeze(1)) + shift_a.unsqueeze(1)
        q, k, v = self.qkv(h).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
        x = x + gate_a.unsqueeze(1) * self.proj(h)
        h = self.norm2(x) * (1 + scale_m.unsqueeze(1)) + shift_m.unsqueeze(1)
        return x + gate_m.unsqueeze(1) * self.mlp(h)


def timestep_embedding(t: torch.Tensor, dim: int) -> torch.Tensor:
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class DiT(nn.Module):
    """DiT-XL/2 for latent images of 32 × 32 by default; the loss is that of the noise."""

    def __init__(self, width: int = 1152, layers: int = 28, heads: int = 16, size: int = 32) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(4, width, 2, stride=2)
        self.t_embedder = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.y_embedder = nn.Embedding(1001, width)
        self.pos_embed = nn.Parameter(torch.zeros(1, (size // 2) ** 2, width), requires_grad=False)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, 2 * 2 * 8)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(timestep_embedding(t, 256)) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c).chunk(2, dim=1)
        x = self.linear(self.norm_final(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))
        side = int(x.shape[1] ** 0.5)
        x = x.reshape(x.shape[0], side, side, 2, 2, 8)
        x = torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], 8, 2 * side, 2 * side)
        return F.mse_loss(x[:, :4], noise)


# A UNet of latent images as Stable Diffusion 1 has it: residual blocks, and attention to a text.
class ResBlock(nn.Module):
    def __init__(self, given: int, made: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, given), nn.Conv2d(given, made, 3, padding=1)
        self.time_emb_proj = nn.Linear(time, made)
        self.norm2, self.conv2 = nn.GroupNorm(32, made), nn.Conv2d(made, made, 3, padding=1)
        self.shortcut = nn.Identity() if given == made else nn.Conv2d(given, made, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(F.silu(t))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class CrossAttention(nn.Module):
    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k, self.to_v = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        B, N, C = x.shape
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        q, k, v = (t.view(B, -1, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


class SpatialTransformer(nn.Module):
    def __init__(self, width: int, context: int, heads: int = 8) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width, eps=1e-6)
        self.proj_in, self.proj_out = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.attn1 = CrossAttention(width, width, heads)
        self.attn2 = CrossAttention(width, context, heads)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.geglu, self.out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        B, C, H, W = x.shape
        h = self.proj_in(self.norm(x)).permute(0, 2, 3, 1).reshape(B, H * W, C)
        own = self.norm1(h)
        h = h + self.attn1(own, own)
        h = h + self.attn2(self.norm2(h), context)
        value, gate = self.geglu(self.norm3(h)).chunk(2, dim=-1)
        h = h + self.out(value * F.gelu(gate))
        return x + self.proj_out(h.reshape(B, H, W, C).permute(0, 3, 1, 2))


class UNetLayer(nn.Module):
    def __init__(self, given: int, made: int, time: int, context: int) -> None:
        super().__init__()
        self.res = ResBlock(given, made, time)
        self.attention = SpatialTransformer(made, context) if context else None

    def forward(self, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        x = self.res(x, t)
        return x if self.attention is None else self.attention(x, context)


class UNet(nn.Module):
    """Stable Diffusion 1.5's by default; the loss is that of the noise."""

    def __init__(self, base: int = 320, context: int = 768) -> None:
        super().__init__()
        widths, time = (base, 2 * base, 4 * base, 4 * base), 4 * base
        self.base = base
        self.time = nn.Sequential(nn.Linear(base, time), nn.SiLU(), nn.Linear(time, time))
        self.conv_in = nn.Conv2d(4, base, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
        kept, at = [base], base
        for i, width in enumerate(widths):
            for _ in range(2):
                self.down.append(UNetLayer(at, width, time, context if i < 3 else 0))
                at = width
                kept.append(at)
            if i < 3:
                self.shrink.append(nn.Conv2d(at, at, 3, stride=2, padding=1))
                kept.append(at)
        self.middle = nn.ModuleList([UNetLayer(at, at, time, context), UNetLayer(at, at, time, 0)])
        for i, width in reversed([*enumerate(widths)]):
            for _ in range(3):
                self.up.append(UNetLayer(at + kept.pop(), width, time, context if i < 3 else 0))
                at = width
            if i:
                self.grow.append(nn.Conv2d(at, at, 3, padding=1))
        self.norm_out, self.conv_out = nn.GroupNorm(32, base), nn.Conv2d(base, 4, 3, padding=1)

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        emb = self.time(timestep_embedding(t, self.base))
        x = self.conv_in(x)
        kept = [x]
        for i in range(4):
            for layer in self.down[2 * i : 2 * i + 2]:
                x = layer(x, emb, context)
                kept.append(x)
            if i < 3:
                x = self.shrink[i](x)
                kept.append(x)
        for layer in self.middle:
            x = layer(x, emb, context)
        for i in range(4):
            for layer in self.up[3 * i : 3 * i + 3]:
                x = layer(torch.cat([x, kept.pop()], dim=1), emb, context)
            if i < 3:
                x = self.grow[i](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.conv_out(F.silu(self.norm_out(x))), noise)


def on_meta(make: Any, **sizes: Any) -> nn.Module:
    """A module without values."""
    with torch.device("meta"):
        return make(**sizes)
