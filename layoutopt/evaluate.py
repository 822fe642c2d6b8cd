"""The independent judge: lowers the whole graph under a layout and prices what would run. No table, no
solver."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.hardware import Hardware
from costmodels.memory import Memory, memory
from costmodels.pricing import Cost, Pricer, pricer
from layoutopt.plan import Alternative, Predicted
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.layout import Layout
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import STAGES
from mesh_tf_core.mesh import Mesh
from mesh_tf_core.model import Model
from mesh_tf_core.program import Program

DEFAULT = Options()


@dataclass(frozen=True)
class Evaluation:
    """A layout's program, price and memory."""

    program: Program
    cost: Cost
    memory: Memory

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
    """Lowers, prices and walks one layout; LayoutError if it is not legal."""
    program = model.lower(mesh, layout, options)
    prices = prices or pricer(hardware, mesh)
    return Evaluation(program, prices.cost(program), memory(program, prices.fuses))


def alternative(
    name: str,
    model: Model,
    mesh: Mesh,
    layout: Layout,
    hardware: Hardware,
    limit: float | None,
    options: Options = DEFAULT,
) -> Alternative:
    """A named layout beside the answer: priced, or with the reason why it is not legal."""
    predicted, reason = None, None
    try:
        found = evaluate(model, mesh, layout, hardware, options)
        predicted, reason = found.predicted, found.reason(limit)
    except LayoutError as error:
        reason = str(error)
    return Alternative(
        name=name,
        mesh=mesh.as_dict(),
        layout={n: list(a) for n, a in layout.items()},
        predicted=predicted,
        feasible=reason is None,
        reason=reason,
        storage={n: STAGES[s] for n, s in sorted(options.storage.items()) if s},
        recompute=sorted(options.recompute),
        microbatches=options.microbatches,
    )
