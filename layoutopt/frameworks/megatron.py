"""Megatron-LM, Megatron-Bridge and NeMo: degrees of tensor, pipeline, context and expert parallelism.

Optimizer state is whole, or split over the data and context ranks (`--use-distributed-optimizer`). Key-value
heads may be fewer than the tensor ways, and are then copied. Recomputation is of whole layers (full), or of
attention alone (selective), everywhere alike. Optimizer state may be on the host
(`--optimizer-cpu-offload`).
"""

from layoutopt.space.degrees import Degrees
from layoutopt.space.kind import ALL
from layoutopt.space.recompute import KEEP
from layoutopt.space.restriction import ANY, Restriction

SAYS = Restriction(
    "megatron",
    says={
        "storage": ("layout", "zero1"),
        "elsewhere": ANY,
        "recompute": (False, True, f"{KEEP}products+others"),
        "offload": ("optimizer",),
        "context": ("gather", "ring", "zigzag", "all_to_all"),
        "collective_matmul": ANY,
        "microbatches": ANY,
        "pipeline": ANY,
        "schedule": ("1f1b", "interleaved"),
    },
    relations=(Degrees(copies=True),),
    granularity={"storage": ALL, "offload": ALL, "recompute": ALL},
)
