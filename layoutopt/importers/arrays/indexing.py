"""The effect of gathers, scatters and slices on the axes of their operands, in one plain form."""

from __future__ import annotations

from dataclasses import dataclass

from layoutopt.importers.arrays.contract import Equation, EquationBlock, Operand, Var, is_empty


@dataclass(frozen=True)
class Indexing:
    """A gather, or a scatter seen from its result: axes of the operand, the indices and the rows.

    Attributes:
      looked_up: (axis of the operand, which number of an index).
      kept: (axis of the operand, axis of the rows) that are taken whole.
      windows: (axis of the operand, axis of the rows, which number of an index) that are taken in part from
        a position.
      common: (axis of the operand, axis of the indices, axis of the rows): every element for itself.
      others: (axis of the indices, axis of the rows) of the remaining axes of indices.
    """

    looked_up: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...]
    windows: tuple[tuple[int, int, int], ...]
    common: tuple[tuple[int, int, int], ...]
    others: tuple[tuple[int, int], ...]


def indexing(equation: Equation) -> Indexing:
    """The indexing of a gather or a scatter."""
    operand, d = equation.ins[0], equation.params["dimension_numbers"]
    rows: Operand = equation.out if equation.prim == "gather" else equation.ins[2]
    start, batching, of_indices = d.start_index_map, d.operand_batching_dims, d.start_indices_batching_dims
    place = dict(enumerate(a for a in range(len(rows.shape)) if a not in d.offset_dims))
    windowed = [a for a in range(len(operand.shape)) if a not in (*d.collapsed_slice_dims, *batching)]
    offset_of = dict(zip(windowed, sorted(d.offset_dims), strict=True))
    written = [rows.shape[offset_of[a]] if a in offset_of else 1 for a in range(len(operand.shape))]
    sizes = equation.params.get("slice_sizes", written)
    looked_up, kept, windows = [], [], []
    for a, size in enumerate(operand.shape):
        if a in batching:
            continue
        if a in offset_of and sizes[a] == size:
            kept.append((a, offset_of[a]))
        elif a in start and sizes[a] == 1:
            looked_up.append((a, start.index(a)))
        elif a in start:
            windows.append((a, offset_of[a], start.index(a)))
        elif a in offset_of:
            windows.append((a, offset_of[a], -1))
    common = tuple((a, i, place[i]) for a, i in zip(batching, of_indices, strict=True))
    others = tuple((i, place[i]) for i in place if i not in of_indices)
    return Indexing(tuple(looked_up), tuple(kept), tuple(windows), common, others)


@dataclass(frozen=True)
class IndexedPiece:
    """A slice that is element `index` of `count` equal pieces of an axis."""

    axis: int
    count: int
    index: int


def pieces(block: EquationBlock) -> dict[int, IndexedPiece]:
    """id(equation) -> the piece of an axis that a slice takes, if slices cut the axis into equal pieces."""
    cut: dict[tuple[int, int], list[tuple[int, int, Equation]]] = {}
    for equation in block.walk():
        if equation.prim != "slice" or is_empty(equation.out):
            continue
        x, params = equation.ins[0], equation.params
        if any(s != 1 for s in params.get("strides") or ()):
            continue
        begins, ends = params["start_indices"], params["limit_indices"]
        partial = [a for a, n in enumerate(x.shape) if (begins[a], ends[a]) != (0, n)]
        if len(partial) == 1 and isinstance(x, Var):
            a = partial[0]
            cut.setdefault((id(x), a), []).append((begins[a], ends[a], equation))
    found: dict[int, IndexedPiece] = {}
    for (_, axis), parts in cut.items():
        total = parts[0][2].ins[0].shape[axis]
        width = parts[0][1] - parts[0][0]
        if total % width:
            continue
        count = total // width
        begins_found = {b for b, _, _ in parts}
        if all(e - b == width and b % width == 0 for b, e, _ in parts) and len(begins_found) == count:
            found |= {id(equation): IndexedPiece(axis, count, begin // width) for begin, _, equation in parts}
    return found
