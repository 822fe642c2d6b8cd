"""torchtitan: degrees of data (replicate, shard), tensor, context, pipeline and expert parallelism.

Heads, key-value heads, d_ff and vocab are split over the tensor axis together, with sequence parallelism
beside them (`enable_sequence_parallel`). Experts lie over ranks that store parts of the weights, or over
those of tensors and sequences; their matrices are whole. `fsdp_reshard_after_forward` chooses between ZeRO-2
and ZeRO-3; stages gather and reduce once in a step, as ZeRO-1. Context parallelism needs flex attention.
"""

from dataclasses import replace

from layoutopt.frameworks import torch
from layoutopt.space.degrees import Degrees
from layoutopt.space.kind import STORED
from layoutopt.space.recompute import KEEP, SOME

SELECTIVE = f"{KEEP}products/2+attention"
"""Selective recomputation of single operations (`SelectiveAC`)."""
RECOMPUTES = (False, True, SELECTIVE, SOME)
"""Every k-th layer, too, up to release 0.2."""
SAYS = replace(
    torch.EAGER,
    name="torchtitan",
    says={**(torch.EAGER.says or {}), "recompute": RECOMPUTES[:-1], "storage": STORED},
    relations=(
        Degrees(hybrid=STORED[1:-1], whole_experts=True, experts_where_stored=True, in_stages="zero1"),
        torch.StartedSchedules(),
    ),
)
