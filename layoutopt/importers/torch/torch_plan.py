"""`plan.torch`: a plan in the user's own PyTorch module.

Every decision of the plan is applied; a search has no others (`layoutopt.frameworks.torch`). A table of
docs/guides/torch.md says by what.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from layoutopt.importers.arrays.model import ImportedModel
from layoutopt.importers.torch.calls import batch_path, called, copied, torch_module
from layoutopt.importers.torch.capture import loss_of
from layoutopt.importers.torch.parallelize import by_use, parallelized, same_everywhere
from layoutopt.importers.torch.pipeline import Pipeline, part_of, stage_numbers
from layoutopt.importers.torch.ranks import DATA, EXPERTS, PIPE, TENSOR, Dtypes, PlanRanks
from layoutopt.importers.torch.styles import StyleFlow
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import BACKWARD, BETWEEN, GRADIENT, SPLIT, VARIABLE

Loss = Callable[[Any, Any], Any]
SAID = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that `torchrun` sets for each process."""
DIVISIONS = {"div", "divide", "true_divide", "__truediv__"}
KEEPING = {"clamp", "clamp_min", "clip", "to", "float", "double", "type_as"}
"""Functions of a number that is the same, but where a mask is empty."""


def _check_processes(distributed: Any, devices: int) -> None:
    """UserError unless this is one of as many processes."""
    told = all(name in os.environ for name in SAID)
    begun = distributed.is_initialized()
    there = distributed.get_world_size() if begun else int(os.environ["WORLD_SIZE"]) if told else 0
    if there != devices:
        found = f"{there} run" if there else "this program was started as one, without torchrun"
        raise UserError(
            f"plan.torch: the plan is for {devices} devices with a process each, but {found}; start "
            f"it with torchrun, e.g. torchrun --nproc-per-node {devices} PROGRAM.py on one node"
        )


@dataclass(frozen=True)
class WeightedLoss:
    """(module, part of the batch) -> its loss times its weight, the weight, and whether losses add up.

    Attributes:
      loss: loss(outputs, batch); None: the module returns it, as a scalar, as `.loss` or in a tuple.
      parts: microbatches.
      ranks: with other rows.
      divided: the loss is a sum divided by a number, as of unmasked elements, which is its weight.
    """

    loss: Loss | None
    parts: int
    ranks: int = 1
    divided: bool = False

    def __call__(self, module: Any, part: Any) -> tuple[Any, Any, bool]:
        args, kwargs = called(module, part)
        counted = CountedMean()
        with counted.mode:
            outputs = module(*args, **kwargs)
            found = loss_of(outputs if self.loss is None else self.loss(outputs, part))
        several, weight = self.parts * self.ranks > 1, None
        if several and self.divided:
            found, number = counted.divided(found)
        else:
            if several:
                counted.check(found)
            number = weight = counted.weight(self.parts)
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        number = torch_module().as_tensor(number, device=found.device, dtype=found.dtype)
        return (found, number, False) if weight is None else (found * number, number, counted.summed)


