"""The check of an operation's class against the contract (`op`), when it is made."""

from __future__ import annotations

import inspect
import re
from difflib import get_close_matches
from typing import Any

_UNHASHABLE = re.compile(r"(\w+\.)*(list|dict|set|bytearray|List|Dict|Set|Mutable\w+|ndarray)\b")


def check_contract(cls: Any, contract: Any, abstract: bool) -> None:
    """TypeError if a class of operations breaks the contract of the class `Op`, or of a group of questions
    that it extends (`traits`). (That it is frozen, `dataclass` itself checks.)"""
    what = f"operation {cls.__name__}"
    traits = [c for c in contract.__subclasses__() if "FACETS" in vars(c)]
    extended = [contract, *(c for c in traits if issubclass(cls, c))]
    missing = [f for c in extended for f in c.FACETS if getattr(cls, f) is getattr(c, f)]
    if missing and not abstract:
        raise TypeError(f"{what} does not define {', '.join(missing)}; add these methods")
    for one in extended:
        _check_facets(what, cls, one)
        for name, allowed in one.FACTS.items():
            value = getattr(cls, name)
            if not isinstance(value, property) and value not in allowed:
                listed = ", ".join(map(repr, allowed))
                raise TypeError(f"{what}: {name} is {value!r}; choose from {listed}")
    for trait in traits:
        for name in (*trait.FACETS, *trait.OPTIONAL, *trait.FACTS):
            if trait not in extended and name in vars(cls):
                raise TypeError(
                    f"{what}: {name} is an attribute of {trait.__name__}; make the operation a subclass of "
                    f"{trait.__module__}.{trait.__name__}"
                )
    for name, annotation in inspect.get_annotations(cls).items():
        if "ClassVar" in str(annotation):
            known = [fact for one in (contract, *traits) for fact in one.FACTS]
            meant = get_close_matches(name, known, 1, 0.75)
            if meant and name not in known:
                raise TypeError(
                    f"{what}: operations have no class attribute {name!r}; did you mean {meant[0]!r}?"
                )
        elif _UNHASHABLE.match(getattr(annotation, "__name__", str(annotation))):
            raise TypeError(
                f"{what}: field {name!r} has type {annotation}, which is not hashable; use a tuple"
            )


def _check_facets(what: str, cls: Any, contract: Any) -> None:
    """TypeError if a facet cannot be called as the contract declares it."""
    for name in (*contract.FACETS, *contract.OPTIONAL):
        own, declared = getattr(cls, name), getattr(contract, name)
        if not callable(own):
            raise TypeError(f"{what}: {name} is {own!r}; define a method {name}{_takes(declared)}")
        bound = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
        if not _fits(own, declared, bound):
            raise TypeError(
                f"{what}: the method {name}{_takes(own)} must have the signature {name}{_takes(declared)}"
            )


def _counts(facet: Any) -> tuple[int, int, bool]:
    """How many arguments a facet needs and takes by position, and whether it takes any number."""
    found = list(inspect.signature(facet).parameters.values())
    by_position = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in by_position)
    return needed, len(by_position), any(p.kind is p.VAR_POSITIONAL for p in found)


def _fits(own: Any, declared: Any, bound: bool) -> bool:
    """Whether a facet can be called as it is declared; operands may have names of their own. A `bound` one (a
    static or a class method) has no `self`."""
    if own is declared:
        return True
    (needed, taken, many), (fixed, _, several) = _counts(own), _counts(declared)
    needed, taken = needed + bound, taken + bound
    if several:
        return many or taken > fixed
    return needed <= fixed and (many or taken >= fixed)


def _takes(facet: Any) -> str:
    return f"({', '.join(map(_bare, inspect.signature(facet).parameters.values()))})"


def _bare(parameter: inspect.Parameter) -> str:
    return str(parameter.replace(annotation=inspect.Parameter.empty))
