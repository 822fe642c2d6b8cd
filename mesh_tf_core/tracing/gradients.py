"""Reverse-mode gradients, built from operations of the same graph, so that they are lowered like the
forward."""

from collections.abc import Iterable, Sequence

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Block, Half, Node
from mesh_tf_core.ir.dtypes import is_float, itemsize
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import Cast, Constant, add_n
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.shape import transpose
from mesh_tf_core.tracing.copying import Replay
from mesh_tf_core.tracing.graph import Graph, graph_of
from mesh_tf_core.tracing.residuals import several


def gradients(loss: Tensor, wrt: Sequence[Tensor]) -> list[Tensor | None]:
    """d loss / d x for every x of `wrt` (None if the loss does not depend on it).

    Args:
      loss: a scalar at the top level of its graph.

    Example:
      >>> import mesh_tf_core as mtf
      >>> graph, d_model = mtf.Graph("square"), mtf.Dim("d_model", 4)
      >>> w = graph.variable("w", [d_model], mtf.Normal(0.1))
      >>> (dw,) = mtf.gradients(mtf.reduce_sum(mtf.square(w)), [w])
      >>> print(dw.shape)
      d_model:4
    """
    graph = graph_of(loss)
    if len(loss.shape) or loss.block:
        raise UserError(
            f"gradients: the loss must be a scalar that is computed outside of loops, found {loss!r}"
        )
    needed = depends_on(graph, [x.id for x in wrt])
    with graph.phase(Phase.BACKWARD):
        one: Tensor = graph.apply(Constant(1.0, loss.dtype))
        found = _BackwardWalk(graph, needed).run({loss.id: [one]}, list(graph.nodes))
    return [found.get(x.id) for x in wrt]


def gradients_inside(ys: Sequence[Tensor], dys: list[Tensor | None], xs: list[Tensor]) -> list[Tensor | None]:
    """Gradients of tensors from which others are computed in their block, inside a custom gradient."""
    graph, block, ids = graph_of(ys[0]), ys[0].block, [x.id for x in xs]
    seeds = {y.id: [dy] for y, dy in zip(ys, dys, strict=True) if dy is not None}
    walk = _BackwardWalk(graph, depends_on(graph, ids, block))
    return [*map(walk.run(seeds, list(graph.blocks[block].nodes)).get, ids)]


def unwidened(x: Tensor) -> Tensor:
    """The smaller float that a tensor was cast from, if any: the same information in half the bytes."""
    graph = graph_of(x)
    maker = graph.producer.get(x.id)
    if maker is None or not isinstance(maker.op, Cast):
        return x
    source = graph.tensor(maker.inputs[0])
    smaller = is_float(source.dtype) and itemsize(source.dtype) < itemsize(x.dtype)
    return source if smaller and source.block == x.block else x


def depends_on(graph: Graph, sources: Iterable[int], block: int = 0) -> set[int]:
    """Float tensors of a block that depend on `sources`, through loops too."""
    reached = set(sources)

    def visit(block: Block) -> bool:
        before = len(reached)
        for node in block.nodes:
            body = node.body
            if body is None:
                if any(i in reached for i in node.inputs):
                    reached.update(o for o in node.outputs if is_float(graph.tensor(o).dtype))
                continue
            entering = [*zip(node.inputs, body.carry_in, strict=True), *body.sliced]
            reached.update(inner for outer, inner in entering if outer in reached)
            while visit(body):
                reached.update(a for a, b in zip(body.carry_in, body.carry_out, strict=True) if b in reached)
            pairs = [*zip(body.carry_out, node.outputs, strict=False), *body.results]
            reached.update(outer for inner, outer in pairs if inner in reached)
        return len(reached) > before

    visit(graph.blocks[block])
    return reached


