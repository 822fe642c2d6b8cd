"""Changes of one kind of decision beside a layout, for all its subjects alike, each lowered and priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from layoutopt.optimize.evaluation import Evaluation
from layoutopt.optimize.evaluator import evaluate
from layoutopt.plan.build import decided
from layoutopt.plan.units import step_change, used_text
from layoutopt.runtime.clock import Clock
from layoutopt.space.decisions import KINDS, SearchSpace
from layoutopt.space.kind import Chosen, Decision, Target
from mesh_tf_core.errors import UserError
from mesh_tf_core.lower.options import DEFAULT


@dataclass(frozen=True)
class SingleChange:
    """A step in which one kind of decision is taken otherwise; `plain`: is not taken at all."""

    kind: type[Decision]
    plain: bool
    evaluation: Evaluation

    def words(self, before: Evaluation, limit: float) -> str:
        """'recompute layers: 14.2 GiB of 22.9 GiB (62.0%), step 3.1 % longer'."""
        found = self.evaluation
        said = self.kind.in_words(decided(found.decided, found.layout, found.pipeline))[1]
        return (
            f"{said or f'without {self.kind.label}'}: {used_text(found.memory.peak, limit)}, step "
            f"{step_change(found.cost.step_seconds, before.cost.step_seconds)}"
        )


def single_changes(of: Evaluation, clock: Clock) -> Iterator[SingleChange]:
    """Every change that can be lowered, until the time is over."""
    machine = of.prices.hardware
    target = Target.on(machine, of.model, of.program.mesh)
    for kind in KINDS:
        own, choices = _choices(kind, target)
        for changed in choices:
            options = replace(of.options, **{**own, **changed})
            if clock.over or options.key == of.options.key:
                continue
            try:
                found = evaluate(of.model, target.mesh, of.layout, machine, options)
            except UserError:
                continue
            if found.decided.key != of.decided.key:
                yield SingleChange(kind, not changed, found)


def _choices(kind: type[Decision], target: Target) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields of `Options` that a kind sets, with their defaults, and what each of its choices sets."""
    widest = {name: value for name, value in kind.widest(target).items() if value}
    try:
        made = [*kind.about(target.model.step_graph, target.mesh, SearchSpace(**widest))]
    except UserError:
        return {}, []
    found = []
    for choice in dict.fromkeys(choice for each in made for choice in each.options):
        to = Chosen()
        for each in made:
            if choice in each.options:
                each.apply(choice, to)
        if not to.splits:
            found.append(to.options)
    return {name: getattr(DEFAULT, name) for options in found for name in options}, found
