"""The points of a step with the tensors alive at each, whatever is split, and the clusters that make them.

The step is lowered once without splits, and `mesh_tf_core.ir.liveness` walks it with every name of a tensor
counted separately, because a layout may give a rename or a reshape its own memory. A tensor that is alive at
a point there is alive at the corresponding point under any layout. A row may therefore count the bytes of the
cluster that computes it (`layoutopt.formulation.lifetimes`). Nothing here depends on splits or sizes.

Two kinds of values are counted differently, because they depend on the layout: copies that are gathered for
the readers of a block, and values that exist only during one operation.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

from costmodels.held_by_frameworks import gradients
from costmodels.liveness import MemoryRules, kernel_memory
from costmodels.stage_ends import StageEnd
from layoutopt.formulation.held_bytes import Counted, HeldBytes, PointKey, fading, last_reads
from layoutopt.formulation.lifetimes import ByteRule, stacks_of, sums_of
from layoutopt.formulation.makers import Makers, TensorMaker
from mesh_tf_core.ir.blocks import Block, loop_name
from mesh_tf_core.ir.liveness import Held, Liveness
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import HostLoad, Instr, Local, Loop, Program
from mesh_tf_core.lower.nodes import moved_dims, pass_of
from mesh_tf_core.lower.remat_policy import Policies


class ProgramPoints:
    """The points of one program in which nothing is split: its instructions, loops before their bodies.

    Args:
      rules: of the compiler.
      recompute: the loops that run again in it.
      end: the stage, where each is a program of its own.

    Attributes:
      instrs: the instruction at each point.
      counted: their values besides the variables.
    """

    def __init__(
        self, makers: Makers, program: Program, rules: MemoryRules, recompute: Policies, end: StageEnd
    ) -> None:
        self.makers, self.program, self.end = makers, program, end
        self._sizes = rules.sizes(program, end)
        self._second = [cluster.second_runs(recompute) for cluster in makers.clusters]
        self.instrs, self.counted, self._backward = list[Instr](), list[Counted](), list[Block]()
        kernels, self._single = kernel_memory(program, rules, anyhow=True, end=end), rules.work(program)
        self._runs_of = {n: run for n, run in makers.runs.items() if self._single.has(n, end)}
        self._full = Liveness(program, kernels.shared, kernels.nowhere)
        self._own = Liveness(program, kernels.made_of, kernels.nowhere, renames=False)
        self._twice = {*kernels.twice, *kernels.twice.values()}
        self._maker = {o: instr.origin.node for instr, _ in program.walk() for o in instr.outputs}
        self._readers = self._read()
        self._fading = fading(program, self._own, makers.runs)
        self._ends: dict[int, set[int]] = defaultdict(set)
        for value, found in self._fading.items():
            self._edges[found.since].add(value)
            for _, instr in (reader for reader in found.readers if reader[0] >= found.since):
                self._ends[id(instr)].add(value)
        # What a value is called: state by its tensor in the loop, stacks and parts by what they are of.
        self._enters, self._stacked = dict[int, int](), dict[int, tuple[int, int]]()
        self._part, self._last = dict[int, tuple[int, float]](), dict[int, int]()
        self._again, self._loaded = dict[int, str](), set[int]()
        blocks = makers.graph.blocks
        saved = {outer: inner for block in blocks for inner, outer in block.saved.items()}
        twins = {now: saved[then] for b in blocks for then, now in b.captured.items() if then in saved}
        self._saved = {**saved, **twins}
        self._alive, self._since = dict[int, list[int]](), dict[int, tuple[int, PointKey, HeldBytes]]()
        self._changing, self._died, self._starts = set[int](), dict[int, int](), list[int]()
        self._carries()
        self._kept = self._last_reads()
        self._walk(gradients(program)[1] if rules.buffers else {})
        self._copies()
        self._casts(kernels.casts)

    def variables(self) -> Iterator[HeldBytes]:
        """The variables: every point holds them."""
        for name in sorted(self.program.variables.keys() - self._single.of_others(self.end)):
            cluster, like = self.makers.variable[name]
            yield HeldBytes(ByteRule.VARIABLE, cluster, 0, like, "", 1.0)

    def at(self, point: int) -> Iterator[tuple[PointKey, HeldBytes]]:
        """The tensors at a point besides the variables."""
        return ((c.key, c.thing) for c in self.counted if c.first <= point <= c.last)

    def running(self, node: int, phase: str) -> list[int]:
        """The points at which a node runs."""
        return [i for i, at in enumerate(self.instrs) if (at.origin.node, at.origin.phase) == (node, phase)]

    # -- the walk --------------------------------------------------------------------------------------------

    def _walk(self, early: Mapping[int, int]) -> None:
        now = Held(self._own)
        now.take(self._own.own(map(self._own.memory, early)), lambda _: 1)
        # Until it is made, a buffer counts as its gradient: where that is stored split, there is no more.
        self._unmade = {self._own.memory(v): self._thing(of, ByteRule.ANY) for v, of in early.items()}
        for instr in self.program.code:
            self._starts.append(len(self.instrs))
            self._runs(instr, now)
        self._starts.append(len(self.instrs))
        for value in list(self._since):
            self._close(value, len(self.instrs) - 1)

    def _runs(self, instr: Instr, now: Held) -> None:
        now.begins(instr, lambda _: 1)
        if isinstance(instr, HostLoad):  # what a loop keeps on the hosts is as its first run made it
            self._loaded.update(instr.outputs)
        elif run := self._run(instr):
            self._again.update(dict.fromkeys(instr.outputs, run))
        self._point(instr, now)
        self.instrs.append(instr)
        if isinstance(instr, Loop):
            now.enters(instr, lambda _: 1)
            body = self.makers.nodes[instr.origin.node].body
            assert body is not None
            self._backward += [body] * (body.forward is not None)
            for each in instr.body:
                self._runs(each, now)
            if body.forward is not None:
                self._backward.pop()
            now.iterated(instr)
        now.ends(instr)

    def _carries(self) -> None:
        tensors = [value.tensor for value in self.program.values]
        for loop in self.program.every(Loop):
            body = self.makers.nodes[loop.origin.node].body
            assert body is not None
            for carry, t in zip(loop.carried, body.carry_in, strict=False):
                if tensors[carry.enter] < 0:
                    self._enters[carry.enter] = tensors[carry.enter] = t
            for s in loop.sliced:
                share = self._sizes.first(self.program.values[s.outer])
                self._part[s.inner] = s.outer, self.program.local(s.outer).shape.sizes[0] * share
        self._stacked = stacks_of(self.program, tensors)
        self._sums = sums_of(self.program, tensors)

    def _run(self, instr: Instr) -> str:
        """The second run in which it is: it stands in the backward of a loop that has it in its own body."""
        node = instr.origin.node
        home = [*self.makers.graph.around(self.makers.dependencies.block_of[node])]
        around = next((b.forward for b in reversed(self._backward) if b.forward in home), None)
        runs = self.makers.runs.get(node)
        if around is None or runs is None:
            return ""
        names = [second.again for second in self._second[runs[0]] if runs[1] in second.nodes]
        own = loop_name(around, self.makers.graph)
        return next((name for name in names if name == own), names[0] if names else "")

    def _point(self, instr: Instr, now: Held) -> None:
        """Notes what changes at a point, of all that is alive."""
        point, groups = len(self.instrs), self._alive
        made = {i for i in map(self._own.memory, instr.outputs) if self._unmade.pop(i, None)}
        gone = self._last.keys() - now.bytes.keys()
        new = [v for v in now.bytes if v not in self._last]
        for v in gone:
            root = self._last.pop(v)
            groups[root].remove(v)
            self._close(v, point - 1)
        for v in new:
            root = self._last[v] = self._full.memory(v)
            groups.setdefault(root, []).append(v)
        special = dict(self._touched(instr))
        dirty = {v for g in map(self._full.memory, (*gone, *new)) for v in groups[g]}
        dirty |= self._changing | special.keys() | self._edges.get(point, set()) | made
        for v in dirty:
            if v in self._last:
                self._note(v, point, special[v] if v in special else self._steady(v, point))
        self._changing = set(special)
        runs = self._runs_of.get(instr.origin.node)
        if runs is not None and isinstance(instr, Local):
            thing = HeldBytes(ByteRule.INSIDE, *runs, self._dying(instr), self._run(instr), 1.0)
            self.counted.append(Counted(point, point, ("inside", instr.origin.node), thing))

    def _note(self, value: int, point: int, thing: HeldBytes | None) -> None:
        known = self._since.get(value)
        if known is not None and known[2] != thing:
            self._close(value, point - 1)
            known = None
        if known is None and thing is not None:
            self._since[value] = point, self._key(value), thing

    def _close(self, value: int, last: int) -> None:
        found = self._since.pop(value, None)
        if found is not None and found[0] <= last:
            self.counted.append(Counted(found[0], last, *found[1:]))

    # -- values ----------------------------------------------------------------------------------------------

    def _tensor(self, value: int) -> int:
        return self.program.values[value].tensor

    def _key(self, value: int) -> PointKey:
        tensor = self._tensor(value)
        return ("tensor", tensor) if tensor >= 0 else ("inside", self._maker.get(value, -1))

    def _steady(self, value: int, point: int) -> HeldBytes | None:
        """What a value counts as where nothing is done with it."""
        if value in self._unmade:
            return self._unmade[value]
        if self._outer(value) in self._stacked:
            return self._thing(value, ByteRule.STACK, self._stacked[self._outer(value)][1])
        found = self._left(value, point, self._around(value, point))
        if found is None or point <= self._kept.get(value, point):
            return found
        return found._replace(reading=ByteRule.KEPT, more=(found.reading, found.more))

    def _left(self, value: int, point: int, found: HeldBytes | None) -> HeldBytes | None:
        """The same once every cluster has read it: 0 if the last one goes on with a copy of its own."""
        fades = self._fading.get(value)
        if fades is None or found is None or found.reading not in (ByteRule.OWN, ByteRule.ANY):
            return found
        before = [instr for at, instr in fades.readers if fades.since <= point and at < point]
        if not before or any(map(self._again.get, before[-1].outputs)):
            return found
        node, tensor = before[-1].origin.node, self._tensor(value)
        (cluster, like), what = self.makers.runs[node], self.makers.given[node].get(tensor)
        if what is None:
            return found
        return HeldBytes(ByteRule.LATER, cluster, what, like, "", 1.0) if self._weighs(value) else None

    def _around(self, value: int, point: int) -> HeldBytes | None:
        """The same, whatever keeps it alive."""
        if value in self._sums or value in self._loaded:
            return self._thing(value, ByteRule.ANY)
        root = self._full.memory(value)
        first = value != root and self._alive[root][0] == value
        if first and self._full.has(root) and root not in self._last:
            # Its memory is that of a value that is not read under its own name any more.
            reading = ByteRule.ANY
        elif self._tensor(value) in self.makers.renamed:
            return None
        else:
            reading = ByteRule.ONCE if value in self._twice else ByteRule.OWN
        if value in self._part:
            return self._thing(value, ByteRule.ANY if reading is ByteRule.OWN else reading)
        home = next((b for b, first, last, _ in self._readers.get(value, ()) if first <= point <= last), None)
        if home is not None and reading is not ByteRule.ONCE:
            return self._thing(value, ByteRule.UNCOPIED, home)
        return self._thing(value, reading)

    def _touched(self, instr: Instr) -> Iterator[tuple[int, HeldBytes | None]]:
        """The values that a point treats otherwise, and what they count as there."""
        node = instr.origin.node
        runs, given = self._runs_of.get(node), self.makers.given.get(node, {})
        if isinstance(instr, Local):
            dying = self._dying(instr)
            made = runs if self._sums.keys().isdisjoint(instr.inputs) else None
            for v in filter(self._last.__contains__, instr.outputs):
                if v not in self._stacked and not instr.op.free:  # else it is its operand, as ever
                    yield v, None if made is None else self._thing(v, ByteRule.RESULT, (made[1], dying))
        if runs is None:
            return
        cluster, like = runs
        mine, updates = set(instr.outputs), instr.origin.phase == Phase.UPDATE
        ends = self._ends.get(id(instr), ())
        for v in self._last if updates else ends:
            what, source = given.get(self._tensor(v)), self._source(v)
            left = v in mine or self._outer(v) in self._stacked or v not in self._last
            if left or what is None or source is None:
                continue
            if updates and source.cluster != cluster:
                thing = HeldBytes(ByteRule.GIVEN, cluster, what, None, "", 1.0)
            elif v in ends:
                thing = HeldBytes(ByteRule.OPERAND, cluster, what, like, self._run(instr), 1.0)
                self._died[v] = len(self.instrs)
            else:
                continue
            yield v, thing if self._weighs(v) else None

    def _weighs(self, value: int) -> bool:
        """Whether no other name of it that is alive stands for its memory."""
        root = self._full.memory(value)
        first = self._alive[root][0] == value and self._full.has(root) and root not in self._last
        return value == root or first

    def _dying(self, instr: Instr) -> frozenset[int]:
        """The operands that die here, as the cluster calls them."""
        given, frees = self.makers.given.get(instr.origin.node, {}), set(self._own.span(instr).frees)
        found = (self._tensor(i) for i in instr.inputs if self._own.memory(i) in frees)
        return frozenset(given[t] for t in found if t in given)

    def _thing(self, value: int, reading: ByteRule, more: Hashable = None) -> HeldBytes | None:
        source = self._source(value)
        if source is None:
            return None
        run = self._again.get(self._outer(value), "")
        return HeldBytes(reading, source.cluster, source.tensor, more, run, source.share)

    def _outer(self, value: int) -> int:
        """The stack that a value is a part of, or itself."""
        while value in self._part:
            value = self._part[value][0]
        return value

    def _source(self, value: int) -> TensorMaker | None:
        """The source of a value, and how much of that it is."""
        share = 1.0
        while value in self._part:
            value, n = self._part[value]
            share /= n
        t = self._enters.get(value, self._sums.get(value, self._tensor(value)))
        t = self._stacked[value][0] if value in self._stacked else t
        if t < 0:
            return None
        if value in self._again or value in self._loaded:
            # What a loop would have saved, it makes anew.
            while t in self.makers.parts and self.makers.parts[t][0] in self._saved:
                t = self._saved[self.makers.parts[t][0]]
        found = self.makers.source(t)
        return None if found is None else found._replace(share=found.share * share)

    # -- copies ----------------------------------------------------------------------------------------------

    def _read(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """A variable's value -> the blocks that read it as the layout says, so gathered where it is stored
        split, once for each pass: node of the loop (or 0), first and last reader, and the last one that never
        needs it moved (-1: none)."""
        found: dict[tuple[int, str, int], tuple[int, int, int]] = {}
        structure, position = self.makers.dependencies, 0

        def visit(code: Sequence[Instr], block: int) -> None:
            nonlocal position
            for instr in code:
                at, position = position, position + 1
                if isinstance(instr, Loop):
                    visit(instr.body, instr.origin.node)
                elif not self._single.has(instr.origin.node, self.end):
                    continue
                elif isinstance(instr, Local) and instr.origin.phase != Phase.UPDATE:
                    casts = instr.op.converts and self._tensor(instr.outputs[0]) in structure.owner
                    way, node = pass_of(instr.origin.phase), self.makers.nodes[instr.origin.node]
                    for i in instr.inputs if not casts else ():
                        tensor = self._tensor(i)
                        if tensor in structure.owner:
                            first, _, as_is = found.get((block, way, i), (at, at, -1))
                            moves = moved_dims(node, tensor, structure.graph, structure.further)
                            found[block, way, i] = first, at, as_is if moves else at

        visit(self.program.code, 0)
        readers: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        self._edges: dict[int, set[int]] = defaultdict(set)
        for (block, _, value), (first, last, as_is) in found.items():
            readers[value].append((block, first, last, as_is))
            self._edges[first].add(value)
            self._edges[last + 1].add(value)
        return readers

    def _last_reads(self) -> dict[int, int]:
        """A value that a loop stacks for backward -> the last point of the loop that reads it."""
        found = last_reads(self.program)
        stacks = [(r.inner, r.outer) for loop in self.program.every(Loop) for r in loop.stacked]
        kept = {i for i, o in stacks if o in self._stacked or self._tensor(o) in self._saved} & found.keys()
        for value in kept:
            self._edges[found[value] + 1].add(value)
        return {value: found[value] for value in kept}

    def _copies(self) -> None:
        """Gathered copies, from their first to their last reader in a block that cannot need them moved, or
        until that counts what it is given."""
        for value, readers in self._readers.items():
            tensor = self._tensor(value)
            for block, first, _, last in readers:
                source = self.makers.gathered.get((block, tensor))
                if source is not None:
                    thing = HeldBytes(ByteRule.COPY, source.cluster, source.tensor, block, "", 1.0)
                    if first <= self._died.get(value, -1) <= last:
                        last = self._died[value] - 1
                    if first <= last:
                        self.counted.append(Counted(first, last, ("copy", tensor), thing))

    def _casts(self, casts: Sequence[tuple[int, Local, int, int]]) -> None:
        """Casts of a variable's parts that are kept for all iterations."""
        first, kept = dict[int, int](), dict[int, tuple[float, int, int]]()
        for position, cast, source, times in casts:
            one = first.setdefault(self._full.memory(source), cast.outputs[0])
            parts = times * self._sizes.first(self.program.values[source])
            kept[one] = parts, kept.get(one, (parts, position))[1], position
        for value, (parts, begin, end) in kept.items():
            thing = self._thing(value, ByteRule.CASTS)
            if thing is not None:
                thing = thing._replace(share=thing.share * parts)
                span = self._starts[begin], self._starts[end + 1] - 1
                self.counted.append(Counted(*span, self._key(value), thing))
