"""Shared by all optimizers: slots, the learning rate, clipping, gradients in the master copy's dtype, loss
scaling; and the plainest of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mesh_tf_core.arguments import ArgumentKind, check, instance, is_number
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import Constant, Variable
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import constant_like, total
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.math import is_finite, maximum, minimum, sqrt, square
from mesh_tf_core.ops.reduce import reduce_sum
from mesh_tf_core.optimizers.schedules import Schedule
from mesh_tf_core.tracing.graph import Graph, graph_of

SCALE, GOOD = "loss_scale", "loss_scale/good_steps"
"""Names of the variables: the scale, and the number of consecutive finite steps."""
LARGEST = 2.0**24


@dataclass(frozen=True)
class LossScale:
    """Loss scaling: gradients of half-precision activations that would vanish in float16 are computed of a
    larger loss. This is its scale and the rule that changes it.

    Micikevicius et al. 2018, "Mixed precision training", section 3.2: the loss is multiplied by s before
    backward, gradients are divided by s before the update. A step with a gradient that is not finite is left
    out whole and s is halved; after `growth_interval` good steps in a row s is doubled.

    Attributes:
      initial: the first scale, a power of two, so that scaling rounds nothing.
      growth_interval: number of good steps after which the scale doubles; 0 keeps it at `initial`. Steps with
        infinite gradients are always skipped.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= LARGEST:
            raise UserError(f"LossScale: initial must be from 1 to {LARGEST:g}, found {self.initial}")
        if self.growth_interval < 0:
            raise UserError(
                f"LossScale: growth_interval must be at least 0 steps, found {self.growth_interval}"
            )

    def scale(self, graph: Graph) -> Tensor:
        """The float32 scale of this step."""
        return graph.read(_state(graph, SCALE, self.initial))

    def updates(self, graph: Graph, finite: Tensor) -> list[tuple[Variable, Tensor]]:
        """The next scale, given whether (bool scalar) all gradients of this step were finite."""
        if not self.growth_interval:
            return []
        scale, good = _state(graph, SCALE, self.initial), _state(graph, GOOD, 0.0)
        now, count = graph.read(scale), graph.read(good) + 1.0
        grow = count >= float(self.growth_interval)
        larger = where(grow, minimum(now * 2.0, LARGEST), now)
        kept = where(grow, count * 0.0, count)
        return [
            (scale, where(finite, larger, maximum(now * 0.5, 1.0))),
            (good, where(finite, kept, count * 0.0)),
        ]


def _state(graph: Graph, name: str, initial: float) -> Variable:
    if name not in graph.variables:
        graph.declare(Variable(name, Shape(), "float32", Constant(initial), False, 0))
    return graph.variables[name]


LearningRate = float | Tensor
Updates = Iterable[tuple[Variable, Tensor]]
NUMBER = ArgumentKind(is_number, "a number")
RATE = ArgumentKind(lambda rate: is_number(rate) or isinstance(rate, Schedule), "a number, or a schedule")
EMA = "ema"
"""Name of a variable's running mean below its own."""


