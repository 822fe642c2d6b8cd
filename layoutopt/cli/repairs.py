"""What `search` says where nothing fits: what would help, with its price and its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layoutopt.cli.again import Changed, command_line
from layoutopt.cli.terminal import Terminal, table
from layoutopt.plan.units import seconds_text, share_text, used_text

if TYPE_CHECKING:
    import typer

    from layoutopt.analysis.infeasible import Diagnosis, Smaller
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.details import Repair
    from mesh_tf_core.errors import InfeasibleError
    from mesh_tf_core.model import Model


def repairs_of(found: Diagnosis, asked: Mapping[str, Any], context: typer.Context) -> tuple[Repair, ...]:
    """The repairs as plans list them.

    Args:
      asked: the arguments of the search that found nothing.
      context: of the command that was typed.
    """
    from layoutopt.plan.build import axes_of
    from layoutopt.plan.details import Repair
    from layoutopt.plan.units import layout_text

    before = _options(asked)
    made = []
    for each in found.repairs:
        now, data = _options(each.asked), each.plan.data
        changed: dict[str, Changed] = {o: value for o, value in now.items() if value != before[o]}
        if each.change.startswith("--set "):
            changed["--set"] = settings_with(context.params.get("settings") or (), each.change)
        if "--hardware" in changed:
            changed["--set-hardware"] = None  # numbers of another machine
        made.append(
            Repair(
                change=each.change,
                command=command_line(context, changed),
                note=each.note,
                hardware=data.hardware,
                mesh=data.mesh,
                layout=layout_text(axes_of(each.plan.layout)),
                decided=data.in_short(),
                step_seconds=each.seconds,
                peak_memory_bytes=each.peak,
                memory_bytes=each.limit,
                mfu=each.plan.predicted.mfu,
                proven=each.proven,
            )
        )
    return tuple(made)


def smaller_batch(loaded: Loaded) -> Smaller | None:
    """The models of a file with less in a batch; None where no hyperparameter is the batch's size."""
    from layoutopt.models.loading import load_model

    name = loaded.model.batch_dim
    sizes = loaded.model.graph.dims().get(name, set()) if name is not None else set()
    if len(sizes) != 1 or loaded.hparams.get(str(name)) not in sizes:
        return None
    (size,) = sizes

    def made(parts: int) -> tuple[str, Model] | None:
        if size % parts or size == parts:
            return None
        hparams = {**loaded.hparams, str(name): size // parts}
        return f"--set {name}={size // parts}", load_model(loaded.source, hparams).model

    return made


def settings_with(given: Sequence[str], change: str) -> tuple[str, ...]:
    """`--set`'s values, with one of them otherwise."""
    new = change.removeprefix("--set ")
    name = new.partition("=")[0]
    return (*(text for text in given if text.partition("=")[0].strip() != name), new)


def show_repairs(terminal: Terminal, repairs: Sequence[Repair]) -> None:
    """What would help, the fastest first, then the commands, each on a line of its own."""
    if not repairs:
        return
    rows = [
        [
            f"{each.change} ({each.note})" if each.note else each.change,
            seconds_text(each.step_seconds),
            "" if each.mfu is None else share_text(each.mfu, 1),
            used_text(each.peak_memory_bytes, each.memory_bytes),
        ]
        for each in repairs
    ]
    terminal.show(table("What would help", ["change", "step", "MFU", "memory"], rows, (1, 2, 3)), "")
    terminal.show_whole(*(each.command for each in repairs))


def refusal(
    error: InfeasibleError, found: Diagnosis, repairs: Sequence[Repair], as_json: bool
) -> InfeasibleError:
    """The error of a search that found nothing, with its conflict; repairs are in it for programs."""
    from mesh_tf_core.errors import InfeasibleError

    said = InfeasibleError("; ".join(filter(None, (str(error), str(found) if as_json else found.why))))
    space = None if error.nearest is None else error.nearest.data.space
    said.more = {} if space is None else {"space": space.model_dump(mode="json")}
    said.more |= {"conflict": list(found.conflict), "repairs": [each.to_json() for each in repairs]}
    return said


def _options(asked: Mapping[str, Any]) -> dict[str, str | None]:
    """Options of `search` as these arguments say them; None where an option is left out."""
    from layoutopt.space.kind import STORED
    from layoutopt.space.microbatches import USUAL
    from layoutopt.space.splits import parse_forbid, parse_rules

    mesh, devices, machine = asked.get("mesh"), asked.get("devices"), asked.get("hardware")
    memory = asked.get("memory")
    free = {False, True} <= set(asked["recompute"])
    return {
        "--mesh": None if mesh is None else str(mesh),
        "--devices": None if devices is None else str(devices),
        "--hardware": None if machine is None else machine.name,
        "--memory": None if memory is None else str(memory),
        "--pin": _rules(parse_rules(asked.get("pins"))),
        "--forbid": _rules(parse_forbid(asked.get("forbid"))),
        "--storage": _listed(asked["storage"], STORED),
        "--recompute": None if free else "as it was",  # which only ever goes
        "--microbatches": _listed(asked["microbatches"], USUAL),
        "--context": None if asked["context"] is None else ",".join(asked["context"]),
        "--elsewhere": _listed(asked["elsewhere"], ()),
    }


def _rules(rules: Mapping[str, Sequence[str]]) -> str | None:
    return ";".join(f"{dim}:{'+'.join(axes) or 'none'}" for dim, axes in rules.items()) or None


def _listed(values: Sequence[Any], usual: Sequence[Any]) -> str | None:
    return None if set(values) == set(usual) else ",".join(map(str, values))
