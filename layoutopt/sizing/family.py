"""Real models of other sizes of the user's own: its hyperparameters, scaled by a rule.

    both    depth and width by the same factor: the shape of the model stays, except that the number of heads
            is rounded
    depth   only layers
    width   only heads, width and the sizes that follow from it

Heads keep their size: their number grows, and the width with it. So do the hidden layers and everything else
with a width. Heads that share keys and values (grouped-query attention) keep their number of groups. Numbers
of heads keep three binary digits, so that they divide over devices; layers are whole. A rule of the user's
own names hyperparameters with the powers of the factor: `layers:1;d_model:0.5`.

A size is counted on the model that is built, not by a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from layoutopt.sizing.forecast import ParameterCount
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.model import Model
from mesh_tf_core.ops.grouped import GroupedProduct
from mesh_tf_core.tracing.graph import Graph

BuildModel = Callable[..., Model]
DEPTH = (
    "layers", "encoder_layers", "decoder_layers", "num_layers", "n_layers", "n_layer", "depth",
    "num_hidden_layers",
)  # fmt: skip
HEADS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads")
GROUPS = ("kv_heads", "num_kv_heads", "num_key_value_heads")
WIDTH = (
    "d_model", "width", "hidden", "hidden_size", "n_embd", "d_ff", "d_expert", "d_inner", "kv_rank",
    "q_rank", "ffn_dim", "intermediate_size", "moe_intermediate_size",
)  # fmt: skip
"""Roles of hyperparameters, by their names in examples and Hugging Face configurations."""
RULES = ("both", "depth", "width")
POWERS = "layers:1;d_model:1;heads:1"
"""Powers of hyperparameters, as errors show them."""
DIGITS = 3
"""Binary digits that numbers of heads keep."""
MULTIPLE = 8
"""The multiple to which widths are rounded that no number of heads gives."""
NEAR, TRIES = 0.02, 12
"""How near a size must be to the requested one, and how many other factors are tried."""


@dataclass(frozen=True)
class SizeCandidate:
    """One size.

    Attributes:
      hparams: those that are not the user's.
      model: it; `size` is counted on it.
    """

    hparams: Mapping[str, Any]
    model: Model = field(repr=False)
    size: ParameterCount

    @cached_property
    def flops_per_token(self) -> float:
        """Model FLOPs of training (`costmodels.utilisation`), by the model's own count."""
        from layoutopt.optimize.evaluation.evaluation import unsplit_flops

        return sum(unsplit_flops(self.model).values()) / self.tokens

    @property
    def tokens(self) -> int:
        """The tokens of one step."""
        assert self.model.tokens is not None
        return self.model.tokens


class Family:
    """The sizes of one model.

    Args:
      build: makes the model of hyperparameters.
      hparams: the user's, all of them.
      rule: one of `RULES`, or powers by name.
    """

    def __init__(self, build: BuildModel, hparams: Mapping[str, Any], rule: str = "both") -> None:
        self.build, self.hparams, self.rule = build, dict(hparams), rule
        self._known: dict[tuple[tuple[str, Any], ...], SizeCandidate] = {}

    @cached_property
    def powers(self) -> dict[str, float]:
        """Hyperparameter -> power of the factor; UserError if the rule is unclear."""
        return powers_of(self.rule, self.hparams)

    @cached_property
    def own(self) -> SizeCandidate:
        """The user's size."""
        return self._made({})

    def at(self, factor: float, deeper: float = 1.0) -> SizeCandidate:
        """The size of a factor, with the depth scaled further; equal hyperparameters are one candidate."""
        return self._made(self.scaled(factor, deeper))

    def _made(self, hparams: Mapping[str, Any]) -> SizeCandidate:
        changed = {n: v for n, v in hparams.items() if v != self.hparams[n]}
        key = tuple(sorted(changed.items()))
        if key not in self._known:
            model = self.build(**{**self.hparams, **changed})
            if model.tokens is None:
                raise UserError(
                    f"model {model.name!r} does not define what a token is, which scaling laws require; "
                    "add token_dims, e.g. mtf.Model(..., token_dims=(batch, length))"
                )
            self._known[key] = SizeCandidate(changed, model, counted(model))
        return self._known[key]

    def scaled(self, factor: float, deeper: float = 1.0) -> dict[str, Any]:
        """The hyperparameters of a factor, those that the rule names."""
        found: dict[str, Any] = {}
        heads = next((n for n in HEADS if n in self.powers), None)
        groups = max((self.hparams[n] for n in GROUPS if self.hparams.get(n)), default=1)
        ratio = factor
        if heads is not None:
            base, power = self.hparams[heads], self.powers[heads]
            step = groups if base % groups == 0 else 1
            found[heads] = rounded_to(base * factor**power, step)
            ratio = (found[heads] / base) ** (1 / power) if power else factor
        for name, power in self.powers.items():
            if name in found:
                continue
            value = self.hparams[name]
            if name in DEPTH:
                found[name] = max(1, round(value * deeper * factor**power))
            elif name in HEADS:
                found[name] = rounded_to(value * factor**power, 1)
            else:
                found[name] = whole(value * ratio**power)
        return found

    def sizes(
        self, wanted: Sequence[float], counts: Callable[[ParameterCount], float]
    ) -> Iterator[SizeCandidate]:
        """Different candidates with about these numbers of parameters, as `counts` counts them."""
        seen: set[int] = set()
        for target in wanted:
            found = self._near(target, counts)
            if id(found) not in seen:
                seen.add(id(found))
                yield found

    def _near(self, target: float, counts: Callable[[ParameterCount], float]) -> SizeCandidate:
        """By secants in logarithms; what numbers of heads leave is left to the depth."""
        tried: dict[float, SizeCandidate] = {}
        factor = 1.0
        for _ in range(TRIES):
            now = tried[factor] = self.at(factor)
            if abs(math.log(target / counts(now.size))) <= NEAR:
                break
            known = sorted((f, counts(c.size)) for f, c in tried.items())
            low = max((pair for pair in known if pair[1] <= target), default=None)
            high = min((pair for pair in known if pair[1] > target), default=None)
            if low is None or high is None:
                # Parameters grow with the cube of a factor of depth and width.
                factor *= (target / counts(now.size)) ** (1 / 3)
            else:
                share = math.log(target / low[1]) / math.log(high[1] / low[1])
                share = min(max(share, 0.1), 0.9)
                factor = low[0] ** (1 - share) * high[0] ** share
            if factor in tried:
                break

        def off(candidate: SizeCandidate) -> float:
            return abs(math.log(target / counts(candidate.size)))

        factor, best = min(tried.items(), key=lambda pair: off(pair[1]))
        if off(best) > NEAR and any(name in DEPTH for name in self.powers) and len(self.powers) > 1:
            best = min(best, self.at(factor, target / counts(best.size)), key=off)
        return best


