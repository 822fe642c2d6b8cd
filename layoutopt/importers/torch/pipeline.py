"""Stages of a pipeline: where a module can be cut, and the module without the layers of other stages, run by
torch.distributed.pipelining.

A stage calls the module's own `forward`. Layers of earlier stages hand on what was received, and parts with
weights before the layers return zeros, which nobody reads; where the layers of the next stage would begin,
the call ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from layoutopt.importers.arrays.placing import ArrayAxes
from layoutopt.importers.torch.internals import called, copied, torch_module
from layoutopt.importers.torch.passing import map_first
from layoutopt.importers.torch.stacks import LayerList
from layoutopt.importers.torch.trials import run_on_pieces
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import Block
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import CIRCULAR, GPIPE, INTERLEAVED, ONE_F_ONE_B, kind_name, layer_order
from mesh_tf_core.tracing.graph import Graph

SCHEDULES = {
    GPIPE: "ScheduleGPipe",
    ONE_F_ONE_B: "Schedule1F1B",
    CIRCULAR: "ScheduleLoopedBFS",
    INTERLEAVED: "ScheduleInterleaved1F1B",
}
"""Kinds of schedules -> classes of torch.distributed.pipelining."""


@dataclass(frozen=True)
class StageOutline:
    """Where a module can be cut.

    Attributes:
      before: path of each module with weights that runs before the layers -> the shape of its result.
      after: paths of those that run after them.
      rows: size of the batch in these shapes.
    """

    stack: LayerList
    before: Mapping[str, tuple[int, ...]]
    after: Sequence[str]
    rows: int


class StageEnded(Exception):
    """The value that the next stage begins with."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def stage_numbers(layers: int, stages: int, schedule: str) -> list[list[tuple[int, int]]]:
    """For each stage, the first layer of each of its parts and the one after its last."""
    ends = itertools.accumulate(map(int, layer_order(schedule, stages).counts(layers)), initial=0)
    spans = [*itertools.pairwise(ends)]
    return [spans[stage::stages] for stage in range(stages)]


def part_of(module: Any, outline: StageOutline, begin: int, end: int) -> Any:
    """A module with the layers of one part of a stage; its tensors are those of the whole module."""
    own = copied(module)
    paths = outline.stack.paths
    part: Any = _stage_class()(own, outline)
    for n, path in enumerate(paths):
        if not begin <= n < end:
            _emptied(own.get_submodule(path)).forward = part.ends if n >= end else part.passes
    for path, shape in outline.before.items() if begin else ():
        _emptied(own.get_submodule(path)).forward = partial(part.zeros, shape)
    for path in outline.after if end < len(paths) else ():
        _emptied(own.get_submodule(path))
    if 0 < begin < end:
        first = own.get_submodule(paths[begin])
        first.register_forward_pre_hook(part.begins, with_kwargs=True)
    return part


def _emptied(module: Any) -> Any:
    """A module whose parameters are not there; their types still are, which code may read."""
    for own in module.modules():
        for name, p in [*own._parameters.items()]:
            del own._parameters[name]
            setattr(own, name, None if p is None else p.detach().new_empty(0))
    return module


def _stage(part: Any, ready: Any, number: int, count: int, device: Any, group: Any) -> Any:
    """A stage of torch whose part is stored as the plan says. Torch itself keeps weights and gradients of a
    module under `fully_shard` whole until the last microbatch, so it is given one that calls the part."""
    from torch.distributed.pipelining import PipelineStage

    class StoredStage(PipelineStage):
        def backward_maybe_with_nosync(self, kind: Any, given: Any, last_backward: bool = False) -> Any:
            ready(part, last_backward)
            return super().backward_maybe_with_nosync(kind, given, last_backward)

    caller = torch_module().nn.Module()
    caller.part, caller.forward = part, lambda *received, **number: part(*received, **number)
    return StoredStage(caller, number, count, device, group=group)


