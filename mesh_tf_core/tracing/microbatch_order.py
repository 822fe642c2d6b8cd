"""The order of a microbatch's work when it passes the stages of a pipeline forward and then backward: before
the layers, after them, after their backward, or once, on sums over all microbatches; and the two halves of
the backward of layers, for schedules in which gradients of weights have slots of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace
from enum import IntEnum

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Block, Node, Outline, reads
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.tracing.batch_linearity import Linearity, outer_reads
from mesh_tf_core.tracing.graph import Graph


class When(IntEnum):
    """The part of a microbatch's work that must end before a tensor is known; of two, the later one
    counts."""

    BEFORE = 0  # nothing
    HEAD = 1  # forward through the layers
    AFTER = 2  # backward through them
    WHOLE = 3  # known outside of the ticks only: a sum of what stages do, or of both HEAD and AFTER


class MicrobatchOrder:
    """The work of an iteration of the loop over microbatches (`tracing.microbatch`), with one loop over
    layers and one over their gradient.

    Args:
      names: of the batch dimension.
      layers: the dimension of the layers.
      trained: values that depend on trained variables.
      refuse: the error for layers that cannot be stages.

    Attributes:
      batch: the iteration; `number`: of the microbatch.
      over: its nodes over the layers: forward, and backward if there is one.
      known: tensor -> when it is known; `runs`: node -> when it runs.
      sums: values that are summed over the microbatches, from which the rest follows.
      states: the states of the layers, as they read them; `passes`: further values that move through the
        stages, as the layers read them, with a gradient.
      stays: values that each stage computes itself; `same`: values that are the same for all microbatches.
      reads: node over layers -> values that it reads from outside, except parts of stacks.
      sliced: node -> the stacks that layers read their parts of.
      rows: gradients of `passes`.
    """

    def __init__(
        self,
        graph: Graph,
        batch: Block,
        names: Set[str],
        layers: str,
        trained: Set[int],
        refuse: Callable[[str], UserError],
    ) -> None:
        assert batch.index is not None
        self.old, self.batch, self.names, self.number = graph, batch, names, batch.index
        self.trained, self.refuse = trained, refuse
        self.over = [n for n in batch.nodes if n.body is not None and n.body.dim.name == layers]
        self.forward, self.backward = self.over[0], self.over[-1]
        if len(self.over) > 2 or any(
            self.body(n).forward is not self.body(self.forward) for n in self.over[1:]
        ):
            raise refuse("the model has more than one loop over these layers")
        self.layers = self.body(self.forward).dim
        self.states, self.seeds = self.forward.inputs, self.backward.inputs * (len(self.over) > 1)
        self.varying = {self.number, *(inner for _, inner in batch.sliced)}
        for node in batch.nodes:
            self.varying.update(node.made if not self.varying.isdisjoint(self.outer(node)) else ())
        self.known = defaultdict[int, When](lambda: When.BEFORE)
        self.runs: dict[int, When] = {}
        self._order()
        self.sums = self._added()
        summed = (o for n in self.over[1:] for _, o in self.body(n).summed)
        self.rows = tuple(o for o in summed if self.kind(o) is Linearity.PER_EXAMPLE)
        self._read()
        self._check()

    def body(self, node: Node) -> Block:
        """The body of a loop."""
        assert node.body is not None
        return node.body

    def outer(self, node: Node) -> set[int]:
        """The tensors of the iteration, and from outside of it, that a node reads, from inside its loop
        too."""
        return outer_reads(self.old, node, blocks=(0, self.batch.id))

    def kind(self, tensor: int) -> Linearity:
        """The dependence of a tensor on the microbatch."""
        if tensor not in self.varying:
            return Linearity.REPLICATED
        rows = not self.names.isdisjoint(self.old.tensor(tensor).shape.names)
        return Linearity.PER_EXAMPLE if rows else Linearity.REDUCIBLE

    def _order(self) -> None:
        saved = {*self.body(self.forward).saved.values()}
        for node in self.batch.nodes:
            found = {self.known[i] for i in self.outer(node) - saved}
            when = max(found, default=When.BEFORE)
            if when is When.AFTER and (When.HEAD in found or self._early(node)):
                when = When.WHOLE  # What it adds up is not there at the same ticks.
            self.runs[node.index] = when
            self.known.update(dict.fromkeys(node.made, when))
            for other, then in zip(self.over, (When.HEAD, When.AFTER), strict=False):
                if node is other:
                    goes = {*node.outputs[: len(node.inputs)]}
                    goes |= {o for o in node.outputs if self.kind(o) is Linearity.PER_EXAMPLE}
                    self.known.update((o, then if o in goes else When.WHOLE) for o in node.outputs)

    def _adds(self, node: Node) -> Sequence[int]:
        """The operands that a node may add up, each of them whole in a sum over all microbatches."""
        return node.inputs if node.body is not None or node.op.linear or node.op.converts else ()

    def _early(self, node: Node) -> bool:
        """Whether a node adds what is known before the layers to a term of a sum."""
        terms = [self.kind(o) is Linearity.REDUCIBLE for o in node.outputs]
        terms = terms if node.body is not None else [all(terms)] * len(node.inputs)
        return any(t and self.known[i] is When.BEFORE for t, i in zip(terms, self._adds(node), strict=False))

    def terms(self, node: Node) -> list[int]:
        """The tensors to sum up, of which a node then makes a sum: all that it adds, or factors that differ
        between microbatches."""
        adds = self._adds(node)
        read = sorted(self.outer(node))
        return [i for i in read if i in adds or self.kind(i) is not Linearity.REPLICATED]

    def _added(self) -> list[int]:
        """The sums that loops over ticks make, of which all results of the iteration are made."""
        found: dict[int, None] = {}
        left, seen = [i for i, _ in self.batch.results], set[int]()
        while left:
            tensor = left.pop(0)
            maker = self.old.producer[tensor]
            if tensor in seen:
                continue
            seen.add(tensor)
            if maker in self.over or self.runs[maker.index] is not When.WHOLE:
                found[tensor] = None
                continue
            if any(self.kind(i) is Linearity.PER_EXAMPLE for i in self.outer(maker)):
                raise self.refuse(f"{maker.op.describe()} reads values from before and after the layers")
            left += self.terms(maker)
        return list(found)

    def _read(self) -> None:
        saved = {*self.body(self.forward).saved.values()}
        stacks = {n.index: dict.fromkeys(o for o, _ in self.body(n).sliced) for n in self.over}
        self.sliced = {n: [o for o in each if o not in saved] for n, each in stacks.items()}
        self.reads = {n.index: self._inside(n) - saved for n in self.over}
        read = set().union(*self.reads.values())
        read_by_parts = (o for n in self.over[1:] for o in self.sliced[n.index])
        late = [i for i in (*read, *read_by_parts) if self.known[i] is not When.BEFORE]
        if late or any(self.known[i] > When.HEAD for i in self.seeds):
            raise self.refuse("the gradient of values that the layers stack depends on the microbatch")
        rows = {i for i in read if self.kind(i) is Linearity.PER_EXAMPLE}
        if any(self.kind(i) is Linearity.REDUCIBLE for i in read - {self.number}):
            raise self.refuse(
                "the layers read a sum over the batch, which is not complete before the last microbatch"
            )
        if any(self.kind(i) is not Linearity.REPLICATED for each in self.sliced.values() for i in each):
            raise self.refuse("the layers read a stack with one part of the batch for each layer")
        self.passes = sorted(rows & self.trained)
        self.stays = sorted(rows - self.trained)
        self.same = sorted(read - rows - {self.number})

    def _inside(self, node: Node) -> set[int]:
        """What the nodes of a loop's body read from outside, but for its state and parts of stacks."""
        body = self.body(node)
        found = set[int]().union(*map(self.outer, body.nodes), body.carry_out, (i for i, _ in body.results))
        return {i for i in found if self.old.tensor(i).block in (0, self.batch.id)}

    def _check(self) -> None:
        body, refuse = self.body(self.forward), self.refuse
        inside = [n for n, _ in body.walk()]
        loops = [body, *(n.body for n in inside if n.body is not None)]
        if any(each.runs is not None for each in loops):
            raise refuse("the layers have branches or end early, but all stages run the same program")
        if any(each.halves for each in loops):
            raise refuse("reversible layers are not supported")
        if any(self.kind(o) is Linearity.PER_EXAMPLE for _, o in body.stacked):
            raise refuse("the layers stack values that depend on single examples")
        if any(self.layers in self.old.tensor(o).shape.dims for n in inside for o in n.outputs):
            raise refuse(
                f"the layers use a whole tensor with dimension {self.layers.name!r}, not only their own slice"
            )


