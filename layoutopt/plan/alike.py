"""Layouts that are one layout under several names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from layoutopt.plan.decided import Decided
from layoutopt.plan.schema import Alternative, PlanFile


def identity(of: Alternative | PlanFile, mesh: Mapping[str, int]) -> str:
    """The identity of a layout: equal for equivalent layouts. `mesh`: of those without their own."""
    splits = {dim: axes for dim, axes in of.layout.items() if axes}
    rest = {name: getattr(of, name) for name in Decided.model_fields}
    return json.dumps([of.mesh or dict(mesh), splits, rest], sort_keys=True)


def grouped(choices: Sequence[Alternative], mesh: Mapping[str, int]) -> list[list[Alternative]]:
    """Groups equal layouts, in the order of the first of each group; layouts without a prediction stay
    alone."""
    found: dict[str, list[Alternative]] = {}
    for at, choice in enumerate(choices):
        key = f"{at}" if choice.predicted is None else identity(choice, mesh)
        found.setdefault(key, []).append(choice)
    return [*found.values()]
