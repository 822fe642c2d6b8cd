"""Values that pass between tensor-parallel blocks: gathered once for all linear maps of a block, and under
sequence parallelism split along the sequence outside of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from layoutopt.importers.torch.internals import torch_module
from layoutopt.importers.torch.stacks import TensorBlock, carried

PieceChange = Callable[[Any], Any]


@dataclass
class PassingHooks:
    """Hooks on the layers of a stack and on its blocks.

    Attributes:
      rank: the number of axes of what layers pass on.
      axis: the one that is split outside of blocks; None: none is.
      split, whole: take a rank's piece of a value, and make it whole again.
      enter: makes what a block takes whole.
      local: the size of a piece.
    """

    rank: int
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
            module.get_submodule(layers[-1]).register_forward_hook(self._last)
        for block in blocks:
            own = module.get_submodule(block.path)
            own.register_forward_pre_hook(self._enters, with_kwargs=True)

    def _carried(self, x: Any) -> bool:
        """True for a value like the one that layers pass on."""
        return carried(x, self.rank)

    def _first(self, layer: Any, args: Any, kwargs: Any) -> Any:
        found = map_first(self._carried, self.split, (args, kwargs))
        self._notes(layer, *found)
        return found

    def _notes(self, layer: Any, args: Any, kwargs: Any) -> None:
        map_first(self._carried, self._note, (args, kwargs))

    def _note(self, x: Any) -> Any:
        self.local = x.shape[self.axis]
        return x

    def _last(self, layer: Any, given: Any, out: Any) -> Any:
        return map_first(self._carried, self.whole, out)

    def _enters(self, block: Any, args: Any, kwargs: Any) -> Any:
        def own(x: Any) -> Any:
            if not self._carried(x) or not (x.requires_grad if self.axis is None else self._piece(x)):
                return x
            return self.enter(x)

        return torch_module().utils._pytree.tree_map(own, (args, kwargs))

    def _piece(self, x: Any) -> bool:
        return bool(x.shape[self.axis] == self.local)


def map_first(which: Callable[[Any], bool], change: PieceChange, tree: Any) -> Any:
    """A tree of values with the first one that a test finds changed."""
    pytree = torch_module().utils._pytree
    leaves, spec = pytree.tree_flatten(tree)
    at = next((i for i, x in enumerate(leaves) if which(x)), None)
    if at is not None:
        leaves[at] = change(leaves[at])
    return pytree.tree_unflatten(leaves, spec)


def on_ranks(mesh: Any, rank: int, axis: int | None) -> PassingHooks:
    """Between the ranks of a mesh with one axis."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    alike = [Replicate()]
    pieces = alike if axis is None else [Shard(axis)]

    def changed(x: Any, have: Any, want: Any) -> Any:
        return DTensor.from_local(x, mesh, have, run_check=False).redistribute(placements=want)

    def entered(x: Any) -> Any:
        whole = changed(x, pieces, alike)
        local = whole.to_local()
        # The linear maps of a block add up their gradients before these are summed over ranks.
        local.layoutopt_whole = whole
        return local

    return PassingHooks(
        rank,
        axis,
        lambda x: changed(x, alike, pieces).to_local(),
        lambda x: changed(x, pieces, alike).to_local(),
        entered,
    )


def takes_whole(linear: Any, args: Any) -> Any:
    """A hook on a linear map that takes what its block was given as the DTensor that it is."""
    return tuple(getattr(x, "layoutopt_whole", x) for x in args)


def on_shapes(rank: int, axis: int, ways: int) -> PassingHooks:
    """The same on the shapes of one rank."""

    def piece(x: Any) -> Any:
        return x.narrow(axis, 0, x.shape[axis] // ways)

    def whole(x: Any) -> Any:
        return x.repeat_interleave(ways, axis)

    return PassingHooks(rank, axis, piece, whole, whole)
