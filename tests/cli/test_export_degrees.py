"""Exports to software that multiplies degrees: torchtitan, Megatron-LM, DeepSpeed."""

from __future__ import annotations

import json
import math
import pickle
import re
import sys
import tomllib
from dataclasses import make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from costmodels.frameworks import load_framework
from costmodels.hardware import load_hardware
from examples.deepseek_lm import model as latent
from examples.moe_lm import model as mixture
from examples.transformer_lm import model as transformer
from layoutopt.analysis.lint import unexpressed
from layoutopt.frameworks import restriction_of
from layoutopt.frameworks.megatron import MEGATRON_MODULES, SAYS
from layoutopt.plan.build import decided
from layoutopt.plan.degrees import ParallelDegrees
from layoutopt.plan.export import FORMATS, export
from layoutopt.plan.exported import Exported, placed
from layoutopt.space.context import WAYS
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.degrees import EvenSequence
from layoutopt.space.kind import GATHER
from mesh_tf_core import Layout, Mesh, Options
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.op import PRODUCTS
from mesh_tf_core.ir.schedules import layer_order
from mesh_tf_core.lower.nodes import weights
from mesh_tf_core.lower.recomputed import keep_sets, recomputed
from mesh_tf_core.lower.remat_policy import Policies, policies

MODEL = transformer(
    positions="learned", layers=4, d_model=32, d_kv=8, heads=4, d_ff=64, vocab=64, batch=32, length=512
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
        return dict(re.findall(r"^--([a-z0-9-]+) ?(.*)$", text, re.MULTILINE))
    if what.framework.startswith("torchtitan@0.2"):
        return {key: value for own in tomllib.loads(text).values() for key, value in own.items()}
    found: dict[str, Any] = {}
    exec(text, found)
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
            "num_tokens_per_train_step": 32 * 512,
            "num_tokens_per_microbatch_per_dp_rank": 4 * 512,
        },
        "megatron": {"tensor-model-parallel-size": "2", "micro-batch-size": "4", "global-batch-size": "32"},
        "deepspeed": {"train_batch_size": 32, "gradient_accumulation_steps": 2},
    }[to]
    assert {key: found[key] for key in says} == says


@pytest.mark.parametrize("to", [*FORMS, "maxtext", "transformers", "accelerate"])
def test_settings_have_the_dtype_that_the_prices_assume(to: str) -> None:
    what = exported("data:4;model:2", TENSOR if to != "accelerate" else "batch:data+model")
    for dtype, words in {"bfloat16": ("bf16", "bfloat16"), "float16": ("fp16", "float16")}.items():
        assert any(word in export(replace(what, dtype=dtype), to) for word in words)
        assert not any(word in export(replace(what, dtype="float32"), to) for word in words)


@pytest.mark.parametrize("to", ["megatron", "torchtitan"])
def test_features_are_no_sequence(to: str) -> None:
    what = exported("data:8", "batch:data")
    inputs = (replace(what.inputs[0], dims=("batch", "d_model"), sizes=(32, 8), splits=(("data",), ())),)
    with pytest.raises(UserError, match="trains on texts, but no input of this model is one"):
        export(replace(what, inputs=inputs), to)


def test_transformers_splits_no_sequences() -> None:
    """Nothing in transformers reads its `enable_sequence_parallel`: no plan needs it, no file sets it."""
    with pytest.raises(UserError, match="length:model"):
        export(exported("data:4;model:2", TENSOR + ";length@elsewhere:model"), "transformers")
    assert "sequence_parallel" not in export(exported("data:4;model:2", TENSOR), "transformers")


def test_messages_that_the_prices_overlap_are_overlapped() -> None:
    sequence = TENSOR + ";length@elsewhere:model"
    for framework, layout, overlaps in (
        ("megatron", sequence, True),
        ("megatron:tensor_messages=plain", sequence, False),
        ("megatron", TENSOR, False),  # Megatron-LM overlaps them with sequence parallelism alone
    ):
        found = settings(exported("data:4;model:2", layout, framework), "megatron")
        assert ("tp-comm-overlap" in found) == overlaps
    stored = {"storage": dict.fromkeys(MATRICES, "zero1")}
    for framework, words in (
        ("megatron", {"overlap-grad-reduce", "overlap-param-gather"}),
        (
            "megatron:gradients=bfloat16",
            {"overlap-grad-reduce", "overlap-param-gather", "grad-reduce-in-bf16"},
        ),
        ("megatron:kernels=2022", set()),  # their gradients are summed after backward
    ):
        found = settings(
            replace(exported("data:8", "batch:data", framework, **stored), dtype="bfloat16"), "megatron"
        )
        assert {word for word in found if word.startswith(("overlap-", "grad-"))} == words


