"""A tiny real calibration: two devices, a handful of probes, a profile that is read like any hardware
file.
"""

from __future__ import annotations

import json

import pytest

from costmodels.calibration import calibrate
from costmodels.calibration.probes import groups, probes
from costmodels.calibration.programs import collective_program, local_program, stores_program
from costmodels.hardware import read_hardware, write_profile
from costmodels.pricing.compilers.local import MeasuredLocalEngine
from costmodels.pricing.pricer import pricer
from mesh_tf_core import Dim, Layout, Mesh, Shape, UserError
from mesh_tf_core.engines import open_engine
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.program import COLLECTIVES, Local
from mesh_tf_core.ops.binary import Binary
from mesh_tf_core.ops.reduce import Reduce
from mesh_tf_core.ops.shape import Concat
from mesh_tf_core.ops.unary import Unary

MESH = Mesh("data:2")
SOME = {
    "empty", "stores", "unary 8x64", "unary 1024x256", "unary 8x64 kept", "unary 1024x256 kept",
    "binary.same 8x64", "binary.same 1024x256", "binary.row 8x64", "matmul 64x64x64",
    "matmul 256x256x256", "batch 8x32x64x32", "all_reduce data 8192", "all_reduce data 262144",
    "permute data 8192", "check gelu_grad 64x128",
}  # fmt: skip


def some():
    found = [p for p in probes(MESH, quick=True) if p.name in SOME or p.name.startswith("unary.tanh")]
    assert {p.name for p in found} >= SOME
    return found


@pytest.fixture(scope="module")
def content():
    heard = []
    made = calibrate(MESH, on_progress=lambda *said: heard.append(said), wanted=some())
    assert heard[-1][1] == heard[-1][2] == len(some())
    return made


def test_the_profile_is_a_hardware_file(content, tmp_path):
    hardware = write_profile(content, tmp_path / "cpu-local.json")
    assert hardware == read_hardware(tmp_path / "cpu-local.json")
    assert hardware.calibrated
    assert {c.op_class for c in hardware.compute_curves} >= {
        "kernel",
        "kernel.fresh",
        "kernel.matmul",
        "elementwise",
    }
    assert {c.collective for c in hardware.collective_curves} == {"all_reduce", "permute"}


def test_the_profile_says_how_it_came_about(content):
    said = content["calibration"]
    assert said["machine"]["mesh"] == "data:2"
    assert said["machine"]["cores"] >= 1
    assert said["machine"]["noise"].startswith(("quiet machine", "noisy machine"))
    assert said["versions"]["tensorflow"]
    assert {m["name"] for m in said["measurements"]} >= SOME
    assert all(m["seconds"] > 0 for m in said["measurements"])
    assert said["fit"]["held_out"].keys() == {"check gelu_grad 64x128"}
    json.dumps(content)


def test_programs_are_priced_op_by_op(content, tmp_path):
    prices = pricer(write_profile(content, tmp_path / "p.json"), MESH)
    assert isinstance(prices.itemiser.compiler, MeasuredLocalEngine)
    x = TensorType(Shape([Dim("a", 256), Dim("b", 256)]), "float32")
    one, two = (local_program(MESH, Unary("tanh"), (x,), n) for n in (1, 2))
    # A chain stores its last result only, so both store as much.
    assert prices.fixed_seconds(one) == prices.fixed_seconds(two) > 0
    assert prices.seconds(two) == pytest.approx(2 * prices.seconds(one))
    assert prices.cost(one).step_seconds == pytest.approx(prices.seconds(one) + prices.fixed_seconds(one))


def test_a_stopped_calibration_goes_on_where_it_was(tmp_path):
    file, heard = tmp_path / "partial.json", []
    wanted = some()[:4]

    def stop(*said):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(MESH, on_progress=stop, resume=file, wanted=wanted)
    kept = {m["name"]: m for m in json.loads(file.read_text())["measurements"]}
    assert list(kept) == [p.name for p in wanted]
    made = calibrate(MESH, on_progress=lambda *said: heard.append(said), resume=file, wanted=wanted)
    assert heard == []
    assert {m["name"]: m for m in made["calibration"]["measurements"]} == kept
    assert not file.exists()


