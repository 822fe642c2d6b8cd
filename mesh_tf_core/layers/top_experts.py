"""Routing to the best k of many experts, as language models of today do it (Mixtral, Qwen, DeepSeek).

With S tokens in a group, E experts, k choices, and x w the logits:

  (1)  p = softmax(x w), or sigmoid(x w)            [group, token, router]
  (2)  a token's choices: the k experts of the largest p + b, where b is 0, or a bias that is not trained; of
       experts in groups, only those of the best groups are asked
  (3)  gate: scale p of the choice; normalised, p is divided by the sum over the choices first
  (4)  nothing is dropped, or with a capacity the choices beyond it, as `routing` says: first choices come
       before second ones
  (5)  balance loss: E sum over experts of (share of the choices that it got) (mean p / sum p), 1 if even
  (6)  after a step, b += balance_rate sign(mean load - load of the expert): no loss pulls at the gates
       (Wang et al. 2024, "Auxiliary-loss-free load balancing", algorithm 1)

Mixtral (Jiang et al. 2024, section 2.1): TopExperts(chosen=2). Qwen3-MoE: chosen=8. Qwen1.5 and 2-MoE:
chosen=4, normalized=False, with shared experts and `shared_gate`. DeepSeek-V2-Lite: chosen=6,
normalized=False, with shared experts; DeepSeek-V2 (2024, section 2.2) also scale=16, groups=8,
groups_chosen=3. DeepSeek-V3 (2024, section 2.1.2): chosen=8, scores="sigmoid", scale=2.5, groups=8,
groups_chosen=4, balance_rate=0.001, with a shared expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import ONES, ZEROS
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.routing import Jitter, Router, balance
from mesh_tf_core.ops.along import take_along
from mesh_tf_core.ops.basic import stop_gradient
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.cumulative import cumsum
from mesh_tf_core.ops.index import gather, one_hot
from mesh_tf_core.ops.math import sigmoid, sign
from mesh_tf_core.ops.order import top_k
from mesh_tf_core.ops.reduce import reduce_max, reduce_mean, reduce_sum
from mesh_tf_core.ops.shape import reshape

SCORES = ("softmax", "sigmoid")
_NEVER = -1e9
"""Added to the score of an expert that may not be chosen."""
_NOTHING = 1e-20
"""Added to sums of gates, for tokens that are left out; sigmoids may be small (as in DeepSeek's own code)."""


@dataclass(frozen=True)
class ChosenExperts:
    """The experts of tokens.

    Attributes:
      ids: int32 [others, token, choice]; -1: no expert.
      gates: float32 [others, token, choice].
      loss: float32 scalar to be added, weighted, to the model's.
      choice: its dimension.
    """

    ids: Tensor
    gates: Tensor
    loss: Tensor
    choice: Dim


@dataclass(frozen=True)
class TopExperts(Router):
    """Every token chooses the `chosen` experts of its largest scores.

    Attributes:
      capacity_factor: 0: every choice is used. Otherwise an expert leaves out choices beyond its capacity.
      chosen: k, at most the number of experts.
      scores: how p is made of the logits: `softmax` over all experts, or the `sigmoid` of each.
      normalized: a token's gates add up to `scale`.
      scale: of the gates (DeepSeek's routed_scaling_factor).
      groups, groups_chosen: number of groups of experts, and number of groups with a token's choices: those
        with the largest p (softmax), or the largest sums of two p + b (sigmoid).
      imbalance: tokens of the device with most of them over the mean, where devices share the experts; time
        and memory are predicted with it.
      expert_scale: a gate is multiplied by a learned number of its expert, at first 1 (Gemma 4).
      balance_rate: change per step of the bias of (6), a variable `router_bias` [router] beside
        `router_load`, the choices of the previous step; 0: no bias.
    """

    capacity_factor: float = 0.0
    chosen: int = 2
    scores: str = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    balance_rate: float = 0.0
    imbalance: float = 1.0
    expert_scale: bool = False

    def __post_init__(self) -> None:
        if self.capacity_factor:
            super().__post_init__()
        Jitter(self.jitter)
        if not self.imbalance >= 1:
            raise UserError(f"TopExperts: imbalance must be at least 1, found {self.imbalance}")
        if self.scores not in SCORES:
            raise UserError(
                f"TopExperts: scores={self.scores!r} is unknown; {known_names(self.scores, SCORES)}"
            )
        if self.chosen < 1 or not self.scale > 0 or not self.balance_rate >= 0:
            raise UserError(
                "TopExperts: chosen and scale must be positive and balance_rate at least 0, found "
                f"chosen={self.chosen}, scale={self.scale}, balance_rate={self.balance_rate}"
            )
        if not 1 <= self.groups_chosen <= self.groups:
            raise UserError(
                f"TopExperts: groups_chosen={self.groups_chosen} must be from 1 to groups={self.groups}"
            )

    def check(self, experts: int) -> None:
        """UserError unless there are enough experts."""
        if experts % self.groups:
            raise UserError(f"TopExperts: groups={self.groups} must divide the number of experts, {experts}")
        asked = experts // self.groups * self.groups_chosen
        if self.chosen > asked:
            raise UserError(
                f"TopExperts: chosen={self.chosen} must be at most the number of experts in the chosen "
                f"groups, {asked}"
            )
        if self.groups > 1 and self.scores == "sigmoid" and experts < 2 * self.groups:
            raise UserError(
                f"TopExperts: groups={self.groups} must be at most half the number of experts, {experts}, "
                "because scores='sigmoid' adds the two best scores of every group"
            )

    @property
    def asked(self) -> int:
        return self.chosen

    def scored(self, logits: Tensor, router: Dim) -> Tensor:
        """Equation 1."""
        return sigmoid(logits) if self.scores == "sigmoid" else super().scored(logits, router)

    def choices(
        self, x: Tensor, router: Dim, token: str, d_model: str, importance: Tensor | None
    ) -> ChosenExperts:
        """The experts of each token of x [others, token, d_model]."""
        logits, s, best = self.logits(x, router, token, d_model), x.dim(token), Dim("choice", self.chosen)
        p = self.scored(logits, router)
        scores = stop_gradient(p) + self._bias(p, router) if self.balance_rate else stop_gradient(p)
        _, ids = top_k(self._asked(scores, router), router, best)
        masks, gates = one_hot(ids, router, p.dtype), take_along(p, ids, router)
        counted = None if importance is None else (importance > 0.0).cast(p.dtype)
        if counted is not None:
            masks, gates = masks * counted, gates * counted
            ids = where(counted > 0.0, ids, -1)
        taken = reduce_sum(masks, best)
        if self.balance_rate:
            load = reduce_sum(taken, [d for d in taken.shape if d != router])
            p.graph.assign(p.graph.lookup("router_load"), load)
        if self.normalized:
            gates = gates / (reduce_sum(gates, best) + _NOTHING)
        if self.capacity_factor:
            # Equation 4: earlier tokens of the same choice, and all tokens of the choices before.
            before = cumsum(reduce_sum(masks, s), best, exclusive=True)
            place = reduce_sum((cumsum(masks, s, exclusive=True) + before) * masks, router)
            ids = where(place < float(self.capacity(s.size, router.size)), ids, -1)
        if self.expert_scale:
            gates = gates * gather(x.graph.variable("expert_scale", [router], ONES), ids, router)
        shares = p / reduce_sum(p, router) if self.scores == "sigmoid" else p
        loss = balance(shares, taken, s, counted, router.size**2 / self.chosen)
        loss = self.with_z_loss(loss, logits, router)
        return ChosenExperts(ids, gates * self.scale, loss, best)

    def _bias(self, p: Tensor, router: Dim) -> Tensor:
        """Equation 6, as a step begins: then the load of the one before is whole, whatever its parts were."""
        g = p.graph
        bias, load = (g.variable(n, [router], ZEROS, trainable=False) for n in ("router_bias", "router_load"))
        moved = bias + sign(reduce_mean(load, router) - load) * self.balance_rate
        g.assign(g.lookup("router_bias"), moved)
        return moved

    def _asked(self, scores: Tensor, router: Dim) -> Tensor:
        """Scores p + b, those of experts in other groups far below."""
        if self.groups == 1:
            return scores
        group, own = Dim("router_group", self.groups), Dim("router_own", router.size // self.groups)
        apart = reshape(scores, [*scores.shape.without(router.name), group, own])
        if self.scores == "sigmoid":
            two, _ = top_k(apart, own, Dim("router_best", 2))
            of_groups = reduce_sum(two, "router_best")
        else:
            of_groups = reduce_max(apart, own)
        _, ids = top_k(of_groups, group, Dim("router_groups", self.groups_chosen))
        asked = reduce_sum(one_hot(ids, group, scores.dtype), "router_groups")
        left = apart + (1.0 - asked) * _NEVER
        return reshape(left, Shape([*left.shape.without(group.name, own.name), router]))
