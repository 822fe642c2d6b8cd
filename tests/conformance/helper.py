"""Conformance: an operation gives the dense result, forward and backward, under every legal layout of its
dimensions.

What is legal is stated here on its own, not read off the operation: every size divides, no tensor has one
mesh axis on two dimensions, and dimensions that a sample lists as `together` (they meet inside the operation)
count as one tensor.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.program import Collective, Loop, Program
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.lower.verify import verify

MESHES = {
    "x:2": ("float64", "float32", "bfloat16"),
    "x:2;y:2": ("float64",),
    "x:2;y:4": ("float32",),
}
"""Meshes and the dtypes tried on each by day."""
BY_NIGHT = {"x:2;y:2": ("float32",), "x:2;y:4": ("float64",)}
"""The others: what a kernel does in a dtype was tried on the smallest mesh."""
SOME = 2
"""Layouts that are tried in further dtypes: what splits was compared in the first, what a kernel does in a
dtype differs little among them."""
TOLERANCE = {"float64": 1e-10, "float32": 3e-5, "bfloat16": 0.06}
REASONS = r"both .* split over mesh axis|do not divide|not divisible|its iterations"
ILLEGAL_TRIED = 60
"""At most so many illegal layouts are tried per sample and mesh."""


def dims(text: str) -> list[mtf.Dim]:
    """`a:8 b:4` as dimensions."""
    return [mtf.Dim(name, int(size)) for name, size in (part.split(":") for part in text.split())]


@dataclass(frozen=True)
class Arg:
    """One input of a sample.

    Attributes:
      dims: `a:8 b:4`.
      kind: normal, positive, unit (in (0, 1)), bool, key (a random key), or int:N (0 .. N-1); odd:N also
        gives ids outside of 0 .. N-1.
    """

    dims: str
    kind: str = "normal"

    def dtype(self, number: str) -> str:
        if self.kind == "bool":
            return "bool"
        kind = self.kind.split(":")[0]
        return "int64" if kind == "long" else "int32" if kind in ("key", "int", "odd") else number

    def values(self, rng: np.random.Generator, number: str) -> np.ndarray:
        sizes = tuple(d.size for d in dims(self.dims))
        kind, _, n = self.kind.partition(":")
        made: Any = {
            "normal": lambda: rng.normal(size=sizes),
            "positive": lambda: rng.uniform(0.5, 2.0, sizes),
            "unit": lambda: rng.uniform(0.05, 0.95, sizes),
            "bool": lambda: rng.random(sizes) < 0.6,
            "key": lambda: rng.integers(0, 2**31, sizes),
            "int": lambda: rng.integers(0, int(n), sizes),
            "long": lambda: rng.integers(0, int(n), sizes),
            "odd": lambda: rng.integers(-2, int(n) + 2, sizes),
        }[kind]()
        return np.asarray(made).astype(np_dtype(self.dtype(number)))


Apply = Callable[..., Any]


@dataclass(frozen=True)
class Sample:
    """Inputs of one operation and how it is applied.

    Attributes:
      family: which table it belongs to.
      apply: apply(graph, *tensors) -> tensor or tuple of tensors.
      args: inputs in order.
      reference: the same in plain NumPy on the dense inputs (None: the kernel is tested elsewhere).
      together: names that may not share an axis although no input or output has them all, e.g. "a b c".
      loops: names that count iterations and may not be split at all.
      stops: inputs (by position) whose gradient is not the derivative, by definition.
      context: form of attention to keys "m" where they are split as queries "l" are.
    """

    name: str
    family: str
    apply: Apply
    args: tuple[Arg, ...]
    reference: Callable[..., Any] | None = None
    together: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()
    stops: tuple[int, ...] = ()
    context: str = ""


@dataclass
class Counts:
    """What was tried."""

    legal: int = 0
    illegal: int = 0
    comparisons: int = 0
    layouts: list[str] = field(default_factory=list)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.legal + other.legal,
            self.illegal + other.illegal,
            self.comparisons + other.comparisons,
            self.layouts + other.layouts,
        )


class Built:
    """A sample's graph with the gradients of a random weighting of its float outputs, and its batch."""

    def __init__(self, sample: Sample, number: str) -> None:
        self.sample = sample
        self.graph = g = mtf.Graph(sample.name)
        rng = np.random.default_rng(zlib.crc32(sample.name.encode()))
        self.batch = {f"in{i}": a.values(rng, number) for i, a in enumerate(sample.args)}
        self.inputs = [g.input(f"in{i}", dims(a.dims), a.dtype(number)) for i, a in enumerate(sample.args)]
        made = sample.apply(g, *self.inputs)
        self.outputs = list(made) if isinstance(made, tuple) else [made]
        self.results = {f"out{i}": y for i, y in enumerate(self.outputs)}
        for i, (a, x) in enumerate(zip(sample.args, self.inputs, strict=True)):
            if a.kind.startswith("odd:"):  # engines refuse ids that no model sets apart
                self.results[f"inside{i}"] = mtf.logical_and(x >= 0, x < int(a.kind[4:]))
        self.sets = [set(t.shape.names) for t in (*self.inputs, *self.outputs)]
        self.sets += [set(text.split()) for text in sample.together]
        self.sizes: dict[str, set[int]] = {}
        for t in (*self.inputs, *self.outputs):
            for d in t.shape:
                self.sizes.setdefault(d.name, set()).add(d.size)
        self.gradients: dict[int, str | None] = {}
        self._differentiate(rng, number)

    def _differentiate(self, rng: np.random.Generator, number: str) -> None:
        terms = []
        for i, y in enumerate(self.outputs):
            if is_float(y.dtype):
                w = self.graph.input(f"weight{i}", y.shape.dims, y.dtype)
                self.batch[f"weight{i}"] = rng.normal(size=y.shape.sizes).astype(np_dtype(number))
                terms.append(mtf.einsum([y, w], []))
        floats = [i for i, x in enumerate(self.inputs) if is_float(x.dtype)]
        if not terms or not floats:
            return
        self.results["loss"] = mtf.add_n(terms)
        found = mtf.gradients(self.results["loss"], [self.inputs[i] for i in floats])
        for i, dx in zip(floats, found, strict=True):
            self.gradients[i] = f"grad{i}" if dx is not None else None
            if dx is not None:
                assert dx.type == self.inputs[i].type, f"gradient {dx!r} of input {self.inputs[i]!r}"
                self.results[f"grad{i}"] = dx

    def program(self, mesh: mtf.Mesh, layout: mtf.Layout) -> Program:
        alike = self.sample.context and layout.axes("l") and layout.axes("l") == layout.axes("m")
        options = mtf.Options(context=frozenset({("m", self.sample.context)} if alike else ()))
        return verify(mtf.lower(self.graph, mesh, layout, self.results, options))

    def run(self, program: Program, batch: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        engine = LockstepEngine(program)
        out = engine.step(batch or self.batch)
        check_bytes(program, engine.communication_bytes)
        return out

    @cached_property
    def undivided(self) -> Program:
        return self.program(mtf.Mesh("one:1"), mtf.Layout())

    def dense(self, batch: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        return self.run(self.undivided, batch)


# -- layouts --


def choices(mesh: mtf.Mesh) -> list[tuple[str, ...]]:
    """All tuples of mesh axes that one dimension may be split over, in every order."""
    return [c for n in range(len(mesh.names) + 1) for c in itertools.permutations(mesh.names, n)]


def is_legal(built: Built, mesh: mtf.Mesh, table: Mapping[str, Sequence[str]]) -> bool:
    """What may be lowered; a name that `table` lacks is not split."""
    if any(table.get(name) for name in built.sample.loops):
        return False
    for name, axes in table.items():
        if any(size % mesh.group_size(axes) for size in built.sizes.get(name, ())):
            return False
    for group in built.sets:
        used = [axis for name in group for axis in table.get(name, ())]
        if len(used) != len(set(used)):
            return False
    return True


Table = dict[str, tuple[str, ...]]


def names_of(built: Built) -> list[str]:
    return sorted({*built.sizes, *built.sample.loops})


def legal_layouts(built: Built, mesh: mtf.Mesh) -> Iterator[Table]:
    """Every legal assignment of axes to the dimensions that occur."""

    def extend(table: Table, rest: list[str]) -> Iterator[Table]:
        if not rest:
            yield table
            return
        for axes in choices(mesh):
            more = {**table, rest[0]: axes}
            if is_legal(built, mesh, more):
                yield from extend(more, rest[1:])

    return extend({}, names_of(built))


def distinct_layouts(built: Built, mesh: mtf.Mesh) -> Iterator[Table]:
    """The legal layouts; of two that differ only in which of equal axes is which, the first."""
    seen = set[tuple[tuple[str, ...], ...]]()
    orders = (
        c for c in itertools.permutations(mesh.names) if [*map(mesh.size, c)] == [n for _, n in mesh.axes]
    )
    renamed = [dict(zip(mesh.names, order, strict=True)) for order in orders]
    for table in legal_layouts(built, mesh):
        if tuple(table.values()) not in seen:
            seen.update(tuple(tuple(to[axis] for axis in axes) for axes in table.values()) for to in renamed)
            yield table


def illegal_layouts(built: Built, mesh: mtf.Mesh) -> list[Table]:
    """All illegal assignments, or if there are many, some of them drawn at random, evenly thinned out."""
    names, options = names_of(built), choices(mesh)
    if len(options) ** len(names) <= 1000:
        tables = [dict(zip(names, c, strict=True)) for c in itertools.product(options, repeat=len(names))]
    else:
        rng = np.random.default_rng(0)
        picks = rng.integers(0, len(options), (300, len(names)))
        tables = [{n: options[i] for n, i in zip(names, row, strict=True)} for row in picks]
    illegal = [t for t in tables if not is_legal(built, mesh, t)]
    return illegal[:: max(1, -(-len(illegal) // ILLEGAL_TRIED))]


# -- comparing --


def check_bytes(program: Program, sent: Mapping[str, float]) -> None:
    """What the engine sent is what the program says; at most that, if parts of it may not run."""
    most = dict.fromkeys(program.mesh.names, 0.0)
    for instr, times in program.walk():
        if isinstance(instr, Collective):
            key = "+".join(instr.axes)
            most[key] = most.get(key, 0.0) + times * program.wire_bytes(instr)
    if any(isinstance(instr, Loop) and instr.runs is not None for instr, _ in program.walk()):
        assert all(sent.get(axes, 0.0) <= n for axes, n in most.items()), (
            f"engine counts {sent}, most is {most}"
        )
        return
    said = program.communication_bytes()
    assert sent == said == most, f"engine counts {sent}, the program says {said}"


def check_close(name: str, got: np.ndarray, want: np.ndarray, tolerance: float, where: str) -> None:
    """Equal up to `tolerance` of the largest element; exactly for integers and bool."""
    assert got.shape == want.shape, f"{where}: {name} has shape {got.shape}, dense {want.shape}"
    assert got.dtype == want.dtype, f"{where}: {name} has dtype {got.dtype}, dense {want.dtype}"
    if got.dtype.kind not in "fV":
        wrong = int((got != want).sum())
        assert not wrong, f"{where}: {wrong} of {got.size} elements of {name} differ from the dense result"
        return
    g, w = got.astype(np.float64), want.astype(np.float64)
    assert (np.isfinite(g) == np.isfinite(w)).all(), (
        f"{where}: {name} is not finite where the dense result is"
    )
    finite = np.isfinite(w)
    assert (g[~finite] == w[~finite]).all() or np.isnan(w[~finite]).any(), (
        f"{where}: {name} differs at infinity"
    )
    scale = max(1.0, float(np.abs(w[finite]).max(initial=0.0)))
    error = float(np.abs(g[finite] - w[finite]).max(initial=0.0)) / scale
    assert error <= tolerance, (
        f"{where}: {name} is {error:.3g} off the dense result (relative to {scale:.3g})"
    )


def conform(sample: Sample, mesh_text: str, *numbers: str) -> Counts:
    """Runs a sample under every legal layout of one mesh; in further dtypes under those that split most.

    AssertionError at the first difference.
    """
    mesh, first, counts = mtf.Mesh(mesh_text), numbers[0], Counts()
    for number in numbers:
        built = Built(sample, number)
        tables = [*distinct_layouts(built, mesh)]
        counts += compared(built, mesh, number, tables if number == first else tables[-SOME:])
    return counts + refused(Built(sample, first), mesh)


def compared(built: Built, mesh: mtf.Mesh, number: str, tables: Iterable[Table]) -> Counts:
    """Runs a sample under legal layouts."""
    sample, counts, want = built.sample, Counts(), built.dense()
    for table in tables:
        layout = mtf.Layout(table)
        where = f"{sample.name} {number} on [{mesh}] under [{layout}]"
        try:
            got = built.run(built.program(mesh, layout))
        except mtf.UserError as e:
            raise AssertionError(f"{where}: refused although it is legal: {e}") from e
        for name, value in got.items():
            check_close(name, value, want[name], TOLERANCE[number], where)
        counts.legal += 1
        counts.comparisons += len(got)
        counts.layouts.append(str(layout))
    return counts


def refused(built: Built, mesh: mtf.Mesh) -> Counts:
    """Lowers a sample under illegal layouts; AssertionError if one is not refused."""
    import pytest

    counts = Counts()
    for table in illegal_layouts(built, mesh):
        with pytest.raises(mtf.LayoutError, match=REASONS):
            built.program(mesh, mtf.Layout(table))
        counts.illegal += 1
    return counts


def check_dense(sample: Sample) -> int:
    """The dense result against the sample's own NumPy reference, and gradients against finite differences."""
    built = Built(sample, "float64")
    out = built.dense()
    done = 0
    if sample.reference is not None:
        expected = sample.reference(*(built.batch[f"in{i}"] for i in range(len(sample.args))))
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert len(expected) == len(built.outputs)
        for i, w in enumerate(expected):
            y = out[f"out{i}"]
            check_close(f"out{i}", y, np.asarray(w).astype(y.dtype), 1e-10, f"{sample.name} against NumPy")
            done += 1
    rng = np.random.default_rng(1)
    for i, name in built.gradients.items():
        if i in sample.stops:
            continue
        # A wrong gradient is wrong along almost every direction.
        direction, step = rng.normal(size=built.batch[f"in{i}"].shape), 1e-6
        ends = []
        for sign in (1, -1):
            moved = built.batch[f"in{i}"] + sign * step * direction
            ends.append(float(built.dense({**built.batch, f"in{i}": moved})["loss"]))
        slope = (ends[0] - ends[1]) / (2 * step)
        given = float((out[name] * direction).sum()) if name else 0.0
        assert abs(slope - given) <= 1e-6 * max(1.0, abs(slope)), (
            f"{sample.name}: the gradient of input {i} gives slope {given:.8g}, "
            f"finite differences {slope:.8g}"
        )
        done += 1
    return done
