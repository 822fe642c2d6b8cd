"""Options that commands share, and how their texts become values."""

from __future__ import annotations

import contextlib
import io
import math
import os
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from layoutopt.cli.units import parse_bytes, parse_seconds
from layoutopt.runtime import clock as clocks
from layoutopt.runtime.clock import Clock

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.cli.terminal import Terminal
    from mesh_tf_core import Mesh, Model

THIS_MACHINE = "cpu-local"
LONGEST = 1e7
"""Seconds that anything waits: some months."""
LOADED = 1.0
"""Seconds after the time limit in which what a command is about is loaded."""


def complete_framework(incomplete: str) -> list[str]:
    """Names of frameworks that begin so."""
    from costmodels.frameworks import framework_names

    return [name for name in framework_names() if name.startswith(incomplete)]


def complete_hardware(incomplete: str) -> list[str]:
    """Presets, for the shell's completion."""
    from costmodels.hardware import hardware_names

    return [name for name in hardware_names() if name.startswith(incomplete)]


def complete_setting(context: typer.Context, incomplete: str) -> list[str]:
    """Hyperparameters of the MODEL on the command line as `name=`, the values of those that are on or off;
    nothing where there is no model, or none that can be read."""
    name, equals, value = incomplete.partition("=")
    source = context.params.get("model")
    if not source:
        return []
    # What a model file prints, or is wrong with it, has no place on a line that is being typed.
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        from layoutopt.models.loading import hyperparameters

        known = hyperparameters(source)
        if not equals:
            return [f"{each}=" for each in known if each.startswith(name)]
        if name in known and known[name].kind == "bool":
            return [f"{name}={each}" for each in ("true", "false") if each.startswith(value)]
    return []


def hardware_option(
    help: str = "Hardware to predict for, by name or file (see `layoutopt hardware`).", **told: Any
) -> Any:
    """The option `--hardware`; `told`: how its default is shown."""
    return typer.Option(
        "--hardware", metavar="NAME_OR_FILE", help=help, autocompletion=complete_hardware, **told
    )


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model: FILE.py, FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION, or a Hugging Face CONFIG.json.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set a hyperparameter of the model, e.g. batch=128 (repeatable).",
        autocompletion=complete_setting,
    ),
]
MeshOption = Annotated[
    str | None,
    typer.Option("--mesh", metavar="MESH", help='Device mesh: axes and their sizes, e.g. "data:2;model:4".'),
]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        "--devices",
        metavar="N",
        help="Number of devices; the search also chooses the shape of the mesh (instead of --mesh).",
    ),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="LAYOUT",
        help='Layout as DIMENSION:AXIS rules, e.g. "batch:data;heads:model", or a PLAN.json.',
        show_default="nothing is split",
    ),
]
HardwareOption = Annotated[str, hardware_option()]
RunsOnOption = Annotated[
    str | None,
    hardware_option(
        show_default="the plan's hardware if this run uses it, else the preset of this machine's "
        f"accelerators, else {THIS_MACHINE}"
    ),
]
HardwaresOption = Annotated[
    list[str] | None,
    hardware_option(
        "Hardware to compare, by name or file (see `layoutopt hardware`; repeatable).",
        show_default=THIS_MACHINE,
    ),
]
SetHardwareOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set-hardware",
        metavar="NAME=VALUE",
        help="Override a number of the hardware, e.g. node_egress=100GB/s (repeatable).",
    ),
]
FrameworkOption = Annotated[
    str | None,
    typer.Option(
        "--framework",
        metavar="NAME_OR_FILE",
        help="Training software to predict for, NAME[@VERSION][:variant=option,…], or a file (see "
        "`layoutopt frameworks`).",
        autocompletion=complete_framework,
        show_default="the model's own: jax for a JAX program, torch for a PyTorch module, else layoutopt",
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="AMOUNT",
        help="Memory limit of a device, e.g. 16GiB.",
        show_default="the hardware's",
    ),
]


def time_option(name: str, help: str, least: float = 0.0, most: float = math.inf, **told: Any) -> Any:
    """An option that takes seconds, or a time with its unit."""

    def seconds(text: str | float) -> float:
        from mesh_tf_core.errors import UserError

        try:
            found = parse_seconds(str(text), name, "s")
        except UserError as error:
            raise typer.BadParameter(str(error).removeprefix(f"{name} ")) from None
        if not least <= found <= most:
            bound = f"at least {least:g}" if found < least else f"at most {most:,.0f}"
            raise typer.BadParameter(f"must be {bound} seconds, found {text!r}")
        return found

    return typer.Option(name, metavar="TIME", parser=seconds, help=help, **told)


