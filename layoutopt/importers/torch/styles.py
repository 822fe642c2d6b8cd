"""The dimensions that styles of DTensor split: those of linear maps and embeddings, whose pieces pass through
everything in between without an exchange.

`ColwiseParallel` hands out the piece of its results, and `RowwiseParallel` takes one. What lies in between
runs on the pieces as if they were all. It may neither sum over the dimension nor mix it with values that all
ranks have alike: their gradients would be parts of a sum. A weight in between, such as that of a norm of each
head, may: its gradient is added up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import combinations
from typing import Any

from layoutopt.importers.arrays.placing import ArrayAxes, ImportedFunction
from layoutopt.importers.arrays.relations import TO
from layoutopt.importers.torch.expert_ranks import adds_up, expert_modules, takes_rows, with_fewer
from layoutopt.importers.torch.internals import torch_module
from layoutopt.importers.torch.passing import PassingHooks, on_shapes
from layoutopt.importers.torch.pipeline import CallLog, StageOutline, outline_of, passes_alone, shortened
from layoutopt.importers.torch.stacks import LayerList, TensorBlock, layers_of, stacks_of, tensor_blocks
from layoutopt.importers.torch.trials import run_on_pieces
from mesh_tf_core.ir.blocks import Node
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.op import Roles
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.structure import Read
from mesh_tf_core.ops.softmax import CrossEntropy, LogSumExp
from mesh_tf_core.tracing.graph import Graph


def module_parameters(module: Any, origin: ImportedFunction) -> dict[str, ArrayAxes]:
    """Every path of every parameter of a module -> its axes; all paths of a tied one have the same."""
    own = {path.replace("/", "."): array for path, array in origin.parameters.items()}
    paths = dict(module.named_parameters(remove_duplicate=False))
    first = {id(paths[path]): array for path, array in own.items()}
    return {path: first[id(p)] for path, p in paths.items() if id(p) in first}


def linear_axes(module: Any, parameters: Mapping[str, ArrayAxes]) -> Iterator[tuple[str, ArrayAxes, bool]]:
    """Every parameter, with its dotted path, and whether styles can split it."""
    nn = torch_module().nn
    for path, array in parameters.items():
        owner = module.get_submodule(path.rpartition(".")[0])
        yield path, array, isinstance(owner, nn.Linear | nn.Embedding)


def summed_dims(module: Any, parameters: Mapping[str, ArrayAxes]) -> set[str]:
    """The dimensions over which linear maps sum: pieces of the others are gathered where they are made."""
    nn, found = torch_module().nn, set[str]()
    for path, array in parameters.items():
        owner, _, own = path.rpartition(".")
        if own == "weight" and isinstance(module.get_submodule(owner), nn.Linear):
            found.update(array.axes[1])
    return found


class StyleFlow:
    """The styles that a split of each dimension would need.

    Attributes:
      called: paths of modules that are called; None: unknown.
      without: dimension -> why no style splits it.
      partial: dimension -> the variables whose gradients are parts of a sum if it is split; of a sequence, if
        it is split between tensor-parallel blocks.
      parameters: path -> the axes of the parameter as dimensions.
      layers: path of a module -> the dimension of the loop whose iteration it is; `stacks`: those in order.
      experts: path of a module of experts -> their dimension.
      outline: where the module can be cut into stages of a pipeline; None: nowhere.
      code: those of `without` that the module's code is the reason for.
      limits: fields of the search space -> their values, where the module allows fewer, and why.
    """

    def __init__(self, graph: Graph, module: Any, origin: ImportedFunction, rows: int) -> None:
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
        norms = torch_module().nn.modules.batchnorm._BatchNorm
        if any(isinstance(own, norms) for own in module.modules()):
            for name, only in (("recompute", False), ("microbatches", 1)):
                self.limits[name] = (only,), "BatchNorm has statistics of the whole batch, taken once"
        self.without: dict[str, str] = {}
        self.partial: dict[str, set[str]] = {}
        self._weights: dict[int, frozenset[str]] = {}
        self._live: set[int] = set()
        self._met = set[tuple[str, str]]()
        found = (e for e in origin.rerolled.block.walk() if e.prim == TO)
        choices = frozenset(origin.names[origin.classes.of(e.ins[1], 0)[0]] for e in found)
        self.experts = dict(expert_modules(module, parameters, choices))
        for path in [p for p in self.experts if not adds_up(origin.block, p)]:
            self.without[self.experts[path]] = f"{path} does more than add up what it makes of single rows"
        names = dict[str, int]()
        for path, array, styled in linear_axes(module, parameters):
            sent = path.rpartition(".")[0] in self.experts
            for name, size in zip(sum(array.axes, ()), sum(array.sizes, ()), strict=True):
                names[name] = size
                if not styled and not (sent and name in choices):
                    self.without.setdefault(name, f"{path} is neither of a linear map nor of an embedding")
        self._sizes = names
        self._between = names.keys() & summed_dims(module, parameters)
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
        self._met.update(combinations(sorted(seen & self._sizes.keys()), 2))
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
            for name in self._outer & seen & {*roles.whole, *roles.reduced}:
                self.without.setdefault(name, f"{self._what(node)} needs all of it")

    def _what(self, node: Node) -> str:
        return f"{node.op.describe()} in {self.sources.get(node.index) or node.scope or 'the loss'}"

    def _note_partial(self, name: str, node: Node, weights: list[frozenset[str]]) -> None:
        for i, own in zip(node.inputs, weights, strict=True):
            if own and name not in self.graph.tensor(i).type.shape.names:
                self.partial.setdefault(name, set()).update(own)

    def try_out(self, module: Any, batch: Any) -> None:
        """Runs the module without values on pieces: code with the size of a dimension written into it
        (`x.view(b, t, self.heads, -1)`) fails."""
        called: dict[str, bool] = {}
        self._logs = {stack: CallLog(stack) for stack in self.stacks}
        whole, heads = run_on_pieces(module, self.parameters, batch, prepare=partial(self._listen, called))
        self.called: Any = None if whole else self.called
        for path in [p for p in self.experts if not called.get(p)]:
            name = self.experts.pop(path)
            self.without[name] = f"{path} is not called with tokens, numbers of experts and weights"

        def short(pieces: Mapping[str, int], own: Any) -> None:
            shortened(own, self._logs.values())
            for path in (p for p, dim in self.experts.items() if dim in pieces):
                with_fewer(own.get_submodule(path), pieces[self.experts[path]])

        def fails(names: Collection[str]) -> str:
            sizes = {name: self._sizes[name] for name in names}
            pieces = {d: next((n for n in range(2, s + 1) if s % n == 0), 1) for d, s in sizes.items()}
            why, own = run_on_pieces(module, self.parameters, batch, pieces, partial(short, pieces))
            if not why and own.keys() != heads.keys():
                place = next(iter(own.values()))
                why = f"{place}: attention would have heads of {[*own]} elements in place of {[*heads]}"
            return why

        for group in self._apart((self._between | {*self.experts.values()}) - self.without.keys()):
            if whole or fails(group):
                for name in group:
                    if why := whole or fails([name]):
                        self.code[name] = self.without[name] = (
                            f"the module does not run on a part of it: {why}; code with the size written "
                            "into it runs with sizes of tensors, as in qkv.chunk(3, -1)"
                        )
        trained = {n for a in self.parameters.values() for names in a.axes for n in names}
        passed = {name for stack in self.stacks for name in stack.passed[1:]} - trained
        between = tuple(sorted(n for n in passed if self._between_blocks(module, batch, n)))
        why = "layers need tensor-parallel blocks, as attention and MLP, that are modules of their own"
        self.limits["elsewhere"] = between, why
        found = self._outline(module, batch)
        if isinstance(found, str):
            self.limits["pipeline"] = (), found
        self.outline = None if isinstance(found, str) else found

    def _apart(self, names: Collection[str]) -> list[list[str]]:
        """Dimensions in groups, each of which one trial is for: no operation and no parameter has two of a
        group, so that code meets pieces of one at a time."""
        held = (sorted(set(sum(a.axes, ()))) for a in self.parameters.values())
        met = self._met.union(*(combinations(own, 2) for own in held))
        groups: list[list[str]] = []
        for name in sorted(names):
            own = next((g for g in groups if not any((other, name) in met for other in g)), None)
            groups.append([name]) if own is None else own.append(name)
        return groups

    def _listen(self, called: dict[str, bool], module: Any) -> None:
        for log in self._logs.values():
            log.listen(module)
        self.called = set[str]()
        for path, each in module.named_modules():
            each.register_forward_pre_hook(lambda own, given, path=path: self.called.add(path))
        for path in self.experts:

            def hook(own: Any, args: Any, kwargs: Any, out: Any, path: str = path) -> None:
                called[path] = takes_rows(args, kwargs, out)

            module.get_submodule(path).register_forward_hook(hook, with_kwargs=True)

    def _outline(self, module: Any, batch: Any) -> StageOutline | str:
        """Where the module can be cut into stages, or why it cannot."""
        if "microbatches" in self.limits:
            return self.limits["microbatches"][1]
        loops = {*self.layers.values()}
        stack = next((s for s in self.stacks if s.passed and {s.dim} == loops), None)
        if stack is None:
            kinds = torch_module().nn.ModuleList | torch_module().nn.Sequential
            lists = [repr(path) for path, own in module.named_modules() if isinstance(own, kinds) and path]
            return (
                "stages need all layers in one list of modules of equal shapes, each of which takes what the "
                f"one before returns; the module's lists are {', '.join(lists) or 'none'}"
            )
        if not passes_alone(self.graph, stack, self._live, self._weights):
            return (
                "code after the layers reads values or weights from before them, which lie on another stage"
            )
        return outline_of(module, batch, self.parameters, self._logs[stack], self._rows)

    def blocks(self, module: Any, stack: LayerList, layout: Layout | None = None) -> list[TensorBlock]:
        """The blocks of a stack's layers, of those dimensions that a layout splits, or of all."""
        split = self._between - self.without.keys()
        split = {n for n in split if layout is None or layout.axes(n)}
        return [*tensor_blocks(module, stack.paths, self.parameters, split)]

    def _between_blocks(self, module: Any, batch: Any, name: str) -> bool:
        """Whether a dimension can be split between the blocks of every stack that passes it on."""
        for stack in (s for s in self.stacks if name in s.passed):
            blocks = self.blocks(module, stack)
            inside = tuple(f"{block.path.replace('.', '/')}/" for block in blocks)
            assert stack.node.body is not None
            nodes = [n for n in stack.node.body.nodes if n.inputs and not n.scope.startswith(inside)]
            roles = (_roles(node, self.graph) for node in nodes)
            if not blocks or any(name in own.whole or name in own.reduced for own in roles):
                return False
            for node in nodes:
                self._note_partial(name, node, [self._weights.get(i, frozenset()) for i in node.inputs])
            hooks = on_shapes(len(stack.passed), stack.passed.index(name), 2)
            prepare = partial(self._in_pieces, hooks, stack, blocks)
            if run_on_pieces(module, self.parameters, batch, prepare=prepare)[0]:
                return False
        return True

    def _in_pieces(
        self, hooks: PassingHooks, stack: LayerList, blocks: list[TensorBlock], module: Any
    ) -> None:
        """Puts hooks on a module whose blocks return pieces of a sequence."""
        shortened(module, self._logs.values())
        hooks.install(module, stack.paths, blocks)
        for path in (p for block in blocks for p in block.exits):
            module.get_submodule(path).register_forward_hook(lambda own, given, out: hooks.split(out))


def _roles(node: Node, graph: Graph) -> Roles:
    types = [graph.tensor(i).type for i in node.inputs]
    try:
        return node.op.roles(*types)
    except NotImplementedError:  # an operation with a lowering of its own
        return Roles(whole=dict.fromkeys({n for t in types for n in t.shape.names}, ""))
