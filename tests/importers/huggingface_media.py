"""The weights of SigLIP and Whisper in memory of transformers under the names of our variables."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

TOWERS = {
    "vision_model.": "image/",
    "text_model.": "text/",
    "model.encoder.": "encoder/",
    "model.decoder.": "decoder/",
    "encoder.layers.": "layers.",
    "embeddings.": "",
    "self_attn.": "attention/",
    "encoder_attn.": "cross_attention/",
    "self_attn_layer_norm": "attention_norm",
    "encoder_attn_layer_norm": "cross_attention_norm",
    "layer_norm1": "attention_norm",
    "layer_norm2": "feed_forward_norm",
    "post_layernorm": "final_norm",
    "head.attention.": "pool/attention/",
    "head.layernorm": "pool/norm",
    "head.mlp.": "pool/",
    "head.probe": "pool/probe",
    "mlp.": "",
    "fc1": "feed_forward/in/0",
    "fc2": "feed_forward/out",
    "token_embedding.weight": "embedding/tokens",
    "decoder/embed_tokens.weight": "embedding/tokens",
    "position_embedding.weight": "embedding/positions",
    "embed_positions.weight": "embedding/positions",
    "patch_embedding.": "embedding/",
}
TURNED = {3: (2, 1, 0), 4: (2, 3, 1, 0), 2: (1, 0), 1: (0,), 0: ()}


def media(state: Mapping[str, Any]) -> dict[str, Any]:
    """Our names -> arrays, of as many elements as the variables."""
    stacks: dict[str, list[Any]] = defaultdict(list)
    made: dict[str, Any] = {}
    for name, x in state.items():
        for theirs, ours in TOWERS.items():
            name = name.replace(theirs, ours)
        name = re.sub(r"([qkvo])(?:ut)?_proj\.weight", r"\1", name)
        name = re.sub(r"([qkvo])(?:ut)?_proj\.bias", r"\1_bias", name)
        inside = "layers." in name
        last = "feed_forward_norm" if inside else "final_norm"
        name = re.sub(r"(final_layer_norm|(?<=coder/)layer_norm)", last, name)
        name = re.sub(r"norm\.weight", "norm/scale", name).replace("norm.bias", "norm/bias")
        plain = name.endswith(("tokens", "positions", "probe"))
        parts = [("", x)]
        if "in_proj" in name:
            parts = [(f"{n}{'_bias' * (x.ndim == 1)}", y) for n, y in zip("qkv", np.split(x, 3), strict=True)]
            name = name[: name.index("in_proj")]
        for end, y in parts:
            own = (name + end).replace(".", "/")
            y = y if plain else y.transpose(TURNED[y.ndim])
            if inside:
                stacks[re.sub(r"layers/\d+/", "layers/", own)].append(y)
            else:
                made[own] = y
    return made | {name: np.stack(rows) for name, rows in stacks.items()}
