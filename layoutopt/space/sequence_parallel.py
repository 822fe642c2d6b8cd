"""Sequence parallelism: a dimension is split further between layers, where mesh axes split nothing else
(`mesh_tf_core.ir.layout`).

They are searched on request: these decisions couple all readers of one value, so searches with them take
longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Option, Space, argument
from layoutopt.space.kind import (
    PLAIN,
    Beyond,
    Choice,
    Chosen,
    Decision,
    Feature,
    LeftOut,
    Target,
    Words,
    missing,
)
from layoutopt.space.parallelism import cut, looped, parallelism
from layoutopt.space.splits import split_options, why_not
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import AT, ELSEWHERE, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class Elsewhere(Decision):
    """The axes that split one dimension further; its subject is the rule, "length@elsewhere"."""

    label = "sequence parallelism"
    asks: ClassVar[Mapping[str, Any]] = {
        "elsewhere": argument(
            (),
            Option(
                "--elsewhere",
                "DIMS",
                "Dimensions that may also be split wherever an axis splits nothing else, e.g. length "
                "for sequence parallelism (comma-separated).",
            ),
        ),
    }
    word = ELSEWHERE
    place = 9
    least = 0  # What this holds depends on the layout.
    features = (Feature("sequence", "elsewhere", uses=lambda layout, _: bool(layout.elsewhere)),)

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        graph = target.model.graph
        options = {
            n: [*split_options(target.mesh, sizes, set(), "mesh")] for n, sizes in graph.dims().items()
        }
        loops = looped(graph)
        return {"elsewhere": tuple(n for n, axes in options.items() if len(axes) > 1 and n not in loops)}

    @classmethod
    def widest(cls, target: Target) -> dict[str, Any]:
        """Dimensions of sequences that are given; if none can be split (tokens [batch, length + 1]), those
        that are cut from them."""
        given = {name for t in target.model.graph.inputs.values() for name in t.shape.names}
        sequence, every = {*parallelism(target.model).sequence}, cls.everything(target)["elsewhere"]
        found = [name for name in every if name in given & sequence]
        return {"elsewhere": tuple(found or (n for n in every if n in cut(target.model.graph) & sequence))}

    @classmethod
    def left_out(cls, target: Target, allowed: Space) -> Iterator[LeftOut]:
        every, usual = cls.everything(target)["elsewhere"], cls.widest(target)["elsewhere"]
        yield from missing(cls.label, "elsewhere", allowed.elsewhere, usual)
        for other in missing("", "elsewhere", allowed.elsewhere, tuple(n for n in every if n not in usual)):
            yield LeftOut(cls.label, "splits of other dimensions with --elsewhere", other.allow, finer=True)

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        sizes = graph.dims()
        for name in allowed.elsewhere:
            if name not in sizes:
                raise UserError(
                    f"--elsewhere {name}: no operation has this dimension; {known_names(name, sizes)}"
                )
            if name in looped(graph):
                raise UserError(
                    f"--elsewhere {name}: {name!r} counts the layers of a loop and cannot be split "
                    f"elsewhere; remove {name!r} from --elsewhere"
                )
            rule = written(name)
            banned = (*allowed.forbid.get(name, ()), *allowed.forbid.get(rule, ()))
            options = [*split_options(mesh, sizes[name], {*banned, *allowed.apart}, allowed.orders)]
            if rule in allowed.pins:
                wanted = allowed.pins[rule]
                if set(wanted) not in map(set, options):
                    raise UserError(why_not(rule, wanted, mesh, sizes[name], False, banned))
                options = [wanted]
            yield cls(rule, tuple(options))

    @property
    def dim(self) -> str:
        """The dimension."""
        return self.subject.partition(AT)[0]

    def apply(self, choice: Choice, to: Chosen) -> None:
        if choice:
            to.splits[self.subject] = choice

    def read(self, layout: Layout, options: Options) -> Choice:
        return layout.written.get(self.subject, ())

    @classmethod
    def in_words(cls, said: Any) -> Words:
        words = ", ".join(_rules(said).values())
        return (words, f"{words} {ELSEWHERE}") if words else PLAIN

    @classmethod
    def beyond(cls, said: Any) -> Iterator[Beyond]:
        for dim, rule in _rules(said).items():
            what = f"dimensions are also split in operations where an axis splits no other dimension ({rule})"
            yield Beyond(ELSEWHERE, dim, what, f"search without --elsewhere {dim}")


def _rules(said: Any) -> dict[str, str]:
    """The rules of a plan for elsewhere, in words, by dimension."""
    rules = said.refined.get(ELSEWHERE, {})
    return {dim: f"{dim}:{'+'.join(axes) or 'none'}" for dim, axes in rules.items()}


def written(dim: str) -> str:
    """The rule for a dimension elsewhere: also the decision's name."""
    return f"{dim}{AT}{ELSEWHERE}"
