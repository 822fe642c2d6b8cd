"""Options that commands share, and how their texts become values."""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from layoutopt import clock as clocks
from layoutopt.cli.units import parse_bytes
from layoutopt.clock import Clock

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.evaluator import Evaluation
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.build import Plan
    from mesh_tf_core import Layout, Mesh, Options

THIS_MACHINE = "cpu-local"
LONGEST = 1e7
"""Seconds that anything waits: some months."""
LOADED = 1.0
"""Seconds after the time limit in which what a command is about is loaded."""


def complete_hardware(incomplete: str) -> list[str]:
    """Presets, for the shell's completion."""
    from costmodels.hardware import hardware_names

    return [name for name in hardware_names() if name.startswith(incomplete)]


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="FILE.py, FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION, or a Hugging Face CONFIG.json.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Change a hyperparameter (again for more).", show_default=False
    ),
]
MeshOption = Annotated[
    str | None,
    typer.Option("--mesh", metavar="MESH", help='Axes and sizes, as "data:2;model:4".', show_default=False),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="LAYOUT",
        help='Which dimension is split over which axes, as "batch:data;heads:model", or a PLAN.json.',
        show_default="nothing is split",
    ),
]
HardwareOption = Annotated[
    str,
    typer.Option(
        "--hardware",
        metavar="NAME_OR_FILE",
        help="See `layoutopt hardware`.",
        autocompletion=complete_hardware,
    ),
]
HardwaresOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hardware",
        metavar="NAME_OR_FILE",
        help="See `layoutopt hardware` (again for more).",
        autocompletion=complete_hardware,
        show_default=THIS_MACHINE,
    ),
]
SetHardwareOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set-hardware",
        metavar="NAME=VALUE",
        help="Another number in it, as node_egress=100GB/s (again for more).",
        show_default=False,
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="AMOUNT", help="Memory of a device, as 16GiB.", show_default="the hardware's"
    ),
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage",
        metavar="[VARIABLE=]STAGE",
        help="How variables are stored: layout, zero1, zero2, zero3, or over some axes as zero3@data "
        "(again for more).",
        show_default="as the layout says",
    ),
]
RecomputeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--recompute",
        metavar="DIM[:keep=KIND+...]",
        help="Recompute the loop over DIM in backward, but for what to keep: products, outputs, attention, "
        "others, or names of weights and scopes.",
        show_default="none; of JAX, what the program does",
    ),
]
ContextOption = Annotated[
    list[str] | None,
    typer.Option(
        "--context",
        metavar="[DIM=]FORM",
        help="Attention to keys that lie split along DIM: ring, zigzag or all_to_all (again for more).",
        show_default="they are gathered",
    ),
]
DilocoOption = Annotated[
    str | None,
    typer.Option(
        "--diloco",
        metavar="AXIS[:period=30,...]",
        help="Replicas along this axis train alone for a period of steps, each on batches of its own, and "
        "then meet (rate=0.7, momentum=0.9: of the outer step).",
        show_default="all devices meet in every step",
    ),
]
OffloadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--offload",
        metavar="KIND[=NAME]",
        help="What lies in host memory between its uses: optimizer, its state; activations, what loops that "
        "run again keep (again for more).",
        show_default="nothing",
    ),
]
MicrobatchesOption = Annotated[
    int, typer.Option("--microbatches", min=1, metavar="N", help="Parts of the batch, one after the other.")
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        "--time-limit", metavar="SECONDS", help="Stop there with the best so far.", show_default="none"
    ),
]


def time_limited(seconds: float | None) -> Clock:
    """The clock of `--time-limit`, which began with the command."""
    from mesh_tf_core.errors import UserError

    if seconds is not None and not 0 < seconds < math.inf:
        raise UserError(f"--time-limit {seconds!r}: needs a positive number of seconds")
    return Clock(seconds, clocks.began)


Input = TypeVar("Input")


def in_time(clock: Clock, what: str, load: Callable[[], Input]) -> Input:
    """What `load` gives; LimitError if the time is over before."""
    from mesh_tf_core.errors import LimitError

    found: list[Input] = []
    if not clock.within(LOADED, lambda: found.append(load())):
        raise LimitError(
            f"{what}: the time was over before it was loaded; give more than --time-limit {clock.limit:g}"
        )
    return found[0]


