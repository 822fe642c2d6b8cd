"""The work of PyTorch over each axis of a plan's mesh, and the split of every parameter that follows; experts
on several data ranks: each has some of them, and gets the rows of all tokens that chose these.

A module of experts is called with tokens [tokens, features], the numbers of their experts and the weights of
these [tokens, choices], and has parameters with an axis of all experts first (transformers' experts are so).
What it returns for a token is a sum over its choices, so it does the same with rows of one choice each.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from layoutopt.importers.arrays.contract import EquationBlock, Var
from layoutopt.importers.arrays.placing import ArrayAxes
from layoutopt.importers.arrays.relations import FROM, TO
from layoutopt.importers.torch.calls import outward, torch_module
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import BACKWARD, GRADIENT, SPLIT, STAGES, read_stage

PIPE, REPLICATE, SHARD, EXPERTS, TENSOR = "pipe", "replicate", "shard", "experts", "tensor"
"""The axes of the mesh by use."""
DATA = (REPLICATE, SHARD)
Dtypes = tuple[str, str, str]


@dataclass(frozen=True)
class PlanRanks:
    """The axes of a mesh by use, and the splits of a module's parameters.

    Attributes:
      parameters: path -> the axes of the parameter as dimensions.
      layers: the dimensions of layers; `choices`: of experts.
      types: in which parameters are gathered ("": their own), gradients sent as they are made, and gradients
        added up over microbatches.
    """

    mesh: Mesh
    layout: Layout
    options: Options
    parameters: Mapping[str, ArrayAxes]
    layers: Collection[str] = ()
    choices: Collection[str] = ()
    types: Dtypes = ("", "", "")

    @cached_property
    def pipe(self) -> Axes:
        """The axes of the stages of a pipeline."""
        return tuple(a for name in self.layers for a in self.layout.axes(name))

    @cached_property
    def tensor(self) -> Axes:
        """The axes that split weights, in the order in which they split the first one."""
        found = (a for p in self.parameters.values() for axes in self.read(p) for a in axes)
        return tuple(a for a in dict.fromkeys(found) if a not in self.experts)

    @cached_property
    def experts(self) -> Axes:
        """The data axes that experts lie over."""
        return tuple(dict.fromkeys(a for name in self.choices for a in self.layout.axes(name)))

    @cached_property
    def stage(self) -> str:
        """The stage of storage of all parameters."""
        numbers = (read_stage(s).number for s in self.options.storage.values())
        return STAGES[max(numbers, default=0)]

    @cached_property
    def reduced(self) -> str:
        """The element type in which ranks sum gradients: in which these are made, or were added up before."""
        alone = self.options.microbatches == 1 or (GRADIENT, BACKWARD) in SPLIT[self.stage]
        return self.types[1 if alone else 2]

    @cached_property
    def data(self) -> Axes:
        """The axes of ranks with the same part of the weights."""
        return tuple(a for a, size in self.mesh.axes if size > 1 and a not in (*self.tensor, *self.pipe))

    @cached_property
    def shard(self) -> Axes:
        """The data axes over which `fully_shard` splits."""
        if self.stage == STAGES[0]:
            return ()
        over = {a for s in self.options.storage.values() for a in read_stage(s).over or self.data}
        found = tuple(a for a in self.data if a in over)
        return (*(a for a in found if a not in self.experts), *self.experts)

    @cached_property
    def replicate(self) -> Axes:
        """The other data axes."""
        return tuple(a for a in self.data if a not in self.shard)

    def size(self, axes: Axes) -> int:
        """The number of ranks along axes."""
        return self.mesh.group_size(axes)

    def read(self, array: ArrayAxes) -> tuple[Axes, ...]:
        """Per axis of a parameter the mesh axes over which operations read it, from the outermost."""
        return tuple(tuple(a for n in names for a in self.layout.axes(n)) for names in array.axes)

    def stored(self, array: ArrayAxes) -> tuple[Axes, ...]:
        """The same between steps: `fully_shard` splits the first axis further."""
        if not array.shape:
            return ()
        first, *rest = self.read(array)
        return ((*first, *(a for a in self.shard if a not in first)), *rest)

    def elements(self, array: ArrayAxes) -> int:
        """The most elements that a rank holds."""
        found = zip(array.shape, self.stored(array), strict=True)
        return math.prod(-(-size // self.size(axes)) for size, axes in found)

    def splits(self, axes: Sequence[Axes]) -> list[tuple[int, int] | None]:
        """Per axis of the mesh the axis of an array that it splits, and the ways in which later axes of the
        mesh split that one first; None if it splits nothing."""
        found: list[tuple[int, int] | None] = []
        for i, own in enumerate(self.mesh.names):
            at = next((d for d, several in enumerate(axes) if own in several), None)
            if at is None or self.mesh.size(own) == 1:
                found.append(None)
                continue
            outer = axes[at][: axes[at].index(own)]
            later = tuple(a for a in outer if self.mesh.names.index(a) > i)
            found.append((at, self.size(later)))
        return found


def expert_modules(
    module: Any, parameters: Mapping[str, ArrayAxes], names: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Path of each module of experts, and its dimension of experts."""
    for path, own in module.named_modules() if names else ():
        held = [f"{path}.{name}" for name, _ in own.named_parameters()]
        axes = [parameters[p].axes for p in held if p in parameters]
        first = {a[0] for a in axes if a}
        (found, *others) = first or [()]
        if held and len(axes) == len(held) and not others and len(found) == 1 and {*found} <= names:
            yield path, found[0]


