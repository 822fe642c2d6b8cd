"""Replicas of which a fragment meets at a time: as trainers of one device each that meet in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.ir.instructions import AllReduce
from mesh_tf_core.lower.pipeline import check_meeting
from mesh_tf_core.lower.verify import ProgramError
from mesh_tf_core.ops.few_bits import quantised, restored
from mesh_tf_core.training.trainer import Trainer
from tests.core.test_replicas import ROWS

D, F = mtf.Dim("d", 8), mtf.Dim("f", 16)
LAYERS = mtf.Dim("layers", 4)
MESH = "sites:2;data:2;model:2"
STEPS = 14
NAMES = ("wi", "wo", "shift")
CASES: list[tuple[str, mtf.Options]] = [
    ("", mtf.Options()),
    ("batch:data;f:model", mtf.Options({"wi": 1, "wo": 2, "shift": 1})),
    ("batch:data;d:model", mtf.Options({"wi": 3, "wo": 3}, frozenset({"layers"}), microbatches=2)),
]
WAYS = [
    "sites:period=6",
    "sites:period=6,fragments=2",
    "sites:period=6,bits=8",
    "sites:period=6,fragments=2,bits=4",
    "sites:period=4,delay=3,alpha=0.25",
    "sites:period=6,fragments=2,bits=4,delay=2",
]


def model() -> mtf.Model:
    """Layers, and a variable that is in none."""
    g = mtf.Graph()
    batch = mtf.Dim("batch", ROWS)
    x, y = g.input("x", [batch, D], "float32"), g.input("y", [batch, D], "float32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        wi = g.variable("wi", [D, F], mtf.Normal(0.5), "float64", "float64")
        wo = g.variable("wo", [F, D], mtf.Normal(0.5), "float64", "float64")
        return h + mtf.einsum([mtf.tanh(mtf.einsum([h, wi], [batch, F])), wo], [batch, D])

    h = mtf.scan(layer, x.cast("float64"), LAYERS) + g.variable("shift", [D], mtf.Normal(0.5), "float64")
    return mtf.Model(mtf.reduce_mean(mtf.square(h - y.cast("float64"))), mtf.Adam(3e-2))


def data() -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    while True:
        yield {name: rng.normal(size=(ROWS, D.size)).astype(np.float32) for name in "xy"}


def trainer(layout: str, options: mtf.Options, diloco: str) -> Trainer:
    options = replace(options, diloco=mtf.DiLoCo.parse(diloco))
    return Trainer(model(), MESH, layout, options, engine="lockstep")


def fragments(count: int) -> list[dict[str, Any]]:
    """Every so manyth layer; what is in none belongs to the first."""
    found = [dict.fromkeys(("wi", "wo"), slice(p, None, count)) for p in range(count)]
    found[0]["shift"] = slice(None)
    return found


class Alone:
    """Trainers of one device each, and how they meet."""

    def __init__(self, said: str) -> None:
        self.how = mtf.DiLoCo.parse(said)
        self.each = [Trainer(model(), "x:1", engine="lockstep") for _ in range(2)]
        self.outer = {n: np.array(self.each[0].engine.read(n)) for n in NAMES}
        self.momentum = {n: np.zeros_like(x) for n, x in self.outer.items()}
        self.parts = fragments(self.how.fragments)
        self.came: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []
        self.lost = [{n: np.zeros_like(x) for n, x in self.outer.items()} for _ in self.each]

    def run(self, steps: int) -> list[float]:
        """Losses."""
        batches, losses, every = data(), [], self.how.period // self.how.fragments
        for step in range(1, steps + 1):
            losses.append(np.mean([r.step(next(batches))["loss"] for r in self.each]))
            if step % every == self.how.delay and step > self.how.delay:
                parts, came = self.came.pop(0) if self.how.delay else self.exchanged(step)
                self.merge(parts, came)
            if self.how.delay and step % every == 0:
                self.came.append(self.exchanged(step))
        return losses

    def exchanged(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What a fragment has, and how far all came in their mean."""
        parts = self.parts[(step * self.how.fragments // self.how.period - 1) % self.how.fragments]
        both = [*zip(self.each, self.lost, strict=True)]
        return parts, {n: np.mean([self.sent(*one, n, part) for one in both], 0) for n, part in parts.items()}

    def merge(self, parts: dict[str, Any], came: dict[str, np.ndarray]) -> None:
        own = self.how.alpha if self.how.delay else 0.0
        for n, part in parts.items():
            self.momentum[n][part] = 0.9 * self.momentum[n][part] + came[n]
            self.outer[n][part] -= 0.7 * (came[n] + 0.9 * self.momentum[n][part])
            for r in self.each:
                now = np.array(r.engine.read(n))
                now[part] = own * now[part] + (1 - own) * self.outer[n][part]
                r.engine.write(n, now)

    def sent(self, one: Trainer, lost: dict[str, np.ndarray], name: str, part: Any) -> np.ndarray:
        """What a replica says of how far it came."""
        came = self.outer[name][part] - one.engine.read(name)[part]
        if self.how.bits == 32:
            return came
        came = came + lost[name][part]
        said = restored(*quantised(came, self.how.bits), came.shape, self.how.bits).astype(np.float64)
        lost[name][part] = came - said
        return said


@pytest.fixture(scope="module")
def apart() -> dict[str, tuple[list[float], Alone]]:
    found = {}
    for said in WAYS:
        alone = Alone(said)
        found[said] = alone.run(STEPS), alone
    return found


@pytest.mark.parametrize("said", WAYS)
@pytest.mark.parametrize(("layout", "options"), CASES)
@pytest.mark.one_in(18)
def test_replicas_meet_as_if_in_numpy(said: str, layout: str, options: mtf.Options, apart: Any) -> None:
    ours = trainer(layout, options, said)
    found = [r["loss"] for r in ours.fit(data(), STEPS)]
    losses, alone = apart[said]
    np.testing.assert_allclose(found, losses, rtol=1e-9)
    for name in NAMES:
        np.testing.assert_allclose(
            ours.engine.read(f"{name}/outer"), alone.outer[name], rtol=1e-8, atol=1e-12
        )
        copies = [r.engine.read(name) for r in alone.each]
        np.testing.assert_allclose(ours.engine.read(name), copies, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("layout", "options"), CASES)
@pytest.mark.one_in(4)
def test_fragments_send_in_turn_what_all_would_send_at_once(layout: str, options: mtf.Options) -> None:
    sent = {}
    for count in (1, 2):
        ours = trainer(layout, options, f"sites:period=4,fragments={count}")
        sent[count] = []
        for step in range(1, 9):
            ours.fit(data(), step)
            assert ours.engine.communication_bytes["sites"] == 0
            assert ours._replicas is not None
            met = ours._replicas.diloco.meets(step)
            engines = ours._replicas.meetings
            sent[count].append(0 if met is None else engines[met].communication_bytes["sites"])
    whole = sent[1][3]
    assert sent[1] == [0, 0, 0, whole] * 2
    one, other = sent[2][1], sent[2][3]
    assert sent[2] == [0, one, 0, other] * 2 and one + other == whole and 0 < other < one < 0.6 * whole


def test_a_training_resumed_while_a_fragment_is_in_flight_is_the_same(tmp_path: Any) -> None:
    said = "sites:period=6,fragments=2,bits=4,delay=2"
    one, two = (trainer("batch:data", mtf.Options({"wi": 2}), said) for _ in range(2))
    one.fit(data(), 9)
    two.fit(data(), 4, tmp_path)  # a fragment set out after step 3
    three = trainer("f:model", mtf.Options(), said)
    found = [r["loss"] for r in three.fit(data(), 9, tmp_path)]
    assert len(found) == 5
    for name in ("wi", "wi/outer", "wo/outer_momentum", "wi/outer_lost", "wo/outer_came"):
        np.testing.assert_allclose(three.engine.read(name), one.engine.read(name), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("before", "after", "step", "error"),
    [
        (
            2,
            5,
            10,
            "delay=2.*: after step 10, the checkpoint has no fragment in flight, but .* expects fragment 0",
        ),
        (5, 2, 10, "after step 10, the checkpoint has fragment 0 in flight"),
        (2, 5, 13, None),
        (2, 5, 8, None),
    ],
)
def test_what_is_in_flight_is_merged_once(
    before: int, after: int, step: int, error: str | None, tmp_path: Any
) -> None:
    """Under another delay an exchange might be merged again, or never."""

    def ours(delay: int) -> Trainer:
        options = mtf.Options(diloco=mtf.DiLoCo("sites", 7, delay=delay))
        return Trainer(model(), "sites:2", "", options, engine="lockstep")

    ours(before).fit(data(), step, tmp_path)
    other = ours(after)
    if error is None:
        assert other.restore(tmp_path)
    else:
        with pytest.raises(mtf.UserError, match=error):
            other.restore(tmp_path)


def test_what_is_in_flight_is_not_merged_into_weights_that_are_loaded(tmp_path: Any) -> None:
    """Replicas that do not learn stay where they were loaded: nothing of the meetings before counts on."""
    plain = Trainer(model(), "x:1", engine="lockstep")
    plain.save_weights(tmp_path / "weights.npz")
    rare = trainer(*CASES[1], "sites:period=4,bits=8,delay=2")
    rare.fit(data(), 5)
    assert rare.engine.read("wi/outer_came").any() and rare.engine.read("wi/outer_lost").any()
    rare.load(tmp_path / "weights.npz")
    rare.fit(data(), 6)  # the exchange before is merged after step 6
    for name in NAMES:
        np.testing.assert_array_equal(rare.engine.read(f"{name}/outer"), plain.engine.read(name))


@pytest.mark.parametrize(
    ("mesh", "said", "error"),
    [
        (
            "sites:4",
            "sites:period=2",
            "was saved by 2 replicas, but this training has 4, and each",
        ),
        (
            "sites:2",
            "sites:period=2,bits=8",
            "'wi/outer_lost': it was saved by a run with other diloco settings",
        ),
    ],
)
def test_a_checkpoint_of_other_replicas_is_refused(mesh: str, said: str, error: str, tmp_path: Any) -> None:
    def ours(mesh: str, said: str) -> Trainer:
        options = mtf.Options(diloco=mtf.DiLoCo.parse(said))
        return Trainer(model(), mesh, "", options, engine="lockstep")

    ours("sites:2", "sites:period=2").fit(data(), 1, tmp_path)
    with pytest.raises(mtf.UserError, match=error):
        ours(mesh, said).fit(data(), 2, tmp_path)


@pytest.mark.parametrize(("bits", "layout"), [(8, ""), (4, "batch:data;f:model"), (4, "batch:data;d:model")])
def test_few_bits_send_codes_and_scales(bits: int, layout: str) -> None:
    """Of two replicas each sends its codes and, of every row of a variable, a scale of four bytes."""
    options = mtf.Options(diloco=mtf.DiLoCo("sites", bits=bits))
    met = model().replicas(mtf.Mesh(MESH), mtf.Layout(layout), options).outer[0]
    ways = {"f": 2 if "f:" in layout else 1, "d": 2 if "d:" in layout else 1}
    stacks = 2 * 4 * D.size * F.size // (ways["f"] * ways["d"])  # wi and wo
    codes = (stacks + D.size // ways["d"]) * bits // 8
    scales = 4 * (4 * D.size // ways["d"] + 4 * F.size // ways["f"] + 1)
    assert met.communication_bytes()["sites"] == codes + scales


def test_a_meeting_that_sends_anything_else_is_a_defect() -> None:
    made, options = model(), mtf.Options(diloco=mtf.DiLoCo("sites", bits=4))
    met = made.replicas(mtf.Mesh(MESH), mtf.Layout("f:model"), options).outer[0]
    with pytest.raises(ProgramError, match="may be sent over axis 'sites'"):
        check_meeting(met, mtf.DiLoCo("sites"))
    greatest = next(i for i, _ in met.walk() if isinstance(i, AllReduce) and i.axes == ("model",))
    wrong = tuple(replace(i, axes=("sites",)) if i is greatest else i for i in met.code)
    with pytest.raises(ProgramError, match="only 4-bit codes and their scales may be sent over axis 'sites'"):
        check_meeting(replace(met, code=wrong), options.diloco)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("sites:period=30,fragments=4", ", must divide the period of 30 steps; choose a divisor of 30"),
        ("sites:period=30,fragments=3", ", must divide the 4 layers of 'wi'; choose a divisor of 4"),
        ("sites:period=30,fragments=6", "fragments are too many: the model has"),
        ("sites:bits=5", "bits must be 32, 8 or 4, found 5"),
        (
            "sites:period=8,fragments=2,delay=4",
            "diloco: the delay must be at least 0 and less than the 4 steps",
        ),
        ("sites:delay=1,alpha=1", "the share of a replica's own value when it merges"),
        ("sites:rate=inf", "the outer learning rate must be positive and finite, found inf"),
    ],
)
def test_errors(said: str, error: str) -> None:
    with pytest.raises(mtf.UserError, match=error):
        trainer("", mtf.Options(), said)


def test_which_exchange_is_the_newest_that_is_merged() -> None:
    said = mtf.DiLoCo("sites", 8, fragments=2, delay=3)
    assert [said.met(step) for step in (3, 4, 6, 7, 8, 10, 11, 12)] == [0, 0, 0, 4, 4, 4, 8, 8]
    assert [said.flying(step) for step in (3, 4, 6, 7, 8, 10, 11, 12)] == [None, 0, 0, None, 1, 1, None, 0]


def test_its_text() -> None:
    said = mtf.DiLoCo("pod", 100, fragments=4, bits=8, delay=2)
    assert str(said) == "pod:period=100,rate=0.7,momentum=0.9,fragments=4,bits=8,delay=2"
    assert mtf.DiLoCo.parse(str(said)) == said
