"""The TPU engine as far as a machine without a TPU shows it: the graph that TPUStrategy builds, the replica
function compiled by XLA and run on CPU devices, the torus, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from mesh_tf_core.engines import open_engine
from mesh_tf_core.engines.tf.tpu_collectives import TpuOps
from mesh_tf_core.engines.tf.tpu_home import asked_numbers, places
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import AllReduce, Collective, Loop, Permute
from tests.engines.programs import every_collective, language_model
from tests.engines.tpu_cases import CASES
from tests.engines.tpu_fake import StepGraph, strategy
from tests.jax_process import printed

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    "data": ("data:8", "batch:data"),
    "model": ("model:8", "heads:model;d_ff:model;vocab:model"),
    "2x4": ("data:2;model:4", "batch:data;heads:model;d_ff:model;vocab:model"),
}


def operations(program, numbers):
    """(operation, groups or pairs) that the program's collectives are, one per value, sorted."""
    found = []
    for instr, _ in program.walk():
        if not isinstance(instr, Collective):
            continue
        groups = [[numbers[rank] for rank in group] for group in program.mesh.groups(instr.axes)]
        name = {"reduce_scatter": "XlaReduceScatter", "permute": "CollectivePermute"}.get(
            instr.name, "AllToAll"
        )
        if isinstance(instr, AllReduce):
            name = "CrossReplicaSum" if instr.combine == "sum" else "XlaAllReduce"
        if isinstance(instr, Permute):
            groups = [[group[i], group[to]] for group in groups for i, to in instr.links(len(groups[0]))]
        found += [(name, groups)] * len(instr.inputs)
    return sorted(found)


def model(name, **hparams):
    return language_model(*LAYOUTS[name], **{"heads": 8, "vocab": 24, **hparams})


# -- the graph -----------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_graph_has_the_programs_collectives(name):
    program = model(name)
    graph = StepGraph(program, 2, 4, 1, 1)
    assert graph.collectives() == operations(program, range(8)) != []
    bytes_ = {axes: n for axes, n in program.communication_bytes().items() if n}
    assert graph.sent == pytest.approx(bytes_)


def test_every_collective_and_the_numbers_of_the_replicas():
    numbers = (3, 1, 7, 0, 6, 2, 5, 4)
    program = every_collective("a:2;b:4", ("b", "a"), "float32")
    graph = StepGraph(program, 2, 2, 1, 2, numbers=numbers)
    assert graph.collectives() == operations(program, numbers)
    assert {name for name, _ in graph.collectives()} == {
        "AllToAll",
        "CollectivePermute",
        "CrossReplicaSum",
        "XlaAllReduce",
        "XlaReduceScatter",
    }


def test_variables_are_shards_that_nobody_aggregates():
    program = model("2x4")
    graph = StepGraph(program, 2, 4, 1, 1)
    for name, stored in program.variables.items():
        sizes = [
            d.size // program.mesh.group_size(axes)
            for d, axes in zip(stored.variable.shape, stored.splits, strict=True)
        ]
        assert graph.shapes[name] == {tuple(sizes)}
    assert any(
        graph.shapes[name] != {stored.variable.shape.sizes} for name, stored in program.variables.items()
    )
    assert graph.kinds == {(tf.VariableSynchronization.ON_READ, tf.VariableAggregation.NONE)}


@pytest.mark.nightly
def test_replicas_and_layers_add_no_nodes():
    small, large = (
        StepGraph(language_model(f"data:{n};model:4", LAYOUTS["2x4"][1], layers=layers), n, 4, 1, 1)
        for n, layers in ((2, 2), (8, 6))
    )
    assert len(small.replica()) == len(large.replica()) > 500


@pytest.mark.nightly
def test_several_steps_are_one_call():
    program = model("data")
    loops = sum(isinstance(instr, Loop) for instr, _ in program.walk())
    one, many = (StepGraph(program, 2, 4, 1, 1, count=n) for n in (1, 5))
    for graph, whiles in ((one, loops), (many, loops + 1)):
        ops = [node.op for node in graph.nodes]
        assert ops.count("TPUReplicateMetadata") == 1
        assert ops.count("While") + ops.count("StatelessWhile") == whiles
        assert ops.count("AssignVariableOp") == len(program.variables)
    assert many.collectives() == one.collectives()
    assert many.sent == one.sent


def test_the_numbers_are_asked_of_every_replica():
    with tf.Graph().as_default() as graph:
        assert len(asked_numbers(strategy(Mesh("a:8"), 2, 4, 1, 1))) == 8
    nodes = [node.op for f in graph.as_graph_def().library.function for node in f.node_def]
    assert nodes.count("XlaReplicaId") == 1


