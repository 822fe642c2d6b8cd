"""Patterns of layers: the kind of each, from a configuration without the field `layer_types`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layoutopt.importers.huggingface import mixers
from layoutopt.importers.huggingface.fields import Fields
from layoutopt.importers.huggingface.mixers import FULL, LINEAR, SLIDING

LayerPattern = Callable[[Fields, int], Sequence[str]]
"""From a configuration and its number of layers: the kind of each."""


def alternating(
    every: int, names: Sequence[str] = (), usual: str = SLIDING, full: int | str = -1
) -> LayerPattern:
    """Layers of kind `usual`; each `every`-th, a number or a word of so many letters that one of `names` may
    change, is full: the last of them, or the one of number `full`, or that such a field has."""

    def kinds(fields: Fields, count: int) -> Sequence[str]:
        name = fields.first(*names) if names else ""
        word = fields.raw(name)
        period = len(word) if isinstance(word, str) else fields.count(name, every) if names else every
        at = fields.count(full, least=0) if isinstance(full, str) else full
        return [usual if (i - at) % period else FULL for i in range(count)]

    return kinds


def neo(fields: Fields, count: int) -> Sequence[str]:
    """GPT-Neo: kinds and how often they follow each other."""
    types = fields.listed("attention_types") or [[["global", "local"], count // 2]]
    listed = fields.listed("attention_layers") or [k for kinds, n in types for k in kinds * n]
    return [SLIDING if kind == "local" else FULL for kind in listed]


def qwen(fields: Fields, count: int) -> Sequence[str]:
    """Windows from `max_window_layers` on, if they are used at all."""
    kinds = late(fields, count)
    return kinds if fields.flag("use_sliding_window") else [FULL] * count


def late(fields: Fields, count: int) -> Sequence[str]:
    """Windows from `max_window_layers` on, if there is a window."""
    full = fields.count("max_window_layers", 28, least=0)
    return [FULL if i < full else kind for i, kind in enumerate(windowed(fields, count))]


def windowed(fields: Fields, count: int) -> Sequence[str]:
    """A window in all layers, if there is one."""
    return [SLIDING if fields.raw("sliding_window") is not None else FULL] * count


def unturned(fields: Fields, count: int) -> Sequence[str]:
    """No positions in the layers that `no_rope_layers` lists, or each `no_rope_layer_interval`-th."""
    every = fields.count("no_rope_layer_interval", 4)
    turned = fields.listed("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    return [FULL if t else mixers.UNTURNED for t in turned]


def chunked(fields: Fields, count: int) -> Sequence[str]:
    """Llama 4: chunks where positions turn."""
    kinds = unturned(fields, count)
    if not fields.has("attention_chunk_size"):
        return kinds
    return [mixers.CHUNKED if kind == FULL else kind for kind in kinds]


def mimo(fields: Fields, count: int) -> Sequence[str]:
    """MiMo: windows where `hybrid_layer_pattern` has a 1."""
    listed = fields.listed("hybrid_layer_pattern") or [i > 0 and (i + 1) % 6 > 0 for i in range(count)]
    return [SLIDING if i else FULL for i in listed]


def lettered(fields: Fields, count: int) -> Sequence[str]:
    """Nemotron-H: letters of `hybrid_override_pattern`, or a list."""
    letters = {"M": LINEAR, "*": FULL, "-": mixers.MLP, "E": mixers.MOE}
    said = fields.raw("hybrid_override_pattern")
    if said is None:
        return fields.listed("layers_block_type") or [LINEAR, mixers.MOE, FULL, mixers.MLP]
    if not isinstance(said, str) or set(said) - set(letters):
        raise fields.wrong("hybrid_override_pattern", f"give one of {' '.join(letters)} for each layer")
    return [letters[letter] for letter in said]


def minimax(fields: Fields, count: int) -> Sequence[str]:
    """MiniMax: 0 in `attn_type_list` is lightning attention."""
    listed = fields.listed("attn_type_list") or [(i + 1) % 2 for i in range(count)]
    return [FULL if full else LINEAR for full in listed]


def hybrid(fields: Fields, count: int) -> Sequence[str]:
    """Falcon-H1: attention and a state space side by side."""
    return [mixers.BOTH] * count


def linear(fields: Fields, count: int) -> Sequence[str]:
    """State spaces, but for the layers that are listed as attention."""
    full = fields.listed("attn_layer_indices")
    return fields.listed("layers_block_type") or [FULL if i in full else LINEAR for i in range(count)]


def convolved(fields: Fields, count: int) -> Sequence[str]:
    """LFM2: convolutions, but for the layers that are listed as attention; all are without a list."""
    full = fields.listed("full_attn_idxs") if fields.has("full_attn_idxs") else range(count)
    return [FULL if i in full else LINEAR for i in range(count)]


def kimi(fields: Fields, count: int) -> Sequence[str]:
    """Kimi Linear: the delta rule, but for layers that are listed, from 1 on, or each fourth."""
    full = [*map(str, fields.listed("full_attn_layers") or range(5, count + 1, 4))]
    return [FULL if str(i) in full else LINEAR for i in range(1, count + 1)]


def lfm3(fields: Fields, count: int) -> Sequence[str]:
    """LFM3: every other layer is a convolution."""
    between = [LINEAR, *(SLIDING if i % 2 else FULL for i in range(count))]
    return [LINEAR if i % 2 else between[i // 2] for i in range(count)]
