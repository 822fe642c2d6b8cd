"""The door of lowering: base lowering, then the passes in their order, then, for whole graphs, the check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import MICROBATCH
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower.base import lower_base
from mesh_tf_core.lower.collective_matmul import decompose
from mesh_tf_core.lower.messages import combine_small, start_and_done
from mesh_tf_core.lower.nodes import check_context, check_products
from mesh_tf_core.lower.options import ACTIVATIONS, DEFAULT, OffloadSet, Options
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.placement import Placement, check_counted, placement
from mesh_tf_core.lower.recomputed import recomputed
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.rematerialization import check_recompute, recomputable
from mesh_tf_core.lower.subgraph import NO_CUT, Cut, Subgraph
from mesh_tf_core.lower.sums import delay_sums
from mesh_tf_core.lower.uses import compact, drop_dead
from mesh_tf_core.lower.verify import verify
from mesh_tf_core.tracing.graph import Graph

Pass = Callable[[Program], Program]


def passes(options: Options = DEFAULT, again: Set[int] = frozenset()) -> Mapping[str, Pass]:
    """The passes by name, in their order; `again` as in `drop_dead`."""
    return {
        "dead": partial(drop_dead, again=again),
        "pending sums": delay_sums,
        "collective matmul": partial(decompose, dims=options.collective_matmul),
        "combine": combine_small,
        "start and done": start_and_done,
    }


def paths(graph: Graph) -> Iterator[str]:
    """The paths that rules of a layout may name: the operations and variables of a graph."""
    yield from graph.variables
    yield from (node.path for node, _ in graph.walk())


def lower(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    results: Mapping[str, Tensor] | None = None,
    options: Options = DEFAULT,
    where: Placement | None = None,
    check: bool = True,
) -> Program:
    """Lowers a graph to the program that every device of the mesh runs.

    Args:
      results: name -> tensor to return from a step.
      where: the table of placements; None: that of the graph, mesh, layout and options.
      check: number the values anew (`compact`), and check the program against the rules of `lower.verify`. A
        search lowers many programs for their price alone, and does this only to that of its answer.

    Raises:
      ProgramError: the program breaks a rule; this is a defect of the library.
      UserError: `recompute` names a dimension that no loop has, or a value that the loop does not compute.
      LayoutError: the layout names an unknown axis or dimension, does not divide a size, or splits two
        dimensions of one operation over the same axis.

    Example:
      >>> import mesh_tf_core as mtf
      >>> graph, batch = mtf.Graph("mean"), mtf.Dim("batch", 8)
      >>> x = graph.input("x", [batch], "float32")
      >>> mesh, layout = mtf.Mesh("data:2"), mtf.Layout("batch:data")
      >>> program = mtf.lower(graph, mesh, layout, {"mean": mtf.reduce_mean(x)})
      >>> program.communication_bytes()
      {'data': 4.0}
    """
    check_context(graph, dict(options.context))
    check_products(graph, options.collective_matmul)
    known = {name: max(sizes) for name, sizes in graph.dims().items()}
    layout.check(mesh, known, paths(graph))
    if options.microbatches > 1:
        check_counted(layout, MICROBATCH, (*layout.axes(MICROBATCH), *layout.further(MICROBATCH)))
    check_recompute(graph, options.recompute)
    program = lower_base(graph, Oracle(where or placement(graph, mesh, layout, options)), results, options)
    again = recomputed(graph, options.recompute).not_dead()
    for run in passes(options, again).values():
        program = run(program)
    return verify(compact(program)) if check else program


def check_saved(recompute: Policies, offload: OffloadSet, whole: Graph, staged: Graph, where: str) -> None:
    """UserError for rows of saved values (`placement.SAVED`) without such values in the step: only values
    that a loop saves for its backward are recomputed, or stored on the hosts.

    Args:
      recompute: the loops that run again.
      whole, staged: the step without stages, and with them, in a schedule: `where`.
    """
    known, here = recomputable(whole), {*recomputable(staged)}
    said = {f"recompute {str(each)!r}": each.dim for each in sorted(recompute)}
    hosted = {f"offload {kind}={dim}": dim for kind, dim in sorted(offload) if kind == ACTIVATIONS}
    for what, dim in (said | hosted).items():
        if dim in known and dim not in here:
            raise UserError(
                f"{what}: in {where}, values that loops over {dim!r} save for the backward pass stay on "
                f"the devices; remove {what}"
            )
        if what in hosted and dim not in here:
            raise UserError(
                f"{what}: no loop over {dim!r} saves values for a backward pass; {known_names(dim, known)}"
            )


def begin_part(
    graph: Graph, part: Subgraph, oracle: Oracle, options: Options = DEFAULT, cut: Cut = NO_CUT
) -> Program:
    """A part of a graph up to the pass `pending sums`: for all choices of `collective_matmul`, unless the
    part runs again.

    Args:
      oracle: of the table of placements; records the rows that are read.
      cut: sums that wait on the part's border.

    Raises:
      LayoutError: as `lower`, or a sum does not wait there.
    """
    program = lower_base(graph, oracle, part.returned(graph), options, part.part(graph, options.recompute))
    # What is dead or travels together is not known from a part of the graph.
    return delay_sums(cut.begin(program), oracle)