TimeLimitOption = Annotated[
    float | None,
    time_option(
        "--time-limit",
        "Stop after this time, in seconds or e.g. 5min, and return the best result so far.",
        show_default="none",
    ),
]


def time_limited(seconds: float | None) -> Clock:
    """The clock of `--time-limit`, which began with the command."""
    return Clock(seconds, clocks.began)


OptionInput = TypeVar("OptionInput")


def in_time(clock: Clock, what: str, load: Callable[[], OptionInput], doing: str = "loading") -> OptionInput:
    """The result of `load`; LimitError if the time limit passes first."""
    from mesh_tf_core.errors import LimitError

    found: list[OptionInput] = []
    if not clock.within(LOADED, lambda: found.append(load())):
        raise LimitError(
            f"{what}: the time limit of {clock.limit:g} s, which counts from the start of the command, "
            f"passed while {doing}; raise it, e.g. --time-limit {10 * (clock.limit or 0.0):g}"
        )
    return found[0]


EngineName = Literal["auto", "local", "jax", "lockstep"]
"""The engines that run steps."""
EngineOption = Annotated[
    EngineName,
    typer.Option(
        "--engine",
        help="Engine that runs the steps: local (TensorFlow on the CPU), jax (JAX on TPUs, GPUs or the "
        "CPU), lockstep (NumPy, for tests), or auto (jax if there is an accelerator, else local).",
    ),
]


def _path(text: str | Path) -> Path:
    """A name for what is written: an empty one would be that of the current folder, and control characters
    overwrite what a terminal shows."""
    if not str(text):
        raise typer.BadParameter("the path is empty; write a path")
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


JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
LinesOption = Annotated[
    bool,
    typer.Option(
        "--lines", help="Also list every instruction, with the formula and numbers of its predicted time."
    ),
]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print only results and errors, without progress and other messages."),
]


@dataclass(frozen=True)
class Output:
    """The way in which a command prints."""

    as_json: JsonOption = False
    quiet: QuietOption = False

    @property
    def terminal(self) -> Terminal:
        """The streams of the command."""
        from layoutopt.cli.terminal import Terminal

        return Terminal(self.as_json, self.quiet)


OUTPUT = Output()


def read_hardware(
    name: str, settings: Sequence[str] | None = None, framework: str | None = None, model: Model | None = None
) -> Hardware:
    """Hardware by name or file under a framework, the model's own if none is named, with numbers set."""
    from costmodels.frameworks import DEFAULT
    from costmodels.hardware import machine_of, with_settings

    own = DEFAULT if model is None else model.framework
    return machine_of(with_settings(name, settings or ()), framework, own)


@dataclass(frozen=True)
class OnHardware:
    """The hardware and the software that a command predicts for."""

    hardware: HardwareOption = THIS_MACHINE
    set_hardware: SetHardwareOption = None
    framework: FrameworkOption = None

    def read(self, model: Model | None = None) -> Hardware:
        """The hardware, under the model's own framework if none is named."""
        return read_hardware(self.hardware, self.set_hardware, self.framework, model)


ON = OnHardware()


def read_memory(text: str | None, hardware: Hardware) -> int:
    """Bytes that a program may use on one device."""
    return int(hardware.usable_memory_bytes) if text is None else parse_bytes(text)


def read_mesh(text: str | None) -> Mesh:
    """The mesh of `--mesh`, which must be there."""
    from mesh_tf_core import Mesh, UserError

    if text is None:
        raise UserError(
            '--mesh is missing; write the axes and their sizes, for example --mesh "data:2;model:4"'
        )
    mesh = Mesh(text)
    if not mesh.axes:
        raise UserError('--mesh is empty; give its axes, e.g. --mesh "data:2;model:4"')
    return mesh


def check_out(path: Path | None, option: str = "--out", read: Iterable[str | Path | None] = ()) -> None:
    """Raises UserError unless `path` can be written, before any work is done for it.

    Args:
      read: files that the command reads, or writes otherwise; it does not write over them.
    """
    from layoutopt.models.recorded import file_and_function
    from mesh_tf_core import UserError
    from mesh_tf_core.files import check_writable

    if path is None:
        return
    check_writable(path, option)
    for source in read:
        named = file_and_function(str(source))
        file = named[0] if named else Path(str(source))
        if source is not None and os.path.realpath(file) == os.path.realpath(path):
            raise UserError(
                f"{option} {str(path)!r} would overwrite a file that this command reads or writes; name "
                "another file"
            )
