"""What a search was allowed, as plans keep it and as words: all fields of `Allowed`, whatever there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from layoutopt.space.context import usual as usual_context
from layoutopt.space.kind import Allowed
from layoutopt.space.microbatches import USUAL
from layoutopt.space.splits import parse_forbid, parse_rules, rules_text
from mesh_tf_core.tracing.diloco import DiLoCo

TEXTS: dict[str, tuple[Callable[[Any], str | None], Callable[[str], Any]]] = {
    "pins": (rules_text, parse_rules),
    "forbid": (rules_text, parse_forbid),
    "diloco": (lambda diloco: None if diloco is None else str(diloco), DiLoCo.parse),
}
"""Fields that plans keep as text: how it is written, and read. The others are plain as they are."""
USUALLY = Allowed(microbatches=USUAL)
"""What a plan means that says nothing of a field."""


def recorded(allowed: Allowed) -> dict[str, Any]:
    """What was asked, as fields of `layoutopt.plan.details.Searched`."""
    return {
        name: TEXTS[name][0](value) if name in TEXTS else value for name, value in allowed.keywords.items()
    }


def allowed_by(said: object) -> Allowed:
    """What was asked, from an object with these fields; what it does not say is usual."""
    known = ((name, getattr(said, name, None)) for name in Allowed.asked())
    found = {n: TEXTS[n][1](v) if n in TEXTS else v for n, v in known if v is not None}
    return Allowed(**{**USUALLY.keywords, **found})


def allowed_text(allowed: Allowed) -> str:
    """What was asked, in words, as far as it is not usual for the least time; '' if all is."""
    usual, said = recorded(replace(USUALLY, context=usual_context("time"))), recorded(allowed)
    parts = ((name, value) for name, value in said.items() if value != usual[name])
    return "; ".join(f"{name.replace('_', ' ')} {_words(value)}" for name, value in parts)


def _words(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value)) or "none"
