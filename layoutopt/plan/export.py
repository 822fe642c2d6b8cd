"""A plan in the form that other libraries take (`FORMATS`).

Python and YAML are texts that can be pasted or imported. A layout that a library cannot express is refused
with a reason. So is storage (ZeRO) in the forms of layout rules alone, and mixed storage in those with one
stage for all variables. Only rules for single operations are left out, in forms with single variables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from costmodels.frameworks import framework_names
from layoutopt.frameworks import of_version, says
from layoutopt.plan import degrees
from layoutopt.plan.decided import ELSEWHERE, rules_in
from layoutopt.plan.exported import Exported, ExportedTensor, comment, software
from layoutopt.plan.huggingface import accelerate, transformers
from layoutopt.plan.maxtext import maxtext
from layoutopt.plan.torchtitan import torchtitan
from layoutopt.space.decisions import beyond
from layoutopt.space.restriction import ANY, Even, Restriction
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh


def export(what: Exported, to: str) -> str:
    """Writes `what` in the form of the library `to`, one of `FORMATS`.

    Raises:
      UserError: an unknown library, or a layout that it cannot express.
    """
    to = RENAMED.get(to, to)
    if to not in FORMATS:
        raise UserError(f"--to {to!r}: no such format; {known_names(to, FORMATS)}")
    form, named = FORMATS[to], software(to)
    under = f"search with --framework {named}" if named in framework_names() else ""
    can = of_version(form.says, what.framework)
    even = any(isinstance(relation, Even) for relation in can.relations)
    for v in what.variables if even else ():
        for name, size, axes in zip(v.dims, v.sizes, v.splits, strict=True):
            if size % (ways := what.mesh.group_size(axes)):
                raise UserError(
                    f"{to} supports only shards of equal size, but this plan stores {v.name!r} "
                    f"padded, because its {name!r} of size {size} is not divisible by {ways} devices; "
                    f"{under or 'search with --storage layout'}, or train with layoutopt"
                )
    if lost := beyond(can, what.decided):
        raise UserError(
            f"{to} cannot express this plan, in which {lost.words}; train with layoutopt, "
            f"{under or lost.instead}, or choose another format"
        )
    if (refined := what.decided.places()) and not form.every_variable:
        path, rules = next(iter(refined.items()))
        raise UserError(
            f"{to} splits a dimension in the same way everywhere, but this plan splits {rules_in(rules)} in "
            f"{path!r}; remove these rules, or rename these dimensions in that part of the model"
        )
    return form.write(what)


def _dims(tensor: ExportedTensor) -> str:
    return f"  {comment(' '.join(tensor.dims))}" if tensor.dims else ""


def _mesh_tensorflow(what: Exported) -> str:
    _single(what.layout.items(), "mesh-tensorflow")
    rules = ";".join(f"{name}:{axes[0]}" for name, axes in what.layout.items())
    mesh, layout = (json.dumps(text, ensure_ascii=False) for text in (str(what.mesh), rules))
    lines = [f"mesh_shape = {mesh}", f"layout = {layout}"]
    more = _beside(what, "mtf.recompute_grad", "num_splits of mtf.serialize_training_step")
    return "\n".join([*lines, *more, ""])


def _beside(
    what: Exported, checkpoint: str, parts: str = "number of successive parts of the batch"
) -> list[str]:
    """What is decided beside the layout, as names of Python; nothing of what is plain.

    Args:
      checkpoint, parts: what of the library does so.
    """
    lines = []
    if loops := tuple(what.decided.recompute):
        lines.append(
            f"RECOMPUTE = {loops!r}  # {checkpoint}: loops whose bodies are recomputed in the backward pass"
        )
    if (n := what.decided.microbatches) > 1:
        lines.append(f"MICROBATCHES = {n}  # {parts}, whose gradients are added up")
    return lines


def _single(splits: Iterable[tuple[str, Axes]], to: str) -> None:
    for name, axes in splits:
        if len(axes) > 1:
            raise UserError(
                f"{to} splits a dimension over one mesh axis, but this plan splits {name!r} over "
                f"{'+'.join(axes)}; search with --storage layout or --max-axes 1, or choose another format"
            )


def _dtensor(what: Exported) -> str:
    for tensor in (*what.variables, *what.inputs):
        _single(zip(tensor.dims, tensor.splits, strict=True), "tf-dtensor")
    axes = ", ".join(f"({name!r}, {size})" for name, size in what.mesh.axes)
    lines = [
        comment(what.title),
        "",
        "from tensorflow.experimental import dtensor",
        "",
        f"MESH_AXES = [{axes}]",
        *_beside(what, "tf.recompute_grad"),
        "",
        "",
        "def layouts(mesh):",
        '    """Variables and inputs; make `mesh` with dtensor.create_mesh(MESH_AXES, devices=...)."""',
        "    return {",
    ]
    for tensor in (*what.variables, *what.inputs):
        specs = ", ".join(repr(axes[0]) if axes else "dtensor.UNSHARDED" for axes in tensor.splits)
        lines.append(f"        {tensor.name!r}: dtensor.Layout([{specs}], mesh),{_dims(tensor)}")
    return "\n".join([*lines, "    }", ""])


_SECTIONS = {"OPTIMIZER": "  # optimizer state of optax with a parameter's shape (mu and nu of adam)"}
"""What a line says of a section."""


def _jax(what: Exported) -> str:
    how = "# layoutopt.load_plan(FILE).of(model()).jax.train_step(None, optimizer) applies the whole plan."
    lines = [
        comment(what.title),
        *[how] * bool(what.arrays),
        "",
        "from jax.sharding import PartitionSpec as P",
        "",
        *_jax_mesh(what.mesh),
        *_beside(what, "jax.checkpoint, with a policy that saves the kept values"),
        "",
    ]
    for name, tensors in (what.arrays or {"VARIABLES": what.variables, "INPUTS": what.inputs}).items():
        lines.append(f"{name} = {{{_SECTIONS.get(name, '')}")
        for tensor in tensors:
            specs = ", ".join(_spec(axes) for axes in tensor.splits)
            lines.append(f"    {tensor.name!r}: P({specs}),{_dims(tensor)}")
        lines.append("}")
    return "\n".join([*lines, ""])


def _jax_mesh(mesh: Mesh) -> list[str]:
    return [
        f"MESH_SHAPE = {mesh.shape!r}",
        # Newer releases of JAX make explicit axes unless they are told, and constraints want automatic ones.
        f"MESH_AXES = {mesh.names!r}",
        f"# jax.make_mesh(MESH_SHAPE, MESH_AXES, (jax.sharding.AxisType.Auto,) * {len(mesh.names)})",
    ]


def _spec(axes: Axes) -> str:
    return "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes)


def _haliax(what: Exported) -> str:
    lines = [
        comment(what.title),
        "",
        *_jax_mesh(what.mesh),
        *_beside(what, "gradient_checkpointing of haliax.nn.Stacked"),
        "",
        "# with haliax.axis_mapping(AXIS_MAPPING): ...",
        "AXIS_MAPPING = {",
        *(f"    {name!r}: {_spec(axes)}," for name, axes in what.layout.items()),
    ]
    return "\n".join([*lines, "}", ""])


@dataclass(frozen=True)
class ExportForm:
    """A library's form.

    Attributes:
      says: what it can express; plans with other decisions are refused.
      every_variable: the form has the placement of each variable and its state.
      arrays: the library whose arrays it names, '' for those of the model.
      orders: the user makes the mesh, and orders its devices.
    """

    write: Callable[[Exported], str]
    says: Restriction
    every_variable: bool = False
    arrays: str = ""
    orders: bool = False


PLAIN: Mapping[str, tuple[bool, ...] | None] = {"recompute": (False, True), "microbatches": ANY}
"""Fields that every form expresses, in comments at least."""
TENSORS = Restriction("tf-dtensor", {**PLAIN, "storage": ANY, ELSEWHERE: ANY}, (Even(),))
FORMATS: Mapping[str, ExportForm] = {
    "mesh-tensorflow": ExportForm(_mesh_tensorflow, says("mesh-tensorflow"), orders=True),
    "tf-dtensor": ExportForm(_dtensor, TENSORS, every_variable=True, orders=True),
    "jax": ExportForm(_jax, says("jax"), every_variable=True, arrays="jax", orders=True),
    "haliax": ExportForm(_haliax, Restriction("haliax", PLAIN), orders=True),
    "maxtext": ExportForm(maxtext, says("maxtext")),
    "torchtitan": ExportForm(torchtitan, says("torchtitan")),
    "megatron": ExportForm(degrees.megatron, says("megatron")),
    "deepspeed": ExportForm(degrees.deepspeed, says("deepspeed")),
    "transformers": ExportForm(transformers, says("transformers"), arrays="torch"),
    "accelerate": ExportForm(
        accelerate,
        replace(
            says("transformers"),
            name="accelerate",
            says={**(says("transformers").says or {}), "context": ("gather", "zigzag")},
        ),
    ),
}
RENAMED = {"dtensor": "tf-dtensor"}
"""Other names of forms."""
