"""Gathers and scatters in chunks beside products (collective matmul): what is sent beside what, and the
numbers of one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.overlap import overlapped
from costmodels.pricing.pricer import pricer
from examples import transformer_lm
from layoutopt.optimize.evaluation.evaluator import evaluate
from mesh_tf_core.engines import open_engine
from mesh_tf_core.ir.instructions import STEP
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Instr, Loop, Permute, Program
from mesh_tf_core.ops import chunks
from tests.core.test_elsewhere import MODELS, SEQUENCE, grown
from tests.examples.helper import SMALL, check_same, train
from tests.examples.hunt import Hunt, alone
from tests.marks import by_day

ALL = frozenset({"d_ff", "heads", "vocab"})
RING = "heads:model;d_ff:model;vocab:model;length@elsewhere:model"
WAYS: tuple[dict[str, Any], ...] = tuple(
    {**more, "collective_matmul": dims}
    for more in ({}, {"microbatches": 2}, {"recompute": True}, {"storage": "zero3"}, {"storage": "zero2@x"})
    for dims in (ALL, frozenset({"d_ff"}), frozenset({"heads", "batch", "d_model"}))
)
HUNT = Hunt(MODELS, WAYS, grown)


def sized(devices: int) -> dict[str, Any]:
    """Of a model that so many devices share."""
    own = {"heads": devices, "d_ff": 2 * devices, "length": 2 * devices, "vocab": 4 * devices}
    return {**SMALL, "gated": True, "batch": 2, **own}


def lowered(devices: int, dims: frozenset[str] = ALL, **options: Any) -> Program:
    mesh, chosen = mtf.Mesh(f"data:2;model:{devices}"), mtf.Options(collective_matmul=dims, **options)
    return transformer_lm.model(**sized(devices)).lower(mesh, mtf.Layout(SEQUENCE), chosen)


def inside(code: Sequence[Instr]) -> Iterator[Instr]:
    for instr in code:
        yield instr
        if isinstance(instr, Loop):
            yield from inside(instr.body)


def in_a_layer(program: Program, phase: str) -> Counter[str]:
    """Messages over `model` in a layer, those of inner loops once, and products; by name."""
    loops = [i for i in program.code if isinstance(i, Loop) and i.dim.name == "layers"]
    found = (i for loop in loops for i in inside(loop.body) if i.origin.phase == phase)
    return Counter(i.name for i in found if getattr(i, "axes", ("model",)) == ("model",))


@pytest.mark.parametrize(("devices", "forward"), [(2, 4), (3, 8), (4, 12)])
def test_every_message_of_a_layer_goes_in_chunks(devices: int, forward: int) -> None:
    """Two gathers and two scatters forward, of n - 1 chunks each; backward four and two."""
    program = lowered(devices)
    for phase, chunks_sent in (("forward", forward), ("backward", forward * 3 // 2)):
        sent = in_a_layer(program, phase)
        assert not sent["all_gather"] and not sent["reduce_scatter"]
        assert sent["permute"] == chunks_sent


def test_chunks_are_as_many_bytes_as_the_whole() -> None:
    """But for gathers that backward would share with forward's second run."""
    for devices in (2, 4, 6):
        bytes = [lowered(devices, dims).communication_bytes()["model"] for dims in (frozenset(), ALL)]
        assert bytes[0] == pytest.approx(bytes[1])


def test_only_products_with_a_dimension_that_is_named() -> None:
    sent = in_a_layer(lowered(4, frozenset({"d_ff"})), "forward")
    assert (sent["all_gather"], sent["reduce_scatter"], sent["permute"]) == (1, 1, 6)
    plain = lowered(4, frozenset({"d_model"}))  # which no axis splits
    assert plain.code == lowered(4, frozenset()).code


def test_queries_keys_and_values_share_what_comes() -> None:
    """Keys are products of the same positions under another name: one gather serves the three."""
    loops = [i for i in lowered(2).code if isinstance(i, Loop) and i.dim.name == "layers"]
    puts = (getattr(i, "op", None) for i in loops[0].body)
    into = Counter(op.dim for op in puts if isinstance(op, chunks.ChunkPut))
    assert into == {"length": 3, "memory_length": 2}  # of q, wi and wg; of k and v
    assert in_a_layer(lowered(2), "forward")["permute"] == 4


@pytest.mark.parametrize("devices", by_day([2, 3, 4, 5, 7, 8, 12, 16], first=6, every=3))
def test_rings_of_any_size(devices: int) -> None:
    """From 7 devices on turns of scatters are a loop, from 12 on those of gathers too."""
    sizes = sized(devices)
    found = train(transformer_lm, sizes, f"model:{devices}", RING, 2, collective_matmul=ALL)
    check_same(found, alone(transformer_lm, tuple(sorted(sizes.items())), 2))


