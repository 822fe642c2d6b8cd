"""Search on a machine that is priced op by op: what is minimised is what is priced."""

from __future__ import annotations

import dataclasses

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import CollectiveCurve, Curve, Number, preset_content, write_profile
from costmodels.pricing.items import Called
from costmodels.pricing.pricer import pricer
from examples.mlp import model as mlp
from examples.resnet import model as resnet
from examples.transformer_lm import model as transformer
from mesh_tf_core import Layout, Mesh
from mesh_tf_core.ir.program import ReduceScatter
from mesh_tf_core.ops.shape import SliceDim
from tests.marks import by_day
from tests.searching import search

MESH = Mesh("data:2;model:2")


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A made-up machine whose curves are not straight, so that nothing adds up by chance."""
    content = preset_content("cpu-local")
    common = {
        "dtype": "float32",
        "against": "bytes",
        "devices": 4,
        "source": "made up for a test",
        "date": "2026",
    }

    def curve(name: str, start: float, rate: float) -> dict[str, object]:
        points = [[0.0, start], [1e4, start + 2e4 * rate], [1e6, start + 1.1e6 * rate]]
        against = "flops" if name == "kernel.matmul" else "bytes"
        return {**common, "op_class": name, "points": points, "against": against}

    content["compute_curves"] = [
        curve("kernel", 2e-6, 1e-10),
        curve("kernel.fresh", 0.0, 3e-11),
        curve("kernel.unary.gelu", 9e-6, 4e-10),
        curve("kernel.matmul", 5e-6, 4e-12),
        curve("kernel.batch", 6e-6, 5e-12),
        curve("kernel.step", 1e-4, 0.0),
        curve("kernel.store", 2e-6, 0.0),
        curve("data", 1e-6, 1e-10),
    ]
    return write_profile(content, tmp_path_factory.mktemp("machine") / "made-up.json")


@pytest.fixture(scope="module")
def processes(machine):
    """The same machine's cores in processes of two devices, between which messages are slow."""
    curves = tuple(
        CollectiveCurve(
            kind, n, 4, Curve(((8e3, over * 1e-4), (1e6, over * 5e-4))), "a test", "2026", None, over
        )
        for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute")
        for n, over in ((2, 1), (2, 3), (4, 3))
    )
    topology = dataclasses.replace(
        machine.topology, devices_per_process=Number(2.0, "2", "made up for a test", "2026")
    )
    return dataclasses.replace(machine, topology=topology, collective_curves=curves)


@pytest.mark.parametrize(
    "model",
    [
        mlp(batch=16, hidden=64),
        transformer(layers=3, d_model=64, batch=8, length=32),
        resnet(batch=4, size=8, channels=4, stages=1, blocks=1, groups=2),
    ],
)
@pytest.mark.parametrize("home", by_day(["machine", "processes"], first=1))
@pytest.mark.one_in(3)
def test_tables_add_up_to_the_price(request, home, model):
    machine = request.getfixturevalue(home)
    plan = search(model, mesh=MESH, hardware=machine, microbatches=(1,))
    assert plan.data.solver.status == "OPTIMAL"
    assert plan.data.solver.gap == 0.0
    assert not [n for n in plan.data.notes if "tables" in n]
    found = pricer(machine, MESH).cost(model.lower(MESH, plan.layout, plan.options)).step_seconds
    assert plan.data.solver.objective == pytest.approx(found, rel=1e-9)


def test_a_step_has_a_part_that_no_layout_changes(machine):
    model, prices = mlp(batch=16, hidden=64), pricer(machine, MESH)
    costs = [prices.cost(model.lower(MESH, Layout(x))) for x in ("", "batch:data", "hidden:model")]
    assert {c.by(lambda line: line.kind)["step"] for c in costs} == {
        prices.fixed_seconds(model.lower(MESH, Layout()))
    }
    assert len({c.step_seconds for c in costs}) == 3


def test_forms_of_a_function_take_as_long_as_it(machine):
    """One form of GELU is measured."""

    def seconds(fn):
        graph = mtf.Graph(fn)
        x = graph.input("x", [mtf.Dim("batch", 512), mtf.Dim("d", 64)], "float32")
        made = mtf.reduce_sum(mtf.layers.base.activation(fn)(x))
        return pricer(machine, MESH).cost(mtf.lower(graph, MESH, Layout(""), {"y": made})).step_seconds

    assert seconds("gelu") == seconds("gelu_exact") == seconds("gelu_new") > seconds("relu")


@pytest.mark.parametrize(("channels", "cut"), [(4, 2), (32, 0)])
def test_narrow_rows_are_cut_one_by_one(machine, channels, cut):
    """Scattered between two devices, rows of 4 channels are cut at 8 bytes; those of 32 at 64, a line."""
    model = resnet(batch=4, size=8, channels=channels, stages=1, blocks=1, groups=2)
    program = model.lower(MESH, Layout("channels:data"))
    scattered = sum(isinstance(instr, ReduceScatter) for instr, _ in program.walk())
    copies = [x for x in pricer(machine, MESH).lines(program) if isinstance(x.item, Called)]
    copies = [x for x in copies if isinstance(x.item.op, SliceDim)]
    assert scattered == 2
    assert len(copies) == cut * scattered


def test_stacks_of_a_forward_loop_are_never_joined(machine):
    prices = pricer(machine, MESH)
    program = transformer(layers=3, d_model=64, batch=8, length=32).lower(MESH, Layout("batch:data"))
    stacked = [line for line in prices.lines(program) if line.name == "stack"]
    assert stacked
    assert {line.origin.phase for line in stacked} == {"backward"}


def test_between_processes_values_travel_together_and_stacks_are_joined(processes):
    prices = pricer(processes, MESH)
    program = transformer(layers=3, d_model=64, batch=8, length=32).lower(MESH, Layout("batch:data"))
    lines = list(prices.lines(program))
    assert {line.origin.phase for line in lines if line.name == "stack"} >= {"forward", "backward"}
    message = max((x for x in lines if x.name == "all_reduce"), key=lambda x: len(x.item.payloads))
    assert message.item.together
    latency, many = prices.message_seconds(("data",), 1), len(message.item.payloads)
    alone = [prices.message_seconds(("data",), b) for b in message.item.payloads]
    assert many > 1
    assert message.seconds == pytest.approx(sum(alone) - (many - 1) * latency)


def test_the_search_keeps_what_talks_most_inside_of_a_process(processes):
    """The axes are alike but for the ranks along them."""
    plan = search(mlp(batch=16, hidden=64), mesh=MESH, hardware=processes)
    inside, across = (
        pricer(processes, MESH).cost(mlp(batch=16, hidden=64).lower(MESH, Layout(x))).communication_seconds
        for x in ("batch:model", "batch:data")
    )
    assert 0 < inside < across
    assert "data" not in str(plan.layout)


def test_parts_of_a_stack_are_summed_one_by_one(machine):
    prices = pricer(machine, MESH)
    few, many = (
        transformer(layers=n, d_model=64, batch=8, length=32).lower(MESH, Layout("batch:data"))
        for n in (2, 4)
    )
    one, two = (
        sum(x.seconds * x.times for x in prices.lines(p) if x.name == "all_reduce" and "stack" not in x.name)
        for p in (few, many)
    )
    assert one < two
