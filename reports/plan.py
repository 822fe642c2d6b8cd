"""What a report reads: a plan and its details as frozen values, all times in seconds and sizes in bytes.

`reports.reader` builds these from the plain objects of a plan file and refuses what cannot be one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reports.evidence import Calibration, Proof, Robustness, Validation
from reports.units import quantity, some

Layout = Mapping[str, tuple[str, ...]]
"""Dimension to the mesh axes it is split over, the outermost first."""


@dataclass(frozen=True)
class Predicted:
    """What the cost model says of one step; everything per device.

    Attributes:
      sent: bytes sent, by mesh axis (several axes joined with '+').
    """

    step: float
    compute: float
    communication: float
    exposed: float
    peak: float
    flops: float = 0.0
    sent: Mapping[str, float] = field(default_factory=dict)

    @property
    def hidden(self) -> float:
        """Seconds of communication that run behind computation: at most all of the computation."""
        return min(max(self.communication - self.exposed, 0.0), self.compute)


@dataclass(frozen=True)
class Choice:
    """A layout with its price: the answer, an alternative or a point of the frontier.

    Attributes:
      storage, recompute, microbatches: how else it runs; None where the plan does not say.
    """

    name: str
    mesh: Mapping[str, int]
    layout: Layout
    predicted: Predicted | None
    feasible: bool = True
    reason: str = ""
    storage: Mapping[str, str] | None = None
    recompute: tuple[str, ...] | None = None
    microbatches: int | None = None

    @property
    def extras(self) -> str:
        """Storage, recomputation and microbatches in words; '' when there is nothing of them."""
        parts = [f"{way} of {some(names, 2, 24)}" for way, names in _ways(self.storage or {}).items()]
        parts += [f"recomputes {some(self.recompute, 2, 24)}"] if self.recompute else []
        parts += [f"{self.microbatches} microbatches"] if (self.microbatches or 1) > 1 else []
        return "; ".join(parts)


@dataclass(frozen=True)
class Solver:
    """What the search proved. `objective` and `bound` are in the objective's own unit."""

    status: str
    objective: float | None = None
    bound: float | None = None
    gap: float | None = None
    wall_seconds: float | None = None
    considered: str = ""

    @property
    def proven(self) -> bool:
        """The solver said OPTIMAL and its own gap agrees."""
        return self.status.upper() == "OPTIMAL" and (self.gap is None or abs(self.gap) <= 1e-6)


@dataclass(frozen=True)
class Number:
    """One number of a hardware description with its source."""

    path: str
    value: float | str
    unit: str
    source: str
    date: str

    @property
    def words(self) -> str:
        """The value with its unit, as short as it can be said."""
        return self.value if isinstance(self.value, str) else quantity(self.value, self.unit)

    @property
    def assumed(self) -> bool:
        """No measurement of this hardware and no document stands behind it."""
        said = self.source.strip().lower()
        return said.startswith("assum") or "uncalibrated" in said


@dataclass(frozen=True)
class Hardware:
    """The hardware that the plan is priced on.

    Attributes:
      placement: how the mesh lies on it; `lies` says it of each mesh axis.
    """

    name: str
    summary: str = ""
    device: str = ""
    memory: float | None = None
    assumptions: tuple[str, ...] = ()
    placement: str = ""
    lies: Mapping[str, str] = field(default_factory=dict)
    numbers: tuple[Number, ...] = ()


