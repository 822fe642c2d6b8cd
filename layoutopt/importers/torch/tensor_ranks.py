"""Tensor parallelism: DTensor's styles of linear maps and embeddings, and what passes between them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from layoutopt.importers.torch.internals import torch_module
from layoutopt.importers.torch.passing import on_ranks, takes_whole
from layoutopt.importers.torch.ranks import PlanRanks
from layoutopt.importers.torch.stacks import TensorBlock
from layoutopt.importers.torch.styles import StyleFlow, summed_dims


def split_weights(module: Any, ranks: PlanRanks, mesh: Any, flow: StyleFlow) -> None:
    """Splits the weights of a module over tensor ranks, in place.

    Args:
      mesh: of the tensor ranks.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    tied = shared_parameters(module)
    exits: dict[str, int] = {}
    passes: list[tuple[int, int | None, list[str], list[TensorBlock]]] = []
    for stack in flow.stacks:
        layers = [path for path in stack.paths if holds(module, path)]
        blocks = [b for b in flow.blocks(module, stack, ranks.layout) if _called(module, b.path)]
        further = [a for a, name in enumerate(stack.passed) if name in dict(ranks.layout.elsewhere)]
        axis = further[0] if further else None
        if layers and blocks:
            passes.append((len(stack.passed), axis, layers, blocks))
        if axis is not None:
            exits |= {path: axis for block in blocks for path in block.exits}
    parallelize_module(module, mesh, dict(_styles(module, ranks, exits)))
    _tie(module, tied)
    for rank, axis, layers, blocks in passes:
        on_ranks(mesh, rank, axis).install(module, layers, blocks)
        for path in (p for block in blocks for p in block.entries):
            module.get_submodule(path).register_forward_pre_hook(takes_whole, prepend=True)
    names = [name for name in flow.partial if ranks.layout.axes(name)]
    names += [name for name, _ in ranks.layout.elsewhere if name in flow.partial]
    summed = {variable for name in names for variable in flow.partial[name]}
    partial = (path for path, array in ranks.parameters.items() if array.variable in summed)
    for path in (p for p in partial if holds(module, p)):
        owner, _, name = path.rpartition(".")
        _sum_gradients(module.get_submodule(owner), name, mesh.get_group())


def holds(module: Any, path: str) -> bool:
    """True if a module has a part with parameters, or a parameter: a stage of a pipeline has only some."""
    found, nn = operator.attrgetter(path)(module), torch_module().nn
    held = found.parameters() if isinstance(found, nn.Module) else [found]
    return any(isinstance(p, nn.Parameter) for p in held)


def _called(module: Any, path: str) -> bool:
    nn = torch_module().nn
    return holds(module, path) and not isinstance(module.get_submodule(path), nn.ModuleList | nn.ModuleDict)


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


def _styles(module: Any, ranks: PlanRanks, exits: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    """Path of a module -> its style.

    Args:
      exits: path of a linear map -> the axis of its results that stays split.
    """
    torch = torch_module()
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    summed, seen = summed_dims(module, ranks.parameters), set[int]()
    for path, array in ranks.parameters.items():
        owner, _, own = path.rpartition(".")
        axes = ranks.read(array)
        if own != "weight" or not any(axes) or not holds(module, path):
            continue
        if id(module.get_submodule(owner)) in seen:
            continue
        seen.add(id(module.get_submodule(owner)))
        if isinstance(module.get_submodule(owner), torch.nn.Embedding):
            # A bias of each head is added to the scores of the rank's heads.
            output = Shard(-1) if summed & {*array.axes[1]} else Replicate()
            rows = RowwiseParallel(input_layouts=Replicate())
            yield owner, rows if axes[0] else ColwiseParallel(output_layouts=output)
        elif axes[0]:
            # Classes stay split until the loss, and are a DTensor so that their number is the whole one.
            yield owner, ColwiseParallel(use_local_output=bool(summed & {*array.axes[0]}))
        else:
            output = Shard(exits[owner]) if owner in exits else Replicate()
            yield owner, RowwiseParallel(output_layouts=output)


def _sum_gradients(module: Any, name: str, group: Any) -> None:
    """Adds up the gradient of a module's own parameter over the tensor ranks, each of which has a part."""
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
        own = module._parameters[name]
        try:
            module._parameters[name] = Summed.apply(own)
            return forward(*args, **kwargs)
        finally:
            module._parameters[name] = own

    module.forward = summed
