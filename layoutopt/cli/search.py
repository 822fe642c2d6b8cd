"""`layoutopt search`: the best layout, its proof, and its alternatives."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from layoutopt.cli import options
from layoutopt.cli.candidates import AcceptLossOption, ReplicaModel, is_choice, show_ways
from layoutopt.cli.defaults import START
from layoutopt.cli.exits import tell
from layoutopt.cli.given import Allowed, MaxAxesOption, OnMesh
from layoutopt.cli.grouped import grouped
from layoutopt.cli.progress import Bounds
from layoutopt.cli.repairs import command_line, refusal, repairs_of, show_repairs, smaller_batch
from layoutopt.cli.terminal import Terminal
from layoutopt.cli.training_cost import PriceOption, TokensOption, read_prices, read_tokens, training_cost
from layoutopt.plan.units import bytes_text, seconds_text
from layoutopt.runtime.clock import Clock
from layoutopt.space.objective import Objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodels.hardware import Hardware
    from layoutopt.models.loading import Loaded
    from layoutopt.optimize.answers.infeasible import Diagnosis
    from layoutopt.plan.build import Plan
    from mesh_tf_core.errors import NoLayoutError


DETAILED = 1.35
"""Seconds after the time limit in which a plan's details are made."""


@grouped
def search(
    typed: typer.Context,
    model: options.ModelArgument,
    mesh: options.MeshOption = None,
    devices: options.DevicesOption = None,
    max_axes: MaxAxesOption = 2,
    settings: options.SetOption = None,
    machine_on: options.OnHardware = options.ON,
    memory: options.MemoryOption = None,
    objective: Annotated[
        Objective,
        typer.Option(
            help="Minimise the step time within the memory limit (time), minimise the peak memory "
            "(memory), or list the Pareto frontier of the two (pareto)."
        ),
    ] = Objective.TIME,
    allowed: Allowed = OnMesh(),  # noqa: B008
    accept_loss: AcceptLossOption = None,
    top: Annotated[int, typer.Option(metavar="K", help="List the K best layouts.")] = 1,
    tokens: TokensOption = None,
    price: PriceOption = None,
    time_limit: options.TimeLimitOption = None,
    out: Annotated[Path | None, options.path_option("PLAN.json", "Write the plan to this file.")] = None,
    report: Annotated[
        Path | None, options.path_option("FILE.html", "Write an HTML report to this file.")
    ] = None,
    output: options.Output = options.OUTPUT,
) -> None:
    """Find the best layout of a model, prove that it is optimal, and show it with its alternatives."""
    clock = options.time_limited(time_limit)  # of all that this command does
    from costmodels.hardware import with_settings
    from layoutopt.models.loading import load_model
    from layoutopt.optimize.entry import search as find
    from layoutopt.plan.training import check_tokens
    from mesh_tf_core.errors import NoLayoutError

    terminal = output.terminal
    options.check_out(out, read=[model])
    options.check_out(report, "--report", [model, out])
    machine = machine_on.read()  # refused before anything takes time
    limit = options.read_memory(memory, machine)
    count, prices = read_tokens(tokens), read_prices(price or (), [machine.name])
    on = None if mesh is None else options.read_mesh(mesh)
    many = devices if on is None else on.devices
    loaded = options.in_time(clock, model, lambda: load_model(model, settings or (), many))
    check_tokens(count, loaded.model.tokens)
    machine = machine_on.read(loaded.model)
    where: dict[str, Any] = {"mesh": on, "devices": devices, "max_axes": max_axes, "hardware": machine}
    where |= {"framework": machine_on.framework, "memory": None if memory is None else limit}
    ways, one = _ways(allowed.given("--diloco"), accept_loss, where)
    asked = allowed.space(typed, diloco=one).keywords
    if ways:
        del asked["diloco"]
    shown = bytes_text if objective is Objective.MEMORY else seconds_text
    with _Kept(terminal, out) as kept:
        try:
            with Bounds(terminal, f"searching {loaded.model.name}", shown) as bounds:
                more: dict[str, Any] = {
                    "objective": objective.value,
                    "top": top,
                    "time_limit": clock,
                    "on_progress": bounds.show,
                    "on_better": lambda words, seconds, peak: terminal.say(
                        f"best so far: {seconds_text(seconds)}, {bytes_text(peak)}: {words}"
                    ),
                    "keep_best": True,
                    "start": typed.meta.get(START),
                }
                if ways:
                    from layoutopt.api.replicas import choose_replicas

                    shares = ReplicaModel(model, settings or (), loaded)
                    more |= {"ways": ways, "accept_loss": accept_loss, "told": terminal.say}
                    kept.plan = choose_replicas(shares, **where, **asked, **more)
                    loaded = shares.of(kept.plan)
                else:
                    kept.plan = find(loaded.model, **where, **asked, **more)
        except NoLayoutError as error:
            diagnosis = _diagnosed(terminal, clock, loaded, error)
            found = repairs_of(diagnosis, typed)
            refused = refusal(error, diagnosis, found, output.as_json)
            tell(str(refused), refused.exit_code, output.as_json, refused.more)
            if report is not None and error.nearest is not None:
                from layoutopt.cli.report import write_report

                nearest = error.nearest.with_details(
                    source=model, source_sha256=loaded.hashes(), conflict=diagnosis.conflict, repairs=found
                )
                write_report(terminal, [_detailed(terminal, clock, nearest, loaded, machine, limit)], report)
            show_repairs(terminal, found)
            raise typer.Exit(refused.exit_code) from None
        named = with_settings(machine_on.hardware, machine_on.set_hardware or ())
        question = kept.plan.question.model_copy(
            update={"hardware": named, "command": command_line(typed, {})}
        )
        cost = training_cost(
            kept.plan.predicted, machine, kept.plan.mesh.devices, count, prices.get(machine.name)
        )
        plan = kept.plan = kept.plan.with_training(cost).with_details(
            source=model, source_sha256=loaded.hashes(), search=question
        )
        full = plan
        if out is not None or report is not None:
            full = kept.plan = _detailed(terminal, clock, plan, loaded, machine, limit)
        with terminal.saved(out, lambda _: kept.save(), "the plan"):
            kept.saved = True
            if full.stopped:
                terminal.say("stopped: this is the best layout found so far")
            terminal.result(plan.data)
            if not output.as_json:
                from layoutopt.cli.plan_tables import show_plan

                show_plan(terminal, plan, limit, machine)
                show_ways(terminal, plan)
            if report is not None:
                from layoutopt.cli.report import write_report

                write_report(terminal, [full], report)
        if full.stopped:
            raise KeyboardInterrupt  # all that was found is saved
    if out is not None:
        from layoutopt.cli.advice import after_search

        terminal.say(after_search(kept.plan, out, loaded, [*(settings or ()), *_shared(kept.plan)], machine))


