"""`layoutopt size`: which size to train, on which chips, on how many, for how long."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli import options
from layoutopt.cli.given import Allowed, MaxAxesOption, OnAnyMesh
from layoutopt.cli.grouped import grouped
from layoutopt.cli.progress import StepProgress
from layoutopt.cli.terminal import Terminal
from layoutopt.cli.training_cost import PriceOption, read_prices
from layoutopt.cli.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from layoutopt.plan.size_results import SizeResult


@grouped
def size(
    model: options.ModelArgument,
    budget: Annotated[
        str | None, typer.Option(metavar="FLOP", help="Training compute in FLOP, e.g. 1e22.")
    ] = None,
    loss: Annotated[float | None, typer.Option(metavar="L", help="Loss to reach, in nats per token.")] = None,
    money: Annotated[
        str | None, typer.Option(metavar="M", help="Budget, in the currency of --price (requires --price).")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="Number of training tokens, e.g. 300B; MODEL keeps its size (or has that of --sizes), and "
            "only the chips are chosen.",
        ),
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(
            metavar="D",
            help="Training time in days (with --devices); with --budget, --loss, --money or --tokens, the "
            "longest acceptable training time.",
        ),
    ] = None,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N",
            help="Number of devices, e.g. 64, or several to compare, e.g. 16,64.",
            show_default="searched",
        ),
    ] = None,
    hardware: options.HardwaresOption = None,
    price: PriceOption = None,
    law: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Scaling law: besiroglu, hoffmann, kaplan or muennighoff.",
            show_default="besiroglu",
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            metavar="RUNS.csv",
            help="Fit the scaling law to your own runs, instead of using --law. RUNS.csv has the columns N "
            "(parameters), D (tokens) and loss.",
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help="Scale the model by depth, width or both, or by a power of the common scale factor for each "
            'hyperparameter, e.g. "layers:1;d_model:0.5".',
        ),
    ] = "both",
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="LOW:HIGH",
            help="Range of model sizes in parameters, e.g. 1B:20B, or a single size, e.g. 13B.",
            show_default="around the law's optimum",
        ),
    ] = None,
    candidates: Annotated[int, typer.Option(metavar="K", help="Number of model sizes to try.")] = 9,
    unique: Annotated[
        str | None,
        typer.Option(
            metavar="T", help="Number of unique tokens in your data; training on more tokens repeats them."
        ),
    ] = None,
    inference: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="Number of tokens that the model will generate after training; adds their cost to that "
            "of training.",
        ),
    ] = None,
    pretrained: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Start from a model pretrained on this data: text or text+code."),
    ] = None,
    characters: Annotated[
        float, typer.Option(metavar="C", help="Characters per token (with --pretrained).")
    ] = 4.0,
    replicas: Annotated[
        int | None,
        typer.Option(
            metavar="M", help="Number of DiLoCo replicas; the predicted loss rises with this number."
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Also search candidates that cannot be on the Pareto frontier.")
    ] = False,
    max_axes: MaxAxesOption = 2,
    allowed: Allowed = OnAnyMesh(),  # noqa: B008
    settings: options.SetOption = None,
    set_hardware: options.SetHardwareOption = None,
    framework: options.FrameworkOption = None,
    memory: options.MemoryOption = None,
    time_limit: options.TimeLimitOption = None,
    out: Annotated[
        Path | None, options.path_option("PLAN.json", "Write the plan of the best size to this file.")
    ] = None,
    report: Annotated[
        Path | None, options.path_option("FILE.html", "Write an HTML report to this file.")
    ] = None,
    output: options.Output = options.OUTPUT,
) -> None:
    """Choose a model size, chips and training time by scaling laws and searched layouts."""
    clock = options.time_limited(time_limit)
    from layoutopt.importers.huggingface.configuration import OURS
    from layoutopt.models.loading import load_model
    from layoutopt.sizing.answer import USUAL
    from layoutopt.sizing.sizing import size as answer

    terminal = output.terminal
    options.check_out(out, read=[model])
    options.check_out(report, "--report", [model, out])
    asked: dict[str, Any] = {
        "budget": _count(budget, "--budget", "1e22"),
        "money": _count(money, "--money", "1e6"),
        "tokens": _count(tokens, "--tokens", "300B"),
        "unique": _count(unique, "--unique", "100B"),
        "inference": _count(inference, "--inference", "1T") or 0.0,
    }
    names = hardware or [options.THIS_MACHINE]
    machines = [options.read_hardware(name, set_hardware, framework) for name in names]
    prices = read_prices(price or (), [machine.name for machine in machines])
    numbers = _devices(devices or ())
    limit = None if memory is None else float(parse_bytes(memory))
    most = max(numbers, default=USUAL)
    loaded = options.in_time(clock, model, lambda: load_model(model, settings or (), most))
    if not numbers:  # the answer's number may be another one
        loaded.model.assumed = {n: why and OURS for n, why in loaded.model.assumed.items()}
    machines = [options.read_hardware(name, set_hardware, framework, loaded.model) for name in names]
    with StepProgress(terminal, "sizing", 1) as bar:
        found = answer(
            loaded.rebuilt,
            loaded.hparams,
            loss=loss,
            days=days,
            devices=numbers,
            hardware=machines,
            price=prices,
            law=law or "",
            runs=fit,
            scale=scale,
            sizes=None if sizes is None else _sizes(sizes),
            candidates=candidates,
            every=every,
            pretrained=pretrained,
            characters=characters,
            replicas=replicas,
            memory=limit,
            max_axes=max_axes,
            time_limit=clock,
            keep_best=True,
            on_progress=lambda done, total, what: bar.update(done, what, max(total, done + 1)),
            space=allowed.space(),
            **asked,
        )
    plan = found.plan.with_details(source=model, source_sha256=loaded.hashes())
    if not hardware and not devices:
        terminal.say(
            f"without --hardware the answer is for {options.THIS_MACHINE}; compare chips with --hardware "
            "(repeatable)"
        )
    with terminal.saved(out, plan.save, "the plan"):
        if found.stopped:
            terminal.say("stopped: this is the best size found so far")
        terminal.result(found.data)
        if not output.as_json:
            from layoutopt.cli.size_tables import show

            show(terminal, found.data)
        if report is not None:
            write_report(terminal, found.data, report)
    if found.stopped:
        raise KeyboardInterrupt  # all that was found is saved
    if out is not None:
        sets = _sets(settings or (), found.best.hparams)
        chips = next(
            n for n, machine in zip(names, machines, strict=True) if machine.name == found.best.hardware
        )
        terminal.say(
            f"next: layoutopt cost {model}{sets} --layout {out} --hardware {chips}; report takes the plan "
            "too, explain and export take it with --model"
        )


def _sets(settings: Sequence[str], chosen: Mapping[str, Any]) -> str:
    """`--set` of what makes the best size of the model file."""
    own = [text for text in settings if text.partition("=")[0].strip() not in chosen]
    words = [*own, *(f"{name}={value}" for name, value in chosen.items())]
    return "".join(f" --set {shlex.quote(word)}" for word in words)


def write_report(terminal: Terminal, found: SizeResult, out: Path) -> None:
    """Writes the page of an answer."""
    import reports

    with terminal.waiting("drawing the report"):
        reports.write_size_report(found, out)
    terminal.say(f"wrote the report to {out}")


def _count(text: str | None, option: str, example: str) -> float | None:
    return None if text is None else parse_count(text, option, example)


def _devices(texts: Sequence[str]) -> tuple[int, ...]:
    from mesh_tf_core.errors import UserError

    found = []
    for part in ",".join(texts).split(",") if texts else ():
        if not (part.strip().isascii() and part.strip().isdigit()) or len(part.strip()) > 9:
            raise UserError(
                f"--devices {part.strip()!r}: write whole numbers, e.g. --devices 64 or --devices 16,64"
            )
        found.append(int(part))
    return tuple(found)


def _sizes(text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    least = parse_count(low, "--sizes", "1B:20B")
    return least, parse_count(high, "--sizes", "1B:20B") if colon else least
