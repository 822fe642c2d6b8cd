"""Sums over the ranks of a group, and linear maps and norms around them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any
from unittest.mock import patch

from layoutopt.importers.torch.calls import torch_module

WHOLE = "layoutopt_whole"
"""Attribute of what a block is given: the same, whose gradient is summed once for all its linear maps."""


def _total(x: Any, group: Any) -> Any:
    torch = torch_module()
    x = x.clone(memory_format=torch.contiguous_format)  # others may have this tensor, too
    torch.distributed.all_reduce(x, group=group)
    return x


def _each(x: Any, group: Any) -> Any:
    """The same few numbers of every rank."""
    torch = torch_module()
    found = x.new_empty(group.size(), *x.shape)
    if x.device.type == "cpu":  # in Gloo's ring, each rank would wait for all others one after the other
        torch.distributed.all_to_all_single(found, x.expand_as(found).contiguous(), group=group)
    else:
        torch.distributed.all_gather_into_tensor(found, x, group=group)
    return found


@cache
def _sum() -> Any:
    torch = torch_module()

    class Sum(torch.autograd.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(context: Any, x: Any, group: Any) -> Any:
            return _total(x, group)

        @staticmethod
        def backward(context: Any, grad: Any) -> Any:
            return grad, None  # each rank has that of the sum

    return Sum


def read_in_parts(x: Any, group: Any) -> Any:
    """A value that all ranks have, whose gradient is the sum over ranks of their parts."""
    own = x.view_as(x)
    if own.requires_grad:
        own.register_hook(partial(_total, group=group))
    return own


def split_linear(linear: Any, mesh: Any, output: Any = None) -> None:
    """Splits a linear map over ranks, in place.

    Args:
      output: where its results lie; None: each rank has some columns of them.
    """
    torch = torch_module()
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    group = mesh.get_group()
    for name, p in [*linear.named_parameters(recurse=False)]:
        place = Shard(0) if output is None else Shard(1) if name == "weight" else Replicate()
        split = distribute_tensor(p.detach(), mesh, [place], src_data_rank=None)
        linear.register_parameter(name, torch.nn.Parameter(split, requires_grad=p.requires_grad))

    def columns(input: Any) -> Any:
        whole = getattr(input, WHOLE, None)
        whole = read_in_parts(input, group) if whole is None else whole
        bias = None if linear.bias is None else linear.bias.to_local()
        return torch.nn.functional.linear(whole, linear.weight.to_local(), bias)

    def rows(input: Any) -> Any:
        part = torch.nn.functional.linear(input, linear.weight.to_local())
        if output.is_replicate():
            whole = _sum().apply(part, group)
            return whole if linear.bias is None else whole + linear.bias.to_local()
        whole = DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[output])
        return (whole if linear.bias is None else whole + linear.bias).to_local()

    linear.forward = columns if output is None else rows


def sum_gradients(module: Any, name: str, group: Any) -> None:
    """Adds up the gradient of a module's own parameter over ranks, each of which has a part of it."""
    forward: Callable[..., Any] = module.forward

    def summed(*args: Any, **kwargs: Any) -> Any:
        own = module._parameters[name]
        try:
            module._parameters[name] = read_in_parts(own, group)
            return forward(*args, **kwargs)
        finally:
            module._parameters[name] = own

    module.forward = summed


def sync_batch_norms(module: Any, group: Any, paths: Collection[str] = ()) -> None:
    """Makes every BatchNorm of a module normalise over the examples of all ranks of a group.

    Args:
      paths: of modules whose own code calls `batch_norm`, besides those of torch's classes.
    """
    norms = torch_module().nn.modules.batchnorm
    for path, own in module.named_modules():
        if isinstance(own, norms.SyncBatchNorm):  # which does the same on GPUs alone
            own.forward = partial(norms._BatchNorm.forward, own)
        if path in paths or isinstance(own, norms._BatchNorm):
            own.forward = partial(_synced, own.forward, group)


def _synced(forward: Callable[..., Any], group: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A call with the statistics of all ranks, also where its checkpoints run again, after the mode's end."""

    def again(owner: Any, name: str) -> Any:
        door = getattr(owner, name)
        return patch.object(owner, name, lambda of, *a, **k: door(partial(_synced, of, group), *a, **k))

    own = torch_module().utils.checkpoint
    parts = again(own, "_checkpoint_without_reentrant_generator"), again(own.CheckpointFunction, "apply")
    with parts[0], parts[1], _synced_calls()(group):
        return forward(*args, **kwargs)


@cache
def _synced_calls() -> Any:
    torch = torch_module()
    running, affine = ("running_mean", "running_var"), ("weight", "bias")
    how = "training", "momentum", "eps"
    taken = {
        torch.batch_norm: ("input", *affine, *running, *how),
        torch.nn.functional.batch_norm: ("input", *running, *affine, *how),
    }
    default = dict.fromkeys((*affine, *running, "training")) | {"momentum": 0.1, "eps": 1e-5}

    class SyncedCalls(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
        """Calls of `batch_norm` with the statistics of the whole batch."""

        def __init__(self, group: Any) -> None:
            super().__init__()
            self.group = group

        def __torch_function__(self, of: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = default | dict(zip(taken.get(of, ()), args, strict=False)) | (kwargs or {})
            if of not in taken or not given["training"]:
                return of(*args, **(kwargs or {}))
            known = (given[name] for name in ("input", *affine, "eps", "momentum", *running))
            return _synced_norm().apply(self.group, *known)

    return SyncedCalls


@cache
def _synced_norm() -> Any:
    torch = torch_module()

    class SyncedNorm(torch.autograd.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(context: Any, group: Any, x: Any, weight: Any, bias: Any, eps: float, *rest: Any) -> Any:
            momentum, *running = rest
            zeros = x.new_zeros(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
            means = _each(torch.stack(torch.batch_norm_update_stats(x, zeros, zeros + 1, 0.0)), group)
            mean, var = means.mean(0)
            var += means[:, 0].var(0, correction=0)
            context.group, context.eps, context.given = group, eps, (weight is not None, bias is not None)
            context.save_for_backward(x, weight, mean, var)
            count = group.size() * x.numel() / x.shape[1]
            # Not after the call, where a checkpoint that runs again stops when all is saved.
            for old, now in zip(running, (mean, var * count / (count - 1)), strict=True):
                if old is not None:
                    old.copy_(old.to(now.dtype).lerp_(now, momentum))
            scale, shift = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
            return torch.nn.functional.batch_norm(x, mean, var, scale, shift, eps=eps)

        @staticmethod
        def backward(context: Any, grad: Any) -> Any:
            x, weight, mean, var = context.saved_tensors
            scale, weight = torch.rsqrt(var + context.eps), None if weight is None else weight.to(mean.dtype)
            known = grad, x, weight, mean, var, None, None, False, context.eps, [True] * 3
            own, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(*known)
            count = context.group.size() * x.numel() / x.shape[1]
            along, all_of = _each(torch.stack([by_weight, by_bias]), context.group).sum(0) / count
            slope = -scale.square() * along
            if weight is not None:
                slope, all_of = slope * weight, all_of * weight
            shape = [1, -1, *[1] * (x.ndim - 2)]
            own = own - (scale * all_of + slope * mean).reshape(shape)
            own = torch.addcmul(own, x, slope.reshape(shape)).to(x.dtype)
            by = (g if given else None for g, given in zip((by_weight, by_bias), context.given, strict=True))
            return None, own, *by, None, None, None, None

    return SyncedNorm
