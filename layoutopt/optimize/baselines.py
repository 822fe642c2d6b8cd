"""Layouts that people write by hand, priced with every answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from layoutopt.space.splits import domains
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model

BY_HAND = ("vocab", "d_ff", "heads", "experts")
"""Dimensions that Mesh-TensorFlow's and Megatron-LM's layouts split over the model axis (Shazeer et al. 2018,
section 5; Shoeybi et al. 2019, section 3)."""


def named_layouts(
    model: Model, mesh: Mesh, options: Mapping[str, tuple[Axes, ...]]
) -> Iterator[tuple[str, Mesh, Layout, Options]]:
    """(name, mesh, layout, options) of replicated, data-parallel, fully sharded, tensor- and expert-parallel
    layouts, and those that the model declares, on a mesh."""
    plain = Options()
    yield "replicated", mesh, Layout(), plain
    batch = model.batch_dim
    if batch is not None:
        widest = max(options.get(batch, ((),)), key=mesh.group_size)
        if widest:
            yield "data parallel", mesh, Layout({batch: widest}), plain
            trained = (v.name for v in model.graph.variables.values() if v.trainable and len(v.shape))
            yield "fully sharded (FSDP)", mesh, Layout({batch: widest}), Options(dict.fromkeys(trained, 3))
    split = [n for n in BY_HAND if len(options.get(n, ())) > 1]
    if "experts" in split and "d_ff" in split:
        split.remove("d_ff")  # an expert's matrices have both; the axis goes to the experts
    words = ["tensor"] * any(n != "experts" for n in split) + ["expert"] * ("experts" in split)
    kind = f"{' + '.join(words)} parallel"
    if split:
        rules = {n: max(options[n], key=mesh.group_size) for n in split}
        yield f"{kind} (by hand)", mesh, Layout(rules), plain
    if batch is not None and split and len(mesh.axes) > 1:
        data = tuple(a for a in mesh.names if a.startswith(("data", "batch")))
        first = data if 0 < len(data) < len(mesh.axes) else mesh.names[:-1]
        rest = tuple(a for a in mesh.names if a not in first)
        rules = {n: rest for n in split if rest in options[n]}
        if first in options.get(batch, ()):
            yield f"data + {kind} (by hand)", mesh, Layout({batch: first, **rules}), plain
    for name, own, layout in _declared(model, mesh):
        yield name, own, layout, plain


def named_in(
    model: Model, mesh: Mesh, names: Mapping[str, str]
) -> Iterator[tuple[str, Mesh, Layout, Options]]:
    """As `named_layouts`, for a mesh whose axes a plan calls by other names; the layouts have its own."""
    own = {new: old for old, new in names.items()}
    called = Mesh([(names.get(a, a), n) for a, n in mesh.axes])
    for name, its, layout, options in named_layouts(model, called, domains(model.graph, called)):
        if its == called:
            rules = {n: tuple(own.get(a, a) for a in axes) for n, axes in layout.items()}
            yield name, mesh, Layout(rules), options
        else:
            yield name, its, layout, options


def _declared(model: Model, mesh: Mesh) -> Iterator[tuple[str, Mesh, Layout]]:
    """The model's own layouts that suit this number of devices."""
    for name, (mesh_text, layout_text) in model.layouts.items():
        layout = Layout(layout_text)
        own = Mesh(mesh_text) if mesh_text else mesh
        axes = {a for found in layout.values() for a in found}
        if own.devices == mesh.devices and axes <= set(own.names):
            yield name, own, layout


def axis_names(layout: Layout, mesh: Mesh, batch: str | None) -> dict[str, str]:
    """Speaking names for the axes of a searched mesh: `data` where the batch is split, `model` elsewhere."""
    on_batch = set(layout.axes(batch)) if batch else set()
    counts = {"data": itertools.count(1), "model": itertools.count(1)}
    names = {}
    for axis in mesh.names:
        word = "data" if axis in on_batch else "model"
        number = next(counts[word])
        names[axis] = word if number == 1 else f"{word}{number}"
    return names
