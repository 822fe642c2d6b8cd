"""Rules for elsewhere (sequence parallelism): as text, refused, what they send and hold, and the numbers of
one device under them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.liveness import memory
from examples import moe_lm, transformer_lm, transformer_seq2seq
from mesh_tf_core.engines import open_engine
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllGather, AllReduce, Loop, Program, ReduceScatter
from tests.examples.helper import SMALL
from tests.examples.hunt import Hunt, Legal
from tests.marks import by_day

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "language model": (transformer_lm, {**SMALL, "gated": True, "clip_norm": 1.0, "kv_heads": 2}),
    "mixture of experts": (moe_lm, {**SMALL, "experts": 4, "optimizer": "adafactor"}),
    "encoder and decoder": (transformer_seq2seq, {**SMALL, "optimizer": "sgd"}),
}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"microbatches": 2},
    {"recompute": True},
    {"storage": "zero3"},
    {"storage": "zero2@x", "microbatches": 2},
    {"storage": "zero1@y"},
)
TENSOR = "batch:data;heads:model;d_ff:model"
SEQUENCE = f"{TENSOR};length@elsewhere:model"


def test_rules_are_read_and_written() -> None:
    layout = mtf.Layout(f"{SEQUENCE};batch@a:none")
    assert mtf.Layout(str(layout)) == layout and hash(mtf.Layout(str(layout))) == hash(layout)
    assert layout == mtf.Layout(layout.written, {"a": {"batch": ()}}) != mtf.Layout(dict(layout))
    assert dict(layout) == dict(mtf.Layout(TENSOR)) and layout.used == {"data", "model"}
    assert layout.at("a/b").around(["batch", "length"]) == mtf.Layout("heads:model;d_ff:model;length:model")
    assert layout.renamed({"model": "m"}).elsewhere == (("length", ("m",)),)


def test_they_hold_where_the_axis_splits_nothing_else() -> None:
    layout = mtf.Layout("length:a;heads:b;length@elsewhere:b+c")
    assert layout.around(["length", "d_model"]).axes("length") == ("a", "b", "c")
    assert layout.around(["length", "heads"]).axes("length") == ("a",)
    assert layout.around(["d_model"]) == mtf.Layout("length:a;heads:b")
    here = mtf.Layout("length@norm:none;length@elsewhere:b")
    assert here.at("norm").around(["length"]).axes("length") == ()  # what a place says itself


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("lenght@elsewhere:model", "no operation has a dimension 'lenght'; did you mean 'length'"),
        ("length@elsewhere:modle", "has no axis 'modle'; did you mean 'model'"),
        (
            "length:model;length@elsewhere:model",
            "is already split over model in every operation; remove these",
        ),
        (
            "length:data;length@elsewhere:model+three",
            "which is not divisible by the 12 devices of data+model",
        ),
        ("layers@elsewhere:model", ", because its iterations "),
    ],
)
def test_mistakes_are_named(layout: str, said: str) -> None:
    with pytest.raises(mtf.UserError) as refused:
        transformer_lm.model(**SMALL).lower(mtf.Mesh("data:2;model:2;three:3"), mtf.Layout(layout))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def lowered(layout: str, **options: Any) -> Program:
    found = transformer_lm.model(**{**SMALL, "layers": 2, "batch": 4, "length": 64})
    return found.lower(mtf.Mesh("data:2;model:4"), mtf.Layout(layout), mtf.Options(**options))


def inside(program: Program, kind: type, phase: str) -> int:
    """Collectives over `model` in a layer."""
    loops = [i for i, _ in program.walk() if isinstance(i, Loop) and i.dim.name == "layers"]
    body = [i for loop in loops for i in loop.body if i.origin.phase == phase]
    return sum(isinstance(i, kind) and i.axes == ("model",) for i in body)


def test_a_layer_sends_what_the_paper_says() -> None:
    """Korthikanti et al. 2022, figure 5: forward gathers and scatters around attention and around the feed
    forward; backward the same, and gathers once more the input of each product (section 4.2.2)."""
    split, whole = lowered(SEQUENCE), lowered(TENSOR)
    counts = {
        (kind.name, phase): inside(split, kind, phase)
        for kind in (AllGather, ReduceScatter, AllReduce)
        for phase in ("forward", "backward")
    }
    assert counts == {
        ("all_gather", "forward"): 2,
        ("all_gather", "backward"): 4,
        ("reduce_scatter", "forward"): 2,
        ("reduce_scatter", "backward"): 2,
        ("all_reduce", "forward"): 0,
        ("all_reduce", "backward"): 0,
    }
    assert [inside(whole, AllReduce, phase) for phase in ("forward", "backward")] == [2, 2]


def test_what_layers_save_is_divided() -> None:
    """All of a layer's values then are split over the axis: its own by products, the others by the rule."""
    saved = [_saved(lowered(layout)) for layout in (TENSOR, SEQUENCE)]
    split = [(name, bytes) for name, bytes in saved[1].items() if "length" in name]
    assert split and all(
        bytes * 4 == saved[0][name] for name, bytes in split if "heads" not in name and "d_ff" not in name
    )
    assert memory(lowered(SEQUENCE)).peak < 0.6 * memory(lowered(TENSOR)).peak


