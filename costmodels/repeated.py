"""The products that the devices of a mesh axis repeat: those that are not split over it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from costmodels.kernels.compute import MATMUL_CLASSES
from costmodels.kernels.quantities import flops_of
from mesh_tf_core.ir.program import Local, Program

LEAST_SHARE = 0.02
"""A share of the products' FLOPs below this is not mentioned."""


@dataclass
class Repeated:
    """FLOPs on a device that the devices of an axis repeat.

    Attributes:
      flops: by scope.
      dims: name -> whole size, of the dimensions of those products.
      share: of the FLOPs of all products on a device.
    """

    flops: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    dims: dict[str, int] = field(default_factory=dict)
    share: float = 0.0


def near_sizes(size: int, parts: int) -> list[int]:
    """The nearest sizes of a dimension that the number of parts divides, if it does not divide the
    dimension's own size."""
    fewer = size - size % parts
    return [n for n in (fewer, fewer + parts) if n]


def repeated(program: Program) -> dict[str, Repeated]:
    """Mesh axis -> the products that are not split over it, if they are significant."""
    axes, apart = [a for a in program.mesh.names if program.mesh.size(a) > 1], _apart(program)
    found, total = {a: Repeated() for a in axes}, 0.0
    for instr, times in program.expected():
        if not isinstance(instr, Local) or instr.op.kind not in MATMUL_CLASSES:
            continue
        values = [program.values[i] for i in (*instr.inputs, *instr.outputs)]
        flops = times * flops_of(instr.op, [program.local(i) for i in instr.inputs])
        total += flops
        used = {a for v in values for split in v.splits for a in split}
        used.update(apart.get(instr.origin.node, ()))
        for axis in axes:
            if axis not in used:
                found[axis].flops[instr.origin.scope or "the model"] += flops
                found[axis].dims.update({d.name: d.size for v in values for d in v.shape})
    for each in found.values():
        each.share = sum(each.flops.values()) / total if total else 0.0
    return {axis: each for axis, each in found.items() if each.share > LEAST_SHARE}


def _apart(program: Program) -> dict[int, set[str]]:
    """Nodes of stages of pipelines -> the axes that tell these apart: their devices do not do the same."""
    found: dict[int, set[str]] = {}
    for block in program.outline.blocks:
        if block.spread:
            for node, _ in block.walk():
                found.setdefault(node.index, set()).update(program.layout.axes(block.dim.name))
    return found
