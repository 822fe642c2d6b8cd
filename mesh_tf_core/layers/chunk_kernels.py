"""The work of libraries' kernels for states in chunks, for each position and head of values.

Every kernel reads its arrays from memory and writes its results there. Elements are counted as bfloat16
(float32 counts twice). Heads that share a key read it once.

Sources: fla-org/flash-linear-attention @bc3b101d, fla/ops/gated_delta_rule/chunk.py, fla/ops/kda/chunk_fwd.py
and chunk_bwd.py, fla/ops/simple_gla/chunk.py; state-spaces/mamba @e9594ce,
mamba_ssm/ops/triton/ssd_combined.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Kernels: TypeAlias = "tuple[tuple[float, float, bool], ...]"
"""Elements that each kernel moves, its FLOPs, and whether it walks from chunk to chunk."""


@dataclass(frozen=True)
class ChunkKernels:
    """The kernels of a recurrence, forward and backward.

    Attributes:
      k, v: elements of a key, and of a value; chunk: positions.
      shared: heads of values that share a key.
    """

    k: int
    v: int
    chunk: int
    shared: int = 1

    @property
    def state(self) -> float:
        """Elements of a state, of which every chunk has one."""
        return self.k * self.v / self.chunk

    def delta(self) -> tuple[Kernels, Kernels]:
        """The gated delta rule."""
        k, v, c, s, own = self.k, self.v, self.chunk, self.state, self.k / self.shared
        solved = own + 2 * c, 2.0 * c * (k + c), False
        written = c + own + k + 2 * v, 2.0 * c * (k + v), False
        states = own + k + 2 * v + s, 4.0 * k * v, True
        made = 2 * own + 2 * v + s, 2.0 * (c * k + c * v + k * v), False
        local = 2 * own + 2 * v, 2.0 * c * (k + v), False
        back = 2 * own + k + 3 * v + s, 6.0 * k * v, True
        slopes = 2 * own + 4 * k + 3 * v + 2 * s, 6.0 * k * v + 2 * c * (3 * k + v), False
        inner = own + 2 * k + 3 * v + c, 4.0 * c * (k + v + c), False
        summed = 3 * k + 2 * (k + own) * (self.shared > 1), 0.0, False
        return (solved, written, states, made), (written, states, local, back, slopes, inner, summed)

    def decaying(self) -> tuple[Kernels, Kernels]:
        """The same with a decay of every channel, in float32."""
        k, v, c, s = self.k, self.v, self.chunk, self.state
        total = 4 * k, 0.0, False
        near, far = (4 * k + 0.75 * c, 32.0 * k, False), (4 * k + 3.5 * c, 2.0 * c * (2 * k + c), False)
        written = 5 * k + 2 * v + c, 2.0 * c * (k + v), False
        states = 2 * k + 2 * v + s, 4.0 * k * v, True
        made = 3 * k + 2 * v + c + s, 2.0 * (c * v + k * v), False
        again = 7 * k + 2 * v + c, written[1], False
        local = 3 * v + 3 * c, 4.0 * c * v, False
        back = 3 * k + 3 * v + s, 6.0 * k * v, True
        slopes = 10 * k + 5 * v + 3 * c + 2 * s, 6.0 * k * v + 4 * c * (k + v + c), False
        inner = 16 * k + 4 * c, 8.0 * c * k, False
        return (total, near, far, written, states, made), (
            (again, states, local, back, slopes, inner, total)
        )

    def linear(self) -> tuple[Kernels, Kernels]:
        """Linear attention whose heads decay as wholes."""
        k, v, c, s = self.k, self.v, self.chunk, self.state
        states, products = (k + v + s, 2.0 * k * v, True), 2.0 * (c * k + c * v + k * v)
        made, slopes = (2 * k + 2 * v + s, products, False), (4 * k + 2 * v + 2 * s, 2 * products, False)
        return (states, made), (states, states, slopes, (2 * k + 2 * v + s, products, False))

    def scan(self) -> tuple[Kernels, Kernels]:
        """Mamba-2, whose states and products of positions are in float32."""
        k, v, c, s, own, pairs = (
            (self.k, self.v, self.chunk, self.state, self.k / self.shared, 2 * self.chunk / self.shared)
        )
        states, passed = (own + v + 2 * s, 2.0 * k * v, False), (3 * s, 0.0, True)
        product = 2 * own + pairs, 2.0 * c * own, False
        slope = v + s + 2 * own, 2.0 * k * v, False
        begun = product, states, (4 * s, 0.0, True), states, (6 * s, 0.0, True)
        made = pairs + own + 2 * v + s, 1.0 * c * v + 2 * k * v, False
        inputs = pairs + own + 3 * v + s, made[1], False
        pairwise = 2 * v + pairs, 1.0 * c * v, False
        return (states, passed, product, made), (
            (*begun, inputs, slope, slope, pairwise, product, product, pairwise)
        )
