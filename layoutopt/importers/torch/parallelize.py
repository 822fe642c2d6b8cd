"""A plan in a PyTorch module: tensor parallel styles, recomputed layers, FSDP."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

from layoutopt.importers.torch.calls import torch_module
from layoutopt.importers.torch.capture import without_checkpoints
from layoutopt.importers.torch.ranks import DATA, EXPERTS, PIPE, TENSOR, PlanRanks, split_experts
from layoutopt.importers.torch.stacks import PassingHooks, TensorBlock, on_ranks
from layoutopt.importers.torch.styles import ReadBy, StyleFlow, linear_dims, owned
from layoutopt.importers.torch.sums import split_linear, sum_gradients, sync_batch_norms
from mesh_tf_core.errors import UserError
from mesh_tf_core.lower.remat_policy import ATTENTION, PRODUCTS
from mesh_tf_core.lower.storage import BACKWARD, BETWEEN, GRADIENT, SPLIT, VARIABLE


def by_use(ranks: PlanRanks, device_mesh: Any) -> Any:
    """The devices of a plan's mesh as a mesh of stages, of data ranks with whole weights, of those that shard
    them, and of tensor ranks.

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
    groups = (ranks.pipe, ranks.replicate, ranks.shard, ranks.tensor)
    used = [a for group in groups for a in group]
    order = [names.index(a) for a in (*used, *(a for a in names if a not in used))]
    chips = device_mesh.mesh.permute(order).reshape([ranks.size(group) for group in groups])
    return torch.distributed.DeviceMesh(device_mesh.device_type, chips, mesh_dim_names=(PIPE, *DATA, TENSOR))


def parallelized(module: Any, ranks: PlanRanks, mesh: Any, flow: StyleFlow, whole: Any = None) -> Any:
    """The module with a plan's decisions applied, in place.

    Args:
      mesh: as `by_use` has it.
      whole: what calls the module, a part of a stage; None: nothing does.
    """
    reads = flow.reads | {path: {""} for paths in shared_parameters(module) for path in paths}
    if ranks.size(ranks.tensor) > 1:
        split_weights(module, ranks, mesh[TENSOR], flow)
    if ranks.options.recompute and hasattr(module, "config"):
        module.config.use_cache = False  # a layer that runs again would append to the cache again
    apart = _with_experts(mesh, ranks) if ranks.size(ranks.experts) > 1 else None
    for path in flow.experts if apart is not None else ():
        if holds(module, path):
            split_experts(module.get_submodule(path), apart)
            _shard(module.get_submodule(path), ranks, apart)
    layers = [path for path in flow.layers if holds(module, path)]
    for policy in ranks.options.recompute:
        for path in [p for p in layers if flow.layers[p] == policy.dim][: policy.only or None]:
            _checkpointed(module.get_submodule(path), policy.keep)
    if flow.checkpoints:
        module.forward = without_checkpoints()(module.forward)
    if ranks.data or ranks.types[0]:
        if ranks.size(ranks.data) > 1:
            sync_batch_norms(module, mesh[DATA]._flatten("data").get_group(), flow.norms)
        # Where all lies whole until the end of the backward pass, more groups are more messages alone.
        often = (GRADIENT, BACKWARD) in SPLIT[ranks.stage]
        for path in _wrapped(module, layers, reads, flow.called, often):
            _shard(module.get_submodule(path), ranks, mesh)
        _shard(module if whole is None else whole, ranks, mesh, True)
    return module


def same_everywhere(module: Any) -> None:
    """Gives every rank the values of the first: `fully_shard` would make one array of several ranks' own."""
    torch = torch_module()
    for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
        if not tensor.is_meta:
            torch.distributed.broadcast(tensor.detach(), src=0)


def _wrapped(
    module: Any, layers: Collection[str], reads: ReadBy, called: Any = None, matrices: bool = True
) -> Iterator[str]:
    """What gathers its parameters on its own: each layer, and outside of them each module with a matrix, as
    the root keeps what it gathers until the backward pass. A weight that code around a module `reads`, as a
    tied one, is the root's, as is what is not `called`: nothing would gather it."""
    nn, lists = torch_module().nn, {p.rpartition(".")[0] for p in layers}
    lists = {p for p in lists if isinstance(module.get_submodule(p), nn.ModuleList | nn.ModuleDict)}
    for p, own in module.named_modules():  # layers that differ are no loop: the first of T5 has a table
        alike = isinstance(own, nn.ModuleList) and len(own) > 1 and len({*map(type, own)}) == 1
        if alike and not any(f"{p}.".startswith(f"{q}.") or q.startswith(f"{p}.") for q in lists):
            lists.add(p)
    every = [p for p, _ in module.named_modules() if called is None or p in called]
    beside = (p for p in every if p.rpartition(".")[0] in lists and [*module.get_submodule(p).parameters()])
    inside = tuple(dict.fromkeys((*layers, *beside)))
    left = {*reads}  # in no group so far: the next around a parameter has it

    def alone(path: str) -> bool:
        own = {p for p in left if p.startswith(f"{path}.")}
        if found := all(f"{reader}.".startswith(f"{path}.") for p in own for reader in reads[p]):
            left.difference_update(own)
        return found

    # Each call of `fully_shard` makes arrays of its own: two layers would come apart.
    yield from filter(alone, inside)
    for path in every[::-1] if matrices else ():  # what is inside of a module first
        own = module.get_submodule(path)
        if path and not any(path == p or path.startswith(f"{p}.") for p in inside):
            matrix = any(p.ndim > 1 for p in own.parameters(recurse=False))
            if matrix and not hasattr(own, "set_requires_gradient_sync") and alone(path):
                yield path


