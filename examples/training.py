"""Hyperparameters of training that examples share, as parameters of every `model`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any

import mesh_tf_core as mtf
from mesh_tf_core.optimizers import by_name


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
      dtype: of activations; variables and their updates are float32.
      optimizer: sgd, adam or adafactor.
      clip_norm: gradients are made shorter to this norm, all together; 0: never.
      warmup: steps up to the learning rate, which then falls with the root of the step; 0: it is constant.
    """

    dtype: str = "float32"
    optimizer: str = "adam"
    learning_rate: float = 0.001
    clip_norm: float = 0.0
    warmup: int = 0

    def model(
        self,
        loss: mtf.Tensor,
        name: str,
        tokens: Sequence[mtf.Dim] = (),
        metrics: Mapping[str, mtf.Tensor] | None = None,
        **more: Any,
    ) -> mtf.Model:
        """The model of a loss, so trained; `tokens`: the dimensions of an input whose elements are tokens."""
        optimizer = self.optimizer_of()
        return mtf.Model(loss, optimizer, metrics=metrics or {}, name=name, token_dims=tokens, **more)

    def optimizer_of(self) -> mtf.Optimizer:
        """The optimizer alone."""
        return by_name(self.optimizer, self.learning_rate, self.clip_norm, warmup=self.warmup)


def trained(**defaults: Any) -> Callable[[Callable[..., mtf.Model]], Callable[..., mtf.Model]]:
    """Gives a function with a parameter `training` the fields of `Training` as parameters instead.

    Args:
      defaults: of these fields, where they are others.
    """
    usual = replace(Training(), **defaults)

    def decorate(build: Callable[..., mtf.Model]) -> Callable[..., mtf.Model]:
        own = inspect.signature(build)
        kept = [p for p in own.parameters.values() if p.name != "training"]
        more = [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=getattr(usual, f.name), annotation=f.type
            )
            for f in fields(Training)
        ]

        @wraps(build)
        def model(*args: Any, **hparams: Any) -> mtf.Model:
            said = {p.name: hparams.pop(p.name) for p in more if p.name in hparams}
            return build(*args, **hparams, training=replace(usual, **said))

        model.__signature__ = own.replace(parameters=[*kept, *more])  # type: ignore[attr-defined]
        return model

    return decorate
