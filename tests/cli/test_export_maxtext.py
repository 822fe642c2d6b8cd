"""What `export --to maxtext` says and refuses, of plans made by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

import layoutopt
import mesh_tf_core as mtf
from examples.transformer_lm import model as transformer_lm
from layoutopt.frameworks.maxtext import MAXTEXT_REMAT
from layoutopt.plan.decided import Decided
from layoutopt.plan.export import export
from layoutopt.plan.exported import Exported, ExportedTensor
from mesh_tf_core.lower.recomputed import keep_sets
from mesh_tf_core.lower.remat_policy import Recomputed
from tests.cli.exported import matrices, two_axes


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("", "ici_data_parallelism: 2"),  # batch:a+b are axes of their own there
        ("zero1", "shard_optimizer_over_data: True"),
        ("zero3", "ici_fsdp_parallelism: 8"),
    ],
)
def test_maxtext_stores_all_matrices_alike(stage: str, said: str) -> None:
    text = export(matrices(stage, stage), "maxtext")
    assert said in text and ("shard_optimizer" in text) == (stage == "zero1")
    assert ('["embed", ["fsdp"]]' in text) == (stage == "zero3")


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (
            matrices("zero1", "zero3"),
            "uses zero1 for wi and zero3 for wo; search with --framework maxtext",
        ),
        (matrices("", "zero3"), "uses layout for wi and zero3 for wo"),
        (matrices("zero2", "zero2"), "cannot express this plan, in which the storage of wi, wo is zero2"),
        (
            matrices("zero1", "zero1", layout="batch:a;d_ff:c"),
            r"only over the batch's axes \(a\), but this plan stores wi over a\+b",
        ),
        (
            matrices("zero3", "zero3", layout="batch:a+b;d_ff:c;length:a"),
            r"only over the batch's axes \(none\)",
        ),
    ],
)
def test_maxtext_refuses_storage_that_it_has_not(what: Exported, why: str) -> None:
    with pytest.raises(mtf.UserError, match=f"^maxtext .*{why}"):
        export(what, "maxtext")


def test_maxtext_shards_hybridly() -> None:
    """Stored over a part of the batch's axes, which is `fsdp`; the others are `data`."""
    text = export(matrices("zero3@b", "zero3@b"), "maxtext")
    assert "ici_fsdp_parallelism: 4" in text and "ici_data_parallelism: 2" in text
    table = dict(json.loads(text.split("logical_axis_rules: ")[1]))
    assert table["embed"] == ["fsdp"] and table["activation_batch"] == ["data", "fsdp"]
    with pytest.raises(mtf.UserError, match="stores wi over a; search"):
        export(matrices("zero1@a", "zero1@a"), "maxtext")


def test_maxtext_recomputes_and_cuts_the_batch() -> None:
    plain, other = (
        export(matrices("", "", recompute=r, parts=n), "maxtext") for r, n in (((), 1), (("layers",), 4))
    )
    assert "remat_policy: minimal_with_context" in plain and "remat_policy: full" in other
    assert "gradient_accumulation_steps" not in plain and "gradient_accumulation_steps: 4" in other
    assert "per_device_batch_size: 4\n" in plain and "per_device_batch_size: 1\n" in other