class EngineName(StrEnum):
    """What runs the steps."""

    auto = "auto"
    local = "local"
    jax = "jax"
    lockstep = "lockstep"


EngineOption = Annotated[
    EngineName,
    typer.Option(
        "--engine",
        help="What runs the steps: local is TensorFlow on the CPU, jax JAX on TPUs or GPUs if it finds any, "
        "or the CPU, lockstep NumPy, for tests; auto is jax where there is an accelerator, else local.",
    ),
]


def _path(text: str | Path) -> Path:
    """A name for what is written: an empty one would be that of the current folder, and control characters
    overwrite what a terminal shows."""
    if not str(text):
        raise typer.BadParameter("it names nothing; give a path")
    if any(unicodedata.category(character) == "Cc" for character in str(text)):
        raise typer.BadParameter(f"{str(text)!r} has control characters; choose another name")
    return Path(text)


def path_option(metavar: str, help: str, *names: str, show_default: bool | str = False) -> Any:
    """An option that names what is written."""
    return typer.Option(*names, metavar=metavar, help=help, parser=_path, show_default=show_default)


def path_argument(metavar: str, help: str) -> Any:
    """The same as an argument."""
    return typer.Argument(metavar=metavar, help=help, parser=_path)


def checkpoint_option(help: str) -> Any:
    """`--checkpoint DIR`."""
    return path_option("DIR", help, "--checkpoint")


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
LinesOption = Annotated[
    bool, typer.Option("--lines", help="Also every priced instruction: its formula and the numbers in it.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no messages.")]


def examples(*lines: str) -> str:
    """The end of a command's help: commands that work."""
    return "\n\n".join(["Examples:" if len(lines) > 1 else "Example:", *lines])


def read_hardware(name: str, settings: Sequence[str] | None = None) -> Hardware:
    """Hardware by name or file, with numbers set; a profile calibrated on this machine stands for its
    preset."""
    from costmodels.hardware import load_hardware, with_settings
    from costmodels.hardware.profiles import profiles_directory

    return load_hardware(with_settings(name, settings or ()), profiles=profiles_directory())


def read_memory(text: str | None, hardware: Hardware) -> int:
    """Bytes that a program may use on one device."""
    return int(hardware.usable_memory_bytes) if text is None else parse_bytes(text)


def read_mesh(text: str | None) -> Mesh:
    """The mesh of `--mesh`, which must be there."""
    from mesh_tf_core import Mesh, UserError

    if text is None:
        raise UserError(
            '--mesh is missing: which devices, in which axes? write for example --mesh "data:2;model:4"'
        )
    mesh = Mesh(text)
    if not mesh.axes:
        raise UserError(f'--mesh {text!r} names no axis; write for example --mesh "data:2;model:4"')
    return mesh


def check_out(path: Path | None, option: str = "--out") -> None:
    """Raises UserError unless `path` can be written, before any work is done for it."""
    from mesh_tf_core.files import check_writable

    if path is not None:
        check_writable(path, option)


def is_plan(layout: str | None) -> bool:
    """Whether `--layout` names a plan file."""
    return layout is not None and (layout.endswith(".json") or os.path.isfile(layout))


@dataclass(frozen=True)
class Given:
    """What `--mesh` and `--layout` say; `plan` if the layout is a plan file's."""

    mesh: Mesh
    layout: Layout
    options: Options
    plan: Plan | None = None

    def priced(self, loaded: Loaded, machine: Hardware) -> Evaluation:
        """The model lowered so, and what it costs."""
        from layoutopt.evaluator import evaluate

        return evaluate(loaded.model, self.mesh, self.layout, machine, self.options)


def read_asked(
    model: str,
    settings: Sequence[str] | None,
    mesh: str | None,
    layout: str | None,
    storage: Sequence[str] | None = None,
    recompute: Sequence[str] | None = None,
    microbatches: int = 1,
    context: Sequence[str] | None = None,
    diloco: str | None = None,
    offload: Sequence[str] | None = None,
) -> tuple[Loaded, Given]:
    """The model of a file, and what is decided about it."""
    from layoutopt.models.loading import load_model

    loaded = load_model(model, settings or ())
    return loaded, read_layout(
        loaded, mesh, layout, storage, recompute, microbatches, context, diloco, offload
    )


