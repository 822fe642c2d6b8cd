"""Quantities of work on one device: of local instructions, of their parts, of kernels and stacks. No seconds
yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Real

from costmodels.kernels.compute import MATMUL_CLASSES, Quantity
from costmodels.kernels.fusion import FREE, role
from costmodels.kernels.partition import FusedKernel, Types
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import Local
from mesh_tf_core.lower.nodes import expansion


def flops_of(op: Op, inputs: Sequence[TensorType]) -> float:
    """FLOPs of an operation; UserError if it gives no number that can be one."""
    found: object = op.flops(*inputs)
    if not isinstance(found, Real) or not 0 <= float(found) < math.inf:
        raise UserError(
            f"operation {type(op).__name__}: flops() returned {found!r}; return a finite number of at least 0"
        )
    return float(found)


LANES = 128
"""The lanes of the tiles in which a TPU's memory and registers hold arrays (jax-ml/scaling-book tpus.md
@54e2c43)."""


def tiling(shape: Shape, regrouped: frozenset[frozenset[str]] = frozenset()) -> float:
    """Factor between an array in tiles and its elements: one dimension lies along the lanes, which are filled
    up. The compiler takes the one that wastes least; all of some names that are one dimension in other
    tensors (`regrouped`) count as one.

    Rows of a tile are not filled up: the compiler has lower tiles for few rows.
    """
    # Most arrays have a dimension that fills lanes: that is seen sooner than a memory is looked up.
    for dim in shape.dims:
        if dim.size % LANES == 0:
            return 1.0
    return _waste(shape, regrouped)


@lru_cache(maxsize=1 << 16)
def _waste(shape: Shape, regrouped: frozenset[frozenset[str]]) -> float:
    sizes = [*shape.sizes] or [LANES]
    for names in regrouped:
        if names <= set(shape.names):
            sizes.append(math.prod(shape.dim(n).size for n in names))
    return min(math.ceil(size / LANES) * LANES / size for size in sizes)


def of_local(instr: Local, local: Types) -> Quantity:
    """The work of a local instruction on pieces of some types."""
    return quantity_of(instr.op, tuple(map(local, instr.inputs)), tuple(map(local, instr.outputs)))


@lru_cache(maxsize=1 << 16)
def quantity_of(op: Op, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Quantity:
    """The work of one device in an operation: its FLOPs, the bytes that it reads and writes."""
    work = op.work(*inputs)
    dims = work.product
    matmul = (dims[1], dims[2], dims[3], dims[0]) if dims else None
    kind = op.kind
    if kind == "matmul" and (matmul is None or min(matmul[:3]) == 1):
        kind = "elementwise"
    # What is gathered from, or written into in place, is not passed over.
    worked = outputs if kind == "gather" else inputs[1:] if op.in_place else (*inputs, *outputs)
    most = max((t.shape.size for t in worked), default=0)
    flops, dtype = flops_of(op, inputs), (inputs or outputs)[0].dtype
    # Rows of a matrix of 2-byte elements that begin at odd ones.
    short = [t.shape.dims for t in (*inputs, *outputs) if itemsize(t.dtype) == 2 and t.shape.dims]
    odd = kind == "matmul" and any(dims[-1].size % 2 == 1 for dims in short)
    moved = op.moved(inputs, outputs)
    return Quantity(flops, moved, kind, dtype, matmul, elements=most, unaligned=odd, work=work)


@dataclass(frozen=True, slots=True)
class ExpandedOperation:
    """One of the smaller operations that an operation equals (`Op.expand`: softmax, normalisation).

    Attributes:
      kind: its role in fusion (`costmodels.kernels.fusion.role`).
      inputs, output: values by number; the operation's own inputs come first.
      elements: of the largest array that it works on.
      narrow: it works on arrays that lack dimensions of the operation's largest one.
    """

    kind: str
    flops: float
    inputs: tuple[int, ...]
    output: int
    bytes: int
    elements: int
    narrow: bool


def apart(op: Op, inputs: Sequence[TensorType]) -> list[Quantity]:
    """The work of the parts of an operation that expands, where each is a kernel of its own."""
    parts = parts_of(op, tuple(inputs))
    bytes = {**dict(enumerate(t.bytes for t in inputs)), **{part.output: part.bytes for part in parts}}
    kind, dtype = "elementwise", inputs[0].dtype
    return [
        Quantity(p.flops, float(p.bytes + sum(bytes[i] for i in p.inputs)), kind, dtype, elements=p.elements)
        for p in parts
    ]


@lru_cache(maxsize=1 << 16)
def parts_of(op: Op, types: tuple[TensorType, ...]) -> tuple[ExpandedOperation, ...]:
    """The parts of an operation that expands, on operands of these types, up to the one that makes its
    result."""
    whole = expansion(op, types)
    type = dict(zip(whole.operands, types, strict=True))
    same, found = dict[int, int](), list[ExpandedOperation]()
    wide = {name for t in types for name in t.shape.names}
    for node, plan in whole.nodes:
        given = tuple(type[i] for i in node.inputs)
        type.update(zip(node.outputs, plan.types, strict=True))
        kind, inputs = role(node.op, given), tuple(same.get(i, i) for i in node.inputs)
        if kind == FREE and inputs:
            same[node.outputs[0]] = inputs[0]
            continue
        out, made = node.outputs[0], plan.types[0]
        most = max(t.shape.size for t in (*given, made))
        narrow = {name for t in (*given, made) for name in t.shape.names} < wide
        found.append(ExpandedOperation(kind, flops_of(node.op, given), inputs, out, made.bytes, most, narrow))
        if same.get(whole.result, whole.result) == out:
            return tuple(found)
    return ()


def of_kernel(kernel: FusedKernel, local: Types) -> Quantity:
    """The work of operations that run as one."""
    moved = kernel.read + kernel.written
    if kernel.product is None:
        first = kernel.instrs[0]
        dtype = local((*first.inputs, *first.outputs)[0]).dtype
        what = "reduce" if kernel.reduces else "elementwise"
        return Quantity(kernel.vector, moved, what, dtype, elements=kernel.elements, tiled=kernel.tiled)
    own = of_local(kernel.product, local)
    flops, vector, most = own.flops, kernel.vector, kernel.elements
    if own.op_class not in MATMUL_CLASSES:
        flops, vector, most = flops + vector, own.vector, max(own.elements, most)
    return replace(own, flops=flops, bytes=moved, vector=vector, elements=most, tiled=kernel.tiled)


def of_copy(type: TensorType, passes: float, through: bool = True) -> Quantity:
    """The work of writing an array elsewhere.

    Args:
      passes: how often its bytes are read or written.
      through: a separate kernel brings it through the registers.
    """
    more, elements = tiling(type.shape), type.shape.size if through else 0
    tiled = (passes * type.bytes * more, elements * more) if more > 1 else None
    return Quantity(0.0, float(passes * type.bytes), "data", type.dtype, elements=elements, tiled=tiled)
