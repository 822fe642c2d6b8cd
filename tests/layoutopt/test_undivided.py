"""Storage that splits nothing is said, is called by no name, and what it leaves out is proven of nothing."""

from __future__ import annotations

import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from examples.transformer_lm import model as transformer
from layoutopt.analysis.lint import lint
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.plan.build import decided
from layoutopt.plan.trade_names import trade_names
from layoutopt.space.undivided import storage_of, stored_at, undivided
from mesh_tf_core.lower import Options
from tests.layoutopt.models import SMALL

MODEL = transformer(**{**SMALL, "batch": 24}, optimizer="adafactor")
"""Its state is of means along dimensions, so that no shard is padded."""
PADDED = transformer(**{**SMALL, "batch": 24})
V4 = load_hardware("tpu-v4")


def priced(mesh: str, stage: str = "zero3") -> Evaluation:
    options = Options(stored_at(MODEL.graph.variables.values(), stage))
    layout = mtf.Layout({"batch": tuple(mtf.Mesh(mesh).names)})
    return evaluate(MODEL, mtf.Mesh(mesh), layout, V4, options)


def test_padded_shards_are_split() -> None:
    layout, options = mtf.Layout("batch:data"), Options(stored_at(PADDED.graph.variables.values(), "zero3"))
    found = evaluate(PADDED, mtf.Mesh("data:12"), layout, V4, options)
    assert not found.undivided and len(found.decided.storage) > 8
    assert found.memory.variables < evaluate(PADDED, mtf.Mesh("data:12"), layout, V4).memory.variables / 5
    said = decided(found.decided, found.program.layout)
    assert trade_names(PADDED, found.program.mesh, layout, said) == {"data": "data (FSDP)"}


def names_of(found: Evaluation) -> set[str]:
    program = found.program
    said = decided(found.options, program.layout)
    return set(trade_names(MODEL, program.mesh, program.layout, said).values())


def test_what_a_stage_leaves_whole_is_said_with_the_numbers_that_divide() -> None:
    found, plain = priced("data:12"), priced("data:12", "layout")
    assert found.memory.peak == plain.memory.peak  # every variable is 4, 16 or 32 wide
    (said,) = found.undivided
    assert (said.ways, said.parts, said.below, said.above, said.inside) == (12, 1, 8, 16, 4)
    assert said.share == 1 and len(said.variables) == len(found.options.storage)
    assert str(said) in found.notes and not plain.undivided
    assert "no dimension is divisible by 12; use 8 or 16 devices, and store" in str(said)
    assert [d.kind for d in lint(MODEL, found, V4, found.options)].count("undivided storage") == 1


def test_what_it_names_as_a_fix_divides() -> None:
    whole = priced("data:12").memory.variables
    for mesh in ("data:8", "data:16", "rest:3;data:4"):
        layout = mtf.Layout({"batch": tuple(n for n, size in mtf.Mesh(mesh).axes if 24 % size == 0)})
        options = Options(stored_at(MODEL.graph.variables.values(), "zero3"))
        found = evaluate(MODEL, mtf.Mesh(mesh), layout, V4, options)
        assert found.memory.variables < whole
        assert all(each.parts > 1 for each in found.undivided)


def test_in_part_split_is_said_so() -> None:
    (said,) = priced("rest:3;data:4").undivided
    assert (said.ways, said.parts, said.inside) == (12, 4, 4)
    assert "splits into 4 parts, not 12," in str(said) and "axis of" not in str(said)


def test_nothing_whole_is_called_split() -> None:
    whole, split = priced("data:12"), priced("data:8")
    assert names_of(whole) == {"data"} and names_of(split) == {"data (FSDP)"}
    assert not whole.decided.storage and split.decided.storage == split.options.storage
    assert names_of(priced("rest:3;data:4")) == {"data", "data (FSDP)"}


@pytest.mark.parametrize(("mesh", "is_split"), [("data:12", False), ("data:8", True)])
@pytest.mark.one_in(2)
def test_named_plans(mesh: str, is_split: bool) -> None:
    plan = layoutopt.search(MODEL, mesh, hardware="tpu-v4", microbatches=(1,), recompute=(False,))
    assert any("FSDP" in a.name for a in plan.alternatives) == is_split
    assert (
        any(
            "no layout is available for fully sharded (FSDP): zero3 cannot split" in n
            for n in plan.data.notes
        )
        != is_split
    )
    stored = [a.storage for a in (plan.data, *plan.alternatives)]
    assert any(stored) == is_split
    left = {left.what for left in plan.data.space.not_looked_at}
    assert ("storage (ZeRO) in unequal shards" in left) != is_split


def test_a_note_is_said_once() -> None:
    plan = layoutopt.search(
        MODEL, "data:12", hardware="tpu-v4", storage=("zero3",), microbatches=(1,), recompute=(False,)
    )
    assert sum(n.startswith("zero3 cannot split") for n in plan.data.notes) == 1


def test_a_proof_that_nothing_fits_is_of_even_shards() -> None:
    asked = {"hardware": "tpu-v4", "microbatches": (1,), "pins": "batch:data", "memory": 60e3}
    with pytest.raises(mtf.InfeasibleError) as caught:
        layoutopt.search(MODEL, "data:12", **asked)
    said = str(caught.value)
    assert said.startswith("no layout of 'transformer_lm' with equal shards fits into ")
    assert "zero3 cannot split 12 variables" in said and "use 8 or 16 devices" in said
    nearest = caught.value.nearest
    assert nearest is not None and nearest.data.space is not None
    assert "finer options of splits" in nearest.data.space.limits
    with pytest.raises(mtf.InfeasibleError) as caught:
        layoutopt.search(MODEL, "data:8", **{**asked, "memory": 20e3})
    assert "divide evenly" not in str(caught.value) and "cannot split" not in str(caught.value)


def test_scales_are_not_worth_a_sentence() -> None:
    model = transformer(**{**SMALL, "d_model": 48, "d_ff": 96, "vocab": 96, "length": 96, "d_kv": 96})
    options = Options(stored_at(model.graph.variables.values(), "zero3"))
    found = evaluate(model, mtf.Mesh("data:96"), mtf.Layout("length:data"), V4, options)
    assert not found.undivided and "final_norm/scale" not in found.decided.storage


@pytest.mark.parametrize("ways", [12, 30, 97, 2**20, 999_983])
def test_numbers_that_divide_are_found_as_by_trial(ways: int) -> None:
    """Of as many devices as are asked, in the time of a few."""
    storage = storage_of(
        MODEL.graph, mtf.Mesh(f"data:{ways}"), mtf.Layout(""), dict.fromkeys(MODEL.graph.variables, "zero3")
    )
    (found,) = undivided(storage)
    sizes = [[d.size for d in v.shape.dims] for n, v in MODEL.graph.variables.items() if n in found.variables]

    def divides(n: int) -> bool:
        return all(any(size % n == 0 for size in own) for own in sizes)

    largest = max(map(max, sizes))
    tried = [n for n in range(2, largest + 1) if divides(n)]
    assert found.below == max((n for n in tried if n < ways), default=0)
    assert found.above == min((n for n in tried if ways < n <= 2 * ways), default=0)
    assert found.inside == max((n for n in tried if n < ways and ways % n == 0), default=1)
