"""A plan as settings of MaxText: mesh sizes, logical axes, storage, recomputation and microbatches.

Names are those of its base.yml (github.com/AI-Hypercomputer/maxtext, src/MaxText/configs/base.yml).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from layoutopt.frameworks.maxtext import (
    MAXTEXT_ALIKE,
    MAXTEXT_AXES,
    MAXTEXT_BESIDE_EXPERTS,
    MAXTEXT_BETWEEN,
    MAXTEXT_DIMS,
    MAXTEXT_EXPERTS,
    MAXTEXT_HOST,
    MAXTEXT_REMAT,
    MAXTEXT_ROWS,
    MAXTEXT_STORED,
    MAXTEXT_WEIGHTS,
)
from layoutopt.plan.decided import ELSEWHERE
from layoutopt.plan.exported import NAMED, Exported, ExportedTensor, cannot, comment
from layoutopt.plan.units import some
from layoutopt.space.storage import by_stage
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.remat_policy import Recomputed
from mesh_tf_core.lower.storage import STAGES, read_stage

EXPERTS = MAXTEXT_DIMS["experts"]
TO, ONE_POLICY = "maxtext", "has one remat_policy for all layers, but this plan recomputes"


def _maxtext_stage(what: Exported) -> tuple[str, Axes]:
    """The stage of every matrix, and the axes that split it; '' if they are stored as the layout says.

    Raises:
      UserError: MaxText stores all matrices alike, and splits what it stores over the batch's axes alone.
    """
    if not what.decided.storage:
        return "", ()
    spare = {v.name: _spare(what, v) for v in what.variables if _is_matrix(v)}
    stages: dict[str, list[str]] = {}
    for said, its in by_stage(what.decided.storage).items():
        stages.setdefault(STAGES[read_stage(said).number], []).extend(its)
    if whole := [name for name, axes in spare.items() if axes and name not in what.decided.storage]:
        stages["layout"] = whole
    if len(stages) > 1:
        listed = " and ".join(f"{stage} for {some(names, NAMED)}" for stage, names in sorted(stages.items()))
        why = f"needs one storage (layout, zero1 or zero3) for all matrices, but this plan uses {listed}"
        raise cannot(TO, why)
    batch = what.layout.axes("batch")
    others = [{*axes} for dim, axes in what.layout.items() if MAXTEXT_ROWS.get(dim) not in (EXPERTS, ())]
    if any(axes & {*batch} not in (set(), {*batch}) for axes in others):
        batch = ()  # they become one axis
    experts = {*_experts(what)} & {*batch}
    stored = max(spare.values(), key=len, default=()) or batch
    if stages.keys() != {"zero3"} or not {*stored} <= {*batch}:
        stored = batch  # the rest of the batch is an axis of its own in hybrid sharding alone
    for name, axes in spare.items():
        if axes and {*axes} not in ({*stored}, {*stored} - experts):
            own = f"({'+'.join(batch) or 'none'}), but this plan stores {name} over {'+'.join(axes)}"
            raise cannot(TO, f"shards the storage of variables only over the batch's axes {own}")
    return next(iter(stages)), stored


def _experts(what: Exported) -> Axes:
    """The axes of the batch that split experts, too."""
    every = [axes for dim, axes in what.layout.items() if MAXTEXT_ROWS.get(dim) == EXPERTS]
    return tuple(a for axes in every[:1] for a in axes if a in what.layout.axes("batch"))


def _is_matrix(v: ExportedTensor) -> bool:
    rows = [MAXTEXT_ROWS[d] for d in v.dims if d in MAXTEXT_ROWS]
    return v.trained and len(rows) > 1 and MAXTEXT_DIMS["d_model"] in rows


def _spare(what: Exported, v: ExportedTensor) -> Axes:
    """The axes that storage splits a variable over, or could."""
    split = {a for d in v.dims for a in what.layout.axes(d)}
    over = read_stage(what.decided.storage.get(v.name, 0)).over or what.mesh.names
    return tuple(a for a, size in what.mesh.axes if size > 1 and a not in split and a in over)


def maxtext(what: Exported) -> str:
    """The settings as YAML, which MaxText takes in addition to its base.yml.

    Raises:
      UserError: MaxText has no setting for a decision.
    """
    stage, stored = _maxtext_stage(what)
    given = dict.fromkeys(stored, MAXTEXT_STORED[stage]) if stage else {}
    experts = _experts(what)
    names = _maxtext_axes(what.mesh, given | dict.fromkeys(experts, MAXTEXT_EXPERTS))
    logical: dict[str, list[str]] = {}
    for name, axes in what.layout.items():
        if name not in MAXTEXT_ROWS:
            raise UserError(
                f"maxtext has no logical axis for dimension {name!r}; {known_names(name, MAXTEXT_DIMS)}"
            )
        for each in MAXTEXT_ROWS[name]:
            if logical.setdefault(each, _renamed(axes, names)) != _renamed(axes, names):
                but = "but this plan splits the two dimensions differently"
                raise cannot(TO, f"has one logical axis {each!r} for {name!r} and another dimension, {but}")
    for name, extra in what.decided.refined.get(ELSEWHERE, {}).items():
        logical[MAXTEXT_BETWEEN] = _renamed((*what.layout.axes(name), *extra), names)
    for each in (*MAXTEXT_WEIGHTS, *MAXTEXT_BESIDE_EXPERTS) if stage == "zero3" or experts else ():
        over = [a for a in stored if each in MAXTEXT_WEIGHTS or a not in experts] if stage == "zero3" else []
        logical[each] = [*logical.get(each, ()), *_renamed(tuple(over), names)]
    rules = [json.dumps([each, axes]) for each, axes in logical.items()]
    more = [*_maxtext_policy(what), *([f"dtype: {what.dtype}"] if what.dtype else [])]
    more += ["shard_optimizer_over_data: True"] if stage == "zero1" else []
    more += _maxtext_offload(what)
    more += _maxtext_batch(what)
    sizes, between = dict.fromkeys(MAXTEXT_AXES, 1), dict.fromkeys(MAXTEXT_AXES, 1)
    for axis, size in what.mesh.axes:
        slices = what.slices.get(axis, 1)
        sizes[names[axis]] *= size // slices
        between[names[axis]] *= slices
    return "\n".join(
        [
            *what.heading(TO),
            *([f"hardware: {what.chips}"] if what.chips in ("gpu", "cpu") else []),
            *(f"ici_{axis}_parallelism: {size}" for axis, size in sizes.items()),
            *(f"dcn_{axis}_parallelism: {size}" for axis, size in between.items() if what.slices),
            *more,
            "logical_axis_rules: [",
            *(f"  {rule}," for rule in rules[:-1]),
            *(f"  {rule}" for rule in rules[-1:]),
            "]",
            "",
        ]
    )


def _maxtext_policy(what: Exported) -> list[str]:
    """The `remat_policy` of a plan; where nothing runs again, the one that saves the most, with a comment."""
    policies = {MAXTEXT_REMAT[Recomputed.parse(text).keep]: text for text in what.decided.recompute}
    if len(policies) > 1:
        raise cannot(TO, f"{ONE_POLICY} {', '.join(policies.values())}")
    again = {Recomputed.parse(text).dim for text in what.decided.recompute}
    if again and (left := [dim for dim in what.stacks if dim not in again]):
        raise cannot(TO, f"{ONE_POLICY} only {some(sorted(again), NAMED)}, not {some(left, NAMED)}")
    always = [] if policies else [comment("no remat_policy recomputes nothing in scanned layers")]
    return [*always, f"remat_policy: {next(iter(policies), MAXTEXT_REMAT['products', 'attention'])}"]


def _maxtext_offload(what: Exported) -> list[str]:
    """MaxText keeps all weights on the hosts, or none; so the optimizer's state."""
    said = []
    for kind, word in MAXTEXT_HOST.items():
        names = what.decided.offload.get(kind, [])
        if here := [v.name for v in what.variables if _is_matrix(v) and v.name not in names] if names else []:
            but = f"but this plan does not offload {some(here, NAMED)}"
            raise cannot(TO, f"applies {word} to all matrices or to none, {but}")
        said += [f"{word}: True"] if names else []
    return said


def _maxtext_batch(what: Exported) -> list[str]:
    """How MaxText counts the batch: examples of a device in one part, and their length."""
    parts, sizes = what.decided.microbatches, dict[str, int]()
    for tensor in what.inputs:
        sizes |= zip(tensor.dims, tensor.sizes, strict=False)
    lines = [f"gradient_accumulation_steps: {parts}"] if parts > 1 else []
    lines += [f"per_device_batch_size: {sizes['batch'] / what.mesh.devices:g}"] if "batch" in sizes else []
    return [*lines, f"max_target_length: {sizes['length']}"] if "length" in sizes else lines


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
                raise UserError(
                    f"maxtext has {len(MAXTEXT_AXES)} mesh axes, but the mesh {mesh} has more; search "
                    "with fewer axes"
                )
            names[axis] = free.pop(0)
    return names
