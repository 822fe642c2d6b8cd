"""Counts the bytes that a device holds while a program runs.

An engine tells which instructions it runs and how many bytes their outputs have; a value is let go after its
last reader. As on a device that is told so ahead of time: an element-wise operation or an all-reduce writes
over an input of the same size that nobody reads later, renames and reshapes take no memory, a variable is
written in place, and a loop keeps room for its results and for one iteration's carries and parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mesh_tf_core.ir.program import AllReduce, Instr, Local, Loop, Program, ReadVariable, WriteVariable

Size = Callable[[int], int]
"""Value id -> bytes of the piece on one device."""


class Meter:
    """The memory of one device.

    Attributes:
      peak: most bytes held at once, so far.
    """

    def __init__(self, program: Program, variables: int) -> None:
        self.program, self.held, self.total, self.peak = program, dict[int, int](), variables, variables
        self._memory: dict[int, int] = {}
        self._names: dict[int, list[int]] = {}
        self._dying: dict[int, set[int]] = {}
        self._stored: set[int] = set()
        for instr, _ in program.walk():
            self._name(instr)
        self._plan(program.code, set(program.results.values()))

    def _name(self, instr: Instr) -> None:
        """Notes which memory values lie in: their own, that of another value, or a variable's."""
        shares = isinstance(instr, Local) and instr.op.free and instr.inputs
        for o in instr.outputs:
            self._memory[o] = self.memory(instr.inputs[0]) if shares else o
            self._names.setdefault(self._memory[o], []).append(o)
        if isinstance(instr, ReadVariable):
            self._stored.update(instr.outputs)
        elif isinstance(instr, WriteVariable):
            self._stored.add(self.memory(instr.inputs[0]))

    def memory(self, id: int) -> int:
        """The value whose memory a value lies in."""
        return self._memory.get(id, id)

    def _plan(self, code: Sequence[Instr], leaving: Iterable[int]) -> None:
        """Finds the last reader of everything that a block makes."""
        needed = {self.memory(i) for i in leaving}
        made = {o for instr in code for o in instr.outputs}
        for instr in reversed(code):
            touched = {self.memory(i) for i in (*instr.inputs, *instr.outputs)}
            self._dying[id(instr)] = (touched - needed) & made
            needed |= touched
            if isinstance(instr, Loop):
                self._plan(instr.body, instr.leaving)

    # -- what happens ----------------------------------------------------------------------------------------

    def ran(self, instr: Instr, size: Size) -> list[int]:
        """An instruction other than a loop has run; returns the values that nobody reads any more."""
        dying = self._dying[id(instr)]
        free = [self.held[i] for i in dying if i in self.held and i not in instr.outputs]
        over = 0
        for o in instr.outputs:
            bytes = self._hold(o, size)
            if bytes in free and _in_place(instr):
                free.remove(bytes)
                over += bytes
        self.peak = max(self.peak, self.total - over)
        return self._let_go(dying)

    def entered(self, loop: Loop, size: Size) -> None:
        """Before the first iteration of a loop; room for its results is taken as it was declared."""
        for o in loop.outputs:
            self._hold(o, size)
        self.peak = max(self.peak, self.total)
        read = {self.memory(i) for i in loop.inputs[len(loop.carried) :]}
        copied = {self.memory(c.init) for c in loop.carried}
        self._let_go((copied & self._dying[id(loop)]) - read)
        for i in loop.entering:
            self._hold(i, size)

    def iterated(self, loop: Loop) -> None:
        """After an iteration: what leaves it has been copied."""
        self._let_go({self.memory(i) for i in loop.leaving} & {o for b in loop.body for o in b.outputs})

    def left(self, loop: Loop, size: Size) -> list[int]:
        """After the last iteration; returns the values that nobody reads any more."""
        for o in loop.outputs:
            if o in self.held and self.held[o] != size(o):
                raise ValueError(f"a loop's result has {size(o)} bytes, room was taken for {self.held[o]}")
        self._let_go(loop.entering)
        return self._let_go(self._dying[id(loop)])

    def follow(self, code: Sequence[Instr], size: Size) -> None:
        """Counts a block whose values' sizes are known, one iteration for all of a loop."""
        for instr in code:
            if isinstance(instr, Loop):
                self.entered(instr, size)
                self.follow(instr.body, size)
                self.iterated(instr)
                self.left(instr, size)
            else:
                self.ran(instr, size)

    def _hold(self, id: int, size: Size) -> int:
        """Takes memory for a value that has its own, and returns its bytes."""
        if self.memory(id) != id or id in self._stored or id in self.held:
            return 0
        self.held[id] = size(id)
        self.total += self.held[id]
        return self.held[id]

    def _let_go(self, memories: Iterable[int]) -> list[int]:
        gone: list[int] = []
        for memory in memories:
            self.total -= self.held.pop(memory, 0)
            gone += self._names.get(memory, [memory])
        return gone


def _in_place(instr: Instr) -> bool:
    return isinstance(instr, AllReduce) or (isinstance(instr, Local) and instr.op.kind == "elementwise")
