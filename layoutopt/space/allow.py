"""Words for decisions, with the dimensions of a model: `usual`, `everything`, `+pipeline`, `-context`.

Names are those of arguments and of features (`explain --without`); a field that is set overrides them.

The space that a search was allowed, in plans and in words: every argument of every kind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from layoutopt.space.argument import Space
from layoutopt.space.decisions import ALLOW, ARGUMENTS, FEATURES, KINDS, SearchSpace
from layoutopt.space.kind import Target
from layoutopt.space.objective import Objective
from mesh_tf_core.errors import UserError, known_names

USUAL, EVERYTHING = "usual", "everything"
PLAIN = SearchSpace()
VARIABLE = "LAYOUTOPT_ALLOW"
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
    usual, said = (recorded(each.settled(Objective.TIME)) for each in (SearchSpace(), allowed))
    parts = ((name.replace("_", " "), value) for name, value in said.items() if value != usual[name])
    texts = ((n, v if isinstance(v, str) else ", ".join(map(str, v)) or "none") for n, v in parts)
    return "; ".join(map(" ".join, texts))


def unsaid() -> tuple[str, ...]:
    """The words of a search without any: those of an environment variable, else none."""
    return ALLOW.parse(os.environ.get(VARIABLE, ""))


def spaces(space: SearchSpace, targets: Sequence[Target], objective: Objective) -> list[SearchSpace]:
    """The spaces of a search, each within the next (`resolved`): without words, of what is usual and of
    everything. A frontier of everything takes too long."""
    if (words := space.allow or unsaid()) or objective is Objective.PARETO:
        return [resolved(space.but(allow=words), targets)]
    return [resolved(space.but(allow=(word,)), targets) for word in (USUAL, EVERYTHING)]


def resolved(space: SearchSpace, targets: Sequence[Target]) -> SearchSpace:
    """The space with the decisions that its words allow; it says `USUAL` then, and means what it has.

    Args:
      targets: of every mesh that is searched.

    Raises:
      UserError: an unknown word, or a decision that this model does not have.
    """
    if space.allow in ((), (USUAL,)):
        return space.but(allow=(USUAL,))
    widest = found(targets)
    every = found(targets, everything=True)
    chosen = {name: getattr(PLAIN, name) for name in widest}
    for word in space.allow:
        name = word.lstrip("+-")
        if word in (USUAL, EVERYTHING):
            chosen = widest if word == EVERYTHING else {n: getattr(PLAIN, n) for n in widest}
        elif word.startswith("-"):
            chosen |= _less(name, word, chosen, PLAIN)
        else:
            chosen |= _more(name, word, chosen, widest, every)
    decided = {**chosen, **{name: getattr(space, name) for name in ARGUMENTS if name in space.given}}
    for kind in KINDS:
        decided |= {n: value for n, value in kind.useless(decided).items() if n not in space.given}
    return space.but(allow=(USUAL,), **{name: decided[name] for name in chosen})


def found(targets: Sequence[Target], everything: bool = False) -> dict[str, Any]:
    """Field -> the values that `Decision.widest`, or `Decision.everything`, finds on any of the meshes."""
    every: dict[str, Any] = {}
    for target in targets:
        for kind in KINDS:
            for name, widest in (kind.everything if everything else kind.widest)(target).items():
                known = every.get(name, ())
                together = isinstance(widest, tuple)
                every[name] = tuple(dict.fromkeys((*known, *widest))) if together else widest
    return {name: widest for name, widest in every.items() if widest}


def _more(name: str, word: str, chosen: dict[str, Any], *wider: dict[str, Any]) -> dict[str, Any]:
    """The fields that a name adds to; those of the first of `wider` in which it has a choice."""
    field, means = _meaning(name, word)
    values = (found[field] for found in wider if field in found)
    added = next((v for v in values if not isinstance(v, tuple) or any(map(means, v))), None)
    if added is None:
        raise UserError(
            f"--allow {word}: this model has no such choice on this mesh and hardware; remove this word"
        )
    if not isinstance(added, tuple):
        return {field: added}
    more = {field: tuple(dict.fromkeys((*(chosen.get(field) or ()), *filter(means, added))))}
    needs = next((k.needs for k in KINDS if field in k.asks), "")
    return more if not needs or chosen.get(needs) else more | _more(needs, word, chosen, *wider)


def _less(name: str, word: str, chosen: dict[str, Any], plain: SearchSpace) -> dict[str, Any]:
    """The fields that a name takes from."""
    field, means = _meaning(name, word)
    value = chosen.get(field, getattr(plain, field))
    usual = ARGUMENTS[field].usual
    value = usual(Objective.TIME) if value is None and usual is not None else value
    if not isinstance(value, tuple):
        return {field: getattr(plain, field)}
    rest = tuple(each for each in value if not means(each))
    least = (getattr(PLAIN, field) or ())[:1]  # stays where all others are taken away
    return {field: rest or tuple(each for each in least if not means(each)) or least}


def _meaning(name: str, word: str) -> tuple[str, Any]:
    """The field that a name is about, and which of its values."""
    if name in FEATURES:
        return FEATURES[name].field, FEATURES[name].means
    if name in ARGUMENTS and not ARGUMENTS[name].names_axes:
        return name, lambda value: True
    known = {USUAL, EVERYTHING, *FEATURES, *(n for n, a in ARGUMENTS.items() if not a.names_axes)}
    raise UserError(f"--allow {word}: {known_names(name, known)}")
