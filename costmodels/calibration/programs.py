"""Little programs to measure: the same operation or collective several times, on pieces of given sizes.

They are plain programs that an engine runs as it runs a model's. Every repeat has separate operands, read
from variables, so that no operation is removed or merged. Every result is stored, so that it uses separate
memory, as the activations of a step do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mesh_tf_core as mtf
from costmodels.kernels.array_functions import calls
from costmodels.kernels.calls import Call
from mesh_tf_core import ONES, Graph
from mesh_tf_core import layers as nn
from mesh_tf_core.ir import program as ir
from mesh_tf_core.ir.builder import ProgramBuilder
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import Constant, Variable
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.values import Splits
from mesh_tf_core.ops.basic import Shift, StopGradient
from mesh_tf_core.ops.binary import Binary
from mesh_tf_core.optimizers import Adam

TOWERS, LAYERS = 3, 4
"""The size of the step by which launches are measured: towers of that many layers each."""
_ORIGIN = ir.Origin(-1, "calibration", Phase.FORWARD)


class _ProbeBuilder(ProgramBuilder):
    """A program whose operands are read from variables, and whose results are stored."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(origin=_ORIGIN)
        self.mesh = mesh
        self.variables: dict[str, ir.Stored] = {}
        self.writes: list[ir.Instr] = []

    def value(self, type: TensorType, splits: Splits = (), partial: Axes = ()) -> int:
        """A value that is whole on every device where nothing says how it is split."""
        return self.new(type, splits or ((),) * len(type.shape), partial)

    def read(self, name: str, type: TensorType, splits: Splits = (), fill: float = 1.0) -> int:
        out = self.value(type, splits)
        self._store(name, out, fill)
        self.code.append(ir.ReadVariable((), (out,), _ORIGIN, name))
        return out

    def write(self, name: str, id: int) -> None:
        self._store(name, id, 0.0)
        self.writes.append(ir.WriteVariable((id,), (), _ORIGIN, name))

    def _store(self, name: str, id: int, fill: float) -> None:
        v = self.values[id]
        self.variables[name] = ir.Stored(Variable(name, v.shape, v.dtype, Constant(fill), False, 0), v.splits)

    def program(self) -> ir.Program:
        """With a counter, so that a step has a result to wait for: a float, since integers would lie in the
        host's memory, where nothing waits for a GPU."""
        counter = TensorType(Shape(), "float32")
        old = self.read("step", counter, fill=0.0)
        self.write("step", self.applied(Shift(1), old))
        code = (*self.code, *self.writes)
        return ir.Program(self.mesh, Layout(), tuple(self.values), code, self.variables, {}, {"step": old})


def local_program(
    mesh: Mesh,
    op: Op,
    inputs: Sequence[TensorType],
    repeats: int,
    kept: bool = False,
    own: bool = False,
    chain: int = 0,
) -> ir.Program:
    """`repeats` times `op` on every device, each with another first operand.

    An operation whose result has the type of its first operand forms chains, as activations do. For other
    operations, a multiplication makes the first operand just before, from the previous result if possible;
    otherwise a runtime would make all operands first, in memory that is in no cache.

    Args:
      kept: every result is stored, as activations are, else only the last of a chain.
      own: the other operands are separate variables in every repeat (so work that depends only on them is not
        shared), else the same ones.
      chain: operations of a chain (0: all).
    """
    length = chain or repeats
    build = _ProbeBuilder(mesh)
    out = op.infer(*inputs)
    made = (out,) if isinstance(out, TensorType) else out
    chained = made[0] == inputs[0]
    first = build.read("x", inputs[0])
    warm = not chained and warmed(op, inputs)
    factor = build.read("factor", warming(op, inputs)) if warm else None
    rest = [build.read(f"x_{j}", t) for j, t in enumerate(inputs[1:])]
    for i in range(repeats):
        if i and chained and i % length == 0:
            first = build.read(f"first_{i}", inputs[0])
        if i and own:
            rest = [build.read(f"x_{i}_{j}", t) for j, t in enumerate(inputs[1:])]
        if factor is not None:
            first = build.applied(Binary("mul"), first, factor)
        elif i and not chained:
            first = build.read(f"first_{i}", inputs[0])
        results = build.local(op, (first, *rest), made, [((),) * len(t.shape) for t in made])
        if warm and made[0] == warming(op, inputs):
            factor = results[0]
        if kept or not chained or i == repeats - 1 or (i + 1) % length == 0:
            build.write(f"y_{i}", results[0])
        if chained:
            first = results[0]
    return build.program()


