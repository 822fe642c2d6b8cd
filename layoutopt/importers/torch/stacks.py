"""Layers of a module that are a loop of the graph, what each hands to the next, and the blocks inside of them
whose linear maps tensor ranks share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from layoutopt.importers.arrays.placing import ArrayAxes
from layoutopt.importers.torch.internals import torch_module
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
        return carried(x, len(self.passed))


def carried(x: Any, rank: int) -> bool:
    """True for a value like the one that layers pass on, which has `rank` axes."""
    return bool(torch_module().is_tensor(x) and x.is_floating_point() and x.ndim == rank)


@dataclass(frozen=True)
class TensorBlock:
    """A module that takes whole values and returns whole ones, with pieces in between.

    Attributes:
      entries, exits: paths of the linear maps that make the pieces, and that sum over them.
    """

    path: str
    entries: tuple[str, ...]
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
            if same < len(names) - 1 and not isinstance(
                module.get_submodule(layer), nn.ModuleList | nn.ModuleDict
            ):
                found[layer] = graph.variables[variable].shape.names[0]
    return found


def stacks_of(graph: Graph, layers: Mapping[str, str]) -> list[LayerList]:
    """The loops whose iterations are modules."""
    found = []
    for node in graph.blocks[0].nodes:
        if node.phase == Phase.FORWARD and node.body is not None and node.body.dim is not None:
            dim = node.body.dim
            paths = tuple(path for path, own in layers.items() if own == dim.name)
            carried = (graph.tensor(t).type for t in node.body.carry_in)
            passed = [t.shape.names for t in carried if is_float(t.dtype)]
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
    merged: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for entries, exits in sides.values():
        if entries and exits:
            owners = [p.split(".") for p in (*entries, *exits)]
            inside = merged[".".join(owners[0][: _alike(owners)])]
            inside[0].extend(entries)
            inside[1].extend(exits)
    for path, (entries, exits) in merged.items():
        if not any(path.startswith(f"{other}.") for other in merged):
            yield TensorBlock(path, tuple(dict.fromkeys(entries)), tuple(dict.fromkeys(exits)))
