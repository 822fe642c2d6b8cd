"""Overlap of messages with the products between start and done (`mesh_tf_core.lower.messages`), and the
hidden fraction in a hardware file.

  gradient, parameter   a fraction of the message's own time is hidden, as the file's `overlap` says of the
                        rule. Prices of messages so add up, as the search needs; that the products between
                        start and done take as long is not checked here (`costmodels.pricing.hidden` shows it)
  ring, host link       the products between start and done hide as much as they take: the time of both is the
                        larger one. Of several messages of a rule at once, a product hides each by its part of
                        their bytes
  activation            every other message: what follows waits for it, but for the file's fraction
  experts, all_to_all   a message that the device waits for, of tokens or rows to experts and back, or an
                        all-to-all of others: kernels that send tensors piece by piece beside their products
                        (a file's fraction of `activation`) send neither
  paired_experts        rows between tokens and experts where slots of two microbatches are one block
                        (`ScheduleKind.pairs`); as `experts` where a file does not say
A rule that a file does not name is exposed. In a loop of n iterations, the work between a start and a done
that are one iteration apart (`Message.pipelined`) hides the messages of all iterations except one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from costmodels.kernels.compute import MATMUL_CLASSES
from mesh_tf_core.ir.blocks import Outline, per_graph
from mesh_tf_core.ir.instructions import GRADIENT, HOST, PARAMETER, STEP, AllToAll
from mesh_tf_core.ir.program import Collective, Done, Instr, Local, Loop, Message, Program, Transfer

ACTIVATION = "activation"
"""The note on a message that the device waits for."""
EXCHANGE = "experts"
"""The note on a message between tokens and their experts."""
PAIRED = "paired_experts"
"""The same where the slot of another microbatch runs meanwhile."""
AWAITED = (ACTIVATION, EXCHANGE, PAIRED, AllToAll.name)
"""The notes on messages that the device waits for."""
CLASSES = (GRADIENT, PARAMETER, *AWAITED)
"""The rules that hardware files have fractions for."""
LONGER = (STEP, HOST)
"""The rules by which the time is the longer one of messages and products."""


@per_graph
def exchanging(outline: Outline) -> frozenset[int]:
    """The nodes that bring tokens to experts, or results back."""
    return frozenset(node.index for node, _ in outline.walk() if node.op.exchanges)


def awaited(message: Collective, program: Program, pairs: bool = False) -> str:
    """The rule of a message that the device waits for; `pairs`: as `ScheduleKind` says of the step."""
    if program.values[message.inputs[0]].shape.sparse or message.origin.node in exchanging(program.outline):
        return PAIRED if pairs else EXCHANGE
    return message.name if isinstance(message, AllToAll) else ACTIVATION


@dataclass(frozen=True, slots=True)
class MessageWindow:
    """A message from its start to its done.

    Attributes:
      code: instructions of its block between start and done, or the whole block if these are one iteration
        apart.
      before: the block up to the done.
      times: how often the block runs in a step, as a price counts it.
      part: of these times, those in which the code hides the message.
    """

    message: Message
    code: Sequence[Instr]
    before: Sequence[Instr]
    times: float
    part: float


def windows(program: Program, rules: Container[str]) -> Iterator[MessageWindow]:
    """The messages of some rules that have a start and a done."""

    def visit(code: Sequence[Instr], times: float, iterations: int) -> Iterator[MessageWindow]:
        going: dict[int, tuple[int, Message]] = {}
        part = (iterations - 1) / iterations if iterations else 1.0
        for at, instr in enumerate(code):
            if isinstance(instr, Loop):
                yield from visit(instr.body, times * instr.times, instr.dim.size)
            elif isinstance(instr, Done):
                for begin, message in (going.pop(i) for i in instr.inputs if i in going):
                    yield MessageWindow(message, code[begin + 1 : at], code[:at], times, 1.0)
            elif isinstance(instr, Message) and instr.rule in rules:
                if instr.pipelined:
                    yield MessageWindow(instr, code, code, times, part)
                else:
                    going[instr.outputs[0]] = at, instr

    yield from visit(program.code, 1.0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Overlapped:
    """A message and the work between its start and its done.

    Attributes:
      between: products, each with the part of its time that hides this message.
    """

    message: Collective | Transfer
    between: tuple[tuple[Local, float], ...]


def loads_or_stores(unit: object) -> bool:
    """True if it moves saved values of a loop between device and host, during the products of its body."""
    return isinstance(unit, Overlapped) and isinstance(unit.message, Transfer)


def overlapped(program: Program, carried: Callable[[Transfer], float]) -> dict[int, Overlapped]:
    """The messages of `LONGER`, by the first value that each makes. Products of loops inside of a block hide
    nothing of it.

    Args:
      carried: bytes of a transfer on the link.
    """
    found = []
    total: dict[tuple[str, int], float] = defaultdict(float)
    for window in windows(program, LONGER):
        message = window.message
        assert isinstance(message, Collective | Transfer)
        sizes = (program.values[i].local_bytes(program.mesh) for i in message.outputs)
        size = carried(message) if isinstance(message, Transfer) else sum(sizes)
        products = [i for i in window.code if isinstance(i, Local) and i.op.kind in MATMUL_CLASSES]
        for instr in products:
            total[message.rule, instr.outputs[0]] += size
        found.append((message, window.part * size, products))
    return {
        message.outputs[0]: Overlapped(
            message, tuple((i, size / total[message.rule, i.outputs[0]]) for i in products)
        )
        for message, size, products in found
    }
