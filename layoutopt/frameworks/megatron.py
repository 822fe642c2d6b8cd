"""Megatron-LM, Megatron-Bridge and NeMo: degrees of tensor, pipeline, context and expert parallelism.

Optimizer state is whole, or split over the data and context ranks (`--use-distributed-optimizer`). Key-value
heads may be fewer than the tensor ways, and are then copied. Recomputation is of whole layers (full), all or
the first ones of each stage (block), of whole stages (uniform, of all their layers), or of some modules of
each layer (selective). Optimizer state may be on the host (`--optimizer-cpu-offload`). Twice the context ways
divide the length in every form (megatron/training/arguments.py:1336 @d98e8a6).
"""

from collections.abc import Iterable, Mapping
from itertools import combinations

from layoutopt.frameworks.torch import StartedSchedules
from layoutopt.space.degrees import Degrees, EvenSequence
from layoutopt.space.kind import ALL
from layoutopt.space.recompute import KEEP, SOME
from layoutopt.space.restriction import ANY, Restriction
from mesh_tf_core.ir.blocks import TICK
from mesh_tf_core.ir.schedules import INTERLEAVED
from mesh_tf_core.lower.remat_policy import KINDS, OUTPUTS

_ROWS = (
    ("core_attn", "attention"),
    ("layernorm", "others-attention_norm-feed_forward_norm"),
    ("layernorm", "others-attention_norm-experts_norm"),
    ("mlp", "products-feed_forward", "others-feed_forward"),
    ("shared_experts", "products-shared", "others-shared"),
    ("moe", "products-experts", "others-experts"),
    ("mla_up_proj", "products-q_up-k_up-v_up", "others-attention"),
    ("mla_up_proj", "products-q-k_up-v_up", "others-attention"),
)
"""Each of `recompute_modules`, and the values that it does not keep
(megatron/core/transformer/transformer_config.py @d98e8a6). `layernorm` is named by what follows, and the
up-projection of queries by their rank, if they have one. `moe` recomputes shared experts too, which are
in the scope `experts`. `moe_act`, the activation of experts alone, has no row: it is no scope of its own."""


def _keeps(rows: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The values that are kept when some modules are recomputed."""
    words = [word.partition("-") for row in rows for word in row[1:]]
    without = {kind: [names for each, _, names in words if each == kind] for kind in KINDS if kind != OUTPUTS}
    return tuple("-".join((kind, *names)) for kind, names in without.items() if "" not in names)


MEGATRON_MODULES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    _keeps(rows): names
    for number in (1, 2, 3)
    for rows in combinations(_ROWS, number)
    if len({*(names := tuple(row[0] for row in rows))}) == number
}
"""The values that recomputed layers keep -> the modules that are recomputed."""


def _started(kind: str, stages: int, number: int) -> bool:
    """True if Megatron-Core starts a schedule: interleaved rounds have as many microbatches as stages."""
    return kind != INTERLEAVED or number % stages == 0


SAYS = Restriction(
    "megatron",
    says={
        "storage": ("layout", "zero1"),
        "elsewhere": ANY,
        "recompute": (False, True, SOME, TICK, *(f"{KEEP}{'+'.join(keep)}" for keep in MEGATRON_MODULES)),
        "offload": ("optimizer",),
        "context": ("gather", "ring", "zigzag", "all_to_all"),
        "collective_matmul": ANY,
        "microbatches": ANY,
        "pipeline": ANY,
        "schedule": ("1f1b", "interleaved"),
    },
    relations=(Degrees(copies=True), EvenSequence(2), StartedSchedules(_started)),
    granularity={"storage": ALL, "offload": ALL, "recompute": ALL},
)
