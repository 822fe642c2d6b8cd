"""DeepSpeed: one ZeRO stage (0 to 3) for all variables, over all data ranks, with AutoTP beside it.

Its pipelines cannot be combined with stages 2 and 3, and are decided in model code, so no search under it has
any. `offload_optimizer` and `offload_param` are for all variables.
"""

from layoutopt.space.degrees import Degrees
from layoutopt.space.kind import ALL
from layoutopt.space.restriction import ANY, Restriction

SAYS = Restriction(
    "deepspeed",
    says={
        "storage": ("layout", "zero1", "zero2", "zero3"),
        "recompute": (False, True),
        "offload": ("optimizer", "weights"),
        "context": ("gather", "all_to_all"),
        "microbatches": ANY,
    },
    relations=(Degrees(),),
    granularity={"storage": ALL, "offload": ALL, "recompute": ALL},
)