def test_deepspeed_adds_gradients_up_in_the_type_that_the_prices_assume() -> None:
    for framework, found in (
        ("deepspeed", None),
        ("deepspeed:gradients=float32", {"grad_accum_dtype": "fp32"}),
    ):
        said = settings(exported("data:8", "batch:data", framework), "deepspeed")
        assert said.get("data_types") == found and said["zero_optimization"]["overlap_comm"]


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
    with pytest.raises(UserError, match=r"with every microbatch, except in stages, but this plan \(zero1\)"):
        export(state, "torchtitan")
    ring = {"schedule": "1f1b", "microbatches": 8, "storage": dict.fromkeys(MATRICES, "zero1")}
    staged = exported("pipe:2;data:4", "layers:pipe;batch:data", **ring)
    assert settings(staged, "torchtitan")["fsdp_reshard_after_forward"] == "never"


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


@pytest.mark.parametrize("kind", (restriction_of("torchtitan").says or {})["schedule"] or ())
def test_torchtitan_makes_the_stages_of_the_plan(kind: str) -> None:
    """By the rule of torchtitan/distributed/pipeline_parallel.py, the same from 0.2.2 to b5bcd76."""
    model = transformer(layers=8, d_model=32, d_kv=8, heads=4, d_ff=64, vocab=64, batch=32, length=16)
    on, layout = Mesh("pipe:2"), Layout("layers:pipe")
    for schedule in [f"{kind}:{n}" for n in (2, 4)] if kind in ("interleaved", "circular") else [kind]:
        options = Options(schedule=schedule, microbatches=8)
        said = decided(options, layout, model.stages(on, layout))
        what = Exported("", on, layout, *placed(model.lower(on, layout, options)), said)
        for version in ("0.2", "0.3", "main"):
            found = settings(replace(what, framework=f"torchtitan@{version}"), "torchtitan")
            ends = sum(found[f"pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last"))
            own = found.get("pipeline_parallel_layers_per_stage")
            usual = 1 if kind in ("gpipe", "1f1b") else 2  # of each rank, where nothing is said
            stages = 2 * usual if own is None else math.ceil((8 + ends) / own)
            assert stages == layer_order(schedule, 2).virtual.size


def test_some_of_the_layers_are_recomputed() -> None:
    what = exported("data:8", "batch:data", "torchtitan@0.2", recompute=("layers:count=1",))
    found = settings(what, "megatron")
    assert (found["recompute-method"], found["recompute-num-layers"]) == ("block", "1")
    titan = settings(what, "torchtitan")
    assert (titan["mode"], titan["selective_ac_option"]) == ("selective", "3")
    with pytest.raises(UserError, match="only 1 of the layers are recomputed"):
        export(replace(what, framework=""), "torchtitan")
    with pytest.raises(UserError, match="only 1 of the layers are recomputed"):
        export(what, "deepspeed")


@pytest.mark.parametrize(
    ("schedule", "flags", "layers"),
    [
        ("1f1b", {}, []),
        ("1f1b:first=1", {"decoder-first-pipeline-num-layers": "1"}, [1, 3]),
        (
            "1f1b:first=3:last=1",
            {"decoder-first-pipeline-num-layers": "3", "decoder-last-pipeline-num-layers": "1"},
            [3, 1],
        ),
        ("1f1b:layers=4+0", {"pipeline-model-parallel-layout": "'Etttt|L'"}, [4, 0]),
        ("interleaved:2:layers=0+2+1+1", {"pipeline-model-parallel-layout": "'E|tt|t|tL'"}, [0, 2, 1, 1]),
    ],
)  # fmt: skip
def test_unequal_stages(schedule: str, flags: dict[str, str], layers: list[int]) -> None:
    what = exported("pipe:2;data:4", "layers:pipe;batch:data", schedule=schedule, microbatches=8)
    found = settings(what, "megatron")
    assert {name: text for name, text in found.items() if "num-layers" in name or "layout" in name} == flags
    assert ("num-virtual-stages-per-pipeline-rank" in found) == ("interleaved" in schedule and not flags)
    parts = settings(what, "torchtitan").get("module_fqns_per_model_part", [])
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == layers
    assert not parts or [x for part in parts for x in part if "." in x] == [f"layers.{n}" for n in range(4)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "circular:2", "interleaved:2"])
def test_a_step_has_the_batch_of_the_model_under_every_schedule(schedule: str) -> None:
    what = exported("pipe:2;data:4", "layers:pipe;batch:data", schedule=schedule, microbatches=8)
    assert ParallelDegrees.of(what, "torchtitan").batch == 32
    assert settings(what, "torchtitan")["num_tokens_per_train_step"] == 32 * 512


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


SEQUENCE = "batch:data;length:seq;memory_length:seq;positions:seq"


