"""The least memory that a layout needs, where none fits: how much, of which layout, and what fills it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layoutopt.optimize.baselines import axis_names, called_mesh, in_names
from layoutopt.optimize.best_plans import lean
from layoutopt.optimize.least_memory import leanest
from layoutopt.optimize.request import BESIDE, Request, left_whole
from layoutopt.optimize.subproblem import EvaluatedLayout, SubproblemSearch
from layoutopt.optimize.subproblems import Subproblem
from layoutopt.plan.units import size_text

ADVICE = "use {}, more memory, or a smaller batch"
EXCLUDED = ": --pin and --forbid together exclude every layout; remove one of their rules"
NAMED = 3
"""The largest tensors that are named."""


def nearest_of(
    request: Request,
    problems: Sequence[Subproblem],
    known: EvaluatedLayout | None,
    opened: Callable[[Subproblem], SubproblemSearch],
) -> tuple[EvaluatedLayout | None, bool]:
    """A layout with little memory, and whether there was time to look for all of them.

    Args:
      known: the one that is known to need least.
    """
    best = known

    def look() -> None:
        nonlocal best
        for each in sorted(problems, key=lambda p: -p.microbatches):  # small pieces mostly hold least
            if best is None and each.bounds.least > request.limit:
                best = lean(request, each)  # without tables, which may take long
            if best is None or each.bounds.least < best.peak:
                best, low = leanest(opened(each), request.clock, best=best)
                each.bounds.hold_at_least(low)

    with request.clock.at_most(BESIDE):
        ended = request.clock.within(0.0, look)
    return best, ended


def needed(request: Request, nearest: EvaluatedLayout, least: float, renames: bool) -> str:
    """The bytes that the nearest layout needs, its largest tensors, and what its storage cannot split; axes
    have their names in plans.

    Args:
      least: bytes that no layout needs less than.
    """
    names = axis_names(nearest.layout, nearest.mesh, request.model) if renames else {}
    mesh = called_mesh(nearest.mesh, names)
    layout, low = str(nearest.layout.renamed(names)) or "replicated", max(request.limit, least)
    sure = f" (no layout needs less than {size_text(low)})" if low < nearest.peak else ""
    held = ", ".join(f"{h.what} ({size_text(h.bytes)})" for h in nearest.evaluation.memory.holdings[:NAMED])
    whole = "".join(f"; {each}" for each in left_whole(request, nearest.evaluation))
    held, whole = in_names(held, names), in_names(whole, names)
    # No bound: what fewer devices had to keep whole, more of them may split, and the other way round.
    few = f"{-(-low * mesh.devices // request.limit):,.0f} devices (if memory divides evenly)"
    few = f"about {few}" if low > request.limit else "more devices"
    return (
        f"\nthe layout with the least memory needs {size_text(nearest.peak)}{sure}: {layout} on {mesh}\n"
        f"its largest tensors: {held}{whole}; {ADVICE.format(few)}"
    )
