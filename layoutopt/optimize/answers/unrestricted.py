"""The cost of a restriction: the best layout that a framework cannot express, beside the best that it can."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from layoutopt.optimize.answers.alternatives import called
from layoutopt.optimize.driver.search import LayoutSearch
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.optimize.problems.subproblems import subproblems
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.objective import Objective
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.ir.mesh import Mesh

UNRESTRICTED = "unrestricted"
"""The name of the layout."""


def unrestricted(
    request: Request,
    allowed: SearchSpace,
    shapes: Sequence[Mesh],
    best: EvaluatedLayout,
    renames: bool,
    unnamed: bool = False,
) -> dict[str, Any]:
    """Fields of `PlanFile`: the best layout of a space, if it is faster than the answer of a restricted one,
    and the share of the step that it saves; or a note why it was not searched.

    Args:
      allowed: the space without the restriction.
      shapes, renames: the meshes of the search, and whether plans give their axes other names.
      unnamed: the framework is the model's own.
    """
    if why := _not_searched(request, unnamed):
        return _note(request, why)
    wide = request.like(allowed=allowed, on_progress=None, on_better=None, top=1)
    search = LayoutSearch(wide, renames)
    search.incumbents.most = best.seconds
    found = best
    try:
        with suppress(InfeasibleError):  # nothing is faster
            other = search.run(subproblems(request.model, shapes, allowed, request.evaluator.near))
            found = min(best, other, key=lambda f: f.seconds)
    except UserError as error:
        return _note(request, LATE if isinstance(error, LimitError) else str(error))
    low, gain = search.bound.value, {"left": 1 - found.seconds / best.seconds}
    said: dict[str, Any] = gain if search.proven or found is not best else {}
    if found is not best:
        said |= {UNRESTRICTED: called(request, UNRESTRICTED, found, renames)}
    if not search.proven:
        most = "this much or more" if found is not best else "an unknown part"
        most = f"at most {1 - low / best.seconds:.1%}" if low > 0 else most
        said |= {"notes": [f"the search for unrestricted layouts did not end; they save {most} of the step"]}
    return said


LATE = "the time limit was reached"


def _not_searched(request: Request, unnamed: bool) -> str:
    """Why faster layouts are not searched; '' if they are."""
    if request.objective != Objective.TIME:
        return f"the objective is {request.objective}"
    if request.allowed.diloco is not None:
        return "replicas are synchronised rarely (--diloco)"
    if request.late:
        return LATE
    return "give its name to --framework to have them, too" if unnamed else ""


def _note(request: Request, why: str) -> dict[str, Any]:
    name = request.allowed.restriction.name
    return {"notes": [f"faster layouts that {name} cannot express were not searched: {why}"]}
