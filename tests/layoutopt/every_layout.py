"""Random layouts about which every kind decides at once, each held against its lowered program: the seconds
of the tables and the bytes of the memory rows, from both sides.

A space of all that the records of the kinds offer (`everything`), or some of it, is drawn for a random model;
in it random decisions, and around each that is legal all layouts that differ in a few of them.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware, with_settings
from costmodels.pricing.pricer import pricer
from examples.moe_lm import model as mixture
from examples.transformer_lm import model as transformer
from examples.transformer_seq2seq import model as translator
from layoutopt.formulation.extract import Extraction, extract
from layoutopt.optimize.evaluation.evaluation import Evaluation, as_run
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.solver import evaluate as value_of
from layoutopt.space.decisions import Decisions, SearchSpace
from layoutopt.space.kind import Choice, Target
from layoutopt.space.microbatches import numbers
from layoutopt.space.recompute import again_in
from layoutopt.space.stages import ways
from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.lower import Options
from tests.layoutopt.every_kind import APART, MACHINES, OPENED, waits, whole_model
from tests.layoutopt.models import everything, random_model
from tests.layoutopt.outside import record, thin

PRICE = 1e-9
ROUNDING = 1 + 1e-12
CHANGED, OTHERS = 3, 2
"""The number of decisions in which layouts around one differ from it, and of other options of each."""


@dataclass
class Compared:
    """What was compared.

    Attributes:
      kinds: kind of a decision that was not plain, or what else a layout was -> number of layouts.
      faults: a line for each layout whose tables or rows are not those of its program.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def layouts(self) -> int:
        return self.kinds["layouts"]

    def compare(self, found: Extraction, layout: Layout, options: Options, of: Evaluation | None) -> None:
        """Holds the tables and rows of one layout against its program, None if it is not legal."""
        choices, where = found.choices(layout, options), f"{layout or 'nothing split'}, {options}"
        if of is None or choices is None:
            if of is not None or choices is not None:
                self.faults.append(f"legal: tables {choices is not None}, program {of is not None}: {where}")
            return
        # Not the longer of device and host: these tables are the device's (`LaunchPricer` has the host's).
        tables, program = value_of(found.problem, choices).objective, of.cost.device_seconds
        # What loops wait for the host link is in steps, which are bounds (`host_link`).
        if tables > program * (1 + PRICE) or (tables < program * (1 - PRICE) and not waits(of)):
            self.faults.append(f"time {tables / program - 1:+.3g} of {program:.6g}: {where}")
        rows = found.memory.rows() + found.memory.rows(again_in(options))
        most = max(rows, key=lambda row: row.use(choices))
        bytes = most.use(choices)
        if bytes > of.memory.peak * ROUNDING:
            self.faults.append(
                f"memory {bytes - of.memory.peak:+.0f} of {of.memory.peak}, {most.name}: {where}"
            )
        if found.read(choices) != (layout, options):
            self.faults.append(f"read {found.read(choices)}: {where}")
        self.kinds["layouts"] += 1
        self.kinds["rows below"] += bytes < of.memory.peak / ROUNDING
        self.kinds["times below"] += tables < program * (1 - PRICE)
        chosen = found.decided.write(layout, options)
        self.kinds.update({type(d).__name__ for d in found.decided.every if chosen[d.name]})
        self.kinds.update({options.schedule} if found.decided.stages else ())


def evaluated(*asked: Any) -> Evaluation | None:
    """As `evaluate`; None if the layout is not legal."""
    with suppress(LayoutError):
        return evaluate(*asked)
    return None


@dataclass(frozen=True)
class Drawn:
    """A random model on a random machine, and all that may be decided about it."""

    model: mtf.Model
    mesh: mtf.Mesh
    hardware: Hardware
    decided: Decisions

    def under(self, framework: str) -> Drawn:
        """The same on a GPU, as a framework builds and runs it."""
        hardware = load_hardware("h100", framework)
        return replace(self, hardware=hardware, model=as_run(self.model, hardware))

    def around(self, rng: random.Random) -> Decisions | None:
        """A few options of some decisions, of the others one, so that a layout is legal; None if none was
        found."""
        every = self.decided.options
        for _ in range(40):
            plain = rng.choice([0.3, 0.6, 0.8, 0.9])
            chosen = {n: o[0] if rng.random() < plain else rng.choice(o) for n, o in every.items()}
            layout, options = self.decided.read(chosen)
            if evaluated(self.model, self.mesh, layout, self.hardware, options) is not None:
                break
        else:
            return None
        free = [n for n, o in every.items() if len(o) > 1]
        left: dict[str, tuple[Choice, ...]] = {n: (c,) for n, c in chosen.items()}
        for name in rng.sample(free, min(CHANGED, len(free))):
            others = [o for o in every[name] if o != chosen[name]]
            left[name] = (chosen[name], *rng.sample(others, min(OTHERS, len(others))))
        return self.decided.within(left)

    def compare(self, decided: Decisions, to: Compared) -> None:
        """Compares all layouts of some decisions."""
        prices = pricer(self.hardware, self.mesh)
        found = extract(self.model, self.mesh, decided, prices)
        for picked in itertools.product(*decided.options.values()):
            layout, options = decided.read(dict(zip(decided.options, picked, strict=True)))
            of = evaluated(self.model, self.mesh, layout, self.hardware, options, prices)
            to.compare(found, layout, options, of)


