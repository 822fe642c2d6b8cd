"""The models and layouts of `benchmarks/verify.py`: whole training steps, what they are made of and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LANGUAGE, EXPERTS = "examples/transformer_lm.py", "examples/moe_lm.py"
PAIRED, BERT = "examples/transformer_seq2seq.py", "examples/bert.py"
MLP, RESNET, UNET = "examples/mlp.py", "examples/resnet.py", "examples/unet3d.py"

MEDIUM = {
    "layers": 8,
    "d_model": 1024,
    "d_kv": 64,
    "heads": 16,
    "d_ff": 4096,
    "vocab": 8192,
    "length": 512,
    "batch": 64,
    "dtype": "bfloat16",
}
LARGE = {
    "layers": 18,
    "d_model": 2048,
    "d_kv": 128,
    "heads": 16,
    "d_ff": 8192,
    "vocab": 32768,
    "length": 1024,
    "dtype": "bfloat16",
}
DATA, SPLIT = "batch:data", "batch:data;heads:model;d_ff:model;vocab:model"
EIGHT, TWO_FOUR, FOUR_TWO, TWO_TWO = "data:8", "data:2;model:4", "data:4;model:2", "data:2;model:2"


@dataclass(frozen=True)
class Pair:
    """A model and a layout on a topology; `stage` is how trained variables are stored (0 to 3, "zero3@data").

    Attributes:
      options: what else is decided: fields of `mesh_tf_core.Options`.
    """

    topology: str
    mesh: str
    layout: str
    hparams: dict[str, Any] = field(default_factory=dict)
    model: str = LANGUAGE
    stage: int | str = 0
    large: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def medium(topology: str, mesh: str, layout: str, model: str = LANGUAGE, stage: int = 0, **more: Any) -> Pair:
    return Pair(topology, mesh, layout, {**MEDIUM, **more}, model, stage)


def large(topology: str, batch: int) -> Pair:
    """A language model of a billion parameters on 64 chips."""
    return Pair(topology, "data:16;model:4", SPLIT, {**LARGE, "batch": batch}, large=True)


MIXTURE = {"layers": 4, "experts": 8, "batch": 32}
VOLUMES = {"batch": 16, "size": 64, "channels": 32}
IMAGES = {"batch": 256, "size": 64, "channels": 128, "dtype": "bfloat16"}

PAIRS = (
    medium("v5e:2x4", EIGHT, DATA),
    medium("v5e:2x4", TWO_FOUR, SPLIT),
    medium("v5e:2x4", TWO_FOUR, SPLIT, dtype="float32"),
    medium("v5e:2x4", "model:8", SPLIT.removeprefix("batch:data;")),
    medium("v5e:2x4", EIGHT, DATA, stage=3),
    medium("v5e:2x4", TWO_FOUR, SPLIT, PAIRED, layers=4),
    # Few tokens: gradients and the optimizer's step are most of the work.
    medium("v5e:2x4", EIGHT, DATA, d_model=2048, d_kv=128, d_ff=8192, length=128, batch=16),
    Pair("v5e:2x4", EIGHT, DATA, {"batch": 4096, "hidden": 4096, "layers": 4, "dtype": "bfloat16"}, MLP),
    Pair("v5e:2x4", EIGHT, DATA, IMAGES, RESNET),
    medium("v4:2x2x2", TWO_FOUR, SPLIT),
    medium("v4:2x2x2", EIGHT, DATA, BERT),
    medium("v5p:2x2x2", FOUR_TWO, SPLIT),
    medium("v6e:2x4", TWO_FOUR, SPLIT),
    medium("v6e:2x4", EIGHT, DATA),
    medium("v6e:2x4", FOUR_TWO, SPLIT, PAIRED, stage=3, layers=4),
    Pair("v6e:2x4", "data:4;rows:2", DATA + ";height:rows", {**IMAGES, "stages": 2, "blocks": 1}, RESNET),
    Pair("v3:2x2", EIGHT, DATA, {"batch": 4096, "hidden": 4096, "layers": 4}, MLP),
    large("v5e:8x8", 64),
    large("v4:4x4x4", 64),
    large("v5p:4x4x4", 128),
    large("v6e:8x8", 128),
    # Small models: most kernels take as long as their start.
    Pair("v5e:2x4", EIGHT, DATA),
    Pair("v5p:2x2x2", TWO_FOUR, SPLIT, {"dtype": "bfloat16"}),
    Pair("v6e:2x4", EIGHT, DATA, {}, MLP),
    Pair("v6e:2x4", EIGHT, DATA, {}, RESNET),
    # Long texts.
    medium("v5p:2x2x2", TWO_FOUR, SPLIT, length=8192, batch=4, layers=4),
    medium("v6e:2x4", EIGHT, DATA, stage=3, length=8192, batch=8, layers=4, d_kv=128, heads=8),
    # Channels from 16 to 256, in two and three dimensions.
    Pair("v5p:2x2x2", EIGHT, DATA, {"batch": 256, "size": 32, "channels": 64, "dtype": "bfloat16"}, RESNET),
    Pair("v5e:2x4", EIGHT, DATA, {"batch": 32, "size": 32, "channels": 16, "dtype": "bfloat16"}, UNET),
    Pair("v4:2x2x2", "data:4;slabs:2", DATA + ";depth:slabs", VOLUMES, UNET),
)

TWO_LAYERS = {
    "layers": 2,
    "d_model": 256,
    "d_kv": 64,
    "heads": 4,
    "d_ff": 1024,
    "length": 1024,
    "batch": 4,
    "positions": "rotary",
    "dtype": "bfloat16",
}
KEYS = "length:seq;memory_length:seq"


def context(form: str) -> Pair:
    return Pair("v5p:2x2x1", "seq:4", KEYS, TWO_LAYERS, options={"context": [["memory_length", form]]})


KINDS = {
    "ring": context("ring"),
    "zigzag": context("zigzag"),
    "all_to_all": context("all_to_all"),
    "sequence": Pair("v5p:2x2x1", TWO_TWO, f"{SPLIT};length@elsewhere:model", TWO_LAYERS),
    "collective matmul": Pair(
        "v5p:2x2x1",
        TWO_TWO,
        f"{SPLIT};length@elsewhere:model",
        TWO_LAYERS,
        options={"collective_matmul": ["d_ff", "heads", "vocab"]},
    ),
    "experts, v5e": medium("v5e:2x4", EIGHT, DATA + ";experts:data", EXPERTS, **MIXTURE),
    "experts, v5p": medium("v5p:2x2x2", TWO_FOUR, SPLIT + ";experts:data", EXPERTS, **MIXTURE),
    "experts, v4": medium("v4:2x2x2", EIGHT, DATA + ";experts:data", EXPERTS, **MIXTURE),
    "experts, small": Pair("v5e:2x4", EIGHT, DATA + ";experts:data", {}, EXPERTS),
    "hybrid": Pair("v5p:2x2x1", "pod:2;data:2", "batch:pod+data", TWO_LAYERS, stage="zero3@data"),
}
"""One program of each kind of decision, to see what the compiler makes of its collectives."""
