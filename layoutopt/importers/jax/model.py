"""`from_jax`: a JAX loss as a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mesh_tf_core as mtf
from layoutopt.front_ends import JAX
from layoutopt.importers.arrays.build import built, optimizer_of
from layoutopt.importers.arrays.contract import EquationBlock, TracedProgram, Var, has_fractions
from layoutopt.importers.arrays.model import ImportedModel
from layoutopt.importers.jax.jax_plan import JaxPlan
from layoutopt.importers.jax.reader import traced
from layoutopt.importers.jax.shardings import flat, jax_mesh, leaves, leaves_of, new_state, said_of
from layoutopt.plan.build import Plan, check_plan_model
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


@dataclass
class JaxModel(ImportedModel):
    """A model that a JAX function is."""

    front_end: ClassVar[str] = "jax"

    def applied(self, plan: Plan) -> JaxPlan:
        """The plan in the user's own function: `plan.jax`.

        Raises:
          UserError: the plan is for another model, or places single operations by rules.
        """
        check_plan_model(plan, self)
        if plan.layout.refined:
            path = plan.layout.refined[0][0]
            raise UserError(
                f"plan.jax: the plan places {path!r} by rules for single operations, which cannot be "
                "applied to a JAX function; remove the field `refined` from the plan, or search again"
            )
        for dim, count in self.stages(plan.mesh, plan.layout).items():
            raise UserError(
                f"plan.jax: the plan splits {dim!r} into {count} stages of a pipeline, but a JAX function "
                f"has no pipeline stages; search again without --pipeline {dim}"
            )
        return self.under(plan.mesh, plan.layout, plan.options, jax_mesh(plan.mesh, plan.slices))

    def under(self, mesh: mtf.Mesh, layout: mtf.Layout, options: mtf.Options, devices: Any = None) -> JaxPlan:
        """The user's function under a layout; `devices` as `Shardings` has them."""
        assert self.origin is not None
        return JaxPlan(self, self.origin, mesh, layout, options, devices)

    def step_on(self, mesh: mtf.Mesh, layout: mtf.Layout, options: mtf.Options, devices: Any) -> Any:
        """The user's own training step under a layout, traced and not yet compiled."""
        assert self.origin is not None
        return self.under(mesh, layout, options, devices).train_step(None, optax_of(self.optimizer)).traced()


def from_jax(
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    optimizer: str | Optimizer = "adamw",
    rng: Any = None,
    names: Any = None,
    state: Any = None,
    name: str = "",
) -> JaxModel:
    """Builds a model from a JAX loss function. The function is traced once and not changed.

    Args:
      loss: loss(params, batch), or loss(params, state, batch, rng) without the arguments that are not given.
        The function returns a scalar, or (scalar, auxiliary). If `auxiliary` is a mapping, its scalars are
        reported with the loss, and a pytree in it with the structure of `state` is the new state.
      params: a pytree of arrays to train, or of their types (jax.ShapeDtypeStruct). Arrays are the initial
        values; matrices that are given as types are initialised with small random numbers.
      batch: a pytree of arrays or types. The path of an array is the name of the model's input.
      optimizer: adamw, adam, sgd, adafactor (with optax's defaults), or an `mtf.Optimizer`.
      rng: a random key, or its type. Random numbers are the same under every layout, but differ from JAX's.
      names: {"path/of/a/parameter": ("d_model", "d_ff")} names dimensions, and {"d_ff_2": "bottleneck"}
        renames a dimension. A pytree of PartitionSpec with the structure of `params` gives logical axes to
        parameters that have no Flax metadata.
      state: a pytree of arrays or types that are stored and not trained, such as batch statistics.

    Raises:
      UserError: a JAX primitive is not supported (the message names the line of the function), or the
        arguments do not match the function.

    Example:
      >>> import jax, layoutopt
      >>> def loss(params, batch):
      ...     return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()
      >>> def array(*shape):
      ...     return jax.ShapeDtypeStruct(shape, "float32")
      >>> model = layoutopt.from_jax(loss, {"w": array(4, 2)}, {"x": array(8, 4), "y": array(8, 2)})
      >>> model.parameters
      8
    """
    if not callable(loss):
        raise UserError(f"from_jax: {loss!r} is not a function; give loss(params, batch)")
    given = [("params", params), ("state", state), ("batch", batch), ("rng", rng)]
    given = [(role, tree) for role, tree in given if role in ("params", "batch") or tree is not None]
    trees = {role: leaves_of(tree) for role, tree in given}
    found, types = {role: own for role, (own, _) in trees.items()}, [of for _, of in trees.values()]
    if not found["params"]:
        raise UserError("from_jax: params has no arrays; give the pytree of arrays to train")
    said, noted = said_of(names, [leaf for listed in found.values() for leaf in listed])
    trace = traced(loss, types)
    variables = iter(trace.block.ins)
    pairs = {
        role: [(next(variables), replace(x, noted=noted.get(x.path, x.noted))) for x in listed]
        for role, listed in found.items()
    }
    for listed in pairs.values():
        for v, leaf in listed:
            v.path = leaf.path
    kept = [v for v, _ in pairs.get("state", [])]
    first, metrics, new = _results(trace.results, state, trace.block, kept)
    called = str(getattr(loss, "__name__", ""))
    program = TracedProgram(
        name or (called if called.isidentifier() else "model"),  # of a lambda, or an object
        JAX,
        trace.block,
        pairs["params"],
        pairs.get("state", []),
        pairs["batch"],
        pairs.get("rng", []),
        first,
        new,
        metrics,
        tuple(path for path, _, _ in flat(trace.results)),
        trace.notes,
        loss,
        tuple(types),
        tuple(found),
    )
    made = built(program, said)
    return JaxModel(
        made.loss,
        optimizer_of(optimizer, JAX.call),
        made.metrics,
        program.name,
        token_dims=made.token_dims,
        framework="jax",
        origin=made.origin,
    )


def _results(
    tree: Any, state: Any, block: EquationBlock, variables: Sequence[Var]
) -> tuple[int, dict[str, int], dict[Var, int]]:
    """Which results of the block are the loss, the numbers in the auxiliary's mappings, and the new values of
    the state's variables (none if the function returns none)."""
    listed = tree if isinstance(tree, tuple | list) else [tree]
    if not 1 <= len(listed) <= 2:
        raise UserError(
            f"from_jax: the loss returns {len(tree)} values; return a scalar, or (scalar, auxiliary)"
        )
    first, aux = listed if len(listed) == 2 else (*listed, None)
    if not isinstance(first, int):
        raise UserError(
            "from_jax: the loss returns a nested structure; return a scalar, or (scalar, auxiliary)"
        )
    found = block.outs[first]
    if not _is_number(found):
        raise UserError(
            f"from_jax: the loss returns {found.dtype}{list(found.shape)}, not a floating-point "
            "scalar; return a scalar, e.g. with jnp.mean"
        )
    parts = (aux, *(aux if isinstance(aux, tuple | list) else ()))
    items = (item for part in parts if isinstance(part, Mapping) for item in part.items())
    metrics = {str(name): i for name, i in items if isinstance(i, int) and _is_number(block.outs[i])}
    return first, metrics, dict(zip(variables, leaves(new_state(aux, state)), strict=False))


def _is_number(x: Any) -> bool:
    return x.shape == () and has_fractions(x)
