"""The layouts of a search that are worth measuring, and which of them a prediction cannot tell apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from costmodels.hardware import machine_of
from layoutopt.api.pricing import HARDWARE
from layoutopt.optimize.entry import search
from layoutopt.plan.build import Plan
from layoutopt.plan.known import Known
from layoutopt.plan.layout_results import Candidate, CandidatesResult
from layoutopt.plan.machine_details import errors_known
from layoutopt.plan.notebook import Shown, table
from layoutopt.plan.schema import ANSWER, Alternative
from layoutopt.plan.units import percent, seconds_text, some
from mesh_tf_core.errors import UserError
from mesh_tf_core.model import Model

MOST = 100
"""Number of layouts; a search lists as many of the best."""


@dataclass(frozen=True, repr=False)
class LayoutCandidates(Shown):
    """Layouts that are worth measuring, the fastest first.

    Attributes:
      plan: the search's answer.
      chosen: the layouts, with the error known of their kind, and groups.
      asked: the number of layouts asked for.
    """

    plan: Plan
    chosen: tuple[Candidate, ...]
    asked: int

    @property
    def notes(self) -> Iterator[str]:
        """Why there are not more, consequences of the errors for the order, then the notes of the search."""
        if (listed := len(self.chosen)) < self.asked:
            whole = "the search found no others that fit"
            cut = "the search ended before it had listed more; give a longer --time-limit"
            yield f"{listed} of {self.asked} layouts: {whole if self.plan.solver.proven else cut}"
        for number in dict.fromkeys(each.group for each in self.chosen):
            alike = [each for each in self.chosen if each.group == number]
            errors = [each.error for each in alike if each.error is not None]
            names = some([each.name for each in alike], 4)
            if len(alike) == 1:
                continue
            if len(errors) < len(alike):
                yield f"group {number}: only measurement tells {names} apart (no error of some is known)"
            else:
                error = percent(max(errors))
                yield f"group {number}: predictions with a mean error of {error} cannot tell {names} apart"
        yield from self.plan.data.notes

    @property
    def data(self) -> CandidatesResult:
        """The result that `layoutopt candidates --json` prints."""
        its = self.plan.data
        return CandidatesResult(
            model=its.model,
            hardware=its.hardware,
            framework=its.framework or "",
            candidates=list(self.chosen),
            notes=[*self.notes],
        )

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per layout."""
        fields = ("name", "mesh", "layout", "step_seconds", "error", "group")
        shown = ({"step_seconds": _seconds(each), **dict(each)} for each in self.chosen)
        return table([{name: row[name] for name in fields} for row in shown])

    def __repr__(self) -> str:
        fastest = self.plan.predicted.step_seconds
        return f"LayoutCandidates({len(self.chosen)} layouts, the fastest {seconds_text(fastest)} a step)"


def candidates(model: Model, n: int = 4, **asked: Any) -> LayoutCandidates:
    """Finds the layouts of a model that are worth measuring on the machine.

    They are the best layout and the fastest that split or store the model differently: the named strategies
    and the next best of the search. Two layouts are in one group where the error of predictions of their kind
    is larger than their difference, so that only a measurement tells which is faster.

    Args:
      n: the most layouts.
      asked: arguments of `search`: mesh or devices, hardware, framework, and so on.

    Raises:
      InfeasibleError, LimitError, UserError: as `search`, or `n` is not between 1 and 100.

    Example:
      >>> import layoutopt
      >>> from examples import mlp
      >>> found = layoutopt.candidates(mlp.model(), n=3, mesh="data:4", hardware="tpu-v5e")
      >>> found.chosen[0].name, len(found.chosen)
      ('the answer', 3)
    """
    if not 1 <= n <= MOST:
        raise UserError(f"candidates: n is {n!r}; give a number of layouts from 1 to {MOST}")
    machine = machine_of(asked.get("hardware", HARDWARE), asked.get("framework"), model.framework)
    plan = search(model, top=n, **asked)
    chosen = _grouped(_distinct(plan)[:n], partial(errors_known, machine, model))
    return LayoutCandidates(plan, tuple(chosen), n)


def _distinct(plan: Plan) -> list[Alternative]:
    """The layouts of a plan that fit and obey its rules, fastest first, each mesh and layout once."""
    its, rules = plan.data, plan.allowed
    answer = {name: getattr(its, name) for name in Alternative.model_fields if name in type(its).model_fields}
    pool = [Alternative(**{**answer, "name": ANSWER, "feasible": True}), *its.alternatives]
    found: dict[tuple[Any, ...], Alternative] = {}
    for each in pool:
        pinned = all(tuple(each.layout.get(dim, ())) == axes for dim, axes in rules.pins.items())
        apart = all({*axes}.isdisjoint(each.layout.get(dim, ())) for dim, axes in rules.forbid.items())
        if each.feasible and each.predicted is not None and pinned and apart:
            mesh = each.mesh or its.mesh
            same = str(sorted(mesh.items())), str(sorted(each.layout.items())), each.as_options()
            found.setdefault(same, each.model_copy(update={"mesh": mesh}))
    return sorted(found.values(), key=_seconds)


def _grouped(
    layouts: Sequence[Alternative], known: Callable[[Collection[str]], Known]
) -> Iterator[Candidate]:
    """Layouts with the errors of their kinds, which depend on pipeline stages; a group ends where a layout
    is slower than its first by more than their errors."""
    most, group = math.inf, 0
    for each in layouts:
        runs = known(each.pipeline).runs
        error, seconds = None if runs is None else runs.mean, _seconds(each)
        if not group or (error is not None and seconds * (1 - error) > most):
            most, group = math.inf if error is None else seconds * (1 + error), group + 1
        fields = {name: getattr(each, name) for name in Alternative.model_fields}
        yield Candidate(**fields, error=error, group=group)


def _seconds(each: Alternative) -> float:
    assert each.predicted is not None
    return each.predicted.step_seconds