@dataclass(frozen=True)
class Variable:
    """A trained variable or a piece of optimizer state; `splits` has one tuple of axes per dimension.

    Attributes:
      alike: how many variables of this shape and split it stands for.
    """

    name: str
    shape: tuple[tuple[str, int], ...]
    dtype: str
    splits: tuple[tuple[str, ...], ...]
    bytes: float
    local_bytes: float
    kind: str = "parameter"
    alike: int = 1

    def local_shape(self, mesh: Mapping[str, int]) -> tuple[int, ...]:
        """Sizes of the piece that one device holds."""
        parts = (math.prod(mesh.get(a, 1) for a in axes) for axes in self.splits)
        return tuple(-(-size // part) for (_, size), part in zip(self.shape, parts, strict=True))


@dataclass(frozen=True)
class Line:
    """One instruction's share of the price; every number is of one of its `times` runs, on one device.

    Attributes:
      node: the operation of the graph that it comes from; a collective belongs to its node's computation.
    """

    op: str
    scope: str
    phase: str
    kind: str
    times: float
    seconds: float
    exposed: float
    flops: float = 0.0
    bytes: float = 0.0
    axes: tuple[str, ...] = ()
    sent: float = 0.0
    communication: bool = False
    node: int | None = None


@dataclass(frozen=True)
class Shares:
    """Seconds of one layout's step by kind of work; communication counts hidden and exposed together."""

    compute: float
    hidden: float
    exposed: float
    kinds: Mapping[str, float]


@dataclass(frozen=True)
class Point:
    """Memory held while one instruction runs."""

    name: str
    scope: str
    phase: str
    bytes: float


@dataclass(frozen=True)
class Holding:
    """Tensors alive at the peak that look the same, and the bytes of them all on one device."""

    what: str
    bytes: float
    scope: str = ""
    alike: int = 1

    @property
    def name(self) -> str:
        return f"{self.what} × {self.alike}" if self.alike > 1 else self.what


@dataclass(frozen=True)
class Memory:
    """The program's memory, instruction by instruction; `at` is the index of the peak."""

    points: tuple[Point, ...]
    at: int
    holdings: tuple[Holding, ...]
    variables: float = 0.0
    limit: float | None = None


@dataclass(frozen=True)
class Trial:
    """The best layout found when one factor has this value; no time means that nothing fits."""

    value: float
    step: float | None
    layout: str


@dataclass(frozen=True)
class Sensitivity:
    """The best step time as one factor changes: 'bandwidth' (a multiple), 'memory' (bytes) or 'devices'."""

    factor: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class Details:
    """What a plan may bring beside its layout and price; everything is optional.

    Attributes:
      source: the model as it was named on the command line.
      rules: what the search was told to pin and to forbid, in words.
    """

    hardware: Hardware | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    variables: tuple[Variable, ...] = ()
    lines: tuple[Line, ...] = ()
    by_kind: Mapping[str, Shares] = field(default_factory=dict)
    memory: Memory | None = None
    sensitivity: tuple[Sensitivity, ...] = ()
    validation: Validation | None = None
    calibration: Calibration | None = None
    robustness: Robustness | None = None
    proof: Proof | None = None
    source: str = ""
    rules: str = ""


@dataclass(frozen=True)
class Plan:
    """A layout with everything that was found out about it."""

    model: str
    mesh: Mapping[str, int]
    layout: Layout
    predicted: Predicted
    hardware: str = ""
    fingerprint: str = ""
    parameters: int | None = None
    hparams: Mapping[str, str] = field(default_factory=dict)
    storage: Mapping[str, str] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    microbatches: int = 1
    solver: Solver | None = None
    alternatives: tuple[Choice, ...] = ()
    frontier: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = ()
    details: Details = field(default_factory=Details)

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def memory_limit(self) -> float | None:
        """Bytes that a device may hold, from the details."""
        if self.details.memory and self.details.memory.limit:
            return self.details.memory.limit
        return self.details.hardware.memory if self.details.hardware else None

    @property
    def fits(self) -> bool | None:
        """None when the plan does not say what the limit is."""
        limit = self.memory_limit
        return None if limit is None else self.predicted.peak <= limit

    @property
    def answer(self) -> Choice:
        """The chosen layout in the form of the alternatives."""
        fits = self.fits is not False
        extras = (self.storage, self.recompute, self.microbatches)
        return Choice("answer", self.mesh, self.layout, self.predicted, fits, "", *extras)

    def lies_on(self, axis: str) -> str:
        """Where a mesh axis lies on the hardware, in words; '' where the plan does not say."""
        return self.details.hardware.lies.get(axis, "") if self.details.hardware else ""

    def dims_on(self, axis: str) -> tuple[str, ...]:
        """The dimensions that are split over a mesh axis."""
        return tuple(dim for dim, axes in self.layout.items() if axis in axes)

    def same_layout(self, choice: Choice) -> bool:
        """Whether a choice is the answer's layout on the answer's mesh, and runs in the same way."""
        own = (self.storage, self.recompute, self.microbatches)
        other = (choice.storage, choice.recompute, choice.microbatches)
        if any(o is not None and o != mine for o, mine in zip(other, own, strict=True)):
            return False
        return choice.mesh == self.mesh and _split(choice.layout) == _split(self.layout)


def one_model(plans: Sequence[Plan]) -> bool:
    """Whether the plans are for the same model with the same sizes, so that their times compare."""
    return len({(p.model, p.fingerprint) for p in plans}) == 1


def _ways(storage: Mapping[str, str]) -> dict[str, list[str]]:
    """Ways of storing with the variables that are stored so."""
    found: dict[str, list[str]] = {}
    for name, way in storage.items():
        found.setdefault(way, []).append(name)
    return found


def _split(layout: Layout) -> dict[str, tuple[str, ...]]:
    return {dim: axes for dim, axes in layout.items() if axes}
