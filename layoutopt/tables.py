"""Cost tables: every cluster, lowered by itself under every legal assignment of its own dimensions, and priced.

    T_c(a) = seconds of cluster c when its dimensions are split as a says          (computed by lowering, never by formula)
    S_c(a) = the small gradient messages in it, which travel with those of other clusters: (axes, dtype) -> bytes

The time of a step under a layout is sum_c multiplicity_c T_c + sum over message groups of their shared latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from costmodels.pricing import Pricer
from layoutopt.clusters import Cluster
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.graph import Graph
from mesh_tf_core.layout import Axes, Layout
from mesh_tf_core.lower import lower
from mesh_tf_core.lower.combine import Key, combinable
from mesh_tf_core.mesh import Mesh
from mesh_tf_core.program import Program

Domains = Mapping[str, Sequence[Axes]]
Assignment = tuple[Axes, ...]


@dataclass(frozen=True)
class Entry:
    """Price of one assignment: seconds, and the bytes of small messages by group."""

    seconds: float
    small: Mapping[Key, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """All legal assignments of a cluster's dimensions."""

    cluster: Cluster
    dims: tuple[str, ...]
    entries: Mapping[Assignment, Entry]


def assignments(cluster: Cluster, dims: Sequence[str], domains: Domains) -> Iterator[Assignment]:
    """Assignments under which no tensor of the cluster uses an axis twice."""
    position = {n: i for i, n in enumerate(dims)}
    shapes = [[position[n] for n in names if n in position] for names in cluster.shapes]
    involved = [[s for s in shapes if i in s] for i in range(len(dims))]
    chosen: list[Axes] = [()] * len(dims)

    def free(i: int, axes: Axes) -> bool:
        return not any(set(axes) & set(chosen[j]) for shape in involved[i] for j in shape if j < i)

    def extend(i: int) -> Iterator[Assignment]:
        if i == len(dims):
            yield tuple(chosen)
            return
        for axes in domains[dims[i]]:
            if not axes or free(i, axes):
                chosen[i] = axes
                yield from extend(i + 1)
        chosen[i] = ()

    yield from extend(0)


def table(graph: Graph, mesh: Mesh, cluster: Cluster, domains: Domains, pricer: Pricer) -> Table:
    """Lowers and prices a cluster under all its assignments; those that lowering refuses are left out."""
    dims = tuple(n for n in cluster.dims if len(domains[n]) > 1)
    fixed = {n: domains[n][0] for n in cluster.dims if len(domains[n]) == 1}
    entries: dict[Assignment, Entry] = {}
    for assignment in assignments(cluster, dims, domains):
        layout = Layout({**fixed, **dict(zip(dims, assignment, strict=True))})
        try:
            program = lower(graph, mesh, layout, cluster.early, keep=cluster.keep)
        except LayoutError:
            continue
        entries[assignment] = _entry(program, pricer)
    return Table(cluster, dims, entries)


def _entry(program: Program, pricer: Pricer) -> Entry:
    seconds = pricer.seconds(program)
    small: dict[Key, int] = {}
    for key, found in combinable(program).items():
        for instr in found:
            payload = program.values[instr.inputs[0]].local_bytes(program.mesh)
            seconds -= pricer.message_seconds("all_reduce", key[0], payload)
            small[key] = small.get(key, 0) + payload
    return Entry(max(seconds, 0.0), small)