class CountedMean:
    """Counts the elements that the module's cross entropies are over.

    Attributes:
      mode: to be entered around the module's call.
      summed: the loss is a sum: that of the batch is the sum of those of its parts.
    """

    def __init__(self) -> None:
        torch = torch_module()
        outer, losses = self, (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)

        class CountingMode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
            def __torch_function__(self, of: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if of in losses:
                    outer._count(*args, **kwargs)
                found = of(*args, **kwargs)
                name, few = getattr(of, "__name__", ""), [torch.is_tensor(x) and not x.ndim for x in args]
                if kwargs.get("reduction") == "sum":
                    outer._sums.append(found)
                elif of in (torch.sum, torch.Tensor.sum):
                    outer._plain = found
                elif name in DIVISIONS and few == [True, True] and not args[1].requires_grad:
                    outer._quotient = (found, *args)
                elif name in KEEPING and few[0]:
                    outer._from.append((found, args[0]))
                return found

        self.mode = CountingMode()
        self._counts, self._sums = list[Any](), list[Any]()
        self._plain: Any = None
        self._quotient: tuple[Any, Any, Any] = (None, None, None)
        self._from = list[tuple[Any, Any]]()

    def _count(self, input: Any, target: Any, weight: Any = None, *args: Any, **kwargs: Any) -> None:
        if weight is not None:
            raise UserError(
                "train_step: the loss weights classes, so its mean over ranks and microbatches is not the "
                "batch's; use a loss without them"
            )
        if kwargs.get("reduction", "mean") == "mean" and not target.is_floating_point():
            self._counts.append((target != kwargs.get("ignore_index", -100)).float().sum())

    def divided(self, loss: Any) -> tuple[Any, Any]:
        """The sum that a loss is, and the number that divides it, before `clamp`."""
        found, total, number = self._quotient
        if found is not loss:
            raise UserError(
                "train_step: the loss is a sum divided by a number of elements, but is not what "
                "this division gives; return what the division gives as it is"
            )
        for made, own in self._from[::-1]:
            number = own if made is number else number
        return total, number

    def check(self, loss: Any) -> None:
        """UserError if it may be neither a sum over examples nor a mean."""
        summed = self._sums and not self._counts and loss is self._sums[-1]
        if (self._sums and not summed) or (not self._counts and loss is self._plain):
            raise UserError(
                "train_step: whether the loss is a sum over examples or a mean cannot be told; use "
                "reduction='mean', or return what a loss function with reduction='sum' gives as it is"
            )

    @property
    def summed(self) -> bool:
        return bool(self._sums and not self._counts)

    def weight(self, parts: int) -> Any:
        """The weight of a loss beside those of other parts: the targets that are not ignored, of which a
        part may have more than another; 1 of a sum."""
        if self.summed:
            return 1.0
        return (torch_module().stack(self._counts).mean() if self._counts else 1.0) / parts


class ModuleStep:
    """step(batch) -> the loss of the whole batch, of this rank's part of it (`rows`).

    A mean over tokens is that over the tokens of all ranks and microbatches, also where padding leaves some
    more of them than others.

    Args:
      plan: its `parallelize` returned the module.
      mesh: of the ranks by use (`parallelize.by_use`).
      loss, most: as `TorchPlan.train_step` has `loss` and `clip_norm`.
    """

    def __init__(
        self, plan: TorchPlan, mesh: Any, module: Any, optimizer: Any, loss: Loss | None, most: float | None
    ) -> None:
        self.module, self.optimizer, self.mesh, self.clip_norm = module, optimizer, mesh, most
        self.stage, self.parts = plan.ranks.stage, plan.ranks.options.microbatches
        assert plan.model.origin is not None
        arrays, batch = plan.model.origin.batch.items(), plan.model.batch_dim
        # The axis that the batch is; None: an array has none.
        self._axes = {p: next((i for i, n in enumerate(a.axes) if batch in n), None) for p, a in arrays}
        self._data = mesh[DATA]
        self._ways = self._data.size()
        self._loss = WeightedLoss(loss, self.parts, self._ways, plan.model.divided)
        self._rank = self._data._flatten("data").get_local_rank() if self._ways > 1 else 0
        counted = mesh[PIPE, *DATA]
        self._group = counted._flatten("counted").get_group() if counted.size() > 1 else None

    def __call__(self, batch: Any) -> Any:
        torch = torch_module()
        from torch.distributed.tensor.parallel import loss_parallel

        parts = [self._part(batch, self.parts, i, "microbatches") for i in range(self.parts)]
        with loss_parallel():
            staged = isinstance(self.module, Pipeline)
            found = self.module.run(self._loss, parts, self._ready) if staged else self._run(parts)
        # Only the last stage of a pipeline has a loss.
        sums = torch.zeros(3, dtype=torch.float64, device=self.mesh.device_type)
        for value, weight, summed in found:
            value = torch.where(weight > 0, value, 0.0)
            sums += torch.stack([value, weight, torch.full_like(weight, summed)])
        if self._group is not None:
            torch.distributed.all_reduce(sums, group=self._group)
        total = torch.where(sums[2] > 0, 1.0, sums[1].clamp(min=1e-30))  # nothing may count
        # FSDP divides the sum of the gradients by the ranks.
        self._scaled(self._ways / total)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums[0] / total

    def _run(self, parts: Sequence[Any]) -> list[tuple[Any, Any, bool]]:
        found = []
        for i, part in enumerate(parts):
            # Autocast would read what it cast of weights before FSDP gathered them anew, and lose gradients.
            torch_module().clear_autocast_cache()
            self._ready(self.module, i == len(parts) - 1)
            loss, weight, summed = self._loss(self.module, part)
            loss.backward()
            found.append((loss.detach(), weight, summed))
        return found

    def _ready(self, module: Any, last: bool) -> None:
        """Prepares what `fully_shard` splits for a backward pass; `last`: of all microbatches."""
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(last or (GRADIENT, BACKWARD) in SPLIT[self.stage])
            # Parameters that lie whole between passes are gathered once for all microbatches.
            module.set_reshard_after_backward(last or (VARIABLE, BETWEEN) in SPLIT[self.stage])

    def rows(self, batch: Any) -> Any:
        """This rank's rows of a whole batch; tensor ranks have the same. Arrays without a batch stay."""
        return self._part(batch, self._ways, self._rank, "data ranks")

    def _part(self, batch: Any, ways: int, at: int, what: str) -> Any:
        torch = torch_module()

        def own(keys: Any, x: Any) -> Any:
            name = batch_path(keys)
            axis = self._axes.get(name, 0)
            if axis is None or not torch.is_tensor(x) or not x.ndim:
                return x
            if x.shape[axis] % ways:
                raise UserError(
                    f"train_step: {name!r} has {x.shape[axis]} rows, which {ways} {what} do not divide; "
                    f"give a multiple of {ways}"
                )
            return x.narrow(axis, at * (x.shape[axis] // ways), x.shape[axis] // ways)

        return torch.utils._pytree.tree_map_with_path(own, batch)

    def _scaled(self, by: Any) -> None:
        torch = torch_module()
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        local = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
        for g, x in zip(grads, local, strict=True):
            if not x.ndim and self._ways > 1:
                torch.distributed.all_reduce(x, group=self._data._flatten("data").get_group())
                x /= self._ways
            if hasattr(g, "device_mesh") and EXPERTS in g.device_mesh.mesh_dim_names:
                # FSDP has divided by fewer ranks: the others' rows came to this one.
                x /= g.device_mesh[EXPERTS].size()
        if self.clip_norm is not None:
            # The parameters lie on several meshes, which torch's own clip_grad_norm_ refuses.
            ranks = self.mesh[(*DATA, TENSOR)]
            pairs = zip(grads, local, strict=True)
            squares = sum(x.float().square().sum() / _copies(g, ranks) for g, x in pairs)
            torch.distributed.all_reduce(squares)
            by = by * torch.clamp(self.clip_norm / (squares.sqrt() * by + 1e-6), max=1.0)
        torch._foreach_mul_(local, by)


def _copies(grad: Any, mesh: Any) -> int:
    """How many of all ranks hold the same elements."""
    placed = zip(grad.device_mesh.shape, grad.placements, strict=True) if hasattr(grad, "placements") else ()
    # `_StridedShard` is no `Shard`.
    return int(mesh.size()) // math.prod(size for size, placement in placed if not placement.is_replicate())


class TorchPlan:
    """A plan for a PyTorch module.

    Args:
      of, flow: of the module.
      types: as `PlanRanks` has them.
    """

    def __init__(
        self, of: ImportedModel, flow: StyleFlow, mesh: Mesh, layout: Layout, options: Options, types: Dtypes
    ) -> None:
        self.model, self.styles = of, flow
        layers, experts = {stack.dim for stack in flow.stacks}, frozenset(flow.experts.values())
        self.ranks = PlanRanks(mesh, layout, options, flow.parameters, layers, experts, types)
        self._mesh: Any = None

    def placements(self) -> dict[str, list[Any]]:
        """Path of a parameter -> DTensor's placement between steps for each axis of the plan's mesh."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        def placement(split: tuple[int, int] | None) -> Any:
            if split is None:
                return Replicate()
            axis, factor = split
            return Shard(axis) if factor == 1 else _StridedShard(axis, split_factor=factor)

        return {
            path: [*map(placement, self.ranks.splits(self.ranks.stored(array)))]
            for path, array in self.ranks.parameters.items()
        }

    def parallelize(self, module: Any, device_mesh: Any = None) -> Any:
        """The module with the plan applied, in place.

        Args:
          device_mesh: with the plan's axes; by default a new one of all processes.

        Raises:
          UserError: another module than the plan's, another mesh, or another number of processes.
        """
        torch = torch_module()
        found = {path for path, _ in module.named_parameters(remove_duplicate=False)}
        for path in self.ranks.parameters:
            if path not in found:
                raise UserError(
                    f"plan.torch: the module has no parameter {path!r}; {known_names(path, found)}"
                )
        if device_mesh is None:
            _check_processes(torch.distributed, self.ranks.mesh.devices)
            sizes = tuple(size for _, size in self.ranks.mesh.axes)
            kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
            device_mesh = torch.distributed.init_device_mesh(
                str(kind), sizes, mesh_dim_names=self.ranks.mesh.names
            )
        self._mesh = by_use(self.ranks, device_mesh)
        same_everywhere(module)
        if not self.ranks.pipe:
            return parallelized(module, self.ranks, self._mesh, self.styles)
        outline = self.styles.outline
        assert outline is not None
        pipe = self._mesh[PIPE]
        stages, schedule = self.ranks.size(self.ranks.pipe), self.ranks.options.schedule
        spans = stage_numbers(len(outline.stack.paths), stages, schedule)[pipe.get_local_rank()]
        parts = {}
        for n, span in enumerate(spans):
            parts[n * stages + pipe.get_local_rank()] = part = part_of(copied(module), outline, *span)
            part.module = parallelized(part.module, self.ranks, self._mesh, self.styles, part)
        device = torch.device(device_mesh.device_type)
        return Pipeline(parts, schedule, stages, pipe.get_group(), device)

    def train_step(
        self, module: Any, optimizer: Any, loss: Loss | None = None, clip_norm: float | None = None
    ) -> ModuleStep:
        """A training step of the parallelized module: step(rows of this rank) -> the loss of the whole batch.

        Args:
          optimizer: of torch.optim, over the module's parameters after `parallelize`.
          loss: loss(outputs, batch); by default `outputs.loss`, or the output.
          clip_norm: the largest norm of all gradients together.
        """
        if self._mesh is None:
            raise UserError(
                "plan.torch: the module of train_step is not parallelized; call parallelize(module) first"
            )
        return ModuleStep(self, self._mesh, module, optimizer, loss, clip_norm)
