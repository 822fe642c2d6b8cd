"""What a user decides on the command line: the mesh, the layout, and what else there is to decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli.options import read_mesh
from layoutopt.cli.plans import is_plan, read_plan

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.evaluator import Evaluation
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.build import Plan
    from mesh_tf_core import DiLoCo, Graph, Layout, Mesh, Options
    from mesh_tf_core.lower.storage import Stage


@dataclass(frozen=True)
class DecisionOptions:
    """What a user decides beside the mesh and the layout; by default nothing."""

    storage: Annotated[
        list[str] | None,
        typer.Option(
            "--storage",
            metavar="[VARIABLE=]STAGE",
            help="How variables are stored: layout, zero1, zero2, zero3, or over some axes as zero3@data "
            "(again for more).",
            show_default="as the layout says",
        ),
    ] = None
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            "--recompute",
            metavar="DIM[:keep=KIND+...]",
            help="Recompute the loop over DIM in backward, but for what to keep: products, outputs, "
            "attention, others, or names of weights and scopes.",
            show_default="none; of JAX, what the program does",
        ),
    ] = None
    microbatches: Annotated[
        int,
        typer.Option("--microbatches", min=1, metavar="N", help="Parts of the batch, one after the other."),
    ] = 1
    context: Annotated[
        list[str] | None,
        typer.Option(
            "--context",
            metavar="[DIM=]FORM",
            help="Attention to keys that lie split along DIM: ring, zigzag or all_to_all (again for more).",
            show_default="they are gathered",
        ),
    ] = None
    diloco: Annotated[
        str | None,
        typer.Option(
            "--diloco",
            metavar="AXIS[:period=30,...]",
            help="Replicas along this axis train alone for a period of steps, each on batches of its own, "
            "and then meet (rate=0.7, momentum=0.9: of the outer step; "
            "fragments=4: a quarter at a time; bits=8 or 4: rounded; delay=2: merged two steps later).",
            show_default="all devices meet in every step",
        ),
    ] = None
    offload: Annotated[
        list[str] | None,
        typer.Option(
            "--offload",
            metavar="KIND[=NAME]",
            help="What lies in host memory between its uses: optimizer, its state; weights, variables "
            "themselves; activations, what loops that run again keep (again for more).",
            show_default="nothing",
        ),
    ] = None

    schedule: Annotated[
        str,
        typer.Option(
            "--schedule",
            metavar="NAME",
            help="When the stages of a pipeline go backward: gpipe, after all microbatches; 1f1b, each "
            "microbatch at once, so that as many are in flight as there are stages; circular:2 and "
            "interleaved:2, as these, with microbatches that go round twice, so that stages wait half as "
            "long.",
        ),
    ] = "gpipe"

    collective_matmul: Annotated[
        str | None,
        typer.Option(
            "--collective-matmul",
            metavar="DIMS",
            help="Products that have one of these dimensions gather and scatter in chunks beside their work: "
            "d_ff,heads.",
            show_default="whole values",
        ),
    ] = None

    def __bool__(self) -> bool:
        return self != UNDECIDED

    def read(self, loaded: Loaded, mesh: str | None, layout: str | None, plan: Plan | None = None) -> Given:
        """They with the mesh and the layout, all of which a plan file gives.

        Args:
          plan: what lies in the plan file, if that was read already.

        Raises:
          UserError: no mesh, a malformed mesh or layout, a plan of another model or mesh.
        """
        from mesh_tf_core import Layout, UserError

        options = self.options(loaded)
        if layout is None or not is_plan(layout):
            return Given(read_mesh(mesh), Layout(layout or ""), options)
        plan = read_plan(loaded, layout, plan)
        if self:
            raise UserError(
                f"{layout} says how variables are stored, what is recomputed, how many microbatches there "
                "are, how attention reaches its keys, which axis synchronises rarely, what lies on the "
                "hosts, the schedule of stages and what goes beside products; leave these options out"
            )
        if mesh is not None and read_mesh(mesh) != plan.mesh:
            raise UserError(
                f"--mesh {mesh!r} is not the mesh of {layout}, which is {plan.mesh}; leave --mesh out"
            )
        return Given(plan.mesh, plan.layout, plan.options, plan)

    def options(self, loaded: Loaded) -> Options:
        """They as options of the model's program; a stage without a variable is for all trained ones, and so
        is what lies on the hosts, a form of attention without a dimension for all keys.

        Where nothing is said of recomputation, it is what a JAX program says itself (jax.checkpoint).
        """
        from mesh_tf_core import Options
        from mesh_tf_core.lower.nodes import check_context, check_products
        from mesh_tf_core.lower.offload import check_offload, offload_of

        graph = loaded.model.graph
        recompute = self.recompute or sorted(getattr(getattr(loaded.model, "origin", None), "recomputed", ()))
        forms = _forms(self.context or (), graph)
        check_context(graph, forms)
        hosted = offload_of(self.offload or (), graph.variables, recompute)
        check_products(graph, listed(self.collective_matmul))
        if hosted:
            check_offload(hosted, loaded.model.step_graph.variables)
        return Options(
            _stages(self.storage or (), graph),
            frozenset(recompute),
            self.microbatches,
            frozenset(forms.items()),
            None if self.diloco is None else _one_way(self.diloco),
            hosted,
            self.schedule,
            frozenset(listed(self.collective_matmul)),
        )


UNDECIDED = DecisionOptions()


def listed(text: str | None) -> list[str]:
    """The names of a list with commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