def powers_of(rule: str, hparams: Mapping[str, Any]) -> dict[str, float]:
    """Hyperparameter -> power of the factor.

    Raises:
      UserError: no such rule, or hyperparameters that are not there, or nothing that is known to be a size.
    """
    sizes = {n for n, v in hparams.items() if isinstance(v, int) and not isinstance(v, bool) and v > 0}
    if not sizes:
        raise UserError(
            f"--scale {rule}: this model has no whole-number hyperparameters to scale; add some, e.g. "
            "model(layers=6, d_model=256), or keep the size and use --tokens"
        )
    if rule in RULES:
        known = {"depth": DEPTH, "width": (*HEADS, *WIDTH)}
        wanted = {
            what: [n for n in names if n in sizes] for what, names in known.items() if rule in (what, "both")
        }
        missing = [what for what, names in wanted.items() if not names]
        if missing:
            alone = next((what for what, names in wanted.items() if names), "")
            only = f"write --scale {alone} to scale only {', '.join(wanted[alone])}, or " if alone else ""
            raise UserError(
                f"--scale {rule}: no hyperparameter has a known name for {' or '.join(missing)}; {only}give "
                'the powers by name, e.g. --scale "layers:1;d_model:1"; whole-number hyperparameters: '
                f"{', '.join(sorted(sizes))}"
            )
        return dict.fromkeys((n for names in wanted.values() for n in names), 1.0)
    powers = {}
    for part in filter(None, (part.strip() for part in rule.split(";"))):
        name, colon, text = part.partition(":")
        try:
            power = float(text)
        except ValueError:
            power = math.nan
        if not colon or not 0 < power <= 4:
            raise UserError(
                f"--scale {rule!r} is not a rule; give {', '.join(RULES)}, or hyperparameters with powers "
                f"above 0 and at most 4, e.g. {POWERS!r}"
            )
        if name.strip() not in sizes:
            raise UserError(
                f"--scale {rule!r}: {name.strip()!r} is not a whole-number hyperparameter; "
                f"{known_names(name, sizes)}"
            )
        powers[name.strip()] = power
    if not powers:
        raise UserError(
            f"--scale {rule!r} is not a rule; give {', '.join(RULES)}, or powers of hyperparameters, e.g. "
            f"{POWERS!r}"
        )
    return powers


def rounded_to(value: float, step: int) -> int:
    """A multiple of `step` with at most three binary digits beyond it; at least one."""
    units = max(value / step, 1.0)
    coarse = 2 ** max(0, math.floor(math.log2(units)) + 1 - DIGITS)
    return step * coarse * max(1, round(units / coarse))


def whole(value: float) -> int:
    """The value if it is whole, else a multiple of 8; at least one."""
    near = round(value)
    if abs(value - near) < 1e-9 * max(value, 1) or value < MULTIPLE:
        return max(1, near)
    return MULTIPLE * round(value / MULTIPLE)


def counted(model: Model) -> ParameterCount:
    """Exact number of trained scalars, without those of words (variables with the dimension of the labels)
    and learned positions (with a dimension of the tokens)."""
    words = set(_words(model.graph))
    places = {"positions", *(d.name if isinstance(d, Dim) else d for d in model.token_dims)}
    trained = [v for v in model.graph.variables.values() if v.trainable]
    total = sum(v.shape.size for v in trained)
    without = sum(v.shape.size for v in trained if not {*v.shape.names} & (words | places))
    return ParameterCount(total, without or total, _idle(model))


def _idle(model: Model) -> int:
    """Parameters of experts that a token does not use: a token's products need two FLOPs for each that it
    does."""
    idle, graph = 0.0, model.graph
    for node, times in graph.walk():
        if isinstance(node.op, GroupedProduct) and model.tokens:
            types = [graph.tensor(i).type for i in node.inputs]
            used = node.op.flops(*types) / (2 * model.tokens)
            idle += times * max(0.0, types[1].shape.size - used)
    return round(idle)


def _words(graph: Graph) -> Iterator[str]:
    """The dimensions whose elements labels name: inputs, of each of which one must be meant."""
    fed = {tensor.id for tensor in graph.inputs.values()}
    for node, _ in graph.walk():
        label = node.op.labels(*(graph.tensor(i).type for i in node.inputs))
        if label is not None and node.inputs[label[0]] in fed and not label[2]:
            yield label[1].name
