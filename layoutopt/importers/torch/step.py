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
            count = torch.as_tensor(counted.share, device=loss.device)
            (loss * count / self.parts).backward()
            losses.append(loss.detach() * count / self.parts)
            counts.append(count / self.parts)
        sums = torch.stack([torch.stack(losses).sum(), torch.stack(counts).sum()])
        if self._group is not None:
            torch.distributed.all_reduce(sums, group=self._group)
        # FSDP divides the sum of the gradients by the ranks.
        self._scaled(self._ways / sums[1])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums[0] / sums[1]

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
            split *= size if placement.is_shard() else 1
    return int(mesh.size()) // split


def _own_loss(outputs: Any, batch: Mapping[str, Any]) -> Any:
    return outputs if torch_module().is_tensor(outputs) else outputs.loss


class CountedMean:
    """Counts the elements that a mean cross entropy is over.

    Attributes:
      share: of the targets of the module's mean cross entropies those that are not ignored; 1 without any.
    """

    def __init__(self) -> None:
        torch = torch_module()
        outer = self

        class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
            def __torch_function__(self, of: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if of is torch.nn.functional.cross_entropy:
                    outer._count(*args, **kwargs)
                return of(*args, **kwargs)

        self._mode = Mode()
        self._seen: list[Any] = []

    def _count(self, input: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("reduction", "mean") == "mean" and not target.is_floating_point():
            self._seen.append((target != kwargs.get("ignore_index", -100)).float().mean())

    @property
    def share(self) -> Any:
        return torch_module().stack(self._seen).mean() if self._seen else 1.0

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
