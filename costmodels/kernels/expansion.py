"""What an operation consists of, where it equals smaller ones: softmax, normalisation (`Op.expand`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.lower.fusion import FREE, role
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True, slots=True)
class Part:
    """A step of an operation's expansion; values are numbered, the operation's inputs first."""

    kind: str
    flops: float
    inputs: tuple[int, ...]
    output: int
    bytes: int
    elements: int


@lru_cache(maxsize=65536)
def expansion(op: Op, types: tuple[TensorType, ...]) -> tuple[Part, ...]:
    """The smaller operations that an operation equals; none if it says none."""
    scratch = Graph(op.name)
    handles = [scratch.new_tensor(t, scratch.blocks[0]) for t in types]
    result = op.expand(*handles)
    if result is None:
        return ()
    found = []
    same: dict[int, int] = {}
    for node in scratch.nodes:
        given = tuple(scratch.tensor(i).type for i in node.inputs)
        kind = role(node.op, given)
        inputs = tuple(same.get(i, i) for i in node.inputs)
        if kind == FREE and inputs:
            same[node.outputs[0]] = inputs[0]
            continue
        made = scratch.tensor(node.outputs[0])
        most = max(t.shape.size for t in (*given, made.type))
        found.append(Part(kind, float(node.op.flops(*given)), inputs, made.id, made.type.bytes, most))
        if same.get(result.id, result.id) == made.id:
            break
    return tuple(found) if found and found[-1].output == same.get(result.id, result.id) else ()
