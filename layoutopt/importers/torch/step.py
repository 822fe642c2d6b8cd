"""A training step of a parallelized module: microbatches, a mean over the tokens of all ranks, clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layoutopt.importers.torch.internals import taken, torch_module
from mesh_tf_core.errors import UserError

Loss = Callable[[Any, Mapping[str, Any]], Any]


class ModuleStep:
    """step(batch) -> the loss of the whole batch.

    Args:
      mesh: of the ranks by use (`parallelize.by_use`).
      parts: microbatches.
      loss: loss(outputs, batch); by default `outputs.loss`, or the output.
      clip_norm: the largest norm of all gradients together; None: they are not clipped.

    The batch is this rank's part of it (`rows`). A mean over tokens is that over the tokens of all ranks and
    microbatches, also where padding leaves some more of them than others.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Any,
        mesh: Any,
        parts: int,
        loss: Loss | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.module, self.optimizer, self.mesh, self.parts = module, optimizer, mesh, parts
        self.loss, self.clip_norm = loss or _own_loss, clip_norm
        self._data = mesh["replicate", "shard"]
        self._ways = self._data.size()
        flat = self._data._flatten("data") if self._ways > 1 else None
        self._group = None if flat is None else flat.get_group()
        self._rank = 0 if flat is None else flat.get_local_rank()

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        torch = torch_module()
        losses, counts = [], []
        for i in range(self.parts):
            part = self._part(batch, self.parts, i, "microbatches")
            if hasattr(self.module, "set_requires_gradient_sync"):
                self.module.set_requires_gradient_sync(i == self.parts - 1)
            counted = CountedMean()
            with counted:
                loss = self.loss(self.module(**taken(self.module, part)), part)
            weight = torch.as_tensor(counted.weight(self.parts), device=loss.device)
            (loss * weight).backward()
            losses.append(torch.where(weight > 0, loss.detach() * weight, 0.0))
            counts.append(weight)
        sums = torch.stack([torch.stack(losses).sum(), torch.stack(counts).sum()])
        if self._group is not None:
            torch.distributed.all_reduce(sums, group=self._group)
        total = torch.ones_like(sums[1]) if counted.summed else sums[1]
        # FSDP divides the sum of the gradients by the ranks.
        self._scaled(self._ways / total)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums[0] / total

    def rows(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's rows of a whole batch; tensor ranks have the same. Flags and scalars stay."""
        return self._part(batch, self._ways, self._rank, "data ranks")

    def _part(self, batch: Mapping[str, Any], ways: int, at: int, what: str) -> dict[str, Any]:
        torch, found = torch_module(), {}
        for name, x in batch.items():
            if torch.is_tensor(x) and x.ndim:
                if x.shape[0] % ways:
                    raise UserError(
                        f"train_step: {name!r} has {x.shape[0]} rows, which {ways} {what} do not divide; "
                        f"give a multiple of {ways}"
                    )
                size = x.shape[0] // ways
                x = x[at * size : (at + 1) * size]
            found[name] = x
        return found

    def _scaled(self, by: Any) -> None:
        torch = torch_module()
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        local = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
        if self.clip_norm is not None:
            # The parameters lie on several meshes, which torch's own clip_grad_norm_ refuses.
            squares = sum(
                x.float().square().sum() / _copies(g, self.mesh) for g, x in zip(grads, local, strict=True)
            )
            torch.distributed.all_reduce(squares)
            by = by * torch.clamp(self.clip_norm / (squares.sqrt() * by + 1e-6), max=1.0)
        torch._foreach_mul_(local, by)


def _copies(grad: Any, mesh: Any) -> int:
    """How many of all ranks hold the same elements."""
    split = 1
    if hasattr(grad, "placements"):
        for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
            split *= 1 if placement.is_replicate() else size  # `_StridedShard` is no `Shard`
    return int(mesh.size()) // split


def _own_loss(outputs: Any, batch: Mapping[str, Any]) -> Any:
    return outputs if torch_module().is_tensor(outputs) else outputs.loss


class CountedMean:
    """Counts the elements that the module's cross entropies are over.

    Attributes:
      summed: they are sums: the loss of the batch is the sum of those of its parts.
    """

    def __init__(self) -> None:
        torch = torch_module()
        outer, losses = self, (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)

        class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
            def __torch_function__(self, of: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if of in losses:
                    outer._count(*args, **kwargs)
                return of(*args, **kwargs)

        self._mode = Mode()
        self._shares: list[Any] = []
        self._sums = 0

    def _count(self, input: Any, target: Any, weight: Any = None, *args: Any, **kwargs: Any) -> None:
        if weight is not None:
            raise UserError(
                "train_step: the loss weights classes, so its mean over ranks and microbatches is not the "
                "batch's; use reduction='sum' and divide by the weights of the whole batch"
            )
        reduction = kwargs.get("reduction", "mean")
        self._sums += reduction == "sum"
        if reduction == "mean" and not target.is_floating_point():
            self._shares.append((target != kwargs.get("ignore_index", -100)).float().mean())

    @property
    def summed(self) -> bool:
        return bool(self._sums and not self._shares)

    def weight(self, parts: int) -> Any:
        """The part of a loss in that of the whole batch: of targets those that are not ignored, over the
        microbatches; 1 of a sum."""
        if self.summed:
            return 1.0
        share = torch_module().stack(self._shares).mean() if self._shares else 1.0
        return share / parts

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
