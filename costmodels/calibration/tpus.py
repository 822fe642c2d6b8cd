"""TPUs under their compiler's names, and the clock of its cycle estimates.

(1) clock           = peak FLOP/s / FLOPs per cycle
(2) FLOPs per cycle = 2 x rows x columns of a matrix unit x matrix units of a device
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Generation:
    """A TPU: our preset, its FLOPs per cycle and device in bfloat16, its smallest topology.

    docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm and its pages per version give the matrix units.
    For v6e, whose pages state 2 or 4, and v7 the compiler's estimates of large products fit 4 of 256 x 256.

    Attributes:
      smallest: sides of the smallest topology, in chips.
    """

    hardware: str
    flops_per_cycle: int
    smallest: str

    def clock(self, hardware: Hardware) -> float:
        """Cycles per second, equation (1)."""
        return hardware.peak_flops("bfloat16") / self.flops_per_cycle


GENERATIONS = {
    "v2": Generation("tpu-v2", 2 * 128 * 128, "2x2"),
    "v3": Generation("tpu-v3", 2 * 128 * 128 * 2, "2x2"),
    "v4": Generation("tpu-v4", 2 * 128 * 128 * 8, "2x2x1"),
    "v5e": Generation("tpu-v5e", 2 * 128 * 128 * 4, "2x2"),
    "v5p": Generation("tpu-v5p", 2 * 128 * 128 * 8, "2x2x1"),
    "v6e": Generation("tpu-v6e", 2 * 256 * 256 * 4, "2x2"),
    "tpu7x": Generation("tpu-v7", 2 * 256 * 256 * 4, "2x2x1"),
}
"""By the first part of the compiler's topology names."""
