"""Exports to transformers and accelerate: of every family, and read back by the libraries where they are
installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layoutopt import from_huggingface
from layoutopt.importers.huggingface.configuration import FORMS, names_of
from layoutopt.plan.build import decided
from layoutopt.plan.export import export
from layoutopt.plan.exported import Exported, placed
from layoutopt.space.parallelism import parallelism
from mesh_tf_core import Layout, Mesh, Options
from mesh_tf_core.errors import UserError

TINY = json.loads((Path(__file__).parents[1] / "data" / "huggingface_losses.json").read_text())["models"]
NAMED = {TINY[name]["config"]["model_type"]: TINY[name]["config"] for name in TINY}
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32}


def what(config: dict[str, Any], mesh: str, layout: str, stage: str = "", **options: Any) -> Exported:
    """A layout of a model in its export, with the parameters of its modules."""
    model = from_huggingface(
        {n: v for n, v in config.items() if n != "mtp"}, batch=8, mtp=config.get("mtp", 0)
    )
    on, rules = Mesh(mesh), Layout(layout)
    if stage:
        options["storage"] = {n: stage for n, v in model.graph.variables.items() if v.trainable}
    chosen = Options(**options)
    tensors = placed(model.lower(on, rules, chosen))
    arrays = model.modules(type("Placed", (), {"layout": rules})())  # type: ignore[attr-defined]
    return Exported("Layout", on, rules, *tensors, decided(chosen, rules), arrays)


def tensor_rules(config: dict[str, Any]) -> str:
    """Rules that split the weights of a model over an axis, as a framework of degrees does."""
    model = from_huggingface(config, batch=8)
    dims, own = model.graph.dims(), parallelism(model)
    split = [n for n in (*own.inner, *own.weights) if n not in {*own.experts, "group", "d_model"}]
    rules = {
        n: "model" for n in split if min(dims[n]) % 2 == 0 and n in ("heads", "d_ff", "d_expert", "vocab")
    }
    return ";".join(["batch:data", *(f"{n}:{axis}" for n, axis in rules.items())])


def test_layers_of_further_predictions_are_recomputed_with_the_others() -> None:
    """Loops are those of the graph: a matrix of further predictions is d_hidden by d_model."""
    loops = ("layers", "layers_1", "mtp_1_layers")
    config = config_of("deepseek_v3")
    found = what({**config, "mtp": 1}, "data:2", "batch:data", recompute=[*loops])
    assert found.stacks == [*loops]
    assert "remat_policy: full" in export(found, "maxtext")
    with pytest.raises(UserError, match="recomputes only layers and layers_1, not mtp_1_layers"):
        export(what({**config, "mtp": 1}, "data:2", "batch:data", recompute=loops[:2]), "maxtext")


def config_of(family: str) -> dict[str, Any]:
    own = NAMED[family]
    return {**own, **{n: v for n, v in EVEN.items() if n in own}, "pad_token_id": 0}


def has_modules(config: dict[str, Any]) -> bool:
    """Whether every variable of a family is an array of its own in transformers."""
    try:
        return bool(names_of(config))
    except UserError:
        return False


@pytest.mark.parametrize("family", sorted({*FORMS} & {*NAMED}))
@pytest.mark.one_in(12)
def test_every_family_has_settings_of_its_modules(family: str) -> None:
    config = config_of(family)
    whole = not has_modules(config)
    mesh, rules = ("data:2", "batch:data") if whole else ("data:2;model:2", tensor_rules(config))
    found = json.loads(export(what(config, mesh, rules, "zero3@data"), "transformers"))
    own = found["distributed_config"]
    assert (own["tp_size"], own["fsdp_size"], own["dp_replicate_size"]) == (1 if whole else 2, 2, 1)
    assert found["training_arguments"]["per_device_train_batch_size"] == 4
    if whole:
        assert "fsdp_plan" not in own  # that of the model's class
        return
    styles = own["tp_plan"]
    assert {"colwise", "rowwise"} <= {*styles.values()}
    assert any(
        name.endswith(".*") and style == "free_full_weight" for name, style in own["fsdp_plan"].items()
    )
    check_reader(config, own)


def check_reader(config: dict[str, Any], own: dict[str, Any]) -> None:
    """transformers takes what is written for a model of this configuration."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from transformers.distributed import DistributedConfig

    made = getattr(transformers, name := FORMS[config["model_type"]][0], None)
    if made is None:
        pytest.skip(f"this version has no {name}")
    with torch.device("meta"):
        module = made(transformers.AutoConfig.for_model(**config))
    read = DistributedConfig.from_dict(own)
    assert {n: v for n, v in read.to_dict().items() if n in own} == own
    styles, _, wrapped = module._resolve_parallel_plans(read)
    assert wrapped and bool(styles) == (read.tp_size > 1)


