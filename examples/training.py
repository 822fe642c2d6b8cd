"""Training hyperparameters that all examples share, as parameters of `model`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import mesh_tf_core as mtf
from mesh_tf_core.model import Training


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
