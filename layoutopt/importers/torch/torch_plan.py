"""`plan.torch`: a plan in the user's own PyTorch module.

Every decision of the plan is applied; a search has no others (`layoutopt.frameworks.torch`). A table of
docs/guides/torch.md says by what.
"""

from __future__ import annotations

from typing import Any

from layoutopt.importers.arrays.model import ImportedModel
from layoutopt.importers.torch.internals import torch_module
from layoutopt.importers.torch.parallelize import by_use, parallelized, same_everywhere
from layoutopt.importers.torch.pipeline import Pipeline, part_of, stage_numbers
from layoutopt.importers.torch.ranks import PIPE, PlanRanks
from layoutopt.importers.torch.step import Loss, ModuleStep
from layoutopt.importers.torch.styles import StyleFlow
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options


class TorchPlan:
    """A plan for a PyTorch module.

    Args:
      styles: of the module.
      types: as `PlanRanks` has them.
    """

    def __init__(
        self,
        model: ImportedModel,
        styles: StyleFlow,
        mesh: Mesh,
        layout: Layout,
        options: Options,
        types: tuple[str, str] = ("", ""),
    ) -> None:
        self.model, self.styles = model, styles
        layers = {stack.dim for stack in styles.stacks}
        self.ranks = PlanRanks(
            mesh, layout, options, styles.parameters, layers, frozenset(styles.experts.values()), types
        )
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
            parts[n * stages + pipe.get_local_rank()] = part = part_of(module, outline, *span)
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
        assert self.model.origin is not None
        batch = self.model.batch_dim
        axes = {
            path: next((a for a, names in enumerate(array.axes) if batch in names), None)
            for path, array in self.model.origin.batch.items()
        }
        parts = self.ranks.options.microbatches
        stage = self.ranks.stage
        return ModuleStep(module, optimizer, self._mesh, parts, axes, loss, clip_norm, stage)
