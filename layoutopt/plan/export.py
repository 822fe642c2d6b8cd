"""A plan in the form that other libraries take.

    mesh-tensorflow  mesh and layout strings (`mtf.convert_to_shape`, `mtf.convert_to_layout_rules`)
    dtensor          `tf.experimental.dtensor.Layout` per variable and input
    jax              `jax.sharding.PartitionSpec` per variable and input
    haliax           axis mapping (`haliax.axis_mapping`)
    maxtext          `logical_axis_rules` and mesh sizes of MaxText's base.yml

Python and YAML come as text that can be pasted or imported. A layout that a library cannot say is refused
with a reason, and so is storage (ZeRO) by forms that say nothing of single variables, and mixed storage by
MaxText. Left out are rules for single operations alone, where single variables are said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layoutopt.plan.decided import ELSEWHERE, Decided, rules_in
from layoutopt.plan.units import clean, some
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.kept import Recomputed
from mesh_tf_core.lower.storage import STAGES, read_stage

if TYPE_CHECKING:
    from mesh_tf_core.ir.program import Program


NAMED = 3
"""Names that a refusal has."""


@dataclass(frozen=True)
class Placed:
    """A variable or an input: its dimensions, the axes that each is split over, and their sizes."""

    name: str
    dims: tuple[str, ...]
    splits: tuple[Axes, ...]
    trained: bool = False
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Exported:
    """What is written: a layout, every tensor that lies between steps, and what else is decided.

    Attributes:
      arrays: of a model from JAX, by the name of a section: its arrays as the user's program has them.
    """

    title: str
    mesh: Mesh
    layout: Layout
    variables: tuple[Placed, ...]
    inputs: tuple[Placed, ...]
    decided: Decided = field(default_factory=Decided)
    arrays: Mapping[str, tuple[Placed, ...]] = field(default_factory=dict)


def placed(program: Program) -> tuple[tuple[Placed, ...], tuple[Placed, ...]]:
    """The variables and the inputs of a program."""
    stored = (
        (name, s.variable.shape, s.splits, s.variable.trainable) for name, s in program.variables.items()
    )
    feeds = ((name, program.values[i]) for name, i in program.feeds.items())
    variables = tuple(
        Placed(name, shape.names, splits, trained, shape.sizes) for name, shape, splits, trained in stored
    )
    return variables, tuple(Placed(name, v.shape.names, v.splits, False, v.shape.sizes) for name, v in feeds)


def export(what: Exported, to: str) -> str:
    """`what` in the form of the library `to`, one of `FORMATS`.

    Raises:
      UserError: an unknown library, or a layout that it cannot express.
    """
    if to not in FORMATS:
        raise UserError(f"--to {to!r}: no such form; {known_names(to, FORMATS)}")
    for dim, n in what.decided.pipeline.items():
        raise UserError(
            f"{to} has no pipelines as this plan's: {dim!r} is split into {n} stages that microbatches go "
            f"through; take a layout that does not split {dim!r}, or train it here"
        )
    if what.decided.storage and to in SAY_NO_TENSOR:
        stage, names = next(iter(what.decided.stages().items()))
        raise UserError(
            f"{to} says how dimensions are split, not how single variables are stored, but this plan stores "
            f"{some(names, NAMED)} at {stage}; search with --storage layout, or choose another form"
        )
    if rare := what.decided.diloco:
        raise UserError(
            f"{to} says how tensors lie, not that replicas along {rare.partition(':')[0]!r} train alone for "
            "some steps, as in this plan; train with layoutopt"
        )
    if context := what.decided.context:
        dim, form = next(iter(context.items()))
        raise UserError(
            f"{to} says how tensors lie, not that attention to {dim!r} is {form}, as in this plan; "
            "train with layoutopt, or search with --context gather"
        )
    refined = what.decided.places()
    if (further := what.decided.refined.get(ELSEWHERE)) and to in SAY_NO_TENSOR:
        raise UserError(
            f"{to} places a dimension alike wherever it appears, but this plan has {rules_in(further)} "
            "elsewhere, where these axes split nothing else; leave that out, or choose another form"
        )
    if refined and to not in SAY_EVERY_VARIABLE:
        path, rules = next(iter(refined.items()))
        raise UserError(
            f"{to} places a dimension alike wherever it appears, but in {path!r} this plan has "
            f"{rules_in(rules)} instead; search without --refine, or give these dimensions other "
            "names there in the model"
        )
    kept = next((text for text in what.decided.recompute if Recomputed.parse(text).keep), None)
    if kept is not None and to not in SAY_WHAT_IS_KEPT:
        raise UserError(
            f"{to} recomputes all of a block or nothing, but this plan recomputes {kept}; choose "
            "another form, or recompute all of it"
        )
    return FORMATS[to](what)


def _comment(text: str) -> str:
    """One line, whatever the names in it are."""
    return f"# {clean(' '.join(text.split()))}"


def _dims(tensor: Placed) -> str:
    return f"  {_comment(' '.join(tensor.dims))}" if tensor.dims else ""


def _mesh_tensorflow(what: Exported) -> str:
    _single(what.layout.items(), "mesh-tensorflow")
    rules = ";".join(f"{name}:{axes[0]}" for name, axes in what.layout.items())
    lines = [f"mesh_shape = {_quoted(str(what.mesh))}", f"layout = {_quoted(rules)}"]
    more = _beside(what, "mtf.recompute_grad", "num_splits of mtf.serialize_training_step")
    return "\n".join([*lines, *more, ""])


def _quoted(text: str) -> str:
    """A text as Python writes it, between double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _beside(what: Exported, checkpoint: str, parts: str = "parts of the batch in turn") -> list[str]:
    """What is decided beside the layout, as names of Python; nothing of what is plain.

    Args:
      checkpoint, parts: what of the library does so.
    """
    lines = []
    if loops := tuple(what.decided.recompute):
        lines.append(f"RECOMPUTE = {loops!r}  # {checkpoint}: the loops whose bodies run again in backward")
    if (n := what.decided.microbatches) > 1:
        lines.append(f"MICROBATCHES = {n}  # {parts}, whose gradients are added up")
    return lines


