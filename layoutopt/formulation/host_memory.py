"""The row of the hosts' memory: bytes of a device on its host, at any time.

    host(x) = sum over the clusters c of m_c H_c(x)

H_c is read off the cluster as it was lowered for its price, so the row counts just the bytes that the program
has there (`Program.host_bytes`), and forbids a layout if and only if the hardware's hosts have less. Of
variables a cluster has those that it writes: others may read them too; of what nobody writes, those that it
reads; of an outer step, those that no step before it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from layoutopt.formulation.outer_step_context import OuterStepContext
from layoutopt.formulation.tables import Index, Table
from layoutopt.solver import ResourceRow, RowTerm, Sparse
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program, WriteVariable
from mesh_tf_core.lower.nodes import assigned


def host_row(
    tables: Sequence[Table], index: Index, limit: float, meetings: Sequence[OuterStepContext] = ()
) -> Iterator[ResourceRow]:
    """The row; none if no choice keeps more than `limit` bytes there.

    Args:
      meetings: the outer steps: host memory that only they use is always counted.
    """
    entries, most = [], 0.0
    known: dict[tuple[int, Mesh, str], int] = {}
    kept = {id(c): each.kept_of(n) for each in meetings for n, c in enumerate(each.clusters)}

    def held(program: Program | None, mesh: Mesh | None, only: str) -> int:
        if program is None or mesh is None:
            return 0
        # A program is lowered once for axes of any sizes.
        key = id(program), mesh, only
        if key not in known:
            own = {only} if only else {i.variable for i in program.code if isinstance(i, WriteVariable)}
            others = () if only or program.outline is None else assigned(program.outline)
            variables = {n: s for n, s in program.variables.items() if n in own or not (only or n in others)}
            known[key] = replace(program, variables=variables, mesh=mesh).host_bytes
        return known[key]

    for table in tables:
        values = np.zeros(len(table.entries))
        for only, times in kept.get(id(table.cluster), {"": table.cluster.multiplicity}).items():
            each = [
                sum(held(part.program, e.mesh, only) for part in e.lowered) for e in table.entries.values()
            ]
            values += times * np.array(each, float)
        if values.any():
            entries.append(RowTerm(index.scope(table.names), Sparse(index.listed(table), values)))
            most += values.max()
    if most > limit:
        yield ResourceRow("host memory", limit, tuple(entries))
