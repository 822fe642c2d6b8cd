"""Counts the bytes that a device holds while a program runs.

An engine reports the instructions that it runs and the bytes of their outputs; `mesh_tf_core.ir.liveness`
decides which of them share memory, and when it is free again.
"""

from collections.abc import Sequence

from mesh_tf_core.ir.liveness import Held, Liveness, ValueSize
from mesh_tf_core.ir.program import Instr, Loop, Program


class Meter:
    """The memory of one device.

    Args:
      variables: bytes of these, held throughout.

    Attributes:
      peak: most bytes held at once, so far.
    """

    def __init__(self, program: Program, variables: int) -> None:
        self.liveness = Liveness(program)
        self.variables = self.peak = variables
        self._held = Held(self.liveness)
        self._names = self.liveness.names()

    def ran(self, instr: Instr, size: ValueSize) -> list[int]:
        """Called after an instruction other than a loop; returns values that are no longer used."""
        over = self._held.begins(instr, size)
        self._count(sum(self._held.bytes[o] for o in over))
        self._held.ends(instr)
        return self._unread(instr)

    def entered(self, loop: Loop, size: ValueSize) -> None:
        """Before the first iteration of a loop; room for its results is taken as it was declared."""
        self._held.begins(loop, size)
        self._count()
        self._held.enters(loop, size)

    def iterated(self, loop: Loop) -> None:
        """Called after an iteration, when its results have been copied."""
        self._held.iterated(loop)

    def left(self, loop: Loop, size: ValueSize) -> list[int]:
        """Called after the last iteration; returns values that are no longer used."""
        for o in loop.outputs:
            declared = self._held.bytes.get(o, size(o))
            if declared != size(o):
                raise ValueError(
                    f"a loop's result has {size(o)} bytes, but {declared} bytes were reserved; please report "
                    "this"
                )
        self._held.ends(loop)
        return self._unread(loop)

    def follow(self, code: Sequence[Instr], size: ValueSize) -> None:
        """Counts a block with values of known sizes, one iteration for all of a loop."""
        for instr in code:
            if isinstance(instr, Loop):
                self.entered(instr, size)
                self.follow(instr.body, size)
                self.iterated(instr)
                self.left(instr, size)
            else:
                self.ran(instr, size)

    def _count(self, over: int = 0) -> None:
        """Notes what is held; `over`: bytes of it that lie in others' place."""
        self.peak = max(self.peak, self.variables + self._held.total - over)

    def _unread(self, instr: Instr) -> list[int]:
        return [name for i in self.liveness.span(instr).frees for name in self._names.get(i, (i,))]