def _single(splits: Iterable[tuple[str, Axes]], to: str) -> None:
    for name, axes in splits:
        if len(axes) > 1:
            raise UserError(
                f"{to} splits a dimension over one mesh axis, but {name!r} is split over {'+'.join(axes)}; "
                "search with --storage layout or --max-axes 1, or choose another form"
            )


def _dtensor(what: Exported) -> str:
    for tensor in (*what.variables, *what.inputs):
        _single(zip(tensor.dims, tensor.splits, strict=True), "dtensor")
    axes = ", ".join(f"({name!r}, {size})" for name, size in what.mesh.axes)
    lines = [
        _comment(what.title),
        "",
        "from tensorflow.experimental import dtensor",
        "",
        f"MESH_AXES = [{axes}]",
        *_beside(what, "tf.recompute_grad"),
        "",
        "",
        "def layouts(mesh):",
        '    """Of variables and inputs; make `mesh` with dtensor.create_mesh(MESH_AXES, devices=...)."""',
        "    return {",
    ]
    for tensor in (*what.variables, *what.inputs):
        specs = ", ".join(repr(axes[0]) if axes else "dtensor.UNSHARDED" for axes in tensor.splits)
        lines.append(f"        {tensor.name!r}: dtensor.Layout([{specs}], mesh),{_dims(tensor)}")
    return "\n".join([*lines, "    }", ""])


_SECTIONS = {"OPTIMIZER": "  # what optax remembers of a parameter in its shape (mu and nu of adam)"}
"""What a line says of a section."""


def _jax(what: Exported) -> str:
    lines = [
        _comment(what.title),
        "",
        "from jax.sharding import PartitionSpec as P",
        "",
        *_jax_mesh(what.mesh),
        *_beside(what, "jax.checkpoint, with a policy that saves what they keep"),
        "",
    ]
    if what.arrays:
        lines[1:1] = [
            "# layoutopt.load_plan(FILE).of(model()).jax.train_step(None, optimizer) applies all of it."
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
        f"MESH_AXES = {mesh.names!r}  # jax.make_mesh(MESH_SHAPE, MESH_AXES)",
    ]


def _spec(axes: Axes) -> str:
    return "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes)


def _haliax(what: Exported) -> str:
    rules = [f"    {name!r}: {_spec(axes)}," for name, axes in what.layout.items()]
    return "\n".join(
        [
            _comment(what.title),
            "",
            *_jax_mesh(what.mesh),
            *_beside(what, "gradient_checkpointing of haliax.nn.Stacked"),
            "",
            "# with haliax.axis_mapping(AXIS_MAPPING): ...",
            "AXIS_MAPPING = {",
            *rules,
            "}",
            "",
        ]
    )


