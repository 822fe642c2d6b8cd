"""Hand-built programs that hold every collective, and small models."""

from __future__ import annotations

import numpy as np

import mesh_tf_core as mtf
from examples.moe_lm import model as experts
from examples.transformer_lm import model as transformer
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Input,
    Local,
    Origin,
    Permute,
    Program,
    ReduceScatter,
    Slice,
    Value,
)
from mesh_tf_core.ops.reduce import Reduce

HERE = Origin(0, "", Phase.FORWARD)
P, Q = Dim("p", 16), Dim("q", 24)


class Builder:
    """Appends instructions to a program."""

    def __init__(self, mesh, dtype="float64"):
        self.mesh, self.values, self.code, self.feeds, self.results = Mesh(mesh), [], [], {}, {}
        self.dtype = dtype

    def value(self, dims, splits, partial=(), dtype=None):
        self.values.append(Value(len(self.values), Shape(dims), dtype or self.dtype, splits, partial))
        return len(self.values) - 1

    def input(self, name, dims, splits, dtype=None):
        out = self.feeds[name] = self.value(dims, splits, dtype=dtype)
        self.code.append(Input((), (out,), HERE, name))
        return out

    def add(self, kind, ins, outs, *args, **kwargs):
        self.code.append(kind(tuple(ins), tuple(outs), HERE, *args, **kwargs))
        self.results.update({f"r{len(self.code)}_{o}": o for o in outs})

    def program(self):
        code, results = tuple(self.code), self.results
        return Program(self.mesh, Layout(), tuple(self.values), code, {}, self.feeds, results)


def every_collective(mesh, axes, dtype="float64"):
    """A program with every kind of communication over `axes`."""
    b = Builder(mesh, dtype)
    rows = b.input("x", [P, Q], (axes, ()))
    columns = b.input("y", [P, Q], ((), axes))
    for fn in ("sum", "max", "min"):
        partial = b.value([Q], ((),), axes if fn == "sum" else ())
        b.code.append(Local((rows,), (partial,), HERE, Reduce(fn, ("p",))))
        total = b.value([Q], ((),))
        b.add(AllReduce, [partial], [total], axes, fn)
        if fn == "sum":
            whole = b.value([], (), axes)
            b.code.append(Local((rows,), (whole,), HERE, Reduce("sum", ("p", "q"))))
            b.add(AllReduce, [partial, whole], [b.value([Q], ((),)), b.value([], ())], axes)
            b.add(ReduceScatter, [partial], [b.value([Q], (axes,))], axes, "q")
            b.add(Slice, [total], [b.value([Q], (axes,))], "q", axes)
    b.add(AllGather, [rows], [b.value([P, Q], ((), ()))], axes, "p")
    b.add(AllGather, [columns], [b.value([P, Q], ((), ()))], axes, "q")
    if len(axes) > 1:
        b.add(AllGather, [columns], [b.value([P, Q], ((), axes[:1]))], axes[1:], "q")
    b.add(AllToAll, [rows], [b.value([P, Q], ((), axes))], axes, "q", "p")
    b.add(AllToAll, [columns], [b.value([P, Q], (axes, ()))], axes, "p", "q")
    for shift, wrap in ((1, False), (-1, False), (1, True), (-2, True)):
        b.add(Permute, [rows], [b.value([P, Q], (axes, ()))], axes, shift, wrap)
    pairs = ((0, b.mesh.group_size(axes) - 1),)
    b.add(Permute, [rows], [b.value([P, Q], (axes, ()))], axes, pairs=pairs)
    return b.program()


def language_model(mesh, layout, **hparams):
    sizes = {"layers": 2, "d_model": 16, "d_kv": 4, "heads": 4, "d_ff": 32, "vocab": 24, "batch": 8}
    build = experts if "experts" in hparams else transformer
    return build(**{**sizes, "length": 6, "gated": True, **hparams}).lower(Mesh(mesh), Layout(layout))


def tokens(program, seed=0, beyond=24):
    rng = np.random.default_rng(seed)
    shapes = {name: program.values[id].shape.sizes for name, id in program.feeds.items()}
    return {name: rng.integers(0, beyond, shape).astype(np.int32) for name, shape in shapes.items()}


def numbers(program, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=program.values[id].shape.sizes) for name, id in program.feeds.items()}


def network(hidden=8, dropout=0.2, bias=False):
    """Two residual layers in a loop, with dropout."""
    g = mtf.Graph("network")
    b, d, h = mtf.Dim("batch", 8), mtf.Dim("features", 4), mtf.Dim("hidden", hidden)

    def layer(x):
        inner = mtf.tanh(mtf.einsum([x, g.variable("wi", [d, h], mtf.Normal(0.5))], [b, h]))
        if bias:
            inner = inner + g.variable("bias", [h], mtf.ZEROS)
        wo = g.variable("wo", [h, d], mtf.Normal(0.5))
        return x + mtf.einsum([mtf.dropout(inner, dropout), wo], [b, d])

    y = mtf.scan(layer, g.input("x", [b, d], "float32"), mtf.Dim("layers", 2))
    return mtf.Model(mtf.reduce_mean(mtf.square(y - g.input("y", [b, d], "float32"))), mtf.Adam(0.01))
