"""What every point of a step holds under any layout, on any mesh: variables, optimizer state, saved
activations, gradients, temporaries. (`memory_constraints` makes tables over the decisions of it.)

Copies that only some layouts need are counted where a node makes them for itself
(`memory_transients`). How much of a value there is depends on its dimensions, and further:

  variable v         split further (as the state of v) from stage 3 on
  state of v         split further from stage 1 on
  gradient of v      split further from stage 1 on while v is updated; before that, if a loop makes it, from 2
  its casts          a sum that is scattered (stage 1, in a loop 2) is scattered before it is cast: until then
                     only the narrow value exists
  part of v          a layer's piece or a cast: split further from stage 3 on; all casts of a loop's pieces
                     where they are kept
  gathered v         a whole copy from stage 3 on, from its first reader to its last
  update of v        split further from stage 1 on
  saved by a loop    gone when the loop is recomputed
  result of softmax  and of other operations along a dimension: gone where it is split, for then smaller
                     operations run instead, in place
  under another      of that other shape, if only one is still read; else gone where dimensions are split that
                     only its other names or shapes have (see `aliases`)
  elementwise y      gone where it has the size of an operand that is smaller while nothing is split
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property

import numpy as np

from costmodels.liveness import Alive, alive
from layoutopt.formulation.aliases import aliases
from layoutopt.formulation.dependencies import Dependencies
from layoutopt.formulation.memory_gradients import NEVER, gradients
from layoutopt.formulation.memory_shares import Kind
from layoutopt.formulation.memory_transients import Moves, moved_dims
from layoutopt.space.recompute import recompute_name
from layoutopt.space.storage import storage_class, stored_classes
from mesh_tf_core.ir.blocks import Block
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.program import Instr, Local, Loop, Program, Value
from mesh_tf_core.lower.rematerialization import stands_beside_backward

Key = tuple[str, int]
"""What is counted: ("tensor", its id), ("copy", id of the tensor that is moved), ("inside", node)."""
Held = tuple[Kind, Shape, int]
"""What is alive: of which kind, the shape, the bytes of an element."""
Sizes = tuple[tuple[Kind, Shape, int], ...]
"""Of each kind the bytes in all; of values that lie as a variable does, the bytes per element of a shape."""


class Points:
    """The points of one program, in which nothing is split and the loops `again` run again.

    Args:
      fuses: the compiler makes kernels of several operations.
    """

    def __init__(
        self, dependencies: Dependencies, program: Program, again: frozenset[str], fuses: bool
    ) -> None:
        self.graph, self.program, self.dependencies = dependencies.graph, program, dependencies
        graph, self.classes = self.graph, stored_classes(self.graph)
        self.saved = {
            outer: name for b in graph.blocks for outer in b.saved.values() if (name := self._freed(b, outer))
        }
        for block in graph.blocks:
            self.saved.update(
                {inner: self.saved[outer] for outer, inner in block.sliced if outer in self.saved}
            )
        gone = set(map(recompute_name, again))
        self.saved = {tensor: name for tensor, name in self.saved.items() if name not in gone}
        self.instrs = [instr for instr, _ in program.walk()]
        self.maker = {o: i for i in self.instrs for o in i.outputs}
        self.origin = {o: i.origin for o, i in self.maker.items()}
        self.nodes = {n.index: n for n, _ in graph.walk()}
        self.gradients = gradients(self.dependencies, self._classed)
        self.of_tensor: dict[int, list[int]] = defaultdict(list)
        self.of_owner: dict[str, list[int]] = defaultdict(list)
        for value in program.values:
            self.of_tensor[value.tensor].append(value.id)
            if value.tensor in self.gradients:
                self.of_owner[self.gradients[value.tensor].variable].append(value.id)
        self.trace = alive(program, fuses)
        self.aliases = aliases(program)
        self.given = {s.inner for loop in self.instrs if isinstance(loop, Loop) for s in loop.sliced}
        self.whole = self._gathered()
        self.held: list[Held] = []
        self._numbers: dict[Held, int] = {}
        self._steady: dict[tuple[int, tuple[str, ...], int | None], tuple[int, ...]] = {}
        self._dims: dict[Hashable, tuple[str, ...]] = {}
        self.fuses = fuses

    @cached_property
    def largest(self) -> tuple[tuple[str, Sizes], ...]:
        """The points that no other dominates: their names, and what they hold."""
        found = (self.trace[i] for i in undominated(self._counts()))
        return tuple((f"memory at {p.name} #{p.position}", self.holds(p)) for p in found)

    def holds(self, point: Alive) -> Sizes:
        """All that a point holds."""
        held = Counter(self._base)
        for found in self._parts(point).values():
            held.update(found)
        return self._sizes(held)

    def parts(self, point: Alive) -> dict[Key, Sizes]:
        """What a point holds besides the variables, by what it is."""
        return {key: self._sizes(held) for key, held in self._parts(point).items()}

    def _number(self, held: Held) -> int:
        """What stands for `held`: points hold few different things, each of them often."""
        if held not in self._numbers:
            self._numbers[held] = len(self.held)
            self.held.append(held)
        return self._numbers[held]

    def _sizes(self, held: Counter[int]) -> Sizes:
        sizes: Counter[tuple[Kind, Shape]] = Counter()
        for number, count in held.items():
            kind, shape, element = self.held[number]
            unit = shape if kind.variable else Shape()
            sizes[kind, unit] += count * element * (1 if kind.variable else shape.size)
        return tuple((kind, unit, size) for (kind, unit), size in sizes.items())

    @cached_property
    def _base(self) -> Counter[int]:
        """The variables."""
        base: Counter[int] = Counter()
        for stored in self.program.variables.values():
            v = stored.variable
            owner, stage = (v.slot_of, 1) if v.slot_of else (v.name, 3)
            kind = Kind(v.shape.names, owner if self._classed(owner) else None, stage)
            base[self._number((kind, v.shape, itemsize(v.dtype)))] += 1
        return base

    def _counts(self) -> np.ndarray:
        """How much of everything each point holds besides the variables, of shape (points, things)."""
        points = []
        for point in self.trace:
            once = [number for _, numbers in self._values(point) for number in numbers]
            once += map(self._number, (*self.whole[point.position].values(), *self._besides(point)))
            points.append((once, self._kept(point)))
        counts = np.zeros((len(points), len(self.held)), np.int64)
        for held, (once, kept) in zip(counts, points, strict=True):
            np.add.at(held, once, 1)
            for _, number, times in kept:
                held[number] += times
        return counts

    def _parts(self, point: Alive) -> dict[Key, Counter[int]]:
        """What a point holds besides the variables."""
        parts: dict[Key, Counter[int]] = defaultdict(Counter)
        for i, numbers in self._values(point):
            parts[self._key(i)].update(numbers)
        for i, number, times in self._kept(point):
            parts[self._key(i)][number] += times
        for i, whole in self.whole[point.position].items():
            parts["copy", self.program.values[i].tensor][self._number(whole)] += 1
        for besides in self._besides(point):
            parts["inside", point.node][self._number(besides)] += 1
        return parts

    def _besides(self, point: Alive) -> list[Held]:
        """What the node of a point holds besides its operands and results."""
        node, instr = self.nodes[point.node], self.instrs[point.position]
        if not isinstance(instr, Local) or type(instr.op) is not type(node.op) or point.phase == "update":
            return []
        types = tuple(self.graph.tensor(t).type for t in (*node.inputs, *node.outputs))
        if (node.op, types) not in self._dims:
            self._dims[node.op, types] = moved_dims(self.graph, node)
        if not (dims := self._dims[node.op, types]):
            return []
        roots = tuple(map(self._root, instr.inputs))
        dying = tuple(r in point.dying or r not in point.values for r in roots)
        counted = all(o in point.values for o in instr.outputs)
        moves = Moves(node.op, types, dying, counted, self.fuses, dims, node)
        return [(Kind((), moves=moves), Shape(), 1)]

    def _root(self, value: int) -> int:
        """The value in whose memory a rename or reshape lies."""
        while isinstance(made := self.maker.get(value), Local) and made.op.free and made.inputs:
            value = made.inputs[0]
        return value

    def _kept(self, point: Alive) -> list[tuple[int, int, int]]:
        """The casts that are kept for all iterations: (value, what it counts as, how often)."""
        found = []
        for i, times in point.kept:
            value = self.program.values[i]
            kind = Kind(value.shape.names, self._variable_of(i), 3)
            found.append((i, self._number((kind, value.shape, itemsize(value.dtype))), times))
        return found

    def _values(self, point: Alive) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The values alive at a point, and what each counts as there: the same as everywhere but where
        something is done with it, and where only its other names are still read."""
        here, beyond, instead = self._concerned(point), self.aliases.beyond, self.aliases.instead
        for i in point.values:
            if i in here:
                yield i, self._held_as(self.program.values[i], point)
                continue
            state = i, beyond(i, point.position), instead(i, point.position)
            if state not in self._steady:
                self._steady[state] = self._held_as(self.program.values[i], point)
            yield i, self._steady[state]

    def _concerned(self, point: Alive) -> set[int]:
        """The values that may count as something else at a point than elsewhere: what runs there makes,
        gathers or casts them, or updates with them."""
        found = {*self.instrs[point.position].outputs, *self.whole[point.position]}
        node = self.nodes[point.node]
        if node.op.converts:
            found.update(i for t in node.inputs for i in self.of_tensor[t])
        if point.phase == "update":
            found.update(self.of_owner[point.scope])
        return found

    def _key(self, value: int) -> Key:
        tensor = self.program.values[value].tensor
        if tensor >= 0:
            return "tensor", tensor
        origin = self.origin.get(value)
        return "inside", -1 if origin is None else origin.node

    def _gathered(self) -> list[dict[int, Held]]:
        """For every point the gathered copies, by the value that is gathered: from its first to its last
        reader in a block."""
        found: list[dict[int, Held]] = [{} for _ in self.trace]
        readers: dict[tuple[int, int], list[int]] = {}

        def visit(code: Sequence[Instr], position: int, block: int) -> int:
            for instr in code:
                if isinstance(instr, Loop):
                    position = visit(instr.body, position + 1, position + 1)
                    continue
                if isinstance(instr, Local) and instr.origin.phase != "update":
                    cast = instr.op.converts and self._variable_of(instr.outputs[0])
                    for i in instr.inputs if not cast else ():
                        readers.setdefault((block, i), []).append(position)
                position += 1
            return position

        visit(self.program.code, 0, 0)
        for (_, i), positions in readers.items():
            value, name = self.program.values[i], self._variable_of(i)
            if name:
                held = Kind(value.shape.names, name, 3, gathered=True), value.shape, itemsize(value.dtype)
                for position in range(positions[0], positions[-1] + 1):
                    found[position][i] = held
        return found

    def _variable_of(self, value: int) -> str | None:
        """The variable that a value is, or is a part or cast of, if its storage is decided."""
        owner = self.dependencies.owner.get(self.program.values[value].tensor)
        return owner if self._classed(owner) else None

    def _classed(self, name: str | None) -> bool:
        variable = self.graph.variables.get(name or "")
        return variable is not None and storage_class(variable) in self.classes

    def _freed(self, block: Block, stack: int) -> str | None:
        """The recompute decision without which a loop saves `stack`: its own, or that of the loop around."""
        while not stands_beside_backward(block, self.graph) and block.parent is not None:
            block = self.graph.blocks[block.parent]
            if stack not in block.saved:
                return None
            stack = block.saved[stack]
        return recompute_name(block.dim.name) if block.dim else None

    def _held_as(self, value: Value, point: Alive) -> tuple[int, ...]:
        return tuple(map(self._number, self._things(value, point)))

    def _things(self, value: Value, point: Alive) -> list[Held]:
        """What a value counts as while the node of a point runs."""
        names, shape, element = value.shape.names, value.shape, itemsize(value.dtype)
        origin = self.origin.get(value.id)
        part_of = self._variable_of(value.id)
        if part_of is not None:
            # What a loop is given part by part stays for a whole iteration.
            replaced = value.id in self.whole[point.position] and value.id not in self.given
            return [(Kind(names, part_of, 3, replaced=replaced), shape, element)]
        if value.tensor in self.gradients:
            return self._gradient(value, point)
        if origin is not None and origin.phase == "update" and self._classed(origin.scope) and names:
            return [(Kind(names, origin.scope, 1), shape, element)]
        loop = self.saved.get(value.tensor)
        node = self.nodes[point.node]
        if value.id not in self.instrs[point.position].outputs:
            instead = self.aliases.instead(value.id, point.position)
            if instead is not None:
                shape = self.program.values[instead].shape
                return [(Kind(shape.names, loop=loop), shape, element)]
            unless = self.aliases.beyond(value.id, point.position)
            return [(Kind(names, loop=loop, unless=unless), shape, element)]
        types = [self.graph.tensor(i).type for i in node.inputs]
        if node.op.expands():
            # Where these dimensions are split, smaller operations run instead, some of them in place.
            kind = Kind(names, loop=loop, unless=tuple(node.op.roles(*types).whole))
        elif node.op.kind == "elementwise":
            kind = Kind(names, loop=loop, rivals=self._rivals(value, types))
        else:
            kind = Kind(names, loop=loop)
        return [(kind, shape, element)]

    def _rivals(self, value: Value, types: Sequence[TensorType]) -> tuple[tuple[Shape, int], ...]:
        """Operands of another size, which some layouts make the same."""
        own = value.shape.size * itemsize(value.dtype)
        found = {(t.shape, itemsize(t.dtype)) for t in types if t.shape.size * itemsize(t.dtype) < own}
        return ((value.shape, itemsize(value.dtype)), *sorted(found, key=str)) if found else ()

    def _gradient(self, value: Value, point: Alive) -> list[Held]:
        """A gradient, or what loops or casts make one of."""
        names, shape, element = value.shape.names, value.shape, itemsize(value.dtype)
        gradient = self.gradients[value.tensor]
        owner, split, narrow = gradient.variable, gradient.split, gradient.narrow
        if point.phase == "update" and point.scope == owner:
            return [(Kind(names, owner, 1), shape, element)]
        # A sum that is scattered is scattered before it is cast: the wide value exists in parts only, later.
        scattered = tuple(range(gradient.scattered, NEVER))
        node = self.nodes[point.node]
        if value.tensor in node.inputs and node.op.converts and node.outputs[0] in self.gradients:
            return [(Kind(names, owner, split, absent=scattered), shape, element)]
        found = [(Kind(names, owner, split), shape, narrow)]
        if element > narrow:
            found.append((Kind(names, owner, split, absent=scattered), shape, element - narrow))
        return found


def undominated(counts: np.ndarray) -> list[int]:
    """The points that hold something which no other single point holds as well, those that hold most first.

    Args:
      counts: how much of everything each point holds, of shape (points, things).
    """
    first = np.sort(np.unique(counts, axis=0, return_index=True)[1])
    order = first[np.argsort(-counts[first].sum(axis=1), kind="stable")]
    kept, found = np.empty_like(counts[order]), list[int]()
    for row in order.tolist():
        if not (kept[: len(found)] >= counts[row]).all(axis=1).any():
            kept[len(found)] = counts[row]
            found.append(row)
    return found