def warmed(op: Op, inputs: Sequence[TensorType]) -> bool:
    """True if `local_program` makes the first operand by a multiplication (in place: nothing stores it)."""
    return inputs[0].dtype == "float32" and op.infer(*inputs) != inputs[0] and op.kind != "matmul"


def warming(op: Op, inputs: Sequence[TensorType]) -> TensorType:
    """The operand that multiplies the first one: its product resembles the result, if that can be
    repeated."""
    out = op.infer(*inputs)
    first = out if isinstance(out, TensorType) else out[0]
    fits = first.dtype == inputs[0].dtype and set(first.shape.dims) < set(inputs[0].shape.dims)
    return first if fits else inputs[0]


def stores_program(mesh: Mesh, size: int, repeats: int) -> ir.Program:
    """Reads `repeats` variables and stores each in another one: the overhead of the other programs."""
    build = _ProbeBuilder(mesh)
    type = TensorType(Shape([Dim("a", size)]), "float32")
    for i in range(repeats):
        build.write(f"y_{i}", build.read(f"x_{i}", type))
    return build.program()


def step_program(mesh: Mesh) -> ir.Program:
    """A training step of many small kernels of alternating kinds, on every device: forward, whose values stay
    for backward, backward, and the updates. Its arrays have next to no elements, and differ in size, so that
    starting the kernels is nearly all of it. Nothing is split, so nothing is sent.
    """
    graph = Graph("step")
    losses = []
    for i in range(TOWERS):
        dims = Dim("rows", 8), Dim(f"width_{i}", 16 + 3 * i)
        with graph.scope(f"tower_{i}"):
            x = graph.variable("x", dims, ONES)
            for j in range(LAYERS):
                norm = nn.LayerNorm(dims[1].name, bias=True, name=f"norm_{j}")
                x = x + mtf.gelu(norm(x))
            losses.append(mtf.reduce_mean(mtf.square(x)))
    return mtf.Model(mtf.add_n(losses), Adam(1e-3)).lower(mesh, Layout())


def step_calls(program: ir.Program) -> tuple[Call, ...]:
    """The array functions of a program that sends nothing."""
    found = []
    for instr, times in program.expected():
        if isinstance(instr, ir.Local) and not instr.op.free:
            read, written = ([program.local(i) for i in ids] for ids in (instr.inputs, instr.outputs))
            stays = instr.origin.phase != Phase.UPDATE
            made = calls(instr.op, read, written, frozenset())
            found += [replace(c, final=c.final and stays) for c in made] * int(times)
    return tuple(found)


ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "all_reduce": (),
    "reduce_scatter": ("b",),
    "all_gather": ("b",),
    "all_to_all": ("b", "a"),
    "permute": (1, True),
}
"""The arguments of each kind besides its axes, on an array of dimensions a, b and c."""


def collective_program(mesh: Mesh, kind: str, axes: Axes, full_bytes: int, repeats: int) -> ir.Program:
    """`repeats` times a collective over `axes` in all groups at once, on float32 arrays.

    Args:
      full_bytes: bytes as in `costmodels.network.collectives`, rounded so that all groups divide them.
    """
    build = _ProbeBuilder(mesh)
    n = mesh.group_size(axes)
    wide = 8 * n
    rows = max(1, round(full_bytes / 4 / (wide * wide))) * n
    a, b, c = Dim("a", rows), Dim("b", wide), Dim("c", 8)
    type = TensorType(Shape([a, b, c]), "float32")
    like = ir.COLLECTIVES[kind]((), (), _ORIGIN, axes, *ARGUMENTS[kind])
    change = [like.resplits().get(name, (0, ()))[0] for name in type.shape.names]
    before, after = (tuple(axes if sign == way else () for sign in change) for way in (-1, 1))
    for i in range(repeats):
        x = build.read(f"x_{i}", type, before)
        partial = axes if like.sums else ()
        source = build.applied(StopGradient(), x, splits=before, partial=partial)
        y = build.value(type, after)
        build.code.append(replace(like, inputs=(source,), outputs=(y,)))
        build.write(f"y_{i}", y)
    return build.program()
