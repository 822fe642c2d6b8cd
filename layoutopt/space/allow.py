"""Words for decisions, with the dimensions of a model: `usual`, `everything`, `+pipeline`, `-context`.

Names are those of arguments and of features (`explain --without`); a field that is set overrides them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from layoutopt.space.decisions import ARGUMENTS, FEATURES, KINDS, SearchSpace
from layoutopt.space.kind import Target
from layoutopt.space.objective import Objective
from mesh_tf_core.errors import UserError, known_names

USUAL, EVERYTHING = "usual", "everything"
PLAIN = SearchSpace()


def resolved(space: SearchSpace, targets: Sequence[Target]) -> SearchSpace:
    """The space with the decisions that its words allow.

    Args:
      targets: of every mesh that is searched.

    Raises:
      UserError: an unknown word, or a decision that this model does not have.
    """
    if not space.allow:
        return space
    widest = found(targets)
    chosen = {name: getattr(PLAIN, name) for name in widest}
    for word in space.allow:
        name = word.lstrip("+-")
        if word in (USUAL, EVERYTHING):
            chosen = widest if word == EVERYTHING else {n: getattr(PLAIN, n) for n in widest}
        elif word.startswith("-"):
            chosen |= _less(name, word, chosen, PLAIN)
        else:
            chosen |= _more(name, word, chosen, widest)
    said = {name for name in chosen if getattr(space, name) != getattr(PLAIN, name)}
    return space.but(allow=(), **{name: value for name, value in chosen.items() if name not in said})


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


def _more(name: str, word: str, chosen: dict[str, Any], widest: dict[str, Any]) -> dict[str, Any]:
    """The fields that a name adds to."""
    field, means = _meaning(name, word)
    if field not in widest:
        raise UserError(
            f"--allow {word}: this model has no such choice on this mesh and hardware; remove this word"
        )
    if not isinstance(widest[field], tuple):
        return {field: widest[field]}
    known = chosen[field] or ()
    more = {field: tuple(dict.fromkeys((*known, *filter(means, widest[field]))))}
    needs = next((k.needs for k in KINDS if k.asks is not None and field in k.asks.__dataclass_fields__), "")
    return more if not needs or chosen.get(needs) else more | _more(needs, word, chosen, widest)


def _less(name: str, word: str, chosen: dict[str, Any], plain: SearchSpace) -> dict[str, Any]:
    """The fields that a name takes from."""
    field, means = _meaning(name, word)
    value = chosen.get(field, getattr(plain, field))
    usual = ARGUMENTS[field].usual
    value = usual(Objective.TIME) if value is None and usual is not None else value
    if not isinstance(value, tuple):
        return {field: getattr(plain, field)}
    rest = tuple(each for each in value if not means(each))
    return {field: rest or tuple(each for each in _least(field) if not means(each))}


def _least(field: str) -> Iterable[Any]:
    """The value that stays where all others are taken away."""
    value = getattr(PLAIN, field)
    return () if value is None else value[:1]


def _meaning(name: str, word: str) -> tuple[str, Any]:
    """The field that a name is about, and which of its values."""
    if name in FEATURES:
        return FEATURES[name].field, FEATURES[name].means
    if name in ARGUMENTS and not ARGUMENTS[name].names_axes:
        return name, lambda value: True
    known = {USUAL, EVERYTHING, *FEATURES, *(n for n, a in ARGUMENTS.items() if not a.names_axes)}
    raise UserError(f"--allow {word}: {known_names(name, known)}")
