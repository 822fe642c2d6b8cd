"""Rotary positions as configurations describe them: bases, and methods to stretch them to longer texts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layoutopt.importers.huggingface.fields import Fields
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.activations import clip


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
        kept = clip((turns - self.low) * (1 / (self.high - self.low)), 0.0, 1.0)
        return rate * (kept + (1.0 - kept) * (1 / self.factor))


@dataclass(frozen=True)
class Yarn(nn.Rotary):
    """Pairs that rotate fewer than `slow` times in the original length are slower by a factor, those that
    rotate more than `fast` times unchanged, the others in between; rotated values are scaled (Peng et al.
    2023, "YaRN", sections 3.2 and 3.4)."""

    factor: float = 1.0
    fast: float = 32.0
    slow: float = 1.0
    original: int = 4096
    scaled: float = 1.0
    truncate: bool = True

    def rates(self, pair: Tensor, half: int) -> Tensor:
        low, high = (self._pair_of(turns, half) for turns in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        stretched = clip((pair - low) * (1 / max(high - low, 0.001)), 0.0, 1.0)
        return super().rates(pair, half) * (1.0 - stretched + stretched * (1 / self.factor))

    def _pair_of(self, turns: float, half: int) -> float:
        """Which pair turns so many times in the original length."""
        return half * math.log(self.original / (turns * 2 * math.pi)) / math.log(self.base)

    def __call__(self, x: Tensor, length: str, d_kv: str, position: Tensor | None = None) -> Tensor:
        turned = super().__call__(x, length, d_kv, position)
        return turned if self.scaled == 1 else turned * self.scaled


def rotary(fields: Fields, base: float = 10000.0, kind: str = "") -> nn.Rotary:
    """The rotary positions of a configuration.

    Args:
      base: where it names none.
      kind: of layers, in a configuration that has positions per kind.
    """
    inner = stretched(fields, kind)
    base = inner.number("rope_theta", fields.number("rope_theta", base))
    fields.only("partial_rotary_factor", 1, 1.0)
    inner.only("partial_rotary_factor", 1, 1.0)
    inner.raw("attn_factor")  # which transformers does not read either; it reads attention_factor
    said = "type" if inner.raw("rope_type") is None and inner.raw("type") is not None else "rope_type"
    inner.raw("type")
    return _KINDS[inner.text(said, "default", _KINDS)](inner, base, fields)


def stretched(fields: Fields, kind: str = "") -> Fields:
    """The frequencies of a configuration's rotary embedding; `kind`: the kind of layer, if kinds differ."""
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    fields.raw("rope_scaling")
    found = fields.raw(name, {})
    said = found.get(kind, found) if isinstance(found, dict) else found
    if not isinstance(said, dict):
        raise fields.wrong(name, "give an object")
    return fields.part(f"{name}: {kind}" if kind in found else name, said)


def _default(inner: Fields, base: float, fields: Fields) -> nn.Rotary:
    return nn.Rotary(base)


def _linear(inner: Fields, base: float, fields: Fields) -> nn.Rotary:
    return Linear(base, inner.number("factor", 1.0))


def _llama3(inner: Fields, base: float, fields: Fields) -> nn.Rotary:
    return Llama3(
        base,
        inner.number("factor", 8.0),
        inner.number("low_freq_factor", 1.0),
        inner.number("high_freq_factor", 4.0),
        _original(inner, fields),
    )


def _yarn(inner: Fields, base: float, fields: Fields) -> nn.Rotary:
    factor = inner.number("factor", 1.0)
    scale, all_dims = inner.number("mscale"), inner.number("mscale_all_dim")
    scaled = (
        magnitude(factor, scale) / magnitude(factor, all_dims) if scale and all_dims else magnitude(factor)
    )
    return Yarn(
        base,
        factor,
        inner.number("beta_fast", 32.0),
        inner.number("beta_slow", 1.0),
        _original(inner, fields),
        inner.number("attention_factor", scaled),
        inner.flag("truncate", True),
    )


def magnitude(factor: float, scale: float = 1.0) -> float:
    """By how much YaRN sharpens attention: 0.1 scale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _original(inner: Fields, fields: Fields) -> int:
    longest = fields.count("max_position_embeddings", 2048)
    return inner.count("original_max_position_embeddings", longest)


_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
"""Name -> what makes it. The others (dynamic, longrope) depend on the length of every text."""
