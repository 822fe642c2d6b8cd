"""Values and their placement: the state for lowering a node, a loop or a single operation."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import Read
from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.dims import PaddedDim, Shape, SparseDim
from mesh_tf_core.ir.dtypes import TensorType
from mesh_tf_core.ir.layout import Axes, Layout, check_disjoint
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllGather, AllToAll, HostLoad, HostStore, Instr, Slice, Stored, Value
from mesh_tf_core.ir.tensor import Tensor, having
from mesh_tf_core.ir.values import Splits
from mesh_tf_core.lower.nodes import pass_of, repeated, weights
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.placement import Row
from mesh_tf_core.lower.subgraph import GraphPart
from mesh_tf_core.ops.basic import Cast
from mesh_tf_core.ops.pieces import CutPadding, PadPieces
from mesh_tf_core.tracing.graph import Graph


class Placing(Emitter):
    """The program of one lowering so far, and where tensors are.

    Attributes:
      layout: in force.
      within: axes over which the iterations around are spread (see `Block.spread`).
      chunked: the gathers of the current operation overlap it in chunks (`collective_matmul`), so a second
        run gathers again.
      env: tensor -> value.
      moved: (value, splits, pass) -> the value so split, on the device; (value, operation, "") -> the value
        padded or cut. Weights have an entry for each pass, so they are not kept between forward and backward
        (FSDP).
      converted: (value, cast) -> result of the cast.
      masters: a variable's tensor, or a part of it -> its master copy as stored, if `env` has the
        half-precision copy.
      given: tensors taken as given (see `GraphPart`), once something asked for them.
      stored: variable -> its storage between steps, once it was read or written.
      beside: see `Program`.
    """

    oracle: Oracle

    def __init__(self, graph: Graph, oracle: Oracle, part: GraphPart) -> None:
        super().__init__()
        self.graph, self.oracle, self.part = graph, oracle, part
        self.mesh, self.layout = oracle.mesh, oracle.layout
        self.within, self.chunked = Axes(), False
        self.env: dict[int, int] = {}
        self._here: dict[Shape, Splits] = {}
        self._inside: dict[tuple[Layout, Axes], Layout] = {}
        self._placements: dict[Layout, dict[Shape, Splits]] = {self.layout: self._here}
        self.moved: dict[tuple[int, Splits | Op, str], int] = {}
        self._weights = weights(graph)
        self.converted: dict[tuple[int, Op], int] = {}
        self.masters: dict[int, int] = {}
        self.given: set[int] = set()
        self.stored: dict[str, Stored] = {}
        self.beside: list[Instr] = []

    def lay_out(self, layout: Layout) -> None:
        """Sets the current layout: inside stages without rules for elsewhere over their axes."""
        if self.within:
            key = layout, self.within
            if key not in self._inside:
                self._inside[key] = layout.inside(self.within)
            layout = self._inside[key]
        if layout is not self.layout:
            self.layout, self._here = layout, self._placements.setdefault(layout, {})

    def natural(self, shape: Shape, what: str = "", layout: Layout | None = None) -> Splits:
        """The placement that the layout gives a shape; LayoutError if it is not legal.

        Args:
          layout: instead of the one in force (updates of a variable that is stored split have their own).
        """
        splits = self._natural(shape, what, layout)
        for d, axes in zip(shape.dims, splits, strict=True) if self.within else ():
            for axis in axes:
                if axis in self.within:  # it tells a pipeline's stages apart
                    raise LayoutError(
                        f"layout {self.layout}: axis {axis!r} already separates the pipeline stages, so it "
                        f"cannot also split {d.name!r} inside a stage; split {d.name!r} over another axis"
                    )
        return splits

    def _natural(self, shape: Shape, what: str = "", layout: Layout | None = None) -> Splits:
        """The same, also of what lies outside of a pipeline's stages."""
        known = self._here if layout is None else self._placements.setdefault(layout, {})
        splits = known.get(shape)
        if splits is None:
            splits = known[shape] = self._legal(shape, self.layout if layout is None else layout, what)
        return splits

    def _legal(self, shape: Shape, rules: Layout, what: str) -> Splits:
        rules = rules.around(shape.names)
        splits = rules.axes_of(shape.names)
        if not any(splits):
            return splits
        used = [a for axes in splits for a in axes]
        if len(set(used)) < len(used):
            rules.splits(shape, what or f"a tensor [{shape}]")
        for d, axes in zip(shape.dims, splits, strict=True):
            if axes and not self.oracle.divides(d, axes):
                ways = self.mesh.group_size(axes)
                raise LayoutError(
                    f"{what or f'a tensor [{shape}]'}: dimension {d.name!r} has size {d.size}, which is "
                    f"not divisible by the {ways} devices of {'+'.join(axes)}; use a multiple of {ways}, "
                    f"or do not split {d.name!r}"
                )
        return splits

    def bind(self, tensor: int, value: int) -> None:
        """Records the value of a tensor, and for the value its tensor: a recomputed tensor has two values."""
        self.env[tensor] = value
        if tensor >= 0 and self.values[value].tensor != tensor:
            self.values[value] = self.values[value].of(tensor)

    def value_of(self, tensor: int) -> int:
        """The value of a tensor, on the device."""
        return self.on_device(self.lying(tensor))

    def lying(self, tensor: int) -> int:
        """The current value of a tensor; one that is not computed here (see `GraphPart`) is given."""
        value = self.env.get(tensor)
        if value is None:
            value = self.env[tensor] = self._given(tensor)
        return value

    def on_device(self, id: int) -> int:
        """Brings a value on the host to the device: in each block once for forward, for backward, and for the
        update, so that it is not kept in between (see `moved`)."""
        v = self.values[id]
        if not v.host:
            return id
        updates = self.origin.phase == Phase.UPDATE
        key = id, v.splits, self._pass()
        if key not in self.moved:
            # What reads the variable brings it to all who read it before the update.
            brings = updates or self._weights.get(v.tensor) in (None, *self.stored)
            self.moved[key] = self.loaded(id) if brings else self._brought(v)
        return self.moved[key]

    def _pass(self) -> str:
        """For what a weight is moved once: forward, backward, or the update of one variable."""
        phase, scope = self.origin.phase, self.origin.scope
        return f"{phase} of {scope}" if phase == Phase.UPDATE else pass_of(phase)

    def _brought(self, v: Value) -> int:
        """A weight that others bring, gathered as its readers want it."""
        type = self.plain_type(v)
        return self.new(type, self.natural(type.shape), (), v.tensor)

    @staticmethod
    def plain_type(v: Value) -> TensorType:
        """The type of a value without padding."""
        long = v.shape.padded
        return TensorType(v.shape if long is None else v.shape.resized(long.plain), v.dtype)

    def _given(self, tensor: int) -> int:
        assert self.part.alone, f"tensor %{tensor} is used before it is computed"
        if (first := repeated(self.graph).get(tensor)) is not None:
            return self.lying(first)
        t, maker = self.graph.tensor(tensor), self.graph.producer.get(tensor)
        if maker is not None and maker.op.converts and maker.op.free and tensor in self._weights:
            return self.lying(maker.inputs[0])  # the same value of a variable under another name
        self.given.add(tensor)
        stored = maker.op.variable if maker is not None and isinstance(maker.op, Read) else None
        row = None if stored is None else self.oracle.stored(stored)
        other = stored is not None and self.origin.scope not in (stored.name, stored.slot_of)
        if row is not None and (row.host or (other and self.origin.phase == Phase.UPDATE)):
            return self.new(*self.held(row, t.type), (), tensor, host=row.host)
        layout = self.oracle.layout if self._around_stages(t) else self.layout
        if row is not None and row.layout is not None and layout.padded is not None:
            layout = row.layout  # An update pads its own copy of what is stored whole.
        type = TensorType(layout.held(t.shape), t.dtype)
        splits = self._natural(type.shape, layout=None if layout is self.layout else layout)
        if maker is not None and maker.op.converts and maker.inputs[0] in self.env:
            # A variable stays where it is stored, also when it is converted elsewhere.
            source = self.values[self.env[maker.inputs[0]]]
            type, splits = TensorType(source.shape, t.dtype), source.splits
        return self.new(type, splits, (), tensor)

    def _around_stages(self, t: Tensor) -> bool:
        """Whether something is made outside of stages and read inside."""
        around = self.graph.around(self.graph.blocks[t.block])
        return bool(self.within) and not any(block.spread for block in around)

    def loaded(self, id: int) -> int:
        """Brings a value on the host to the device."""
        v = self.values[id]
        out = self.new(TensorType(v.shape, v.dtype), v.splits, (), v.tensor)
        self.emit(HostLoad((id,), (out,), self.origin))
        return out

    def kept_on_host(self, id: int) -> int:
        """A value brought to the host."""
        v = self.values[id]
        out = self.new(TensorType(v.shape, v.dtype), v.splits, host=True)
        self.emit(HostStore((id,), (out,), self.origin))
        return out

    def placed(self, id: int, splits: Splits) -> int:
        """The value with other splits; moved once however many read it there (see `moved`)."""
        if self.values[id].splits == splits:
            return id
        way = self._pass() if self.values[id].tensor in self._weights else ""
        again = self.chunked and self.origin.phase == Phase.RECOMPUTE
        key = id, splits, way or (Phase.RECOMPUTE if again else "")
        if key not in self.moved:
            self.moved[key] = self._move(id, splits)
        return self.moved[key]

    def _move(self, id: int, splits: Splits) -> int:
        shape = self.values[id].shape
        for move in self.oracle.moves(self.values[id].splits, splits, shape.sizes, self.within):
            v = self.values[id]
            name, now = v.shape.names[move.dim], list(v.splits)
            if move.kind == "slice":
                now[move.dim] = (*now[move.dim], *move.axes)
                out = self.like(v, tuple(now), v.partial)
                self.emit(Slice((id,), (out,), self.origin, name, move.axes))
            elif move.kind == "gather":
                if isinstance(v.shape.dims[move.dim], SparseDim):
                    raise LayoutError(
                        f"[{v.shape}]: the rows that chose {name!r} cannot be gathered from other devices; "
                        f"split {name!r} over the same axes everywhere, and the tokens alike before and at "
                        "the experts"
                    )
                now[move.dim] = now[move.dim][: -len(move.axes)]
                out = self.like(v, tuple(now), v.partial)
                self.emit(AllGather((id,), (out,), self.origin, move.axes, name))
            else:
                source = v.shape.names[move.source]
                now[move.source] = now[move.source][: -len(move.axes)]
                now[move.dim] = (*now[move.dim], *move.axes)
                out = self.like(v, tuple(now), v.partial)
                self.emit(AllToAll((id,), (out,), self.origin, move.axes, name, source))
            id = out
        return id

    def parted(self, id: int, dim: str) -> Splits:
        """The splits of a value, with the first other dimension that divides split over all axes that split
        none."""
        v = self.values[id]
        free = self.oracle.spare((*v.partial, *self.within, *(a for axes in v.splits for a in axes)))
        for at, (d, axes) in enumerate(zip(v.shape.dims, v.splits, strict=True)):
            if free and d.name != dim and self.oracle.divides_evenly(d, (*axes, *free)):
                return (*v.splits[:at], (*axes, *free), *v.splits[at + 1 :])
        return v.splits

    def to_natural(self, id: int) -> int:
        """The value in its natural sharding."""
        if self.oracle.shards:
            id = self._sized(id, self.layout)
        v = self.values[id]
        if self._here.get(v.shape) == v.splits and not self.within:
            return id
        return self.placed(id, self.natural(v.shape))

    def reshard(self, id: int, row: Row) -> int:
        """Moves a value to the placement of its row: padded or cut, split, on the host."""
        if row.layout is not None:
            id = self._sized(id, row.layout)
            id = self.placed(id, self.natural(self.values[id].shape, layout=row.layout))
        return self.kept_on_host(id) if row.host else id

    def held(self, row: Row, type: TensorType, what: str = "") -> tuple[TensorType, Splits]:
        """The type, with padding, and the splits of a value with the placement of a row."""
        assert row.layout is not None
        shape = row.layout.held(type.shape)
        return TensorType(shape, type.dtype), self._natural(shape, what, row.layout)

    def _sized(self, id: int, layout: Layout) -> int:
        """The value padded as a layout holds it, or cut where that does not pad it."""
        shape = self.values[id].shape
        long = shape.padded
        if long is None and layout.padded is None:
            return id
        wanted = layout.held(shape if long is None else shape.resized(long.plain))
        if wanted == shape:
            return id
        if long is not None:
            id = self._resized(id, CutPadding(long), long)
        more = wanted.padded
        return id if more is None else self._resized(id, PadPieces(more), more)

    def _resized(self, id: int, op: CutPadding | PadPieces, dim: PaddedDim) -> int:
        """What an operation that pads or cuts makes, of whole runs on each device."""
        v = self.values[id]
        axes = v.split_of(dim.name)
        # What splits the runs comes first; what splits one further is gathered.
        own = next(axes[:n] for n in range(len(axes) + 1) if self.oracle.ways(axes[:n]) == dim.pieces)
        splits = tuple([own if n == dim.name else s for n, s in zip(v.shape.names, v.splits, strict=True)])
        id = self.placed(id, splits)
        if (id, op, "") not in self.moved:
            self.moved[id, op, ""] = self.applied(op, id)
        return self.moved[id, op, ""]

    def without(self, id: int, whole: Iterable[str]) -> int:
        """The value with the dimensions `whole` gathered."""
        v = self.values[id]
        return self.placed(
            id, tuple(() if n in whole else s for n, s in zip(v.shape.names, v.splits, strict=True))
        )

    @contextmanager
    def inside(self, axes: Axes) -> Iterator[None]:
        """Lowers the code inside it as iterations that are spread over further axes."""
        layout = self.layout
        with having(self, within=(*self.within, *axes)):
            self.lay_out(layout)
            yield
        self.lay_out(layout)

    @contextmanager
    def block(self) -> Iterator[list[Instr]]:
        """Code inside goes to the returned list, and moves or converts values again."""
        with super().block() as code, having(self, moved={}, converted={}):
            yield code

    def joined(self, id: int, axes: Axes, combine: str) -> int:
        """All-reduces a value."""
        v = self.values[id]
        if v.dtype == "bool":
            number = self.applied(Cast("int32"), id, splits=v.splits)
            return self.applied(Cast("bool"), self.joined(number, axes, combine))
        return self.reduced(id, axes, combine)

    def check_disjoint(self, op: Op, names: Iterable[str]) -> None:
        """LayoutError if two of an operation's dimensions are split over the same axis."""
        used = [a for axes in self.layout.axes_of(names) for a in axes]
        if len(set(used)) < len(used):
            check_disjoint({n: self.layout.axes(n) for n in names}, f"{op.name}{self._where()}")

    def _where(self) -> str:
        return f" in {self.origin.scope!r}" if self.origin.scope else ""
