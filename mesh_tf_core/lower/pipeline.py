"""The door of lowering: base lowering, then the passes in their order, then, for whole graphs, the check."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from mesh_tf_core import arguments
from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.blocks import MICROBATCH
from mesh_tf_core.ir.layout import AT, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower.base import lower_base
from mesh_tf_core.lower.collective_matmul import in_chunks
from mesh_tf_core.lower.combine import combine_small
from mesh_tf_core.lower.cut import Cut
from mesh_tf_core.lower.dead import drop_dead
from mesh_tf_core.lower.kept import written
from mesh_tf_core.lower.nodes import check_context, check_products
from mesh_tf_core.lower.offload import Offload
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.rematerialization import check_recompute
from mesh_tf_core.lower.storage import Stages, read_stage
from mesh_tf_core.lower.subgraph import Subgraph
from mesh_tf_core.lower.sums import delay_sums
from mesh_tf_core.lower.uses import compact
from mesh_tf_core.lower.verify import verify
from mesh_tf_core.ops.ticks import GPIPE, check_schedule
from mesh_tf_core.tracing.diloco import DiLoCo
from mesh_tf_core.tracing.graph import Graph

PASSES: tuple[tuple[str, Callable[[Program], Program]], ...] = (
    ("dead", drop_dead),
    ("pending sums", delay_sums),
    ("combine", combine_small),
    ("compact", compact),
)


@dataclass(frozen=True)
class Options:
    """What may be decided besides the layout.

    Attributes:
      storage: of variables that are not stored as the layout says (see `lower.storage`).
      recompute: the loops whose bodies run again in backward, by their dimension, and what they keep
        (`kept.Recomputed`): "layers", "layers:keep=products".
      microbatches: parts of the batch that a step runs one after the other, adding up their gradients.
      context: (dimension of keys, form): how attention to keys that are split is done, of those to which it
        does not gather them (`ops.context.FORMS`).
      diloco: an axis that synchronises rarely.
      offload: what lies in the hosts' memory, by kind and variable (`lower.offload`).
      schedule: when the stages of a pipeline go backward (`ops.ticks.SCHEDULES`).
      collective_matmul: dimensions: what products with one of them gather, split over its axes, and what is
        scattered of them, goes in chunks beside them (`lower.collective_matmul`).
    """

    storage: Stages = field(default_factory=dict)
    recompute: frozenset[str] = frozenset()
    microbatches: int = 1
    context: frozenset[tuple[str, str]] = frozenset()
    diloco: DiLoCo | None = None
    offload: Offload = frozenset()
    schedule: str = GPIPE
    collective_matmul: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        stages = arguments.instance(Mapping, "a dict of variables and how they are stored")
        parts = arguments.Kind(arguments.is_whole, "a whole number")
        arguments.check("Options", microbatches=(self.microbatches, parts), storage=(self.storage, stages))
        check_schedule(self.schedule)
        if len(dict(self.context)) < len(self.context):
            said = ", ".join(f"{name}={form}" for name, form in sorted(self.context))
            raise UserError(f"context: more than one form for the same keys: {said}; name one")
        if any(":" in text for text in self.recompute):
            object.__setattr__(self, "recompute", written(self.recompute))

    @property
    def key(self) -> Hashable:
        """Equal for equal options, and hashable."""
        stages = frozenset((name, read_stage(s)) for name, s in self.storage.items())
        return stages, self.offload, *self.told

    def renamed(self, axes: Mapping[str, str]) -> Options:
        """With other names for mesh axes."""
        storage = {name: read_stage(stage).renamed(axes).short for name, stage in self.storage.items()}
        return replace(self, storage=storage)

    @cached_property
    def told(self) -> tuple[Hashable, ...]:
        """All but storage and offload, of which lowering asks its oracle: hashable."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in ("storage", "offload"))


def paths(graph: Graph) -> Iterator[str]:
    """What rules of a layout may be about: the operations and variables of a graph."""
    yield from graph.variables
    yield from (node.path for node, _ in graph.walk())


def _check_parts(layout: Layout, options: Options) -> None:
    """LayoutError if a rule splits what counts the parts of the batch: stages go through them one by one."""
    rules = ((name, axes) for name, axes in layout.written.items() if name.partition(AT)[0] == MICROBATCH)
    if options.microbatches > 1 and (found := next(rules, None)):
        raise LayoutError(
            f"layout {layout}: {found[0]!r} counts parts of the batch that run one after the other, and "
            f"cannot be split over {'+'.join(found[1])}; split the batch"
        )


DEFAULT, WHOLE = Options(), Cut()


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
      oracle: of this mesh, layout and storage; notes what is asked of them.
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
        _check_parts(layout, options)
        check_recompute(graph, options.recompute)
    given, beside = (options.storage, options.recompute), options.collective_matmul
    how = *given, subgraph, oracle, forms, options.offload, beside
    program = lower_base(graph, mesh, layout, results, *how)
    if subgraph is not None:
        # What is dead or travels together is not known from a part of the graph.
        return cut.end(in_chunks(delay_sums(cut.begin(program), oracle), beside, oracle))
    for name, run in PASSES:
        program = run(program)
        if name == "pending sums":
            program = in_chunks(program, beside)
    return verify(program) if check else program