def read_layout(
    loaded: Loaded,
    mesh: str | None,
    layout: str | None,
    storage: Sequence[str] | None = None,
    recompute: Sequence[str] | None = None,
    microbatches: int = 1,
    context: Sequence[str] | None = None,
    diloco: str | None = None,
    offload: Sequence[str] | None = None,
    plan: Plan | None = None,
) -> Given:
    """The mesh, the layout and what else is decided, all of which a plan file gives.

    Args:
      plan: what lies in the plan file, if that was read already.

    Raises:
      UserError: no mesh, a malformed mesh or layout, a plan of another model or mesh.
    """
    from mesh_tf_core import Layout

    said = storage or (), recompute, microbatches, context or (), diloco, offload or ()
    options = read_options(loaded, *said)
    if layout is None or not is_plan(layout):
        return Given(read_mesh(mesh), Layout(layout or ""), options)
    plan = read_plan(loaded, layout, plan)
    if storage or recompute or microbatches > 1 or context or diloco or offload:
        from mesh_tf_core import UserError

        raise UserError(
            f"{layout} says how variables are stored, what is recomputed, how many microbatches there are, "
            "how attention reaches its keys, which axis synchronises rarely and what lies on the hosts; "
            "leave these options out"
        )
    if mesh is not None and read_mesh(mesh) != plan.mesh:
        from mesh_tf_core import UserError

        raise UserError(
            f"--mesh {mesh!r} is not the mesh of {layout}, which is {plan.mesh}; leave --mesh out"
        )
    return Given(plan.mesh, plan.layout, plan.options, plan)


def read_options(
    loaded: Loaded,
    storage: Sequence[str],
    recompute: Sequence[str] | None,
    microbatches: int,
    context: Sequence[str] = (),
    diloco: str | None = None,
    offload: Sequence[str] = (),
) -> Options:
    """What is decided beside the layout; a stage without a variable is for all trained ones, and so is what
    lies on the hosts, a form of attention without a dimension for all keys.

    Where nothing is said of recomputation, it is what a JAX program says itself (jax.checkpoint).
    """
    from mesh_tf_core import DiLoCo, Options, UserError
    from mesh_tf_core.errors import known_names
    from mesh_tf_core.lower.nodes import check_context, crossed
    from mesh_tf_core.lower.offload import check_offload, offload_of
    from mesh_tf_core.lower.storage import Stage, read_stage

    graph = loaded.model.graph
    trained = {name: v for name, v in graph.variables.items() if v.trainable and len(v.shape)}
    stages: dict[str, int | Stage] = {}
    for text in storage:
        variable, _, stage = text.rpartition("=")
        if variable and variable not in trained:
            raise UserError(f"--storage {text}: no variable {variable!r}; {known_names(variable, trained)}")
        for name in [variable] if variable else trained:
            stages[name] = read_stage(stage).short
    if not recompute:
        recompute = sorted(getattr(getattr(loaded.model, "origin", None), "recomputed", ()))
    forms: dict[str, str] = {}
    for text in context:
        dim, _, form = text.rpartition("=")
        if not dim and not crossed(graph):
            raise UserError(f"--context {text}: the model has no fused attention; leave it out")
        forms.update(dict.fromkeys([dim] if dim else crossed(graph), form))
    check_context(graph, forms)
    rare = None if diloco is None else DiLoCo.parse(diloco)
    hosted = offload_of(offload, graph.variables, recompute)
    if hosted:
        check_offload(hosted, loaded.model.step_graph.variables, recompute)
    return Options(stages, frozenset(recompute), microbatches, frozenset(forms.items()), rare, hosted)


def say_damage(text: str) -> None:
    """A warning on stderr: of what is wrong with a plan that can be used all the same."""
    typer.echo(f"warning: {text}", err=True)


def read_plan(loaded: Loaded, path: str, plan: Plan | None = None) -> Plan:
    """A plan file that was made for this model."""
    from layoutopt.plan.build import check_plan_model, load_plan
    from mesh_tf_core import UserError

    plan = load_plan(path, say_damage) if plan is None else plan
    try:
        check_plan_model(plan, loaded.model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return plan