@pytest.mark.nightly
def test_the_local_engine_runs_them() -> None:
    sizes = sized(3)
    found = train(transformer_lm, sizes, "model:3", RING, 2, engine="local", collective_matmul=ALL)
    check_same(found, alone(transformer_lm, tuple(sorted(sizes.items())), 2))


@pytest.mark.parametrize("devices", [2, 5, 8])
def test_messages_go_beside_products_that_wait_for_none(devices: int) -> None:
    program = lowered(devices)
    sent = [i for i, _ in program.walk() if isinstance(i, Permute) and i.rule == STEP]
    found = overlapped(program, lambda _: 0.0)
    makers = {o: i for i, _ in program.walk() for o in i.outputs}

    def needs(id: int, message: Permute) -> bool:
        made = makers.get(id)
        if made is message:
            return True
        return (
            made is not None
            and made.outputs > message.outputs
            and any(needs(i, message) for i in made.inputs)
        )

    assert sent
    for message in sent:
        between = found[message.outputs[0]].between
        assert between and all(0 < part <= 1 for _, part in between)
        assert not any(needs(i, message) for product, _ in between for i in product.inputs)


def test_what_hides_is_at_most_the_products() -> None:
    sizes = {"layers": 8, "d_model": 4096, "d_kv": 128, "heads": 32, "d_ff": 16384, "vocab": 32768}
    model = transformer_lm.model(**sizes, batch=16, length=2048, dtype="bfloat16")
    mesh, machine = mtf.Mesh("data:16;model:4"), load_hardware("tpu-v4")
    seconds = []
    for dims in (frozenset[str](), ALL):
        options = mtf.Options(collective_matmul=dims)
        cost = evaluate(model, mesh, mtf.Layout(f"{SEQUENCE};vocab:model"), machine, options).cost
        rings = [x for x in cost.lines if x.purpose == "ring"]
        hidden = sum((x.seconds - x.exposed) * x.times for x in rings)
        products = sum(x.seconds * x.times for x in cost.lines if x.name in ("einsum", "addproduct"))
        assert hidden <= products
        seconds.append(cost.step_seconds)
    assert seconds[1] < seconds[0]


def test_what_comes_last_is_added_by_a_kernel_of_its_own() -> None:
    """A device's own chunk is multiplied beside the last messages, so no kernel both makes and adds it; the
    TPU compiler has an addition of three there (v5e:2x2, 2026-11-24)."""
    graph, (b, t, d, f) = mtf.Graph(), (mtf.Dim(n, 64) for n in ("batch", "length", "d_model", "d_ff"))
    h, w = graph.input("h", [b, t, f], "bfloat16"), graph.variable("w", [f, d], mtf.ZEROS, "bfloat16")
    out, options = mtf.einsum([h, w], [b, t, d]), mtf.Options(collective_matmul=frozenset({"d_ff"}))
    layout = mtf.Layout("d_ff:model;length@elsewhere:model")
    program = mtf.lower(graph, mtf.Mesh("model:4"), layout, {"out": out}, options)
    lines = pricer(load_hardware("tpu-v4"), program.mesh).cost(program).lines
    kernels = [x.name for x in lines if x.name in ("einsum", "addproduct", "addn")]
    assert kernels == ["einsum", "einsum", "addproduct", "einsum", "addn"]


def two_products(how: str) -> mtf.Model:
    b, t, d, f = mtf.Dim("batch", 3), mtf.Dim("length", 12), mtf.Dim("d_model", 4), mtf.Dim("d_ff", 8)
    g = mtf.Graph()
    x = g.input("x", [b, t, d], "float64")
    wi = g.variable("wi", [d, f], mtf.Normal(0.5), "float64")
    wo = g.variable("wo", [f, d], mtf.Normal(0.5), "float64")
    vo = g.variable("vo", [f, d], mtf.Normal(0.5), "float64")
    h = mtf.tanh(mtf.einsum([x, wi], [b, t, f]))
    one, more = mtf.einsum([h, wo], [b, t, d]), mtf.square(h)
    if how == "-":
        y = one - mtf.einsum([more, vo], [b, t, d])
    elif how == "fewer":
        y = one + mtf.einsum([mtf.reduce_mean(more, b), vo], [t, d])
    else:
        y = one + mtf.einsum([more, vo], [b, t, d] if how == "+" else [t, b, d])
    return mtf.Model(mtf.reduce_mean(mtf.square(mtf.tanh(y) + x)), mtf.SGD(0.3))


