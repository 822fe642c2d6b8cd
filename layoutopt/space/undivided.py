"""Variables that a stage of storage (ZeRO) cannot split: the devices divide none of their dimensions.

`mesh_tf_core.lower.placement.Placement.further` is the rule. Code that names storage, or explains why it
saves nothing, calls these functions: predictions, plans, named plans, words of axes, likely mistakes, and
repairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.options import Options
from mesh_tf_core.lower.placement import Placement, placement
from mesh_tf_core.lower.storage import Stage, StageByVariable, read_stage, splits_some
from mesh_tf_core.tracing.graph import Graph

MENTIONED = 0.01
"""Share of the bytes of variables below which whole variables are not mentioned: scales, biases."""
FEW = 4
"""Variables that are named one by one."""
NAMED = 3
"""Variables or dimensions that a text names."""
WIDER = 2
"""Factor of the number of devices up to which a divisor is looked for."""


@dataclass(frozen=True)
class Undivided:
    """Variables with the same stage that is split over fewer devices than the stage requires.

    Attributes:
      ways: number of devices that share one replica's storage.
      parts: into which they are split all the same; 1: they are stored whole.
      variables: their names, the largest first.
      share: of the bytes of all variables.
      below, above: the nearest numbers of devices that divide them; 0: none is near.
      inside: the largest divisor of `ways` that divides them; 1: none.
    """

    stage: str
    ways: int
    parts: int
    variables: tuple[str, ...]
    share: float
    below: int = 0
    above: int = 0
    inside: int = 1

    def __str__(self) -> str:
        count = f"{len(self.variables)} variable{'s' * (len(self.variables) > 1)}"
        which = f"{count} ({100 * self.share:.0f} % of the parameter bytes: {first_of(self.variables)})"
        does = "cannot split" if self.parts == 1 else f"splits into {self.parts} parts, not {self.ways},"
        return f"{self.stage} {does} {which}: no dimension is divisible by {self.ways}; {self.fix}"

    @property
    def fix(self) -> str:
        """Numbers of devices that would divide."""
        near = " or ".join(str(n) for n in (self.below, self.above) if n)
        fixes = [f"use {near} devices"] if near else []
        if self.inside > max(1, self.parts):
            rest = self.ways // self.inside
            fixes.append(
                f"store over an axis of {self.inside} (split the {self.ways} devices into axes of "
                f"{rest} and {self.inside})"
            )
        return (
            ", and ".join(fixes)
            or "split a dimension of these variables in the layout, or change the size of one"
        )


def storage_of(
    graph: Graph, mesh: Mesh, layout: Layout, stages: Mapping[str, str | int | Stage]
) -> Placement:
    """The storage of the variables of a graph with its update, as lowering has it; stages of those that it
    does not have are left out."""
    held = {n: read_stage(s) for n, s in stages.items() if n in graph.variables}
    return placement(graph, mesh, layout, Options(held))


def split_stages(storage: Placement) -> dict[str, str]:
    """Variable -> its stage, of those that it splits further."""
    return {name: str(stage) for name, stage in storage.stages.items() if storage.further(name)[0]}


def undivided(storage: Placement) -> list[Undivided]:
    """The dimensions that stages leave whole, or split over fewer devices than required, the largest part
    first; negligible ones are left out."""
    known = {n: v for n, v in storage.variables.items() if v.own_storage}
    total = sum(v.bytes for v in known.values())
    groups: dict[tuple[str, int, int], list[Variable]] = {}
    for name in (n for n in storage.stages if n in known):
        done, left = storage.further(name)
        if left:
            ways = storage.mesh.group_size((*done, *left))
            key = str(storage.stages[name]), ways, storage.mesh.group_size(done)
            groups.setdefault(key, []).append(known[name])
    found = []
    for (stage, ways, parts), some_of in groups.items():
        some_of.sort(key=lambda v: (-v.bytes, v.name))
        share = sum(v.bytes for v in some_of) / total
        if share >= MENTIONED:
            names, numbers = tuple(v.name for v in some_of), dict(_numbers(storage, some_of, ways))
            found.append(Undivided(stage, ways, parts, names, share, **numbers))
    return sorted(found, key=lambda each: -each.share)


def _numbers(storage: Placement, variables: Iterable[Variable], ways: int) -> Iterator[tuple[str, int]]:
    """The fields of numbers that divide most of what is stored: all but what is too little to mention."""
    pieces = [(v.bytes, [*_pieces(storage, v)]) for v in variables]
    total = sum(size for size, _ in pieces)

    def divides(n: int) -> bool:
        return sum(size for size, own in pieces if any(p % n == 0 for p in own)) >= (1 - MENTIONED) * total

    sizes = {p for _, own in pieces for p in own}
    near = [n for n in sorted(_divisors(sizes, WIDER * ways)) if divides(n)]
    yield "below", max((n for n in near if n < ways), default=0)
    yield "above", next((n for n in near if n > ways), 0)
    yield "inside", max((n for n in near if 2 * n <= ways and ways % n == 0), default=1)


def _divisors(sizes: Iterable[int], most: int) -> set[int]:
    """The divisors of any of the sizes, from 2 to `most`."""
    pairs = {(n, p // n) for p in sizes for n in range(1, min(math.isqrt(p), most) + 1) if p % n == 0}
    return {n for pair in pairs for n in pair if 1 < n <= most}


def _pieces(storage: Placement, variable: Variable) -> Iterator[int]:
    """The sizes that a device finds of the dimensions that may be split further."""
    layout = storage.read_in(variable.name)
    for dim in variable.shape.dims[variable.stacked :]:
        yield dim.size // storage.mesh.group_size(layout.axes(dim.name))


def mostly_split(storage: Placement) -> bool:
    """True if most of what stays between steps is split further than in the layout."""
    sizes = {n: v.shape.size for n, v in storage.variables.items() if v.own_storage}
    split = sum(size for name, size in sizes.items() if storage.further(name)[0])
    return split > math.fsum(sizes.values()) / 2


def stored_at(variables: Iterable[Variable], stage: str) -> StageByVariable:
    """All variables of whose storage a stage splits something at this stage; scalars have none."""
    found = read_stage(stage)
    return {v.name: found.short for v in variables if v.own_storage and splits_some(found, v)}


def few(names: Sequence[str]) -> str:
    """Names of variables, or their number: 'embedding, norm', '38 variables'."""
    return ", ".join(names) if len(names) <= FEW else f"{len(names):,} variables"


def first_of(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