@dataclass(frozen=True)
class Optimizer:
    """Base class of optimizers, which add the update of every variable to a graph.

    Attributes:
      learning_rate: a positive number, or a schedule over the steps.
      rates: regular expression -> number or schedule; the first expression found in a variable's name gives
        its learning rate.
      clip_norm: limit of the gradients' norm over all variables (Pascanu et al. 2013, algorithm 1); larger
        gradients are scaled down together. 0 disables clipping.
      loss_scale: the loss scale for float16 activations; None: the loss is not scaled.
      ema: decay of a running mean of every trained variable, such as 0.9999 (Polyak & Juditsky 1992; Ho et
        al. 2020, "DDPM", appendix B); the first step copies the variable. The mean is optimizer state in
        float32, stored and split like the rest of it; `Trainer.evaluate` and `save_weights` take `ema=True`.
        0 stores none.
    """

    learning_rate: float | Schedule
    rates: Mapping[str, float | Schedule] = field(default_factory=dict, kw_only=True)
    clip_norm: float = field(default=0.0, kw_only=True)
    loss_scale: LossScale | None = field(default=None, kw_only=True)
    ema: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        check(
            name, rates=(self.rates, instance(Mapping, "a dict from regular expressions to learning rates"))
        )
        for rate in (self.learning_rate, *self.rates.values()):
            check(name, learning_rate=(rate, RATE))
            if not isinstance(rate, Schedule) and not 0 < rate < math.inf:
                raise UserError(f"{name}: learning_rate must be positive and finite, found {rate}")
        for pattern in self.rates:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(
                    f"{name}: {pattern!r} in `rates` is not a valid regular expression ({error})"
                ) from None
        check(name, clip_norm=(self.clip_norm, NUMBER), ema=(self.ema, NUMBER))
        if not self.clip_norm >= 0:
            raise UserError(
                f"{name}: clip_norm must be at least 0 (0 disables clipping), found {self.clip_norm}"
            )
        if not 0 <= self.ema < 1:
            raise UserError(
                f"{name}: ema must be at least 0 and less than 1 (0 disables running means), found {self.ema}"
            )

    def update(self, graph: Graph, variable: Variable, gradient: Tensor, rate: LearningRate) -> Updates:
        """Adds the operations that update one variable and returns the new values: (variable or slot, value).

        Args:
          gradient: in the variable's shape and dtype.
          rate: the learning rate of this step.
        """
        raise NotImplementedError

    def scaled_loss(self, loss: Tensor) -> Tensor:
        """The scaled loss, whose gradients are computed."""
        if self.loss_scale is None:
            return loss
        return loss * self.loss_scale.scale(graph_of(loss)).cast(loss.dtype)


def times(x: Tensor, rate: LearningRate) -> Tensor:
    """x times the learning rate, in x's dtype."""
    return x * (rate.cast(x.dtype) if isinstance(rate, Tensor) else rate)


def slot(
    graph: Graph,
    variable: Variable,
    name: str,
    dims: Sequence[Dim] | Shape,
    value: float = 0.0,
    dtype: str = "float32",
) -> tuple[Variable, Tensor]:
    """A state of the optimizer for one variable, and its value before the step."""
    full = f"{variable.name}/{name}"
    stacked = sum(d in variable.shape.dims[: variable.stacked] for d in dims)
    order = variable.order if variable.shape.dims[:1] == tuple(dims)[:1] else None
    found = Variable(full, Shape(dims), dtype, Constant(value), False, stacked, variable.name, order)
    return graph.declare(found), graph.read(found)


def apply_updates(graph: Graph, optimizer: Optimizer, pairs: Sequence[tuple[Variable, Tensor]]) -> None:
    """Adds the whole update phase: one scope per variable, and the step counter.

    Args:
      pairs: (variable, gradient of the optimizer's scaled loss).
    """
    graph.deliver((gradient, variable.name) for variable, gradient in pairs)
    rates = _rates(graph, optimizer, [variable.name for variable, _ in pairs])
    pairs, finite = _prepared(graph, optimizer, pairs)
    share = _share(graph, optimizer.ema) if optimizer.ema else None
    for variable, gradient in pairs:
        with graph.phase(Phase.UPDATE, variable.name):
            given = gradient.cast(variable.dtype), rates[variable.name]
            updates = optimizer.update(graph, variable, *given)
            _store(graph, updates if share is None else _averaged(graph, variable, updates, share), finite)
    if finite is not None and optimizer.loss_scale is not None:
        with graph.phase(Phase.UPDATE, "loss_scale"):
            _store(graph, optimizer.loss_scale.updates(graph, finite), None)
    with graph.phase(Phase.UPDATE, "step"):
        step = graph.step()
        _store(graph, [(graph.variables["step"], step + 1)], finite)


