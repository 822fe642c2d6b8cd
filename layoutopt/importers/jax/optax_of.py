"""Optimizers of the runtime as optimizers of optax."""

from typing import Any

from mesh_tf_core.errors import UserError, not_installed
from mesh_tf_core.optimizers import SGD, Adafactor, Adam, Optimizer


def optax_of(optimizer: Optimizer) -> Any:
    """The same update in optax, at a rate of 0.001 if the optimizer has a schedule; it stores the same state.

    Raises:
      UserError: optax is not installed, or has no such optimizer.
    """
    try:
        import optax
    except ImportError:
        raise not_installed("optax", "jax", "the training step of a JAX model") from None
    rate = optimizer.learning_rate if isinstance(optimizer.learning_rate, float) else 1e-3
    if optimizer.rates or optimizer.loss_scale or optimizer.ema:
        raise UserError(
            "the training step of a JAX model supports no per-variable learning rates, no loss scaling "
            "and no running mean of weights; remove them from the model's optimizer"
        )
    match optimizer:
        case Adam(weight_decay=decay, beta1=b1, beta2=b2, epsilon=epsilon):
            made = optax.adam(rate, b1, b2, epsilon)
            if decay:
                made = optax.adamw(rate, b1, b2, epsilon, weight_decay=decay)
        case SGD(momentum=momentum):
            made = optax.sgd(rate, momentum or None)
        case Adafactor():
            made = optax.adafactor(rate)
        case _:
            name = type(optimizer).__name__
            raise UserError(
                f"the training step of a JAX model cannot use the optimizer {name}, because optax has "
                "no equivalent; use Adam, SGD or Adafactor"
            )
    return optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), made) if optimizer.clip_norm else made
