"""Routers of mixtures of experts: the tokens in the buffers of each expert, and the weight of an expert's
result.

With groups of S tokens, E experts, k choices and the capacity C:

  (1)  p = softmax(x w)                             [group, token, router]
  (2)  choice j of a token: the largest p, without the choices before it
  (3)  its place in the expert's buffer: how many earlier choices of the group went there; places from C on
       are dropped (the token then only has its residual)
  (4)  C = ceil(S k capacity_factor / E)
  (5)  gate: p of the choice; of several choices, divided by their sum
  (6)  load-balance loss: E sum over experts of (fraction of tokens whose first choice it is) (mean p),
       1 if both are even
  (7)  z-loss: mean of the square of the log-sum-exp of x w, which keeps the logits near zero

All but `narrow` logits is computed in float32 whatever the activations: a choice must not depend on their
rounding (Fedus et al. 2022, "Switch Transformer", section 2.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ZEROS, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import check_rate
from mesh_tf_core.ops.activations import clip
from mesh_tf_core.ops.basic import add_n, constant_like
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.cumulative import cumsum
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.index import one_hot
from mesh_tf_core.ops.math import maximum, reciprocal, square
from mesh_tf_core.ops.order import argmax, top_k
from mesh_tf_core.ops.random import random_uniform
from mesh_tf_core.ops.reduce import reduce_mean, reduce_sum
from mesh_tf_core.ops.shape import transpose
from mesh_tf_core.ops.softmax import logsumexp, softmax


@dataclass(frozen=True)
class AnnealedDropout:
    """Dropout with a rate that falls linearly from `rate` at step `start` to 0 at step `end` (Rennie et al.
    2014; Mesh-TensorFlow's annealed_dropout). The same elements are dropped under every layout.

    Attributes:
      start, end: steps; before the first the rate is constant, after the last nothing is dropped.
    """

    rate: float
    start: int
    end: int

    def __post_init__(self) -> None:
        check_rate(self, self.rate)
        if not 0 <= self.start < self.end:
            raise UserError(
                f"AnnealedDropout: start must be at least 0 and less than end, found start={self.start}, "
                f"end={self.end}"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Same dimensions as x."""
        done = (x.graph.step() - self.start).cast("float32") * (1 / (self.end - self.start))
        keep = clip(done, 0.0, 1.0) * self.rate + (1 - self.rate)
        kept = random_uniform(x.graph.random_key(), x.shape) < keep
        return where(kept, x * reciprocal(keep).cast(x.dtype), 0.0)


@dataclass(frozen=True)
class Jitter:
    """Times a random number in [1 - epsilon, 1 + epsilon) per element, so that a choice made from x, as a
    router's, does not hang on its last bits (Fedus et al. 2022, section 2.2; Mesh-TensorFlow's
    multiplicative_jitter)."""

    epsilon: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            raise UserError(f"Jitter: epsilon must be at least 0 and less than 1, found {self.epsilon}")

    def __call__(self, x: Tensor) -> Tensor:
        """Same dimensions as x."""
        if not self.epsilon:
            return x
        low, high = 1 - self.epsilon, 1 + self.epsilon
        return x * random_uniform(x.graph.random_key(), x.shape, low, high).cast(x.dtype)


LATER = ("all", "random", "threshold", "overflow")
KEPT = ("first", "largest")


@dataclass(frozen=True)
class Routed:
    """The destinations of tokens.

    Attributes:
      combine, dispatch: float32 [others, token, router, capacity]: a token's gate, or 1, at its place in a
        buffer.
      loss: float32 scalar to be added, weighted, to the model's.
      filled: the share of the buffers' places that tokens take (`Router.filled`).
    """

    combine: Tensor
    dispatch: Tensor
    loss: Tensor
    filled: float


@dataclass(frozen=True)
class Router:
    """The base of routers.

    Attributes:
      capacity_factor: room in the experts' buffers, relative to an even distribution.
      jitter: the router sees its input times random numbers in [1 - jitter, 1 + jitter).
      z_loss: weight of the z-loss (equation 7) in the router's loss (Zoph et al. 2022, "ST-MoE", section 3).
      bias: a learned number is added to every expert's logit.
      narrow: the logits are products of activations as they are, and not of float32.
    """

    capacity_factor: float = 1.25
    jitter: float = 0.0
    z_loss: float = 0.0
    bias: bool = field(default=False, kw_only=True)
    narrow: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not self.capacity_factor > 0:
            raise UserError(
                f"{type(self).__name__}: capacity_factor must be positive, found {self.capacity_factor}"
            )
        Jitter(self.jitter)

    @property
    def asked(self) -> int:
        """k of equation 4."""
        return 1

    def capacity(self, tokens: int, experts: int) -> int:
        """Places per expert and group (equation 4), at most one per token."""
        return min(tokens, max(1, math.ceil(tokens * self.asked * self.capacity_factor / experts)))

    def filled(self, tokens: int, experts: int) -> float:
        """The share of all places that tokens take if they spread evenly: what the model needs of them."""
        return min(1.0, tokens * self.asked / (experts * self.capacity(tokens, experts)))

    def check(self, experts: int) -> None:
        """UserError unless there are enough experts."""

    def __call__(
        self,
        x: Tensor,
        router: Dim,
        token: str,
        d_model: str,
        per: Sequence[Dim] = (),
        importance: Tensor | None = None,
        names: tuple[str, str] = ("router", "capacity"),
        needed: float = 1.0,
    ) -> Routed:
        """Routes x [others, token, d_model].

        Args:
          router: the experts, to be renamed once tokens are dispatched.
          per: dimensions of x that have a router of their own for every element.
          importance: [others, token]; tokens of 1 have all their choices, of less one fewer (if there are
            several), of 0 none.
          names: of the router's variable, and of the buffers' places.
          needed: the share of x that is tokens, where x is itself a buffer.
        """
        logits, s = self.logits(x, router, token, d_model, per, names[0], needed), x.dim(token)
        places = Dim(names[1], self.capacity(s.size, router.size))
        combine, dispatch, loss = self.assigned(self.scored(logits, router), router, s, places, importance)
        full = [*logits.shape, places]
        filled, loss = needed * self.filled(s.size, router.size), self.with_z_loss(loss, logits, router)
        return Routed(transpose(combine, full), transpose(dispatch, full), loss, filled)

    def logits(
        self,
        x: Tensor,
        router: Dim,
        token: str,
        d_model: str,
        per: Sequence[Dim] = (),
        name: str = "router",
        needed: float = 1.0,
    ) -> Tensor:
        """x w [others, token, router]; the parameters are those of a call."""
        self.check(router.size)
        d, s = x.dim(d_model), x.dim(token)
        dtype = x.dtype if self.narrow else "float32"
        w = x.graph.variable(name, [*per, d, router], Normal(1 / math.sqrt(d.size)), activation_dtype=dtype)
        seen = Jitter(self.jitter)(x.cast(dtype))
        found = einsum([seen, w], [*x.shape.without(token, d_model), s, router], needed=needed)
        found = found.cast("float32")
        return found + x.graph.variable(f"{name}_logits", [*per, router], ZEROS) if self.bias else found

    def with_z_loss(self, loss: Tensor, logits: Tensor, router: Dim) -> Tensor:
        """The loss and equation 7."""
        if not self.z_loss:
            return loss
        return loss + reduce_mean(square(logsumexp(logits, router))) * self.z_loss

    def scored(self, logits: Tensor, router: Dim) -> Tensor:
        """Probabilities of the experts (equation 1)."""
        return softmax(logits, router)

    def assigned(
        self, p: Tensor, router: Dim, token: Dim, places: Dim, importance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Combine, dispatch and the balance loss, from the probabilities [others, token, router]."""
        raise NotImplementedError


@dataclass(frozen=True)
class TokenChoice(Router):
    """Every token chooses its experts: the best one (Fedus et al. 2022), or several (Lepikhin et al. 2021,
    "GShard", algorithm 1), as in Mesh-TensorFlow's `moe.py`.

    Attributes:
      chosen: choices per token, at most the number of experts.
      later: which choices after the first are used: `all`; `random`, with probability gate / threshold
        (GShard, section 2.2); `threshold`, if the gate is larger; `overflow`, if the expert chosen before is
        full, so that few tokens are left behind (Fedus et al., appendix B); the gate is p itself then.
      kept: tokens that an expert with too many choices keeps: the `first`, or those with the `largest` gates.
    """

    chosen: int = 1
    later: str = "all"
    threshold: float = 0.2
    kept: str = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, known in (("later", self.later, LATER), ("kept", self.kept, KEPT)):
            if value not in known:
                raise UserError(f"TokenChoice: {name}={value!r} is unknown; {known_names(value, known)}")
        if self.chosen < 1 or not self.threshold > 0:
            raise UserError(
                f"TokenChoice: chosen and threshold must be positive, found chosen={self.chosen}, "
                f"threshold={self.threshold}"
            )
        if self.kept == "largest" and self.later == "overflow":
            raise UserError(
                "TokenChoice: kept='largest' cannot be combined with later='overflow', which keeps the first "
                "tokens; use kept='first'"
            )

    @property
    def normalized(self) -> bool:
        """True if a token's gates add up to 1."""
        return self.chosen > 1 and self.later != "overflow"

    def check(self, experts: int) -> None:
        """UserError unless there are enough experts."""
        if self.chosen > experts:
            raise UserError(
                f"TokenChoice: chosen={self.chosen} must be from 1 to the number of experts, {experts}"
            )

    @property
    def asked(self) -> int:
        return 1 if self.later == "overflow" else self.chosen

    def assigned(
        self, p: Tensor, router: Dim, token: Dim, places: Dim, importance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Combine, dispatch and the balance loss, from the probabilities [others, token, router]."""
        masks, gates = self._choices(p, router, importance)
        counted = None if importance is None else reduce_sum(masks[0], router)
        loss = balance(p, masks[0], token, counted, float(router.size**2))
        if self.kept == "largest":
            scores = add_n([mask * gate for mask, gate in zip(masks, gates, strict=True)])
            return *_best(scores, token, places), loss
        return *self._in_turn(masks, gates, router, token, places), loss

    def _choices(
        self, p: Tensor, router: Dim, importance: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Equations 2 and 5: one-hot choices [others, token, router], and their gates [others, token]."""
        masks: list[Tensor] = []
        left = p
        for j in range(self.chosen):
            mask = one_hot(argmax(left, router), router)
            if importance is not None:
                first = self.chosen > 1 and not j
                mask = mask * (importance >= 1.0 if first else importance > 0.0).cast("float32")
            masks.append(mask)
            left = left * (1.0 - mask)
        gates = [einsum([p, mask], p.shape.without(router.name)) for mask in masks]
        if not self.normalized:
            return masks, gates
        total = add_n(gates) + 1e-9
        gates = [gate / total for gate in gates]
        return [masks[0], *(self._if_used(m, g) for m, g in zip(masks[1:], gates[1:], strict=True))], gates

    def _if_used(self, mask: Tensor, gate: Tensor) -> Tensor:
        """A later choice, if the policy uses it."""
        if self.later == "all":
            return mask
        bar: Tensor | float = self.threshold
        if self.later == "random":
            bar = random_uniform(mask.graph.random_key(), gate.shape) * self.threshold
        return mask * (gate > bar).cast("float32")

    def _in_turn(
        self, masks: Sequence[Tensor], gates: Sequence[Tensor], router: Dim, token: Dim, places: Dim
    ) -> tuple[Tensor, Tensor]:
        """Equation 3: all first choices in the tokens' order, then all second ones, and so on."""
        combine: list[Tensor] = []
        dispatch: list[Tensor] = []
        taken: Tensor | None = None
        for mask, gate in zip(masks, gates, strict=True):
            if self.later == "overflow" and dispatch:
                mask = mask * (1.0 - reduce_sum(add_n(dispatch), [router, places]))
            place = cumsum(mask, token, exclusive=True)
            place = place if taken is None else place + taken
            taken = reduce_sum(mask, token) if taken is None else taken + reduce_sum(mask, token)
            # Ids from the capacity on have no one-hot: these tokens are dropped.
            there = mask * one_hot(reduce_sum(place * mask, router).cast("int32"), places)
            dispatch.append(there)
            combine.append(there * gate)
        return add_n(combine), add_n(dispatch)


SWITCH, TOP_2 = TokenChoice(), TokenChoice(chosen=2)
"""One expert per token (Fedus et al.), and two (Lepikhin et al.)."""


@dataclass(frozen=True)
class ExpertChoice(Router):
    """Every expert chooses as many tokens as it has places, those with the largest p. A token may have any
    number of experts, and the load is balanced without a loss (Zhou et al. 2022, "Mixture-of-experts with
    expert choice routing", section 3.2).

    `capacity_factor` is the mean number of experts per token. Whether a token is chosen depends on the whole
    group, later tokens too, so a model that writes from left to right must not use it.
    """

    capacity_factor: float = 2.0

    def filled(self, tokens: int, experts: int) -> float:
        """All places: an expert always chooses."""
        return 1.0

    def assigned(
        self, p: Tensor, router: Dim, token: Dim, places: Dim, importance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Combine, dispatch and no loss, from the probabilities [others, token, router]."""
        scores = p if importance is None else p * (importance > 0.0).cast("float32")
        return *_best(scores, token, places), constant_like(p, 0.0)


def _best(scores: Tensor, token: Dim, places: Dim) -> tuple[Tensor, Tensor]:
    """Combine and dispatch: every expert takes the tokens of the largest scores that are not 0."""
    values, ids = top_k(scores, token, places)
    here = one_hot(ids, token) * (values > 0.0).cast("float32")
    return here * values, here


def balance(p: Tensor, taken: Tensor, token: Dim, counted: Tensor | None, times: float) -> Tensor:
    """Equation 6, a float32 scalar.

    Args:
      taken: the choices that count, [others, token, router].
      counted: 1 for tokens that count, [others, token]; None: all do.
      times: what makes the loss of an even load 1.
    """
    if counted is None:
        even = reduce_mean(taken, token) * reduce_mean(p, token)
    else:
        count = maximum(reduce_sum(counted, token), 1.0)
        even = reduce_sum(taken, token) / count * (reduce_sum(p * counted, token) / count)
    return reduce_mean(even) * times
