"""Context parallelism: the form of attention to split keys, for queries with the same split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Option, Space, argument, names
from layoutopt.space.kind import (
    GATHER,
    Affects,
    Beyond,
    Choice,
    Chosen,
    Decision,
    Feature,
    PlanField,
    Target,
    Typed,
    Words,
    about_each,
)
from layoutopt.space.objective import Objective
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.nodes import check_context, crossed
from mesh_tf_core.ops.context import FORMS
from mesh_tf_core.tracing.graph import Graph

WAYS = (GATHER, *FORMS)


def usual(objective: str) -> tuple[str, ...]:
    """The forms that are searched by default: all for the least time. Problems about memory take a third
    longer with them, and only gather."""
    return WAYS if objective == Objective.TIME else (GATHER,)


@dataclass(frozen=True)
class Context(Decision):
    """Attention to the keys along one dimension: () gathers them, else one of `FORMS`."""

    prefix = "context of "
    label = "context parallelism"
    asks: ClassVar[Mapping[str, Any]] = {
        "context": argument(
            None,
            Option(
                "--context",
                "FORMS",
                "Forms of context parallelism (attention to keys that are split) to consider: "
                "gather, ring, zigzag, all_to_all (comma-separated; default: all for --objective "
                "time, else gather).",
            ),
            parse=lambda value: None if value is None else names(value, "context"),
            text=lambda value: None if value is None else ",".join(value),
            unsaid=lambda: (GATHER,),
            usual=usual,
        ),
    }
    says = PlanField(
        "context",
        dict[str, str],
        dict,
        lambda forms: dict(sorted(forms)),
        lambda said: frozenset(said.items()),
    )
    by_hand = Option(
        "--context",
        "[DIM=]FORM",
        "Form of context parallelism (attention to keys that are split along DIM): gather, ring, "
        "zigzag or all_to_all (repeatable).",
        usual="gather",
        several=True,
    )
    word = "context"
    place = 4
    least = 0  # The others need splits; who asks has a layout.
    features = (Feature("context", "context", lambda form: form != GATHER),)

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        return {"context": WAYS if target.axes and crossed(target.model.graph) else ()}

    @classmethod
    def check(cls, allowed: Space) -> None:
        if allowed.context is not None and not allowed.context:
            raise UserError(f"context is empty; name one or more of {', '.join(WAYS)}")
        for form in allowed.context or ():
            if form not in WAYS:
                raise UserError(f"context {form!r}: {known_names(form, WAYS)}")

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        options = tuple(() if form == GATHER else (form,) for form in allowed.said("context"))
        for dim in crossed(graph):
            yield cls(dim, options)

    def apply(self, choice: Choice, to: Chosen) -> None:
        if choice:
            to.options["context"] = to.options.get("context", frozenset()) | {(self.subject, *choice)}

    def read(self, layout: Layout, options: Options) -> Choice:
        form = dict(options.context).get(self.subject)
        return (form,) if form else ()

    @classmethod
    def changing(cls, touched: Affects) -> list[str]:
        return [cls.prefix + dim for dim in touched.keys]

    @classmethod
    def typed(cls, texts: Sequence[str], about: Typed) -> dict[str, Any]:
        graph = about.model.graph
        forms: dict[str, str] = {}
        for dim, (text, form) in about_each("--context", texts).items():
            if not dim and not crossed(graph):
                raise UserError(f"--context {text}: the model has no fused attention; remove --context")
            forms.update(dict.fromkeys([dim] if dim else crossed(graph), form))
        forms = {dim: form for dim, form in forms.items() if form != GATHER or dim not in crossed(graph)}
        check_context(graph, forms)
        return {"context": frozenset(forms.items())}

    @classmethod
    def in_words(cls, said: Any) -> Words:
        words = [f"{form} of {dim}" for dim, form in said.context.items()]
        return ", ".join(words), "; ".join(words)

    @classmethod
    def beyond(cls, said: Any) -> Iterator[Beyond]:
        for dim, form in said.context.items():
            yield Beyond("context", form, f"attention to {dim!r} is {form}", "search with --context gather")
