"""The door of lowering: base lowering, then the passes in their order, then, for whole graphs, the check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from mesh_tf_core.ir.blocks import MICROBATCH
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower.base import lower_base
from mesh_tf_core.lower.collective_matmul import decompose
from mesh_tf_core.lower.combine import combine_small
from mesh_tf_core.lower.cut import Cut
from mesh_tf_core.lower.dead import drop_dead
from mesh_tf_core.lower.nodes import check_context, check_products
from mesh_tf_core.lower.options import DEFAULT, Options
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.placement import check_counted, placement
from mesh_tf_core.lower.rematerialization import check_recompute
from mesh_tf_core.lower.start_done import start_and_done
from mesh_tf_core.lower.subgraph import Subgraph
from mesh_tf_core.lower.sums import delay_sums
from mesh_tf_core.lower.uses import compact
from mesh_tf_core.lower.verify import verify
from mesh_tf_core.tracing.graph import Graph

PASSES: tuple[tuple[str, Callable[[Program], Program]], ...] = (
    ("dead", drop_dead),
    ("pending sums", delay_sums),
    ("combine", combine_small),
    ("start and done", start_and_done),
    ("compact", compact),
)


def paths(graph: Graph) -> Iterator[str]:
    """The paths that rules of a layout may name: the operations and variables of a graph."""
    yield from graph.variables
    yield from (node.path for node, _ in graph.walk())


WHOLE = Cut()


def lower(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    results: Mapping[str, Tensor] | None = None,
    options: Options = DEFAULT,
    subgraph: Subgraph | None = None,
    oracle: Oracle | None = None,
    check: bool = True,
    cut: Cut = WHOLE,
) -> Program:
    """Lowers a graph to the program that every device of the mesh runs.

    Args:
      results: name -> tensor to return from a step.
      subgraph: lower only some nodes (for pricing them alone); `results` are then ignored dead-code roots.
      oracle: of a table of this mesh, layout and options; notes what is read of it. None: of `placement`.
      cut: of `subgraph`.
      check: hold the program against the rules of `lower.verify`. A search lowers many programs and checks
        that of its answer. What is lowered with `subgraph` is never checked: it is no whole program.

    Raises:
      ProgramError: the program breaks a rule; a defect of ours.
      UserError: `recompute` names what is not the dimension of a loop, or what it does not make.
      LayoutError: the layout names an unknown axis or dimension, does not divide a size, or would split two
        dimensions of one operation over the same axis.
    """
    forms = dict(options.context)
    if subgraph is None:
        check_context(graph, forms)
        check_products(graph, options.collective_matmul)
        known = {name: max(sizes) for name, sizes in graph.dims().items()}
        layout.check(mesh, known, paths(graph))
        if options.microbatches > 1:
            check_counted(layout, MICROBATCH, (*layout.axes(MICROBATCH), *layout.further(MICROBATCH)))
        check_recompute(graph, options.recompute)
    oracle = oracle or Oracle(placement(graph, mesh, layout, options))
    program, beside = lower_base(graph, oracle, results, options, subgraph), options.collective_matmul
    if subgraph is not None:
        # What is dead or travels together is not known from a part of the graph.
        program = cut.end(decompose(delay_sums(cut.begin(program), oracle), beside, oracle))
        return start_and_done(program)
    for name, run in PASSES:
        program = run(program)
        if name == "pending sums":
            program = decompose(program, beside)
    return verify(program) if check else program
