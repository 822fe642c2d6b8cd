"""A plan as settings of transformers (`DistributedConfig`, `TrainingArguments`) and of accelerate (YAML).

transformers takes a style for each module (transformers/distributed/tensor_parallel.py at 5.24). Models whose
modules are unknown, such as hand-written ones, are written without styles: transformers then takes those of
the model's class, which split the same dimensions. Names of accelerate are those of 1.15.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from layoutopt.plan.degrees import EXPERTS, ParallelDegrees
from layoutopt.plan.exported import HALVES, MODULES, Exported, ExportedTensor, cannot, comment
from mesh_tf_core.errors import UserError
from mesh_tf_core.lower.storage import BACKWARD, GRADIENT, ONCE, SPLIT

_FSDP = {"zero2": "keep_full_weight", "zero3": "free_full_weight", ONCE: "free_full_weight"}
"""Stage -> the style of FSDP that has it."""
_ROTATION = {"gather": "allgather", "zigzag": "alltoall"}
"""The form of context parallelism -> accelerate's exchange of keys and values."""


def transformers(what: Exported) -> str:
    """JSON with the fields of `DistributedConfig` and of `TrainingArguments`.

    Raises:
      UserError: a decision that `DistributedConfig` has no field for, or experts on too few ranks.
    """
    found, decided = ParallelDegrees.of(what, "transformers"), what.decided
    if found.context > 1:
        raise UserError(
            f"transformers has no setting for context parallelism, which this plan has on {found.context} "
            "ranks; search with --framework transformers, or use --to accelerate"
        )
    parameters = what.arrays.get(MODULES, ())
    config: dict[str, Any] = {
        "tp_size": found.tensor,
        "fsdp_size": found.shards,
        "dp_replicate_size": found.data // found.shards,
    }
    if found.tensor > 1 and parameters:
        config["tp_plan"] = dict(_styles(parameters))
    if found.data > 1 and found.stage in _FSDP and parameters:
        config["fsdp_plan"] = dict.fromkeys(_wrapped(parameters), _FSDP[found.stage])
    if (ways := what.mesh.group_size(what.layout.axes(EXPERTS))) > 1:
        if found.shards * found.tensor % ways:
            own = f"here {found.shards * found.tensor}, but this plan splits them over {ways}"
            raise cannot("transformers", f"splits experts over ranks that store or split weights, {own}")
        config["ep_size"] = ways
    arguments = {
        "per_device_train_batch_size": found.examples(decided.microbatches),
        "gradient_accumulation_steps": decided.microbatches,
        "activation_checkpointing": bool(decided.recompute),
        **({HALVES[what.dtype]: True} if what.dtype in HALVES else {}),
    }
    if decided.microbatches > 1 and _synchronises(found.stage):
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return json.dumps({"distributed_config": config, "training_arguments": arguments}, indent=1) + "\n"


def _synchronises(stage: str) -> bool:
    """True if each microbatch reduces its gradients."""
    return (GRADIENT, BACKWARD) in SPLIT[stage]


def _styles(parameters: Iterable[ExportedTensor]) -> Iterator[tuple[str, str]]:
    """Module, or array of experts -> its style of tensor parallelism."""
    split = {p.name for p in parameters if any(p.splits)}
    for p in parameters:
        module, _, own = p.name.rpartition(".")
        inside = "*" in p.name
        if len(p.dims) == 3:  # experts: [experts, out, in]
            kind = "packed_colwise" if p.splits[1] else "rowwise"
            yield p.name, kind if any(p.splits[1:]) else "replicate"
            yield module, "moe_tp_experts" if any(p.splits[1:]) else "replicate"
        elif len(p.dims) == 2 and own == "weight":
            out, into = map(bool, p.splits)
            if p.table:
                yield module, "embedding_rowwise" if out else "embedding_colwise" if into else "replicate"
            elif out:
                yield module, "colwise" if inside else "colwise_gather_output"
            else:
                yield module, ("rowwise" if inside else "rowwise_split_input") if into else "replicate"
        elif own == "weight" and _within(p, split):
            yield module, "replicated_with_grad_allreduce"


def _within(norm: ExportedTensor, split: set[str]) -> bool:
    """True for a norm of each head on its own (`q_norm`), where ranks have different heads."""
    module = norm.name.rpartition(".")[0]
    return module.endswith("_norm") and f"{module.removesuffix('_norm')}_proj.weight" in split


def _wrapped(parameters: Iterable[ExportedTensor]) -> list[str]:
    """The modules that gather their parameters together: each layer, and what is outside of the layers."""
    names = (p.name.rpartition(".")[0] for p in parameters if p.table or "*" in p.name)
    return [*dict.fromkeys(f"{name.partition('*')[0]}*" if "*" in name else name for name in names)]


def accelerate(what: Exported) -> str:
    """The YAML file that `accelerate launch --config_file` takes.

    Raises:
      UserError: experts are split, which accelerate has no setting for, or the weights without FSDP.
    """
    found, decided = ParallelDegrees.of(what, "accelerate"), what.decided
    if axes := what.layout.axes(EXPERTS):
        raise UserError(
            f"accelerate has no setting for experts, which this plan splits over {'+'.join(axes)}; use --to "
            "transformers"
        )
    sharded = found.stage in _FSDP and found.shards > 1
    if found.tensor * found.context > 1 and not sharded:
        raise UserError(
            "accelerate combines tensor and context parallelism with FSDP only, but this plan stores all "
            "variables whole; search with --storage zero2 or --storage zero3, or use --to transformers"
        )
    lines = [comment(what.title)]
    if found.tensor > 1:
        lines.append(
            "# Load the model with the distributed_config of `--to transformers`: accelerate splits none."
        )
    rank = found.examples(decided.microbatches)
    lines.append(f"# In the script: DataLoader(dataset, batch_size={rank}), a rank's part of a microbatch.")
    if decided.microbatches > 1:
        each = f"num_steps={decided.microbatches}, sync_each_batch={_synchronises(found.stage)}"
        plugin = f"gradient_accumulation_plugin=GradientAccumulationPlugin({each})"
        lines.append(f"# In the script: Accelerator({plugin})")
    lines += [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if sharded else 'MULTI_GPU'}",
        f"num_processes: {what.mesh.devices}",
        *([f"mixed_precision: {HALVES.get(what.dtype, 'no')}"] if what.dtype else []),
    ]
    if sharded:
        fsdp = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": found.stage != "zero2",
            "fsdp_activation_checkpointing": bool(decided.recompute),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        shards = found.shards // found.context  # its FSDP is over the context ranks, too
        degrees = {
            "dp_replicate_size": found.data // shards,
            "dp_shard_size": shards,
            "tp_size": found.tensor,
            "cp_size": found.context,
        }
        ways: dict[str, Any] = {f"parallelism_config_{name}": ways for name, ways in degrees.items()}
        if found.context > 1:
            form = next(iter(decided.context.values()), "gather")
            ways["parallelism_config_cp_comm_strategy"] = _ROTATION[form]
        lines += [*_yaml("fsdp_config", fsdp), *_yaml("parallelism_config", ways)]
    elif decided.recompute:
        lines.append("# In the script: model.gradient_checkpointing_enable()")
    return "\n".join([*lines, ""])


def _yaml(name: str, fields: Mapping[str, Any]) -> Iterator[str]:
    yield f"{name}:"
    yield from (f"  {key}: {json.dumps(value)}" for key, value in fields.items())
