"""Every kind of decision at once: the search's answer is the best of all layouts, tried one by one."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

import mesh_tf_core as mtf
from layoutopt.optimize.search import Search
from layoutopt.space.decisions import KINDS
from tests.layoutopt.every_kind import OPENED, RARE, Whole, whole_question
from tests.marks import by_day

AGREE = 1e-9


def check(seed: int, most: int) -> Counter[str]:
    """One model and question, under memory limits that bind and that do not, for the least time and the least
    memory; returns what came of it."""
    question, rng = whole_question(seed, most, rarely=seed % RARE == RARE - 1), random.Random(seed)
    points = [(each.cost.step_seconds, each.memory.peak) for each in question.evaluated()]
    peaks = sorted({peak for _, peak in points})
    assert peaks, f"seed {seed}: nothing is legal"
    found = Counter[str](models=1, layouts=len(points))
    limits = [math.inf, peaks[0], peaks[0] - 1, rng.choice(peaks), rng.choice(peaks[: 1 + len(peaks) // 3])]
    for limit in dict.fromkeys(map(float, limits)):
        seconds = [s for s, peak in points if peak <= limit]
        where = f"seed {seed}: {question.mesh}, {question.hardware.name}, {limit} bytes, {question.allowed}"
        got = answer(question, limit, "time")
        if not seconds:
            assert got is None, where
            found["infeasible"] += 1
            continue
        assert got is not None, f"{where}: proven that nothing fits, and {len(seconds)} layouts do"
        assert got[0] == pytest.approx(min(seconds), rel=AGREE), where
        found["optimal"] += got[2]
        found["not proven"] += not got[2]
    got = answer(question, math.inf, "memory")
    assert got is not None and got[1] == peaks[0], f"seed {seed}: least memory {got}, {peaks[0]} is possible"
    found["least memory"] += 1
    return found


def answer(question: Whole, limit: float, objective: str) -> tuple[float, int, bool] | None:
    """Seconds and bytes of the answer, and whether it is proven; None if it is proven that there is none."""
    its = Search(question.request(limit, objective))
    try:
        best = its.run(question.problems)
    except mtf.InfeasibleError:
        return None
    value = best.seconds if objective == "time" else best.peak
    return best.seconds, best.peak, its.proven and its.bound >= value * (1 - 1e-6)


@pytest.mark.parametrize("seed", by_day(range(12), every=4))
def test_an_answer_is_the_best_of_all_layouts(seed: int) -> None:
    check(seed, 60)