@pytest.mark.parametrize(("how", "scatters"), [("+", 0), ("-", 1), ("other order", 1), ("fewer", 1)])
def test_what_came_is_added_to_equal_terms_alone(how: str, scatters: int) -> None:
    """A scatter of a difference, or of terms whose dimensions differ, stays whole."""
    x, losses = np.random.default_rng(1).normal(size=(3, 12, 4)), []
    for mesh, layout in (("one:1", ""), ("model:4", "d_ff:model;length@elsewhere:model")):
        program = two_products(how).lower(
            mtf.Mesh(mesh), mtf.Layout(layout), mtf.Options(collective_matmul=frozenset({"d_ff"}))
        )
        engine = open_engine(program, "lockstep")
        losses.append([float(engine.step({"x": x})["loss"]) for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    names = [i.name for i, _ in program.walk() if i.origin.phase == Phase.FORWARD]
    assert names.count("reduce_scatter") == scatters


@pytest.mark.parametrize("devices", [4, 12])
def test_both_operands_of_a_product_are_gathered(devices: int) -> None:
    """Over two axes; from 12 devices on a loop of turns reads the other operand, too."""
    t, d, m, f = (
        mtf.Dim(name, size) for name, size in zip("tdmf", (2 * devices, 4, 4, devices), strict=True)
    )
    g = mtf.Graph()
    x, y = g.input("x", [t, d], "float64"), g.input("y", [m, f], "float64")
    model = mtf.Model(mtf.reduce_mean(mtf.square(mtf.einsum([mtf.tanh(x), mtf.tanh(y)], [t, d, m, f]))))
    random, losses = np.random.default_rng(1), []
    feeds = {n: random.normal(size=v.shape.sizes) for n, v in (("x", x), ("y", y))}
    for mesh, layout in (("one:1", ""), (f"a:{devices};b:2", "d:b;f:a;t@elsewhere:a;m@elsewhere:b")):
        options = mtf.Options(collective_matmul=frozenset("df"))
        program = model.lower(mtf.Mesh(mesh), mtf.Layout(layout), options)
        losses.append(float(open_engine(program, "lockstep").step(feeds)["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert "all_gather" not in {i.name for i, _ in program.walk()}


def test_a_product_of_three_has_no_part_in_it() -> None:
    d, f, h = mtf.Dim("d_model", 4), mtf.Dim("d_ff", 4), mtf.Dim("heads", 4)
    g = mtf.Graph()
    x, y, z = g.input("x", [d, f]), g.input("y", [f, h]), g.input("z", [d])
    model = mtf.Model(mtf.reduce_sum(mtf.einsum([x, y, z], [h])))
    with pytest.raises(mtf.UserError, match="collective matmul of 'd_ff': no matrix product has this"):
        model.lower(mtf.Mesh("one:1"), mtf.Layout(""), mtf.Options(collective_matmul=frozenset({"d_ff"})))


def test_terms_that_call_the_positions_otherwise() -> None:
    """Queries and keys, where an axis splits both names of the positions."""
    layout = "heads:model;length:data;memory_length:data;length@elsewhere:model"
    sizes = sized(4)
    found = train(transformer_lm, sizes, "data:2;model:4", layout, 2, collective_matmul=ALL)
    check_same(found, alone(transformer_lm, tuple(sorted(sizes.items())), 2))


def test_unknown_dimensions_are_named() -> None:
    with pytest.raises(mtf.UserError, match="collective matmul of 'dff': no matrix product has this"):
        lowered(2, frozenset({"dff"}))


FAULTS: dict[str, tuple[type, str, Any]] = {
    "a chunk is taken for its neighbour's": (
        chunks.ChunkNumber,
        "kernel",
        lambda op, k, at, own, *turns: own,
    ),
    "what came is not added": (
        chunks.AddProduct,
        "kernel",
        lambda op, k, at, *slices: slices[-1],
    ),
    "a chunk is put nowhere": (chunks.ChunkPut, "kernel", lambda op, k, at, x, chunk, number: x),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, method, wrong = FAULTS[fault]
    sizes = sized(4)
    want = alone(transformer_lm, tuple(sorted(sizes.items())), 2)
    monkeypatch.setattr(kind, method, wrong)
    found = train(transformer_lm, sizes, "model:4", RING, 2, collective_matmul=ALL)
    assert not np.allclose(found[0], want[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "seed"),
    by_day([*(("language model", s) for s in range(1, 5)), *((n, 4) for n in [*MODELS][1:])]),
)
@pytest.mark.one_in(3)
def test_the_numbers_of_one_device(name: str, seed: int) -> None:
    HUNT.check(name, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 200, 20))
@pytest.mark.parametrize("name", MODELS)
def test_many_layouts(name: str, first: int) -> None:
    for seed in range(first, first + 20):
        HUNT.check(name, 1000 + seed)