class _BackwardWalk:
    """Walks blocks backwards, adding gradient operations to the graph's current block."""

    def __init__(self, graph: Graph, needed: set[int]) -> None:
        self.graph, self.needed = graph, needed

    def run(self, seeds: dict[int, list[Tensor]], nodes: Sequence[Node]) -> dict[int, Tensor]:
        """Gradients of every tensor that `nodes` read or compute, given those of their results."""
        pending = {i: list(terms) for i, terms in seeds.items()}
        done: dict[int, Tensor] = {}

        def settle(i: int) -> Tensor | None:
            if i not in done and i in pending:
                # Broadcasting leaves dimensions in the largest operand's order, not in the tensor's.
                done[i] = transpose(add_n(pending.pop(i)), self.graph.tensor(i).shape)
            return done.get(i)

        for node in reversed(nodes):
            if not any(o in pending for o in node.outputs):
                continue
            with self.graph.phase(Phase.BACKWARD, node.scope, node.name, node.call):
                dys = [settle(o) for o in node.outputs]
                for i, dx in self._node(node, dys):
                    if dx is not None and i in self.needed:
                        pending.setdefault(i, []).append(dx)
        with self.graph.phase(Phase.BACKWARD):
            for i in list(pending):
                settle(i)
        return done

    def _node(self, node: Node, dys: list[Tensor | None]) -> list[tuple[int, Tensor | None]]:
        if node.body is not None:
            backward = self._reversible if node.body.halves else self._scan
            return backward(node, node.body, dys)
        if not any(i in self.needed for i in node.inputs):
            return []
        inputs = [self.graph.tensor(i) for i in node.inputs]
        outputs = [self.graph.tensor(o) for o in node.outputs]
        if len(outputs) == 1:
            assert dys[0] is not None
            grads = node.op.gradient(dys[0], inputs, outputs[0])
        else:
            grads = node.op.gradient(tuple(dys), inputs, tuple(outputs))  # type: ignore[arg-type]
        found = list(grads) if isinstance(grads, Iterable) and not isinstance(grads, Tensor) else []
        wanted = len(node.inputs)
        if len(found) != wanted or not all(dx is None or isinstance(dx, Tensor) for dx in found):
            raise UserError(
                f"operation {type(node.op).__name__}: gradient returned {grads!r}; it must return a "
                f"tuple of length {wanted}, with a tensor or None for each input"
            )
        return list(zip(node.inputs, found, strict=True))

    def _known(self, gradient: Tensor | None, like: Tensor) -> Tensor:
        """The gradient as the current block sees it; zeros where there is none."""
        if gradient is not None:
            return self.graph.visible(gradient)
        return broadcast(self.graph.apply(Constant(0.0, like.dtype)), like.shape)

    def _scan(self, node: Node, body: Block, dys: list[Tensor | None]) -> list[tuple[int, Tensor | None]]:
        """The backward of a loop is a loop in the other direction that carries the gradient of the state."""
        graph = self.graph
        finals, rest = dys[: len(body.carry_in)], dys[len(body.carry_in) :]
        carried = [j for j, i in enumerate(body.carry_in) if i in self.needed]
        init = [self._known(finals[j], graph.tensor(body.carry_out[j])) for j in carried]
        first = None if body.first is None else graph.visible(graph.tensor(body.first)).id
        with graph.loop(body.dim, not body.reverse, body, body.spread) as block:
            # What did not run passes its gradient on.
            block.runs = None if body.runs is None else graph.visible(graph.tensor(body.runs)).id
            block.first = first
            block.branch = body.branch
            states = [graph.body_input(block, x) for x in init]
            seeds: dict[int, list[Tensor]] = {}
            for j, state in zip(carried, states, strict=True):
                seeds.setdefault(body.carry_out[j], []).append(state)
            for at, ((inner, _), dy) in enumerate(zip(body.results, rest, strict=True)):
                if dy is not None:
                    part = dy
                    if at < len(body.stacked):
                        size = several(graph.tensor(inner).shape, dy.shape)
                        part = graph.slice_into(block, graph.visible(dy), size)
                    seeds.setdefault(inner, []).append(part)
            found = self.run(seeds, list(body.nodes))
            block.carry_in = tuple(s.id for s in states)
            outs = [self._known(found.get(body.carry_in[j]), s) for j, s in zip(carried, states, strict=True)]
            block.carry_out = tuple(x.id for x in outs)
            result = self._outward(body, block, found)
        closed = graph.close_loop(block, init)
        return [(node.inputs[j], dx) for j, dx in zip(carried, closed, strict=True)] + self._widened(result)

    def _reversible(
        self, node: Node, body: Block, dys: list[Tensor | None]
    ) -> list[tuple[int, Tensor | None]]:
        """The backward of a reversible loop carries the state too, and undoes it half by half."""
        graph = self.graph
        finals = [graph.visible(graph.tensor(o)) for o in node.outputs[:2]]
        init = [*finals, *(self._known(dy, y) for dy, y in zip(dys, finals, strict=False))]
        f, g = body.halves
        first = None if body.first is None else graph.visible(graph.tensor(body.first)).id
        with graph.loop(body.dim, not body.reverse, body) as block:
            block.first = first
            states = [graph.body_input(block, x) for x in init]
            y1, y2, dy1, dy2 = states
            x2, dx1, of_g = self._undone(g, y1, y2, dy1, dy2)
            x1, dx2, of_f = self._undone(f, x2, y1, dy2, dx1)
            found = {
                i: transpose(add_n([of[i] for of in (of_g, of_f) if i in of]), graph.tensor(i).shape)
                for i in dict.fromkeys([*of_g, *of_f])
            }
            block.carry_in = tuple(s.id for s in states)
            block.carry_out = tuple(x.id for x in (x1, x2, dx1, dx2))
            result = self._outward(body, block, found)
        closed = graph.close_loop(block, init)
        return [*zip(node.inputs, closed[2:], strict=True), *self._widened(result)]

    def _undone(
        self, half: Half, kept: Tensor, changed: Tensor, dkept: Tensor, dchanged: Tensor
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """One half, changed = x + half(kept), backwards.

        Returns:
          x; the gradient of kept; the gradients of what half reads besides, by tensor of the forward.
        """
        graph = self.graph
        again = Replay(graph, {half.argument: kept})
        again.run(half.nodes)
        result = again.tensors[half.result]
        with graph.phase(Phase.RECOMPUTE):
            x = changed - result
        sources = {new.id: old for old, new in again.tensors.items()}
        self.needed.add(kept.id)
        self.needed.update(new for new, old in sources.items() if old in self.needed)
        seeds = {kept.id: [dkept]}
        seeds.setdefault(result.id, []).append(dchanged)
        found = self.run(seeds, again.nodes)
        return x, found.pop(kept.id), {sources.get(i, i): dx for i, dx in found.items()}

    def _outward(self, body: Block, block: Block, found: dict[int, Tensor]) -> list[tuple[int, Tensor]]:
        """Gradients that leave the loop: stacked for sliced inputs, before they are widened; summed for
        tensors read from outside."""
        graph = self.graph
        out: list[tuple[int, Tensor]] = []
        sliced = {inner: outer for outer, inner in body.sliced}
        for i, dx in found.items():
            if i in sliced and i in self.needed:
                stack = graph.tensor(sliced[i]).shape
                longer = several(graph.tensor(i).shape, stack) or stack.dims[0] != body.dim
                whole = stack.dims[0] if longer else None
                out.append((sliced[i], graph.stack_output(block, unwidened(graph.visible(dx)), whole)))
            elif i in self.needed and body not in graph.around(graph.blocks[graph.tensor(i).block]):
                out.append((i, graph.sum_output(block, graph.visible(dx))))
        return out

    def _widened(self, found: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor | None]]:
        """Gradients in the dtype of what they are of."""
        return [(i, dx.cast(self.graph.tensor(i).dtype)) for i, dx in found]
