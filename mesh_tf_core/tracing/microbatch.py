"""Gradient accumulation: the forward and backward of a step as a loop over parts of the batch.

The transformed graph holds the same operations with a smaller batch dimension inside a loop over
`microbatch`. Sums over the batch (a loss, gradients) are added up over its iterations, gradients in the dtype
of their variables; results of such sums are computed from the whole sums, after the loop. Backward may read
some of them, as the number of tokens that a masked mean divides by: an earlier loop over the parts computes
these, and nothing else. `batch_linearity` decides the class of each tensor. Random numbers are those that the
part's rows have in the whole batch (`Op.of_part`). Variables are assigned after the loops, from whole
sums.

A model that mixes examples in another way (statistics of a batch, comparisons of examples), or whose
operations fix sizes derived from the batch (such as a reshape that flattens it), cannot be split this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.blocks import MICROBATCH, Assign, Block, Feed, Node, Read
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.kernel import PartRows
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import Cast, scale
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.math import equal
from mesh_tf_core.tracing.batch_linearity import BatchLinearity, Linearity, outer_reads
from mesh_tf_core.tracing.copying import LoopedCopy, batch_names
from mesh_tf_core.tracing.graph import Graph


class Accumulation(LoopedCopy):
    """A graph that computes part by part what the whole batch gives, under construction.

    Args:
      graph: forward and backward operations; those of phase `update` are left out.
      batch: name of the batch dimension, the first of every input.
      parts: of the batch; LayoutError if they do not divide it.
      refuse: the error for a graph that cannot work on parts, with the reason; None: that of microbatches.

    Attributes:
      names: of the batch dimension.
      sizes: the batch dimensions -> those of a part.
      rows: of the whole batch, those that a part has.
      given: old tensor -> its replacement, for variables and inputs without the batch.
      fed: the same of inputs in parts.
      has_rows: values of single examples may be wanted of forward operations alone, as [microbatch, its
        rows].
    """

    def __init__(
        self, graph: Graph, batch: str, parts: int, refuse: Callable[[str], UserError] | None = None
    ) -> None:
        super().__init__(graph)
        sizes = {t.shape.dim(batch).size for t in graph.inputs.values() if batch in t.shape.names}
        if len(sizes) != 1:
            raise LayoutError(
                f"microbatches: the inputs have no dimension {batch!r} of one common size; give them one, or "
                "use one microbatch"
            )
        (size,), self.parts, self.refuse = sizes, parts, refuse
        if parts < 1 or size % parts:
            raise LayoutError(
                f"microbatches={parts}: the size of {batch!r}, {size}, is not divisible by {parts}; "
                f"choose a divisor of {size}"
            )
        self.names = batch_names(graph, batch)
        self.sizes = {Dim(n, size): Dim(n, size // parts) for n in self.names}
        self.rows = PartRows(Shape(self.sizes), size // parts)
        for t in graph.tensors:
            both = [d.name for d in t.shape if d in self.sizes]
            if len(both) > 1:
                raise self.refusal(
                    f"a tensor [{t.shape}] has two batch dimensions ({' and '.join(both)}), but examples of "
                    "different microbatches cannot be combined"
                )
        self.has_rows = all(n.phase == Phase.FORWARD for n in self.kept)
        self.linearity = BatchLinearity(graph, self.names, self.kept)
        self.fed: dict[int, Tensor] = {}
        self.given: dict[int, Tensor] = {}
        self._reading: dict[int, bool] = {}
        self.casts = {
            (n.inputs[0], n.op.dtype): n.outputs[0]
            for n, _ in graph.walk()
            if isinstance(n.op, Cast) and n.phase != Phase.UPDATE
        }

    def run(self, wanted: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
        """The new graph and its tensors for some of the top level (the loss, metrics, gradients), by name.
        Reads and inputs stay outside; operations of the parts go into the bodies of loops.

        Raises:
          UserError: parts of the batch do not give one of `wanted`, with the operation that is why.
        """
        for node in self.kept:
            if isinstance(node.op, Read):
                self.given[node.outputs[0]] = self.new.read(node.op.variable)
            elif isinstance(node.op, Feed):
                self._feed(node.op, node.outputs[0])
        stored = [(node, node.op.variable) for node in self.kept if isinstance(node.op, Assign)]
        for name, tensor in wanted.items():
            self._check(name, tensor.id)
        for node, variable in stored:
            self._check(f"the value assigned to variable {variable.name!r}", node.inputs[0])
        self.outside.update(self.given)
        sums = self._sums([*(t.id for t in wanted.values()), *(node.inputs[0] for node, _ in stored)])
        early = self._early(sums)
        if early:
            self._loop(early)
        self._loop([i for i in sums if i not in self.outside])
        for node, variable in stored:
            with self.new.phase(node.phase, node.scope):
                self.new.assign(variable, self.whole(node.inputs[0]))
        return self.new, {name: self.whole(t.id) for name, t in wanted.items()}

    def refusal(self, what: str) -> UserError:
        """The error for a graph that cannot work on parts."""
        own = LayoutError(f"microbatches={self.parts}: {what}; use one microbatch")
        return self.refuse(what) if self.refuse else own

    def _check(self, name: str, tensor: int) -> None:
        """UserError if what the parts compute does not add up to a tensor."""
        found, why = self.linearity.of(tensor), self.linearity.why.get(tensor, "")
        rows = found.kind is Linearity.PER_EXAMPLE and not self.has_rows
        if found.kind is Linearity.INSEPARABLE or rows:
            raise self.refusal(f"{name} is not a sum over the microbatches, because of {why}")
        if found.after > (1 if found.kind is Linearity.REDUCIBLE else 2):
            raise self.refusal(
                f"{name} needs several sums over the whole batch, one after another, because of {why}"
            )

    def _feed(self, op: Feed, old: int) -> None:
        dims = list(self._shape(op.type.shape))
        if self.linearity.of(old).kind is Linearity.PER_EXAMPLE:
            self.fed[old] = self.new.input(op.feed, [Dim(MICROBATCH, self.parts), *dims], op.type.dtype)
        else:
            self.given[old] = self.new.input(op.feed, dims, op.type.dtype)

    # -- which sums are taken when ---------------------------------------------------------------------------

    def _sums(self, tensors: Iterable[int]) -> list[int]:
        """What the parts add up of tensors outside of the loops, or of what they are made of."""
        found: dict[int, None] = {}
        seen: set[int] = set()
        left = list(tensors)
        while left:
            tensor = left.pop(0)
            if tensor in seen or tensor in self.given:
                continue
            seen.add(tensor)
            if self._is_added(tensor):
                found[tensor] = None
            else:
                left += sorted(outer_reads(self.old, self.makers[tensor]))
        return list(found)

    def _is_added(self, tensor: int) -> bool:
        """Whether the parts add up to a tensor itself. Forward, not to a masked mean plus another: its
        shares of the masked mean would take a loop before, through the whole network."""
        found, maker = self.linearity.of(tensor), self.makers.get(tensor)
        if found.after and maker is not None and maker.phase == Phase.FORWARD and maker.body is None:
            kinds = {self.linearity.of(i).kind for i in maker.inputs}
            if kinds <= {Linearity.REPLICATED, Linearity.REDUCIBLE}:
                return False
        return found.kind in (Linearity.REDUCIBLE, Linearity.PER_EXAMPLE) or self._only_inside(tensor)

    def _only_inside(self, tensor: int) -> bool:
        """Whether a loop computes a tensor beside others for which it reads the rows."""
        maker = self.makers.get(tensor)
        if maker is None or maker.body is None:
            return False
        if maker.index not in self._reading:
            read = outer_reads(self.old, maker, self.is_whole)
            self._reading[maker.index] = any(
                self.linearity.of(i).kind is not Linearity.REPLICATED for i in read
            )
        return self._reading[maker.index]

    def is_whole(self, node: Node, operand: int) -> bool:
        """True if an operand, as a node in a loop over the parts reads it, is computed outside: it is made of
        whole sums."""
        made = [] if node.body else [self.linearity.of(o) for o in node.outputs]
        if made and all(s.kind is Linearity.INSEPARABLE or s.after > 1 for s in made):
            return False  # Nothing that is wanted reads it.
        if operand in self.linearity.whole.get(node.index, ()):
            return True
        found, inside = self.linearity.of(operand), self.old.tensor(operand).block
        return (
            found.kind is Linearity.REPLICATED
            and found.after > 0
            and not inside
            and not self._only_inside(operand)
        )

    def _needed(self, sums: Iterable[int]) -> list[Node]:
        """The nodes that a loop over the parts runs to add up `sums`, in order."""
        wanted, found = set(sums), []
        for node in reversed(self.kept):
            if not isinstance(node.op, Read | Feed) and not wanted.isdisjoint(node.made):
                found.append(node)
                wanted |= outer_reads(self.old, node, self.is_whole)
        return found[::-1]

    def _early(self, sums: Iterable[int]) -> list[int]:
        """The sums that have to be whole before the loop that adds up `sums`."""
        read: set[int] = set()
        for node in self._needed(sums):
            read |= outer_reads(self.old, node) - outer_reads(self.old, node, self.is_whole)
        return self._sums(sorted(read))

    # -- building --------------------------------------------------------------------------------------------

    def _loop(self, sums: Iterable[int]) -> None:
        """A loop over the parts that adds up `sums`: afterwards they are known outside."""
        made = {}
        with self.new.loop(Dim(MICROBATCH, self.parts)) as body:
            self.blocks, self.tensors = {}, dict(self.given)
            self.number = self.new.number(body)
            for old, outer in self.fed.items():
                self.tensors[old] = self.new.slice_into(body, outer)
            for node in self._needed(sums):
                self._node(node)
            for old in sums:
                inner = self._delivered(old, old)
                if self.linearity.of(old).kind is Linearity.REPLICATED:
                    inner = self._share(inner)
                rows = self.linearity.of(old).kind is Linearity.PER_EXAMPLE
                made[old] = (self.new.stack_output if rows else self.new.sum_output)(body, inner)
                if old in self.old.gradient_of:
                    self.new.deliver([(inner, self.old.gradient_of[old])])
        self.new.close_loop(body, [])
        self.number = None
        self.outside.update(made)

    def _operands(self, node: Node) -> list[Tensor]:
        """The copies of a node's operands; shares of what every part would add whole."""
        if self.number is None:
            return super()._operands(node)
        found = [self.whole(i) if self.is_whole(node, i) else self.tensors[i] for i in node.inputs]
        shared = self.linearity.shared.get(node.index, ())
        return [self._share(x) if n in shared else x for n, x in enumerate(found)]

    def _ends(self, node: Node, body: Block) -> list[Tensor]:
        found = super()._ends(node, body)
        shared = self.linearity.shared_out[node.index] if self.number is not None else ()
        return [self._share(x) if n in shared else x for n, x in enumerate(found)]

    def _share(self, x: Tensor) -> Tensor:
        """What a part adds of a value that is the same in all parts. A whole number, as a counter, cannot be
        divided: the first part adds it."""
        if is_float(x.dtype):
            return scale(x, 1 / self.parts)
        assert self.number is not None
        return where(equal(self.number, 0), x, 0)

    def _applied(self, op: Op, inputs: Sequence[Tensor], node: Node) -> tuple[Tensor, ...]:
        fixes = f"{op.describe()} works only for the whole batch"
        names = {n for i in (*node.inputs, *node.outputs) for n in self.old.tensor(i).shape.names}
        if self.number is not None and self.parts > 1 and not names.isdisjoint(self.names):
            of_part = op.of_part(self.rows)
            if of_part is not None:
                op, at = of_part
                inputs = [*inputs[:at], self.number, *inputs[at:]]
        try:
            made = super()._applied(op, inputs, node)
        except UserError as error:
            raise self.refusal(f"{fixes} ({error})") from None
        for old, tensor in zip(node.outputs, made, strict=True):
            if tensor.shape != self._shape(self.old.tensor(old).shape):
                raise self.refusal(fixes)
        return made

    def _delivered(self, tensor: int, source: int) -> Tensor:
        """The copy of what a tensor is made of; of a gradient's, in the dtype of its variable."""
        copy, variable = self.tensors[source], self.old.gradient_of.get(tensor)
        dtype = copy.dtype if variable is None else self.old.variables[variable].dtype
        made = self.casts.get((source, dtype))
        if copy.dtype != dtype and made in self.tensors:
            return self.tensors[made]
        return copy.cast(dtype)
