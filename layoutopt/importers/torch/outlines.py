"""Places where a module can be cut into stages of a pipeline, if any: found by running it without values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from layoutopt.importers.arrays.origin import ArrayAxes
from layoutopt.importers.torch.internals import torch_module
from layoutopt.importers.torch.pipeline import StageEnded, StageOutline, part_of
from layoutopt.importers.torch.stacks import LayerList
from layoutopt.importers.torch.trials import run_on_pieces
from mesh_tf_core.ir.blocks import Block
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.tracing.graph import Graph


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
