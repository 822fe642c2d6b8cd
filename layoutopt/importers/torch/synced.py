"""Batch normalisation over the batch of all data ranks, as one device has it.

`torch.nn.SyncBatchNorm` does the same on GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from layoutopt.importers.torch.internals import torch_module


def sync_batch_norms(module: Any, group: Any) -> None:
    """Makes every BatchNorm of a module normalise over the examples of all ranks of a group."""
    for own in module.modules():
        if isinstance(own, torch_module().nn.modules.batchnorm._BatchNorm):
            own.forward = _synced(own, group)


def _synced(norm: Any, group: Any) -> Any:
    torch = torch_module()
    all_reduce: Callable[..., Any] = import_module("torch.distributed.nn.functional").all_reduce
    alone = norm.forward
    ranks = torch.distributed.get_world_size(group)

    def forward(x: Any) -> Any:
        if not norm.training and norm.track_running_stats:
            return alone(x)
        dims = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        mean = all_reduce(x.mean(dims), group=group) / ranks
        off = x - mean.reshape(shape)
        var = all_reduce(off.square().mean(dims), group=group) / ranks
        if norm.track_running_stats:
            with torch.no_grad():
                norm.num_batches_tracked.add_(1)
                count = ranks * x.numel() / x.shape[1]
                share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
                norm.running_mean.lerp_(mean.detach(), share)
                norm.running_var.lerp_(var.detach() * count / (count - 1), share)
        out = off * torch.rsqrt(var + norm.eps).reshape(shape)
        return out if norm.weight is None else out * norm.weight.reshape(shape) + norm.bias.reshape(shape)

    return forward
