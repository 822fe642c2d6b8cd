"""MaxText: logical axes over mesh axes, one storage for all matrices, one `remat_policy` for all layers."""

from layoutopt.plan.maxtext import MAXTEXT_REMAT, MAXTEXT_ROWS, MAXTEXT_STORED
from layoutopt.space.degrees import Degrees
from layoutopt.space.kind import ALL
from layoutopt.space.recompute import KEEP
from layoutopt.space.restriction import ANY, Even, Only, Restriction
from layoutopt.space.splits import Split

SAYS = Restriction(
    "maxtext",
    says={
        "storage": ("layout", *MAXTEXT_STORED, "hybrid"),
        "elsewhere": ("length",),
        "recompute": (False, True, *(f"{KEEP}{'+'.join(keep)}" for keep in MAXTEXT_REMAT if keep)),
        "offload": ("optimizer", "weights"),
        "microbatches": ANY,
    },
    relations=(
        Only(lambda d, choice: not isinstance(d, Split) or not choice or d.subject in MAXTEXT_ROWS),
        Degrees(copies=True, stored_over_context=False, experts_apart=False),
        Even(),
    ),
    granularity={"storage": ALL, "offload": ALL, "recompute": ALL},
)