def test_a_table_of_positions_lies_as_the_sequence_does() -> None:
    what = exported("data:4;seq:2", SEQUENCE)
    assert settings(what, "megatron")["context-parallel-size"] == "2"
    assert settings(what, "torchtitan")["context_parallel_degree"] == 2


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "torchtitan@0.2"])
def test_every_form_of_context_parallelism_is_written_or_refused(framework: str) -> None:
    """By default, Megatron-LM runs a ring; torchtitan has no ring from 0.3 on."""
    to, can = framework.partition("@")[0], restriction_of(framework)
    for form in WAYS:
        forms = frozenset() if form == GATHER else frozenset({("memory_length", form)})
        what = exported("data:4;seq:2", SEQUENCE, framework, context=forms)
        if not can.expresses("context", form):
            with pytest.raises(UserError, match=f"{to} cannot express this plan.*{form}"):
                export(what, to)
        elif to == "megatron":
            said = {"gather": "all_gather", "all_to_all": "a2a"}
            assert settings(what, to)["cp-comm-type"] == said.get(form, "p2p")


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "torchtitan@0.2"])
def test_a_sequence_is_split_where_a_multiple_divides_it(framework: str) -> None:
    (even,) = (r for r in restriction_of(framework).relations if isinstance(r, EvenSequence))
    assert pickle.loads(pickle.dumps(even)) == even
    for length, fits in ((16 * even.multiple, True), (8 * even.multiple, False)):
        own = transformer(layers=2, d_model=32, d_kv=8, heads=4, d_ff=64, vocab=64, batch=32, length=length)
        mesh, layout = Mesh("seq:16"), Layout("length:seq;memory_length:seq")
        what = Exported("", mesh, layout, *placed(own.lower(mesh, layout)), decided(Options(), layout))
        lost, *_ = unexpressed(own, load_hardware("h100", framework), mesh, layout, Options())
        assert bool(lost) is not fits, (lost, length)
        if fits:
            export(replace(what, framework=framework), framework.partition("@")[0])
            continue
        with pytest.raises(UserError, match=f"gives each rank a multiple of {even.multiple} tokens"):
            export(replace(what, framework=framework), framework.partition("@")[0])


def test_selective_recomputation_is_each_ones_own() -> None:
    single = exported("data:8", "batch:data", recompute=("layers:keep=attention+products/2",))
    assert "SelectiveAC" in export(single, "torchtitan")
    core = exported("data:8", "batch:data", recompute=("layers:keep=products+others",))
    assert settings(core, "megatron")["recompute-granularity"] == "selective"
    for what, to in ((single, "megatron"), (core, "torchtitan"), (core, "deepspeed")):
        with pytest.raises(UserError, match=f"{to} cannot express this plan"):
            export(what, to)


def test_megatrons_modules_are_recomputed_by_name() -> None:
    graph = MODEL.step_graph
    dense = [*keep_sets(graph, "layers", tuple(MEGATRON_MODULES))]
    assert len(dense) == len({*map(MEGATRON_MODULES.get, dense)}) == 2**3 - 1
    products = {"core_attn": "attention", "mlp": "feed_forward"}
    for keep in dense:
        what = exported("data:8", "batch:data", recompute=(f"layers:keep={'+'.join(keep)}",))
        found = settings(what, "megatron")
        assert found["recompute-granularity"] == "selective"
        assert tuple(found["recompute-modules"].split()) == MEGATRON_MODULES[keep]
        again = recomputed(graph, what_again(keep)).running()["layers"]
        scopes = {node.path.partition("/")[0] for node in again if node.op.kind in PRODUCTS}
        assert scopes == {products[name] for name in MEGATRON_MODULES[keep] if name in products}


@pytest.mark.parametrize(("rank", "query"), [(0, "q"), (48, "q_up")])
def test_up_projections_of_latent_attention_are_a_module(rank: int, query: str) -> None:
    """Megatron's `mla_up_proj`: products of queries, keys and values with their last weights."""
    graph, module = latent(q_rank=rank).step_graph, ("mla_up_proj",)
    sets = keep_sets(graph, "layers", tuple(MEGATRON_MODULES))
    (keep,) = (each for each in sets if MEGATRON_MODULES[each] == module)
    again = recomputed(graph, what_again(keep)).running()["layers"]
    known = weights(graph)
    read = {known[i] for n in again if n.op.kind in PRODUCTS for i in n.inputs if i in known}
    assert {name.rpartition("/")[2] for name in read} == {query, "k_up", "v_up"}


def what_again(keep: tuple[str, ...]) -> Policies:
    return policies([f"layers:keep={'+'.join(keep)}"])


def test_a_search_under_a_framework_keeps_what_it_can_say() -> None:
    space = SAYS.narrowed(SearchSpace(recompute=(False, "selective", True)))
    assert {f"keep={'+'.join(keep)}" for keep in MEGATRON_MODULES} < {*space.recompute}


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
    assert (old["local_batch_size"], old["global_batch_size"], old["seq_len"]) == (4, 32, 512)
    assert old["mode"] == "none"
    assert settings(exported("data:8", "batch:data", "torchtitan@0.3"), "torchtitan")["local_batch_size"] == 4