def test_every_policy_of_maxtext_is_searched_and_written() -> None:
    config = {"model_type": "llama", "vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    found = set()
    for model in (transformer_lm(layers=2, batch=4), layoutopt.from_huggingface({**config, **sizes})):
        found |= {*keep_sets(model.step_graph, "layers", tuple(MAXTEXT_REMAT))}
    assert found == {keep for keep in MAXTEXT_REMAT if keep}
    for keep, policy in MAXTEXT_REMAT.items():
        text = export(matrices("", "", recompute=(str(Recomputed("layers", keep)),)), "maxtext")
        assert f"remat_policy: {policy}\n" in text


def test_maxtext_has_one_policy_for_all_layers() -> None:
    """Of two stacks of layers, which several weights begin with, one runs again."""

    def exported(*again: str) -> str:
        stacks = [
            ExportedTensor(
                f"{dim}/{name}", (dim, "d_model", "d_ff"), ((), (), ()), (2, 8, 16), True, stacked=True
            )
            for dim in ("encoder_layers", "layers")
            for name in ("up", "gate")
        ]
        what = matrices("", "", layout="batch:a;d_ff:c", recompute=again)
        return export(replace(what, variables=(*what.variables, *stacks)), "maxtext")

    assert "remat_policy: full" in exported("layers", "encoder_layers")
    assert "nothing in scanned layers\nremat_policy: minimal_with_context" in exported()
    with pytest.raises(mtf.UserError, match="recomputes only layers, not encoder_layers; search with"):
        exported("layers")


def test_maxtext_says_what_lies_between_slices() -> None:
    what = replace(matrices("zero3", "zero3"), slices={"a": 2, "b": 2})
    lines = export(what, "maxtext").splitlines()
    assert "ici_fsdp_parallelism: 2" in lines and "dcn_fsdp_parallelism: 4" in lines
    assert "dcn_data_parallelism: 1" in lines and "dcn_tensor_parallelism: 1" in lines
    assert "dcn" not in export(replace(what, slices={}), "maxtext")


def test_maxtext_takes_its_own_names() -> None:
    weights = (ExportedTensor("wi", ("embed", "mlp"), ((), ("c",)), (8, 16), True),)
    found = Exported("title", mtf.Mesh("a:2;c:2"), mtf.Layout("batch:a;mlp:c;kv_heads:c"), weights, ())
    table = dict(json.loads(export(found, "maxtext").split("logical_axis_rules: ")[1]))
    assert table["mlp"] == table["activation_mlp"] == table["q_heads"] == table["kv_heads"]
    with pytest.raises(mtf.UserError, match="one logical axis 'heads' for 'kv_heads' and another dimension"):
        export(replace(found, layout=mtf.Layout("heads:a;kv_heads:c")), "maxtext")


def test_maxtext_refuses_a_dimension_that_it_lacks() -> None:
    with pytest.raises(mtf.UserError, match="no logical axis for dimension 'd_fff'; did you mean 'd_ff'\\?"):
        export(two_axes(d_fff=("a",)), "maxtext")


@pytest.mark.parametrize(
    ("layout", "stage", "sizes", "embed"),
    [
        ("batch:a+b;expert_batch:a;experts:b", "zero3", {"fsdp": 2, "expert": 4}, ["fsdp", "expert"]),
        ("batch:a+b;experts:a+b", "zero3", {"expert": 8}, ["expert"]),
        ("batch:a+b;expert_batch:a;experts:b", "zero3@b", {"data": 2, "expert": 4}, ["expert"]),
        ("batch:a+b;expert_batch:a;experts:b;d_ff:c", "", {"data": 2, "expert": 4, "tensor": 2}, []),
    ],
)
def test_maxtext_moves_tokens_over_its_axis_of_experts(
    layout: str, stage: str, sizes: dict[str, int], embed: list[str]
) -> None:
    """It splits the batch and dense weights too, as MaxText's own rules have it."""
    names = ("wi", "router", "w_in")
    dims = (("d_model", "d_ff"), ("d_model", "experts"), ("experts", "d_model", "d_ff"))
    placed_as = mtf.Layout(layout)
    tensors = [
        ExportedTensor(name, own, tuple(placed_as.axes(d) for d in own), (8,) * len(own), True)
        for name, own in zip(names, dims, strict=True)
    ]
    said = Decided(storage={"wi": stage, "w_in": stage, "router": stage} if stage else {})
    text = export(
        Exported(
            "title", mtf.Mesh("a:2;b:4;c:2" if "tensor" in sizes else "a:2;b:4"), placed_as, tensors, (), said
        ),
        "maxtext",
    )
    found = dict(re.findall(r"^ici_(\w+)_parallelism: (\d+)$", text, re.MULTILINE))
    assert {n: int(size) for n, size in found.items() if size != "1"} == sizes
    table = dict(json.loads(text.split("logical_axis_rules: ")[1]))
    assert table["exp"] == table["activation_exp"] == ["expert"]
    assert table["activation_batch"] == table["activation_batch_moe"]
    assert set(table["activation_batch"]) == {*sizes} - {"tensor"}
    assert table["embed"] == embed and table["embed_moe"] == [n for n in embed if n != "expert"]


@pytest.mark.parametrize(("chips", "said"), [("gpu", True), ("cpu", True), ("tpu", False), ("", False)])
def test_other_chips_than_tpus_are_named(chips: str, said: bool) -> None:
    text = export(replace(matrices("", ""), chips=chips), "maxtext")
    assert (f"hardware: {chips}\n" in text) == said and ("hardware:" in text) == said


@pytest.mark.parametrize("to", ["maxtext", "megatron", "torchtitan"])
@pytest.mark.parametrize(("family", "lacking"), [("qwen2_moe", True), ("qwen3_moe", False), ("", False)])
def test_settings_say_that_a_framework_has_no_such_model(to: str, family: str, lacking: bool) -> None:
    said = f"# {to} has no model of the family {family}: these settings are for one that you write."
    tokens = ExportedTensor("tokens", ("batch", "length"), (("a", "b"), ()), (64, 8))
    what = replace(matrices("", ""), family=family, inputs=(tokens,))
    assert (said in export(what, to)) == lacking