def test_experts_over_ranks() -> None:
    config = config_of("qwen3_moe")
    base = tensor_rules(config).replace(";d_expert:model", "")
    rules = f"{base};expert_batch:data;experts:model"
    own = json.loads(export(what(config, "data:2;model:2", rules, "zero2@data"), "transformers"))[
        "distributed_config"
    ]
    assert (own["ep_size"], own["tp_size"]) == (2, 2)
    assert own["tp_plan"]["model.layers.*.mlp.gate"] == "replicate"
    assert own["fsdp_plan"]["model.layers.*"] == "keep_full_weight"


def test_hybrid_sharding_and_microbatches() -> None:
    found = what(config_of("llama"), "far:2;near:2", "batch:far+near", "zero3@near", microbatches=2)
    said = json.loads(export(found, "transformers"))
    own = said["distributed_config"]
    assert (own["fsdp_size"], own["dp_replicate_size"], own["tp_size"]) == (2, 2, 1)
    assert said["training_arguments"]["gradient_accumulation_steps"] == 2
    assert said["training_arguments"]["accelerator_config"] == {
        "gradient_accumulation_kwargs": {"sync_each_batch": True}
    }
    text, rank = export(found, "accelerate"), said["training_arguments"]["per_device_train_batch_size"]
    assert "sync_each_batch=True" in text and f"batch_size={rank})" in text
    once = what(config_of("llama"), "far:2;near:2", "batch:far+near", "zero3-once@near", microbatches=2)
    assert "accelerator_config" not in json.loads(export(once, "transformers"))["training_arguments"]
    assert "sync_each_batch=False" in export(once, "accelerate")
    check_reader(config_of("llama"), own)


def yaml_of(text: str) -> dict[str, Any]:
    """The settings of a file of accelerate: sections of `name: JSON value`."""
    found: dict[str, Any] = {}
    section = found
    for line in text.splitlines():
        name, _, value = line.strip().partition(": ")
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            section = found
        if line.endswith(":"):
            section = found.setdefault(line[:-1], {})
        else:
            section[name] = json.loads(value) if line.startswith(" ") else value
    return found


def test_accelerate(tmp_path: Path) -> None:
    config = config_of("llama")
    text = export(
        what(config, "data:2;model:2", tensor_rules(config), "zero2@data", recompute=("layers",)),
        "accelerate",
    )
    found = yaml_of(text)
    assert found["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert found["fsdp_config"]["fsdp_activation_checkpointing"] is True
    degrees = {n.removeprefix("parallelism_config_"): v for n, v in found["parallelism_config"].items()}
    assert degrees == {"dp_replicate_size": 1, "dp_shard_size": 2, "tp_size": 2, "cp_size": 1}
    assert "distributed_config" in text
    plain = yaml_of(export(what(config, "data:4", "batch:data"), "accelerate"))
    assert (plain["distributed_type"], plain["num_processes"]) == ("MULTI_GPU", "4")
    for mesh, rules in (
        ("data:2;model:2", tensor_rules(config)),
        ("model:2", "heads:model;d_ff:model;vocab:model"),
    ):
        with pytest.raises(UserError, match="with FSDP only, but this plan stores all variables whole"):
            export(what(config, mesh, rules), "accelerate")
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.parallelism_config import ParallelismConfig

    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    read = ClusterConfig.from_yaml_file(str(file))
    assert read.distributed_type == "FSDP" and read.num_processes == 4
    assert ParallelismConfig(**degrees).total_size == 4


@pytest.mark.parametrize(
    ("mesh", "rules", "stage", "why"),
    [
        ("data:2;seq:2", "batch:data;length:seq", "", "context parallelism"),
        ("data:2;seq:4", "batch:data;length:seq", "zero3@data+seq", "context parallelism"),
        ("data:2", "batch:data;experts:data", "", "store or split weights"),
    ],
)
def test_what_transformers_has_no_field_for_is_refused(mesh: str, rules: str, stage: str, why: str) -> None:
    config = config_of("qwen3_moe" if "experts" in rules else "llama")
    with pytest.raises(UserError, match=why):
        export(what(config, mesh, rules, stage), "transformers")
