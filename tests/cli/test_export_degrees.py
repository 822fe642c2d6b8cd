"""Exports to software that multiplies degrees: torchtitan, Megatron-LM, DeepSpeed."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from examples.transformer_lm import model as transformer
from layoutopt.plan.build import decided
from layoutopt.plan.degrees import ParallelDegrees
from layoutopt.plan.export import FORMATS, export
from layoutopt.plan.exported import Exported, placed
from mesh_tf_core import Layout, Mesh, Options
from mesh_tf_core.errors import UserError

MODEL = transformer(
    positions="learned", layers=4, d_model=32, d_kv=8, heads=4, d_ff=64, vocab=64, batch=32, length=16
)
FORMS = ("torchtitan", "megatron", "deepspeed")
TENSOR = "batch:data;heads:model;d_ff:model;vocab:model"
MATRICES = [name for name, v in MODEL.graph.variables.items() if len(v.shape.dims) > 1]


def exported(mesh: str, layout: str, framework: str = "", **options: Any) -> Exported:
    on, placed_as, chosen = Mesh(mesh), Layout(layout), Options(**options)
    stages = MODEL.stages(on, placed_as)
    tensors = placed(MODEL.lower(on, placed_as, chosen))
    return Exported(
        "Layout", on, placed_as, *tensors, decided(chosen, placed_as, stages), framework=framework
    )


def settings(what: Exported, to: str) -> dict[str, Any]:
    """Every setting of an export by its name."""
    text = export(what, to)
    if to == "deepspeed":
        return dict(json.loads(text))
    if to == "megatron":
        return dict(re.findall(r"^--([a-z-]+) ?(.*)$", text, re.MULTILINE))
    if what.framework.startswith("torchtitan@0.2"):
        return {key: value for own in tomllib.loads(text).values() for key, value in own.items()}
    found: dict[str, Any] = {}
    made = SimpleNamespace(Config=lambda: None)
    exec(text, {"FullAC": made, "SelectiveAC": made}, found)
    return {k: v for own in (found["parallelism"], found["training"]) for k, v in own.items()}


@pytest.mark.parametrize("to", FORMS)
def test_degrees_multiply_to_the_devices_and_batches_to_the_batch(to: str) -> None:
    what = exported("data:4;model:2", TENSOR, microbatches=2)
    degrees, found = ParallelDegrees.of(what, to), settings(what, to)
    assert (degrees.data, degrees.tensor, degrees.context, degrees.stages) == (4, 2, 1, 1)
    assert degrees.data * degrees.examples(2) * 2 == degrees.batch == 32
    says = {
        "torchtitan": {
            "data_parallel_replicate_degree": 4,
            "tensor_parallel_degree": 2,
            "num_tokens_per_train_step": 32 * 16,
            "num_tokens_per_microbatch_per_dp_rank": 4 * 16,
        },
        "megatron": {"tensor-model-parallel-size": "2", "micro-batch-size": "4", "global-batch-size": "32"},
        "deepspeed": {"train_batch_size": 32, "gradient_accumulation_steps": 2},
    }[to]
    assert {key: found[key] for key in says} == says


def test_storage_is_said_by_each_in_its_own_words() -> None:
    split = dict.fromkeys(MATRICES, "zero3")
    what = exported("data:8", "batch:data", storage=split)
    assert settings(what, "torchtitan")["data_parallel_shard_degree"] == 8
    assert settings(what, "torchtitan")["fsdp_reshard_after_forward"] == "always"
    assert settings(what, "deepspeed")["zero_optimization"]["stage"] == 3
    near = exported("replica:2;data:4", "batch:replica+data", storage=dict.fromkeys(MATRICES, "zero3@data"))
    found = settings(near, "torchtitan")
    assert (found["data_parallel_replicate_degree"], found["data_parallel_shard_degree"]) == (2, 4)
    state = exported("data:8", "batch:data", storage=dict.fromkeys(MATRICES, "zero1"))
    assert "use-distributed-optimizer" in settings(state, "megatron")
    with pytest.raises(UserError, match=r"torchtitan cannot express this plan, .*zero1"):
        export(state, "torchtitan")


def test_pipelines_and_recomputation() -> None:
    ring = {"schedule": "interleaved:2", "microbatches": 8, "recompute": ("layers",)}
    what = exported("pipe:2;data:4", "layers:pipe;batch:data", **ring)
    found = settings(what, "megatron")
    assert (found["pipeline-model-parallel-size"], found["num-virtual-stages-per-pipeline-rank"]) == (
        "2",
        "2",
    )
    assert found["recompute-granularity"] == "full" and found["micro-batch-size"] == "1"
    assert settings(what, "torchtitan")["pipeline_parallel_schedule"] == "Interleaved1F1B"
    with pytest.raises(UserError, match="deepspeed cannot express this plan"):
        export(what, "deepspeed")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "circular:2", "interleaved:2"])
def test_a_step_has_the_batch_of_the_model_under_every_schedule(schedule: str) -> None:
    what = exported("pipe:2;data:4", "layers:pipe;batch:data", schedule=schedule, microbatches=8)
    assert ParallelDegrees.of(what, "torchtitan").batch == 32
    assert settings(what, "torchtitan")["num_tokens_per_train_step"] == 32 * 16


def test_half_a_decision_is_no_setting() -> None:
    for layout in ("batch:data;heads:model", "batch:data;d_ff:model", "batch:data;heads:model;d_ff:model"):
        with pytest.raises(UserError, match="megatron splits every matrix of the layers"):
            export(exported("data:4;model:2", layout), "megatron")
    one = exported("data:8", "batch:data", storage={MATRICES[0]: "zero1"})
    with pytest.raises(UserError, match="megatron stores all variables alike"):
        export(one, "megatron")
    hosted = exported("data:8", "batch:data", offload=frozenset({("optimizer", MATRICES[-1])}))
    with pytest.raises(UserError, match="megatron offloads all optimizer or nothing"):
        export(hosted, "megatron")


def test_a_table_of_positions_lies_as_the_sequence_does() -> None:
    what = exported("data:4;seq:2", "batch:data;length:seq;memory_length:seq;positions:seq")
    assert settings(what, "megatron")["context-parallel-size"] == "2"
    assert settings(what, "torchtitan")["context_parallel_degree"] == 2


def test_selective_recomputation_is_each_ones_own() -> None:
    single = exported("data:8", "batch:data", recompute=("layers:keep=attention+products/2",))
    assert "SelectiveAC" in export(single, "torchtitan")
    core = exported("data:8", "batch:data", recompute=("layers:keep=products+others",))
    assert settings(core, "megatron")["recompute-granularity"] == "selective"
    for what, to in ((single, "megatron"), (core, "torchtitan"), (core, "deepspeed")):
        with pytest.raises(UserError, match=f"{to} cannot express this plan"):
            export(what, to)


def test_what_a_form_cannot_say_it_says() -> None:
    """A vocab that the tensor ways do not divide, and a sequence that a release always splits."""
    uneven = Layout("batch:data;heads:model;d_ff:model")
    what = replace(exported("data:4;model:2", TENSOR), layout=uneven)
    odd = [
        replace(v, sizes=tuple(n + (d == "vocab") for d, n in zip(v.dims, v.sizes, strict=True)))
        for v in what.variables
    ]
    whole = [replace(v, splits=tuple(uneven.axes(d) for d in v.dims)) for v in odd]
    for to in ("torchtitan", "megatron"):
        said = export(replace(what, variables=tuple(whole)), to)
        assert "# vocab of 65 is whole in this plan: 2 ranks do not divide it." in said
    old = exported("data:4;model:2", TENSOR, "torchtitan@0.2")
    always = "# This release splits the sequence over the tensor ranks; this plan does not."
    assert always in export(old, "torchtitan")
    assert settings(old, "torchtitan")["enable_async_tensor_parallel"] is False


@pytest.mark.parametrize("release", ["0.2", "0.3", "main"])
@pytest.mark.parametrize("messages", ["plain", "async"])
def test_what_torchtitan_compiles_is_written(release: str, messages: str) -> None:
    named = f"torchtitan@{release}:tensor_messages={messages}"
    text = export(exported("data:4;model:2", TENSOR, named), "torchtitan")
    written = {line.strip().rstrip(",").replace(" ", "").casefold() for line in text.split("\n")}
    assert f"enable_async_tensor_parallel={str(messages == 'async').casefold()}" in written
    assert "enable=true" in written


def test_releases_of_torchtitan_have_other_names() -> None:
    old = settings(exported("data:8", "batch:data", "torchtitan@0.2"), "torchtitan")
    assert (old["local_batch_size"], old["global_batch_size"], old["seq_len"]) == (4, 32, 16)
    assert old["mode"] == "none"
    assert settings(exported("data:8", "batch:data", "torchtitan@0.3"), "torchtitan")["local_batch_size"] == 4


@pytest.mark.parametrize("to", FORMS)
def test_what_degrees_cannot_say_is_refused(to: str) -> None:
    whole = exported("data:8", "batch:data")
    twice = replace(whole, layout=Layout("batch:data;d_ff:data"))
    with pytest.raises(
        UserError, match=rf"{to} .*'batch' and 'd_ff' over 'data'; search with --framework {to}"
    ):
        export(twice, to)
    idle = exported("data:4;spare:2", "batch:data")
    with pytest.raises(UserError, match=f"{to} has no use for mesh axis 'spare'"):
        export(idle, to)


@pytest.mark.parametrize("to", ["torchtitan", "deepspeed"])
def test_storage_is_over_the_ranks_of_the_sequence_too(to: str) -> None:
    split = dict.fromkeys(MATRICES, "zero3@data")
    what = exported("data:2;seq:4", "batch:data;length:seq;memory_length:seq;positions:seq", storage=split)
    with pytest.raises(UserError, match=f"{to} stores split over the ranks of the sequence too"):
        export(what, to)


def test_every_framework_with_degrees_has_a_form() -> None:
    assert {*FORMS} <= {*FORMATS}
