"""Couplings between the operations of a graph when it is lowered (see `clusters`): joined here, stated by the
passes that couple them."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Set
from fractions import Fraction

from costmodels.kernels.fusion import Fuses, fusion
from costmodels.stage_times import stage_times
from layoutopt.space.decisions import Structure
from mesh_tf_core.ir.blocks import Assign, Block, Node, Read
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Local, Loop, Program
from mesh_tf_core.lower.nodes import moved_dims, pass_of, product_dims, repeated, updated, weights
from mesh_tf_core.lower.subgraph import Access
from mesh_tf_core.lower.sums import into_totals, waiting_nodes
from mesh_tf_core.lower.uses import Readers
from mesh_tf_core.ops.stages import StageStack
from mesh_tf_core.tracing.graph import Graph


class Dependencies:
    """A graph's live nodes, joined into sets that must be lowered together.

    Args:
      program: the graph lowered under any layout; operations that it does not have are dead and left out.
      structure: effects of the decisions.
      returned: tensors that a step returns.
      cut: additions that are separated from the makers of their operands.

    Attributes:
      live: nodes that the program has, in order.
      home: node -> the block it is in.
      readers: tensor -> live nodes that read it.
      outer: body tensor -> the tensors that a loop makes of it outside.
      leaving: body tensors that a loop carries on.
      sliced: tensors that a loop reads part by part.
      reads: variable -> the nodes that read it.
      owner: tensor that is a variable as read, a part of it in a loop, or a cast of these -> the variable.
      chain: variable -> these tensors.
      stacks: tensors that the program's loops stack; `unread` those that they save or stack and do not.
      additions: nodes of the step itself that may have pending sums -> the operands whose sums may be
        pending.
      totalled: tensors whose sum the update's total takes.
      fusions: operations that may run as one kernel, of a compiler and of a library whose calls are kernels.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        structure: Structure,
        returned: Collection[int] = (),
        cut: Set[int] = frozenset(),
    ) -> None:
        self.further, self.keeps, self.products = structure.further, structure.keeps, structure.products
        self.granularity = dict(structure.granularity)
        self.graph, self.returned = graph, frozenset(returned)
        self.fusions = tuple(fusion(graph.outline(), each) for each in (Fuses.ALL, Fuses.CALLS))
        apart = stage_times(graph.outline())
        self.counts: dict[int, float] = {} if apart is None else dict(apart.nodes)
        live = {instr.origin.node for instr, _ in program.walk()}
        self.stacks = {program.values[s.outer].tensor for loop in program.every(Loop) for s in loop.stacked}
        local = (i for i in program.every(Local) if isinstance(i.op, StageStack))
        self.stacks.update(program.values[o].tensor for instr in local for o in instr.outputs)
        saved = {o for b in graph.blocks for o in b.saved.values()}
        # What stages stack may be added up before it is.
        saved.update(o for b in graph.blocks if not b.spread for _, o in b.stacked)
        self.unread = frozenset(saved - self.stacks)
        self.repeated = repeated(graph)
        live |= {self._number(t) for t, first in self.repeated.items() if self._number(first) in live}
        self.live = [n for n, _ in graph.walk() if n.index in live or isinstance(n.op, Assign | Read)]
        self.block_of: dict[int, Block] = {}
        self.uses = Readers(graph, self.live)
        self.readers, self.outer, self.leaving = self.uses.of, self.uses.outer, self.uses.leaving
        self.sliced = {outer for block in graph.blocks for outer, _ in block.sliced}
        for block in graph.blocks:
            self.block_of.update((node.index, block) for node in block.nodes)
        self.parent: dict[int, int] = {}
        self.additions: dict[int, list[int]] = defaultdict(list)
        self.cut = cut
        self.chain: dict[str, list[int]] = defaultdict(list)
        self.reads: dict[str, list[Node]] = defaultdict(list)
        self.owner = weights(graph)
        self.totalled = frozenset(into_totals(self.uses)) - self.returned
        self._variables()
        for tensor, first in self.repeated.items():  # what converts one tensor is done once for all
            self._join(self._number(first), self._number(tensor))
        self._gathers()
        self._chunks()
        self._sums()
        self._updates()
        self._fused()

    # -- variables -------------------------------------------------------------------------------------------

    def _variables(self) -> None:
        for tensor, name in self.owner.items():
            self.chain[name].append(tensor)
        for node in self.live:
            if isinstance(node.op, Read) and node.op.variable.own_storage:
                self.reads[node.op.variable.name].append(node)

    def variable_of(self, cast: Node) -> str | None:
        """The variable that a node casts, if it does nothing else."""
        return self.owner.get(cast.outputs[0]) if cast.outputs else None

    def accesses(self, variable: str) -> set[Access]:
        """Where a variable is needed with the layout's splits, so that it is gathered if it is stored split:
        for the first reader of a block and pass."""
        found = dict[tuple[int, Phase, int], int]()
        for tensor in self.chain[variable]:
            for reader in self.readers[tensor]:
                if reader.phase != Phase.UPDATE and not (reader.op.converts and self.variable_of(reader)):
                    at = self.block_of[reader.index].id, pass_of(reader.phase), tensor
                    found.setdefault(at, reader.index)
        return {(*at, reader) for at, reader in found.items()}

    # -- conversions that are shared -------------------------------------------------------------------------

    def _number(self, tensor: int) -> int:
        return self.graph.producer[tensor].index

    # -- gathers that are shared -----------------------------------------------------------------------------

    def _gathers(self) -> None:
        """Joins operations of a block that may move one dimension of the same tensor, for they need all of it
        or call it otherwise: it is moved once for all of them (weights once for each pass)."""
        for tensor, readers in self.readers.items():
            first: dict[Hashable, int] = {}
            for node in readers if len(readers) > 1 else ():
                way = pass_of(node.phase) if tensor in self.owner else ""
                for name in moved_dims(node, tensor, self.graph, self.further):
                    key = self.block_of[node.index].id, way, name
                    self._join(first.setdefault(key, node.index), node.index)

    def _chunks(self) -> None:
        """Joins products with what renames a value for them: what is gathered for it comes in chunks beside
        all of them."""
        dims = product_dims(self.graph) if self.products else {}
        for node in self.live:
            if node.op.renames and not self.products.isdisjoint(dims.get(node.index, ())):
                for reader in self.readers[node.outputs[0]]:
                    if reader.index in dims:
                        self._join(node.index, reader.index)

    # -- sums that may wait ----------------------------------------------------------------------------------

    def _sums(self) -> None:
        for maker, reader in waiting_nodes(self.uses):
            if reader.op.linear and len(reader.inputs) > 1 and self._outside(maker) and self._outside(reader):
                self.additions[reader.index] += [o for o in maker.outputs if o in reader.inputs]
                if reader.index in self.cut:
                    continue
            self._join(maker.index, reader.index)

    def _outside(self, node: Node) -> bool:
        """Whether a node is in no loop."""
        return self.block_of[node.index].parent is None

    def ties(self, tensor: int) -> set[int]:
        """The tensors that loops connect to a tensor: stacks, sums, parts, state."""
        found = set(self.outer[tensor])
        for node in self.live:
            block = node.body
            if block is None:
                continue
            pairs = [*block.sliced, *block.handed, *zip(block.carry_in, block.carry_out, strict=False)]
            pairs += [*zip(node.inputs, block.carry_in, strict=False)]
            pairs += [*zip(node.outputs, block.carry_out, strict=False)]
            found.update(b for a, b in pairs if a == tensor)
            found.update(a for a, b in pairs if b == tensor)
        return found

    def leads_to(self, tensor: int) -> list[int]:
        """A tensor and the results of loops on it, outwards."""
        found = [tensor]
        for t in found:
            found.extend(self.outer[t])
        return found

    # -- updates ---------------------------------------------------------------------------------------------

    def _updates(self) -> None:
        first: dict[str, int] = {}
        for node in self.live:
            name = updated(node, self.graph)
            if name is not None and not isinstance(node.op, Read):
                self._join(first.setdefault(name, node.index), node.index)

    # -- kernels ---------------------------------------------------------------------------------------------

    def _fused(self) -> None:
        """What may run as one kernel is priced as one."""
        for way in self.fusions:
            first: dict[int, int] = {}
            for node in self.live:
                group = way.group.get(node.index)
                for g in (*([] if group is None else [group]), *way.aliases.get(node.index, ())):
                    self._join(first.setdefault(g, node.index), node.index)
            for node in self.live:
                # A value that only loops stack is no array, unless it is gathered for another stack.
                stacks = node.op.free and not self.block_of[node.index].saved.keys().isdisjoint(node.outputs)
                for t in {*node.inputs} - way.leaving if stacks else ():
                    maker = self.graph.producer.get(t, node).index
                    if maker in way.group and moved_dims(node, t, self.graph, self.further):
                        self._join(maker, node.index)

    def root(self, index: int) -> int:
        parent = self.parent
        while (above := parent.get(index, index)) != index:
            parent[index] = index = parent.get(above, above)  # the next way is half as long
        return index

    def _join(self, a: int, b: int) -> None:
        if self.root(a) != self.root(b):
            self.parent[self.root(a)] = self.root(b)

    # -- facts -----------------------------------------------------------------------------------------------

    def times(self, node: Node) -> tuple[tuple[float, Fraction | None], ...]:
        """Sizes of the loops around a node, the innermost first, and how often branches are taken; before
        these the share that counts where stages are programs of their own."""
        around = self.graph.around(self.block_of[node.index])
        return (self.counts.get(node.index, 1.0), None), *((b.dim.size, b.branch) for b in around)

    def early(self, tensor: int, inside: Set[int]) -> bool:
        """True if something that is not the update, and not one of the nodes `inside`, reads a tensor."""
        if tensor in self.returned or tensor in self.leaving or tensor in self.sliced:
            return True
        return any(r.phase != Phase.UPDATE and r.index not in inside for r in self.readers[tensor])