def _rates(graph: Graph, optimizer: Optimizer, names: Sequence[str]) -> dict[str, LearningRate]:
    """The learning rate of every variable; a schedule is evaluated once."""
    chosen: dict[str, str] = {}
    for name in names:
        for pattern in optimizer.rates:
            if re.search(pattern, name):
                chosen[name] = pattern
                break
    for pattern in optimizer.rates:
        if pattern not in chosen.values():
            raise UserError(
                f"{type(optimizer).__name__}: {pattern!r} in `rates` matches no variable; the variables "
                f"are {', '.join(names)}"
            )

    def rate_of(rate: float | Schedule) -> LearningRate:
        if not isinstance(rate, Schedule):
            return rate
        with graph.phase(Phase.UPDATE, "learning_rate"):
            return rate.rate(graph)

    default, of = rate_of(optimizer.learning_rate), {p: rate_of(r) for p, r in optimizer.rates.items()}
    return {name: of[chosen[name]] if name in chosen else default for name in names}


def _share(graph: Graph, ema: float) -> Tensor:
    """How much of a new value a running mean takes: all in the first step."""
    with graph.phase(Phase.UPDATE, EMA):
        first = graph.step().equal(0)
        return where(first, 1.0, constant_like(graph.step().cast("float32"), 1.0 - ema))


def _averaged(graph: Graph, variable: Variable, updates: Updates, share: Tensor) -> Updates:
    """Updates, and that of the variable's running mean."""
    for stored, value in updates:
        yield stored, value
        if stored == variable:
            state, old = slot(graph, variable, EMA, variable.shape)
            yield state, old + (value.cast("float32") - old) * share


def _store(graph: Graph, updates: Updates, finite: Tensor | None) -> None:
    """Assigns new values; a step whose gradients are not finite leaves the old ones."""
    for variable, value in updates:
        graph.assign(variable, value if finite is None else where(finite, value, graph.read(variable)))


def _prepared(
    graph: Graph, optimizer: Optimizer, pairs: Sequence[tuple[Variable, Tensor]]
) -> tuple[Sequence[tuple[Variable, Tensor]], Tensor | None]:
    """Gradients without the loss scale and clipped; with loss scaling, whether all are finite (bool
    scalar)."""
    if not optimizer.clip_norm and optimizer.loss_scale is None:
        return pairs, None
    factor: Tensor | None = None
    finite: Tensor | None = None
    squares = []
    for variable, gradient in pairs:
        # In the variable's own scope, where its gradient may be split further than the layout says.
        with graph.phase(Phase.UPDATE, variable.name):
            squares.append(reduce_sum(square(gradient.cast("float32"))))
    with graph.phase(Phase.UPDATE, "gradient_norm"):
        norm = sqrt(total(squares))
        if optimizer.loss_scale is not None:
            # The sum of squares may overflow where no gradient does: then the step is left out all the same.
            finite = is_finite(norm)
            factor = constant_like(norm, 1.0) / optimizer.loss_scale.scale(graph)
            norm = norm * factor
        if optimizer.clip_norm:
            clip = constant_like(norm, optimizer.clip_norm) / maximum(norm, optimizer.clip_norm)
            factor = clip if factor is None else factor * clip
    assert factor is not None
    out = []
    for variable, gradient in pairs:
        with graph.phase(Phase.UPDATE, variable.name):
            out.append((variable, (gradient.cast("float32") * factor).cast(variable.dtype)))
    return out, finite


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum (Sutskever et al. 2013): w -= learning_rate * v, v =
    momentum * v + gradient."""

    momentum: float = 0.0

    def update(self, graph: Graph, variable: Variable, gradient: Tensor, rate: LearningRate) -> Updates:
        step = gradient
        if self.momentum:
            state, old = slot(graph, variable, "momentum", variable.shape)
            new = old * self.momentum + gradient.cast("float32")
            yield state, new
            step = new.cast(variable.dtype)
        yield variable, graph.read(variable) - times(step, rate)
