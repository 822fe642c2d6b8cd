"""torchtitan: degrees of data (replicate, shard), tensor, context, pipeline and expert parallelism.

Heads, key-value heads, d_ff and vocab are split over the tensor axis together, with sequence parallelism
beside them (`enable_sequence_parallel`). Experts lie over ranks that store parts of the weights, or over
those of tensors and sequences; their matrices are whole. `fsdp_reshard_after_forward` chooses between ZeRO-2
and ZeRO-3; stages gather and reduce once in a step, as ZeRO-1.

From 0.3 on, context parallelism needs FlexAttention (torchtitan/models/common/decoder.py @b5bcd76; in 0.3.0
torchtitan/distributed/full_dtensor.py, of its default backend). It gathers keys and values, and its mask
needs a multiple of 128 tokens on each rank (`_create_cp_block_mask`, torch 2.13). 0.2 has torch's ring, too.
"""

from dataclasses import replace

from layoutopt.frameworks import torch
from layoutopt.space.degrees import Degrees, EvenSequence
from layoutopt.space.kind import STORED
from layoutopt.space.recompute import KEEP, SOME

SELECTIVE = f"{KEEP}products/2+attention"
"""Selective recomputation of single operations (`SelectiveAC`)."""
_SAYS = {**(torch.EAGER.says or {}), "recompute": (False, True, SELECTIVE), "storage": STORED}
_DEGREES = Degrees(hybrid=STORED[1:-1], whole_experts=True, experts_where_stored=True, in_stages="zero1")
_OLD = replace(
    torch.EAGER,
    name="torchtitan@0.2",
    says={**_SAYS, "recompute": (False, True, SELECTIVE, SOME)},  # every k-th layer, too
    relations=(_DEGREES, EvenSequence(2), torch.StartedSchedules()),
)
SAYS = replace(
    _OLD,
    name="torchtitan",
    says={**_SAYS, "context": ("gather",)},
    relations=(_DEGREES, EvenSequence(128), torch.StartedSchedules()),
    versions={"0.2": _OLD},
)
