"""A program cut at its communication: runs of local work, exchanges between devices, loops of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mesh_tf_core.ir.program import Collective, Done, Instr, Loop, WriteVariable


@dataclass(frozen=True)
class LocalSegment:
    """Local work between two exchanges.

    Attributes:
      inputs: values that it reads from earlier parts.
      outputs: its values that later parts read.
    """

    code: tuple[Instr, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """A collective."""

    instr: Collective


@dataclass(frozen=True)
class Repeat:
    """A loop and the parts of its body."""

    loop: Loop
    body: tuple[ProgramPart, ...]


ProgramPart = LocalSegment | Exchange | Repeat


def cut(code: Sequence[Instr], leaving: Iterable[int]) -> tuple[ProgramPart, ...]:
    """Parts of a block, in order. Writes are no part of it: the written values leave it. Nor does waiting for
    messages: each arrives when it is sent.

    Args:
      leaving: values that are read after the block.
    """
    pieces: list[list[Instr] | Instr] = []
    for instr in code:
        if isinstance(instr, WriteVariable | Done):
            continue
        if isinstance(instr, Collective | Loop):
            pieces.append(instr)
        elif pieces and isinstance(pieces[-1], list):
            pieces[-1].append(instr)
        else:
            pieces.append([instr])
    needed = {*leaving, *(i for instr in code if isinstance(instr, WriteVariable) for i in instr.inputs)}
    parts: list[ProgramPart] = []
    for piece in reversed(pieces):
        part = _part(piece, needed)
        parts.append(part)
        read = part.instr if isinstance(part, Exchange) else part.loop if isinstance(part, Repeat) else part
        needed |= set(read.inputs)
    return tuple(reversed(parts))


def _part(piece: list[Instr] | Instr, needed: set[int]) -> ProgramPart:
    if isinstance(piece, Collective):
        return Exchange(piece)
    if isinstance(piece, Loop):
        return Repeat(piece, cut(piece.body, piece.leaving))
    assert isinstance(piece, list)
    made = [o for instr in piece for o in instr.outputs]
    read = dict.fromkeys(i for instr in piece for i in instr.inputs if i not in set(made))
    return LocalSegment(tuple(piece), tuple(read), tuple(o for o in made if o in needed))
