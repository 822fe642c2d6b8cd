"""Rotary positions as configurations describe them: bases, and methods to stretch them to longer texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from layoutopt.importers.huggingface.fields import Fields
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.activations import clip
from mesh_tf_core.ops.filled import constant


class Unturned(nn.Rotary):
    """No positions."""

    def __call__(self, x: Tensor, length: str, d_kv: str, position: Tensor | None = None) -> Tensor:
        return x


@dataclass(frozen=True)
class Linear(nn.Rotary):
    """All turns slower by one factor (position interpolation, Chen et al. 2023)."""

    factor: float = 1.0

    def rates(self, pair: Tensor, half: int) -> Tensor:
        return super().rates(pair, half) * (1 / self.factor)


@dataclass(frozen=True)
class Llama3(nn.Rotary):
    """Rotations with wavelengths over `original / low` are slower by a factor, those below `original / high`
    unchanged, the others in between (Llama 3.1)."""

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def rates(self, pair: Tensor, half: int) -> Tensor:
        rate = super().rates(pair, half)
        turns = rate * (self.original / (2 * math.pi))
        kept = clip((turns - self.low) * (1 / max(self.high - self.low, 1e-6)), 0.0, 1.0)
        return rate * (kept + (1.0 - kept) * (1 / self.factor))


@dataclass(frozen=True)
class ScaledRotary(nn.Rotary):
    """Rotated values are scaled."""

    scaled: float = field(default=1.0, kw_only=True)

    def __call__(self, x: Tensor, length: str, d_kv: str, position: Tensor | None = None) -> Tensor:
        turned = super().__call__(x, length, d_kv, position)
        return turned if self.scaled == 1 else turned * self.scaled


@dataclass(frozen=True)
class Yarn(ScaledRotary):
    """Pairs that rotate fewer than `slow` times in the original length are slower by a factor, those that
    rotate more than `fast` times unchanged, the others in between; rotated values are scaled (Peng et al.
    2023, "YaRN", sections 3.2 and 3.4)."""

    factor: float = 1.0
    fast: float = 32.0
    slow: float = 1.0
    original: int = 4096
    truncate: bool = True

    def rates(self, pair: Tensor, half: int) -> Tensor:
        whole = (self.original / (turns * 2 * math.pi) for turns in (self.fast, self.slow))
        low, high = (half * math.log(each) / math.log(self.base) for each in whole)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        stretched = clip((pair - low) * (1 / max(high - low, 0.001)), 0.0, 1.0)
        return super().rates(pair, half) * (1.0 - stretched + stretched * (1 / self.factor))


@dataclass(frozen=True)
class Proportional(nn.Rotary):
    """Only the first `pairs` pairs turn, at the rates of a whole head (Gemma 4)."""

    pairs: int = 0

    def rates(self, pair: Tensor, half: int) -> Tensor:
        return super().rates(pair, half) * (pair < self.pairs).cast("float32")


@dataclass(frozen=True)
class RotaryFactors(ScaledRotary):
    """Every pair has a factor of its own (Ding et al. 2024, "LongRoPE")."""

    factors: tuple[float, ...] = ()

    def rates(self, pair: Tensor, half: int) -> Tensor:
        (place,) = pair.shape.dims
        slower = np.array([1 / n for n in self.factors] * 2, np.float32)
        return super().rates(pair, half) * constant(pair.graph, slower, [place])


def rotary(
    fields: Fields, d_kv: int, length: int, kind: str = "", partial: float = 1.0, name: str = "rope_theta"
) -> nn.Rotary:
    """The rotary positions of a configuration.

    Args:
      d_kv: elements of a head; length: of texts.
      kind: of layers, in a configuration that has positions per kind.
      partial: the share of a head that turns, where it names none; name: the field of the base.
    """
    inner = stretched(fields, kind)
    base = inner.positive("rope_theta", fields.positive(name, 10000.0, above=1), above=1)
    share = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", partial))
    fields.raw("original_max_position_embeddings")
    # One position per token: text; transformers reads attention_factor, not attn_factor.
    inner.skip("attn_factor", "mrope_section", "mrope_interleaved", "interleaved")
    said = "type" if inner.raw("rope_type") is None and inner.raw("type") is not None else "rope_type"
    inner.raw("type")
    if inner.raw(said) == "dynamic" and "alpha" in fields.known and inner.number("alpha"):
        inner.skip("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        return nn.Rotary(base * inner.number("alpha") ** (d_kv / (d_kv - 2)))
    form = inner.text(said, "default", _KINDS)
    if form == "proportional":
        return Proportional(base, int(share * d_kv // 2))
    made = _longrope(inner, base, fields, length) if form == "longrope" else _KINDS[form](inner, base, fields)
    return replace(made, turned=turning(d_kv, share))


def turning(d_kv: int, share: float) -> int:
    """The elements of a head that turn, in whole pairs; 0: all."""
    return 0 if share == 1 else -(-int(d_kv * share) // 2) * 2


def _longrope(inner: Fields, base: float, fields: Fields, length: int) -> nn.Rotary:
    """For texts of one length, which chooses the factors."""
    longest = fields.count("max_position_embeddings", 4096)
    original = inner.count(
        "original_max_position_embeddings", fields.count("original_max_position_embeddings", longest)
    )
    every = {n: inner.listed(n) for n in ("short_factor", "long_factor")}
    chosen = every["long_factor" if length > original else "short_factor"]
    if not chosen or not all(isinstance(n, int | float) and n > 0 for n in chosen):
        raise inner.wrong("short_factor", "give a list of numbers above 0, one per pair of elements")
    factor = longest / original
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    inner.skip("factor", "short_mscale", "long_mscale")
    return RotaryFactors(base, tuple(map(float, chosen)), scaled=inner.number("attention_factor", usual))


def stretched(fields: Fields, kind: str = "") -> Fields:
    """The frequencies of a configuration's rotary embedding; `kind`: the kind of layer, if kinds differ."""
    old = fields.has("rope_scaling") and fields.values.get("rope_parameters") is None
    name = "rope_scaling" if old else "rope_parameters"
    fields.raw("rope_scaling")
    found = fields.raw(name, {})
    apart = isinstance(found, dict) and kind in found
    return fields.part(f"{name}: {kind}", found[kind]) if apart else fields.part(name, found)


