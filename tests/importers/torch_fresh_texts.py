"""More modules and losses as people write them: texts, speech, graphs, tables; and `FRESH`, all of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.importers.torch_fresh import (
    Block,
    Script,
    attention_unet,
    dino,
    efficientnet,
    mae,
    mobilevit,
    pixart,
    vqvae,
)

WORDS = 48


# -- RWKV-4: time mixing as a loop over the tokens -----------------------------------------------------------


class TimeMix(nn.Module):
    def __init__(self, dim: int, layer: int, layers: int) -> None:
        super().__init__()
        ratio = layer / max(layers - 1, 1)
        self.time_decay = nn.Parameter(-5 + 8 * (torch.arange(dim) / (dim - 1)) ** (0.7 + 1.3 * ratio))
        self.time_first = nn.Parameter(torch.ones(dim) * math.log(0.3))
        x = (torch.arange(dim) / dim)[None, None]
        self.time_mix_k = nn.Parameter(x**0.5)
        self.time_mix_v = nn.Parameter(x + 0.3 * ratio)
        self.time_mix_r = nn.Parameter(x**0.25)
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        xx = self.time_shift(x)
        k = self.key(x * self.time_mix_k + xx * (1 - self.time_mix_k))
        v = self.value(x * self.time_mix_v + xx * (1 - self.time_mix_v))
        r = self.receptance(x * self.time_mix_r + xx * (1 - self.time_mix_r))
        w, u = -torch.exp(self.time_decay), self.time_first
        aa, bb = torch.zeros(b, c, device=x.device), torch.zeros(b, c, device=x.device)
        pp = torch.full((b, c), -1e38, device=x.device)
        out = []
        for i in range(t):
            kk, vv = k[:, i], v[:, i]
            ww = u + kk
            p = torch.maximum(pp, ww)
            e1, e2 = torch.exp(pp - p), torch.exp(ww - p)
            out.append((e1 * aa + e2 * vv) / (e1 * bb + e2))
            ww = pp + w
            p = torch.maximum(ww, kk)
            e1, e2 = torch.exp(ww - p), torch.exp(kk - p)
            aa, bb, pp = e1 * aa + e2 * vv, e1 * bb + e2, p
        return self.output(torch.sigmoid(r) * torch.stack(out, dim=1))


class ChannelMix(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.time_mix_k, self.time_mix_r = (nn.Parameter(torch.rand(1, 1, dim)) for _ in range(2))
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key, self.value = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        xx = self.time_shift(x)
        xk = x * self.time_mix_k + xx * (1 - self.time_mix_k)
        xr = x * self.time_mix_r + xx * (1 - self.time_mix_r)
        return torch.sigmoid(self.receptance(xr)) * self.value(torch.square(torch.relu(self.key(xk))))


class RWKV(nn.Module):
    def __init__(self, dim: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, dim)
        self.blocks = nn.ModuleList()
        for i in range(layers):
            parts = {"ln1": nn.LayerNorm(dim), "ln2": nn.LayerNorm(dim), "ffn": ChannelMix(dim)}
            self.blocks.append(nn.ModuleDict(parts | {"att": TimeMix(dim, i, layers)}))
        self.ln_out, self.head = nn.LayerNorm(dim), nn.Linear(dim, WORDS, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.emb(idx)
        for block in self.blocks:
            x = x + block.att(block.ln1(x))
            x = x + block.ffn(block.ln2(x))
        logits = self.head(self.ln_out(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def words(rows: int, length: int = 12) -> torch.Tensor:
    return torch.randint(1, WORDS, (rows, length))


def rwkv(rows: int = 8) -> Script:
    return RWKV(), {"idx": words(rows, 8), "targets": words(rows, 8)}


# -- RetNet: retention with a decay per head, xPos -----------------------------------------------------------


class Retention(nn.Module):
    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.key_dim = heads, dim // heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.g_proj = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.out_proj = nn.Linear(2 * dim, dim, bias=False)
        self.group_norm = nn.RMSNorm(2 * dim // heads, eps=1e-6, elementwise_affine=False)
        angle = 1.0 / (10000 ** torch.linspace(0, 1, self.key_dim // 2))
        self.register_buffer("angle", angle.unsqueeze(-1).repeat(1, 2).flatten())
        self.register_buffer("decay", torch.log(1 - 2 ** (-5 - torch.arange(heads, dtype=torch.float))))

    def rotate(self, x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        x1, x2 = x[:, :, :, ::2], x[:, :, :, 1::2]
        return x * cos + torch.stack((-x2, x1), dim=-1).flatten(-2) * sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        index = torch.arange(n).to(self.decay)
        sin, cos = torch.sin(index[:, None] * self.angle), torch.cos(index[:, None] * self.angle)
        mask = torch.tril(torch.ones(n, n).to(self.decay))
        mask = torch.masked_fill(index[:, None] - index[None, :], ~mask.bool(), float("inf"))
        mask = torch.nan_to_num(torch.exp(mask * self.decay[:, None, None]))
        mask = mask / mask.sum(dim=-1, keepdim=True).sqrt()
        q = self.q_proj(x).view(b, n, self.heads, self.key_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.heads, self.key_dim).transpose(1, 2) * self.key_dim**-0.5
        v = self.v_proj(x).view(b, n, self.heads, -1).transpose(1, 2)
        qk = self.rotate(q, sin, cos) @ self.rotate(k, sin, cos).transpose(-1, -2) * mask
        qk = qk / qk.detach().sum(dim=-1, keepdim=True).abs().clamp(min=1)
        out = self.group_norm((qk @ v).transpose(1, 2)).reshape(b, n, -1)
        return self.out_proj(F.silu(self.g_proj(x)) * out)


class RetNet(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim)
        self.retentions = nn.ModuleList([Retention(dim) for _ in range(layers)])
        self.ffns = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)) for _ in range(layers)]
        )
        self.norms1 = nn.ModuleList([nn.LayerNorm(dim) for _ in range(layers)])
        self.norms2 = nn.ModuleList([nn.LayerNorm(dim) for _ in range(layers)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for i in range(len(self.ffns)):
            y = self.retentions[i](self.norms1[i](x)) + x
            x = self.ffns[i](self.norms2[i](y)) + y
        return F.cross_entropy((x @ self.embed.weight.T).transpose(1, 2), labels)


def retnet(rows: int = 8) -> Script:
    return RetNet(), {"ids": words(rows), "labels": words(rows)}


# -- Perceiver: latents that look at everything --------------------------------------------------------------


class PreNormAttention(nn.Module):
    def __init__(self, query: int, context: int | None, heads: int = 2, dim_head: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(query)
        self.norm_context = None if context is None else nn.LayerNorm(context)
        self.scale, self.heads = dim_head**-0.5, heads
        self.to_q = nn.Linear(query, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(context or query, 2 * heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, query)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(x)
        context = x if context is None else self.norm_context(context)
        b, n, _ = x.shape
        q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.reshape(b, t.shape[1], self.heads, -1).transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        sim = torch.einsum("b i d, b j d -> b i j", q, k) * self.scale
        out = torch.einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
        return self.to_out(out.unflatten(0, (b, self.heads)).transpose(1, 2).reshape(b, n, -1))


class GEGLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gates = x.chunk(2, dim=-1)
        return x * F.gelu(gates)


class Perceiver(nn.Module):
    def __init__(self, bands: int = 4, latents: int = 8, dim: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.bands = bands
        inner = 3 + 2 * (2 * bands + 1)
        self.latents = nn.Parameter(torch.randn(latents, dim))

        def feed() -> nn.Module:
            return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 8 * dim), GEGLU(), nn.Linear(4 * dim, dim))

        cross, own = PreNormAttention(dim, inner), PreNormAttention(dim, None)
        shared = feed(), feed()
        self.layers = nn.ModuleList(
            [nn.ModuleList([cross, shared[0], own, shared[1]]) for _ in range(depth)]  # weights are shared
        )
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 10))

    def fourier(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(-1)
        scales = torch.linspace(1.0, 5.0, self.bands, device=x.device, dtype=x.dtype)
        y = x * scales[(*((None,) * (len(x.shape) - 1)), Ellipsis)] * math.pi
        return torch.cat([y.sin(), y.cos(), x], dim=-1)

    def forward(self, data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        b, *axis, _ = data.shape
        pos = [torch.linspace(-1.0, 1.0, steps=size, device=data.device) for size in axis]
        enc = self.fourier(torch.stack(torch.meshgrid(*pos, indexing="ij"), dim=-1)).flatten(-2)
        data = torch.cat((data, enc.expand(b, *enc.shape)), dim=-1).flatten(1, 2)
        x = self.latents.expand(b, -1, -1)
        for cross, cross_ff, own, own_ff in self.layers:
            x = cross(x, data) + x
            x = cross_ff(x) + x
            x = own(x) + x
            x = own_ff(x) + x
        return F.cross_entropy(self.to_logits(x.mean(dim=-2)), label)


def perceiver(rows: int = 8) -> Script:
    return Perceiver(), {"data": torch.randn(rows, 6, 6, 3), "label": torch.randint(0, 10, (rows,))}


# -- wav2vec 2.0 with CTC ------------------------------------------------------------------------------------


class Wav2Vec2CTC(nn.Module):
    def __init__(self, dim: int = 16, layers: int = 3) -> None:
        super().__init__()
        convs, c = [], 1
        for i, (k, s) in enumerate([(10, 5), (3, 2), (3, 2)]):
            norm = [nn.GroupNorm(dim, dim)] if i == 0 else []
            convs.append(nn.Sequential(nn.Conv1d(c, dim, k, s, bias=False), *norm, nn.GELU()))
            c = dim
        self.feature_extractor = nn.ModuleList(convs)
        self.layer_norm, self.post_extract_proj = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.pos_conv = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(dim, dim, 8, padding=4, groups=4), name="weight", dim=2
        )
        self.layers = nn.ModuleList([Block(dim) for _ in range(layers)])
        self.final = nn.Linear(dim, 12)

    def lengths(self, n: torch.Tensor) -> torch.Tensor:
        for k, s in [(10, 5), (3, 2), (3, 2)]:
            n = torch.div(n - k, s, rounding_mode="floor") + 1
        return n

    def forward(self, wave: Any, wave_len: Any, text: Any, text_len: Any) -> torch.Tensor:
        x = wave.unsqueeze(1)
        for conv in self.feature_extractor:
            x = conv(x)
        x = self.post_extract_proj(self.layer_norm(x.transpose(1, 2)))
        n = self.lengths(wave_len)
        keep = torch.arange(x.shape[1], device=x.device)[None] < n[:, None]
        x = x.masked_fill(~keep.unsqueeze(-1), 0.0)
        pos = self.pos_conv(x.transpose(1, 2))[:, :, :-1]
        x = x + F.gelu(pos).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        logp = self.final(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logp, text, n, text_len, blank=0, reduction="mean", zero_infinity=True)


def wav2vec(rows: int = 8) -> Script:
    wave_len = torch.tensor([400, 380, 360, 400] * (rows // 4))
    batch = {"wave": torch.randn(rows, 400), "wave_len": wave_len, "text": torch.randint(1, 12, (rows, 5))}
    return Wav2Vec2CTC(), batch | {"text_len": torch.tensor([5, 4, 3, 5] * (rows // 4))}


# -- graph attention with scatters ---------------------------------------------------------------------------


class GATConv(nn.Module):
    def __init__(self, c_in: int, c_out: int, heads: int) -> None:
        super().__init__()
        self.heads, self.out = heads, c_out
        self.lin = nn.Linear(c_in, heads * c_out, bias=False)
        self.att_src = nn.Parameter(torch.randn(1, heads, c_out) * 0.3)
        self.att_dst = nn.Parameter(torch.randn(1, heads, c_out) * 0.3)
        self.bias = nn.Parameter(torch.zeros(heads * c_out))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        src, dst = edge_index
        h = self.lin(x).view(-1, self.heads, self.out)
        alpha = (h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst]
        alpha = F.leaky_relu(alpha, 0.2)
        index = dst.unsqueeze(-1).expand_as(alpha)
        top = alpha.new_full((n, self.heads), float("-inf"))
        top = top.scatter_reduce(0, index, alpha, reduce="amax", include_self=True).detach()
        alpha = (alpha - top[dst]).exp()
        total = alpha.new_zeros(n, self.heads).scatter_add_(0, index, alpha)
        alpha = alpha / (total[dst] + 1e-16)
        out = h.new_zeros(n, self.heads, self.out)
        out.index_add_(0, dst, h[src] * alpha.unsqueeze(-1))
        return out.flatten(1) + self.bias


class GraphNet(nn.Module):
    def __init__(self, features: int = 12, hidden: int = 8) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GATConv(features, hidden, 4), GATConv(4 * hidden, hidden, 4)])
        self.readout = nn.Linear(4 * hidden, 3)

    def forward(self, x: Any, edge_index: Any, graph: Any, y: Any) -> torch.Tensor:
        for conv in self.convs:
            x = F.elu(conv(x, edge_index))
        size = y.shape[0]
        pooled = x.new_zeros(size, x.size(1)).index_add(0, graph, x)
        count = x.new_zeros(size).index_add(0, graph, torch.ones_like(graph, dtype=x.dtype)).clamp(min=1)
        return F.cross_entropy(self.readout(pooled / count.unsqueeze(-1)), y)


def graphs(rows: int = 8) -> Script:
    nodes, edges = 6, 14
    graph = torch.arange(rows).repeat_interleave(nodes)
    start = (torch.arange(rows) * nodes).repeat_interleave(edges)
    edge_index = torch.randint(0, nodes, (2, rows * edges)) + start
    loops = torch.arange(rows * nodes).expand(2, -1)
    batch = {"x": torch.randn(rows * nodes, 12), "edge_index": torch.cat([edge_index, loops], 1)}
    return GraphNet(), batch | {"graph": graph, "y": torch.randint(0, 3, (rows,))}


# -- TabTransformer ------------------------------------------------------------------------------------------


class TabTransformer(nn.Module):
    def __init__(
        self, categories: tuple[int, ...] = (10, 5, 6, 5), continuous: int = 6, dim: int = 16
    ) -> None:
        super().__init__()
        offset = F.pad(torch.tensor(list(categories)), (1, 0), value=0).cumsum(dim=-1)[:-1]
        self.register_buffer("categories_offset", offset)
        self.category_embed = nn.Embedding(sum(categories), dim - 2)
        self.shared_category_embed = nn.Parameter(torch.randn(len(categories), 2) * 0.02)
        self.register_buffer(
            "continuous_mean_std", torch.stack([torch.zeros(continuous), torch.ones(continuous)], 1)
        )
        self.norm = nn.LayerNorm(continuous)
        self.layers = nn.ModuleList([Block(dim) for _ in range(3)])
        size = dim * len(categories) + continuous
        self.mlp = nn.Sequential(nn.Linear(size, 64), nn.SELU(), nn.Linear(64, 1))

    def forward(self, x_categ: Any, x_cont: Any, y: Any) -> torch.Tensor:
        x_categ = self.category_embed(x_categ + self.categories_offset)
        shared = self.shared_category_embed.unsqueeze(0).expand(x_categ.shape[0], -1, -1)
        x = torch.cat((x_categ, shared), dim=-1)
        for layer in self.layers:
            x = layer(x)
        mean, std = self.continuous_mean_std.unbind(dim=-1)
        x = torch.cat((x.flatten(1), self.norm((x_cont - mean) / std)), dim=-1)
        weight = torch.where(y > 0.5, 2.0, 1.0)
        return F.binary_cross_entropy_with_logits(self.mlp(x).squeeze(-1), y, weight=weight)


def tables(rows: int = 8) -> Script:
    batch = {"x_categ": torch.randint(0, 5, (rows, 4)), "x_cont": torch.randn(rows, 6)}
    return TabTransformer(), batch | {"y": torch.randint(0, 2, (rows,)).float()}


# -- sequence to sequence: a packed LSTM, Bahdanau's attention, teacher forcing -----------------------------


class Seq2Seq(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(WORDS, dim, 0), nn.Embedding(WORDS, dim, 0)
        self.encoder = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.bridge_h, self.bridge_c = nn.Linear(2 * dim, dim), nn.Linear(2 * dim, dim)
        self.cell = nn.LSTMCell(3 * dim, dim)
        self.attn, self.v = nn.Linear(3 * dim, dim), nn.Linear(dim, 1, bias=False)
        self.out = nn.Linear(4 * dim, WORDS)

    def forward(self, src: Any, src_len: Any, tgt: Any) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.src_embed(src), src_len.cpu(), batch_first=True, enforce_sorted=False
        )
        memory, (h, c) = self.encoder(packed)
        memory, _ = pad_packed_sequence(memory, batch_first=True, total_length=src.shape[1])
        h = torch.tanh(self.bridge_h(torch.cat((h[-2], h[-1]), dim=1)))
        c = torch.tanh(self.bridge_c(torch.cat((c[-2], c[-1]), dim=1)))
        mask, outputs = src != 0, []
        for t in range(tgt.shape[1] - 1):
            query = h.unsqueeze(1).repeat(1, src.shape[1], 1)
            score = self.v(torch.tanh(self.attn(torch.cat((query, memory), dim=2)))).squeeze(2)
            a = F.softmax(score.masked_fill(mask == 0, -1e10), dim=1)
            context = torch.bmm(a.unsqueeze(1), memory).squeeze(1)
            x = self.tgt_embed(tgt[:, t])
            h, c = self.cell(torch.cat((x, context), dim=1), (h, c))
            outputs.append(self.out(torch.cat((h, context, x), dim=1)))
        logits = torch.stack(outputs, 1)
        return F.cross_entropy(logits.reshape(-1, WORDS), tgt[:, 1:].reshape(-1), ignore_index=0)


def seq2seq(rows: int = 8) -> Script:
    src, lengths = words(rows, 7), torch.tensor([7, 5, 6, 4] * (rows // 4))
    src[torch.arange(7)[None] >= lengths[:, None]] = 0
    return Seq2Seq(), {"src": src, "src_len": lengths, "tgt": words(rows, 6)}


# -- a mixture with capacity, as Switch and GShard -----------------------------------------------------------


class SwitchFFN(nn.Module):
    def __init__(self, dim: int, experts: int = 4, factor: float = 1.25) -> None:
        super().__init__()
        self.experts, self.factor = experts, factor
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, 2 * dim) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * dim, dim) * dim**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        capacity = max(int(self.factor * math.ceil(len(x) / self.experts)), 4)
        gates = F.softmax(self.gate(x).float(), dim=1)
        mask = F.one_hot(torch.argmax(gates, dim=1), num_classes=self.experts)
        me, ce = torch.mean(gates, dim=0), torch.mean(mask.float(), dim=0)
        l_aux = torch.sum(me * ce) * self.experts
        locations = torch.cumsum(mask, dim=0) - 1
        mask = mask * torch.lt(locations, capacity)
        place = torch.sum(locations * mask, dim=1)
        gates = gates * mask.float()
        combine = torch.einsum("se,sc->sec", gates, F.one_hot(place, num_classes=capacity).float())
        dispatched = torch.einsum("sec,sm->ecm", combine.bool().type_as(x), x)
        h = torch.einsum("ech,ehm->ecm", F.relu(torch.einsum("ecm,emh->ech", dispatched, self.w1)), self.w2)
        return torch.einsum("sec,ecm->sm", combine.type_as(x), h).reshape(shape), l_aux


class SwitchLM(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, dim), nn.Linear(dim, WORDS)
        self.attns = nn.ModuleList([Block(dim, 2) for _ in range(2)])
        self.ffns = nn.ModuleList([SwitchFFN(dim) for _ in range(2)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, aux = self.embed(ids), []
        for attn, ffn in zip(self.attns, self.ffns, strict=True):
            h, l_aux = ffn(attn(x))
            x = x + h
            aux.append(l_aux)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.01 * sum(aux)


def switch(rows: int = 8) -> Script:
    return SwitchLM(), {"ids": words(rows), "labels": words(rows)}


# -- ColBERT: late interaction, negatives of the batch -------------------------------------------------------


class ColBERT(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.bert = nn.ModuleDict({"embed": nn.Embedding(WORDS, dim), "pos": nn.Embedding(16, dim)})
        self.layers = nn.ModuleList([Block(dim) for _ in range(3)])
        self.linear = nn.Linear(dim, 8, bias=False)

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.bert["embed"](ids) + self.bert["pos"](torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.linear(x), p=2, dim=2)

    def forward(self, query: Any, doc: Any, doc_mask: Any) -> torch.Tensor:
        q, d = self.encode(query), self.encode(doc)
        scores = torch.einsum("qld,bkd->qblk", q, d)
        scores = scores.masked_fill(~doc_mask[None, :, None, :].bool(), -9999.0)
        scores = scores.max(dim=-1).values.sum(dim=-1)
        labels = torch.arange(scores.shape[0], device=scores.device)
        return F.cross_entropy(scores / 0.5, labels)


def colbert(rows: int = 8) -> Script:
    mask = (torch.arange(12) < 9).long().expand(rows, -1).clone()
    return ColBERT(), {"query": words(rows, 6), "doc": words(rows), "doc_mask": mask}


# -- preferences and policies: DPO with two passes, GRPO -----------------------------------------------------


class TinyLM(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, dim), nn.Embedding(16, dim)
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(dim, 4, 64, 0.0, batch_first=True, norm_first=True)
                for _ in range(layers)
            ]
        )
        self.norm, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, WORDS, bias=False)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.norm(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.hidden(ids))


def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return selected - torch.logsumexp(logits, dim=-1)


class DPOTrainer(nn.Module):
    def __init__(self, beta: float = 0.1, simpo_gamma: float = 0.0) -> None:
        super().__init__()
        self.model = TinyLM()
        self.ref_model = copy.deepcopy(self.model).eval()
        for p in self.ref_model.parameters():
            p.requires_grad_(False)
        self.beta, self.gamma = beta, simpo_gamma

    def logps(self, model: nn.Module, ids: Any, mask: Any, average: bool = False) -> Any:
        logits = model(ids)[:, :-1, :]
        labels = torch.where(mask.bool(), ids, -100)[:, 1:].clone()
        loss_mask = labels != -100
        labels[labels == -100] = 0
        per_token = selective_log_softmax(logits, labels)
        total = (per_token * loss_mask).sum(-1)
        return total / loss_mask.sum(-1) if average else total

    def forward(self, chosen: Any, chosen_mask: Any, rejected: Any, rejected_mask: Any) -> torch.Tensor:
        pi_c = self.logps(self.model, chosen, chosen_mask)
        pi_r = self.logps(self.model, rejected, rejected_mask)
        with torch.no_grad():
            ref_c = self.logps(self.ref_model, chosen, chosen_mask)
            ref_r = self.logps(self.ref_model, rejected, rejected_mask)
        logits = (pi_c - pi_r) - (ref_c - ref_r)
        losses = -F.logsigmoid(self.beta * logits) * 0.9 - F.logsigmoid(-self.beta * logits) * 0.1
        self.rewards = (self.beta * (pi_c - ref_c).detach() > self.beta * (pi_r - ref_r).detach()).float()
        return losses.mean()


def dpo(rows: int = 8) -> Script:
    batch = {}
    for name, keep in (("chosen", 10), ("rejected", 8)):
        batch[name] = words(rows)
        batch[f"{name}_mask"] = ((torch.arange(12) >= 3) & (torch.arange(12) < keep)).long().repeat(rows, 1)
    return DPOTrainer(), batch


class GRPO(nn.Module):
    def __init__(self, beta: float = 0.04, low: float = 0.2, high: float = 0.28, group: int = 4) -> None:
        super().__init__()
        self.policy, self.beta, self.low, self.high, self.group = TinyLM(), beta, low, high, group

    def forward(self, ids: Any, mask: Any, rewards: Any, old: Any, ref: Any) -> torch.Tensor:
        grouped = rewards.view(-1, self.group)
        mean = grouped.mean(dim=1).repeat_interleave(self.group, dim=0)
        std = grouped.std(dim=1).repeat_interleave(self.group, dim=0)
        advantages = (rewards - mean) / (std + 1e-4)
        logits = self.policy(ids)[:, :-1] / 0.9
        logps = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        per_token_kl = torch.exp(ref - logps) - (ref - logps) - 1
        ratio = torch.exp(logps - old)
        clipped = torch.clamp(ratio, 1 - self.low, 1 + self.high)
        adv = advantages.unsqueeze(1)
        per_token_loss = -torch.min(ratio * adv, clipped * adv) + self.beta * per_token_kl
        return ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def grpo(rows: int = 8) -> Script:
    mask = (torch.arange(11) >= 3).float().repeat(rows, 1)
    old = -torch.rand(rows, 11) * 4
    batch = {"ids": words(rows), "mask": mask, "rewards": torch.rand(rows), "old": old}
    return GRPO(), batch | {"ref": old + 0.1 * torch.randn(rows, 11)}


# -- Medusa: heads that speak of later tokens ----------------------------------------------------------------


class ResBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(dim, dim), nn.SiLU()
        nn.init.normal_(self.linear.weight, std=0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(x))


class Medusa(nn.Module):
    def __init__(self, heads: int = 3, dim: int = 32) -> None:
        super().__init__()
        self.base = TinyLM(dim)
        self.medusa_head = nn.ModuleList(
            [nn.Sequential(ResBlock(dim), nn.Linear(dim, WORDS, bias=False)) for _ in range(heads)]
        )

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.base.hidden(ids)
        logits = torch.stack([self.base.lm_head(hidden), *(head(hidden) for head in self.medusa_head)], dim=0)
        loss = torch.zeros((), device=ids.device)
        for i in range(logits.shape[0]):
            one = logits[i, :, : -(1 + i)].contiguous().view(-1, logits.shape[-1])
            want = labels[..., 1 + i :].contiguous().view(-1)
            loss_i = F.cross_entropy(one, want, ignore_index=-100)
            loss = loss + loss_i * 0.8**i
        return loss


def medusa(rows: int = 8) -> Script:
    labels = words(rows)
    labels[:, :2] = -100
    return Medusa(), {"ids": words(rows), "labels": labels}


# -- LoRA by peft on Qwen ------------------------------------------------------------------------------------


def qwen_lora(rows: int = 8) -> Script:
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
        modules_to_save=["lm_head"],
        use_rslora=True,
        init_lora_weights=False,
    )
    ids = words(rows)
    labels = ids.clone()
    labels[:, :3] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return get_peft_model(Qwen2ForCausalLM(config), lora), batch


FRESH: dict[str, Callable[[int], Script]] = {
    "EfficientNet": efficientnet,
    "MobileViT": mobilevit,
    "attention U-Net": attention_unet,
    "VQ-VAE": vqvae,
    "MAE": mae,
    "DINO": dino,
    "PixArt": pixart,
    "RWKV": rwkv,
    "RetNet": retnet,
    "Perceiver": perceiver,
    "wav2vec 2.0, CTC": wav2vec,
    "graph attention": graphs,
    "TabTransformer": tables,
    "seq2seq": seq2seq,
    "Switch, capacity": switch,
    "ColBERT": colbert,
    "DPO, two passes": dpo,
    "GRPO": grpo,
    "Medusa": medusa,
    "Qwen, LoRA": qwen_lora,
}
"""Name -> (rows -> a module, and its batch)."""
