"""transformers and accelerate: FSDP2 with a tensor or expert plan beside it, as PyTorch has them.

FSDP cannot be combined with their pipelines, so no search under them has any.
"""

from dataclasses import replace

from layoutopt.frameworks import torch

PIPELINES = ("pipeline", "schedule")
SAYS = replace(
    torch.SAYS,
    name="transformers",
    says={name: values for name, values in (torch.SAYS.says or {}).items() if name not in PIPELINES},
)
