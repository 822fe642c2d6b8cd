"""`layoutopt export`: a plan's layout in another library's form, and its predicted step for trace viewers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from layoutopt.cli.grouped import grouped
from layoutopt.cli.options import OUTPUT, Output, check_out, path_option
from layoutopt.cli.plans import ModelOption, PlanArgument, say_damage, with_model
from layoutopt.cli.terminal import Terminal

if TYPE_CHECKING:
    from layoutopt.plan.build import Plan
    from layoutopt.plan.exported import ExportedTensor


# fmt: off
Library = Literal[
    "mesh-tensorflow", "tf-dtensor", "dtensor", "jax", "haliax", "maxtext", "torchtitan", "megatron",
    "deepspeed", "transformers", "accelerate", "perfetto",
]
"""The library whose form is written."""
# fmt: on


@grouped
def export(
    plan: PlanArgument,
    to: Annotated[
        Library | None,
        typer.Option(
            help="Output format: that of a library, or perfetto (the predicted step as a trace).",
            show_default="that of the plan's framework",
        ),
    ] = None,
    model: ModelOption = None,
    out: Annotated[Path | None, path_option("FILE", "Write to this file instead of stdout.")] = None,
    output: Output = OUTPUT,
) -> None:
    """Write a plan's layout for another library, or its predicted step as a trace."""
    from layoutopt.optimize.evaluation.evaluation import computed_in
    from layoutopt.plan.build import AppliesPlans, NamesModules, decided, load_plan
    from layoutopt.plan.decided import Decided
    from layoutopt.plan.export import FORMATS, RENAMED
    from layoutopt.plan.export import export as written
    from layoutopt.plan.exported import Exported, placed
    from layoutopt.plan.results import ExportResult
    from mesh_tf_core.files import write_file

    terminal = output.terminal
    check_out(out, read=[plan, model])
    own = load_plan(plan, say_damage)
    form_of: str = to or _own_form(own)
    if form_of == "perfetto":
        _write_step(terminal, own, plan, model, out)
        return
    check_stages(own)
    if new := RENAMED.get(form_of):
        terminal.say(
            f"{form_of} is {new}, that of TensorFlow's DTensor; for PyTorch, use torchtitan or transformers"
        )
        form_of = new
    tensors, stages = None if model is not None else recorded(own, form_of), own.data.pipeline
    arrays: Mapping[str, tuple[ExportedTensor, ...]] = {}
    form, dtype = FORMATS[form_of], own.data.details.dtype
    if tensors is None:
        found = with_model(own, plan, model).loaded.model
        stages = found.stages(own.mesh, own.layout)  # whatever the file says of them
        tensors = placed(found.lower(own.mesh, own.layout, own.options))
        front, dtype = form.arrays, computed_in(found)
        if front == "torch" and isinstance(found, NamesModules):
            arrays = found.modules(own)
        elif front and isinstance(found, AppliesPlans) and found.front_end == front:
            arrays = found.arrays(own)
    title = f"Layout of {own.data.model.name} on {own.mesh}, searched by layoutopt for {own.data.hardware}."
    beside = decided(own.options, own.layout, stages)
    config = (own.data.details.source or "").endswith(".json")
    what = Exported(
        title,
        own.mesh,
        own.layout,
        *tensors,
        beside,
        arrays,
        own.slices,
        own.data.framework or "",
        dtype,
        _chips(own.data.hardware),
        own.data.model.name if config else "",
    )
    text = written(what, form_of)
    more: dict[str, Any] = {}
    unsaid = beside.refined if form.every_variable else {}  # others say it, or refuse it
    if unsaid:
        more["not_said"] = Decided(refined=unsaid).model_dump(exclude_defaults=True)
    slices = own.slices if form.orders else {}
    if slices:
        more["slices"] = slices
    with terminal.saved(out, lambda path: write_file(path, text, "--out"), "the layout") as is_saved:
        terminal.result(ExportResult(to=form_of, mesh=own.mesh.as_dict(), text=text, **more))
        if not is_saved and not output.as_json:
            sys.stdout.write(text)
    if unsaid:
        words = Decided(refined=unsaid).listed()
        terminal.say(f"not expressed in this format: {'; '.join(filter(None, words.values()))}")
    for axis, number in slices.items():
        terminal.say(
            f"not expressed in this format: axis {axis} spans {number} slices or nodes; order the devices of "
            "the mesh accordingly"
        )


