"""transformers and accelerate: FSDP2 with a tensor or expert plan beside it, as PyTorch has them.

`DistributedConfig` has no context parallelism, and its sequence parallelism is not wired up. FSDP cannot be
combined with pipelines. Experts lie over whole tensor groups, and over data axes only where these store the
weights split (`ep_size` divides `fsdp_size` x `tp_size`).
"""

from dataclasses import replace

from layoutopt.frameworks import torch
from layoutopt.space.degrees import Degrees
from layoutopt.space.kind import HYBRID
from mesh_tf_core.lower.storage import ONCE

WITHOUT = ("pipeline", "schedule", "context", "elsewhere")
SAYS = replace(
    torch.EAGER,
    name="transformers",
    says={n: values for n, values in (torch.EAGER.says or {}).items() if n not in WITHOUT}
    | {"storage": ("layout", "zero2", "zero3", ONCE, HYBRID)},
    relations=(
        Degrees(
            hybrid=("zero2", "zero3"), sequence=False, whole_expert_groups=True, experts_where_stored=True
        ),
    ),
)