# Dimension -> the logical axes of MaxText that mean it, of activations and of weights
# (github.com/AI-Hypercomputer/maxtext, src/MaxText/configs/base.yml, `logical_axis_rules`).
MAXTEXT_DIMS: Mapping[str, Sequence[str]] = {
    "batch": (
        "activation_batch",
        "activation_batch_no_exp",
        "activation_embed_and_logits_batch",
        "activation_kv_batch",
        "activation_kv_batch_no_exp",
    ),
    "length": (
        "activation_length",
        "activation_length_no_exp",
        "activation_attn_length",
        "activation_attn_length_no_exp",
        "activation_norm_length",
        "activation_q_length",
        "activation_q_length_no_exp",
    ),
    "memory_length": ("activation_kv_length",),
    "d_model": ("embed", "embed_no_exp", "norm", "activation_embed"),
    "d_ff": ("mlp", "mlp_no_fsdp", "activation_mlp"),
    "heads": ("heads", "q_heads", "kv_heads", "activation_heads", "activation_kv_heads"),
    "d_kv": ("kv", "kv_head_dim", "activation_kv", "activation_kv_head_dim"),
    "vocab": ("vocab", "activation_vocab"),
    "experts": ("exp", "activation_exp"),
}
# MaxText's mesh axes are fixed names (`mesh_axes` of the same file); ours take the first one that is free.
MAXTEXT_AXES = (
    "data",
    "tensor",
    "fsdp",
    "tensor_transpose",
    "fsdp_transpose",
    "sequence",
    "context",
    "expert",
)
MAXTEXT_ALIKE = {"batch": "data", "model": "tensor", "experts": "expert"}


MAXTEXT_ROWS: Mapping[str, Sequence[str]] = {
    **{each: row for row in MAXTEXT_DIMS.values() for each in row},
    **MAXTEXT_DIMS,
}
"""The same, and MaxText's own names: what a model of its parameters calls its dimensions."""
MAXTEXT_WEIGHTS = ("embed", "embed_no_exp")
"""The logical axes that every matrix has and MaxText splits for FSDP; `d_model` of ours."""
MAXTEXT_BETWEEN = "activation_norm_length"
"""The length of what layers carry and norms work on."""
MAXTEXT_STORED = {"zero1": "data", "zero3": "fsdp"}
"""Stage -> the axis of MaxText that splits the batch, and at this stage the state too, or the weights too."""
MAXTEXT_REMAT: Mapping[tuple[str, ...], str] = {
    (): "full",
    ("products",): "minimal",
    ("products", "attention"): "minimal_with_context",
}
"""What a layer that runs again keeps -> the `remat_policy` that does so. (The last one saves the most.)"""


def _maxtext_stage(what: Exported) -> tuple[str, Axes]:
    """The stage of every matrix, and the axes that split it; '' if they are stored as the layout says.

    Raises:
      UserError: MaxText stores all matrices alike, and splits what it stores over the batch's axes alone.
    """
    if not what.decided.storage:
        return "", ()
    spare = {v.name: _spare(what, v) for v in what.variables if _is_matrix(v)}
    stages: dict[str, list[str]] = {}
    for said, its in what.decided.stages().items():
        stages.setdefault(STAGES[read_stage(said).number], []).extend(its)
    if whole := [name for name, axes in spare.items() if axes and name not in what.decided.storage]:
        stages["layout"] = whole
    if len(stages) > 1 or not stages.keys() <= MAXTEXT_STORED.keys():
        listed = "; ".join(f"{some(names, NAMED)} at {stage}" for stage, names in sorted(stages.items()))
        raise UserError(
            f"maxtext stores all matrices alike, at layout, zero1 or zero3, but this plan stores {listed}; "
            "search with --storage zero1, or zero3, or layout"
        )
    batch = what.layout.axes("batch")
    if any(set(axes) & {*batch} not in (set(), {*batch}) for _, axes in what.layout.items()):
        batch = ()  # they become one axis
    stored = next((axes for axes in spare.values() if axes), batch)
    if stages.keys() != {"zero3"} or not {*stored} <= {*batch}:
        stored = batch  # the rest of the batch is an axis of its own in hybrid sharding alone
    for name, axes in spare.items():
        if axes and {*axes} != {*stored}:
            raise UserError(
                f"maxtext splits what it stores over the batch's axes alone ({'+'.join(batch) or 'none'}), "
                f"but this plan stores {name} over {'+'.join(axes)}; search with --storage layout"
            )
    return next(iter(stages)), stored


def _is_matrix(v: Placed) -> bool:
    rows = [MAXTEXT_ROWS[d] for d in v.dims if d in MAXTEXT_ROWS]
    return v.trained and len(rows) > 1 and MAXTEXT_DIMS["d_model"] in rows


def _spare(what: Exported, v: Placed) -> Axes:
    """The axes that storage splits a variable over, or could."""
    split = {a for d in v.dims for a in what.layout.axes(d)}
    over = read_stage(what.decided.storage.get(v.name, 0)).over or what.mesh.names
    return tuple(a for a, size in what.mesh.axes if size > 1 and a not in split and a in over)