def _saved(program: Program) -> dict[tuple[str, ...], int]:
    """Bytes of a device that forward loops stack, by their dimensions."""
    found: dict[tuple[str, ...], int] = {}
    for loop in (i for i, _ in program.walk() if isinstance(i, Loop) and i.origin.phase == Phase.FORWARD):
        for result in loop.stacked:
            value = program.values[result.outer]
            found[value.shape.names] = found.get(value.shape.names, 0) + value.local_bytes(program.mesh)
    return found


def test_gradients_of_small_parameters_are_summed_over_the_axis() -> None:
    """Each device has those of its part of the length."""
    program = lowered(SEQUENCE)
    summed = [
        program.values[i].shape.names
        for instr, _ in program.walk()
        if isinstance(instr, AllReduce) and instr.axes == ("data", "model")
        for i in instr.inputs
        if instr.origin.phase == Phase.BACKWARD
    ]
    assert summed.count(("layers", "d_model")) == 2 and ("d_model",) in summed  # of the norms


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved:2"])
def test_outside_of_stages_it_holds_over_their_axis(schedule: str) -> None:
    """What comes before and behind the layers is divided between the stages; inside, the axis tells them
    apart."""
    found = transformer_lm.model(**{**SMALL, "layers": 4, "optimizer": "sgd"})
    layout = "layers:pipe;heads:t;d_ff:t;length@elsewhere:pipe"
    how = mtf.Options(microbatches=2, schedule=schedule)
    program = found.lower(mtf.Mesh("pipe:2;t:2"), mtf.Layout(layout), how)
    ends = [i for i, _ in program.walk() if i.origin.scope == "output" and i.name == "einsum"]
    assert ends and all("pipe" in _axes(program, i.outputs[0]) + _axes(program, i.inputs[0]) for i in ends)
    layers = [i for i, _ in program.walk() if i.origin.scope == "feed_forward" and i.name == "einsum"]
    assert layers and all(_axes(program, o) in ((), ("t",)) for i in layers for o in i.outputs)
    states = [
        i.name
        for i, _ in program.walk()
        if isinstance(i, AllReduce | ReduceScatter)
        and i.axes == ("pipe",)
        and program.values[i.inputs[0]].shape.names == ("batch", "length", "d_model")
    ]
    assert states and set(states) == {"reduce_scatter"}
    whole = found.lower(mtf.Mesh("one:1"), mtf.Layout())
    mine, its = trained(program), trained(whole)
    for name, x in its.items():
        np.testing.assert_allclose(mine[name], x, 2e-4, 2e-5, err_msg=name)


def _axes(program: Program, value: int) -> tuple[str, ...]:
    return tuple(axis for axes in program.values[value].splits for axis in axes)


def trained(program: Program) -> dict[str, Any]:
    """The variables after a step; what is sent is what the program says."""
    engine, rng = open_engine(program, "lockstep"), np.random.default_rng(0)
    ids = {name: program.values[i] for name, i in sorted(program.feeds.items())}
    fed = {n: rng.integers(0, 8, v.shape.size).reshape(v.shape.sizes).astype(v.dtype) for n, v in ids.items()}
    engine.step(fed)
    assert engine.communication_bytes == program.communication_bytes()
    return {name: np.asarray(engine.read(name)) for name in program.variables}


def grown(rng: random.Random, graph: mtf.Graph, legal: Legal) -> mtf.Layout:
    """Random rules, one of them at least for elsewhere."""
    dims, layout, most = sorted(graph.dims()), mtf.Layout(), rng.randint(7, 22)
    for step in range(60):
        if step > most and layout.elsewhere:
            break
        dim, axes = rng.choice(dims), rng.choice([("x",), ("y",), ("x", "y")])
        rule = "length@elsewhere" if not layout.elsewhere else rng.choice([dim, dim, f"{dim}@elsewhere"])
        more = mtf.Layout({**layout.written, rule: axes})
        layout = more if legal(more) else layout
    assert layout.elsewhere
    return layout


HUNT = Hunt(MODELS, WAYS, grown)


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
