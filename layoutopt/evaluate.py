"""The independent judge: lowers the whole graph under a layout and prices what would run. No table, no
solver."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

from costmodels.fusion import Fused
from costmodels.hardware import Hardware
from costmodels.memory import Memory, memory
from costmodels.pricing import Cost, Pricer, pricer
from layoutopt.decisions import Decisions
from layoutopt.extract import Draft
from layoutopt.ground import Ground
from layoutopt.plan import Predicted
from layoutopt.quotes import Quotes
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.layout import Layout
from mesh_tf_core.lower import Options
from mesh_tf_core.mesh import Mesh
from mesh_tf_core.model import Model
from mesh_tf_core.program import Program

DEFAULT = Options()


@dataclass(frozen=True)
class Evaluation:
    """A layout's program, and what follows from it when it is asked for: its price and its memory."""

    program: Program
    prices: Pricer = field(repr=False, compare=False)

    @cached_property
    def _kernels(self) -> Fused | None:
        return self.prices.kernels(self.program)

    @cached_property
    def cost(self) -> Cost:
        return self.prices.cost(self.program, self._kernels)

    @cached_property
    def memory(self) -> Memory:
        # Memory knows of no kernels that stream.
        known = None if self.prices.hardware.streams_attention else self._kernels
        return memory(self.program, self.prices.fuses, known)

    @property
    def predicted(self) -> Predicted:
        return Predicted(
            step_seconds=self.cost.step_seconds,
            compute_seconds=self.cost.compute_seconds,
            communication_seconds=self.cost.communication_seconds,
            exposed_communication_seconds=self.cost.exposed_communication_seconds,
            peak_memory_bytes=self.memory.peak,
            flops_per_device=self.cost.flops,
            communication_bytes_per_device=self.program.communication_bytes(),
        )

    def reason(self, limit: float | None) -> str | None:
        """Why it does not fit into `limit` bytes, naming the largest tensors; None if it fits."""
        if limit is None or self.memory.peak <= limit:
            return None
        over = self.memory.peak - limit
        largest = ", ".join(f"{h.what} ({gib(h.bytes)})" for h in self.memory.holdings[:3])
        return f"peak memory {gib(self.memory.peak)} is {gib(over)} over {gib(limit)}; largest: {largest}"


def gib(size: float) -> str:
    """Bytes in words."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def evaluate(
    model: Model,
    mesh: Mesh,
    layout: Layout,
    hardware: Hardware,
    options: Options = DEFAULT,
    prices: Pricer | None = None,
) -> Evaluation:
    """Lowers one layout to price and walk it; LayoutError if it is not legal."""
    return Evaluation(model.lower(mesh, layout, options), prices or pricer(hardware, mesh))


class Judge:
    """Evaluations of one model on one piece of hardware, and what they share: nothing is made twice."""

    def __init__(self, model: Model, hardware: Hardware) -> None:
        self.model, self.hardware = model, hardware
        self._known: dict[Hashable, Evaluation | str] = {}
        self._prices: dict[Mesh, Pricer] = {}
        self._grounds: dict[int, Ground] = {}
        self._quotes: Quotes | None = None

    def prices(self, mesh: Mesh) -> Pricer:
        if mesh not in self._prices:
            self._prices[mesh] = pricer(self.hardware, mesh)
        return self._prices[mesh]

    def ground(self, microbatches: int) -> Ground:
        if microbatches not in self._grounds:
            self._grounds[microbatches] = Ground(self.model, microbatches)
        return self._grounds[microbatches]

    def quotes(self, mesh: Mesh, decided: Decisions) -> Quotes:
        """Of the problem that was asked for last they know what they priced."""
        found = self._quotes
        if found is None or found.draft.mesh != mesh or found.draft.decided is not decided:
            ground = self.ground(decided.microbatches)
            self._quotes = found = Quotes(Draft(self.model, mesh, decided, self.prices(mesh), ground))
        return found

    def __call__(self, mesh: Mesh, layout: Layout, options: Options = DEFAULT) -> Evaluation:
        """As `evaluate`."""
        key = mesh, layout, frozenset(options.storage.items()), options.recompute, options.microbatches
        found = self._known.get(key)
        if found is None:
            try:
                found = evaluate(self.model, mesh, layout, self.hardware, options, self.prices(mesh))
            except LayoutError as error:
                found = str(error)
            self._known[key] = found
        if isinstance(found, str):
            raise LayoutError(found)
        return found