def _stage_class() -> Any:
    torch = torch_module()

    class StagePart(torch.nn.Module):  # type: ignore[name-defined]
        """(what the stage before returned, number of a microbatch) -> what the next one gets, or the loss."""

        def __init__(self, module: Any, outline: StageOutline) -> None:
            super().__init__()
            self.module, self.outline = module, outline
            self.known = frozenset(module.state_dict())
            self.received: tuple[Any, ...] = ()
            self.batches: Sequence[Any] = ()
            self.loss: Any = None
            self.found: dict[int, Any] = {}

        def forward(self, *received: Any, part: Any) -> Any:
            self.received, number = received, int(part)
            torch.clear_autocast_cache()  # as in a step without stages
            try:
                if self.loss is None:
                    args, kwargs = called(self.module, self.batches[number])
                    return self.module(*args, **kwargs)
                found = self.loss(self.module, self.batches[number])
            except StageEnded as cut:
                return cut.value
            self.found[number] = (found[0].detach(), *found[1:])
            return found[0]

        def begins(self, layer: Any, args: Any, kwargs: Any) -> Any:
            return map_first(self.outline.stack.carries, lambda x: self.received[0], (args, kwargs))

        def passes(self, *args: Any, **kwargs: Any) -> Any:
            return self.received[0]

        def ends(self, *args: Any, **kwargs: Any) -> Any:
            raise StageEnded(
                next(filter(self.outline.stack.carries, torch.utils._pytree.tree_leaves((args, kwargs))))
            )

        def zeros(self, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
            """The shape of a result that only earlier stages read."""
            (like,) = self.received
            first = like.shape[0] if shape[0] == self.outline.rows else shape[0]
            return like.new_zeros((first, *shape[1:]))

    return StagePart


class Pipeline:
    """The parts of a module that one rank has.

    Attributes:
      parts: in order, each with its number.
    """

    def __init__(self, parts: Mapping[int, Any], schedule: str, stages: int, group: Any, device: Any) -> None:
        self.parts, self.schedule, self.stages = parts, schedule, stages
        self.group, self.device = group, device
        self._runs: Any = None

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """As of the whole module, of this rank's parts."""
        for part in self.parts.values():
            yield from part.module.named_parameters(prefix, recurse, remove_duplicate)

    def parameters(self) -> Iterator[Any]:
        """Those of the rank's parts."""
        return (p for _, p in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        """As of the whole module, of this rank's parts."""
        return (item for part in self.parts.values() for item in part.module.named_buffers())

    def state_dict(self) -> dict[str, Any]:
        """State of the rank's parts, under the names that the whole module has."""
        return {k: v for part in self.parts.values() for k, v in part.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Sets the tensors of the rank's parts from a state of the whole module. Returns the missing keys,
        and those that the module does not have."""
        known = next(iter(self.parts.values())).known
        unknown = [k for k in state if k not in known]
        if strict and unknown:
            raise UserError(
                f"load_state_dict: the module has no {unknown[0]!r}; {known_names(unknown[0], known)}"
            )
        found = []
        for part in self.parts.values():
            own = part.module.state_dict()
            found.append(part.module.load_state_dict({k: v for k, v in state.items() if k in own}, strict))
        return type(found[0])([k for each in found for k in each.missing_keys], unknown)

    def train(self, mode: bool = True) -> Pipeline:
        """Sets the mode of all parts."""
        for part in self.parts.values():
            part.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Sets all parts to evaluation."""
        return self.train(False)

    def run(self, loss: Any, batches: Sequence[Any], ready: Callable[[Any, bool], None]) -> list[Any]:
        """Runs forward and backward of all microbatches: what `loss` found for each, on the last stage.

        Args:
          ready: prepares a part for a backward pass, told whether it is the last one.
        """
        torch = torch_module()
        last = max(self.parts)
        for number, part in self.parts.items():
            part.batches, part.found = batches, {}
            part.loss = loss if number == self._count - 1 else None
        if self._runs is None:
            self._runs = self._scheduled(len(batches), ready)
        more = {"target": torch.zeros(len(batches))} if last == self._count - 1 else {}
        self._runs.step(part=torch.arange(len(batches)), return_outputs=False, **more)
        return [*self.parts[last].found.values()]

    @property
    def _count(self) -> int:
        return self.stages * layer_order(self.schedule, self.stages).rounds

    def _scheduled(self, microbatches: int, ready: Any) -> Any:
        from torch.distributed import pipelining

        stages = [
            _stage(part, ready, number, self._count, self.device, self.group)
            for number, part in self.parts.items()
        ]
        form = getattr(pipelining, SCHEDULES[kind_name(self.schedule)])
        own = stages[0] if len(stages) == 1 else stages
        return form(own, microbatches, loss_fn=lambda out, target: out, scale_grads=False)


# -- where a module can be cut -------------------------------------------------------------------------------


def outline_of(
    module: Any, batch: Any, parameters: Mapping[str, ArrayAxes], log: CallLog, rows: int
) -> StageOutline | str:
    """Where a module can be cut between the layers of a stack, or why its code cannot run in stages."""
    stack = log.stack
    if log.odd:
        return f"{log.odd} is called twice, between the layers, or returns several values"
    if not log.chained:
        return f"a layer after {stack.paths[0]!r} does not take just what the one before returned"
    owners = {path.rpartition(".")[0] for path in parameters}
    inside = tuple(f"{path}." for path in stack.paths)
    outer = {owner for owner in owners if owner not in stack.paths and not owner.startswith(inside)}
    around = [owner for owner in outer if not owner or any(_within(path, {owner}) for path in stack.paths)]
    if apart := around or sorted(outer - log.before.keys() - {*log.after}):
        return f"parameters of {apart[0] or 'the module'!r} lie around the layers, or are read without a call"
    before = {p: shape for p, shape in log.before.items() if not _within(p, log.before)}
    passed = tuple(log.passed.shape)  # which axis is the batch is told by its size
    if passed[0] != rows or any(s != passed and rows in (*s[1:], *passed[1:]) for s in before.values()):
        return f"which axis of {passed} is the batch of {rows} cannot be told; give another size of batch"
    after = tuple(p for p in log.after if not _within(p, log.after))
    outline = StageOutline(stack, before, after, rows)
    if why := _fails(module, batch, parameters, outline, log.passed):
        return f"the module does not run in stages: {why}"
    return outline


def _within(path: str, others: Collection[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


class CallLog:
    """The modules that are called before the layers of a stack, and after them.

    Attributes:
      chained: each layer takes what the one before returned.
      odd: the path of what is called in a way that stages cannot; "" if nothing is.
      passed: the type of what a layer gets.
    """

    def __init__(self, stack: LayerList) -> None:
        self.stack, self.before, self.after = stack, dict[str, tuple[int, ...]](), list[str]()
        self.chained, self.odd, self._out, self._at = bool(stack.passed), "", None, 0
        self.passed: Any = None

    def listen(self, module: Any) -> None:
        """Puts hooks on a module."""
        inside = tuple(f"{path}." for path in self.stack.paths)
        for n, path in enumerate(self.stack.paths):
            layer = module.get_submodule(path)
            layer.register_forward_pre_hook(
                lambda own, args, kwargs, n=n: self._begins(n, args, kwargs), with_kwargs=True
            )
            layer.register_forward_hook(lambda own, given, out: self._ends(out))
        for path, own in module.named_modules():
            held = [*own.named_parameters(recurse=False)]
            if held and path not in self.stack.paths and not path.startswith(inside):
                own.register_forward_hook(lambda own, given, out, path=path: self._called(path, out))

    def _begins(self, n: int, args: Any, kwargs: Any) -> None:
        leaves = torch_module().utils._pytree.tree_leaves((args, kwargs))
        found = [*filter(self.stack.carries, leaves)]
        # What the code between layers changes, as `x + layer(x)` does, a stage would change again.
        same = self._at == 2 * n and found and (n == 0 or found[0] is self._out)
        self.chained = bool(self.chained and same)
        self.passed = self.passed if n else next(iter(found), None)
        self._at += 1

    def _ends(self, out: Any) -> None:
        self.chained = self.chained and self.stack.carries(out)
        self._out = out
        self._at += 1

    def passes(self, *args: Any, **kwargs: Any) -> Any:
        """In place of a layer."""
        return next(filter(self.stack.carries, torch_module().utils._pytree.tree_leaves((args, kwargs))))

    def _called(self, path: str, out: Any) -> None:
        last = self._at == 2 * len(self.stack.paths)
        odd = path in self.before or path in self.after or not (last or not self._at)
        if odd or not (self._at or torch_module().is_tensor(out)):
            self.odd = self.odd or path
        if self._at:
            self.after.append(path)
        else:
            self.before[path] = tuple(getattr(out, "shape", ()))


def shortened(module: Any, logs: Collection[CallLog]) -> None:
    """Leaves a copy of a module the first two layers of each stack: the others are like these."""
    for log in (each for each in logs if each.chained):
        for path in log.stack.paths[2:]:
            module.get_submodule(path).forward = log.passes


def _fails(
    module: Any, batch: Any, parameters: Mapping[str, ArrayAxes], outline: StageOutline, passed: Any
) -> str:
    """Why a first stage does not run until the next one begins, or a last stage on what it receives; '' if
    they do."""
    layers = len(outline.stack.paths)

    def staged(begin: int, own: Any) -> Any:
        part = part_of(own, outline, begin, begin + 1)
        part.received = (passed,)
        return part.module

    trial = partial(run_on_pieces, module, parameters, batch)
    first, last = (trial(prepare=partial(staged, begin))[0] for begin in (0, layers - 1))
    return last if first.endswith(StageEnded.__name__) else first or "its first stage runs to the end"


def passes_alone(graph: Graph, stack: LayerList, live: Collection[int], weights: Collection[int]) -> bool:
    """True if a later stage needs nothing of earlier ones but what layers hand on.

    Args:
      live, weights: values that depend on weights, and weights.
    """
    nodes = [n for n in graph.blocks[0].nodes if n.phase == Phase.FORWARD]
    at = nodes.index(stack.node)
    early = {o for n in nodes[:at] for o in n.outputs}
    body = stack.node.body
    assert body is not None
    later = {i for n in nodes[at + 1 :] for i in n.inputs} | {*_inputs(body)}
    early |= {*stack.node.outputs[len(body.carry_in) :]}
    used = {i for n in nodes[:at] for i in (*n.inputs, *(_inputs(n.body) if n.body else ()))}
    outer = {o for n in nodes for o in n.outputs}
    shared = {*_inputs(body)} & outer & {*weights}
    return len(body.carry_in) == 1 and not (early & later & {*live} or used & later & {*weights} or shared)


def _inputs(block: Block) -> Iterator[int]:
    for node in block.nodes:
        yield from node.inputs
        if node.body is not None:
            yield from _inputs(node.body)
