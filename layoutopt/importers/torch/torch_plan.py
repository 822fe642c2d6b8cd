"""`plan.torch`: a plan in the user's own PyTorch module.

Every decision of the plan is applied; a search has no others (`layoutopt.frameworks.torch`):
  layout        DTensor's styles of linear maps and embeddings
  storage       `fully_shard` of each layer: ZeRO-3, ZeRO-2 (`reshard_after_forward=False`), over all data
                ranks or some of them (HSDP); nothing stored split: one replica for each data rank
  recompute     a checkpoint of each layer, with a policy that saves what is kept
  microbatches  parts of the batch, whose gradients are reduced with the last one
"""

from __future__ import annotations

from typing import Any

from layoutopt.importers.torch.internals import torch_module
from layoutopt.importers.torch.parallelize import by_use, parallelized
from layoutopt.importers.torch.ranks import PlanRanks
from layoutopt.importers.torch.step import Loss, ModuleStep
from layoutopt.importers.torch.styles import StyleFlow, layers_of
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model


class TorchPlan:
    """A plan for a PyTorch module.

    Args:
      styles: of the module.
    """

    def __init__(
        self,
        model: Model,
        styles: StyleFlow,
        mesh: Mesh,
        layout: Layout,
        options: Options,
    ) -> None:
        self.model, self.partial = model, styles.partial
        self.ranks = PlanRanks(mesh, layout, options, styles.parameters)
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
          UserError: another module than the plan's, or another mesh.
        """
        torch = torch_module()
        found = {path for path, _ in module.named_parameters(remove_duplicate=False)}
        for path in self.ranks.parameters:
            if path not in found:
                raise UserError(
                    f"plan.torch: the module has no parameter {path!r}; {known_names(path, found)}"
                )
        if device_mesh is None:
            sizes = tuple(size for _, size in self.ranks.mesh.axes)
            kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
            device_mesh = torch.distributed.init_device_mesh(
                str(kind), sizes, mesh_dim_names=self.ranks.mesh.names
            )
        self._mesh = by_use(self.ranks, device_mesh)
        split = {v for name in self.partial if self.ranks.layout.axes(name) for v in self.partial[name]}
        partial = [path for path, array in self.ranks.parameters.items() if array.variable in split]
        return parallelized(
            module,
            self.ranks,
            self._mesh,
            layers_of(module, self.ranks.parameters, self.model.graph),
            partial,
        )

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
        return ModuleStep(module, optimizer, self._mesh, self.ranks.options.microbatches, loss, clip_norm)
