"""What runs under a message: the products between its start and its done, as the program says
(`mesh_tf_core.lower.start_done`), and the part of it that a hardware file says is hidden.

  gradient, parameter   a fraction of the message's own time is hidden, as the file's `overlap` says of the
                        rule. Prices of messages so add up, as the search needs; that the products between
                        start and done take as long is not checked here (`costmodels.pricing.hidden` shows it)
  ring, host link       the products between start and done hide as much as they take: the time of both is the
                        larger one. Of several messages of a rule at once, a product hides each by its part of
                        their bytes
  activation            every other message: what follows waits for it, but for the file's fraction
A rule that a file does not name is exposed. In a loop of n iterations, what runs between a start and a done
that are an iteration apart (`Message.pipelined`) hides messages of all iterations but one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from costmodels.kernels.compute import MATMUL_CLASSES
from mesh_tf_core.ir.instructions import GRADIENT, HOST, PARAMETER, STEP
from mesh_tf_core.ir.program import Collective, Done, Instr, Local, Loop, Message, Program, Transfer

ACTIVATION = "activation"
"""What is said of a message that the device waits for."""
CLASSES = (GRADIENT, PARAMETER, ACTIVATION)
"""The rules that hardware files have fractions for."""
LONGER = (STEP, HOST)
"""The rules by which the time is the longer one of messages and products."""


@dataclass(frozen=True, slots=True, eq=False)
class Overlapped:
    """A message and what runs between its start and its done.

    Attributes:
      between: products, each with the part of its time that hides this message.
    """

    message: Collective | Transfer
    between: tuple[tuple[Local, float], ...]


@dataclass(slots=True)
class _Going:
    """A message on its way."""

    message: Message
    size: float
    between: list[tuple[Local, float]] = field(default_factory=list)


def overlapped(
    program: Program, carried: Callable[[Transfer], float], rules: Sequence[str] = LONGER
) -> dict[int, Overlapped]:
    """The messages of some rules, by the first value that each makes. Products of loops inside of a block
    hide nothing of it.

    Args:
      carried: bytes of a transfer on the link.
    """
    found: dict[int, Overlapped] = {}
    for code, iterations in _blocks(program.code, 0):
        for rule in rules:
            found.update((x.message.outputs[0], x) for x in _of(rule, code, iterations, program, carried))
    return found


def _blocks(code: Sequence[Instr], iterations: int) -> Iterator[tuple[Sequence[Instr], int]]:
    """All blocks, each with the number of its iterations; 0: the outermost."""
    yield code, iterations
    for instr in code:
        if isinstance(instr, Loop):
            yield from _blocks(instr.body, instr.dim.size)


def _of(
    rule: str, code: Sequence[Instr], iterations: int, program: Program, carried: Callable[[Transfer], float]
) -> Iterator[Overlapped]:
    sent = [i for i in code if isinstance(i, Message) and i.rule == rule]
    if not sent:
        return
    size = {
        i: carried(i)
        if isinstance(i, Transfer)
        else sum(program.values[x].local_bytes(program.mesh) for x in i.outputs)
        for i in sent
    }
    every = [_Going(i, size[i]) for i in sent]
    always = [x for x in every if x.message.pipelined]
    some = {x.message.outputs[0]: x for x in every if not x.message.pipelined}
    going: dict[int, _Going] = {}
    often = (iterations - 1) / iterations if iterations else 1.0
    for instr in code:
        if isinstance(instr, Message) and instr.outputs[0] in some:
            going[instr.outputs[0]] = some[instr.outputs[0]]
        elif isinstance(instr, Done):
            for i in instr.inputs:
                going.pop(i, None)
        elif isinstance(instr, Local) and instr.op.kind in MATMUL_CLASSES:
            total = sum(x.size for x in (*always, *going.values()))
            for x in always:
                x.between.append((instr, often * x.size / total))
            for x in going.values():
                x.between.append((instr, x.size / total))
    for x in every:
        assert isinstance(x.message, Collective | Transfer)
        yield Overlapped(x.message, tuple(x.between))
