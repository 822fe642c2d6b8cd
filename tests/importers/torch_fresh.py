"""Modules and losses as people write them, after those of `torch_scripts`: images.

Each is plain PyTorch in the words of a public kind of code, at a small size. `FRESH` of `torch_fresh_texts`
has all of them: name -> (rows -> the module, and what its training loop calls it with).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Script = tuple[nn.Module, dict[str, torch.Tensor]]


# -- EfficientNet, as timm writes it -------------------------------------------------------------------------


def make_divisible(v: float, divisor: int = 8, min_value: int | None = None) -> int:
    min_value = min_value or divisor
    new_v = max(min_value, int(v + divisor / 2) // divisor * divisor)
    if new_v < 0.9 * v:
        new_v += divisor
    return new_v


class SqueezeExcite(nn.Module):
    def __init__(self, in_chs: int, rd_chs: int) -> None:
        super().__init__()
        self.conv_reduce = nn.Conv2d(in_chs, rd_chs, 1, bias=True)
        self.act1 = nn.SiLU(inplace=True)
        self.conv_expand = nn.Conv2d(rd_chs, in_chs, 1, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_se = x.mean((2, 3), keepdim=True)
        x_se = self.conv_expand(self.act1(self.conv_reduce(x_se)))
        return x * x_se.sigmoid()


class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self, num_features: int, apply_act: bool = True) -> None:
        super().__init__(num_features, eps=1e-3, momentum=0.01)
        self.drop = nn.Identity()
        self.act = nn.SiLU(inplace=True) if apply_act else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return self.act(self.drop(x))


class InvertedResidual(nn.Module):
    def __init__(self, in_chs: int, out_chs: int, kernel: int, stride: int, exp_ratio: float) -> None:
        super().__init__()
        mid_chs = make_divisible(in_chs * exp_ratio)
        self.has_skip = in_chs == out_chs and stride == 1
        self.conv_pw = nn.Conv2d(in_chs, mid_chs, 1, bias=False)
        self.bn1 = BatchNormAct2d(mid_chs)
        self.conv_dw = nn.Conv2d(
            mid_chs, mid_chs, kernel, stride, padding=kernel // 2, groups=mid_chs, bias=False
        )
        self.bn2 = BatchNormAct2d(mid_chs)
        self.se = SqueezeExcite(mid_chs, make_divisible(in_chs * 0.25, 4))
        self.conv_pwl = nn.Conv2d(mid_chs, out_chs, 1, bias=False)
        self.bn3 = BatchNormAct2d(out_chs, apply_act=False)
        self.drop_path = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        x = self.bn1(self.conv_pw(x))
        x = self.bn2(self.conv_dw(x))
        x = self.se(x)
        x = self.bn3(self.conv_pwl(x))
        if self.has_skip:
            x = self.drop_path(x) + shortcut
        return x


class EfficientNet(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv_stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.bn1 = BatchNormAct2d(16)
        self.blocks = nn.Sequential(
            nn.Sequential(InvertedResidual(16, 16, 3, 1, 1)),
            nn.Sequential(InvertedResidual(16, 24, 3, 2, 4), InvertedResidual(24, 24, 3, 1, 4)),
            nn.Sequential(InvertedResidual(24, 40, 5, 2, 4), *[InvertedResidual(40, 40, 5, 1, 4)] * 1),
        )
        self.conv_head = nn.Conv2d(40, 64, 1, bias=False)
        self.bn2 = BatchNormAct2d(64)
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(64, num_classes)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn2(self.conv_head(self.blocks(self.bn1(self.conv_stem(x)))))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.global_pool(self.forward_features(x)).flatten(1)
        logits = self.classifier(x)
        # soft targets, as mixup leaves them
        one_hot = F.one_hot(target, logits.shape[-1]).to(x) * 0.9 + 0.1 / logits.shape[-1]
        return torch.sum(-one_hot * F.log_softmax(logits, dim=-1), dim=-1).mean()


def efficientnet(rows: int = 8) -> Script:
    return EfficientNet(), {"x": torch.randn(rows, 3, 32, 32), "target": torch.randint(0, 10, (rows,))}


# -- MobileViT -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int = 4, dim_head: int = 8) -> None:
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(dim, heads * dim_head * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        b, p, n, _ = x.shape
        q, k, v = (t.view(b, p, n, self.heads, -1).transpose(2, 3) for t in self.to_qkv(x).chunk(3, dim=-1))
        attn = self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale)
        return self.to_out(torch.matmul(attn, v).transpose(2, 3).reshape(b, p, n, -1))


class Transformer(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
            self.layers.append(nn.ModuleList([Attention(dim), ff]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return x


class MobileViTBlock(nn.Module):
    def __init__(self, channel: int, dim: int, depth: int, patch: int = 2) -> None:
        super().__init__()
        self.ph = self.pw = patch
        self.conv1 = nn.Sequential(
            nn.Conv2d(channel, channel, 3, 1, 1, bias=False), nn.BatchNorm2d(channel), nn.SiLU()
        )
        self.conv2 = nn.Conv2d(channel, dim, 1, bias=False)
        self.transformer = Transformer(dim, depth)
        self.conv3 = nn.Conv2d(dim, channel, 1, bias=False)
        self.conv4 = nn.Sequential(nn.Conv2d(2 * channel, channel, 3, 1, 1, bias=False), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        x = self.conv2(self.conv1(x))
        b, d, h, w = x.shape
        ph, pw = self.ph, self.pw
        x = x.reshape(b, d, h // ph, ph, w // pw, pw).permute(0, 3, 5, 2, 4, 1)
        x = x.reshape(b, ph * pw, (h // ph) * (w // pw), d)
        x = self.transformer(x)
        x = x.reshape(b, ph, pw, h // ph, w // pw, d).permute(0, 5, 3, 1, 4, 2).reshape(b, d, h, w)
        x = self.conv3(x)
        x = torch.cat((x, y), 1)
        return self.conv4(x)


class MobileViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU())
        self.block = MobileViTBlock(16, 24, 2)
        self.pool, self.fc = nn.AvgPool2d(16 // 2, 1), nn.Linear(16, 10, bias=False)
        self.down = nn.MaxPool2d(3, 2, 1)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.down(self.block(self.stem(image)))).view(image.size(0), -1)
        return F.cross_entropy(self.fc(x), label, label_smoothing=0.1)


def mobilevit(rows: int = 8) -> Script:
    return MobileViT(), {"image": torch.randn(rows, 3, 32, 32), "label": torch.randint(0, 10, (rows,))}


# -- U-Net with attention gates, dice loss -------------------------------------------------------------------


class DoubleConv(nn.Sequential):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__(
            nn.Conv2d(c_in, c_out, 3, padding=1),
            nn.InstanceNorm2d(c_out, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
            nn.Conv2d(c_out, c_out, 3, padding=1),
            nn.InstanceNorm2d(c_out, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )


class AttentionGate(nn.Module):
    def __init__(self, g: int, skip: int, inner: int) -> None:
        super().__init__()
        self.W_g, self.W_x = nn.Conv2d(g, inner, 1), nn.Conv2d(skip, inner, 1)
        self.psi = nn.Sequential(nn.Conv2d(inner, 1, 1), nn.Sigmoid())

    def forward(self, g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * self.psi(F.relu(self.W_g(g) + self.W_x(x)))


class AttentionUNet(nn.Module):
    def __init__(self, features: tuple[int, ...] = (8, 16, 32), classes: int = 3) -> None:
        super().__init__()
        self.downs, self.ups, self.gates, self.convs = (nn.ModuleList() for _ in range(4))
        c = 1
        for f in features:
            self.downs.append(DoubleConv(c, f))
            c = f
        for f in reversed(features[:-1]):
            self.ups.append(nn.ConvTranspose2d(c, f, 2, 2))
            self.gates.append(AttentionGate(f, f, f // 2))
            self.convs.append(DoubleConv(2 * f, f))
            c = f
        self.out = nn.Conv2d(c, classes, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        skips = []
        for i, down in enumerate(self.downs):
            x = down(x)
            if i < len(self.downs) - 1:
                skips.append(x)
                x = F.max_pool2d(x, 2)
        for up, gate, conv in zip(self.ups, self.gates, self.convs, strict=True):
            x, skip = up(x), skips.pop()
            if x.shape != skip.shape:
                x = F.interpolate(x, size=skip.shape[2:])
            x = conv(torch.cat([gate(x, skip), x], dim=1))
        logits = self.out(x)
        probs = logits.softmax(1)
        target = F.one_hot(mask, probs.shape[1]).permute(0, 3, 1, 2).float()
        dims = (0, 2, 3)
        inter, card = (probs * target).sum(dims), (probs + target).sum(dims)
        dice = 1 - ((2.0 * inter + 1e-5) / (card + 1e-5).clamp_min(1e-7)).mean()
        return F.cross_entropy(logits, mask) + dice


def attention_unet(rows: int = 8) -> Script:
    return AttentionUNet(), {"x": torch.randn(rows, 1, 16, 16), "mask": torch.randint(0, 3, (rows, 16, 16))}


# -- VQ-VAE --------------------------------------------------------------------------------------------------


class VectorQuantizer(nn.Module):
    def __init__(self, n_e: int = 32, e_dim: int = 16, beta: float = 0.25) -> None:
        super().__init__()
        self.n_e, self.e_dim, self.beta = n_e, e_dim, beta
        self.embedding = nn.Embedding(n_e, e_dim)
        self.embedding.weight.data.uniform_(-1.0 / n_e, 1.0 / n_e)

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        z = z.permute(0, 2, 3, 1).contiguous()
        z_flattened = z.view(-1, self.e_dim)
        d = (
            torch.sum(z_flattened**2, dim=1, keepdim=True)
            + torch.sum(self.embedding.weight**2, dim=1)
            - 2 * torch.matmul(z_flattened, self.embedding.weight.t())
        )
        indices = torch.argmin(d, dim=1).unsqueeze(1)
        encodings = torch.zeros(indices.shape[0], self.n_e).to(z)
        encodings.scatter_(1, indices, 1)
        z_q = torch.matmul(encodings, self.embedding.weight).view(z.shape)
        loss = torch.mean((z_q.detach() - z) ** 2) + self.beta * torch.mean((z_q - z.detach()) ** 2)
        z_q = z + (z_q - z).detach()
        e_mean = torch.mean(encodings, dim=0)
        perplexity = torch.exp(-torch.sum(e_mean * torch.log(e_mean + 1e-10)))
        return loss, z_q.permute(0, 3, 1, 2).contiguous(), perplexity


class ResidualLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.res_block = nn.Sequential(
            nn.ReLU(True),
            nn.Conv2d(dim, dim // 2, 3, padding=1, bias=False),
            nn.ReLU(True),
            nn.Conv2d(dim // 2, dim, 1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.res_block(x)


class VQVAE(nn.Module):
    def __init__(self, h: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, h, 4, 2, 1), nn.ReLU(), nn.Conv2d(h, h, 4, 2, 1), *[ResidualLayer(h)] * 2
        )
        self.quantize = VectorQuantizer(e_dim=h)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(h, h, 3, 1, 1),
            ResidualLayer(h),
            nn.ConvTranspose2d(h, h, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(h, 3, 4, 2, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedding_loss, z_q, perplexity = self.quantize(self.encoder(x))
        recon = torch.mean((self.decoder(z_q) - x) ** 2) / 0.06
        self.perplexity = perplexity.detach()
        return recon + embedding_loss


def vqvae(rows: int = 8) -> Script:
    return VQVAE(), {"x": torch.randn(rows, 3, 16, 16)}


# -- masked autoencoder --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim: int, heads: int = 4, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(dim, int(dim * mlp_ratio)), nn.GELU(), nn.Linear(int(dim * mlp_ratio), dim)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class MAE(nn.Module):
    def __init__(self, img: int = 32, patch: int = 4, dim: int = 32, dec: int = 16) -> None:
        super().__init__()
        self.patch, n = patch, (img // patch) ** 2
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, n + 1, dim) * 0.02, requires_grad=False)
        self.blocks, self.norm = nn.ModuleList([Block(dim) for _ in range(3)]), nn.LayerNorm(dim)
        self.decoder_embed = nn.Linear(dim, dec)
        self.mask_token = nn.Parameter(torch.randn(1, 1, dec) * 0.02)
        self.decoder_pos_embed = nn.Parameter(torch.randn(1, n + 1, dec) * 0.02, requires_grad=False)
        self.decoder_blocks = nn.ModuleList([Block(dec, 2) for _ in range(2)])
        self.decoder_norm, self.decoder_pred = nn.LayerNorm(dec), nn.Linear(dec, patch**2 * 3)

    def patchify(self, imgs: torch.Tensor) -> torch.Tensor:
        p = self.patch
        h = w = imgs.shape[2] // p
        x = imgs.reshape(shape=(imgs.shape[0], 3, h, p, w, p))
        x = torch.einsum("nchpwq->nhwpqc", x)
        return x.reshape(shape=(imgs.shape[0], h * w, p**2 * 3))

    def random_masking(self, x: torch.Tensor, noise: torch.Tensor, ratio: float) -> Any:
        n, length, d = x.shape
        len_keep = int(length * (1 - ratio))
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :len_keep]
        x_masked = torch.gather(x, dim=1, index=ids_keep.unsqueeze(-1).repeat(1, 1, d))
        mask = torch.ones([n, length], device=x.device)
        mask[:, :len_keep] = 0
        return x_masked, torch.gather(mask, dim=1, index=ids_restore), ids_restore

    def forward(self, imgs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(imgs).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:, :]
        x, mask, ids_restore = self.random_masking(x, noise, 0.75)
        cls_token = self.cls_token + self.pos_embed[:, :1, :]
        x = torch.cat((cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        for blk in self.blocks:
            x = blk(x)
        x = self.decoder_embed(self.norm(x))
        mask_tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] + 1 - x.shape[1], 1)
        x_ = torch.cat([x[:, 1:, :], mask_tokens], dim=1)
        x_ = torch.gather(x_, dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        x = torch.cat([x[:, :1, :], x_], dim=1) + self.decoder_pos_embed
        for blk in self.decoder_blocks:
            x = blk(x)
        pred = self.decoder_pred(self.decoder_norm(x))[:, 1:, :]
        target = self.patchify(imgs)
        mean, var = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
        target = (target - mean) / (var + 1.0e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(dim=-1)
        return (loss * mask).sum() / mask.sum()


def mae(rows: int = 8) -> Script:
    return MAE(), {"imgs": torch.randn(rows, 3, 32, 32), "noise": torch.rand(rows, 64)}


# -- DINO: student, teacher, centre --------------------------------------------------------------------------


class DINOHead(nn.Module):
    def __init__(self, in_dim: int, out_dim: int, hidden: int = 32, bottleneck: int = 16) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, bottleneck),
        )
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(bottleneck, out_dim, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))


class Backbone(nn.Module):
    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.proj, self.norm = nn.Conv2d(3, dim, 4, 4), nn.LayerNorm(dim)
        self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x)[:, 0]


class DINO(nn.Module):
    def __init__(self, out_dim: int = 48) -> None:
        super().__init__()
        self.student = nn.Sequential(Backbone(), DINOHead(24, out_dim))
        self.teacher = nn.Sequential(Backbone(), DINOHead(24, out_dim))
        self.teacher.load_state_dict(self.student.state_dict())
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.register_buffer("center", torch.randn(1, out_dim) * 0.1)

    @torch.no_grad()
    def update(self, teacher_output: torch.Tensor, momentum: float = 0.9) -> None:
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True) / len(teacher_output)
        self.center = self.center * momentum + batch_center * (1 - momentum)

    def forward(self, global1: Any, global2: Any, local1: Any, local2: Any) -> torch.Tensor:
        with torch.no_grad():
            teacher_output = self.teacher(torch.cat([global1, global2]))
        student = torch.cat(
            [self.student(torch.cat([global1, global2])), self.student(torch.cat([local1, local2]))]
        )
        student_out = (student / 0.1).chunk(4)
        teacher_out = F.softmax((teacher_output - self.center) / 0.04, dim=-1).detach().chunk(2)
        total_loss, n_loss_terms = torch.zeros(()), 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v == iq:
                    continue
                loss = torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1)
                total_loss = total_loss + loss.mean()
                n_loss_terms += 1
        self.update(teacher_output)
        return total_loss / n_loss_terms


def dino(rows: int = 8) -> Script:
    crops = {f"global{i}": torch.randn(rows, 3, 16, 16) for i in (1, 2)}
    return DINO(), crops | {f"local{i}": torch.randn(rows, 3, 8, 8) for i in (1, 2)}


# -- diffusion transformer with cross attention, as PixArt ---------------------------------------------------


def t2i_modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale) + shift


class CrossAttention(nn.Module):
    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.q_linear, self.kv_linear = nn.Linear(dim, dim), nn.Linear(dim, dim * 2)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, cond: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q = self.q_linear(x).view(b, -1, self.num_heads, self.head_dim).transpose(1, 2)
        kv = self.kv_linear(cond).view(b, -1, 2, self.num_heads, self.head_dim)
        k, v = kv.unbind(2)
        bias = (1 - mask.to(x)) * -10000.0
        x = F.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias[:, None, None]
        )
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class PixArtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), 4
        self.cross_attn = CrossAttention(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim)
        )
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor, t: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = (
            self.scale_shift_table[None] + t.reshape(b, 6, -1)
        ).chunk(6, dim=1)
        h = t2i_modulate(self.norm1(x), shift_msa, scale_msa)
        qkv = self.qkv(h).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]).transpose(1, 2).reshape(b, n, c)
        x = x + gate_msa * self.proj(h)
        x = x + self.cross_attn(x, y, mask)
        return x + gate_mlp * self.mlp(t2i_modulate(self.norm2(x), shift_mlp, scale_mlp))


class PixArt(nn.Module):
    def __init__(self, dim: int = 32, depth: int = 3, patch: int = 2, text: int = 20) -> None:
        super().__init__()
        self.dim, self.patch = dim, patch
        self.x_embedder = nn.Conv2d(4, dim, patch, patch)
        self.register_buffer("pos_embed", torch.randn(1, 16, dim))
        self.t_embedder = nn.Sequential(nn.Linear(16, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.y_embedder = nn.Sequential(
            nn.Linear(text, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.blocks = nn.ModuleList([PixArtBlock(dim) for _ in range(depth)])
        self.norm_final = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(dim, patch * patch * 8)

    def unpatchify(self, x: torch.Tensor) -> torch.Tensor:
        c, p = 8, self.patch
        h = w = int(x.shape[1] ** 0.5)
        assert h * w == x.shape[1]
        x = x.reshape(shape=(x.shape[0], h, w, p, p, c))
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(shape=(x.shape[0], c, h * p, h * p))

    def forward(self, x: Any, noise: Any, t: Any, y: Any, mask: Any) -> torch.Tensor:
        noisy = (1 - t)[:, None, None, None] * x + t[:, None, None, None] * noise
        freqs = torch.exp(-math.log(10000) * torch.arange(8, dtype=torch.float32) / 8).to(t.device)
        args = 1000 * t[:, None].float() * freqs[None]
        emb = self.t_embedder(torch.cat([args.cos(), args.sin()], dim=-1))
        h = self.x_embedder(noisy).flatten(2).transpose(1, 2) + self.pos_embed
        t0, y = self.t_block(emb), self.y_embedder(y)
        for block in self.blocks:
            h = block(h, y, t0, mask)
        out, _ = self.unpatchify(self.linear(self.norm_final(h))).chunk(2, dim=1)
        return ((out - (noise - x)) ** 2).mean(dim=list(range(1, out.ndim))).mean()


def pixart(rows: int = 8) -> Script:
    image = torch.randn(rows, 4, 8, 8)
    mask = (torch.arange(6) < 4).long().expand(rows, -1).clone()
    batch = {"x": image, "noise": torch.randn_like(image), "t": torch.rand(rows)}
    return PixArt(), batch | {"y": torch.randn(rows, 6, 20), "mask": mask}