def second_half(body: Block, graph: Graph | Outline, first: Collection[int] = ()) -> set[int]:
    """The nodes of the second half of the backward of layers; `first` as of `halves`."""
    needed = {*body.carry_out, *(i for i, o in body.summed if o in first)}
    late, found = set[int](), set[int]()
    for node in reversed(body.nodes):
        needed |= reads(node) if not needed.isdisjoint(node.outputs) else set()
    for node in body.nodes:
        copied = node.phase == Phase.RECOMPUTE
        waits = not copied and _is_matrix(node, graph) and needed.isdisjoint(node.outputs)
        if waits or not late.isdisjoint(reads(node)):
            found.add(node.index)
            late.update(node.outputs)
    return found


def _is_matrix(node: Node, graph: Graph | Outline) -> bool:
    """True if a product has rows of one operand and columns of another: the gradient of a norm's scale, which
    has neither, takes less time than storing what it reads."""
    if node.op.kind != "matmul":
        return False
    shared = set[str].intersection(*({*graph.tensor(i).shape.names} for i in node.inputs[:2]))
    return any(not shared >= {*graph.tensor(o).shape.names} for o in node.outputs)


def halves(
    body: Block, graph: Graph | Outline, first: Collection[int], again: Collection[int]
) -> tuple[Block, Block]:
    """The backward of layers in two halves: loops of which the first stacks what the second has parts of, as
    stacks that the graph lacks. Products that the state's gradient does not need go to the second half, with
    everything computed from them; all other operations go to the first half, where they share kernels.

    Args:
      first: results, of the graph around, that the first half has to make.
      again: stacks whose parts are computed again for the first half.
    """
    second = second_half(body, graph, first)
    early, left = ([n for n in body.nodes if (n.index in second) is later] for later in (False, True))
    late = {o for node in left for o in node.outputs}
    made = {*body.carry_in, *(o for node in early for o in node.outputs)}
    made |= {i for o, i in body.sliced if o in again}
    for node in reversed(early):  # one value under several names, or of several widths, is kept once
        same = (
            _renames(node, graph) if node.phase == Phase.RECOMPUTE else node.op.free and len(node.inputs) == 1
        )
        if same and any(o in reads(n) for n in left for o in node.outputs):
            left.insert(0, node)
            made -= {*node.outputs}
    between = sorted(made & set[int]().union(*map(reads, left)))
    one, two = (
        replace(
            body,
            nodes=nodes,
            stacked=[p for p in body.stacked if (p[0] in late) is later],
            summed=[p for p in body.summed if (p[0] in late) is later],
        )
        for nodes, later in ((early, False), (left, True))
    )
    stacks = [(i, graph.further_stack(body.id, i)) for i in between]
    one.stacked += stacks
    two.carry_in = two.carry_out = ()
    wanted = {i for i, _ in two.results}.union(*map(reads, left)).difference(between)
    two.sliced = [*((o, i) for i, o in stacks), *(p for p in body.sliced if p[1] in wanted)]
    return one, two


def _renames(node: Node, graph: Graph | Outline) -> bool:
    """True if a node makes one value of another that is no larger, without work."""
    if len(node.inputs) != 1 or len(node.outputs) != 1 or not (node.op.free or node.op.converts):
        return False
    source, made = (graph.tensor(i).type for i in (*node.inputs, *node.outputs))
    return source.shape.size == made.shape.size and source.bytes <= made.bytes