def _chips(hardware: str) -> str:
    """The kind of a plan's chips; "" if the file that describes them is not there."""
    from costmodels.hardware import load_hardware
    from mesh_tf_core.errors import UserError

    try:
        return load_hardware(hardware).kind
    except UserError:
        return ""


def _own_form(plan: Plan) -> str:
    from costmodels.frameworks import DEFAULT, load_framework
    from mesh_tf_core.errors import UserError

    name = load_framework(plan.data.framework or DEFAULT).says
    if name not in get_args(Library):
        known = ", ".join(get_args(Library))
        code = "; in Python, plan.torch applies it to your module" * name.startswith("torch")
        raise UserError(
            f"the plan's framework {name} has no format of its own; add --to with one of {known}{code}"
        )
    return name


def _write_step(terminal: Terminal, plan: Plan, path: Path, model: str | None, out: Path | None) -> None:
    """Writes the predicted step, packed if that is what the file is called."""
    from layoutopt.analysis.perfetto import predicted, written
    from layoutopt.optimize.evaluation.evaluator import evaluate
    from layoutopt.plan.results import ExportResult
    from mesh_tf_core.files import write_file

    planned = with_model(plan, path, model)
    found = evaluate(planned.loaded.model, plan.mesh, plan.layout, planned.hardware, plan.options)
    events = predicted(found)

    def save(place: Path) -> None:
        write_file(place, written(events, place.suffix == ".gz"), "--out")

    with terminal.saved(out, save, "the step") as is_saved:
        text = written(events).decode()
        terminal.result(ExportResult(to="perfetto", mesh=plan.mesh.as_dict(), text=text))
        if not is_saved and not terminal.as_json:
            sys.stdout.write(text)


def check_stages(plan: Plan) -> None:
    """Raises UserError if the stages in a plan file differ from those of its layout."""
    from mesh_tf_core.errors import UserError

    for dim, number in plan.data.pipeline.items():
        axes = plan.layout.axes(dim)
        if plan.mesh.group_size(axes) != number:
            raise UserError(
                f"the plan has {number} pipeline stages of {dim!r}, but its layout splits {dim!r} "
                f"over {'+'.join(axes) or 'no axis'} of {plan.mesh}; search again"
            )


def recorded(plan: Plan, to: str) -> tuple[tuple[ExportedTensor, ...], tuple[ExportedTensor, ...]] | None:
    """The variables and the inputs that a form needs, from the plan; None if the plan lacks them."""
    from layoutopt.plan.export import FORMATS
    from layoutopt.plan.exported import ExportedTensor
    from mesh_tf_core.errors import UserError

    if not FORMATS[to].says.expresses("storage", None):
        return (), ()
    details = plan.data.details
    told = any("stacked" in v.model_fields_set for v in details.variables)  # later than the other fields
    if not told or "inputs" not in details.model_fields_set or (details.applies and FORMATS[to].arrays):
        return None
    for tensor in (*details.variables, *details.inputs):
        for axis in (a for axes in tensor.splits for a in axes):
            if axis not in plan.mesh.names:
                raise UserError(
                    f"the plan splits {tensor.name!r} over axis {axis!r}, which is not an axis of its "
                    f"mesh {plan.mesh}; name the plan's model with --model MODEL, or search again"
                )
    found = [
        tuple(
            ExportedTensor(
                t.name,
                tuple(d for d, _ in t.shape),
                t.splits,
                tuple(n for _, n in t.shape),
                t.kind == "parameter",
                stacked=t.stacked,
            )
            for t in tensors
        )
        for tensors in (details.variables, details.inputs)
    ]
    return found[0], found[1]