def _yarn(inner: Fields, base: float, fields: Fields) -> nn.Rotary:
    factor = inner.positive("factor", 1.0)
    scale, all_dims = inner.number("mscale"), inner.number("mscale_all_dim")
    scaled = (
        magnitude(factor, scale) / magnitude(factor, all_dims) if scale and all_dims else magnitude(factor)
    )
    return Yarn(
        base,
        factor,
        inner.positive("beta_fast", 32.0),
        inner.positive("beta_slow", 1.0),
        _original(inner, fields),
        inner.flag("truncate", True),
        scaled=inner.number("attention_factor", scaled),
    )


def magnitude(factor: float, scale: float = 1.0) -> float:
    """By how much YaRN sharpens attention: 0.1 scale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _original(inner: Fields, fields: Fields) -> int:
    longest = fields.count("max_position_embeddings", 2048)
    return inner.count("original_max_position_embeddings", longest)


_KINDS: dict[str, Callable[[Fields, float, Fields], nn.Rotary]] = {
    **dict.fromkeys(("default", "longrope", "mrope", "proportional"), lambda _, base, __: nn.Rotary(base)),
    "linear": lambda inner, base, fields: Linear(base, inner.positive("factor")),
    "llama3": lambda inner, base, fields: Llama3(
        base,
        inner.positive("factor"),
        inner.number("low_freq_factor", 1.0),
        inner.number("high_freq_factor", 4.0),
        _original(inner, fields),
    ),
    "yarn": _yarn,
}
"""Name -> what makes it. The other one, dynamic, depends on the length of every text, without a fixed `alpha`
(Hunyuan)."""