def _with_experts(mesh: Any, ranks: PlanRanks) -> Any:
    """The same ranks, those that shard weights apart by their experts."""
    sizes = mesh.mesh.shape
    ways = ranks.size(ranks.experts)
    apart = mesh.mesh.reshape(*sizes[:2], sizes[2] // ways, ways, sizes[3])
    names = (PIPE, *DATA, EXPERTS, TENSOR)
    return torch_module().distributed.DeviceMesh(mesh.device_type, apart, mesh_dim_names=names)


def _shard(module: Any, ranks: PlanRanks, mesh: Any, outer: bool = False) -> None:
    again = (VARIABLE, BETWEEN) in SPLIT[ranks.stage]
    scalars = {p for p in module.parameters() if not p.ndim}  # no axis to split; `ModuleStep` reduces them
    more: dict[str, Any] = {"ignored_params": scalars} if scalars else {}
    torch = torch_module()
    if ranks.types[0]:
        read, reduced = getattr(torch, ranks.types[0]), getattr(torch, ranks.reduced)
        # The trace converts what the whole module is called with, and nothing between its parts.
        more["mp_policy"] = torch.distributed.fsdp.MixedPrecisionPolicy(read, reduced, None, outer)
    torch.distributed.fsdp.fully_shard(module, mesh=mesh[DATA], reshard_after_forward=again, **more)


def _products() -> Mapping[str, tuple[Any, ...]]:
    """The operations whose results a kind of kept values means."""
    aten = torch_module().ops.aten
    kinds = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    attention = tuple(getattr(aten, f"_scaled_dot_product_{kind}").default for kind in kinds)
    return {PRODUCTS: (aten.mm.default, aten.addmm.default), ATTENTION: attention}


def _checkpointed(layer: Any, keep: tuple[str, ...]) -> None:
    """Recomputes a layer in the backward pass, but for kept values."""
    torch = torch_module()
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    known = _products()
    saved = frozenset(op for kind in keep for op in known[kind])

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    more: dict[str, Any] = {"context_fn": context} if saved else {}
    forward: Callable[..., Any] = without_checkpoints()(layer.forward)
    name = "_checkpoint_without_reentrant_generator"
    plain = patch.object(torch.utils.checkpoint, name, getattr(torch.utils.checkpoint, name))

    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with plain:
            return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)

    layer.forward = again


def split_weights(module: Any, ranks: PlanRanks, mesh: Any, flow: StyleFlow) -> None:
    """Splits the weights of a module over tensor ranks, in place.

    Args:
      mesh: of the tensor ranks.
    """
    tied = shared_parameters(module)
    exits: dict[str, int] = {}
    passes: list[tuple[PassingHooks, list[str], list[TensorBlock]]] = []
    for stack in flow.stacks:
        layers = [path for path in stack.paths if holds(module, path)]
        blocks = [b for b in flow.blocks(module, stack, ranks.layout) if _called(module, b.path)]
        further = [a for a, name in enumerate(stack.passed) if name in dict(ranks.layout.elsewhere)]
        axis = further[0] if further else None
        if layers and blocks:
            passes.append((on_ranks(mesh, stack.carries, axis), layers, blocks))
        if axis is not None:
            exits |= {path: axis for block in blocks for path in block.exits}
    for path, split in _splits(module, ranks, mesh, exits):
        split(module.get_submodule(path))
    _tie(module, tied)
    for hooks, layers, blocks in passes:
        hooks.install(module, layers, blocks)
    names = [name for name in flow.partial if ranks.layout.axes(name)]
    names += [name for name, _ in ranks.layout.elsewhere if name in flow.partial]
    summed = {variable for name in names for variable in flow.partial[name]}
    partial = (path for path, array in ranks.parameters.items() if array.variable in summed)
    for path in (p for p in partial if holds(module, p)):
        owner, _, name = path.rpartition(".")
        sum_gradients(module.get_submodule(owner), name, mesh.get_group())


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


def _splits(
    module: Any, ranks: PlanRanks, mesh: Any, exits: Mapping[str, int]
) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Path of a part of a module -> what splits its weights, in place.

    Args:
      exits: path of a linear map -> the axis of its results that stays split.
    """
    torch = torch_module()
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def by(style: Any) -> Callable[[Any], Any]:
        return partial(parallelize_module, device_mesh=mesh, parallelize_plan=style)

    held, seen = owned(module, ranks.parameters), set[Any]()
    _, summed = linear_dims(held)
    for path, array, part in held:
        owner, _, own = path.rpartition(".")
        axes = ranks.read(array)
        if own != "weight" or not any(axes) or not holds(module, path) or part in seen:
            continue
        seen.add(part)
        plain = type(part).forward is torch.nn.Linear.forward
        output = Shard(exits[owner]) if owner in exits else Replicate()
        if isinstance(part, torch.nn.Embedding):
            # A bias of each head is added to the scores of the rank's heads.
            output = Shard(-1) if summed & {*array.axes[1]} else Replicate()
            rows = RowwiseParallel(input_layouts=Replicate())
            yield owner, by(rows if axes[0] else ColwiseParallel(output_layouts=output))
        elif axes[0] and not summed & {*array.axes[0]}:
            # Classes stay split until the loss, and are a DTensor so that their number is the whole one.
            yield owner, by(ColwiseParallel(use_local_output=False))
        elif plain:
            yield owner, partial(split_linear, mesh=mesh, output=None if axes[0] else output)
        else:
            yield owner, by(ColwiseParallel() if axes[0] else RowwiseParallel(output_layouts=output))
