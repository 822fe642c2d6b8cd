"""An axis that synchronises rarely: replicas train as if each were alone, and meet as the outer step says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.instructions import AllReduce
from mesh_tf_core.lower.pipeline import check_alone, lower_replicas
from mesh_tf_core.lower.verify import ProgramError
from mesh_tf_core.training.trainer import Trainer

D, F = mtf.Dim("d", 4), mtf.Dim("f", 8)
LAYERS = mtf.Dim("layers", 2)
ROWS = 8
MESH = "sites:2;data:2;model:2"
CASES: list[tuple[str, mtf.Options]] = [
    ("", mtf.Options()),
    ("batch:data;f:model", mtf.Options()),
    ("batch:data;f:model", mtf.Options({"wi": 1, "wo": 2})),
    ("batch:data", mtf.Options({"wi": 3, "wo": 3}, frozenset({"layers"}))),
    ("f:model;d:data", mtf.Options({"wi": 2}, microbatches=2)),
]


def model(
    optimizer: mtf.Optimizer, rows: int = ROWS, dropout: float = 0.0, dtype: str = "float64"
) -> mtf.Model:
    """Layers with weights that a cast may read."""
    g = mtf.Graph()
    batch = mtf.Dim("batch", rows)
    x, y = g.input("x", [batch, D], "float32"), g.input("y", [batch, D], "float32")
    own = "float32" if dtype != "float64" else dtype

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        wi = g.variable("wi", [D, F], mtf.Normal(0.5), own, dtype)
        wo = g.variable("wo", [F, D], mtf.Normal(0.5), own, dtype)
        inner = mtf.tanh(mtf.einsum([h, wi], [batch, F]))
        inner = mtf.dropout(inner, dropout) if dropout else inner
        return h + mtf.einsum([inner, wo], [batch, D])

    h = mtf.scan(layer, x.cast(dtype), LAYERS)
    loss = mtf.reduce_mean(mtf.square((h - y.cast(dtype)).cast(own)))
    return mtf.Model(loss, optimizer, {"size": mtf.reduce_mean(mtf.square(h.cast(own)))})


def data(seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    while True:
        yield {name: rng.normal(size=(ROWS, 4)).astype(np.float32) for name in "xy"}


def trainer(made: mtf.Model, layout: str, options: mtf.Options, diloco: str) -> Trainer:
    options = replace(options, diloco=mtf.DiLoCo.parse(diloco))
    return Trainer(made, MESH, layout, options, engine="lockstep")


def alone(count: int, period: int, optimizer: Any, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same by trainers of one device each, which meet in NumPy: algorithm 1 of the paper."""
    replicas = [Trainer(model(optimizer()), "x:1", engine="lockstep") for _ in range(count)]
    names = ("wi", "wo")
    outer = {n: np.array(replicas[0].engine.read(n)) for n in names}
    momentum = {n: np.zeros_like(x) for n, x in outer.items()}
    batches, losses = data(), []
    for step in range(1, steps + 1):
        losses.append(np.mean([r.step(next(batches))["loss"] for r in replicas]))
        if step % period == 0:
            for n in names:
                came = outer[n] - np.mean([r.engine.read(n) for r in replicas], axis=0)
                momentum[n] = 0.9 * momentum[n] + came
                outer[n] = outer[n] - 0.7 * (came + 0.9 * momentum[n])
                for r in replicas:
                    r.engine.write(n, outer[n])
    return losses, outer


@pytest.mark.parametrize(("layout", "options"), CASES)
def test_with_a_meeting_every_step_it_is_synchronous(layout: str, options: mtf.Options) -> None:
    """Plain means of plain gradient descent are gradient descent on all batches."""
    rare = trainer(model(mtf.SGD(0.1)), layout, options, "sites:period=1,rate=1,momentum=0")
    found = [r["loss"] for r in rare.fit(data(), 4)]
    whole = Trainer(model(mtf.SGD(0.1), 2 * ROWS), "x:1", engine="lockstep")
    pairs = zip(data(), islice(data(), 1, None), strict=False)
    batches = islice(pairs, 0, 8, 2)
    wanted = [whole.step({n: np.concatenate([a[n], b[n]]) for n in a})["loss"] for a, b in batches]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    for name in ("wi", "wo"):
        for copy in rare.engine.read(name):
            np.testing.assert_allclose(copy, whole.engine.read(name), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["", ",delay=1"])