def test_partial_results_of_another_mesh_are_refused(tmp_path):
    file = tmp_path / "partial.json"
    file.write_text(json.dumps({"key": {"mesh": "data:4"}, "measurements": []}))
    with pytest.raises(UserError, match="are of mesh data:4, not of mesh data:2"):
        calibrate(MESH, resume=file, wanted=[])
    for content in ("{", '{"key": 1, "measurements": []}', "[" * 5000):
        file.write_text(content)
        with pytest.raises(UserError, match="; delete the file to start again"):
            calibrate(MESH, resume=file, wanted=[])
    file.write_text(json.dumps({"key": {"a\nb": "c"}, "measurements": []}))
    with pytest.raises(UserError, match="are of a b c, not of mesh"):
        calibrate(MESH, resume=file, wanted=[])


def test_one_device_cannot_be_calibrated():
    with pytest.raises(UserError, match="has one device"):
        calibrate("data:1")


def test_probes_have_unique_names_and_cover_every_group():
    mesh = Mesh("data:2;model:4")
    for quick in (True, False):
        names = [p.name for p in probes(mesh, quick)]
        assert len(names) == len(set(names))
    assert groups(mesh) == {("data",): (2, 1), ("model",): (4, 1), ("data", "model"): (8, 1)}
    assert groups(Mesh("data:2;model:1")) == {("data",): (2, 1)}


def test_groups_of_one_size_differ_if_they_lie_in_other_processes():
    square = Mesh("data:2;model:2")
    assert groups(square, 2) == {("model",): (2, 1), ("data",): (2, 2), ("data", "model"): (4, 2)}
    assert groups(square, 1) == {("data",): (2, 2), ("data", "model"): (4, 4)}
    assert groups(Mesh("data:4;model:2"), 4) == {
        ("model",): (2, 1), ("data",): (4, 2), ("data", "model"): (8, 2)
    }  # fmt: skip
    own = probes(square, quick=True)
    more = probes(square, quick=True, devices_per_process=2)
    assert len(more) == len({p.name for p in more}) == len(own) + 15


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_programs_of_collectives_run_and_move_what_they_say(kind):
    program = collective_program(MESH, kind, ("data",), 8192, 3)
    engine = open_engine(program, "lockstep")
    engine.initialize()
    assert engine.step({})["step"] == 0
    assert engine.step({})["step"] == 1
    assert engine.communication_bytes == program.communication_bytes()
    assert engine.communication_bytes["data"] > 0
    full = 2.0 if kind == "all_reduce" else 1.0
    assert engine.read("y_2").max() == full if kind != "reduce_scatter" else 2.0
    engine.close()


def test_repeats_cannot_be_merged():
    x = TensorType(Shape([Dim("a", 4), Dim("b", 8)]), "float32")
    chain = local_program(MESH, Unary("exp"), (x,), 3, kept=True)
    read = [i.inputs[0] for i in chain.code if getattr(i, "op", None) == Unary("exp")]
    assert len(set(read)) == 3
    own = local_program(MESH, Binary("mul"), (x, x), 3, own=True)
    assert len({i.inputs for i in own.code if getattr(i, "op", None) == Binary("mul")}) == 3
    assert len({i.inputs[1] for i in own.code if getattr(i, "op", None) == Binary("mul")}) == 3
    assert stores_program(MESH, 4, 0).layout == Layout()


def test_operands_are_made_one_after_the_other():
    """Else a runtime makes them all first, and what is measured is fresh memory."""
    x = TensorType(Shape([Dim("a", 64), Dim("b", 32)]), "float32")
    program = local_program(MESH, Reduce("sum", ("b",)), [x], repeats=3)
    code = [i for i in program.code if isinstance(i, Local)]
    made = {o: i for i in code for o in i.outputs}
    multiplied = [i for i in code if i.op == Binary("mul")]
    assert len(multiplied) == 3
    for later in multiplied[1:]:
        assert made[later.inputs[1]].op == Reduce("sum", ("b",))
    wide = local_program(MESH, Concat("b"), [x, x], repeats=2)
    factors = {i.inputs[1] for i in wide.code if isinstance(i, Local) and i.op == Binary("mul")}
    assert len(factors) == 1
