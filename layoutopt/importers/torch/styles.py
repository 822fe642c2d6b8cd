"""The dimensions that styles of DTensor split: those of linear maps and embeddings, whose pieces pass through
everything in between without an exchange.

`ColwiseParallel` hands out the piece of its results, and `RowwiseParallel` takes one. What lies in between
runs on the pieces as if they were all. It may neither sum over the dimension nor mix it with values that all
ranks have alike: their gradients would be parts of a sum. A weight in between, such as that of a norm of each
head, may: its gradient is added up.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from layoutopt.importers.arrays.origin import ArrayAxes, ImportedFunction
from layoutopt.importers.torch.internals import taken, torch_module
from mesh_tf_core.ir.blocks import Node
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.op import Roles
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.structure import Read
from mesh_tf_core.tracing.graph import Graph


def module_parameters(module: Any, origin: ImportedFunction) -> dict[str, ArrayAxes]:
    """Every path of every parameter of a module -> its axes; all paths of a tied one have the same."""
    own = {path.replace("/", "."): array for path, array in origin.parameters.items()}
    paths = dict(module.named_parameters(remove_duplicate=False))
    first = {id(paths[path]): array for path, array in own.items()}
    return {path: first[id(p)] for path, p in paths.items() if id(p) in first}


def layers_of(module: Any, parameters: Mapping[str, ArrayAxes], graph: Graph) -> dict[str, str]:
    """Path of each module in a list whose parameters are layers -> the dimension of the layers; of modules
    that have a `forward`."""
    nn = torch_module().nn
    lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    within = [f"{path}." for path, own in module.named_modules() if isinstance(own, lists)]
    found = {}
    for path, array in parameters.items():
        first = min((p for p in within if path.startswith(p)), key=len, default=None)
        if array.layer is not None and first is not None:
            layer = first + path.removeprefix(first).partition(".")[0]
            if not isinstance(module.get_submodule(layer), nn.ModuleList | nn.ModuleDict):
                found[layer] = graph.variables[array.variable].shape.names[0]
    return found


def _loops(parameters: Mapping[str, ArrayAxes], graph: Graph) -> set[str]:
    """The dimensions of the layers of a module."""
    stacked = (a.variable for a in parameters.values() if a.layer is not None)
    return {graph.variables[name].shape.names[0] for name in stacked}


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
      without: dimension -> why no style splits it.
      partial: dimension -> the variables whose gradients are parts of a sum if it is split.
      parameters: path -> the axes of the parameter as dimensions.
      limits: fields of the search space -> their values, where the module allows fewer: layers without a
        `forward` of their own have no checkpoint, and BatchNorm has statistics of the whole batch, once.
    """

    def __init__(self, graph: Graph, module: Any, origin: ImportedFunction) -> None:
        parameters = self.parameters = module_parameters(module, origin)
        self.graph, self.sources = graph, origin.sources
        layers = {*layers_of(module, parameters, graph).values()}
        again = layers == _loops(parameters, graph)
        self.limits: dict[str, Any] = {} if again else {"recompute": (False,)}
        norms = torch_module().nn.modules.batchnorm._BatchNorm
        if any(isinstance(own, norms) for own in module.modules()):
            self.limits = {"recompute": (False,), "microbatches": (1,)}
        self.without: dict[str, str] = {}
        self.partial: dict[str, set[str]] = {}
        self._weights: dict[int, frozenset[str]] = {}
        self._live: set[int] = set()
        names: set[str] = set()
        for path, array, styled in linear_axes(module, parameters):
            for name in (n for own in array.axes for n in own):
                names.add(name)
                if not styled:
                    self.without.setdefault(name, f"{path} is neither of a linear map nor of an embedding")
        self._between = names & summed_dims(module, parameters)
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
        if isinstance(node.op, Read) and node.op.variable.trainable:
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
        touched = self._between & (out | {n for t in tensors for n in t.type.shape.names})
        for name in touched & out:  # each rank has a part of the gradient of a weight without the dimension
            for tensor, own in zip(tensors, weights, strict=True):
                if own and name not in tensor.type.shape.names:
                    self.partial.setdefault(name, set()).update(own)
        if not touched or (any(weights) and node.op.kind in ("matmul", "gather")):
            return
        try:
            roles = node.op.roles(*(t.type for t in tensors))
        except NotImplementedError:  # an operation with a lowering of its own
            roles = Roles(whole=dict.fromkeys(touched, ""))
        for name in touched:
            lacking = [i for i, t in enumerate(tensors) if name not in t.type.shape.names and name in out]
            what = f"{node.op.describe()} in {self.sources.get(node.index) or node.scope or 'the loss'}"
            if name in roles.whole or name in roles.reduced:
                self.without.setdefault(name, f"{what} needs all of it")
            elif any(node.inputs[i] in self._live and not weights[i] for i in lacking):
                self.without.setdefault(name, f"{what} combines it with values that all ranks have alike")

    def narrow(self, module: Any, batch: Any) -> None:
        """Runs the module without values on pieces of its weights: code with the size of a dimension written
        into it (`x.view(b, t, self.heads, -1)`) fails."""
        whole, heads = _runs(module, self.parameters, batch, "", 1)
        if whole:  # it reads values, such as those of a mask: pieces cannot be tried
            return
        for name in sorted(self._between - self.without.keys()):
            size = next(iter(self.graph.dims()[name]))
            ways = next((n for n in range(2, size + 1) if size % n == 0), 1)
            why, own = _runs(module, self.parameters, batch, name, ways)
            if not why and own != heads:
                why = f"attention would have heads of {own} elements in place of {heads}"
            if why:
                self.without[name] = f"the module does not run on a part of it: {why}"


def _runs(
    module: Any, parameters: Mapping[str, ArrayAxes], batch: Any, name: str, ways: int
) -> tuple[str, list[int]]:
    """Why a module does not run on one of some pieces of a dimension, '' if it does; and the elements of a
    head in each attention, which code such as `x.view(b, t, self.heads, -1)` would change in silence."""
    torch = torch_module()
    heads: list[int] = []

    class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
        def __torch_function__(self, of: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if of is torch.nn.functional.scaled_dot_product_attention:
                heads.append(next(iter([*args, *(kwargs or {}).values()])).shape[-1])
            return of(*args, **(kwargs or {}))

    def piece(path: str, tensor: Any) -> Any:
        own = parameters[path].axes if path in parameters else ()
        shape = [size // ways if own and name in own[a] else size for a, size in enumerate(tensor.shape)]
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.is_floating_point())

    held = {p: piece(p, t) for p, t in module.named_parameters()}
    held |= {p: t.to("meta") for p, t in module.named_buffers()}
    given = torch.utils._pytree.tree_map(lambda x: x.to("meta") if torch.is_tensor(x) else x, batch)
    args, kwargs = ((), taken(module, given)) if isinstance(given, Mapping) else (given, None)
    args = tuple(args) if isinstance(args, list) else args
    try:
        with warnings.catch_warnings(action="ignore"), Mode():
            torch.func.functional_call(_copied(module), held, args, kwargs)
    except Exception as error:  # whatever the user's code raises
        return str(error).partition("\n")[0] or type(error).__name__, heads
    return "", heads


def _copied(module: Any) -> Any:
    """The module with the same parameters, so that what its code keeps of this call is not the user's."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(t): t for t in tensors})
