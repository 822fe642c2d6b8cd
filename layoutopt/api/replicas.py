"""Ways to synchronise replicas: which axis synchronises rarely, and how often; the fastest of the ways that a
user accepts.

  never            all devices synchronise in every step: the search on the whole mesh
  AXIS:period=H    replicas along an axis train alone for H steps and then synchronise (`outer_step_context`)
  free             never, and with H = 30 every axis between nodes or slices (all axes, if links are equal)
  AXIS:...=A/B     a way for every value, as sites:period=30/100,fragments=1/4 (those that fit together)

Every way is a search of its own, so the fastest is proven if each is. All ways use the same examples in a
step: n replicas share them, and the model is that of one replica.

What replicas lose is a published law's, not ours: Charles et al. 2025 (2503.09799), tables 7 and 10, for H =
30; the loss rises with H (their figure 9), so that it holds as a bound for shorter periods, and there is none
for longer ones, nor for fragments, few bits and delays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from costmodels.hardware import Hardware, machine_of
from costmodels.network.topology import place
from layoutopt.optimize.entry import search
from layoutopt.plan.build import Plan, axes_of
from layoutopt.plan.decided import Decided
from layoutopt.plan.schema import ProofStatus, Told
from layoutopt.plan.units import signed_percent
from layoutopt.plan.ways import SYNCHRONOUS, ReplicaStrategies, ReplicaStrategy
from layoutopt.runtime.clock import Clock
from layoutopt.sizing.laws import replicas_loss
from layoutopt.space.allow import USUAL
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.pipeline import check_axis
from mesh_tf_core.model import Model
from mesh_tf_core.ops.few_bits import WHOLE
from mesh_tf_core.tracing.diloco import DiLoCo, DoNotFit

NEVER, FREE = "never", "free"
LAW_PERIOD = 30
"""Steps between meetings that the law was fitted at."""
BuildReplica = Callable[[int], Model]
"""build(n) returns the model of one of n replicas: the whole model with an n-th of the examples."""


def choose_replicas(
    build: BuildReplica,
    mesh: Mesh | str,
    ways: Sequence[str] = (FREE,),
    hardware: str | Hardware = "cpu-local",
    accept_loss: float | None = None,
    time_limit: float | Clock | None = None,
    told: Told = lambda _: None,
    **asked: Any,
) -> Plan:
    """Finds the fastest plan over several ways to synchronise replicas (DiLoCo).

    `data.details.ways` of the plan lists all ways that were compared.

    Args:
      build: build(n) returns the model of one of n replicas, which has 1/n of the examples of a batch.
      mesh: a mesh, or its axes such as "sites:4;data:8".
      ways: any of "never" (all devices synchronise in every step), DiLoCo settings such as
        "sites:period=30", and "free" (never, and DiLoCo over each mesh axis that crosses slow links).
      hardware: the name of a preset, the path of a hardware file, or a Hardware.
      accept_loss: the largest accepted relative increase of the loss, by the published scaling law. Ways with
        a larger or an unknown increase are excluded. None: accept any.
      time_limit: seconds for all searches together (None: no limit).
      told: called with every way before its search.
      asked: further arguments of `search`.

    Raises:
      InfeasibleError: it is proven that no way has a layout that fits in memory.
      UserError: an argument is wrong, or every way is excluded.
    """
    mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
    machine = machine_of(hardware)
    if accept_loss is not None and not accept_loss >= 0:
        raise UserError(f"--accept-loss {accept_loss!r}: write a fraction of at least 0, e.g. 0.02")
    clock = Clock.of(time_limit)
    whole = build(1)
    found: list[_WayResult] = []
    every = [*ways_of(ways, mesh, machine)]
    for left, rare in zip(range(len(every), 0, -1), every, strict=True):
        told(_name(rare))
        found.append(_searched(build, whole, rare, mesh, accept_loss, machine, clock.part(1 / left), asked))
    plans = [f for f in found if f.plan is not None]
    if not plans:
        raise next((f.error for f in found if f.error is not None), UserError(_refused(found, accept_loss)))
    best = min(plans, key=lambda f: f.seconds)
    compared = sorted(_told_apart((f.way for f in found), whole), key=_seconds)
    assert best.plan is not None
    return _proven(best.plan, found).with_details(
        ways=ReplicaStrategies(compared=tuple(compared), accepted=accept_loss)
    )


@dataclass(frozen=True)
class _WayResult:
    """What a way came to: a plan, or why there is none."""

    way: ReplicaStrategy
    plan: Plan | None = None
    error: UserError | None = None

    @property
    def seconds(self) -> float:
        return _seconds(self.way)

    @property
    def least(self) -> float:
        """Seconds that no layout of this way takes less than."""
        if self.plan is None:
            return 0.0 if isinstance(self.error, LimitError) else math.inf
        return self.plan.solver.bound or 0.0


def _told_apart(ways: Iterable[ReplicaStrategy], whole: Model) -> Iterator[ReplicaStrategy]:
    """Ways that all name the hyperparameters in which their models differ."""
    known = [*ways]
    names = {name for way in known for name in way.hparams}
    for way in known:
        own = {n: way.hparams.get(n, whole.hparams.get(n)) for n in sorted(names)}
        yield way.model_copy(update={"hparams": own})


def ways_of(said: Sequence[str], mesh: Mesh, machine: Hardware) -> Iterator[DiLoCo | None]:
    """Parses texts into different ways to synchronise; None: all devices synchronise in every step."""
    found: dict[DiLoCo | None, None] = {}
    for text in said:
        if text == NEVER:
            found[None] = None
        elif text == FREE:
            near = place(machine, mesh).near
            found[None] = None
            found.update((DiLoCo(a, LAW_PERIOD), None) for a, n in mesh.axes if n > 1 and a not in near)
        else:
            found.update(dict.fromkeys(_each(text)))
    yield from found


def _each(text: str) -> Iterator[DiLoCo]:
    """The ways of a text, of which a setting may have several values; those that do not fit together are left
    out, if others do."""
    axis, colon, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")]
    made, misfits = [], []
    for values in itertools.product(*(value.split("/") for *_, value in pairs)):
        said = (f"{name}{sign}{value}" for (name, sign, _), value in zip(pairs, values, strict=True))
        try:
            made.append(DiLoCo.parse(f"{axis}{colon}{','.join(said)}"))
        except DoNotFit as error:
            misfits.append(error)
    if not made:
        raise misfits[0]
    yield from made


def _name(rare: DiLoCo | None) -> str:
    if rare is None:
        return SYNCHRONOUS
    said = [f"{rare.axis}, every {rare.period} steps"]
    said += [f"{rare.fragments} fragments"] if rare.fragments > 1 else []
    said += [f"{rare.bits} bits"] if rare.bits != WHOLE else []
    said += [f"{rare.delay} steps late"] if rare.delay else []
    return ", ".join(said)


def _searched(
    build: BuildReplica,
    whole: Model,
    rare: DiLoCo | None,
    mesh: Mesh,
    accept: float | None,
    machine: Hardware,
    clock: Clock,
    asked: Mapping[str, Any],
) -> _WayResult:
    count = 1 if rare is None else check_axis(rare, mesh)
    loss = None if rare is None else loss_of(whole.parameters, count, rare)
    about = {"name": _name(rare), "replicas": count, "loss": loss, "mesh": mesh.as_dict()}
    way = ReplicaStrategy.model_validate({**about, "diloco": str(rare or "")})
    if rare is not None and accept is not None and (loss is None or loss > accept):
        beyond = (
            f"beyond H = {LAW_PERIOD}"
            if _plain(rare)
            else "for fragments, quantised synchronisation or delays"
        )
        law = (
            f"predicted loss {signed_percent(loss)}"
            if loss is not None
            else f"the scaling law has no runs {beyond}"
        )
        return _WayResult(way.model_copy(update={"reason": f"not accepted: {law}"}))
    try:
        model = whole if rare is None else shared(build, whole, count)
    except _Unshared as error:
        return _WayResult(way.model_copy(update={"reason": str(error)}))
    try:
        words = {"allow": USUAL} if not asked.get("allow") else {}
        more = {**asked, **words, "time_limit": clock.rest, "diloco": rare}
        plan = search(model, mesh=mesh, hardware=machine, **more)
    except UserError as error:
        if rare is None and not isinstance(error, InfeasibleError | LimitError):
            raise  # it is about what is asked of every way
        return _WayResult(way.model_copy(update={"reason": str(error)}), error=error)
    p = plan.predicted
    more = {
        **{name: getattr(plan.data, name) for name in Decided.model_fields},
        "layout": axes_of(plan.layout),
        "hparams": {n: v for n, v in model.hparams.items() if whole.hparams.get(n) != v},
        "step_seconds": p.step_seconds,
        "mfu": p.mfu,
        "peak_memory_bytes": p.peak_memory_bytes,
        "rare_bytes": None if rare is None else p.communication_bytes_per_device.get(rare.axis, 0.0),
        "status": plan.solver.status,
    }
    return _WayResult(way.model_copy(update=more), plan)


class _Unshared(UserError):
    """The examples of a step do not divide over some replicas."""


def shared(build: BuildReplica, whole: Model, count: int) -> Model:
    """The model of one of some replicas.

    Raises:
      UserError: the examples do not divide, or the built model has another share of them.
    """
    if whole.examples % count:
        raise _Unshared(f"a batch of {whole.examples} examples is not divisible by {count} replicas")
    model = build(count)
    if model.examples * count != whole.examples or model.parameters != whole.parameters:
        raise UserError(
            f"the model of one of {count} replicas has {model.examples} examples and {model.parameters:,} "
            f"parameters, but the whole model has {whole.examples} and {whole.parameters:,}; build a "
            "replica's model with its share of the batch and the same parameters"
        )
    return model


def loss_of(parameters: int, replicas: int, rare: DiLoCo) -> float | None:
    """The relative increase of the loss of replicas, by the law; None for ways outside the law."""
    known = rare.period <= LAW_PERIOD and _plain(rare)
    return replicas_loss(parameters, replicas) - 1 if known else None


def _plain(rare: DiLoCo) -> bool:
    """Whether all is exchanged at once, as it is, and waited for."""
    return rare.fragments == 1 and rare.bits == WHOLE and not rare.delay


def _seconds(way: ReplicaStrategy) -> float:
    return math.inf if way.step_seconds is None else way.step_seconds


def _proven(best: Plan, found: Sequence[_WayResult]) -> Plan:
    """The plan, with what is proven of it over all ways."""
    least = min(f.least for f in found if not f.way.reason.startswith("not accepted"))
    data, own = best.data, best.solver
    if own.objective is None or least >= (own.bound or 0.0):
        return best
    gap = max(own.objective - least, 0.0) / own.objective
    solver = own.model_copy(update={"status": ProofStatus.FEASIBLE, "bound": least, "gap": gap})
    return Plan(data.model_copy(update={"solver": solver}), best.stopped, best.model, best.complete)


def _refused(found: Sequence[_WayResult], accept: float | None) -> str:
    said = "; ".join(f"{f.way.name}: {f.way.reason}" for f in found)
    return (
        f"--accept-loss {accept:g} excludes every setting ({said}); raise --accept-loss"
        if accept is not None
        else said
    )
