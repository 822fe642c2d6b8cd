"""The door of lowering: base lowering, then the passes in their order, then, for whole graphs, the check. And
the programs of an axis that synchronises rarely (`tracing.replicas`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial

from mesh_tf_core.errors import LayoutError, UserError, known_names
from mesh_tf_core.exclusions import REPLICAS, SCHEDULE, STAGES, refuse
from mesh_tf_core.ir.blocks import MICROBATCH, REPLICA
from mesh_tf_core.ir.layout import AT, Layout, within
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import AllGather, AllReduce, Collective, Program
from mesh_tf_core.ir.schedules import GPIPE
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
from mesh_tf_core.lower.storage import Stage, paddable_with, read_stage
from mesh_tf_core.lower.subgraph import NO_CUT, Cut, Subgraph
from mesh_tf_core.lower.sums import delay_sums
from mesh_tf_core.lower.uses import compact, drop_dead
from mesh_tf_core.lower.verify import ProgramError, verify
from mesh_tf_core.ops.few_bits import DTYPE, WHOLE
from mesh_tf_core.tracing.diloco import DiLoCo
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.replicas import FragmentOuterStep, InnerStep, outer_steps

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


@dataclass(frozen=True)
class ReplicaPrograms:
    """The inner program, and programs of outer steps.

    Attributes:
      inner: the training step of every replica. Its variables include those that only the outer programs
        read, because they always stay in memory.
      outer: the outer step of each fragment (`DiLoCo.meets`), on variables of the inner program.
      merges: with a delay, the end of each outer step, which sends nothing over the axis.
      where: where the values of the inner step live.
    """

    inner: Program
    outer: tuple[Program, ...]
    merges: tuple[Program, ...]
    diloco: DiLoCo
    where: Placement = field(repr=False, compare=False)

    @property
    def meetings(self) -> tuple[Program, ...]:
        """All that runs once in a period."""
        return (*self.outer, *self.merges)

    @property
    def count(self) -> int:
        """The number of replicas."""
        return self.inner.mesh.group_size(self.inner.layout.axes(REPLICA))


def check_axis(diloco: DiLoCo, mesh: Mesh) -> int:
    """The number of replicas along its axis; UserError if the mesh has none, or one of a single device."""
    axis = diloco.axis
    if axis not in mesh.names:
        raise UserError(f"diloco: mesh {mesh} has no axis {axis!r}; {known_names(axis, mesh.names)}")
    count = mesh.size(axis)
    if count < 2:
        raise UserError(
            f"diloco: axis {axis!r} of mesh {mesh} has size 1, but DiLoCo needs at least two replicas; name "
            "a larger axis, or remove diloco"
        )
    return count


def check_whole(diloco: DiLoCo | None, stages: Iterable[str], schedule: str = GPIPE) -> None:
    """LayoutError if the layers of replicas are to be stages of a pipeline, or to have a schedule of them."""
    split = " and ".join(stages)
    asked = {
        REPLICAS: f"diloco {diloco}",
        STAGES: split and f"pipeline stages of {split}",
        SCHEDULE: "" if schedule == GPIPE else f"schedule {schedule}",
    }
    refuse(asked, error=LayoutError)


def replica_graphs(
    graph: Graph, results: Mapping[str, Tensor], count: int, diloco: DiLoCo
) -> tuple[Graph, dict[str, Tensor], tuple[FragmentOuterStep, ...]]:
    """The inner step with its results, and the outer ones, made once from a whole step."""
    inner, found = graph.remembered(("replicas", count), lambda: InnerStep(graph, count).run(results))
    outer = graph.remembered(("meeting", count, diloco), lambda: outer_steps(graph, inner, diloco))
    return inner, found, outer


def lower_replicas(
    graph: Graph,
    results: Mapping[str, Tensor],
    mesh: Mesh,
    layout: Layout,
    options: Options,
    check: bool = True,
) -> ReplicaPrograms:
    """Lowers a training step for an axis that synchronises rarely.

    Args:
      graph: of a whole step, with its updates.
      results: name -> tensor that a step returns; here, [replica, its dims].
      options: with `diloco`.

    Raises:
      UserError: the mesh has no such axis, or one of a single device.
      LayoutError: the layout splits something over it, or is not legal.
    """
    diloco = options.diloco
    assert diloco is not None
    count = check_axis(diloco, mesh)
    if diloco.axis in layout.used:
        raise LayoutError(
            f"layout {layout}: axis {diloco.axis!r} separates the replicas of DiLoCo, so it cannot split "
            "a dimension; split over another axis"
        )
    inner, found, outer = replica_graphs(graph, results, count, diloco)
    split = layout.with_rules({REPLICA: (diloco.axis,)})
    padded = paddable_with(inner, (each for step in outer for each in step.graphs))
    where = placement(inner, mesh, split, options, padded=padded)
    alone = lower(inner, mesh, split, found, options, where, check)
    check_alone(alone, diloco.axis)
    met = tuple(_met(each.exchange, where, options, check) for each in outer)
    merges = tuple(_met(each.merge, where, options, check) for each in outer if each.merge is not None)
    for each in met:
        check_meeting(each, diloco)
    for each in merges:
        check_alone(each, diloco.axis)
    kept = {**alone.variables, **{n: v for each in (*met, *merges) for n, v in each.variables.items()}}
    return ReplicaPrograms(replace(alone, variables=kept), met, merges, diloco, where)


def _met(graph: Graph, inner: Placement, options: Options, check: bool) -> Program:
    """The program of an outer step.

    Args:
      inner: where the variables live that it shares with the inner step.
    """
    storage = {name: stage for name, stage in options.storage.items() if name in graph.variables}
    mesh, layout = inner.mesh, rules_about(inner.layout, graph)
    options = Options(storage, offload=options.offload)
    where = placement(graph, mesh, layout, options, inner.narrow, inner.paddable)
    return lower(graph, mesh, layout, {}, options, where, check)


def check_alone(program: Program, axis: str) -> None:
    """ProgramError if something crosses an axis."""
    for instr in program.every(Collective):
        if axis in instr.axes:
            raise ProgramError(
                f"{instr.text()} {instr.origin.scope}: replicas along {axis!r} must not communicate "
                "within a step"
            )


def check_meeting(program: Program, diloco: DiLoCo) -> None:
    """ProgramError if something else crosses the axis than a sum of the variables, or, of few bits, codes and
    their scales."""
    for instr in program.every(Collective):
        if diloco.axis not in instr.axes:
            continue
        dtypes = {program.values[i].dtype for i in instr.inputs}
        summed = isinstance(instr, AllReduce) and instr.combine == "sum"
        coded = isinstance(instr, AllGather) and dtypes <= {DTYPE, "float32"}
        if not (summed if diloco.bits == WHOLE else coded):
            what = "sums" if diloco.bits == WHOLE else f"{diloco.bits}-bit codes and their scales"
            raise ProgramError(
                f"{instr.text()} {instr.origin.scope}: in a synchronisation, only {what} may be sent "
                f"over axis {diloco.axis!r}"
            )


def alone(options: Options, mesh: Mesh) -> Options:
    """Options of a program on the whole mesh in which every replica does the same, with variables placed as
    those of replicas; unchanged without replicas."""
    if options.diloco is None:
        return options
    own = tuple(axis for axis in mesh.names if axis != options.diloco.axis)
    stages = {name: read_stage(said) for name, said in options.storage.items()}
    storage = {name: s if s.over else Stage(s.number, own) for name, s in stages.items()}
    return replace(options, storage=storage, diloco=None)


def rules_about(layout: Layout, graph: Graph) -> Layout:
    """The rules that a graph has dimensions and paths for."""
    dims, known = graph.dims(), [*paths(graph)]
    plain = {name: axes for name, axes in layout.written.items() if name.partition(AT)[0] in dims}
    parts = {
        path: {name: axes for name, axes in rules if name in dims}
        for path, rules in layout.refined
        if any(within(each, path) for each in known)
    }
    return Layout(plain, parts)
