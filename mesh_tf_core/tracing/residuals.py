"""Values of a forward loop in its backward: recomputed if that is free, else saved in a stack."""

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Block, Node, Remembering
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import TensorType
from mesh_tf_core.ir.tensor import Builder, Tensor


def several(part: Shape, stack: Shape) -> Dim | None:
    """The first dimension of an iteration's part of a stack, if that has several elements."""
    return part.dims[0] if len(part) == len(stack) else None


class Residuals(Builder, Remembering):
    """The part of a graph that finds the tensors that a new operation reads, as the current block has them.

    Attributes:
      tensors, producer, blocks: of the graph; `_stack`: the blocks that are being built, outermost first.
    """

    tensors: list[Tensor]
    producer: dict[int, Node]
    blocks: list[Block]
    _stack: list[Block]

    def new_tensor(self, type: TensorType, block: Block) -> Tensor:
        """A tensor that a block computes."""
        raise NotImplementedError

    def visible(self, x: Tensor, user: object = "operation", level: int = -1) -> Tensor:
        """`x` as the current block sees it: values of a forward loop reach its backward through saved
        stacks."""
        if not isinstance(x, Tensor):
            raise UserError(
                f"{getattr(user, 'name', user)}: expected a tensor, found {type(x).__name__} {x!r}"
            )
        if x.graph is not self:
            raise UserError(
                f"{getattr(user, 'name', user)}: {x!r} belongs to graph {x.graph.name!r}, not to "
                f"{self.name!r}; build the whole model in one graph"
            )
        depth = len(self._stack) if level < 0 else level
        if any(b.id == x.block for b in self._stack[:depth]):
            return x
        for i in range(depth - 1, -1, -1):
            block = self._stack[i]
            if block.forward is not None and block.forward.id == x.block:
                return self._residual(block, i, x)
        raise UserError(
            f"{getattr(user, 'name', user)}: {x!r} was computed inside a loop body and is not visible "
            "outside; return the tensor from the body"
        )

    def _residual(self, block: Block, level: int, x: Tensor) -> Tensor:
        """A forward-body value inside the backward body: sliced from a variable, computed anew if that is
        free, or saved. What others read under its first name too is saved once, under that."""
        forward = block.forward
        assert forward is not None
        if x.id in block.captured:
            return self.tensors[block.captured[x.id]]
        outer = {inner: out for out, inner in forward.sliced}.get(x.id)
        if x.id == forward.index:
            assert block.index is not None
            found = self.tensors[block.index]
        elif outer is None and (self.is_free(x, forward) or self._renames(x, forward)):
            found = self._rebuild(block, level, x)
        else:
            if outer is None:
                outer = self._saved(forward, x)
            stack = self.visible(self.tensors[outer], level=level)
            found = self.slice_into(block, stack, several(x.shape, stack.shape))
        block.captured[x.id] = found.id
        return found

    def _saved(self, forward: Block, x: Tensor) -> int:
        if x.id not in forward.saved:
            stacked = TensorType(Shape([forward.dim, *x.shape]), x.dtype)
            forward.saved[x.id] = self.new_tensor(stacked, self.outside(forward)).id
        return forward.saved[x.id]

    def slice_into(self, block: Block, outer: Tensor, part: Dim | None = None) -> Tensor:
        """The body's view of one iteration's part of a stacked tensor; `part`: the elements of that part, if
        these are several (see `Block.spread`)."""
        rest = outer.shape.without(block.dim.name)
        inner = self.new_tensor(TensorType(Shape([part, *rest]) if part else rest, outer.dtype), block)
        block.sliced.append((outer.id, inner.id))
        return inner

    def _renames(self, x: Tensor, forward: Block) -> bool:
        """Whether x is another tensor under other names, which others read under its own. Alone, x is what is
        saved: where a name moves data, as tokens go to their experts, backward would move it again."""
        node = self.producer.get(x.id)
        if node is None or not (node.op.free and node.op.renames):
            return False
        (source,) = node.inputs
        return any(source in other.inputs and not other.op.renames for other in forward.nodes)

    def is_free(self, x: Tensor, forward: Block) -> bool:
        """True if x follows, by element-wise work alone, from variables, the index and values from
        outside."""
        known, left = {forward.index, *(inner for _, inner in forward.sliced)}, [x]
        while left:  # chains are longer than Python may call itself
            t = left.pop()
            if t.block != forward.id or t.id in known:
                continue
            node = self.producer.get(t.id)
            if node is None or node.body is not None or node.op.kind not in ("data", "elementwise"):
                return False
            known.add(t.id)
            left += [self.tensors[i] for i in node.inputs]
        return True

    def _rebuild(self, block: Block, level: int, x: Tensor) -> Tensor:
        node = self.producer[x.id]
        inputs = []
        for i in node.inputs:
            t = self.tensors[i]
            inputs.append(self._residual(block, level, t) if t.block == block.forward.id else t)  # type: ignore[union-attr]
        popped = self._stack[level + 1 :]
        del self._stack[level + 1 :]
        try:
            return self.apply(node.op, *inputs)
        finally:
            self._stack.extend(popped)
