"""The memory that values of a program share, and when it is taken and freed: the one answer for whoever
counts bytes.

As on a device that knows ahead of time what runs:
  (1) a rename or reshape lies in its operand's memory
  (2) what is read from a variable, and what is written to it, lies in the variable's memory
  (3) memory is free after the last instruction of its block that touches any value in it; a block frees only
      what it makes, for its loop may run it again
  (4) an element-wise operation or an all-reduce writes over an operand of the result's size that is free
      after it
  (5) a loop takes the memory of its results before it begins, and that of one iteration's carries and parts
  (6) what a carry starts from is free once the first iteration has copied it, unless it is read otherwise
  (7) what an iteration hands out has been copied at its end; what it adds to a sum is added once it is made,
      by a message as it comes in: waiting for the message holds nothing
  (8) a stack, or a branch's sum, that only a sum of the loop around reads (`Program.added`) lies in that sum
  (9) what lies in the host's memory takes none of the device's
  (10) parts that are joined without work (`Program.joined`) lie in the whole from the start
  (11) a carry of which an iteration only writes parts (`Op.in_place`) lies in what the loop makes
       of it, and that in what it starts from, if nothing else reads this
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from mesh_tf_core.ir.program import AllReduce, Done, Instr, Local, Loop, Program, ReadVariable, WriteVariable
from mesh_tf_core.ir.values import every

ValueSize = Callable[[int], int]
"""Value id -> bytes of the piece on one device."""
Memories = tuple[int, ...]
"""Ids of values with memory of their own."""


@dataclass(frozen=True, slots=True)
class Span:
    """The memory that one instruction allocates and frees.

    Attributes:
      takes: held from here on.
      frees: free once it has run; after the last iteration of a loop.
      copied: of a loop, free once the first iteration has begun.
      enters: of a loop, held through all iterations.
      leaves: of a loop, free at the end of every iteration.
    """

    takes: Memories
    frees: Memories
    copied: Memories = ()
    enters: Memories = ()
    leaves: Memories = ()


class Liveness:
    """The memory of one program; see the module's text.

    Args:
      shared: value -> another value whose memory it uses, in addition to (1).
      nowhere: values that have no memory.
      renames: rule (1) holds; else every name is counted for itself.
    """

    def __init__(
        self,
        program: Program,
        shared: Mapping[int, int] | None = None,
        nowhere: Set[int] = frozenset(),
        renames: bool = True,
    ) -> None:
        self.program, self._nowhere = program, {*nowhere, *(v.id for v in program.values if v.host)}
        self._shared = {**(shared or {}), **program.joined, **program.added}
        self._renames = renames
        self._memory: dict[int, int] = {}
        self._spans: dict[int, Span] = {}
        for instr, _ in program.walk():
            self._place(instr)
        self._hand_on(program.code, program.results.values())
        self._plan(program.code, program.results.values())

    def memory(self, id: int) -> int:
        """The value whose memory a value uses."""
        return self._memory.get(id, id)

    def has(self, id: int) -> bool:
        """True if a value has memory of its own."""
        return self.memory(id) == id and id not in self._nowhere

    def span(self, instr: Instr) -> Span:
        return self._spans[id(instr)]

    def names(self) -> dict[int, list[int]]:
        """Memory -> all values that lie in it, where these are several or another one."""
        found: dict[int, list[int]] = {}
        for value, memory in self._memory.items():
            found.setdefault(memory, [memory]).append(value)
        return found

    def _place(self, instr: Instr) -> None:
        """Rules (1), (2), (8), (10) and (11)."""
        joined = self.program.joined
        free = self._renames and isinstance(instr, Local) and instr.op.free and instr.inputs
        for o in instr.outputs:
            source = instr.inputs[0] if free and instr.inputs[0] not in joined else self._shared.get(o)
            if source is not None:
                self._memory[o] = self.memory(source)
        if isinstance(instr, Loop):
            self._memory.update((i, self.memory(final)) for i, final in _written(instr))
        if isinstance(instr, ReadVariable):
            self._nowhere.update(instr.outputs)
        elif isinstance(instr, WriteVariable):
            self._nowhere.add(self.memory(instr.inputs[0]))

    def _hand_on(self, code: Sequence[Instr], leaving: Iterable[int]) -> None:
        """Rule (11) from one loop to the next."""
        made = {self.memory(o) for instr in code for o in instr.outputs} - self._nowhere
        last = {self.memory(i): n for n, instr in enumerate(code) for i in (*instr.inputs, *instr.outputs)}
        last.update((self.memory(i), len(code)) for i in leaving)
        for n, loop in enumerate(code):
            if not isinstance(loop, Loop):
                continue
            read = Counter(self.memory(i) for i in loop.inputs)
            starts = {c.final: self.memory(c.init) for c in loop.carried}
            for final in dict.fromkeys(final for _, final in _written(loop)):
                start, own = starts[final], self.memory(final)
                if start in made and read[start] == 1 and last[start] == n and start != own:
                    self._memory.update((i, start) for i, m in self._memory.items() if m == own)
                    self._memory[own] = start
                    last[start] = last.get(own, n)
            self._hand_on(loop.body, (*(c.leave for c in loop.carried), *(s.inner for s in loop.stacked)))

    def _plan(self, code: Sequence[Instr], leaving: Iterable[int], added: Set[int] = frozenset()) -> None:
        """Rules (3) and (5) to (7) for a block; `leaving` are the values needed after it, `added` those
        that it adds to sums."""
        needed = {self.memory(i) for i in leaving}
        made = {o for instr in code for o in instr.outputs}
        for instr in reversed(code):
            touched = {self.memory(i) for i in (*instr.inputs, *instr.outputs)}
            if isinstance(instr, Done):
                touched -= added
            frees = (touched - needed) & made
            needed |= touched
            takes = self.own((*instr.outputs, *(self.program.joined.get(o, o) for o in instr.outputs)))
            if isinstance(instr, Loop):
                read = {self.memory(i) for i in instr.inputs[len(instr.carried) :]}
                copied = {self.memory(c.init) for c in instr.carried} & frees - read
                copied -= {self.memory(c.final) for c in instr.carried}
                inside = {o for each in instr.body for o in each.outputs}
                kept = *(c.leave for c in instr.carried), *(s.inner for s in instr.stacked)
                leaves = {self.memory(i) for i in kept} & inside
                enters = self.own(instr.entering)
                self._spans[id(instr)] = Span(takes, tuple(frees), tuple(copied), enters, tuple(leaves))
                self._plan(instr.body, kept, {self.memory(r.inner) for r in instr.summed})
            else:
                self._spans[id(instr)] = Span(takes, tuple(frees))

    def own(self, values: Iterable[int]) -> Memories:
        """Those that have memory of their own."""
        return tuple(dict.fromkeys(filter(self.has, values)))


def _written(loop: Loop) -> Iterator[tuple[int, int]]:
    """Rule (11): a carry and what becomes of it in an iteration -> its value after the loop."""
    over = dict(_written_over(loop.body))
    chains = []
    for carry in loop.carried:
        chain, last = [carry.leave], -1
        while chain[-1] in over:
            source, writes = over[chain[-1]]
            chain.append(source)
            last = len(chain) - 1 if writes and last < 0 else last
        if last > 0 and chain[-1] == carry.enter:
            chains.append((carry.final, chain, chain[last:]))
    if chains:
        reads = Counter(i for instr in every(loop.body) for i in instr.inputs)
        for final, chain, before in chains:
            if all(reads[i] == 1 for i in before):
                yield from ((i, final) for i in chain)


def _written_over(code: Iterable[Instr]) -> Iterator[tuple[int, tuple[int, bool]]]:
    """Values that may lie in the memory of another one -> that one, and whether parts of it are written."""
    for instr in code:
        if isinstance(instr, Local) and instr.inputs and (instr.op.free or instr.op.in_place):
            yield instr.outputs[0], (instr.inputs[0], instr.op.in_place)
        elif isinstance(instr, Loop):
            finals = {final for _, final in _written(instr)}
            yield from ((c.final, (c.init, True)) for c in instr.carried if c.final in finals)


class Held:
    """The bytes that a device holds while a program runs; the caller reports the instructions and the bytes
    of values.

    Attributes:
      bytes: memory -> its bytes, in the order in which they were taken; `total` of all.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.bytes: dict[int, int] = {}
        self.total = 0

    def begins(self, instr: Instr, size: ValueSize) -> list[int]:
        """An instruction begins to run, or a loop is about to; returns the results that take the place of an
        operand, rule (4)."""
        span, held = self.liveness.span(instr), self.bytes
        new = [o for o in span.takes if o not in held]
        self.take(span.takes, size)
        elementwise = isinstance(instr, Local) and instr.op.kind == "elementwise"
        if not span.frees or not (elementwise or isinstance(instr, AllReduce)):
            return []
        free = [held[i] for i in span.frees if i in held and i not in instr.outputs]
        over = []
        for o in new:
            if held[o] in free:
                free.remove(held[o])
                over.append(o)
        return over

    def enters(self, loop: Loop, size: ValueSize) -> None:
        """The first iteration of a loop begins."""
        span = self.liveness.span(loop)
        self._free(span.copied)
        self.take(span.enters, size)

    def iterated(self, loop: Loop) -> None:
        """An iteration has ended."""
        self._free(self.liveness.span(loop).leaves)

    def ends(self, instr: Instr) -> None:
        """An instruction, or the last iteration of a loop, has run."""
        span = self.liveness.span(instr)
        self._free(span.enters)
        self._free(span.frees)

    def take(self, memories: Iterable[int], size: ValueSize) -> None:
        """Memory is taken, but for what is held already."""
        for i in memories:
            if i not in self.bytes:
                self.bytes[i] = size(i)
                self.total += self.bytes[i]

    def _free(self, memories: Memories) -> None:
        for i in memories:
            self.total -= self.bytes.pop(i, 0)