class _Kept:
    """What was found, which Ctrl-C at any later moment does not lose."""

    def __init__(self, terminal: Terminal, out: Path | None) -> None:
        self.terminal, self.out = terminal, out
        self.plan: Plan | None = None
        self.saved = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt) and self.plan is not None and not self.saved:
            self.save()
            self.terminal.say(f"stopped: wrote the plan to {self.out}" if self.out else "stopped")

    def save(self) -> None:
        """Writes the plan, if that was asked for."""
        if self.out is not None and self.plan is not None:
            self.plan.save(self.out)
        self.saved = True


def _detailed(
    terminal: Terminal, clock: Clock, plan: Plan, loaded: Loaded, machine: Hardware, limit: int
) -> Plan:
    """The plan with its details; without them if there is no time, or Ctrl-C ends their making."""
    from layoutopt.optimize.answers.plan_details import with_details

    full = plan

    def fill() -> None:
        nonlocal full
        full = with_details(plan, loaded.model, machine, limit, loaded.source, loaded.hashes())

    try:
        if not clock.within(DETAILED, fill):
            terminal.say(
                "the time limit was reached before the plan's details were computed; `layoutopt report` "
                "computes them from the model"
            )
    except KeyboardInterrupt:
        full.stopped = True
    return full


def _diagnosed(terminal: Terminal, clock: Clock, loaded: Loaded, error: NoLayoutError) -> Diagnosis:
    """Why nothing fits, and what would help, as far as that is known in time."""
    from layoutopt.optimize.answers.infeasible import Diagnosis

    found, diagnose = [Diagnosis((), ())], error.diagnose
    if diagnose is not None:
        more: dict[str, Any] = {} if clock.left is None else {"seconds": clock.left}
        more |= {"smaller": smaller_batch(loaded)}
        first = f"{str(error).splitlines()[0]}; searching for changes that help (Ctrl-C ends it)"
        with terminal.waiting(first), suppress(KeyboardInterrupt):
            clock.within(DETAILED, lambda: found.append(diagnose(**more)))
    return found[-1]


def _ways(said: Sequence[str], accept: float | None, where: dict[str, Any]) -> tuple[list[str], str | None]:
    """The ways to compare, or the one that is part of what is asked of the search."""
    from mesh_tf_core.errors import UserError

    ways = [way.strip() for way in said]
    if not is_choice(ways):
        if accept is not None:
            raise UserError(
                "--accept-loss compares several --diloco settings; name several, e.g. --diloco free"
            )
        return [], ways[0] if ways else None
    if where["mesh"] is None:
        raise UserError("several --diloco settings need a given mesh; replace --devices with --mesh")
    del where["devices"], where["max_axes"]
    return ways, None


def _shared(plan: Plan) -> list[str]:
    """Settings of a replica's model that are not those of the whole."""
    found = plan.data.details.ways
    if found is None or plan.options.diloco is None:
        return []
    return [f"{n}={v}" for n, v in found.compared[0].hparams.items()]