def test_stored_shards_are_padded_where_devices_do_not_divide_them(stage: int, how: str) -> None:
    found = []
    for options in (mtf.Options({"wi": stage, "wo": stage}), mtf.Options()):
        rare = replace(options, diloco=mtf.DiLoCo.parse(f"sites:period=3{how}"))
        train = Trainer(model(mtf.Adam(3e-2)), "sites:2;data:3", "", rare, engine="lockstep")
        losses = [r["loss"] for r in train.fit(data(), 7)]
        stored = train.engine.program.variables
        assert bool(options.storage) == any(s.padded is not None for s in stored.values())
        found.append([losses, *(np.asarray(train.engine.read(n)) for n in sorted(stored))])
    for padded, plain in zip(*found, strict=True):
        np.testing.assert_allclose(padded, plain, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("how", ["bits=4", "fragments=2"])
def test_outer_steps_that_mix_elements_keep_variables_whole(how: str) -> None:
    """Codes share a scale, and fragments are slices, along dimensions that a padded one is among."""
    options = mtf.Options({"wi": 3, "wo": 3}, diloco=mtf.DiLoCo.parse(f"sites:period=4,{how}"))
    programs = model(mtf.Adam(3e-2)).replicas(mtf.Mesh("sites:2;data:3"), mtf.Layout(""), options)
    assert programs.where.paddable == {"wi": frozenset(), "wo": frozenset()}
    assert all(s.padded is None for s in programs.inner.variables.values())


@pytest.fixture(scope="module")
def apart() -> tuple[list[float], dict[str, np.ndarray]]:
    return alone(2, 3, lambda: mtf.Adam(3e-2), 7)


@pytest.mark.parametrize(("layout", "options"), CASES)
def test_replicas_train_as_if_alone(layout: str, options: mtf.Options, apart: Any) -> None:
    rare = trainer(model(mtf.Adam(3e-2)), layout, options, "sites:period=3")
    found = [r["loss"] for r in rare.fit(data(), 7)]
    losses, outer = apart
    np.testing.assert_allclose(found, losses, rtol=1e-10)
    for name, value in outer.items():
        np.testing.assert_allclose(rare.engine.read(f"{name}/outer"), value, rtol=1e-9, atol=1e-12)


def test_half_precision_has_its_master_copies() -> None:
    """What is stored split is the master copy; updates work on it, not on the half that is read."""
    found = []
    for options in (mtf.Options(), mtf.Options({"wi": 1, "wo": 2})):
        rare = trainer(model(mtf.SGD(1e-4), dtype="bfloat16"), "batch:data", options, "sites:period=2")
        began = np.array(rare.engine.read("wi"))
        rare.fit(data(), 3)
        found.append(np.asarray(rare.engine.read("wi")) - began)
    assert 0 < np.abs(found[0]).max() < 1e-3  # smaller than what half precision can say of the weights
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)


def test_replicas_drop_out_other_elements() -> None:
    same = next(data())
    rare = trainer(model(mtf.SGD(0.1), dropout=0.5), "batch:data", mtf.Options(), "sites:period=9")
    rare.step({name: np.stack([x, x]) for name, x in same.items()})
    one, other = rare.engine.read("wi")
    assert np.abs(one - other).max() > 1e-3


def test_what_crosses_the_axis_is_one_sum_of_the_variables_in_a_round() -> None:
    """Synchronous training sends as much in every step, of gradients of the same dtype."""
    rare = trainer(model(mtf.Adam(1e-2)), "batch:data;f:model", mtf.Options(), "sites:period=5")
    sent = []
    for _ in range(10):
        rare.fit(data(), rare.step_number + 1)
        assert rare.engine.communication_bytes["sites"] == 0
        assert rare._replicas is not None
        met = rare.step_number % 5 == 0
        sent.append(rare._replicas.meetings[0].communication_bytes["sites"] if met else 0)
    step = model(mtf.Adam(1e-2), 2 * ROWS).training_step()
    whole = mtf.lower(step.graph, mtf.Mesh(MESH), mtf.Layout("batch:sites;f:model"))  # gradients, no results
    engine = LockstepEngine(whole)
    engine.step({n: np.concatenate([x, x]) for n, x in next(data()).items()})
    assert engine.communication_bytes["sites"] > 0
    assert sent == [0, 0, 0, 0, engine.communication_bytes["sites"]] * 2


def test_a_collective_over_the_axis_is_a_defect() -> None:
    made = model(mtf.SGD(0.1))
    step = made.training_step()
    given = mtf.Options(diloco=mtf.DiLoCo("sites"))
    found = lower_replicas(step.graph, step.results, mtf.Mesh(MESH), mtf.Layout("batch:data"), given).inner
    reduce = next(i for i, _ in found.walk() if isinstance(i, AllReduce))
    wrong = tuple(replace(i, axes=("sites",)) if i is reduce else i for i in found.code)
    with pytest.raises(ProgramError, match="replicas along 'sites' must not communicate within a step"):
        check_alone(replace(found, code=wrong), "sites")


