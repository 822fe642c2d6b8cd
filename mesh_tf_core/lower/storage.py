"""Storage of variables between steps: with the splits of the layout, or split further over unused axes.

Stages, per variable (Rajbhandari et al. 2020, "ZeRO", section 5; Xu et al. 2020, "Automatic cross-replica
sharding of weight update"):
  0  variable, gradient and optimizer state are placed as the layout says
  1  the optimizer's state is split further; every device updates its part, then the variable is gathered
  2  and so is the gradient: the sum over devices is scattered as soon as its terms are made, in a loop in
     every iteration
  3  and so is the variable: forward gathers it and lets it go, backward gathers it again; in a loop, and with
     microbatches, in every iteration
  once  as 3, but every device adds up whole gradients over microbatches, and their sum is scattered once
     (`set_requires_gradient_sync(False)` of FSDP2 until the last one)
Of a variable that forward and backward read in half precision only (`narrow_reads`), what is stored is the
master copy that the update works on. It belongs to the state: from stage 1 on it is split, and its half is
gathered whole, in half precision, as a step begins (their section 3: 2 + 2 + 12 / N bytes for stage 1).
An array that stays between steps and is not trained (frozen weights, running statistics) has neither gradient
nor optimizer state, so stages 1 and 2 split nothing of it; stage 3 splits it as a variable. Where the step
gives it a new value, a device keeps its shard of that.

A stage may name the axes that it splits over; the others hold copies (`zero3@node`; Zhao et al. 2023,
"PyTorch FSDP", section 3.2.2, hybrid sharding: gathered within a node, and gradients scattered within a node
and then summed between nodes).

A stored part may be padded with zeros, so that any number of devices can share it. Its update works on shards
as stored, so it must not mix elements along that dimension. Element by element, zeros do no harm, because
their results are not used; a sum over the dimension stays the same as long as they are zero (the norm of
gradients).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import Block, Connection, Node, Read, per_graph
from mesh_tf_core.ir.dims import PaddedDim, Shape
from mesh_tf_core.ir.dtypes import is_float, itemsize
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import AT, Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.values import Splits
from mesh_tf_core.lower.nodes import plan_of, updated, with_parts
from mesh_tf_core.tracing.graph import Graph

VARIABLE, STATE, GRADIENT, SAVED = "variable", "state", "gradient", "saved"
"""Classes of tensors: a variable, its optimizer state, its gradient, and the values that loops over a
dimension save for their backward."""
BETWEEN, FORWARD, BACKWARD, UPDATE = "between steps", "forward", "backward", "update"
"""Phases."""
_UPDATE = frozenset({(STATE, BETWEEN), (VARIABLE, UPDATE), (GRADIENT, UPDATE)})
SPLIT: Mapping[str, frozenset[tuple[str, str]]] = {
    "layout": frozenset(),
    "zero1": _UPDATE,
    "zero2": _UPDATE | {(GRADIENT, BACKWARD)},
    "zero3": _UPDATE | {(GRADIENT, BACKWARD), (VARIABLE, BETWEEN)},
    "zero3-once": _UPDATE | {(VARIABLE, BETWEEN)},
}
"""Stage -> the classes that are split further than in the layout, each with its phase."""
STAGES = tuple(SPLIT)
"""Names of the stages in plans; a number is a place here."""
WITHIN = "zero3@AXIS"
"""The form of a stage over some axes, e.g. those inside a node (the hybrid shards of other libraries)."""
ONCE = STAGES[-1]
MOST_SPLIT = max(STAGES, key=lambda stage: len(SPLIT[stage]))
"""The stage with which devices hold least."""


class Stage(NamedTuple):
    """The storage of a variable.

    Attributes:
      number: of the stage.
      over: the mesh axes that it may be split over further; None: all.
    """

    number: int
    over: Axes | None = None

    def __str__(self) -> str:
        name = STAGES[self.number]
        return name if self.over is None else f"{name}{AT}{'+'.join(self.over)}"

    @property
    def short(self) -> int | Stage:
        """Its number, if it is over all axes."""
        return self.number if self.over is None else self

    def renamed(self, axes: Mapping[str, str]) -> Stage:
        """With other names for mesh axes."""
        return self if self.over is None else Stage(self.number, tuple(axes.get(a, a) for a in self.over))


def splits(stage: int, what: str, phase: str, master: bool = False) -> bool:
    """True if a stage splits a class of tensors further in a phase.

    Args:
      master: of a master copy, which nothing before the update reads directly: its state's stage splits it.
    """
    kept = STATE if master and (what, phase) == (VARIABLE, BETWEEN) else what
    return (kept, phase) in SPLIT[STAGES[stage]]


def splits_some(stage: Stage, variable: Variable) -> bool:
    """True if a stage splits something of a variable further: of one that is not trained, itself or nothing,
    for it has neither gradient nor optimizer state."""
    return stage.number > 0 and (variable.trainable or splits(stage.number, VARIABLE, BETWEEN))


StageByVariable = Mapping[str, int | Stage]
"""Variable name -> stage; a number is that stage over all axes."""


def read_stage(said: str | int | Stage) -> Stage:
    """A stage as plans and users write it: `zero3`, or `zero3@data+pod` over these axes alone.

    Raises:
      UserError: no such stage, or axes that it cannot have.
    """
    if isinstance(said, Stage):
        return said
    name, at, axes = str(said).partition(AT)
    if isinstance(said, int) or not at:
        return Stage(stage_number(said))
    number, over = stage_number(name.strip()), tuple(a.strip() for a in axes.split("+"))
    if not number:
        raise UserError(
            f"storage {said!r}: {STAGES[0]} does not shard variables over further axes; remove {AT}{axes}"
        )
    if not all(over) or len(set(over)) < len(over):
        raise UserError(f"storage {said!r}: name each mesh axis once, e.g. {STAGES[number]}{AT}data+pod")
    return Stage(number, over)


def stage_number(name: str | int) -> int:
    """The stage of a name in a plan (or the number itself)."""
    if isinstance(name, int) and 0 <= name < len(STAGES):
        return name
    if name not in STAGES:
        raise UserError(f"unknown storage {name!r}; {known_names(str(name), (*STAGES, WITHIN))}")
    return STAGES.index(str(name))


@per_graph
def narrow_reads(graph: Graph) -> Mapping[str, str]:
    """The trained variables that all before the update reads through casts to one smaller float -> this
    dtype."""
    owner: dict[int, str] = {}
    found: dict[str, set[str | None]] = {}
    for node in graph.nodes:
        if isinstance(node.op, Read) and node.op.variable.trainable:
            owner.update(dict.fromkeys(with_parts(node.outputs[0], graph), node.op.variable.name))
    for node, _ in graph.walk():
        for i in _read(node) if node.phase != Phase.UPDATE else ():
            if i in owner:
                found.setdefault(owner[i], set()).add(_narrowed(node, graph))
    return {name: dtype for name, dtypes in found.items() if len(dtypes) == 1 for dtype in dtypes if dtype}


def _read(node: Node) -> tuple[int, ...]:
    """What a node reads, or its loop hands out; nodes inside read for themselves."""
    body: Block | None = node.body
    if body is None:
        return node.inputs
    return *node.inputs, *body.carry_out, *(inner for inner, _ in body.handed)


def _narrowed(node: Node, graph: Graph) -> str | None:
    """The dtype that a node casts to, if a smaller float."""
    if not node.op.converts:
        return None
    before, after = (graph.tensor(t).dtype for t in (node.inputs[0], node.outputs[0]))
    return after if is_float(after) and itemsize(after) < itemsize(before) else None


@lru_cache(maxsize=1 << 14)
def shard_layout(
    shape: Shape,
    stacked: int,
    layout: Layout,
    mesh: Mesh,
    over: Axes | None = None,
    paddable: frozenset[str] = frozenset(),
) -> Layout:
    """The layout with dimensions of a variable split further over every axis that does not split them yet.

    All spare axes go to one dimension if it is divisible (the largest piece first). Otherwise they are
    assigned axis by axis, and an axis that divides no dimension is left out. If shards are smaller that way,
    all axes go to one dimension that is padded. Dimensions that count layers stay whole.

    Args:
      shape, stacked: of the variable.
      over: only these axes.
      paddable: dimensions that may be padded (`paddable`).
    """
    before = layout.axes_of(shape.names)
    allowed = mesh.names if over is None else tuple(a for a in mesh.names if a in over)
    after, padded = _shards(shape, stacked, before, mesh, allowed, paddable)
    return (
        layout if after == before else layout.with_rules(dict(zip(shape.names, after, strict=True)), padded)
    )


def _shards(
    shape: Shape, stacked: int, splits: Splits, mesh: Mesh, over: Axes, paddable: frozenset[str]
) -> tuple[Splits, PaddedDim | None]:
    own = Shape(shape.dims[stacked:])
    rules = dict(zip(shape.names, splits, strict=True))
    used = {a for axes in splits for a in axes}
    spare = tuple(a for a in over if a not in used and mesh.size(a) > 1)
    even = _evenly(own, rules, mesh, spare)
    ways = mesh.group_size(spare)
    pieces = {n: own.dim(n).size // mesh.group_size(rules.get(n, ())) for n in own.names if n in paddable}
    # A shard is never mostly zeros.
    long = [n for n, piece in pieces.items() if piece >= ways]
    if spare and long:
        name = min(long, key=lambda n: (-(-pieces[n] // ways) / pieces[n], -pieces[n]))
        shard = -(-pieces[name] // ways)
        taken = mesh.group_size([a for axes in even.values() for a in axes if a in spare])
        if shard * taken < pieces[name]:
            count = mesh.group_size(rules.get(name, ()))
            padded = PaddedDim(name, shard * ways * count, pieces[name] * count, count)
            rules[name] = (*rules.get(name, ()), *spare)
            return tuple(rules[n] for n in shape.names), padded
    return tuple(even[n] for n in shape.names), None


def _evenly(own: Shape, splits: Mapping[str, Axes], mesh: Mesh, spare: Axes) -> dict[str, Axes]:
    """The splits with the spare axes that divide something."""
    rules = dict(splits)

    def piece(name: str) -> int:
        return own.dim(name).size // mesh.group_size(rules.get(name, ()))

    def fits(name: str, axes: Axes) -> bool:
        return own.dim(name).size % mesh.group_size((*rules.get(name, ()), *axes)) == 0

    order = sorted(own.names, key=lambda n: -piece(n))
    for axes in (spare, *((a,) for a in spare)):
        axes = tuple(a for a in axes if not any(a in rules.get(n, ()) for n in own.names))
        chosen = next((n for n in order if axes and fits(n, axes)), None)
        if chosen is not None:
            rules[chosen] = (*rules.get(chosen, ()), *axes)
    return rules


@per_graph
def paddable(graph: Graph) -> Mapping[str, frozenset[str]]:
    """Variable -> its dimensions that may be padded where it is stored. Nothing is computed on the stored
    part of one that is not trained."""
    nodes = _updates(graph)
    gradients = {name: tensor for tensor, name in graph.gradient_of.items()}
    found = {}
    for name, variable in graph.variables.items():
        if variable.even or not variable.own_storage:
            continue
        if not variable.trainable:
            found[name] = frozenset(variable.shape.names)
        elif name in gradients:
            zero = {gradients[name]}
            found[name] = _alone(nodes[name], zero, frozenset(variable.shape.names), graph)
    return found


def paddable_with(graph: Graph, others: Iterable[Graph]) -> Mapping[str, frozenset[str]]:
    """`paddable`, where other graphs (outer steps of replicas) update the same variables too."""
    found = dict(paddable(graph))
    for other in others:
        nodes = _updates(other)
        for name in found.keys() & nodes.keys():
            found[name] = _alone(nodes[name], set(), found[name], other)
    return found


def _updates(graph: Graph) -> dict[str, list[Node]]:
    """Variable -> the nodes of its update."""
    nodes: dict[str, list[Node]] = defaultdict(list)
    for node, _ in graph.walk():
        owner = updated(node, graph)
        if owner is not None:
            nodes[owner].append(node)
    return nodes


def _alone(nodes: list[Node], zero: set[int], names: frozenset[str], graph: Graph) -> frozenset[str]:
    """Those of some dimensions along which an update works element by element, or adds up zeros.

    Args:
      zero: tensors that are zero where they are padded; grows.
    """
    left = set(names)
    for node in nodes:
        if isinstance(node.op, Connection):
            continue
        plan = plan_of(node, graph)
        if plan.roles is None and not node.op.converts:
            left -= plan.dims
            continue
        keeps = _keeps_zero(node.op, [i in zero for i in node.inputs])
        zero.update(node.outputs if keeps else ())
        if plan.roles is None:
            continue
        sums = plan.roles.reduced if keeps and plan.roles.combine == "sum" else ()
        made = {n for o in node.outputs for n in graph.tensor(o).shape.names}
        given = {n for i in node.inputs for n in graph.tensor(i).shape.names}
        # A new dimension has a size of its own.
        left -= {*plan.roles.whole, *plan.regrouped, *(made - given)}
        left -= {*plan.roles.reduced} - {*sums}
    return frozenset(left)


def _keeps_zero(op: Op, zero: list[bool]) -> bool:
    """Whether a result is zero where those operands are that are known to be."""
    if not any(zero):
        return False
    if op.vanishes or ((op.linear or op.converts) and all(zero)):
        return True
    return any(z and op.distributes([j != i for j in range(len(zero))]) for i, z in enumerate(zero))
