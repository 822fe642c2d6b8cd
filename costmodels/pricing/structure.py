"""Outlines: all of a program that its items follow from, but for where its values lie.

Most layouts lead to the same instructions on the same values; only the splits of values and the axes of
collectives differ. What fuses, what its kernels are, and what each collective is for
(`costmodels.kernels.fusion`, `costmodels.pricing.overlap`) is then the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from costmodels.kernels.groups import streamed
from mesh_tf_core.ir.program import Collective, Instr, Local, Loop, Program


def outline(program: Program, streams: bool) -> tuple[Hashable, list[Collective]]:
    """The outline of a program among those of one graph, and its collectives in order.

    Args:
      streams: attention is one kernel (`costmodels.kernels.fusion`).
    """
    sent: list[Collective] = []

    def block(code: Sequence[Instr]) -> Hashable:
        return tuple([of(instr) for instr in code])

    def of(instr: Instr) -> Hashable:
        origin = instr.origin
        if isinstance(instr, Local):
            return instr.op, instr.inputs, instr.outputs, origin.node, origin.phase
        if isinstance(instr, Loop):
            ways = instr.carried, instr.sliced, instr.stacked, instr.summed
            return instr.dim, instr.reverse, instr.branch, ways, instr.inputs, block(instr.body)
        if isinstance(instr, Collective):
            sent.append(instr)
        return type(instr), instr.inputs, instr.outputs, origin.phase, getattr(instr, "combine", "")

    values = tuple([(v.tensor, v.shape.names, v.shape.sizes, v.dtype) for v in program.values])
    held = streams and program.fusion.streamed and tuple(streamed(program, v.id) for v in program.values)
    return (block(program.code), values, held or (), tuple(program.results.values())), sent
