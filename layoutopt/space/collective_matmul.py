"""Collective matmul: whether gathers for products with a dimension, and scatters of their results, overlap
the products in chunks (`mesh_tf_core.lower.collective_matmul`).

It is searched on request: it pays if an axis splits these products and, elsewhere, their inputs and results
(`--elsewhere length`), and if products take about as long as the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Option, Space, argument, names
from layoutopt.space.kind import (
    PLAIN,
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
    missing,
)
from layoutopt.space.parallelism import parallelism
from layoutopt.space.splits import split_options
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.nodes import check_products, product_dims
from mesh_tf_core.tracing.graph import Graph

ON = "chunks"


@dataclass(frozen=True)
class CollectiveMatmul(Decision):
    """Products with one dimension: () gather and scatter whole values, ("chunks",) overlap with the
    products."""

    prefix = "collective matmul of "
    label = "collective matmul"
    asks: ClassVar[Mapping[str, Any]] = {
        "collective_matmul": argument(
            (),
            Option(
                "--collective-matmul",
                "DIMS",
                "Dimensions whose matmuls may overlap their all-gathers and reduce-scatters in "
                "chunks, e.g. d_ff,heads (comma-separated; most useful with --elsewhere length).",
            ),
        ),
    }
    says = PlanField("collective_matmul", list[str], list, sorted, frozenset)
    by_hand = Option(
        "--collective-matmul",
        "DIMS",
        "Dimensions whose matmuls overlap their all-gathers and reduce-scatters in chunks, e.g. "
        "d_ff,heads (comma-separated).",
        usual="no overlap",
    )
    word = "collective matmul"
    place = 5
    least = 0  # What is gathered for others too lies there whole either way.
    features = (Feature("collective_matmul", "collective_matmul"),)

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        graph = target.model.step_graph
        sizes, own = graph.dims(), {n for names in product_dims(graph).values() for n in names}
        found = (n for n in sorted(own) if len([*split_options(target.mesh, sizes[n], set(), "mesh")]) > 1)
        return {"collective_matmul": tuple(found)}

    @classmethod
    def widest(cls, target: Target) -> dict[str, Any]:
        """Dimensions of weights."""
        known = parallelism(target.model).weights
        every = cls.everything(target)["collective_matmul"]
        return {"collective_matmul": tuple(n for n in every if n in known)}

    @classmethod
    def left_out(cls, target: Target, allowed: Space) -> Iterator[LeftOut]:
        usual = cls.widest(target)["collective_matmul"]
        others = tuple(n for n in cls.everything(target)["collective_matmul"] if n not in usual)
        yield from missing(cls.label, "collective_matmul", allowed.collective_matmul, usual)
        for left in missing(cls.label, "collective_matmul", allowed.collective_matmul, others):
            yield replace(left, what=f"{cls.label} of {', '.join(others)}", finer=True)

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        check_products(graph, allowed.collective_matmul)
        for dim in allowed.collective_matmul:
            yield cls(dim, ((), (ON,)))

    def apply(self, choice: Choice, to: Chosen) -> None:
        if choice:
            found = to.options.get("collective_matmul", frozenset())
            to.options["collective_matmul"] = found | {self.subject}

    def read(self, layout: Layout, options: Options) -> Choice:
        return (ON,) if self.subject in options.collective_matmul else ()

    @classmethod
    def changing(cls, touched: Affects) -> list[str]:
        return [cls.prefix + dim for dim in touched.products]

    @classmethod
    def typed(cls, texts: Sequence[str], about: Typed) -> dict[str, Any]:
        dims = names(",".join(texts), "collective_matmul")
        check_products(about.model.graph, dims)
        return {"collective_matmul": frozenset(dims)}

    @classmethod
    def in_words(cls, said: Any) -> Words:
        dims = ", ".join(said.collective_matmul)
        return (dims, f"{cls.label} of {dims}") if dims else PLAIN

    @classmethod
    def beyond(cls, said: Any) -> Iterator[Beyond]:
        for dim in said.collective_matmul:
            words = f"matmuls with {dim!r} overlap their collectives in chunks"
            yield Beyond("collective_matmul", dim, words, "search without --collective-matmul")
