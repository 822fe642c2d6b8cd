"""The share of a part of the batch in the loss of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layoutopt.importers.torch.internals import called, torch_module
from mesh_tf_core.errors import UserError

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class WeightedLoss:
    """(module, part of the batch) -> its loss times its weight, the weight, and whether losses add up.

    Attributes:
      loss: loss(outputs, batch); None: `outputs.loss`, or the output.
      parts: microbatches.
      ranks: with other rows.
    """

    loss: Loss | None
    parts: int
    ranks: int = 1

    def __call__(self, module: Any, part: Any) -> tuple[Any, Any, bool]:
        args, kwargs = called(module, part)
        counted = CountedMean()
        with counted.mode:
            outputs = module(*args, **kwargs)
            found = outputs if self.loss is None else self.loss(outputs, part)
        found = found if torch_module().is_tensor(found) else found.loss
        if self.parts * self.ranks > 1:
            counted.check(found)
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        weight = torch_module().as_tensor(counted.weight(self.parts), device=found.device, dtype=found.dtype)
        return found * weight, weight, counted.summed


class CountedMean:
    """Counts the elements that the module's cross entropies are over.

    Attributes:
      mode: to be entered around the module's call.
      summed: the loss is a sum: that of the batch is the sum of those of its parts.
    """

    def __init__(self) -> None:
        torch = torch_module()
        outer, losses = self, (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)

        class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
            def __torch_function__(self, of: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if of in losses:
                    outer._count(*args, **kwargs)
                found = of(*args, **kwargs)
                if kwargs.get("reduction") == "sum":
                    outer._sums.append(found)
                elif of in (torch.sum, torch.Tensor.sum):
                    outer._plain = found
                return found

        self.mode = Mode()
        self._counts, self._sums = list[Any](), list[Any]()
        self._plain: Any = None

    def _count(self, input: Any, target: Any, weight: Any = None, *args: Any, **kwargs: Any) -> None:
        if weight is not None:
            raise UserError(
                "train_step: the loss weights classes, so its mean over ranks and microbatches is not the "
                "batch's; use a loss without them"
            )
        if kwargs.get("reduction", "mean") == "mean" and not target.is_floating_point():
            self._counts.append((target != kwargs.get("ignore_index", -100)).float().sum())

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
