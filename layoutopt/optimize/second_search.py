"""The second process of a search (`both_cores`)."""

from __future__ import annotations

from collections.abc import Sequence

from layoutopt.optimize.both_cores import BothCores
from layoutopt.optimize.fastest import FastestSearch
from layoutopt.optimize.incumbents import WarmStart
from layoutopt.optimize.request import Request
from layoutopt.optimize.subproblems import Subproblem
from layoutopt.runtime.clock import Clock, seldom_collected
from layoutopt.runtime.own_process import first_letter
from layoutopt.space.objective import Objective


def main() -> None:
    """Looks at the problems of the search of its first letter."""
    (model, hardware, limit, allowed, seconds, shapes), heard, send = first_letter()
    request = Request(model, hardware, limit, Objective.TIME, allowed, 1, Clock(seconds), None, None)
    search = FastestSearch(request)
    search.both = BothCores(search.incumbents, heard, send)
    with seldom_collected():
        assist(search, WarmStart(request, shapes).problems)


def assist(search: FastestSearch, problems: Sequence[Subproblem]) -> None:
    """Bounds problems with stages, looks at those without, then at those with stages."""
    limit, search.problems, search.listed = search.request.limit, [*problems], True
    search.incumbents.subproblems = {each.key: each for each in problems}
    for each in problems:
        each.bound_by_share(search.request.evaluator)
    search.bound_stages(limit)
    search.both.report([each for each in problems if each.key.stages])
    for each in search.both.shared([[each] for each in search.plain], limit):
        search.look_at(each, limit)
    search.look_at_stages(limit, second=True)
