"""Optimizers: frozen descriptions that add update operations to a graph."""

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.optimizers.adafactor import Adafactor
from mesh_tf_core.optimizers.adam import Adam
from mesh_tf_core.optimizers.base import SGD, LossScale, Optimizer
from mesh_tf_core.optimizers.schedules import (
    LinearDecay,
    LinearWarmup,
    RsqrtDecay,
    Schedule,
    WarmupCosine,
    WarmupLinear,
    WarmupRsqrt,
)


def by_name(
    name: str,
    learning_rate: float | Schedule,
    clip_norm: float = 0.0,
    ema: float = 0.0,
    warmup: int = 0,
    moments: str = "float32",
) -> Optimizer:
    """Returns the optimizer called sgd, adam or adafactor, with defaults for everything that is not given.

    Args:
      warmup: steps of warm-up for a learning rate that is a number; the rate then falls with the root of the
        step. 0: the rate is constant.
      moments: element type of Adam's averages.
    """
    known = {"sgd": SGD, "adam": Adam, "adafactor": Adafactor}
    if name not in known:
        raise UserError(f"unknown optimizer {name!r}; {known_names(name, known)}")
    if warmup and not isinstance(learning_rate, Schedule):
        learning_rate = WarmupRsqrt(learning_rate, warmup)
    if moments != "float32" and name != "adam":
        raise UserError(f"moments={moments} is of adam; optimizer {name!r} has float32 averages")
    own = {"moments": moments} if name == "adam" else {}
    found: Optimizer = known[name](learning_rate, clip_norm=clip_norm, ema=ema, **own)
    return found