SECTIONS = {
    "parallelism": "context_parallel_degree context_parallel_load_balancer data_parallel_replicate_degree "
    "data_parallel_shard_degree enable_sequence_parallel expert_parallel_degree fsdp_reshard_after_forward "
    "module_fqns_per_model_part pipeline_parallel_degree pipeline_parallel_first_stage_less_layers "
    "pipeline_parallel_last_stage_less_layers pipeline_parallel_schedule tensor_parallel_degree",
    "training": "disable_cuda_graphs mixed_precision_param steps",
    "compile": "enable enable_async_tensor_parallel",
}
RENAMED = {
    "0.3": ("pipeline_parallel_microbatch_size", "seq_len local_batch_size global_batch_size"),
    "main": (
        "num_pp_microbatches",
        "max_context_length num_tokens_per_microbatch_per_dp_rank num_tokens_per_train_step",
    ),
}
"""Fields of torchtitan/config/configs.py, 0.3.0 and b5bcd76: its parser took the same plans of Llama 3 8B."""


@pytest.mark.parametrize("release", RENAMED)
def test_torchtitan_has_the_fields_that_are_written(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = SimpleNamespace(FullAC=SimpleNamespace(Config=lambda: "full"))
    monkeypatch.setitem(sys.modules, "torchtitan", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torchtitan.distributed", SimpleNamespace(activation_checkpoint=modes))
    staged = {"schedule": "1f1b:first=1", "microbatches": 8, "recompute": ("layers",)}
    again = dict(zip(SECTIONS, (*RENAMED[release], ""), strict=True))
    for mesh, layout, more in (
        ("data:4;model:2", f"{TENSOR};length@elsewhere:model", {}),
        ("pipe:2;data:4", "layers:pipe;batch:data", staged),
        ("data:4;seq:2", SEQUENCE, {}),
    ):
        space: dict[str, Any] = {}
        exec(export(exported(mesh, layout, f"torchtitan@{release}", **more), "torchtitan"), space)
        fields = {name: [*text.split(), *again[name].split()] for name, text in SECTIONS.items()}
        config = SimpleNamespace(
            **{name: make_dataclass(name, [(f, Any, None) for f in own])() for name, own in fields.items()}
        )
        config = space["planned"](config)
        assert config.activation_checkpoint == ("full" if more else None)
        assert config.training.disable_cuda_graphs == (True if more else None)
        parts = config.parallelism.module_fqns_per_model_part
        assert not more or (parts[0][0], parts[-1][-1]) == ("tok_embeddings", "lm_head")
        degrees = ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel")
        assert math.prod(getattr(config.parallelism, f"{name}_degree") for name in degrees) == 8


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
    what = exported("data:2;seq:4", SEQUENCE, storage=split)
    with pytest.raises(UserError, match=f"{to} stores split over the ranks of the sequence too"):
        export(what, to)


def test_every_framework_with_degrees_has_a_form() -> None:
    assert {*FORMS} <= {*FORMATS}


@pytest.mark.parametrize("again", [("layers:keep=products+others:count=1",), ("layers:count=1", "batch")])
@pytest.mark.parametrize("to", ["megatron", "torchtitan", "torchtitan@0.2"])
def test_a_count_is_not_lost_beside_other_recomputation(to: str, again: tuple[str, ...]) -> None:
    what = exported("data:8", "batch:data", recompute=("layers:count=1",))
    both = replace(what, framework=to, decided=what.decided.model_copy(update={"recompute": again}))
    with pytest.raises(UserError, match="recompute"):
        settings(both, to.partition("@")[0])


def test_every_dispatcher_is_a_choice_of_megatron() -> None:
    """`--moe-token-dispatcher-type` (megatron/training/arguments.py)."""
    found = load_framework("megatron").variants["dispatcher"].options
    assert {*found} <= {"allgather", "alltoall", "flex"}


@pytest.mark.parametrize("experts", [0, 4])
def test_megatron_multiplies_the_experts_of_a_mixture_in_groups(experts: int) -> None:
    """As priced, also where every device has all experts (megatron/training/arguments.py)."""
    sizes = {"layers": 2, "d_model": 16, "d_kv": 4, "heads": 4, "d_ff": 32, "vocab": 32, "batch": 8}
    model = mixture(**sizes, experts=experts) if experts else transformer(**sizes)
    on, batch, options = Mesh("data:2"), Layout("batch:data"), Options()
    what = Exported(
        "Layout", on, batch, *placed(model.lower(on, batch, options)), decided(options, batch, {})
    )
    assert ("moe-grouped-gemm" in settings(what, "megatron")) is bool(experts)