def lm(build: Callable[..., mtf.Model], **own: Any) -> Callable[[int], mtf.Model]:
    """A random small language model of an example."""

    def made(seed: int) -> mtf.Model:
        rng = random.Random(seed)
        sizes = {"layers": rng.choice([2, 4]), "d_model": rng.choice([8, 32]), "d_kv": rng.choice([4, 8])}
        sizes |= {"heads": 2, "d_ff": rng.choice([8, 64]), "vocab": rng.choice([16, 64]), "batch": 4}
        how = {"dtype": rng.choice(["float32", "bfloat16"]), "optimizer": rng.choice(["sgd", "adam"])}
        return build(**sizes, length=8, **how, **own)

    return made


MODELS: Sequence[Callable[[int], mtf.Model]] = (
    whole_model,
    lm(transformer),
    whole_model,
    lm(translator),
    whole_model,
    lm(transformer, attention="fused", kv_heads=1),
    random_model,
    lm(mixture, experts=2),
    thin,
)
MESHES = ("x:4", "x:2;y:2", "x:2;y:2", "x:2", "x:2;y:2;z:2")


def drawn(seed: int) -> Drawn:
    """The random question of a number."""
    rng = random.Random(seed)
    model, rarely = MODELS[seed % len(MODELS)](seed), rng.random() < 0.1
    mesh = mtf.Mesh(rng.choice(MESHES) + (";sites:2" if rarely else ""))
    name = rng.choice(MACHINES)
    known = load_hardware(name)
    hardware = known if known.host_memory_bytes else load_hardware(with_settings(name, ["host_memory=64GB"]))
    target = Target(model, mesh, hosts=True)
    for _ in range(20):
        with suppress(UserError):
            allowed = everything(target)
            if rarely:
                allowed = replace(allowed, **_apart(rng, model))
            allowed = some(allowed, [axis for axis in mesh.names if axis not in allowed.apart], rng)
            way = rng.choice([*ways(model, mesh, allowed)])
            return Drawn(
                model, mesh, hardware, record(target, rng.choice(numbers(model, allowed.microbatches)), way)
            )
    raise AssertionError(f"seed {seed}: nothing may be asked")


def _apart(rng: random.Random, model: mtf.Model) -> dict[str, Any]:
    """Replicas, which have no stages, and nothing on the hosts."""
    own = {name: value for kind in APART for name, value in OPENED[kind](rng, model).items()}
    return own | {"offload": (), "pipeline": (), "schedule": ("gpipe",)}


def some(every: SearchSpace, axes: Sequence[str], rng: random.Random) -> SearchSpace:
    """All of a space, or some of each of its fields; storage also over some axes."""
    storage = [*every.storage, *(f"zero{rng.randint(1, 3)}@{axis}" for axis in axes)]
    every = replace(every, storage=tuple(storage))
    found = dict[str, Any]()
    for each in fields(SearchSpace):
        value = getattr(every, each.name)
        if isinstance(value, tuple) and len(value) > 1 and rng.random() < 0.6:
            found[each.name] = tuple(rng.sample(value, rng.randint(1, len(value))))
    return replace(every, **found)


def hunt(seeds: Sequence[int], bases: int = 3, framework: str = "") -> Compared:
    """Compares layouts around so many of each question, if named under a framework."""
    found = Compared()
    for seed in seeds:
        known = len(found.faults)
        its, rng = drawn(seed), random.Random(seed)
        its = its.under(framework) if framework else its
        for _ in range(bases):
            decided = its.around(rng)
            if decided is not None:
                its.compare(decided, found)
        where = f"seed {seed}, {its.model.name} on {its.mesh}, {its.hardware.name}"
        found.faults[known:] = [f"{where}: {fault}" for fault in found.faults[known:]]
    return found
