"""The dimensions that styles of DTensor split: those of linear maps and embeddings, whose pieces pass through
everything in between without an exchange.

`ColwiseParallel` hands out the piece of its results, and `RowwiseParallel` takes one. What lies in between
runs on the pieces as if they were all. It may neither sum over the dimension nor mix it with values that all
ranks have alike: their gradients would be parts of a sum. A weight in between, such as that of a norm of each
head, may: its gradient is added up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from layoutopt.importers.arrays.placing import ArrayAxes, ImportedFunction
from layoutopt.importers.arrays.relations import TO
from layoutopt.importers.torch.calls import run_once, torch_module
from layoutopt.importers.torch.pipeline import StageOutline, outline_of, passes_alone
from layoutopt.importers.torch.ranks import expert_modules, mixing, takes_rows, with_fewer
from layoutopt.importers.torch.stacks import (
    LayerList,
    PassingHooks,
    TensorBlock,
    layers_of,
    on_shapes,
    stacks_of,
    tensor_blocks,
)
from layoutopt.importers.torch.trials import ModuleTrials
from layoutopt.plan.units import some
from mesh_tf_core.ir.blocks import Assign, Node, Read
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.op import Roles
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ops.softmax import CrossEntropy, LogSumExp
from mesh_tf_core.tracing.graph import Graph

SIZED = "code with the size written into it runs with sizes of tensors, as in q.view(b, t, -1, head_dim)"


def module_parameters(module: Any, origin: ImportedFunction) -> dict[str, ArrayAxes]:
    """Every path of every parameter of a module -> its axes; all paths of a tied one have the same."""
    own = {path.replace("/", "."): array for path, array in origin.parameters.items()}
    paths = dict(module.named_parameters(remove_duplicate=False))
    first = {id(paths[path]): array for path, array in own.items()}
    return {path: first[id(p)] for path, p in paths.items() if id(p) in first}


Owned = list[tuple[str, ArrayAxes, Any]]
ReadBy = dict[str, set[str]]
"""Path of a parameter -> the modules whose own code reads it."""


def owned(module: Any, parameters: Mapping[str, ArrayAxes]) -> Owned:
    """Every parameter: its dotted path, its axes, and the module that has it."""
    modules = dict(module.named_modules(remove_duplicate=False))
    return [(path, array, modules[path.rpartition(".")[0]]) for path, array in parameters.items()]


def linear_dims(parameters: Owned) -> tuple[set[str], set[str]]:
    """The dimensions that linear maps and embeddings make, and those over which linear maps sum: pieces of
    the others are gathered where they are made."""
    nn, made, summed = torch_module().nn, set[str](), set[str]()
    for path, array, kind in parameters:
        if path.rpartition(".")[2] == "weight" and isinstance(kind, nn.Linear | nn.Embedding):
            rows, columns = array.axes if isinstance(kind, nn.Linear) else array.axes[::-1]
            made.update(rows)
            summed.update(columns if isinstance(kind, nn.Linear) else ())
    return made, summed


def fused_dims(parameters: Owned) -> dict[str, str]:
    """The dimensions that pieces of one linear map have inside of what another one makes, and why these
    cannot be split."""
    linear = torch_module().nn.Linear | torch_module().nn.Embedding
    weights = [(path, a) for path, a, of in parameters if isinstance(of, linear) and len(a.axes) == 2]
    first, found = {a.axes[1][0] for _, a in weights if a.axes[1]}, dict[str, str]()
    for path, a in weights:
        for n, name in enumerate(a.axes[0]):
            if n and name in first:
                text = " x ".join(f"{x}:{size}" for x, size in zip(a.axes[0], a.sizes[0], strict=True))
                why = f"it is an inner part of the first axis of {path} ({text}), which DTensor cannot split"
                parts = f"each of the {math.prod(a.sizes[0][:n])} parts"
                found.setdefault(
                    name, f"{why}; give {parts} a linear map of its own, as q, k and v in place of qkv"
                )
    return found


class StyleFlow:
    """The styles that a split of each dimension would need.

    Attributes:
      called: paths of modules that are called; None: unknown.
      reads: the readers of every parameter; of a tied one, under each of its paths.
      norms: paths of modules whose own code takes statistics of the batch by `batch_norm`.
      without: dimension -> why no style splits it.
      partial: dimension -> the variables whose gradients are parts of a sum if it is split; of a sequence, if
        it is split between tensor-parallel blocks.
      parameters: path -> the axes of the parameter as dimensions.
      layers: path of a module -> the dimension of the loop whose iteration it is; `stacks`: those in order.
      experts: path of a module of experts -> their dimension.
      outline: where the module can be cut into stages of a pipeline; None: nowhere.
      checkpoints: code of the module calls torch.utils.checkpoint, in place of which the plan recomputes.
      code: those of `without` that the module's code is the reason for.
      limits: fields of the search space -> their values, where the module allows fewer, and why.
    """

    def __init__(
        self, graph: Graph, module: Any, origin: ImportedFunction, rows: int, norms: Collection[str] = ()
    ) -> None:
        parameters = self.parameters = module_parameters(module, origin)
        self.graph, self.sources, self._rows = graph, origin.sources, rows
        self.outline: StageOutline | None = None
        self.layers = layers_of(module, parameters, graph)
        self.stacks = stacks_of(graph, self.layers)
        self._held = {a.variable for a in parameters.values()}
        stacked = (a.variable for a in parameters.values() if a.layer is not None)
        loops = {graph.variables[name].shape.names[0] for name in stacked}
        self.limits, self.code = dict[str, tuple[tuple[Any, ...], str]](), dict[str, str]()
        if {*self.layers.values()} != loops:
            self.limits["recompute"] = (False,), "its layers are not modules that are called"
        # A second run changes running statistics once more: those of the module are its own with it.
        self.norms = norms
        self.checkpoints = not norms and any(e.recomputed for e in origin.rerolled.block.walk())
        kept = (n.op.variable for n in graph.blocks[0].nodes if isinstance(n.op, Assign))
        if state := [v.name.removeprefix("state/").replace("/", ".") for v in kept if v.stacked]:
            why = f"the forward changes {some(state, 3, 80)}, and would do so twice"
            self.limits["recompute"] = (False,), why
        for name, only in (("recompute", False), ("microbatches", 1)) if norms else ():
            self.limits[name] = (only,), "BatchNorm has statistics of the whole batch, taken once"
        self.without: dict[str, str] = {}
        self.partial: dict[str, set[str]] = {}
        self._weights: dict[int, frozenset[str]] = {}
        self._live: set[int] = set()
        found = (e for e in origin.rerolled.block.walk() if e.prim == TO)
        choices = frozenset(origin.names[origin.classes.of(e.ins[1], 0)[0]] for e in found)
        self.experts = dict(expert_modules(module, parameters, choices))
        for path in mixing(origin.block, self.experts):
            self.without[self.experts[path]] = f"{path} does more than add up what it makes of single rows"
        names, held = dict[str, int](), owned(module, parameters)
        by = dict[str, set[str]]()
        for x, scope in ((x, e.scope) for e in origin.block.walk() for x in e.ins):
            by.setdefault(getattr(x, "path", ""), set()).add(scope.replace("/", "."))
        self.reads = {path: by.get(array.path, set()) for path, array in parameters.items()}
        for path, array, of in held:
            styled = isinstance(of, torch_module().nn.Linear | torch_module().nn.Embedding)
            sent = path.rpartition(".")[0] in self.experts
            for name, size in zip(sum(array.axes, ()), sum(array.sizes, ()), strict=True):
                names[name] = size
                tied = (p.rpartition(".")[0] for p, a in parameters.items() if a is array)
                if styled and self.reads[path].difference(tied):
                    self.without.setdefault(name, f"code outside of its module reads {path}")
                if not styled and not (sent and name in choices):
                    self.without.setdefault(name, f"{path} is neither of a linear map nor of an embedding")
        self._sizes = names
        made, summed = linear_dims(held)
        self._between = names.keys() & summed
        for name in self._between - made:
            self.without.setdefault(name, "it is part of what is given to linear maps, and none makes it")
        self.code.update(fused_dims(held))
        self.without.update(self.code)
        self._outer = names.keys() - self._between
        for node in graph.blocks[0].nodes:
            if node.phase == Phase.FORWARD:
                self._visit(node)

    def _visit(self, node: Node) -> None:
        body = node.body
        if body is not None:
            for outer, inner in (*body.sliced, *zip(node.inputs, body.carry_in, strict=False)):
                if outer in self._weights:
                    self._weights[inner] = self._weights[outer]
            self._live.update(t for t in body.carry_in if is_float(self.graph.tensor(t).dtype))
            for each in body.nodes:
                self._visit(each)
            self._live.update(node.outputs)
            return
        if isinstance(node.op, Read) and node.op.variable.name in self._held:
            self._weights[node.outputs[0]] = frozenset({node.op.variable.name})
        if not node.inputs:
            return
        weights = [self._weights.get(i, frozenset[str]()) for i in node.inputs]
        if all(weights):
            self._weights.update(dict.fromkeys(node.outputs, frozenset[str]().union(*weights)))
            return
        if any(weights) or self._live.intersection(node.inputs):
            self._live.update(node.outputs)
        self._check(node, weights)

    def _check(self, node: Node, weights: list[frozenset[str]]) -> None:
        """Notes what an operation on values of the batch needs of each dimension."""
        tensors = [self.graph.tensor(i) for i in node.inputs]
        out = {n for o in node.outputs for n in self.graph.tensor(o).type.shape.names}
        seen = out | {n for t in tensors for n in t.type.shape.names}
        touched = self._between & seen
        for name in touched & out:  # each rank has a part of the gradient of a weight without the dimension
            self._note_partial(name, node, weights)
        if any(weights) and node.op.kind in ("matmul", "gather"):
            return
        roles = _roles(node, self.graph)
        for name in touched:
            lacking = [i for i, t in enumerate(tensors) if name not in t.type.shape.names and name in out]
            if name in roles.whole or name in roles.reduced:
                self.without.setdefault(name, f"{self._what(node)} needs all of it")
            elif any(node.inputs[i] in self._live and not weights[i] for i in lacking):
                why = f"{self._what(node)} combines it with values that all ranks have alike"
                self.without.setdefault(name, why)
        if not isinstance(node.op, CrossEntropy | LogSumExp):  # `loss_parallel` has these of pieces
            # What gets another name is what code may cut, as `chunk` does; rows leave experts by themselves.
            cut = seen - out - {*self.experts.values()}
            for name in self._outer & (seen & {*roles.whole, *roles.reduced} | cut):
                self.without.setdefault(name, f"{self._what(node)} needs all of it")

    def _what(self, node: Node) -> str:
        return f"{node.op.describe()} in {self.sources.get(node.index) or node.scope or 'the loss'}"

    def _note_partial(self, name: str, node: Node, weights: list[frozenset[str]]) -> None:
        for i, own in zip(node.inputs, weights, strict=True):
            if own and name not in self.graph.tensor(i).type.shape.names:
                self.partial.setdefault(name, set()).update(own)

    def try_out(self, trials: ModuleTrials) -> None:
        """Runs the module without values on pieces: code with the size of a dimension written into it
        (`x.view(b, t, self.heads, -1)`) fails."""
        self.called = {call.path for call in trials.calls}
        rows = {call.path for call in trials.calls if takes_rows(*call.given, call.out)}
        for path in self.experts.keys() - rows:
            name = self.experts.pop(path)
            self.without[name] = f"{path} is not called with tokens, numbers of experts and weights"

        def short(names: Collection[str], ways: Mapping[str, int], own: Any) -> None:
            self._alike(own)
            for path, dim in ((path, dim) for path, dim in self.experts.items() if dim in names):
                with_fewer(own.get_submodule(path), self._sizes[dim], ways.get(dim, 1))

        def fails(names: Collection[str], cut: bool = True) -> str:
            sizes = {name: self._sizes[name] for name in names if cut}
            pieces = {d: next((n for n in range(2, s + 1) if s % n == 0), 1) for d, s in sizes.items()}
            return trials.run(pieces, partial(short, names, pieces), trials.owners(names))

        tried = sorted((self._between | {*self.experts.values()}) - self.without.keys())
        failed = {name: why for name in tried if (why := fails([name]))}
        self.code |= {d: f"the module does not run on a part of it: {w}; {SIZED}" for d, w in failed.items()}
        lines = {why.partition(": ")[0]: name for name, why in failed.items()}  # what runs once, runs again
        if failed and (whole := fails(lines.values(), cut=False)):
            unknown = f"no code is known to run on a part of it: without values it does not run: {whole}"
            self.code |= dict.fromkeys(failed, unknown)
        self.without |= self.code
        trained = {n for a in self.parameters.values() for names in a.axes for n in names}
        passed = {name for stack in self.stacks for name in stack.passed[1:]} - trained
        between = tuple(sorted(n for n in passed if self._between_blocks(trials, n)))
        why = "layers need tensor-parallel blocks, as attention and MLP, that are modules of their own"
        self.limits["elsewhere"] = between, why
        outline = self._outline(trials)
        if isinstance(outline, str):
            self.limits["pipeline"] = (), outline
        self.outline = None if isinstance(outline, str) else outline

    def _alike(self, module: Any) -> None:
        """Lets one layer of each stack run for all."""
        for stack in self.stacks:
            run_once([module.get_submodule(path) for path in stack.paths])

    def _outline(self, trials: ModuleTrials) -> StageOutline | str:
        """Where the module can be cut into stages, or why it cannot."""
        if "microbatches" in self.limits:
            return self.limits["microbatches"][1]
        loops = {*self.layers.values()}
        stack = next((s for s in self.stacks if s.passed and {s.dim} == loops), None)
        if stack is None:
            kinds = torch_module().nn.ModuleList | torch_module().nn.Sequential
            lists = [
                repr(path) for path, own in trials.module.named_modules() if isinstance(own, kinds) and path
            ]
            return (
                "stages need all layers in one list of modules of equal shapes, each of which takes what the "
                f"one before returns; the module's lists are {', '.join(lists) or 'none'}"
            )
        if not passes_alone(self.graph, stack, self._live, self._weights):
            return (
                "code after the layers reads values or weights from before them, which lie on another stage"
            )
        return outline_of(trials, stack, self._rows)

    def blocks(self, module: Any, stack: LayerList, layout: Layout | None = None) -> list[TensorBlock]:
        """The blocks of a stack's layers, of those dimensions that a layout splits, or of all."""
        split = self._between - self.without.keys()
        split = {n for n in split if layout is None or layout.axes(n)}
        return [*tensor_blocks(module, stack.paths, self.parameters, split)]

    def _between_blocks(self, trials: ModuleTrials, name: str) -> bool:
        """Whether a dimension can be split between the blocks of every stack that passes it on."""
        for stack in (s for s in self.stacks if name in s.passed):
            blocks = self.blocks(trials.module, stack)
            inside = tuple(f"{block.path.replace('.', '/')}/" for block in blocks)
            assert stack.node.body is not None
            nodes = [n for n in stack.node.body.nodes if n.inputs and not n.scope.startswith(inside)]
            roles = (_roles(node, self.graph) for node in nodes)
            if not blocks or any(name in own.whole or name in own.reduced for own in roles):
                return False
            for node in nodes:
                self._note_partial(name, node, [self._weights.get(i, frozenset()) for i in node.inputs])
            hooks = on_shapes(stack.carries, stack.passed.index(name), 2)
            prepare = partial(self._in_pieces, hooks, stack, blocks)
            if trials.run(prepare=prepare, parts=[p for block in blocks for p in block.exits]):
                return False
        return True

    def _in_pieces(
        self, hooks: PassingHooks, stack: LayerList, blocks: list[TensorBlock], module: Any
    ) -> None:
        self._alike(module)
        hooks.install(module, stack.paths, blocks)
        for path in (p for block in blocks for p in block.exits):
            module.get_submodule(path).register_forward_hook(lambda own, given, out: hooks.split(out))


def _roles(node: Node, graph: Graph) -> Roles:
    types = [graph.tensor(i).type for i in node.inputs]
    try:
        return node.op.roles(*types)
    except NotImplementedError:  # an operation with a lowering of its own
        return Roles(whole=dict.fromkeys({n for t in types for n in t.shape.names}, ""))