def takes_rows(args: Any, kwargs: Any, out: Any) -> bool:
    """True for a call with tokens, numbers and weights."""
    torch = torch_module()
    given = [*args, *kwargs.values()]
    if len(given) != 3 or not all(map(torch.is_tensor, (*given, out))):
        return False
    x, ids, weights = given
    alike = x.ndim == 2 and ids.shape == weights.shape == (len(x), ids.shape[-1]) and out.shape == x.shape
    return bool(alike and not ids.is_floating_point() and weights.is_floating_point())


def mixing(block: EquationBlock, paths: Collection[str]) -> set[str]:
    """The modules of experts that do more than add up, over choices, what they make of each row alone."""
    weight, given, row, several, done = range(5)
    wrong, owner = set[str](), cache(lambda scope: next((p for p in outward(scope, "/") if p in paths), ""))
    stage = {id(x): (own, weight) for x in block.ins if paths and (own := owner(x.path))}
    for e in block.equations if paths else ():
        path, of = owner(e.scope), set[int]()
        for x in e.ins:
            own, now = stage.get(id(x), ("", given))
            if own != path and now in (row, several):
                wrong.add(own)
            if isinstance(x, Var):
                of.add(now if own == path else given)
        if not path:
            continue
        of.discard(weight)
        now = max(of, default=weight)
        if e.prim in (TO, FROM):
            now = row if e.prim == TO else done if e.params["alike"] else several
        elif now == several and e.prim == "reduce_sum" and e.params["axes"] == (1,):
            now = done
        elif len(of) > 1 or (now not in (weight, row) and e.prim not in ("reshape", "convert_element_type")):
            wrong.add(path)
        stage.update((id(y), (path, now)) for y in e.outs)
    return wrong


def with_fewer(experts: Any, count: int, ways: int) -> None:
    """Gives a module of `count` experts the number of a part of them, in place."""
    for name in [n for n, v in vars(experts).items() if "expert" in n and isinstance(v, int) and v == count]:
        setattr(experts, name, count // ways)


def split_experts(experts: Any, mesh: Any) -> None:
    """Leaves a rank its part of a module's experts, in place; the mesh has the axis EXPERTS."""
    torch = torch_module()
    from torch.distributed.tensor import Shard, distribute_tensor

    own = mesh[EXPERTS]
    group, ways = own.get_group(), own.size()
    count = next(experts.parameters()).shape[0]
    with_fewer(experts, count, ways)
    for name, p in [*experts.named_parameters(recurse=False)]:
        split = distribute_tensor(p.detach(), own, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, torch.nn.Parameter(split, requires_grad=p.requires_grad))
    forward: Callable[..., Any] = experts.forward

    def here(x: Any, ids: Any, weights: Any) -> Any:
        whole = dict(experts._parameters)
        try:
            experts._parameters.update({n: p.to_local() for n, p in whole.items()})
            return forward(x, ids, weights)
        finally:
            experts._parameters.update(whole)

    def exchanged(x: Any, come: list[int], go: list[int]) -> Any:
        moved = torch.distributed._functional_collectives.all_to_all_single_autograd(x, come, go, group)
        return torch.distributed._functional_collectives.wait_tensor(moved)

    def everywhere(*args: Any, **kwargs: Any) -> Any:
        x, ids, weights = (*args, *kwargs.values())
        chosen, order = ids.reshape(-1).sort(stable=True)
        token = order // ids.shape[-1]
        counts = torch.bincount(chosen // (count // ways), minlength=ways)
        came = torch.empty_like(counts)
        torch.distributed.all_to_all_single(came, counts, group=group)
        go, come = counts.tolist(), came.tolist()
        rows = exchanged(x[token], come, go)
        given = exchanged(weights.reshape(-1)[order], come, go)
        with torch.no_grad():
            numbers = exchanged(chosen, come, go) % (count // ways)
        made = exchanged(here(rows, numbers[:, None], given[:, None]), go, come)
        return torch.zeros_like(x).index_add(0, token, made.to(x.dtype))

    experts.forward = everywhere
