"""The space that a search was allowed, in plans and in words: every argument of every kind."""

from __future__ import annotations

from typing import Any

from layoutopt.space.allow import USUAL
from layoutopt.space.argument import Space
from layoutopt.space.decisions import ARGUMENTS, SearchSpace
from layoutopt.space.objective import Objective

_UNSAID = {name: a.unsaid() for name, a in ARGUMENTS.items() if a.unsaid is not None}
USUALLY = SearchSpace(allow=(USUAL,), **_UNSAID)
"""The meaning of a field that a plan does not state."""


def recorded(allowed: Space) -> dict[str, Any]:
    """The request as fields of `layoutopt.plan.details.Searched`."""
    said = ((name, a, getattr(allowed, name)) for name, a in ARGUMENTS.items())
    return {name: a.text(value) if a.plan is str else value for name, a, value in said}


def allowed_by(said: object) -> SearchSpace:
    """The request, from an object with these fields; missing ones have their defaults."""
    known = ((name, getattr(said, name, None)) for name in ARGUMENTS)
    return USUALLY.but(**{name: value for name, value in known if value is not None})


def allowed_text(allowed: SearchSpace) -> str:
    """The request in words, as far as it differs from the defaults for the least time; '' if it does not."""
    usual, said = recorded(SearchSpace().settled(Objective.TIME)), recorded(allowed)
    parts = ((name, value) for name, value in said.items() if value != usual[name])
    return "; ".join(f"{name.replace('_', ' ')} {_words(value)}" for name, value in parts)


def _words(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value)) or "none"
