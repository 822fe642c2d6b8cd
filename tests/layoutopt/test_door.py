"""From Python: what a search, a price and an explanation give, and how notebooks show them."""

from __future__ import annotations

import inspect
import pickle
from importlib import metadata
from pathlib import Path

import pytest

import layoutopt
import mesh_tf_core as mtf
import reports
from costmodels.hardware import load_hardware, machine_of, preset_content, write_profile
from costmodels.hardware.profiles import made_profiles_directory
from examples.mlp import model as mlp
from layoutopt.analysis.verify import CompilerResult, Verified, moved
from layoutopt.api.replicas import choose_replicas
from layoutopt.api.running import Validated
from layoutopt.plan.build import Plan
from layoutopt.plan.evidence import Validation
from layoutopt.plan.units import bytes_text, seconds_text
from layoutopt.sizing.sizing import machines_of
from mesh_tf_core.engines.jax.compile import CompilerRefusal
from mesh_tf_core.engines.jax.hlo import HloCollective, HloSummary
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.phase import Phase
from tests.layoutopt.models import EXAMPLES

MESH = "data:2;model:2"


@pytest.fixture(scope="module")
def model() -> mtf.Model:
    return EXAMPLES["mlp"]()


@pytest.fixture(scope="module")
def plan(model: mtf.Model) -> Plan:
    return layoutopt.search(
        model, mesh=MESH, hardware="tpu-v3", storage=["layout"], recompute=[False], microbatches=[1]
    )


def test_what_the_compiler_made_has_a_frame() -> None:
    ours = [HloCollective("all_reduce", 4, 1, 400, 2), HloCollective("all_gather", 2, 1, 100, 1)]
    theirs = [HloCollective("reduce_scatter", 4, 1, 804, 1), HloCollective("all_gather", 2, 1, 300, 1)]
    made = CompilerResult("", 1 << 20, 1 << 21, 1.0, read=HloSummary((), 0, 0, 0), compute_seconds=0.002)
    found = Verified("v5e:2x2", 0.001, (), made, None, moved(ours, theirs))
    assert found.to_frame()["ratio"].tolist() == [1.005, 3.0]
    assert found.to_frame()["family"].tolist() == ["sum", "all_gather"]
    assert (
        repr(found)
        == "Verified(v5e:2x2: other collectives, 2.00 ms of compute (1.00 ms predicted), peak 1.00 MiB)"
    )
    assert "<table" in found._repr_html_()
    sent = HloCollective("all_reduce", 4, 1, 800, 3)
    refused = Verified("v5e:2x2", 0.001, (sent,), None, CompilerRefusal("no room", True), ())
    assert refused.to_frame().to_dict("records") == [
        {"family": "all_reduce", "group_size": 4, "predicted_count": 3}
    ]
    assert "refused, no room" in repr(refused)


def test_what_is_public_is_listed() -> None:
    assert set(layoutopt.__all__) < set(dir(layoutopt))
    assert layoutopt.__version__ == metadata.version("layoutopt")
    assert all(callable(getattr(layoutopt, name)) for name in layoutopt.__all__)


def test_no_public_function_has_more_than_ten_parameters() -> None:
    functions = (getattr(layoutopt, name) for name in layoutopt.__all__ if name.islower())
    assert all(len(inspect.signature(f).parameters) <= 10 for f in functions)


def test_a_plan_has_a_frame_a_card_a_page_and_figures(plan: Plan, tmp_path: Path) -> None:
    frame = plan.to_frame()
    assert frame["step_seconds"][0] == plan.predicted.step_seconds
    assert len(frame) > len({a.name for a in plan.alternatives}) / 2
    card = plan._repr_html_()
    assert "optimal under this cost model" in card and "batch" in card and "<script" not in card
    assert (
        "--check: the plan does not record its search; search again with --out" not in card
        and "runs of this kind" in card
    )  # as on the page
    page = tmp_path / "report.html"
    html = plan.report(page)
    assert page.read_text(encoding="utf-8") == html
    assert "Slowest operations" in html and "Not in this plan: `layoutopt search" not in html
    details = plan.full().data.details
    assert not plan.data.details.lines and details.lines
    # Each operation says where the model writes it, backward as forward; time passes where it is spent.
    written = {x.place for x in details.lines if x.op == "einsum"}
    assert written and written <= details.sources.keys()
    assert {Path(place).name.partition(":")[0] for place in written} == {"mlp.py"}
    assert all("einsum" in details.sources[place] for place in written)
    assert all(x.place for x in details.lines if x.phase != Phase.UPDATE)
    spent = sum(point.seconds for point in details.memory.points)
    assert spent == pytest.approx(plan.predicted.step_seconds)
    drawn = reports.figures.memory_timeline(plan)
    assert drawn.axes or drawn.artists or drawn.texts or drawn.lines or drawn.patches
    assert len(reports.tables.operations(plan)) > 0


