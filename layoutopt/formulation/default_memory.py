"""Memory by natural sharding alone: every value has as many bytes as its dimensions' splits leave of it.

    use_t(x) = sum over the values v alive at t of bytes(v) / prod over the dimensions d of v of ways(x_d)

This is the estimate of Mesh-TensorFlow's `auto_mtf`: no kernels, no moved copies, no separate storage. It
needs no lowering, so it quickly finds layouts with little memory; it bounds nothing.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from layoutopt.formulation.held_bytes import undominated
from layoutopt.formulation.shared import SharedContext
from layoutopt.formulation.tables import assignments
from layoutopt.solver import ResourceRow, RowTerm, Sparse
from layoutopt.space.decisions import Decisions
from layoutopt.space.recompute import RunsAgain, again_in
from mesh_tf_core.ir.liveness import Held, Liveness
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Instr, Loop, Program


class NaturalMemory:
    """The rows of one problem, as in `MemoryConstraints`, with other counts."""

    def __init__(self, context: SharedContext, mesh: Mesh, decided: Decisions, names: Sequence[str]) -> None:
        self.dependencies, self.mesh, self.decided, self.names = context.dependencies, mesh, decided, names
        self.always = again_in(decided.read({})[1])
        self._program = context.program(self.always)
        self._rows: tuple[ResourceRow, ...] | None = None

    def rows(self, again: RunsAgain = frozenset()) -> tuple[ResourceRow, ...]:
        """One row for every point of the step that no other dominates, whatever runs again."""
        if self._rows is None:
            kinds: dict[tuple[str, ...], int] = {}
            counts = [
                Counter({kinds.setdefault(names, len(kinds)): size for names, size in held.items()})
                for held in _held(self._program)
            ]
            sizes = np.array([[held[kind] for kind in range(len(kinds))] for held in counts])
            tables = [self._table(names) for names in kinds]
            self._rows = tuple(self._row(tables, sizes[point]) for point in undominated(sizes))
        return self._rows

    def point(self, again: RunsAgain, node: int, phase: str, choices: Sequence[int]) -> None:
        """None: the further memory of a layout is not known by its parts."""

    def _row(self, tables: Sequence[RowTerm], sizes: np.ndarray) -> ResourceRow:
        entries = []
        for kind in np.flatnonzero(sizes).tolist():
            scope, table = tables[kind].scope, tables[kind].table
            assert isinstance(table, Sparse)
            entries.append(RowTerm(scope, Sparse(table.assignments, table.values * sizes[kind])))
        return ResourceRow("memory by natural sharding", math.inf, tuple(entries))

    def _table(self, names: Sequence[str]) -> RowTerm:
        """How much of a value with these dimensions a device has."""
        options = self.decided.options
        free = [n for n in names if n in self.names]
        given = options.keys() - {*self.names, *self.decided.stages}  # the program has its stages apart
        fixed = math.prod(self.mesh.group_size(options[n][0]) for n in names if n in given)
        listed, shares = [], []
        for chosen in assignments(free, [free], options):
            listed.append([options[n].index(axes) for n, axes in zip(free, chosen, strict=True)])
            shares.append(1 / (fixed * math.prod(map(self.mesh.group_size, chosen))))
        table = Sparse(np.array(listed, np.int64).reshape(len(listed), len(free)), np.array(shares))
        return RowTerm(tuple(self.names.index(n) for n in free), table)


def _held(program: Program) -> list[Counter[tuple[str, ...]]]:
    """What every point of a program holds: dimension names -> bytes of the values with these."""
    variables: Counter[tuple[str, ...]] = Counter()
    for stored in program.variables.values():
        variables[stored.value.shape.names] += stored.value.local_bytes(program.mesh)
    now, found = Held(Liveness(program)), list[Counter[tuple[str, ...]]]()

    def runs(instr: Instr) -> None:
        over = now.begins(instr, lambda i: program.local(i).bytes)
        held = Counter(variables)
        for i, size in now.bytes.items():
            if i not in over:
                held[program.values[i].shape.names] += size
        found.append(held)
        if isinstance(instr, Loop):
            now.enters(instr, lambda i: program.local(i).bytes)
            for each in instr.body:
                runs(each)
            now.iterated(instr)
        now.ends(instr)

    for instr in program.code:
        runs(instr)
    return found
