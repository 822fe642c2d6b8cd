"""Attention with queries and keys that are both split along their positions, without gathering the keys.

    ring        every device's keys and values go round. Beside each, a device attends with its queries and
                joins what it finds by its log-sum-exp (Liu et al. 2023, "Ring Attention with Blockwise
                Transformers"):  l = log(exp l1 + exp l2),  o = exp(l1 - l) o1 + exp(l2 - l) o2.
                Backward sends the gradients of keys and values round with them. With a window, keys are sent
                to those alone who see any of them, from before and (to both sides) from behind, and from
                there the gradients home.
    zigzag      the same for causal attention, with equal work: of 2n pieces of the positions, device i of n
                works on the pieces i and 2n-1-i (Dubey et al. 2024, "The Llama 3 Herd of Models", 3.3.2).
                Operands are sent there, and results back. Of keys from elsewhere, a device's later queries
                see the earlier piece, and either its earlier queries see that too or its later ones see
                the later piece: two products without a mask.
    all_to_all  queries, keys and values are sent to where their heads lie split instead of their positions,
                and results back (Jacobs et al. 2023, "DeepSpeed Ulysses").

The first two are lowered by `ops.ring`, the last one here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ops.attending import AnyAttention
from mesh_tf_core.ops.ring import Ring
from mesh_tf_core.ops.ring_pieces import ALL_TO_ALL, RING, ZIGZAG, refused, summed

FORMS = (RING, ZIGZAG, ALL_TO_ALL)
"""The forms of context parallelism that options may name for a dimension of keys; by default keys are
gathered."""


@dataclass(frozen=True)
class Spread(AnyAttention, abstract=True):
    """Attention whose keys need not be gathered: all except the gradient of a bias."""

    def spread(
        self, low: Emitter, ins: Sequence[int], types: Sequence[TensorType], form: str, wanted: Sequence[bool]
    ) -> Sequence[int] | None:
        """As `Op.spread`; LayoutError if the operands or the layout do not allow the form."""
        names = self.length.name, self.memory.name
        own, axes = (low.layout.axes(name) for name in names)
        if not axes or axes != own:
            # Rules for elsewhere split further here what a reader of the layout sees split alike.
            found = ", ".join(f"{n}:{'+'.join(a) or 'none'}" for n, a in zip(names, (own, axes), strict=True))
            why = f"needs {' and '.join(names)} to be split over the same axes, found {found}"
            raise refused(self, form, why, f"split both dimensions alike, or remove {form}")
        if low.oracle.ways(axes) == 1:
            return None
        # All else that it needs whole is gathered as ever.
        others = [n for n in self.roles(*(low.type_of(i) for i in ins)).whole if n != self.memory.name]
        if whole := low.layout.split(others):
            ins = [low.without(i, whole) for i in ins]
        lies = low.layout.with_rules(dict.fromkeys(others, ()))
        if form == ALL_TO_ALL:
            return _exchanged(self, low, ins, types, axes, lies)
        return Ring(self, low, axes, form, lies).run(ins, types, wanted)


def _exchanged(
    op: AnyAttention, low: Emitter, ins: Sequence[int], types: Sequence[TensorType], axes: Axes, lies: Layout
) -> Sequence[int]:
    sides = op.sides(*(low.type_of(i) for i in ins[:3]))
    heads = (*reversed(sides.shared.dims), *reversed(sides.group.dims))
    fits = (d for d in heads if not d.size % low.oracle.ways((*lies.axes(d.name), *axes)))
    dim = next(fits, None)
    if dim is None:
        found = ", ".join(map(str, heads)) or "none"
        ways = low.oracle.ways(axes)
        why = f"needs a dimension of heads whose size is divisible by {ways} devices, found {found}"
        raise refused(op, ALL_TO_ALL, why, "use ring")
    taken = {op.length.name: (), op.memory.name: (), dim.name: (*lies.axes(dim.name), *axes)}

    def split(names: Sequence[str]) -> tuple[Axes, ...]:
        """The natural ones, with the axes taken from the positions to the heads."""
        return tuple(taken.get(n, lies.axes(n)) for n in names)

    given = [low.type_of(i) for i in ins]
    placed = [low.placed(i, split(t.shape.names)) for i, t in zip(ins, given, strict=True)]
    reduced = op.roles(*given).reduced
    lacking = (split([n for n in reduced if n not in t.shape.names]) for t in types)
    partials = [low.oracle.ordered(a for found in each for a in found) for each in lacking]
    made = low.local(op, placed, types, [split(t.shape.names) for t in types], partials)
    return [summed(low, o) for o in made]