def test_a_price_is_the_plans(plan: Plan, model: mtf.Model) -> None:
    priced = layoutopt.cost(model, MESH, plan.layout, "tpu-v3", options=plan.options)
    assert priced.predicted == plan.predicted
    assert layoutopt.cost(model, plan).predicted == plan.predicted  # on the plan's hardware
    with pytest.raises(mtf.UserError, match="the plan sets the layout and the options"):
        layoutopt.cost(model, plan, "batch:data")
    assert priced.fits and priced.reason is None
    frame = priced.to_frame()
    total = (frame["runs"] * frame["exposed_seconds"]).sum()
    assert total == pytest.approx(plan.predicted.step_seconds)
    tight = layoutopt.cost(model, MESH, plan.layout, "tpu-v3", memory=1000, options=plan.options)
    assert not tight.fits and "largest tensors: " in (tight.reason or "")
    assert "does not fit" in repr(tight) and "<table" in priced._repr_html_()


def test_an_explanation_says_what_each_split_is_worth(plan: Plan) -> None:
    found = layoutopt.explain(plan, against="batch:data")
    assert [a.rule for a in found.splits] == [f"{dim}:{'+'.join(axes)}" for dim, axes in plan.layout.items()]
    assert (found.to_frame()["costs_seconds"] >= -1e-12).all()
    worth = max(a.step_seconds or 0.0 for a in found.splits) / plan.predicted.step_seconds - 1
    assert f"{100 * worth:.1f} % longer" in repr(found)  # of the plan's step, as in the terminal
    assert (
        not found.binds
        and found.limit is not None
        and found.limit.step_seconds == plan.predicted.step_seconds
    )
    assert found.against is not None
    assert found.against.predicted.step_seconds >= plan.predicted.step_seconds
    with pytest.raises(mtf.UserError, match="a plan from a file has no model; attach"):
        layoutopt.explain(Plan(plan.data))


def test_a_validation_has_a_frame() -> None:
    rows = [{"layout": "batch:data", "predicted_seconds": 1.0, "measured_seconds": 2.0}]
    found = Validated(Validation.model_validate({"rows": rows, "mape": 0.5}))
    assert repr(found) == "Validated(1 layout, error 50.0%)"
    assert found.to_frame()["measured_seconds"][0] == 2.0


def test_what_is_no_such_argument_is_said_in_a_line(model: mtf.Model, plan: Plan) -> None:
    with pytest.raises(mtf.UserError, match="memory is '16GiB'; give a positive number of bytes"):
        layoutopt.cost(model, MESH, "batch:data", "tpu-v3", memory="16GiB")  # type: ignore[arg-type]
    with pytest.raises(mtf.UserError, match="layouts 'batch:data': pass a list of at least two layouts"):
        layoutopt.validate(model, MESH, layouts="batch:data")
    with pytest.raises(mtf.UserError, match=r"verify 'plan\.json': pass a result of layoutopt\.search"):
        layoutopt.verify("plan.json", "v5e:2x2")  # type: ignore[arg-type]
    with pytest.raises(mtf.UserError, match=r"explain 'plan\.json': pass a result of layoutopt\.search"):
        layoutopt.explain("plan.json")  # type: ignore[arg-type]
    with pytest.raises(mtf.UserError, match=r'layout .*: write it as "batch:data;heads:model"'):
        layoutopt.explain(plan, model)  # type: ignore[arg-type]
    with pytest.raises(mtf.UserError, match=r"cost: .* is not a Model; pass a"):
        layoutopt.cost(EXAMPLES["mlp"], plan)  # type: ignore[arg-type]


def test_a_plan_goes_to_other_processes(plan: Plan) -> None:
    other = pickle.loads(pickle.dumps(plan))
    assert other.to_json() == plan.to_json() and other.full().data.details.lines


def test_a_plan_says_itself_in_units(plan: Plan) -> None:
    step, peak = plan.predicted.step_seconds, plan.predicted.peak_memory_bytes
    assert f"{seconds_text(step)} a step, {bytes_text(peak)}, OPTIMAL)" in repr(plan)


def test_a_calibrated_profile_counts_for_all_that_take_a_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    content = preset_content("cpu-local")
    content["chip"]["peak_flops"]["float32"]["value"] /= 100
    shipped = load_hardware("cpu-local")
    mine = write_profile(content, made_profiles_directory() / "cpu-local.json")
    model, asked = (
        mlp(batch=16, hidden=32),
        {"storage": ["layout"], "recompute": [False], "microbatches": [1]},
    )
    plan = layoutopt.search(model, mesh="data:2", **asked)
    layout, found = plan.layout, plan.predicted.compute_seconds
    before, now = (layoutopt.cost(model, plan.mesh, layout, m).predicted for m in (shipped, mine))
    assert found == now.compute_seconds > before.compute_seconds
    rare = choose_replicas(lambda n: model, mesh="data:2", ways=["never"], **asked)
    assert rare.predicted.compute_seconds == found
    assert [m.hardware for m in machines_of("cpu-local", None)] == [mine]
    assert machine_of("cpu-local, launch_interval=3 us").peak_flops("float32") == mine.peak_flops("float32")
    assert machine_of(shipped) is shipped
    with pytest.raises(
        UserError, match="give the name of a preset, the path of a hardware file, or a Hardware"
    ):
        layoutopt.search(model, mesh="data:2", hardware=7)
