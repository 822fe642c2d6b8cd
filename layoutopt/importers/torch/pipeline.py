"""Stages of a pipeline: where a module can be cut, and the module without the layers of other stages, run by
torch.distributed.pipelining.

A stage calls the module's own `forward`. Layers of earlier stages hand on what was received, and parts with
weights before the layers return zeros, which nobody reads; where the layers of the next stage would begin,
the call ends.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from layoutopt.importers.torch.calls import called, on_meta, torch_module
from layoutopt.importers.torch.stacks import LayerList, map_first
from layoutopt.importers.torch.trials import ModuleTrials
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


def part_of(own: Any, outline: StageOutline, begin: int, end: int) -> Any:
    """A module with the layers of one part of a stage, made of a copy of the whole module."""
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

    class ModuleStage(torch.nn.Module):  # type: ignore[name-defined]
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

    return ModuleStage


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


def outline_of(trials: ModuleTrials, stack: LayerList, rows: int) -> StageOutline | str:
    """Where a module can be cut between the layers of a stack, or why its code cannot run in stages."""
    leaves = torch_module().utils._pytree.tree_leaves
    paths, inside = stack.paths, tuple(f"{path}." for path in stack.paths)
    layers = [call for call in trials.calls if call.path in paths]
    ends = [n for n, call in enumerate(trials.calls) if call.path in paths]
    received = [next(filter(stack.carries, leaves(call.given)), None) for call in layers]
    # What the code between layers changes, as `x + layer(x)` does, a stage would change again.
    handed = all(x is before.out for x, before in zip(received[1:], layers, strict=False))
    if not stack.passed or tuple(c.path for c in layers) != paths or received[0] is None or not handed:
        return f"a layer after {paths[0]!r} does not take just what the one before returned"
    owners = {path.rpartition(".")[0] for path in trials.parameters}
    outer = {owner for owner in owners if owner not in paths and not owner.startswith(inside)}
    calls = [(n, call) for n, call in enumerate(trials.calls) if call.path in outer]
    twice = {path for path, count in Counter(call.path for _, call in calls).items() if count > 1}
    for n, call in calls:
        between = ends[0] < n < ends[-1]
        if call.path in twice or between or (n < ends[0] and not torch_module().is_tensor(call.out)):
            return f"{call.path} is called twice, between the layers, or returns several values"
    first = {call.path: tuple(call.out.shape) for n, call in calls if n < ends[0]}
    last = [call.path for n, call in calls if n > ends[-1]]
    around = [owner for owner in outer if not owner or any(_within(path, {owner}) for path in paths)]
    if apart := around or sorted(outer - first.keys() - {*last}):
        return f"parameters of {apart[0] or 'the module'!r} lie around the layers, or are read without a call"
    before = {p: shape for p, shape in first.items() if not _within(p, first)}
    passed = tuple(received[0].shape)  # which axis is the batch is told by its size
    if passed[0] != rows or any(s != passed and rows in (*s[1:], *passed[1:]) for s in before.values()):
        return f"which axis of {passed} is the batch of {rows} cannot be told; give another size of batch"
    after = tuple(p for p in last if not _within(p, last))
    outline = StageOutline(stack, before, after, rows)
    if why := _fails(trials, outline, received[0]):
        return f"the module does not run in stages: {why}"
    return outline


def _within(path: str, others: Collection[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def _fails(trials: ModuleTrials, outline: StageOutline, passed: Any) -> str:
    """Why a first stage does not run until the next begins, or a last one on what it gets; '': both do."""
    layers = len(outline.stack.paths)

    def staged(begin: int, own: Any) -> Any:
        part = part_of(own, outline, begin, begin + 1)
        part.received = (on_meta(passed),)
        return part.module

    first, last = (trials.run(None, partial(staged, n), outline.stack.paths) for n in (0, layers - 1))
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
