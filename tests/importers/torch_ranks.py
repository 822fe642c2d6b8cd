"""A step of a parallelized module on several processes, beside a step on one."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.distributed.tensor import DTensor, distribute_tensor

from layoutopt.importers.torch.capture import loss_of


@dataclass(frozen=True)
class Found:
    """What a rank found, largest differences relative. Gradients are clipped to half of their norm.

    Attributes:
      held: elements of parameters, and `planned`; `names`: of the parameters.
      reduced: how often the gradients of one call of `fully_shard` were reduced, at most.
      misplaced: parameters that do not lie as the plan's placements say.
      read: element types in which linear maps read their weights.
    """

    loss: float
    gradient: float
    worst: str
    held: int
    planned: int
    names: set[str]
    misplaced: list[str]
    state: float
    reduced: int
    read: set[str]


def on_ranks(cases: Mapping[str, tuple[Any, ...]], folder: Path, count: int = 4) -> dict[str, list[Found]]:
    """Name -> what each rank found.

    Args:
      cases: name -> (plan.torch, module, batch), and True if the step runs inside torch.autocast.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.set_num_threads(1)  # forked processes must not share a pool of threads
    given = cases, port, str(folder), count
    torch.multiprocessing.start_processes(_rank, given, nprocs=count, start_method="fork")
    each = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(count)]
    return {name: [found[name] for found in each] for name in cases}


def _rank(rank: int, cases: Mapping[str, tuple[Any, ...]], port: int, folder: str, count: int) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
    os.environ["WORLD_SIZE"] = str(count)
    distributed.init_process_group("gloo")
    found = {name: _compared(*case) for name, case in cases.items()}
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    distributed.destroy_process_group()


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def alone(module: Any, batch: Any, read: Any = None) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Loss, gradients and buffers of one device, which reads parameters and batch in an element type."""
    own = copy.deepcopy(module)
    if read is None:
        loss = own(**batch)
    else:
        narrow = {n: p.to(read) for n, p in own.named_parameters()}
        given = {n: x.to(read) if x.is_floating_point() else x for n, x in batch.items()}
        loss = torch.func.functional_call(own, narrow, (), given)
    loss = loss_of(loss)
    loss.backward()
    gradients = {n: p.grad for n, p in own.named_parameters(remove_duplicate=False)}
    return float(loss.detach()), gradients, dict(own.named_buffers())


def _compared(plan: Any, module: Any, batch: Any, cast: bool = False) -> Found:
    module = copy.deepcopy(module)
    module = module.float() if cast else module.double()  # so that rounding hides nothing
    if getattr(module, "config", None) is not None:
        module.config._experts_implementation = "eager"  # grouped products have no such type
    if not cast:
        batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    types = plan.ranks.types
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss, gradients, buffers = alone(module, batch, torch.float32 if types[0] else None)
    own = copy.deepcopy(module)
    whole = {n: p.detach().clone() for n, p in own.named_parameters(remove_duplicate=False)}
    sizes = tuple(size for _, size in plan.ranks.mesh.axes)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=plan.ranks.mesh.names)
    own = plan.parallelize(own, mesh)
    placements = plan.placements()
    held = dict(own.named_parameters(remove_duplicate=False))
    misplaced = [
        n
        for n, p in held.items()
        if not torch.equal(
            _local(p), distribute_tensor(whole[n], mesh, placements[n], src_data_rank=None).to_local()
        )
    ]
    kept: dict[str, Any] = {}

    class Keeps(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for n, p in own.named_parameters(remove_duplicate=False):
                kept[n] = None if p.grad is None else _whole(p.grad).clone()

    once = {id(g): g for g in gradients.values() if g is not None}.values()
    norm = float(sum(g.square().sum() for g in once)) ** 0.5
    gradients = {n: None if g is None else g / 2 for n, g in gradients.items() if n in held}
    read = set[str]()
    for part in [part.module for part in own.parts.values()] if hasattr(own, "parts") else [own]:
        for each in (each for each in part.modules() if isinstance(each, torch.nn.Linear)):
            each.register_forward_pre_hook(
                lambda own, args: read.update({str(args[0].dtype), str(own.weight.dtype)})
            )
    step = plan.train_step(own, Keeps(own.parameters(), lr=0.1), clip_norm=norm / 2)
    counted = mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=foreach_reduce)
    with counted as reduces, torch.autocast("cpu", torch.bfloat16, enabled=cast):
        ours = float(step(step.rows(batch)).detach())
    reduced = Counter(id(call.args[0][0]) for call in reduces.call_args_list)
    sizes_of = {n: float(g.abs().max()) for n, g in gradients.items() if g is not None}
    least = 1e-6 * max(sizes_of.values())  # that of a bias before a batch normalisation is nothing
    worst = max(
        (float((kept[n] - gradients[n]).abs().max()) / max(size, least), n) for n, size in sizes_of.items()
    )
    state = [float((_whole(b) - buffers[n]).abs().max()) for n, b in own.named_buffers() if n in buffers]
    once = {id(p): n for n, p in held.items()}
    sizes_held = sum(_local(held[n]).numel() for n in once.values())
    planned = sum(plan.ranks.elements(plan.ranks.parameters[n]) for n in once.values())
    difference = abs(ours - loss) / abs(loss)
    return Found(
        difference,
        *worst,
        sizes_held,
        planned,
        {*held},
        misplaced,
        max(state, default=0.0),
        max(reduced.values(), default=0),
        read,
    )
