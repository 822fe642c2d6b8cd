"""The reasons why choices were left out of a search: rules of the user's about splits, fields of the space
with fewer values than there are, and the memory. `infeasible` allows what they left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from costmodels.hardware import Hardware, machine_of
from layoutopt.plan.units import size_text
from layoutopt.space import allow
from layoutopt.space.decisions import ARGUMENTS, SearchSpace
from layoutopt.space.kind import Target
from layoutopt.space.mesh_shapes import meshes
from mesh_tf_core.model import Model

USUAL_SPACE = SearchSpace()
RULES = tuple(name for name in ARGUMENTS if isinstance(getattr(USUAL_SPACE, name), Mapping))
"""The fields of the space that are rules about splits."""
MEMORY, RESTRICTION = "memory", "restriction"
Asked = Mapping[str, Any]
"""Arguments of `layoutopt.search`."""


@dataclass(frozen=True)
class Condition:
    """Something that left choices out of a search.

    Attributes:
      field: the argument of `layoutopt.search`.
      values: all that there are for a field.
      said: in words, what the user said; "": nothing.
      rule: the dimension of a rule.
    """

    field: str
    values: Any
    said: str = ""
    rule: str = ""

    def lifted(self, asked: Asked) -> dict[str, Any]:
        """The arguments with all that this left out."""
        if not self.rule:
            return {**asked, self.field: self.values}
        return {**asked, self.field: {dim: a for dim, a in asked[self.field].items() if dim != self.rule}}


def lifted(asked: Asked, which: Iterable[Condition]) -> dict[str, Any]:
    """The arguments with all that some conditions left out."""
    found = dict(asked)
    for each in which:
        found = each.lifted(found)
    return found


def conditions(model: Model, asked: Asked, everything: bool = False) -> list[Condition]:
    """Those of the choices that `--allow everything` allows, or of all that there are."""
    found = []
    for name in RULES:
        for dim, axes in (asked.get(name) or {}).items():
            said = f"{ARGUMENTS[name].options[0].name} {dim}:{'+'.join(axes) or 'none'}"
            found.append(Condition(name, None, said, dim))
    space, machine = space_of(asked), machine_in(asked)
    shapes = meshes(asked.get("mesh"), asked.get("devices"), asked.get("max_axes", 2), machine, space.named)
    targets = [Target.on(machine, model, mesh) for mesh in shapes]
    for name, every in allow.found(targets, everything).items():
        known = space.said(name) or ()
        every = getattr(space.restriction.narrowed(space.but(**{name: every})), name)
        if isinstance(every, tuple) and not {*every} <= {*known}:
            own = {*(getattr(USUAL_SPACE, name) or ())} - {*known}
            said = option_text(name, known) if own else ""
            found.append(Condition(name, tuple(dict.fromkeys((*known, *every))), said))
    return found


def of_memory(asked: Asked) -> Condition:
    """The condition that it fits."""
    limit, machine = asked.get(MEMORY), machine_in(asked)
    own = f"the memory of a {machine.name} device ({size_text(machine.usable_memory_bytes)})"
    return Condition(MEMORY, float("1e30"), own if limit is None else f"--memory {size_text(limit)}")


def option_text(name: str, value: Any) -> str:
    """A field of the space as options."""
    return " ".join(f"{option} {text}" for option, text in ARGUMENTS[name].texts(value).items() if text)


def space_of(asked: Asked) -> SearchSpace:
    """The space of a question."""
    return SearchSpace(**{name: asked[name] for name in (*ARGUMENTS, RESTRICTION) if name in asked})


def machine_in(asked: Asked) -> Hardware:
    """The hardware of a question."""
    return machine_of(asked.get("hardware", "cpu-local"))


def limit_in(asked: Asked) -> float:
    """Bytes that a device may hold."""
    limit = asked.get(MEMORY)
    return machine_in(asked).usable_memory_bytes if limit is None else float(limit)
