"""Values in the hosts' memory between their uses (see `mesh_tf_core.lower.options`).

Variables with the same dimensions form one class, with one decision about their optimizer state and one about
themselves. For saved values of loops, it is an option of their recomputation (`recompute`). It is searched on
request: it takes time on the host link, and helps if memory is short.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Option, Space, argument
from layoutopt.space.kind import (
    CLASS,
    MIXED,
    OFFLOADING,
    Affects,
    Beyond,
    Choice,
    Chosen,
    Decision,
    Feature,
    LeftOut,
    PlanField,
    Target,
    Typed,
    Words,
    grouped,
    not_allowed,
)
from layoutopt.space.undivided import few, first_of
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.options import (
    ACTIVATIONS,
    KINDS,
    OPTIMIZER,
    WEIGHTS,
    OffloadSet,
    check_offload,
    offload_of,
)
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class OffloadDecision(Decision):
    """The placement of values of one class of variables on the host: (), or their kind.

    Attributes:
      kind: of these values (`mesh_tf_core.lower.options.KINDS`); held: in words.
    """

    variables: tuple[str, ...] = ()
    granular = "offload"
    beside = True
    label = OFFLOADING
    kind: ClassVar[str]
    held: ClassVar[str]

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        graph = target.model.step_graph
        found = target.hosts and any(cls.having(alike, graph) for alike in grouped(graph).values())
        return {"offload": (cls.kind,) if found else ()}

    @classmethod
    def left_out(cls, target: Target, allowed: Space) -> Iterator[LeftOut]:
        for left in not_allowed(cls, target, allowed):
            yield replace(left, what=f"{cls.label} of {cls.held}", finer=bool(allowed.offload))
        if not target.hosts:  # a search refuses it there, and prices know of it
            yield LeftOut(
                cls.label, f"{cls.label} of {cls.held} on hardware without separate host memory", finer=True
            )
        elif any(len(alike) > 1 for alike in grouped(target.model.graph).values()):
            yield LeftOut(cls.label, f"{cls.label} of {cls.held}, variable by variable", finer=True)

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        if cls.kind not in allowed.offload:
            return
        found = 0
        granularity = allowed.restriction.granularity.get(cls.granular, CLASS)
        for name, variables in grouped(graph, granularity).items():
            if names := cls.having(variables, graph):
                found += 1
                yield cls(name, ((), (cls.kind,)), names)
        if not found:
            raise UserError(
                "--offload optimizer: this optimizer has no state; remove --offload optimizer, or use an "
                "optimizer with state, e.g. Adam"
            )

    @classmethod
    def having(cls, variables: Sequence[Variable], graph: Graph) -> tuple[str, ...]:
        """The variables of a class with values that may be in host memory."""
        return tuple(v.name for v in variables)

    def apply(self, choice: Choice, to: Chosen) -> None:
        pairs = {(kind, name) for kind in choice for name in self.variables}
        if pairs:
            to.options["offload"] = to.options.get("offload", frozenset()) | pairs

    def read(self, layout: Layout, options: Options) -> Choice:
        there = [(self.kind, name) in options.offload for name in self.variables]
        return (self.kind,) if all(there) else MIXED if any(there) else ()


def _written(hosted: OffloadSet) -> dict[str, list[str]]:
    kinds = dict.fromkeys(kind for kind, _ in sorted(hosted))
    return {kind: sorted(name for k, name in hosted if k == kind) for kind in kinds}


def _parsed(said: Mapping[str, Sequence[str]]) -> OffloadSet:
    return frozenset((kind, name) for kind, its in said.items() for name in its)


@dataclass(frozen=True)
class OptimizerOffload(OffloadDecision):
    """That of the optimizer's state. Options, plans and words are about all kinds together, here."""

    prefix = "offload of "
    asks: ClassVar[Mapping[str, Any]] = {
        "offload": argument(
            (),
            Option(
                "--offload",
                "KINDS",
                "Tensors that may be kept in host memory between uses: optimizer (its state), "
                "weights, activations that recomputed loops save; comma-separated.",
            ),
        ),
    }
    says = PlanField("offload", dict[str, list[str]], dict, _written, _parsed)
    by_hand = Option(
        "--offload",
        "KIND[=NAME]",
        "Tensors to keep in host memory between uses: optimizer (its state), weights, or activations "
        "that recomputed loops save (repeatable).",
        usual="nothing",
        several=True,
    )
    word = "offload"
    place = 3
    held = "the optimizer's state"
    kind = OPTIMIZER
    features = (Feature("offload", "offload"),)

    @classmethod
    def check(cls, allowed: Space) -> None:
        for kind in allowed.offload:
            if kind not in KINDS:
                raise UserError(f"offload {kind!r}: {known_names(kind, KINDS)}")
        if ACTIVATIONS in allowed.offload and not any(allowed.recompute):
            raise UserError(
                f"--offload {ACTIVATIONS} needs recomputed loops, whose saved activations it moves, "
                "but recomputation is not allowed; add --recompute auto or selective"
            )

    @classmethod
    def having(cls, variables: Sequence[Variable], graph: Graph) -> tuple[str, ...]:
        with_state = {v.slot_of for v in graph.variables.values()}
        return tuple(v.name for v in variables if v.name in with_state)

    @classmethod
    def changing(cls, touched: Affects) -> list[str]:
        return touched.named(cls, touched.updated)

    @classmethod
    def typed(cls, texts: Sequence[str], about: Typed) -> dict[str, Any]:
        again = about.recomputed
        hosted = offload_of(texts, about.model.graph.variables, again)
        if hosted:
            check_offload(hosted, about.model.step_graph.variables)
        return {"offload": hosted}

    @classmethod
    def in_words(cls, said: Any) -> Words:
        its = said.offload.items()
        whole = "; ".join(f"{kind} of {few(names)}" for kind, names in its)
        return whole, "; ".join(f"{kind} ×{len(names)} on hosts" for kind, names in its)

    @classmethod
    def beyond(cls, said: Any) -> Iterator[Beyond]:
        for kind, its in said.offload.items():
            lie = f"{kind} offload applies to {first_of(its)}"
            yield Beyond("offload", kind, lie, "search without --offload")


@dataclass(frozen=True)
class Weights(OffloadDecision):
    """That of the variables themselves."""

    prefix = "weights of "
    held = "weights"
    kind = WEIGHTS

    @classmethod
    def changing(cls, touched: Affects) -> list[str]:
        return touched.named(cls, (*touched.updated, *touched.read))
