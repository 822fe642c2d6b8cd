"""The second process of a search (`both_cores`)."""

from __future__ import annotations

from layoutopt.optimize.driver.both_cores import BothCores
from layoutopt.optimize.driver.fastest import FastestSearch
from layoutopt.optimize.heuristics.incumbents import WarmStart
from layoutopt.optimize.problems.request import Request
from layoutopt.runtime.clock import Clock, seldom_collected
from layoutopt.runtime.own_process import first_letter
from layoutopt.space.objective import Objective


def main() -> None:
    """Bounds problems with stages of the search of its first letter, looks at those without, then at those
    with stages."""
    (model, hardware, limit, allowed, seconds, shapes), heard, send = first_letter()
    request = Request(model, hardware, limit, Objective.TIME, allowed, 1, Clock(seconds), None, None)
    search = FastestSearch(request)
    search.both = BothCores(search.incumbents, heard, send)
    with seldom_collected():
        search.problems, search.listed = WarmStart(request, shapes).problems, True
        search.incumbents.subproblems = {each.key: each for each in search.problems}
        for each in search.problems:
            each.bound_by_share(request.evaluator)
        search.bound_stages(limit)
        search.both.report([each for each in search.problems if each.key.stages])
        for each in search.both.shared([[each] for each in search.plain], limit):
            search.look_at(each, limit)
        search.look_at_stages(limit, second=True)
