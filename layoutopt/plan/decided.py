"""The decisions besides a layout in the form of files: the fields of each kind of decision, and its words.

Plans, their alternatives and the results of commands have these fields; terminal and reports show these
words. `layoutopt.space` has the record of each kind.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from layoutopt.plan.fields import Data, Names, with_fields
from layoutopt.plan.units import some
from layoutopt.space.decisions import KINDS

ELSEWHERE = "elsewhere"
"""The path of rules for elsewhere (`mesh_tf_core.ir.layout`)."""
NAMED = 2
"""Places that a short text names."""
SAID = [kind.says for kind in KINDS if kind.says is not None]
"""The fields of all kinds."""
WHERE_SOME = ("refined", *(kind.says.name for kind in KINDS if kind.says is not None and not kind.always))
"""Fields that most plans lack; they are written only if they are not empty."""
IN_WORDS = sorted((kind for kind in KINDS if kind.word), key=lambda kind: kind.place)
"""The kinds that plans describe, in the order of their words."""


class Refined(Data):
    """The rest of a layout. Fields that most plans lack are written only if they are not empty.

    Attributes:
      refined: operation, variable or scope to the dimensions that are placed otherwise there, as if they had
        other names, each with its axes; `elsewhere` to those that are split further where
        the axes split nothing else (sequence parallelism).
    """

    refined: dict[str, dict[str, Names]] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _what_is_said(self, made: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = made(self)
        for name in WHERE_SOME:
            if not found.get(name):
                found.pop(name, None)
        return found


@with_fields({said.name: (said.type, said.plain) for said in SAID})
class Decided(Refined):
    """Each kind of decision, by the fields of its record; defaults for missing fields."""

    if TYPE_CHECKING:

        def __init__(self, **said: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def listed(self) -> dict[str, str]:
        """Name of a kind -> its whole decision in words, '' if plain."""
        found = {kind.word: kind.in_words(self)[0] for kind in IN_WORDS}
        places = "; ".join(f"{rules_in(rules)} in {path}" for path, rules in self.places().items())
        return {**found, "refined": places}

    def in_short(self) -> str:
        """All that is not plain, in a few words: 'zero3 ×4; recompute layers; 2 microbatches'."""
        found = [short for kind in IN_WORDS if (short := kind.in_words(self)[1])]
        found += [f"refined in {some([*places], NAMED)}"] if (places := self.places()) else []
        return "; ".join(found)

    def as_options(self) -> str:
        """All that is not plain as options of commands that take one layout: '--storage w=zero3 --recompute
        layers --microbatches 2'."""
        pairs = [(name, part) for name, parts in self.options().items() for part in parts]
        return " ".join(f"{name} {shlex.quote(part)}" for name, part in pairs)

    def options(self) -> dict[str, list[str]]:
        """The same as texts of each option."""
        found: dict[str, list[str]] = {}
        for said, option in ((kind.says, kind.by_hand) for kind in KINDS):
            if said is not None and option is not None:
                value = getattr(self, said.name)
                if value != (said.plain() if callable(said.plain) else said.plain):
                    values = _texts(value)
                    found[option.name] = values if option.several else [",".join(values)]
        return found

    def places(self) -> dict[str, dict[str, Names]]:
        """The decisions refined at single places."""
        return {path: rules for path, rules in self.refined.items() if path != ELSEWHERE}


def _texts(value: Any) -> list[str]:
    """The values of a field as an option has them: 'zero3', or 'w=zero3'."""
    if isinstance(value, Mapping):
        return [f"{name}={text}" for name, texts in value.items() for text in _texts(texts)]
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


def rules_in(rules: Mapping[str, Sequence[str]]) -> str:
    """The placements of some dimensions in one place: 'batch:data+model, heads:none'."""
    return ", ".join(f"{dim}:{'+'.join(axes) or 'none'}" for dim, axes in rules.items())
