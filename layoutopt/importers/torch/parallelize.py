"""A plan in a PyTorch module: tensor parallel styles, recomputed layers, FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from layoutopt.importers.torch.internals import torch_module
from layoutopt.importers.torch.ranks import PlanRanks
from layoutopt.importers.torch.styles import summed_dims
from layoutopt.importers.torch.synced import sync_batch_norms
from mesh_tf_core.errors import UserError
from mesh_tf_core.lower.remat_policy import ATTENTION, PRODUCTS

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
"""The axes of the mesh by use."""


def by_use(ranks: PlanRanks, device_mesh: Any) -> Any:
    """The devices of a plan's mesh as a mesh of data ranks with whole weights, of those that shard them, and
    of tensor ranks.

    Raises:
      UserError: the mesh given is not the plan's.
    """
    torch = torch_module()
    names = ranks.mesh.names
    sizes = tuple(size for _, size in ranks.mesh.axes)
    if tuple(device_mesh.shape) != sizes or tuple(device_mesh.mesh_dim_names or names) != names:
        raise UserError(
            f"plan.torch: the plan's mesh is {ranks.mesh}, but the device mesh is {device_mesh}; give "
            f"init_device_mesh(device, {sizes}, mesh_dim_names={names})"
        )
    groups = (ranks.replicate, ranks.shard, ranks.tensor)
    used = [a for group in groups for a in group]
    order = [names.index(a) for a in (*used, *(a for a in names if a not in used))]
    devices = device_mesh.mesh.permute(order).reshape([ranks.size(group) for group in groups])
    return torch.distributed.DeviceMesh(
        device_mesh.device_type, devices, mesh_dim_names=(REPLICATE, SHARD, TENSOR)
    )


def parallelized(
    module: Any, ranks: PlanRanks, mesh: Any, layers: Mapping[str, str], partial: Iterable[str] = ()
) -> Any:
    """The module with a plan's decisions applied, in place.

    Args:
      mesh: as `by_use` has it.
      layers: path of a module that is an iteration of a loop -> the dimension of the loop.
      partial: paths of whole parameters whose gradients are parts of a sum over the tensor ranks.
    """
    tied = shared_parameters(module)
    _same_everywhere(module)
    if ranks.size(ranks.tensor) > 1:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import parallelize_module

        styles = dict(_styles(module, ranks))
        parallelize_module(module, mesh[TENSOR], styles)
        for path in (p for p, style in styles.items() if style.output_layouts == (Replicate(),)):
            # What was gathered is a view, and FSDP loses a view that is then written in place.
            module.get_submodule(path).register_forward_hook(lambda module, given, out: out.clone())
        _tie(module, tied)
        for path in dict.fromkeys(path.rpartition(".")[0] for path in partial):
            _sum_gradients(module.get_submodule(path), mesh[TENSOR].get_group())
    if ranks.options.recompute and hasattr(module, "config"):
        module.config.use_cache = (
            False  # a layer that runs again would append to the cache of transformers again
        )
    for policy in ranks.options.recompute:
        for path in (p for p, dim in layers.items() if dim == policy.dim):
            _checkpointed(module.get_submodule(path), policy.keep)
    if ranks.data:
        if ranks.size(ranks.data) > 1:
            sync_batch_norms(module, mesh[REPLICATE, SHARD]._flatten("data").get_group())
        whole = {p for paths in tied for p in paths}
        for path in _wrapped(module, layers, whole):
            _shard(module.get_submodule(path), ranks, mesh)
        _shard(module, ranks, mesh)
    return module


def _same_everywhere(module: Any) -> None:
    """Gives every rank the values of the first: `fully_shard` would make one array of several ranks' own."""
    torch = torch_module()
    for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
        if not tensor.is_meta:
            torch.distributed.broadcast(tensor.detach(), src=0)


def shared_parameters(module: Any) -> list[list[str]]:
    """The paths of each parameter that has several."""
    found: dict[int, list[str]] = {}
    for path, p in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(p), []).append(path)
    return [paths for paths in found.values() if len(paths) > 1]


def _tie(module: Any, tied: Iterable[list[str]]) -> None:
    """Makes parameters one again: `parallelize_module` replaces each path's by another, so that a tied weight
    would be two, each with half of the gradient."""
    for first, *others in tied:
        own = module.get_parameter(first)
        for path in others:
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent).register_parameter(name, own)


def _styles(module: Any, ranks: PlanRanks) -> Iterator[tuple[str, Any]]:
    """Path of a module -> its style."""
    torch = torch_module()
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    summed, seen = summed_dims(module, ranks.parameters), set[int]()
    for path, array in ranks.parameters.items():
        owner, _, own = path.rpartition(".")
        axes = ranks.read(array)
        if own != "weight" or not any(axes) or id(module.get_submodule(owner)) in seen:
            continue
        seen.add(id(module.get_submodule(owner)))
        if isinstance(module.get_submodule(owner), torch.nn.Embedding):
            yield (
                owner,
                RowwiseParallel(input_layouts=Replicate())
                if axes[0]
                else ColwiseParallel(output_layouts=Replicate()),
            )
        elif axes[0]:
            whole: dict[str, Any] = {"output_layouts": Replicate()} if not summed & {*array.axes[0]} else {}
            yield owner, ColwiseParallel(**whole)
        else:
            yield owner, RowwiseParallel()


def _sum_gradients(module: Any, group: Any) -> None:
    """Adds up the gradients of a module's own parameters over the tensor ranks, each of which has a part."""
    torch = torch_module()

    class Summed(torch.autograd.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(context: Any, grad: Any) -> Any:
            grad = grad.contiguous()
            torch.distributed.all_reduce(grad, group=group)
            return grad

    forward: Callable[..., Any] = module.forward

    def summed(*args: Any, **kwargs: Any) -> Any:
        own = dict(module._parameters)
        try:
            module._parameters.update({n: Summed.apply(p) for n, p in own.items() if p is not None})
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    module.forward = summed


def _wrapped(module: Any, layers: Iterable[str], tied: set[str]) -> Iterator[str]:
    """What gathers its parameters on its own: each layer, and outside of them each module with a matrix, as
    the root keeps what it gathers until the backward pass. A tied weight is the root's."""
    inside = tuple(layers)
    # Each call of `fully_shard` makes arrays of its own: two layers would come apart.
    yield from (p for p in inside if not any(path.startswith(f"{p}.") for path in tied))
    for path, own in module.named_modules():
        if path and not any(path == p or path.startswith(f"{p}.") for p in inside):
            named = {f"{path}.{name}": p for name, p in own.named_parameters(recurse=False)}
            if any(p.ndim > 1 for p in named.values()) and not tied & named.keys():
                yield path


def _shard(module: Any, ranks: PlanRanks, mesh: Any) -> None:
    torch = torch_module()
    torch.distributed.fsdp.fully_shard(
        module, mesh=mesh[REPLICATE, SHARD], reshard_after_forward=ranks.stage != "zero2"
    )


def _products() -> Mapping[str, tuple[Any, ...]]:
    """The operations whose results a kind of kept values means."""
    aten = torch_module().ops.aten
    attention = (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    )
    return {PRODUCTS: (aten.mm.default, aten.addmm.default), ATTENTION: attention}


def _checkpointed(layer: Any, keep: tuple[str, ...]) -> None:
    """Recomputes a layer in the backward pass, but for kept values."""
    torch = torch_module()
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    known = _products()
    saved = frozenset(op for kind in keep for op in known[kind])

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    more: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if saved else {}
    )
    forward: Callable[..., Any] = layer.forward

    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)

    layer.forward = again
