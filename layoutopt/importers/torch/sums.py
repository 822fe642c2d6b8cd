"""Sums over the ranks of a group, and linear maps and norms around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from layoutopt.importers.torch.calls import torch_module

WHOLE = "layoutopt_whole"
"""Attribute of what a block is given: the same, whose gradient is summed once for all its linear maps."""


def _total(x: Any, group: Any) -> Any:
    torch = torch_module()
    x = x.clone(memory_format=torch.contiguous_format)  # others may have this tensor, too
    torch.distributed.all_reduce(x, group=group)
    return x


def _few_total(x: Any, group: Any) -> Any:
    """The same of a few numbers. In Gloo's ring, each rank would wait for all others one after the other."""
    if x.device.type != "cpu":
        return _total(x, group)
    torch = torch_module()
    own = x.expand(group.size(), *x.shape).contiguous()
    found = torch.empty_like(own)
    torch.distributed.all_to_all_single(found, own, group=group)
    return found.sum(0)


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

    def columns(x: Any) -> Any:
        whole = getattr(x, WHOLE, None)
        whole = read_in_parts(x, group) if whole is None else whole
        bias = None if linear.bias is None else linear.bias.to_local()
        return torch.nn.functional.linear(whole, linear.weight.to_local(), bias)

    def rows(x: Any) -> Any:
        part = torch.nn.functional.linear(x, linear.weight.to_local())
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


def sync_batch_norms(module: Any, group: Any) -> None:
    """Makes every BatchNorm of a module normalise over the examples of all ranks of a group."""
    for own in module.modules():
        if isinstance(own, torch_module().nn.modules.batchnorm._BatchNorm):
            own.forward = _synced(own, group)  # `torch.nn.SyncBatchNorm` does the same on GPUs alone


@cache
def _synced_norm() -> Any:
    torch = torch_module()

    class SyncedNorm(torch.autograd.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(context: Any, x: Any, weight: Any, bias: Any, near: Any, group: Any, eps: float) -> Any:
            mean, var = torch.batch_norm_update_stats(x, near, torch.ones_like(near), 0.0)
            # Both in one message; near 0, squares of means lose nothing.
            off = mean - near
            off, square = _few_total(torch.stack([off, var + off.square()]), group) / group.size()
            mean, var = off + near, square - off.square()
            context.group, context.eps = group, eps
            context.save_for_backward(x, weight, mean, var)
            context.mark_non_differentiable(mean, var)
            return torch.nn.functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps), mean, var

        @staticmethod
        def backward(context: Any, grad: Any, *others: Any) -> Any:
            x, weight, mean, var = context.saved_tensors
            scale = torch.rsqrt(var + context.eps)
            given = grad, x, weight, mean, var, None, None, False, context.eps, [True, True, True]
            own, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(*given)
            count = context.group.size() * x.numel() / x.shape[1]
            along, all_of = _few_total(torch.stack([by_weight, by_bias]), context.group) / count
            slope = -scale.square() * along
            if weight is not None:
                slope, all_of = slope * weight, all_of * weight
            shape = [1, -1, *[1] * (x.ndim - 2)]
            own += (-scale * all_of - slope * mean).reshape(shape)
            own.addcmul_(x, slope.reshape(shape).to(x.dtype))
            return own, *((None, None) if weight is None else (by_weight, by_bias)), None, None, None

    return SyncedNorm


def _synced(norm: Any, group: Any) -> Any:
    torch = torch_module()
    alone = norm.forward

    def forward(x: Any) -> Any:
        if not norm.training and norm.track_running_stats:
            return alone(x)
        near = norm.running_mean.clone() if norm.track_running_stats else x.new_zeros(x.shape[1])
        found, mean, var = _synced_norm().apply(x, norm.weight, norm.bias, near, group, norm.eps)
        if norm.track_running_stats:
            with torch.no_grad():
                norm.num_batches_tracked.add_(1)
                count = group.size() * x.numel() / x.shape[1]
                share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
                norm.running_mean.lerp_(mean, share)
                norm.running_var.lerp_(var * count / (count - 1), share)
        return found

    return forward