@dataclass(frozen=True)
class Given:
    """What `--mesh` and `--layout` and the other decisions say; `plan` if the layout is a plan file's."""

    mesh: Mesh
    layout: Layout
    options: Options
    plan: Plan | None = None

    def priced(self, loaded: Loaded, machine: Hardware) -> Evaluation:
        """The model lowered so, and what it costs."""
        from layoutopt.evaluator import evaluate

        return evaluate(loaded.model, self.mesh, self.layout, machine, self.options)


def _one_way(text: str) -> DiLoCo:
    """How replicas meet; UserError for what names several ways, or none."""
    from mesh_tf_core import DiLoCo, UserError

    if text in ("never", "free") or "/" in text:
        raise UserError(
            f"--diloco {text}: only `search` compares ways to synchronise; name one, as sites:period=30, or "
            "leave --diloco out"
        )
    return DiLoCo.parse(text)


def _stages(storage: Sequence[str], graph: Graph) -> dict[str, int | Stage]:
    """The stage of each variable that `--storage` names; for all where it names none."""
    from mesh_tf_core.errors import UserError, known_names
    from mesh_tf_core.lower.storage import read_stage

    trained = {name: v for name, v in graph.variables.items() if v.trainable and len(v.shape)}
    stages: dict[str, int | Stage] = {}
    for variable, (text, stage) in _said("--storage", storage).items():
        if variable and variable not in trained:
            raise UserError(f"--storage {text}: no variable {variable!r}; {known_names(variable, trained)}")
        for name in [variable] if variable else trained:
            stages[name] = read_stage(stage).short
    return stages


def _forms(context: Sequence[str], graph: Graph) -> dict[str, str]:
    """The form of attention to each dimension of keys that `--context` names."""
    from mesh_tf_core.errors import UserError
    from mesh_tf_core.lower.nodes import crossed

    forms: dict[str, str] = {}
    for dim, (text, form) in _said("--context", context).items():
        if not dim and not crossed(graph):
            raise UserError(f"--context {text}: the model has no fused attention; leave it out")
        forms.update(dict.fromkeys([dim] if dim else crossed(graph), form))
    return forms


def _said(option: str, texts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """What an option that may be given again says, by what it is about: its text and its value.

    First what is about everything (''), which names count more than, in whatever order they are given.

    Raises:
      UserError: two values for the same.
    """
    from mesh_tf_core.errors import UserError

    found: dict[str, tuple[str, str]] = {}
    for text in texts:
        about, _, value = text.rpartition("=")
        before = found.setdefault(about, (text, value))
        if before[1] != value:
            which = f"are both about {about!r}" if about else "are both about everything that none names"
            raise UserError(f"{option} {before[0]} and {option} {text} {which}; leave one of them out")
    return dict(sorted(found.items(), key=lambda item: item[0] != ""))
