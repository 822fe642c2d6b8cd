"""Layers of a module that are a loop of the graph, and values that pass between their tensor-parallel blocks:
gathered once for all linear maps of a block, and under sequence parallelism split along the sequence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from layoutopt.importers.arrays.placing import ArrayAxes
from layoutopt.importers.torch.calls import torch_module
from layoutopt.importers.torch.sums import WHOLE, read_in_parts
from mesh_tf_core.ir.blocks import Node
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True, eq=False)
class LayerList:
    """Layers one behind the other.

    Attributes:
      paths: of their modules, in order.
      node: their loop.
      passed: the dimensions of what a layer hands to the next; none if it hands on several arrays.
    """

    dim: str
    paths: tuple[str, ...]
    node: Node
    passed: tuple[str, ...]

    def carries(self, x: Any) -> bool:
        """True for a value like the one that they pass on."""
        return bool(torch_module().is_tensor(x) and x.is_floating_point() and x.ndim == len(self.passed))


@dataclass(frozen=True)
class TensorBlock:
    """A module that takes whole values and returns whole ones, with pieces in between.

    Attributes:
      exits: paths of the linear maps that sum over the pieces.
    """

    path: str
    exits: tuple[str, ...]


def _alike(paths: Sequence[list[str]]) -> int:
    """How many components several paths begin with."""
    columns = zip(*paths, strict=False)
    return sum(1 for _ in takewhile(lambda names: len({*names}) == 1, columns))


def layers_of(module: Any, parameters: Mapping[str, ArrayAxes], graph: Graph) -> dict[str, str]:
    """Path of each module whose parameters are a layer of a loop -> the dimension of the layers; of modules
    that have a `forward`."""
    nn = torch_module().nn
    members: dict[str, list[list[str]]] = defaultdict(list)
    for path, array in parameters.items():
        if array.layer is not None:
            members[array.variable].append(path.split("."))
    found = {}
    for variable, parts in members.items():
        same = _alike(parts)
        for names in parts:
            layer = ".".join(names[: same + 1])
            # What stands in a list itself, as a parameter, is no layer that is called.
            if same < len(names) - 1 and type(module.get_submodule(layer)).forward is not nn.Module.forward:
                found[layer] = graph.variables[variable].shape.names[0]
    return found


def stacks_of(graph: Graph, layers: Mapping[str, str]) -> list[LayerList]:
    """The loops whose iterations are modules."""
    found = []
    for node in graph.blocks[0].nodes:
        if node.phase == Phase.FORWARD and node.body is not None:
            dim = node.body.dim
            paths = tuple(path for path, own in layers.items() if own == dim.name)
            types = (graph.tensor(t).type for t in node.body.carry_in)
            passed = [t.shape.names for t in types if is_float(t.dtype)]
            if len(paths) == dim.size:
                found.append(LayerList(dim.name, paths, node, passed[0] if len(passed) == 1 else ()))
    return found


def tensor_blocks(
    module: Any, layers: Collection[str], parameters: Mapping[str, ArrayAxes], split: Collection[str]
) -> Iterator[TensorBlock]:
    """The outermost blocks of each layer, in which some dimensions are split.

    A block whose `path` has no `forward`, as a list of modules, is not called itself.
    """
    nn = torch_module().nn
    sides: dict[tuple[str, str], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for path, array in parameters.items():
        owner, _, own = path.rpartition(".")
        layer = next((p for p in layers if owner.startswith(f"{p}.")), None)
        if layer and own == "weight" and isinstance(module.get_submodule(owner), nn.Linear):
            for side, names in enumerate(array.axes):
                for name in {*names} & {*split}:
                    sides[layer, name][side].append(owner)
    merged: dict[str, list[str]] = defaultdict(list)
    for entries, exits in sides.values():
        if entries and exits:
            owners = [p.split(".") for p in (*entries, *exits)]
            merged[".".join(owners[0][: _alike(owners)])].extend(exits)
    for path, exits in merged.items():
        if not any(path.startswith(f"{other}.") for other in merged):
            yield TensorBlock(path, tuple(dict.fromkeys(exits)))


PieceChange = Callable[[Any], Any]


@dataclass
class PassingHooks:
    """Hooks on the layers of a stack and on its blocks.

    Attributes:
      carries: true for a value like the one that layers pass on.
      axis: of it, the one that is split outside of blocks; None: none is.
      split, whole: take a rank's piece of a value, and make it whole again.
      enter: makes what a block takes whole.
      local: the size of a piece.
    """

    carries: Callable[[Any], bool]
    axis: int | None
    split: PieceChange
    whole: PieceChange
    enter: PieceChange
    local: int = 0

    def install(self, module: Any, layers: Sequence[str], blocks: Iterable[TensorBlock]) -> None:
        """Puts hooks on a module."""
        if self.axis is not None:
            for path in layers:
                layer = module.get_submodule(path)
                hook = self._first if path == layers[0] else self._notes
                layer.register_forward_pre_hook(hook, with_kwargs=True)
            last = module.get_submodule(layers[-1])
            last.register_forward_hook(lambda _, __, out: map_first(self.carries, self.whole, out))
        for block in blocks:
            own = module.get_submodule(block.path)
            own.register_forward_pre_hook(self._enters, with_kwargs=True)

    def _first(self, layer: Any, args: Any, kwargs: Any) -> Any:
        found = map_first(self.carries, self.split, (args, kwargs))
        self._notes(layer, *found)
        return found

    def _notes(self, layer: Any, args: Any, kwargs: Any) -> None:
        leaves = torch_module().utils._pytree.tree_leaves((args, kwargs))
        if (x := next(filter(self.carries, leaves), None)) is not None:
            self.local = x.shape[self.axis]

    def _enters(self, block: Any, args: Any, kwargs: Any) -> Any:
        def own(x: Any) -> Any:
            enters = self.carries(x) and (
                x.requires_grad if self.axis is None else x.shape[self.axis] == self.local
            )
            return self.enter(x) if enters else x

        return torch_module().utils._pytree.tree_map(own, (args, kwargs))


def map_first(which: Callable[[Any], bool], change: PieceChange, tree: Any) -> Any:
    """A tree of values with the first one that a test finds changed."""
    pytree = torch_module().utils._pytree
    leaves, spec = pytree.tree_flatten(tree)
    at = next((i for i, x in enumerate(leaves) if which(x)), None)
    if at is not None:
        leaves[at] = change(leaves[at])
    return pytree.tree_unflatten(leaves, spec)


def on_ranks(mesh: Any, carries: Callable[[Any], bool], axis: int | None) -> PassingHooks:
    """Between the ranks of a mesh with one axis."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    alike = [Replicate()]
    pieces = alike if axis is None else [Shard(axis)]

    def changed(x: Any, have: Any, want: Any) -> Any:
        return DTensor.from_local(x, mesh, have, run_check=False).redistribute(placements=want)

    def entered(x: Any) -> Any:
        if axis is None:
            local, whole = x.view_as(x), read_in_parts(x, mesh.get_group())
        else:
            gathered = changed(x, pieces, alike)
            local, whole = gathered.to_local(), gathered.to_local(grad_placements=[Partial()])
        setattr(local, WHOLE, whole)
        return local

    return PassingHooks(
        carries,
        axis,
        lambda x: changed(x, alike, pieces).to_local(),
        lambda x: changed(x, pieces, alike).to_local(),
        entered,
    )


def on_shapes(carries: Callable[[Any], bool], axis: int, ways: int) -> PassingHooks:
    """The same on the shapes of one rank."""

    def piece(x: Any) -> Any:
        return x.narrow(axis, 0, x.shape[axis] // ways)

    def whole(x: Any) -> Any:
        return x.repeat_interleave(ways, axis)

    return PassingHooks(carries, axis, piece, whole, whole)
