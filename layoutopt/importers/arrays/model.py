"""Models that are functions of other libraries.

Microbatches of a function's step: parts of the batch must add up to the loss.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mesh_tf_core as mtf
from layoutopt.importers.arrays.placing import ArrayPlacing, ImportedFunction
from layoutopt.plan.build import Plan, check_plan_model
from layoutopt.plan.exported import ExportedTensor
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Assign, Feed, Node, Read
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.model import TrainingStep
from mesh_tf_core.ops.basic import Constant
from mesh_tf_core.ops.index import Range
from mesh_tf_core.ops.reduce import Reduce
from mesh_tf_core.tracing.batch_linearity import INSEPARABLE, BatchLinearity, Linearity, TensorLinearity
from mesh_tf_core.tracing.copying import batch_names
from mesh_tf_core.tracing.graph import graph_of


def why_whole(loss: Tensor, origin: ImportedFunction, batch: str) -> str:
    """Why a function cannot run on parts of its batch one after the other, with its line; '' if it can.

    Args:
      batch: the dimension that is cut.
    """
    try:
        added_results(loss, origin, batch)
    except UserError as error:
        return not_first(origin, batch) or str(error)
    return not_first(origin, batch)


def not_first(origin: ImportedFunction, batch: str) -> str:
    """Why the first axis of some input is not the batch dimension alone; '' if it is in all."""
    for path, array in origin.batch.items():
        if not array.axes or array.axes[0] != (batch,):
            names = " x ".join(array.axes[0]) if array.axes else ""
            return f"the first axis of {path!r} is {names or 'one element'}, not the batch dimension"
    return ""


def why_not_added(loss: Tensor, batch: str, whole: frozenset[int]) -> tuple[str, list[str], bool]:
    """Why the losses of parts of a batch do not add up to its loss, with the line, '' if they do; the
    variables of state whose new values each part would make of its own examples; and whether the loss is a
    sum over examples divided by another, which add up each.

    Args:
      whole: tensors that every part has of the whole batch.
    """
    graph = graph_of(loss)

    class GivenLinearity(BatchLinearity):
        def _visit(self, node: Node) -> None:
            if not whole.isdisjoint(node.outputs):
                return
            super()._visit(node)
            if not fed.isdisjoint(node.inputs):  # groups of examples, and the examples of a group
                self._found.update((o, self._fed(graph.tensor(o).type)) for o in node.outputs)
            for o in node.outputs if isinstance(node.op, Range | Read) else ():
                if self._batch(graph.tensor(o).type):  # not the numbers that a part counts for itself
                    self._found[o] = INSEPARABLE
                    self._explain(node, o, INSEPARABLE)

    nodes = [n for n in graph.nodes if n.phase == Phase.FORWARD]
    grouped = (o for n in nodes if isinstance(n.op, Feed) for o in n.outputs)
    fed = {o for o in grouped if batch not in graph.tensor(o).type.shape.names}
    linearity = GivenLinearity(graph, batch_names(graph, batch), nodes)
    kept = [(n.op.variable.name, n.inputs[0]) for n in nodes if isinstance(n.op, Assign)]
    changed = [name for name, new in kept if linearity.of(new).kind is not Linearity.REPLICATED]
    found = linearity.of(loss.id)
    if found.kind is Linearity.REDUCIBLE and not found.after:
        return "", changed, False
    divided = _divided(BatchLinearity(graph, linearity.names, nodes), loss.id, nodes)
    return "" if divided else linearity.why.get(loss.id, "its operations"), changed, divided


def _divided(linearity: BatchLinearity, loss: int, nodes: Sequence[Node]) -> bool:
    """True if the loss is a sum over the examples of the batch, divided by another one that no gradient flows
    through, as a mean over a mask is: both are sums of those of its parts."""
    made = {o: n for n in nodes for o in n.outputs}

    def summed(tensor: int, least: bool = False) -> bool:
        node = made[tensor]
        others = [i for i in node.inputs if not isinstance(made[i].op, Constant)]
        if least and getattr(node.op, "fn", "") == "max" and len(others) == 1:  # the mask may be empty
            return summed(others[0])
        adds = isinstance(node.op, Reduce) and node.op.fn == "sum"
        if adds and linearity.of(node.inputs[0]).kind is Linearity.PER_EXAMPLE:
            return linearity.of(tensor) == TensorLinearity(Linearity.REDUCIBLE)
        return (adds or node.op.converts) and summed(node.inputs[0], least)

    above, *below = made[loss].inputs
    if getattr(made[loss].op, "fn", "") != "div" or not summed(above) or not summed(below[0], True):
        return False
    for node in reversed(nodes):
        if not set(below).isdisjoint(node.outputs):
            if node.body is not None or (isinstance(node.op, Read) and node.op.variable.trainable):
                return False
            below += node.inputs
    return True


def added_results(loss: Tensor, origin: ImportedFunction, batch: str) -> tuple[bool, ...]:
    """For each array that the function returns, whether the parts' values of it add up to that of the whole
    batch; else it does not depend on the batch, as a counter of draws.

    Raises:
      UserError: neither, with the line that is why.
    """
    graph = graph_of(loss)
    nodes = [n for n in graph.nodes if n.phase == Phase.FORWARD]
    linearity = BatchLinearity(graph, batch_names(graph, batch), nodes)
    tensors = [origin.tensors.get(id(x), -1) for x in origin.rerolled.block.outs]
    tensors[0] = loss.id
    added: list[bool] = []
    for name, tensor in zip(origin.results, tensors, strict=True):
        found, what = linearity.of(tensor), f"the auxiliary value {name!r}" if added else "the loss"
        added.append(found.kind is Linearity.REDUCIBLE or not added)
        if found.after or found.kind is not (Linearity.REDUCIBLE if added[-1] else Linearity.REPLICATED):
            why = linearity.why.get(tensor, "its operations")
            raise UserError(
                f"{what} is not a sum over the examples of the batch (see {why}): a count of unmasked "
                "examples, or a statistic of BatchNorm (not of LayerNorm or GroupNorm), needs all of them"
            )
        if added[-1] and (term := _shared(linearity, nodes, tensor)):
            raise UserError(
                f"{what} has a term that does not depend on the batch, which every microbatch would add "
                f"again ({term})"
            )
    return tuple(added)


def _shared(linearity: BatchLinearity, nodes: Sequence[Node], tensor: int) -> str:
    """The operation of a sum that adds what is the same in every part; '' if there is none."""
    needed = {tensor}
    for node in reversed(nodes):
        if needed.isdisjoint(node.outputs):
            continue
        needed.update(node.inputs)
        for each in (node, *(inner for inner, _ in node.body.walk())) if node.body else (node,):
            if linearity.shared.get(each.index):
                return f"{each.op.describe()}{f' in {each.scope}' if each.scope else ''}"
    return ""


KEEPS = "choose the values that recomputed layers keep with --recompute DIM:keep=KIND"


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for unused cycles: an import makes a million objects, of which nearly all stay in use."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on and not gc.get_freeze_count():
            # To the oldest generation, or the first allocation after this would look through all of them.
            gc.freeze()
            gc.unfreeze()
        (gc.enable if on else gc.disable)()


@dataclass
class ImportedModel(mtf.Model):
    """A model that a function of another library is.

    Attributes:
      front_end: its name in `front_ends`.
      divided: the loss is a sum over examples divided by another (`why_not_added`).
      recomputes: its own checkpoints run under any plan.
    """

    origin: ImportedFunction | None = field(default=None, repr=False, compare=False)
    divided: bool = field(default=False, repr=False, compare=False)
    recomputes: bool = field(default=False, repr=False, compare=False)
    front_end: ClassVar[str] = ""

    @property
    def batch_dim(self) -> str | None:
        """As `Model` has it; of examples in groups, the outer part of the first axis of all inputs."""
        firsts = {a.axes[0][:1] for a in self.origin.batch.values() if a.axes} if self.origin else set()
        return super().batch_dim or (next(iter(*firsts), None) if len(firsts) == 1 else None)

    def applied(self, plan: Plan) -> Any:
        """The plan in the user's own function."""
        raise NotImplementedError

    def arrays(self, plan: Plan) -> dict[str, tuple[ExportedTensor, ...]]:
        """The user's own arrays as the plan stores them; UserError as `applied` has it."""
        check_plan_model(plan, self)
        origin = self.origin
        assert origin is not None
        lies = ArrayPlacing(plan.mesh, plan.layout, origin, self.lower(plan.mesh, plan.layout, plan.options))
        found = {
            "PARAMETERS": [(a, lies.stored(a)) for a in origin.parameters.values()],
            "OPTIMIZER": [(a, lies.stored(a, slot=True)) for a in origin.parameters.values()],
            "STATE": [(a, lies.stored(a)) for a in origin.state.values()],
            "INPUTS": [(a, lies.argument(a)) for a in origin.batch.values()],
        }
        return {
            name: tuple(
                ExportedTensor(a.path, a.named, tuple(axes or () for axes in spec), a.shape)
                for a, spec in listed
            )
            for name, listed in found.items()
            if listed
        }

    def notes(self, options: mtf.Options) -> tuple[str, ...]:
        """Notes on parts of the function that are not in the graph, and on options that differ from the
        function's own."""
        assert self.origin is not None
        this = f"this {self.origin.front_end.checkpoint}"
        ends = "runs, but predictions have no second run" if self.recomputes else "is not applied"
        parts = [f"{w}: {this} covers only part of a layer and {ends}" for w in self.origin.parts_recomputed]
        parts = parts if self.recomputes else [f"{part}; {KEEPS}" for part in parts]
        own = sorted(self.origin.recomputed - {each.dim for each in options.recompute})
        left = [f"the plan does not recompute the loop over {', '.join(own)}: {this} of the function {ends}"]
        return (*super().notes(options), *self.origin.notes, *parts, *(left if own else ()))

    def _added_up(self, microbatches: int, layers: str = "", schedule: str = "") -> TrainingStep:
        if microbatches > 1 and (why := self._why_whole(layers)):
            raise UserError(f"microbatches={microbatches}: {why}; use one microbatch")
        return super()._added_up(microbatches, layers, schedule)

    def _why_whole(self, layers: str) -> str:
        """Only where the user's own step can be run so too: no search finds what `applied` would refuse."""
        origin, batch = self.origin, self.batch_dim
        if layers or origin is None or batch is None:
            return ""
        return self.graph.remembered("why_whole", lambda: why_whole(self.loss, origin, batch))