# -- what it computes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def said():
    return printed("tests.engines.tpu_cases")


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_equals_lockstep(said, case):
    assert said[case] == ""


# -- the torus -----------------------------------------------------------------------------------------------


def distance(a, b, torus):
    return sum(min(abs(i - j), n - abs(i - j)) for i, j, n in zip(a, b, torus, strict=True))


@pytest.mark.parametrize(
    ("mesh", "torus"),
    [
        ("a:2;b:4", (2, 4, 1, 1)),
        ("a:4;b:2", (2, 4, 1, 1)),
        ("a:8", (2, 4, 1, 1)),
        ("a:1;b:8;c:1", (2, 2, 1, 2)),
        ("a:4;b:16", (4, 4, 4, 1)),
        ("a:16;b:4", (4, 4, 2, 2)),
        ("a:2;b:2;c:2", (2, 2, 1, 2)),
        ("a:2;b:8", (4, 4, 1, 1)),
    ],
)
def test_neighbours_on_the_mesh_are_neighbours_on_the_torus(mesh, torus):
    found, mesh = list(places(Mesh(mesh), torus)), Mesh(mesh)
    assert sorted(found) == sorted(np.ndindex(*torus))
    last = next(name for name, n in reversed(mesh.axes) if n > 1)
    for group in mesh.groups((last,)):
        for a, b in itertools.pairwise(group):
            assert distance(found[a], found[b], torus) == 1


def test_groups_of_two_axes_share_no_link():
    mesh, torus = Mesh("a:4;b:2"), (2, 4, 1, 1)
    found = list(places(mesh, torus))
    for axis, moving in (("a", 1), ("b", 0)):
        for group in mesh.groups((axis,)):
            assert len({found[rank][1 - moving] for rank in group}) == 1


def test_replicas_lie_where_they_are_told():
    mesh = Mesh("a:2;b:4")
    by_default = strategy(mesh, 4, 2, 1, 1).extended.worker_devices
    assert [int(name[-1]) for name in by_default] == [0, 2, 4, 6, 1, 3, 5, 7]
    names = [f"/task:0/device:TPU:{i}" for i in (7, 6, 5, 4, 3, 2, 1, 0)]
    told = strategy(mesh, 4, 2, 1, 1, devices=names).extended.worker_devices
    assert [int(name[-1]) for name in told] == [7, 6, 5, 4, 3, 2, 1, 0]


# -- what is refused -----------------------------------------------------------------------------------------


def test_refusals(monkeypatch):
    monkeypatch.delenv("TPU_NAME", raising=False)
    program = model("data")
    with pytest.raises(UserError, match="TensorFlow sees none on this machine, and TPU_NAME names none; run"):
        open_engine(program, "tpu")
    monkeypatch.setenv("TPU_NAME", "grpc://127.0.0.1:1")  # a port where nobody listens
    with pytest.raises(UserError, match=r"does not start \(.*Connection refused\); see that it is there"):
        open_engine(program, "tpu")
    with pytest.raises(UserError, match=r"all_reduce\(a, sum\) of float64 has no TPU operation; build"):
        open_engine(every_collective("a:8", ("a",)), "tpu")
    with pytest.raises(UserError, match=r"needs 4 TPU cores, found 8 \(torus 2x4x1x1\); make them equal"):
        strategy(Mesh("a:4"), 2, 4, 1, 1)
    with pytest.raises(UserError, match=r"needs 8 TPU cores, found 8 .* and 1 different names"):
        strategy(Mesh("a:8"), 2, 4, 1, 1, devices=["/task:0/device:TPU:0"] * 8)
    for name in ("/task:0/device:TPU:9", "TPU:3"):
        with pytest.raises(UserError, match=f"there is no TPU core '{name}'; .*known: /task:0/device:TPU:0,"):
            strategy(Mesh("a:8"), 2, 4, 1, 1, devices=[name])


def test_nothing_of_it_is_traced_for_a_cpu():
    x, ops = tf.ones([8, 8]), TpuOps()
    for call in (
        lambda: ops.all_reduce(x, [[0, 1]], "max"),
        lambda: ops.reduce_scatter(x, [[0, 1]], 0),
        lambda: ops.all_to_all(x, [[0, 1]], 0, 1),
        lambda: ops.permute(x, [[0, 1]]),
    ):
        with pytest.raises(RuntimeError, match=r"under tf\.distribute\.TPUStrategy only"):
            call()
