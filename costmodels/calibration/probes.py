"""The measurements of a calibration: array functions over several sizes, matrix products, collectives over
every group.

Sizes and shapes are those of Transformer steps and others in general. No example model is used, so validation
on a model is independent of the fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from costmodels.calibration.programs import (
    collective_program,
    local_program,
    step_calls,
    step_program,
    stores_program,
    warmed,
    warming,
)
from costmodels.kernels.array_functions import calls
from costmodels.kernels.calls import Call
from costmodels.network.collectives import COLLECTIVES
from costmodels.network.topology import processes_spanned
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import Program, WriteVariable
from mesh_tf_core.ops.basic import Cast
from mesh_tf_core.ops.binary import Binary, Where
from mesh_tf_core.ops.conv import Conv
from mesh_tf_core.ops.convgrid import Grid
from mesh_tf_core.ops.cumulative import CumSum
from mesh_tf_core.ops.einsum import Broadcast, Einsum
from mesh_tf_core.ops.index import Gather, OneHot, Pick, ScatterAdd
from mesh_tf_core.ops.norm import Normalize, NormalizeGrad
from mesh_tf_core.ops.random import RandomUniform
from mesh_tf_core.ops.reduce import Reduce
from mesh_tf_core.ops.shape import Concat, Pad, SliceDim, Transpose
from mesh_tf_core.ops.softmax import Softmax, SoftmaxGrad
from mesh_tf_core.ops.unary import Unary, UnaryGrad
from mesh_tf_core.ops.windows import Window

GroupShape = tuple[int, int]
"""A kind of group: number of devices, number of processes."""
KB, MB = 1024, 1 << 20
LAUNCH = "launch"
"""The target of the one probe that is a whole step."""
ALONE = Mesh("data:2")
"""Any mesh, where nothing is split."""


@dataclass(frozen=True)
class Probe:
    """One program to measure.

    Attributes:
      name: unique in a calibration.
      target: the class of calls (or the collective) that it is about; 'stores', 'launch' and 'check' are
        special.
      bytes: of the target's call; for a collective, of the full array of a group.
      repeats: how often the program does it.
      op, inputs: of a local operation.
      axes: of a collective.
      kept: whether every result of a chain is stored (see `local_program`).
      chain: operations of a chain (0: all).
    """

    name: str
    target: str
    bytes: float
    repeats: int
    op: Op | None = None
    inputs: tuple[TensorType, ...] = ()
    axes: Axes = ()
    kept: bool = False
    chain: int = 0

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The array functions of one repeat, that which makes the operand included; `final` if the result
        stays.
        """
        if self.target == LAUNCH:
            return step_calls(self.program(ALONE))
        if self.op is None:
            return ()
        found = _calls(self.op, *self.inputs)
        if not self.stored:
            found = tuple(replace(c, final=False) for c in found)
        if warmed(self.op, self.inputs):
            before = _calls(Binary("mul"), self.inputs[0], warming(self.op, self.inputs))
            found = (*(replace(c, final=False) for c in before), *found)
        return found

    @property
    def stored(self) -> bool:
        """True if every repeat stores its result: always, if results cannot form a chain."""
        return self.kept or (self.op is not None and self.op.infer(*self.inputs) != self.inputs[0])

    @property
    def stores(self) -> int:
        """The number of results that a step stores."""
        if self.target == LAUNCH:
            return sum(isinstance(instr, WriteVariable) for instr in self.program(ALONE).code)
        if self.op is None or self.stored:
            return self.repeats
        return -(-self.repeats // self.chain) if self.chain else 1

    def program(self, mesh: Mesh) -> Program:
        if self.op is not None:
            own = self.target == "check"
            return local_program(mesh, self.op, self.inputs, self.repeats, self.kept, own, self.chain)
        if self.target == LAUNCH:
            return step_program(mesh)
        if self.axes:
            return collective_program(mesh, self.target, self.axes, int(self.bytes), self.repeats)
        return stores_program(mesh, 256, self.repeats)


def _calls(op: Op, *inputs: TensorType) -> tuple[Call, ...]:
    out = op.infer(*inputs)
    return tuple(calls(op, inputs, (out,) if isinstance(out, TensorType) else out, frozenset()))


def probes(mesh: Mesh, quick: bool, devices_per_process: int | None = None) -> list[Probe]:
    """Everything that one calibration of a mesh measures, classes in the order in which they are fitted.

    Args:
      devices_per_process: see `costmodels.network.topology.processes_spanned`.
    """
    own = [*stores(), *elements(quick), *products(quick), Probe(LAUNCH, LAUNCH, 0.0, 1)]
    return [*own, *collectives(mesh, quick, devices_per_process), *checks(quick)]


def stores() -> Iterator[Probe]:
    """The overhead of every program: an empty step, and 64 variables read and stored."""
    yield Probe("empty", "stores", 0.0, 0)
    yield Probe("stores", "stores", 0.0, 64)


def tensor(*sizes: int, dtype: str = "float32", names: str = "abcdefgh") -> TensorType:
    """A type with dimensions of these names; size 0 leaves a dimension out."""
    return TensorType(Shape([Dim(n, s) for n, s in zip(names, sizes, strict=False) if s]), dtype)


def _local(target: str, label: str, op: Op, *inputs: TensorType) -> Probe:
    made = Probe("", target, 0.0, 1, op, inputs)
    own = [c for c in made.calls if f"{c.op_class}.".startswith(f"kernel.{target}.")]
    size = own[0].bytes if own else 0.0
    total = sum(c.bytes for c in made.calls)
    repeats = 24 if total < 16 * KB else 12 if total < 256 * KB else 6 if total < 4 * MB else 3
    chain = 0
    if not made.stored:
        repeats = max(repeats, 12)  # the first of a chain reads what no cache holds
        if total < 16 * KB:
            # A step's own time hides a few small operations, and a single chain leaves its runtime no choice.
            repeats, chain = 96, 6
    return Probe(f"{target} {label}", target, size, repeats, op, inputs, chain=chain)


def elements(quick: bool) -> Iterator[Probe]:
    """Everything but products: [rows, columns] arrays from 2 KB to 8 MB."""
    base = [(8, 64), (64, 256), (256, 256), (1024, 256), (1024, 512), (2048, 1024)]
    few = [(8, 64), (256, 256), (1024, 512)] if quick else base
    two = [(8, 64), (512, 512), (2048, 512)] if quick else few
    ends = [two[0], two[-1]] if quick else two
    for r, c in base:
        x = tensor(r, c)
        yield _local("unary", f"{r}x{c}", Unary("relu"), x)
        kept = _local("unary", f"{r}x{c} kept", Unary("relu"), x)
        yield replace(kept, target="fresh", kept=True, repeats=6, chain=0)
        yield _local("binary.same", f"{r}x{c}", Binary("mul"), x, x)
    for r, c in few:
        x, label = tensor(r, c), f"{r}x{c}"
        yield _local("binary.row", label, Binary("mul"), x, tensor(0, c))
        yield _local("binary.column", label, Binary("mul"), x, tensor(r))
        yield _local("reduce.inner", label, Reduce("sum", ("b",)), x)
        yield _local("reduce.outer", label, Reduce("sum", ("a",)), x)
        yield _local("softmax", label, Softmax("b"), x)
        yield _local("transpose.elements", label, Transpose(Shape([x.shape.dims[1], x.shape.dims[0]])), x)
        yield _local("where.row", label, Where(), tensor(0, c, dtype="bool"), x, tensor())
    for r, c in two:
        x, label = tensor(r, c), f"{r}x{c}"
        cube = tensor(r // 8, 8, c) if r > 8 else tensor(2, 4, c)
        yield _local("binary.same.div", label, Binary("div"), x, x)
        yield _local("binary.general", label, Binary("mul"), cube, tensor(0, cube.shape.sizes[1], 0))
        yield _local("where.same", label, Where(), tensor(r, c, dtype="bool"), x, x)
        yield _local("where.scalar", label, Where(), tensor(r, c, dtype="bool"), x, tensor())
        yield _local("where.column", label, Where(), tensor(r, dtype="bool"), x, tensor())
        yield _local(
            "where.general", label, Where(), tensor(0, cube.shape.sizes[1], dtype="bool"), cube, tensor()
        )
        yield _local("cast.number", label, Cast("bfloat16"), x)
        yield _local("cast.bool", label, Cast("float32"), tensor(r, c, dtype="bool"))
        yield _local("reduce.mixed", label, Reduce("sum", ("a", "c")), cube)
        yield _local("reduce.middle", label, Reduce("sum", ("b",)), cube)
        apart = tensor(cube.shape.sizes[0], cube.shape.sizes[1], c // 8, 8)
        yield _local("reduce.apart", label, Reduce("sum", ("b", "d")), apart)
        many = min(24, r // 2)  # no power of two, whose rows would share their places in a cache
        rows = tensor(-(-r // many), many, c)
        swapped = Shape([rows.shape.dims[1], rows.shape.dims[0], rows.shape.dims[2]])
        yield _local("transpose.rows", label, Transpose(swapped), rows)
        yield _local("copy", label, Concat("b"), tensor(r, c // 2), tensor(r, c // 2))
        yield _local("broadcast", label, Broadcast(x.shape), tensor(r))
        ids = tensor(r, dtype="int32")
        yield _local("take.rows", label, Gather("v"), tensor(256, c, names="vb"), ids)
        yield _local("segment_sum", label, ScatterAdd(Dim("v", 256)), x, ids)
        wide = tensor(r * c // 16, 16)
        yield _local("take.elements", label, Pick("b"), wide, tensor(r * c // 16, dtype="int32"))
    for r, c in ends:
        x, label = tensor(r, c), f"{r}x{c}"
        for fn in ("exp", "tanh", "sqrt", "rsqrt", "gelu", "log", "sigmoid", "erf"):
            yield _local(f"unary.{fn}", label, Unary(fn), x)
        key = TensorType(Shape(), "int32")
        yield _local("unary.together", label, RandomUniform(x.shape, "float32", 0.0, 1.0), key)
        yield _local("cumulative", label, CumSum("b", False, False), tensor(r // 8, c, 8))
        image = tensor(r // 8, 8, c // 8, 8)
        yield _local("copy.pad", label, Pad("b", 1, 1, 0.0), image)
        yield _local("copy.slice", label, SliceDim("b", 1, 6), image)
        yield _local("copy.narrow", label, SliceDim("d", 1, 4), image)


PRODUCTS = (
    "64x64x64 128x128x128 256x256x256 512x512x512 1024x128x64 1024x128x16 1024x16x128 128x1024x16 "
    "128x1024x128 512x128x512 1024x512x128 256x2048x256 64x512x256 32x128x512 256x256x1024 "
    "32x1024x1024 16x512x512 512x1024x512 T128x1024x64 T256x256x256 T512x512x128 T64x512x32 T512x64x1024 "
    "T512x256x1024 256x64x256T 256x256x64T 512x512x128T 32x128x64T 32x1024x1024T 64x512x512T 256x1024x512T"
)
"""m x k x n: square ones, tall activations by narrow weights, narrow by wide, few rows by large weights, and
sums over many rows; T: a factor is transposed, the first one in gradients of weights, the second one in those
of activations."""
MORE_PRODUCTS = "1024x1024x1024 2048x1024x256 256x1024x2048 4096x64x64 T2048x256x256 T1024x64x512"
BATCHES = (
    "16x128x32x128 64x64x16x64 16x128x128x32 8x32x64x32 8x16x32x16 128x32x16x32 4x256x64x256 2x128x128x128 "
    "8x256x128x256 4x256x512x128 4x64x64x256 T32x64x64x16 T8x128x256x64 T4x512x128x64 32x64x16x64T "
    "8x128x64x128T 4x64x512x128T"
)
"""batch x m x k x n: logits and mixtures of attention, layers of experts, and their gradients."""
MORE_BATCHES = "64x128x64x128 32x128x128x64 4x256x256x256 128x64x64x16"
CONVOLUTIONS = (
    "32x18x16x3x16 8x18x32x3x32 8x10x64x3x64 8x6x16x3x32 16x16x32x1x64 16x18x8x16x16 4x10x4x3x16 "
    "32x18x16x3x2 16x18x32x16x2 64x6x32x4x8 16x10x32x8x32"
)
"""batch x image x channels x window x channels made: layers, narrow to wide, one with windows of one element,
one with few output channels, and gradients of weights, whose windows are nearly as large as the image."""


def products(quick: bool) -> Iterator[Probe]:
    """Matrix products as in attention and feed-forward layers, forward and backward."""
    for text in (PRODUCTS if quick else f"{PRODUCTS} {MORE_PRODUCTS}").split():
        yield _product("matmul", text)
    for text in (BATCHES if quick else f"{BATCHES} {MORE_BATCHES}").split():
        yield _product("batch", text)
    for text in CONVOLUTIONS.split():
        batch, image, channels, window, made = map(int, text.split("x"))
        x = tensor(batch, image, image, channels, names="byxi")
        w = tensor(window, window, channels, made, names="vuio")
        windows = (Window("y", window, 1, 1, 0, 0), Window("x", window, 1, 1, 0, 0))
        yield _local("matmul.conv", text, Conv(Grid(windows, ("v", "u"), "i")), x, w)


def _product(target: str, text: str) -> Probe:
    """(batch x) m x k x n."""
    *batch, m, k, n = (
        Dim(d, int(s))
        for d, s in zip("zmkn"[-text.count("x") - 1 :], text.strip("T").split("x"), strict=True)
    )
    left = [*batch, k, m] if text.startswith("T") else [*batch, m, k]
    right = [*batch, n, k] if text.endswith("T") else [*batch, k, n]
    x, y = TensorType(Shape(left), "float32"), TensorType(Shape(right), "float32")
    return _local(target, text, Einsum(Shape([*batch, m, n])), x, y)


def groups(mesh: Mesh, devices_per_process: int | None = None) -> dict[Axes, GroupShape]:
    """One tuple of axes for every kind of group that the mesh has."""
    real = [a for a in mesh.names if mesh.size(a) > 1]
    found: dict[GroupShape, Axes] = {}
    for count in range(1, len(real) + 1):
        for axes in itertools.combinations(real, count):
            over = processes_spanned(mesh, axes, devices_per_process)
            found.setdefault((mesh.group_size(axes), over), axes)
    return {found[kind]: kind for kind in sorted(found)}


def collectives(mesh: Mesh, quick: bool, devices_per_process: int | None = None) -> Iterator[Probe]:
    """Every collective over one group of each kind, small to large arrays."""
    sizes: Sequence[int] = (
        (8 * KB, 256 * KB, 2 * MB) if quick else (8 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 8 * MB)
    )
    for axes, (n, _) in groups(mesh, devices_per_process).items():
        for kind in COLLECTIVES:
            for size in sizes:
                rounded = collective_bytes(size, n)
                repeats = 8 if size <= 64 * KB else 4 if size <= 512 * KB else 2
                yield Probe(f"{kind} {'+'.join(axes)} {rounded}", kind, float(rounded), repeats, axes=axes)


def collective_bytes(size: int, group: int) -> int:
    """The nearest size that `collective_program` can have."""
    wide = 8 * group
    return max(1, round(size / 4 / (wide * wide))) * group * wide * 8 * 4


def checks(quick: bool) -> Iterator[Probe]:
    """Operations of several calls, which the fit does not see: its held-out test."""
    for r, c in [(64, 128), (1024, 512)] if quick else [(64, 128), (512, 256), (1024, 512), (2048, 1024)]:
        x, label = tensor(r, c), f"{r}x{c}"
        yield _check("normalize", label, Normalize(("b",), 1e-6, True), x)
        yield _check("normalize_grad", label, NormalizeGrad(("b",), 1e-6, True), x, x)
        yield _check("softmax_grad", label, SoftmaxGrad("b"), x, x)
        yield _check("gelu_grad", label, UnaryGrad("gelu"), x, x)
        yield _check("one_hot", label, OneHot(Dim("b", c), "float32"), tensor(r, dtype="int32"))
    d = [Dim(n, s) for n, s in zip("blhk", (8, 64, 4, 32), strict=True)]
    q, m = TensorType(Shape(d), "float32"), Dim("m", 64)
    keys = TensorType(Shape([d[0], m, *d[2:]]), "float32")
    yield _check("attention logits", "8x64x4x32", Einsum(Shape([d[0], d[2], d[1], m])), q, keys)


def _check(name: str, label: str, op: Op, *inputs: TensorType) -> Probe:
    made = _local("check", label, op, *inputs)
    size = sum(c.bytes for c in made.calls)
    return Probe(f"check {name} {label}", "check", size, made.repeats, op, inputs, kept=True)
