"""The backward of layers in two halves, for schedules in which gradients of weights have slots of their
own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mesh_tf_core.ir.blocks import Block, Node, reads


@dataclass(frozen=True)
class HalfBackward:
    """One half of the backward of layers: all but the products that make gradients of weights, or these.

    Attributes:
      body: of the loop, with the nodes and results of this half.
      between: tensors that the first half makes and the second one reads.
      first: which half it is.
    """

    body: Block
    between: Sequence[int]
    first: bool


def halves(body: Block, first: Collection[int], again: Collection[int]) -> tuple[HalfBackward, HalfBackward]:
    """The backward of layers in two halves. Products that the state's gradient does not need go to the second
    half, with everything computed from them; all other operations go to the first half, where they share
    kernels.

    Args:
      first: results, of the graph around, that the first half has to make.
      again: stacks whose parts are computed again in the first half.
    """
    needed, late = {*body.carry_out, *(i for i, o in body.summed if o in first)}, set[int]()
    for node in reversed(body.nodes):
        needed |= reads(node) if not needed.isdisjoint(node.outputs) else set()
    early, left = list[Node](), list[Node]()
    for node in body.nodes:
        waits = node.op.kind == "matmul" and needed.isdisjoint(node.outputs)
        half = left if waits or not late.isdisjoint(reads(node)) else early
        half.append(node)
        late.update(node.outputs if half is left else ())
    made = {*body.carry_in, *(o for node in early for o in node.outputs)}
    made |= {i for o, i in body.sliced if o in again}
    between = sorted(made & set[int]().union(*map(reads, left)))
    one, two = (
        replace(
            body,
            nodes=nodes,
            stacked=[p for p in body.stacked if (p[0] in late) is second],
            summed=[p for p in body.summed if (p[0] in late) is second],
        )
        for nodes, second in ((early, False), (left, True))
    )
    two.carry_in = two.carry_out = ()
    return HalfBackward(one, between, True), HalfBackward(two, between, False)
