"""The row of the hosts' memory: what a device keeps on its host, whatever is running there.

    host(x) = sum over the clusters c of m_c H_c(x)

H_c is read off the cluster as it was lowered for its price, so the row counts just the bytes that the program
has there (`Program.host_bytes`), and forbids a layout if and only if the hardware's hosts have less. Of
variables a cluster has those that it writes: others may read them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from layoutopt.formulation.tables import Index, Table
from layoutopt.solver import ResourceRow, RowTerm, Sparse
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program, WriteVariable


def host_row(tables: Sequence[Table], index: Index, limit: float) -> Iterator[ResourceRow]:
    """The row; none if no choice keeps more than `limit` bytes there."""
    entries, most = [], 0.0
    known: dict[tuple[int, Mesh], int] = {}

    def held(program: Program | None, mesh: Mesh | None) -> int:
        if program is None or mesh is None:
            return 0
        # A program is lowered once for axes of any sizes.
        if (id(program), mesh) not in known:
            written = {i.variable for i in program.code if isinstance(i, WriteVariable)}
            own = {name: s for name, s in program.variables.items() if name in written}
            known[id(program), mesh] = replace(program, variables=own, mesh=mesh).host_bytes
        return known[id(program), mesh]

    for table in tables:
        each = [sum(held(part.program, e.mesh) for part in e.lowered) for e in table.entries.values()]
        values = table.cluster.multiplicity * np.array(each, float)
        if values.any():
            entries.append(RowTerm(index.scope(table.names), Sparse(index.listed(table), values)))
            most += values.max()
    if most > limit:
        yield ResourceRow("host memory", limit, tuple(entries))
