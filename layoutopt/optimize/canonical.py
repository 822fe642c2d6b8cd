"""The plainest of choices that cost the same."""

from __future__ import annotations

from layoutopt.formulation.extract import Extraction
from layoutopt.solver import Problem, cost
from layoutopt.solver import evaluate as evaluate_choices

EQUAL = 1e-12
"""Relative difference of sums that are taken in another order."""


def canonical(problem: Problem, extraction: Extraction, choices: tuple[int, ...]) -> tuple[int, ...]:
    """Choices that cost no more, with the plain option wherever it makes no difference."""
    best = list(choices)
    most = cost(problem, choices) * (1 + EQUAL)
    for i, name in enumerate(extraction.names):
        plain = extraction.decided.options[name].index(()) if () in extraction.decided.options[name] else 0
        for option in sorted({plain, *range(best[i])}, key=lambda o: (o != plain, o)):
            if option == best[i]:
                break
            other = (*best[:i], option, *best[i + 1 :])
            # Most options already cost more; only of the others are the rows worth adding up.
            if cost(problem, other) <= most and evaluate_choices(problem, other).feasible:
                best[i] = option
                break
    return tuple(best)
