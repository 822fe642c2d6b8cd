"""Megatron-LM, Megatron-Bridge and NeMo: degrees of tensor, pipeline, context and expert parallelism.

Optimizer state is whole, or split over the data and context ranks (`--use-distributed-optimizer`). Key-value
heads may be fewer than the tensor ways, and are then copied. Recomputation is of whole layers (full), all or
without stages the first ones (block), or of some modules of each (selective). Optimizer state may be on the
host (`--optimizer-cpu-offload`).
"""

from collections.abc import Mapping

from layoutopt.frameworks.torch import StartedSchedules
from layoutopt.space.degrees import Degrees
from layoutopt.space.kind import ALL
from layoutopt.space.recompute import KEEP, SOME
from layoutopt.space.restriction import ANY, Restriction
from mesh_tf_core.ir.schedules import INTERLEAVED

_NORMS = "others-attention_norm-feed_forward_norm", "others-attention_norm-experts_norm"
MEGATRON_MODULES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("products", "others"): ("core_attn",),
    **{("products", "attention", norms): ("layernorm",) for norms in _NORMS},
    **{("products", norms): ("core_attn", "layernorm") for norms in _NORMS},
    ("products-feed_forward", "attention", "others-feed_forward"): ("mlp",),
    ("products-feed_forward", "others-feed_forward"): ("core_attn", "mlp"),
    ("products", "attention", "others-experts"): ("moe_act",),
    ("products", "others-experts"): ("core_attn", "moe_act"),
    ("products-experts", "attention", "others-experts"): ("moe",),
}
"""The values that recomputed layers keep -> the `recompute_modules` that are recomputed
(megatron/core/transformer/transformer_config.py @d98e8a6)."""


def _started(kind: str, stages: int, number: int) -> bool:
    """True if Megatron-Core starts a schedule: interleaved rounds have as many microbatches as stages."""
    return kind != INTERLEAVED or number % stages == 0


SAYS = Restriction(
    "megatron",
    says={
        "storage": ("layout", "zero1"),
        "elsewhere": ANY,
        "recompute": (False, True, SOME, *(f"{KEEP}{'+'.join(keep)}" for keep in MEGATRON_MODULES)),
        "offload": ("optimizer",),
        "context": ("gather", "ring", "zigzag", "all_to_all"),
        "collective_matmul": ANY,
        "microbatches": ANY,
        "pipeline": ANY,
        "schedule": ("1f1b", "interleaved"),
    },
    relations=(Degrees(copies=True), StartedSchedules(_started)),
    granularity={"storage": ALL, "offload": ALL, "recompute": ALL},
)
