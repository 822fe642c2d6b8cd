"""Errors of predictions: predicted over published, less 1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean, median
from typing import Any

from scipy.stats import kendalltau


def errors_of(found: Iterable[float]) -> dict[str, Any] | None:
    """Mean, median, signed mean and worst of errors."""
    errors = list(found)
    if not errors:
        return None
    sizes = [abs(e) for e in errors]
    return {
        "rows": len(errors),
        "mean": fmean(sizes),
        "median": median(sizes),
        "signed_mean": fmean(errors),
        "worst": max(errors, key=abs),
    }


def order(found: Iterable[tuple[str, str, float, float, int]]) -> float | None:
    """Kendall's tau of predicted and published seconds per token, the mean over models of a chip with at
    least four runs; None: there are none.

    Args:
      found: model, hardware, predicted and published seconds, tokens of a step.
    """
    models = defaultdict(list)
    for model, hardware, predicted, seconds, tokens in found:
        models[model, hardware].append((predicted / tokens, seconds / tokens))
    taus = [kendalltau(*zip(*pairs, strict=True)).statistic for pairs in models.values() if len(pairs) > 3]
    known = [float(t) for t in taus if t == t]
    return fmean(known) if known else None
