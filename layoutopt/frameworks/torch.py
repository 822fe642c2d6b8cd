"""PyTorch with FSDP2, tensor-parallel plans of DTensor, and its pipelines, in eager execution.

`fully_shard` stores all parameters alike: whole (DDP), gathered from forward to backward
(`reshard_after_forward=False`, ZeRO-2), or split (ZeRO-3), over the data ranks or those of a node (HSDP).
There is no ZeRO-1. Checkpoints (`checkpoint_wrapper`) are of whole layers, all of them or none.

Of a module that `from_torch` imported, a search finds the plans that `plan.torch` applies: without pipelines
and splits of the sequence, which need other code in the module. Its recomputed layers may keep the results of
products and attention.
"""

from dataclasses import replace

from layoutopt.space.degrees import Degrees
from layoutopt.space.kind import ALL
from layoutopt.space.recompute import KEEP
from layoutopt.space.restriction import ANY, Restriction

EAGER = Restriction(
    "torch",
    says={
        "storage": ("layout", "zero2", "zero3", "hybrid"),
        "elsewhere": ANY,
        "recompute": (False, True),
        "context": ("gather", "ring", "zigzag"),
        "microbatches": ANY,
        "pipeline": ANY,
        "schedule": ("gpipe", "1f1b", "circular", "interleaved"),
    },
    relations=(Degrees(hybrid=("zero2", "zero3")),),
    granularity={"storage": ALL, "recompute": ALL},
)
APPLIED = replace(
    EAGER,
    says={
        "storage": ("layout", "zero2", "zero3", "hybrid"),
        "recompute": (False, True, f"{KEEP}products", f"{KEEP}products+attention"),
        "microbatches": ANY,
    },
    relations=(Degrees(hybrid=("zero2", "zero3"), sequence=False),),
)
SAYS = replace(EAGER, applied={"torch": APPLIED})
