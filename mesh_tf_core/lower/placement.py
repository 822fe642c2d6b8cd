"""The placement of values: one table, made before lowering from a mesh, a layout and options.

A row states, for a class of tensors in a phase, how they are split (and padded), whether they are on the
devices or in the memory of their hosts, their dtype, and how later readers get them again:

    class       phase           splits                        host        dtype   again
    variable    between steps   stage 3, or 1 of a master:    weights     stored  -
                                further; else as read
    variable    forward         layout at its path            -           half    gather at stage 3; load from
                                                                          of a    the host; else keep
                                                                          master
    variable    update          as its state                  -           stored  -
    state       between steps   from stage 1 on further       optimizer   stored  -
    gradient    backward        from stage 2 on as the state  -           made    -
    gradient    update          from stage 1 on as the state  -           made    -
    saved       backward        as made                       activations made    compute what is not kept;
                                                                                  load from the host; keep
    operation   any             layout at its path, with rules for elsewhere around it

Stages are those of `storage`, host memory that of `offload`; `remat_policy` decides what is recomputed.
Lowering moves values to the placement of their rows (`Placing.reshard`). A search reuses a program under
other options if all rows that lowering read are the same (`oracle`), and bounds the memory of a plan by the
same stages (`storage.SPLIT`). `explain`, shardings for JAX and notes on storage read the rows of a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from mesh_tf_core.errors import LayoutError, UserError, known_names
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.options import ACTIVATIONS, DEFAULT, OPTIMIZER, Options, place_of
from mesh_tf_core.lower.storage import (
    BACKWARD,
    BETWEEN,
    FORWARD,
    GRADIENT,
    SAVED,
    STATE,
    UPDATE,
    VARIABLE,
    StageByVariable,
    narrow_reads,
    paddable,
    read_stage,
    shard_layout,
    splits,
    splits_some,
)
from mesh_tf_core.tracing.graph import Graph

KEEP, GATHER, COMPUTE, LOAD = "keep", "gather", "compute", "load"
"""How a value is had that is read once more."""
PHASES = {
    VARIABLE: (BETWEEN, FORWARD, UPDATE),
    STATE: (BETWEEN,),
    GRADIENT: (BACKWARD, UPDATE),
    SAVED: (BACKWARD,),
}
"""The rows of each class."""


class Row(NamedTuple):
    """The placement of a class of tensors in a phase.

    Attributes:
      layout: splits and padding; None: as computed.
      host: they lie in the memory of the devices' hosts.
      dtype: None: their own.
      again: how they are had when they are read once more.
      keep: the kept values among recomputed ones (`remat_policy.Recomputed`).
    """

    layout: Layout | None
    host: bool = False
    dtype: str | None = None
    again: str = KEEP
    keep: tuple[str, ...] = ()


class Placement:
    """The table of one lowering.

    Args:
      variables: of the graph, by name.
      options: storage of variables (stage 0 by default), values in the hosts' memory, recomputed loops.
      narrow: see `storage.narrow_reads`.
      paddable: see `storage.paddable`.

    Attributes:
      stages: those that split something of the variable (`storage.splits_some`).
    """

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        variables: Mapping[str, Variable],
        options: Options = DEFAULT,
        narrow: Mapping[str, str] | None = None,
        paddable: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        self.mesh, self.layout, self.variables = mesh, layout, variables
        self.offload, self.recompute = options.offload, options.recompute
        self.narrow, self.paddable = narrow or {}, paddable or {}
        for name in options.storage:
            if name not in variables:
                raise UserError(
                    f"storage: the model has no variable {name!r}; {known_names(name, variables)}"
                )
        self.stages = {
            n: s for n, said in options.storage.items() if splits_some(s := read_stage(said), variables[n])
        }
        for name, stage in self.stages.items():
            for axis in stage.over or ():
                if axis not in mesh.names:
                    raise UserError(
                        f"storage {stage} of {name!r}: mesh {mesh} has no axis {axis!r}; "
                        f"{known_names(axis, mesh.names)}"
                    )
        self._rows: dict[tuple[str, str, str], Row] = {}
        self._views: dict[str, Layout] = {}

    def row(self, what: str, name: str, phase: str) -> Row:
        """The row of a class of tensors in a phase.

        Args:
          what: the class, one of those of `PHASES`.
          name: of the variable, or of the dimension of the loops.
        """
        key = what, name, phase
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._made(what, name, phase)
        return row

    def rows(self, loops: Collection[str] = ()) -> Iterator[tuple[str, str, str, Row]]:
        """The whole table: class, name, phase, row.

        Args:
          loops: dimensions of loops that save something for their backward.
        """
        trained = [n for n, v in self.variables.items() if v.trainable]
        others = [n for n, v in self.variables.items() if v.own_storage and not v.trainable]
        remembered = {v.slot_of for v in self.variables.values()}
        names = {VARIABLE: [*trained, *others], STATE: [n for n in trained if n in remembered], SAVED: loops}
        for what, phases in PHASES.items():
            for name in names.get(what, trained):
                for phase in phases:
                    if phase != UPDATE or self.variables[name].trainable:
                        yield what, name, phase, self.row(what, name, phase)

    def stored(self, storage: StageByVariable) -> Placement:
        """The table under other stages of storage."""
        options = Options(storage, self.recompute, offload=self.offload)
        return Placement(self.mesh, self.layout, self.variables, options, self.narrow, self.paddable)

    def _made(self, what: str, name: str, phase: str) -> Row:
        if what == SAVED:
            return self._saved(name)
        number, master = self.stage(name), self.narrow.get(name)
        if splits(number, what, phase, master is not None):
            layout: Layout | None = self.view(name)
        else:
            layout = None if what == GRADIENT else self.read_in(name)
        if (what, phase) != (VARIABLE, FORWARD):
            return Row(layout, phase == BETWEEN and self._on_host(what, name))
        gathers = splits(number, VARIABLE, BETWEEN)
        again = LOAD if self._on_host(what, name) else GATHER if gathers else KEEP
        return Row(layout, dtype=master if number and not gathers else None, again=again)

    def _on_host(self, what: str, name: str) -> bool:
        if what == STATE:
            return (OPTIMIZER, name) in self.offload
        return place_of(self.variables[name]) in self.offload

    def _saved(self, dim: str) -> Row:
        host, keep = (ACTIVATIONS, dim) in self.offload, {r.dim: r.keep for r in self.recompute}.get(dim)
        if keep is None:
            return Row(None, host, again=LOAD if host else KEEP)
        return Row(None, host, again=COMPUTE, keep=keep)

    # -- how far variables are split -------------------------------------------------------------------------

    def further(self, variable: str) -> tuple[Axes, Axes]:
        """The axes over which the stage of a variable splits it further, and the remaining ones, which divide
        none of its dimensions: over these every device keeps all of it. Both are empty at stage 0."""
        stage, v = self.stages.get(variable), self.variables[variable]
        if stage is None:
            return (), ()
        before, after = (
            {axis for name in v.shape.names for axis in layout.axes(name)}
            for layout in (self.read_in(variable), self.view(variable))
        )
        spare = [axis for axis, size in self.mesh.axes if size > 1 and axis not in before]
        own = [axis for axis in spare if stage.over is None or axis in stage.over]
        return tuple(a for a in own if a in after), tuple(a for a in own if a not in after)

    def stage(self, variable: str) -> int:
        """The stage of a variable; 0 if no axis is left over which it could be split further."""
        stage = self.stages.get(variable)
        return stage.number if stage and self.view(variable) != self.read_in(variable) else 0

    def read_in(self, variable: str) -> Layout:
        """The layout in which operations find a variable."""
        return self.layout.at(variable).around(self.variables[variable].shape.names)

    def view(self, variable: str) -> Layout:
        """The layout in which the state of a variable is kept and updated."""
        if variable not in self.stages:
            return self.read_in(variable)
        if variable not in self._views:
            v, before, over = self.variables[variable], self.read_in(variable), self.stages[variable].over
            may = self.paddable.get(variable, frozenset())
            self._views[variable] = shard_layout(v.shape, v.stacked, before, self.mesh, over, may)
        return self._views[variable]


def check_counted(layout: Layout, dim: str, axes: Axes) -> None:
    """LayoutError if axes split a dimension that counts sequential iterations: such a dimension has no
    placement."""
    if axes:
        raise LayoutError(
            f"layout {layout}: {dim!r} cannot be split over {'+'.join(axes)}, because its iterations (of a "
            f"loop, or of microbatches) run one after another; remove the rule {dim}:{'+'.join(axes)}"
        )


def placement(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    options: Options = DEFAULT,
    narrow: Mapping[str, str] | None = None,
    padded: Mapping[str, frozenset[str]] | None = None,
) -> Placement:
    """The table of a graph.

    Args:
      narrow, padded: as `Placement` takes them, where they follow from another graph than this one.
    """
    narrow = narrow_reads(graph) if narrow is None else narrow
    padded = paddable(graph) if padded is None else padded
    return Placement(mesh, layout, graph.variables, options, narrow, padded)