def _maxtext(what: Exported) -> str:
    stage, stored = _maxtext_stage(what)
    names = _maxtext_axes(what.mesh, dict.fromkeys(stored, MAXTEXT_STORED[stage]) if stage else {})
    logical: dict[str, list[str]] = {}
    for name, axes in what.layout.items():
        if name not in MAXTEXT_ROWS:
            raise UserError(
                f"maxtext has no logical axis for dimension {name!r}; {known_names(name, MAXTEXT_DIMS)}"
            )
        for each in MAXTEXT_ROWS[name]:
            if logical.setdefault(each, _renamed(axes, names)) != _renamed(axes, names):
                raise UserError(
                    f"maxtext has one logical axis {each!r} for {name!r} and another dimension, which this "
                    "plan splits otherwise; pin both alike, or choose another form"
                )
    for name, extra in what.decided.refined.get(ELSEWHERE, {}).items():
        if name != "length":
            raise UserError(
                f"maxtext has no logical axis for {name}:{'+'.join(extra)} elsewhere: what lies between its "
                "operations has one for length; leave that out, or choose another form"
            )
        logical[MAXTEXT_BETWEEN] = _renamed((*what.layout.axes(name), *extra), names)
    if stage == "zero3":
        for each in MAXTEXT_WEIGHTS:
            logical[each] = [*logical.get(each, ()), *_renamed(stored, names)]
    rules = [json.dumps([each, axes]) for each, axes in logical.items()]
    more = [f"remat_policy: {_maxtext_policy(what)}"]
    more += ["shard_optimizer_over_data: True"] if stage == "zero1" else []
    more += _maxtext_batch(what)
    sizes = dict.fromkeys(MAXTEXT_AXES, 1)
    for axis, size in what.mesh.axes:
        sizes[names[axis]] *= size
    return "\n".join(
        [
            _comment(what.title),
            *(f"ici_{axis}_parallelism: {size}" for axis, size in sizes.items()),
            *more,
            "logical_axis_rules: [",
            *(f"  {rule}," for rule in rules[:-1]),
            *(f"  {rule}" for rule in rules[-1:]),
            "]",
            "",
        ]
    )


def _maxtext_policy(what: Exported) -> str:
    """The `remat_policy` of a plan; where nothing runs again, the one that saves the most."""
    policies = {}
    for text in what.decided.recompute:
        kept = Recomputed.parse(text).keep
        if kept not in MAXTEXT_REMAT:
            known = ", ".join("+".join(keep) or "nothing" for keep in MAXTEXT_REMAT)
            raise UserError(
                f"maxtext has no remat_policy for {text}: its named ones keep {known}; choose "
                "another form, or recompute all of it"
            )
        policies[MAXTEXT_REMAT[kept]] = text
    if len(policies) > 1:
        raise UserError(
            f"maxtext has one remat_policy for all layers, but this plan recomputes "
            f"{', '.join(policies.values())}; search with --recompute always, or choose another form"
        )
    return next(iter(policies), MAXTEXT_REMAT["products", "attention"])


def _maxtext_batch(what: Exported) -> list[str]:
    """How MaxText counts the batch: examples of a device in one part."""
    parts, examples = what.decided.microbatches, 0
    lines = [f"gradient_accumulation_steps: {parts}"] if parts > 1 else []
    for tensor in what.inputs:
        examples = dict(zip(tensor.dims, tensor.sizes, strict=False)).get("batch", examples)
    return [*lines, f"per_device_batch_size: {examples / what.mesh.devices:g}"] if examples else lines


def _renamed(axes: Axes, names: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(names[a] for a in axes))


def _maxtext_axes(mesh: Mesh, given: Mapping[str, str]) -> dict[str, str]:
    """Mesh axis -> the axis of MaxText that stands for it: given, of the same name or meaning, or free."""
    alike = {a: MAXTEXT_ALIKE.get(a, a) for a in mesh.names if a not in given}
    alike = {a: name for a, name in alike.items() if name in {*MAXTEXT_AXES} - {*given.values()}}
    if len(set(alike.values())) < len(alike):
        alike = {}
    names = {**given, **alike}
    free = [axis for axis in MAXTEXT_AXES if axis not in names.values()]
    for axis in mesh.names:
        if axis not in names:
            if not free:
                raise UserError(f"maxtext has {len(MAXTEXT_AXES)} mesh axes, but the mesh {mesh} has more")
            names[axis] = free.pop(0)
    return names


SAY_EVERY_VARIABLE = ("dtensor", "jax")
"""Forms that say how each variable and its state lie, storage included."""
SAY_NO_TENSOR = ("mesh-tensorflow", "haliax")
"""Forms that say how dimensions are split, and nothing of single variables or inputs."""
SAY_WHAT_IS_KEPT = ("jax", "maxtext")
"""Forms in which a block that runs again may keep some of its values."""
FORMATS: Mapping[str, Callable[[Exported], str]] = {
    "mesh-tensorflow": _mesh_tensorflow,
    "dtensor": _dtensor,
    "jax": _jax,
    "haliax": _haliax,
    "maxtext": _maxtext,
}