def test_a_resumed_training_is_the_same(tmp_path: Any) -> None:
    options = mtf.Options({"wi": 2})
    one = trainer(model(mtf.Adam(1e-2)), "batch:data", options, "sites:period=3")
    one.fit(data(), 7)
    two = trainer(model(mtf.Adam(1e-2)), "batch:data", options, "sites:period=3")
    two.fit(data(), 4, tmp_path)
    three = trainer(model(mtf.Adam(1e-2)), "f:model", mtf.Options(), "sites:period=3")
    three.fit(data(), 7, tmp_path)
    assert three.resumed["mesh"] == MESH
    with pytest.raises(mtf.UserError, match=", but this training has none; resume with the same diloco, or"):
        Trainer(model(mtf.Adam(1e-2)), "x:1", engine="lockstep").restore(tmp_path)
    for name in ("wi", "wi/outer", "wo/outer_momentum", "wo/adam_v"):
        np.testing.assert_allclose(three.engine.read(name), one.engine.read(name), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("options", [mtf.Options(), mtf.Options({"wi": 1, "wo": 3})])
def test_what_is_evaluated_is_what_replicas_have_in_common(options: mtf.Options) -> None:
    rare = trainer(model(mtf.SGD(0.1)), "batch:data;f:model", options, "sites:period=2")
    rare.fit(data(), 3)
    plain = Trainer(model(mtf.SGD(0.1)), "x:1", engine="lockstep")
    for name in ("wi", "wo"):
        plain.engine.write(name, rare.engine.read(f"{name}/outer"))
    held_out = [*islice(data(1), 3)]
    found, wanted = rare.evaluate(held_out), plain.evaluate(held_out)
    assert found == pytest.approx(wanted, rel=1e-12)


def normed(training: bool = True) -> mtf.Model:
    """With variables that no meeting touches: moving averages, and a whole number."""
    g = mtf.Graph()
    batch = mtf.Dim("batch", ROWS)
    x, y = g.input("x", [batch, D], "float32"), g.input("y", [batch, D], "float32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        w = g.variable("w", [D, F], mtf.Normal(0.5))
        h = mtf.layers.BatchNorm(("batch",), training=training)(mtf.einsum([h, w], [batch, F]))
        return mtf.einsum([mtf.tanh(h), g.variable("v", [F, D], mtf.Normal(0.5))], [batch, D])

    most = g.variable("most", [], mtf.ZEROS, "int32", trainable=False)
    loss = mtf.reduce_mean(mtf.square(mtf.scan(layer, x, LAYERS) - y))
    if training:
        g.assign(g.lookup("most"), mtf.maximum(most, (mtf.reduce_max(x) * 1000.0).cast("int32")))
    return mtf.Model(loss, mtf.SGD(0.1), {"most": most.cast("float32")})


@pytest.mark.parametrize("storage", [{}, {"w": 3, "norm/moving_mean": 3}])
def test_what_each_replica_has_for_itself_is_kept_as_one(storage: dict[str, int], tmp_path: Any) -> None:
    """Their mean, of whole numbers the largest, as saved and as evaluated."""
    rare = trainer(normed(), "batch:data;f:model", mtf.Options(storage), "sites:period=2")
    rare.fit(data(), 3)
    rare.save_weights(tmp_path / "all.npz")
    plain = Trainer(normed(), "x:1", engine="lockstep")
    plain.load(tmp_path / "all.npz")
    mean, most = (rare.engine.read(name) for name in ("norm/moving_mean", "most"))
    assert len(mean) == len(most) == 2 and np.ptp(mean, 0).any() and np.ptp(most)
    np.testing.assert_allclose(plain.engine.read("norm/moving_mean"), mean.mean(0), rtol=1e-6)
    assert plain.engine.read("most") == most.max()
    held_out = [*islice(data(1), 3)]
    for judged in (None, normed(training=False)):
        assert rare.evaluate(held_out, judged) == pytest.approx(plain.evaluate(held_out, judged), rel=1e-5)


def test_what_moves_inside_a_replica_stays_there() -> None:
    """The shortest way from one split to another leads over idle axes, but not over that of the replicas."""
    losses = []
    for layout in ("", "batch:data;length:model;positions:data+model"):
        g = mtf.Graph()
        batch, length, d = mtf.Dim("batch", 4), mtf.Dim("length", 8), mtf.Dim("d", 4)
        x = g.input("x", [batch, d], "float32")
        places = g.variable("places", [mtf.Dim("positions", 8), d], mtf.Normal(0.5), "float32")
        h = mtf.broadcast(x, [batch, length, d]) + mtf.rename(places, positions="length")
        made = mtf.Model(mtf.reduce_mean(mtf.square(h)), mtf.SGD(0.1))
        how = mtf.Options(diloco=mtf.DiLoCo.parse("sites:period=2"))
        rare = Trainer(made, "sites:2;data:4;model:2", layout, how, engine="lockstep")
        rows = ({"x": each["x"][:4]} for each in data())
        losses.append([result["loss"] for result in rare.fit(rows, 4)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.mark.parametrize("layout", ["", "batch:data;f:model"])
def test_replicas_begin_from_weights(layout: str, tmp_path: Any) -> None:
    """Of a synchronous training, as the paper does (section 3): in each replica, and where the first meeting
    starts."""
    before = Trainer(model(mtf.SGD(0.1)), "x:1", engine="lockstep")
    before.fit(data(), 2)
    before.save_weights(tmp_path / "before.npz")
    rare = trainer(model(mtf.SGD(0.1)), layout, mtf.Options({"wi": 2}), "sites:period=1")
    loaded = rare.load(tmp_path / "before.npz")
    assert set(loaded.variables) == {"wi", "wo"} and not loaded.unused
    for name in ("wi", "wo"):
        want = before.engine.read(name)
        np.testing.assert_array_equal(rare.engine.read(f"{name}/outer"), want)
        np.testing.assert_array_equal(rare.engine.read(name), [want, want])
    rare.save_weights(tmp_path / "after.npz")
    again = Trainer(model(mtf.SGD(0.1)), "x:1", engine="lockstep")
    again.load(tmp_path / "after.npz")
    np.testing.assert_array_equal(again.engine.read("wi"), before.engine.read("wi"))


@pytest.mark.parametrize(
    ("said", "layout", "error"),
    [
        ("site", "", "diloco: mesh sites:2;data:2;model:2 has no axis 'site'; did you mean 'sites'"),
        ("sites", "batch:sites", "axis 'sites' separates the replicas of DiLoCo, so it cannot"),
        ("sites:period=0", "", "the period must be at least 1 step, found"),
        ("sites:period=often", "", "period='often' is not a whole number; write e.g. period=30"),
        ("sites:rate=much", "", "rate='much' is not a number; write e.g. rate=0.7"),
        ("sites:rate=0", "", "the outer learning rate must be positive and finite, found 0"),
        ("sites:momentum=1", "", "the outer momentum must be in"),
        ("sites:perod=3", "", "unknown setting 'perod'; did you mean 'period'"),
        ("sites:period=3,period=4", "", "period is given twice; remove one of them"),
        (":period=3", "", "begin with the mesh axis of the replicas, e.g. sites:period=30"),
    ],
)
def test_errors(said: str, layout: str, error: str) -> None:
    with pytest.raises(mtf.UserError, match=error):
        trainer(model(mtf.SGD(0.1)), layout, mtf.Options(), said)


@pytest.mark.parametrize(
    ("layout", "schedule", "what"),
    [("layers:data", "gpipe", "pipeline stages of layers"), ("", "circular:2", "schedule circular:2")],
)
def test_replicas_have_no_stages(layout: str, schedule: str, what: str) -> None:
    options = mtf.Options(microbatches=2, schedule=schedule)
    with pytest.raises(
        mtf.LayoutError, match=f"diloco sites:.* cannot be combined with {what}: a replica cannot be split"
    ):
        trainer(model(mtf.SGD(0.1)), layout, options, "sites")


def test_its_text() -> None:
    said = mtf.DiLoCo("pod", 100, 0.5, 0.8)
    assert str(said) == "pod:period=100,rate=0.5,momentum=0.8" and mtf.DiLoCo.parse(str(said)) == said
    assert mtf.DiLoCo.parse("pod") == mtf.DiLoCo("pod", 30, 0.7, 0.9)


def example() -> tuple[mtf.Model, Mapping[str, Any]]:
    """For engines: a model, and where and how it trains."""
    options = mtf.Options({"wi": 3, "wo": 1}, diloco=mtf.DiLoCo("sites", 4, fragments=2, bits=4, delay=1))
    return model(mtf.SGD(0.1), dropout=0.2), {
        "mesh": "sites:2;data:2",
        "layout": "batch:data",
        "options": options,
    }
