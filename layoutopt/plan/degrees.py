"""A plan as degrees of parallelism, and these as settings of torchtitan, Megatron-LM and DeepSpeed.

These three multiply degrees: a mesh axis splits the batch, the weights, the sequence or the stages, and no
other dimension. A plan found under one of them has this form (`layoutopt.space.degrees`); of other plans, the
first decision that does not is refused.

Names are those of torchtitan (torchtitan/config, at 0.2.2, 0.3.0 and b5bcd76), of Megatron-LM
(megatron/training/arguments.py at d98e8a6) and of DeepSpeed (deepspeed/runtime/constants.py at edaa722).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from costmodels.frameworks import load_framework
from layoutopt.plan.decided import ELSEWHERE, Decided
from layoutopt.plan.exported import NAMED, Exported, ExportedTensor, comment
from layoutopt.plan.units import some
from layoutopt.space.storage import chosen_stages
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import MICROBATCH
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.schedules import kind_name, rounds_of
from mesh_tf_core.lower.offload import OPTIMIZER, WEIGHTS
from mesh_tf_core.lower.remat_policy import Recomputed
from mesh_tf_core.lower.storage import STAGES, read_stage

EXPERTS, VOCAB = "experts", "vocab"


def software(to: str) -> str:
    """The framework whose searches find plans that a form can express."""
    return "transformers" if to == "accelerate" else to


@dataclass(frozen=True)
class ParallelDegrees:
    """The degrees of a plan.

    Attributes:
      data, tensor, context, stages: ways in which the batch, the weights, the sequence and the layers are
        split; their product is the number of devices.
      shards: of the data and context ways, those over which storage is split.
      experts: ways of the experts, among those of the other uses.
      within: ways of the matrices of each expert; without experts, `tensor`.
      sequence: the sequence is split over the tensor ways outside of the products.
      stage: of storage, of `STAGES`.
      batch, length: examples of a step and tokens of an example; 0 if the model has none.
    """

    data: int
    tensor: int
    context: int
    stages: int
    shards: int
    experts: int
    within: int
    sequence: bool
    stage: str
    batch: int
    length: int

    @classmethod
    def of(cls, what: Exported, to: str) -> ParallelDegrees:
        """The degrees of a plan.

        Raises:
          UserError: `to`, a form that has degrees alone, cannot express the plan.
        """
        given = [dict(zip(t.dims, t.sizes, strict=True)) for t in what.inputs]
        parts = max((own.get(MICROBATCH, 1) for own in given), default=1)  # the whole batch may be given
        sizes = [{d: s for d, s in own.items() if d != MICROBATCH} for own in given]
        batch = dict.fromkeys(name for own in sizes for name in [*own][:1])
        sequence = dict.fromkeys([*(name for own in sizes for name in [*own][1:2]), *what.decided.context])
        whole = {dim: size for own in sizes for dim, size in own.items()}
        weights = Counter(name for v in what.variables if v.trained for name in v.dims)
        known = dict.fromkeys(weights, "tensor") | dict.fromkeys(sequence, "context")
        known |= dict.fromkeys(batch, "data") | dict.fromkeys(what.decided.pipeline, "stages")
        uses: dict[str, dict[str, str]] = {}
        along = {a for name in sequence for a in what.layout.axes(name)}
        for dim, axes in what.layout.items():
            if dim not in sequence and {*axes} <= along and weights[dim] < 2:
                continue  # keys and values, or a table of positions, lie as the sequence does
            for axis in axes:  # what is no weight's dimension, as `expert_batch`, is the batch elsewhere
                uses.setdefault(axis, {}).setdefault(known.get(dim, "data"), dim)
        experts = what.layout.axes(EXPERTS)
        alone = tuple(a for a in experts if len(uses[a]) > 1)
        for axis, found in uses.items():
            if len({*found} - ({"tensor"} if axis in experts else {*()})) > 1:
                dims = " and ".join(repr(dim) for dim in found.values())
                raise UserError(
                    f"{to} gives each mesh axis one use, but this plan splits {dims} over {axis!r}; search "
                    f"with --framework {software(to)}"
                )
        idle = [a for a, size in what.mesh.axes if size > 1 and a not in uses]
        if idle:
            raise UserError(
                f"{to} has no use for mesh axis {idle[0]!r}, over which this plan splits no dimension; "
                f"search with --framework {software(to)}"
            )

        def axes_of(use: str) -> Axes:
            return tuple(a for a in what.mesh.names if use in uses.get(a, {}))

        over = tuple(a for a in axes_of("tensor") if a not in alone)
        _even(what, over, to)
        inner = _within_experts(what)
        ways = {use: what.mesh.group_size(axes_of(use)) for use in ("data", "context", "stages")}
        stage, shards = _stored(what, (*axes_of("data"), *axes_of("context")), to)
        if shards and not {*axes_of("context")} <= {*shards}:
            raise UserError(
                f"{to} stores split over the ranks of the sequence too, but this plan over "
                f"{'+'.join(shards)}; search with --framework {software(to)}"
            )
        return cls(
            **ways,
            tensor=what.mesh.group_size(over),
            shards=what.mesh.group_size(shards),
            experts=what.mesh.group_size(experts),
            within=what.mesh.group_size(over if inner is None else inner),
            sequence=bool(what.decided.refined.get(ELSEWHERE)),
            stage=stage,
            batch=next((whole[dim] for dim in batch), 0) * parts,
            length=next((whole[dim] for dim in sequence if dim in whole), 0),
        )

    def examples(self, parts: int) -> int:
        """Examples of a data rank in one of the parts of a step."""
        return self.batch // (self.data * parts)


def _stored(what: Exported, ranks: Axes, to: str) -> tuple[str, Axes]:
    """The stage of storage of all variables, and the axes that it splits over."""
    found = chosen_stages(what.decided)
    if found and (left := _left(what, what.decided.storage)):
        found["layout"] = left
    if len(found) > 1:
        listed = " and ".join(f"{stage} for {some(names, NAMED)}" for stage, names in found.items())
        raise UserError(
            f"{to} stores all variables alike, but this plan uses {listed}; search with --framework "
            f"{software(to)}"
        )
    if not found:
        return STAGES[0], ()
    stage = read_stage(next(iter(found)))
    return STAGES[stage.number], tuple(a for a in ranks if a in (stage.over or ranks))


def _matrices(what: Exported) -> list[ExportedTensor]:
    """The matrices but those of experts, which ways of experts may split already."""
    return [v for v in what.variables if v.trained and len(v.dims) > 1 and EXPERTS not in v.dims]


def _within_experts(what: Exported) -> Axes | None:
    """The axes that split the matrices of each expert; None if there are no experts."""
    dims = {d for v in what.variables if v.trained and EXPERTS in v.dims for d in v.dims}
    own = dims - {EXPERTS, *what.decided.pipeline}
    return tuple({axis for dim in own for axis in what.layout.axes(dim)}) if dims else None


def _left(what: Exported, named: Container[str]) -> list[str]:
    """The matrices that are not among named ones, if they are the larger part: some cannot be split."""
    own = {v.name: math.prod(v.sizes) for v in _matrices(what)}
    left = [name for name in own if name not in named]
    return left if 2 * sum(own[name] for name in left) > sum(own.values()) else []


def _even(what: Exported, tensor: Axes, to: str) -> None:
    """Raises UserError unless every matrix of the layers has a dimension over the tensor axes, and vocab lies
    over them if they divide it.

    One whose dimensions another has, too, may be whole, as key-value heads that ranks copy. So may a router,
    whose outputs no other matrix has.
    """
    every = _matrices(what)
    stacks = Counter(v.dims[0] for v in every)
    times = Counter(dim for v in every for dim in v.dims)
    layers = [v for v in every if stacks[v.dims[0]] > 1 and all(times[dim] > 1 for dim in v.dims)]
    layers = [v for v in layers if not any({*v.dims} < {*other.dims} for other in layers)]
    ways = what.mesh.group_size(tensor)
    tables = [v for v in every if VOCAB in v.dims and v.sizes[v.dims.index(VOCAB)] % ways == 0]
    for v in (*layers, *tables):
        if not {*tensor} <= {axis for dim in v.dims for axis in what.layout.axes(dim)}:
            raise UserError(
                f"{to} splits every matrix of the layers, and vocab, over its tensor ranks, but this plan "
                f"does not split {v.name} over {'+'.join(tensor)}; search with --framework {software(to)}"
            )


def _offloaded(what: Exported, kind: str, to: str) -> bool:
    """True if values of a kind lie on the hosts; UserError if only a part of them does."""
    names = what.decided.offload.get(kind, [])
    if names and (left := _left(what, names)):
        raise UserError(
            f"{to} offloads all {kind} or nothing, but this plan keeps those of {some(left, NAMED)}; search "
            f"with --framework {software(to)}"
        )
    return bool(names)


def _recomputed(decided: Decided) -> str:
    """`full`, or `selective` if the recomputed layers keep something; '' if nothing is recomputed."""
    kept = [Recomputed.parse(text).keep for text in decided.recompute]
    return "selective" if any(kept) else "full" if kept else ""


def torchtitan(what: Exported) -> str:
    """The settings as a configuration file of releases up to 0.2, or as Python for later ones."""
    found, decided = ParallelDegrees.of(what, "torchtitan"), what.decided
    parts = decided.microbatches
    options = load_framework(what.framework or "torchtitan").options()
    version = options.get("version", "main")
    staged = found.stages > 1
    sharded = found.stage != STAGES[0]
    shards = found.shards // found.context if sharded else 1
    if shards * found.context * found.tensor % found.experts:
        raise UserError(
            f"torchtitan splits experts over ranks that shard the weights, {shards} here, but this "
            f"plan has {found.experts} ways of experts; search with --storage zero2 or --storage zero3"
        )
    if found.within > 1 and _within_experts(what) is not None:
        raise UserError(
            "torchtitan does not split the matrices of an expert over tensor ranks; search with --framework "
            "torchtitan"
        )
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": found.data // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if found.stage == "zero3" else "never",
        "tensor_parallel_degree": found.tensor,
        "context_parallel_degree": found.context,
        "pipeline_parallel_degree": found.stages,
        "expert_parallel_degree": found.experts,
    }
    if staged:
        names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "circular": "LoopedBFS"}
        parallelism["pipeline_parallel_schedule"] = names[kind_name(decided.schedule or "gpipe")]
    compiled = {"enable": True}
    asynchronous = {"enable_async_tensor_parallel": options.get("tensor_messages") == "async"}
    if version == "0.2":
        parallelism |= asynchronous
    else:
        compiled |= asynchronous
        parallelism |= {"enable_sequence_parallel": found.sequence} if found.tensor > 1 else {}
    rank = found.examples(1 if staged else parts)
    training = {"local_batch_size": rank, "global_batch_size": found.batch, "seq_len": found.length}
    if version in ("0.2", "0.3"):
        parallelism |= {"pipeline_parallel_microbatch_size": found.examples(parts)} if staged else {}
    else:
        parallelism |= {"num_pp_microbatches": parts} if staged else {}
        training = {
            "num_tokens_per_microbatch_per_dp_rank": found.examples(parts) * found.length,
            "num_tokens_per_train_step": found.batch * found.length,
            "max_context_length": found.length,
            # Graphs of CUDA, on by default, exclude stages and ways of experts.
            **({"disable_cuda_graphs": True} if staged or found.experts > 1 else {}),
        }
    mode = _recomputed(decided) or "none"
    sections: dict[str, dict[str, Any]] = {
        "parallelism": parallelism,
        "training": training,
        "compile": compiled,
    }
    if version == "0.2":
        checkpoint = {"mode": mode, **({"selective_ac_option": "op"} if mode == "selective" else {})}
        sections["activation_checkpoint"] = checkpoint
        always = "This release splits the sequence over the tensor ranks; this plan does not."
        said = [comment(always)] if found.tensor > 1 and not found.sequence else []
        return "\n".join([*_head(what, found), *said, *_toml(sections)])
    classes = {"selective": "SelectiveAC.Config()", "full": "FullAC.Config()", "none": None}
    lines = [
        line
        for name, own in sections.items()
        for line in (f"{name} = dict(", *(f"    {key}={value!r}," for key, value in own.items()), ")")
    ]
    lines.append(f"activation_checkpoint = {classes[mode]}")
    return "\n".join([*_head(what, found), "# Fields of torchtitan's Trainer.Config.", *lines, ""])


def _head(what: Exported, found: ParallelDegrees) -> Iterator[str]:
    """The title; and whether the tensor ways do not divide vocab, which the software pads or splits."""
    yield comment(what.title)
    sizes = {dim: size for v in _matrices(what) for dim, size in zip(v.dims, v.sizes, strict=True)}
    if VOCAB in sizes and sizes[VOCAB] % found.tensor:
        yield comment(
            f"vocab of {sizes[VOCAB]} is whole in this plan: {found.tensor} ranks do not divide it."
        )


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, own in sections.items():
        yield f"[{name}]"
        yield from (f"{key} = {json.dumps(value)}" for key, value in own.items())
        yield ""


_CONTEXT = {"gather": "all_gather", "ring": "p2p", "zigzag": "p2p", "all_to_all": "a2a"}
"""The form of context parallelism -> Megatron's `--cp-comm-type`."""


def megatron(what: Exported) -> str:
    """The settings as arguments of Megatron-LM's pretraining scripts; stages run in 1F1B without one."""
    found, decided = ParallelDegrees.of(what, "megatron"), what.decided
    schedule = decided.schedule or "1f1b"
    flags: list[tuple[str, Any]] = [
        ("tensor-model-parallel-size", found.tensor),
        ("pipeline-model-parallel-size", found.stages),
        ("context-parallel-size", found.context),
        ("expert-model-parallel-size", found.experts),
        *([("expert-tensor-parallel-size", found.within)] if found.within != found.tensor else []),
        ("micro-batch-size", found.examples(decided.microbatches)),
        ("global-batch-size", found.batch),
        ("seq-length", found.length),
    ]
    if (rounds := rounds_of(schedule)) > 1:
        flags.append(("num-virtual-stages-per-pipeline-rank", rounds))
    flags += [("cp-comm-type", _CONTEXT[form]) for form in list(decided.context.values())[:1]]
    if mode := _recomputed(decided):
        flags.append(("recompute-granularity", mode))
    if mode == "full":
        flags += [("recompute-method", "uniform"), ("recompute-num-layers", 1)]
    offloads = _offloaded(what, OPTIMIZER, "megatron")
    switches = {
        "sequence-parallel": found.sequence,
        "use-distributed-optimizer": found.stage == "zero1",
        "tp-comm-overlap": bool(decided.collective_matmul),
        "optimizer-cpu-offload": offloads,
        "use-precision-aware-optimizer": offloads,
    }
    lines = [f"--{name} {value}" for name, value in flags]
    lines += [f"--{name}" for name, on in switches.items() if on]
    return "\n".join([*_head(what, found), *lines, ""])


def deepspeed(what: Exported) -> str:
    """The settings as DeepSpeed's JSON file; a title is no part of one."""
    to, parts = "deepspeed", what.decided.microbatches
    found = ParallelDegrees.of(what, to)
    offload = {"offload_optimizer": OPTIMIZER, "offload_param": WEIGHTS}
    content: dict[str, Any] = {
        "train_batch_size": found.batch,
        "train_micro_batch_size_per_gpu": found.examples(parts),
        "gradient_accumulation_steps": parts,
        "zero_optimization": {
            "stage": STAGES.index(found.stage),
            **{
                name: {"device": "cpu"}
                for name, kind in offload.items()
                if _offloaded(what, kind, "deepspeed")
            },
        },
    }
    if found.tensor > 1:
        content["tensor_parallel"] = {"autotp_size": found.tensor}
    if found.experts > 1:
        own = {"expert_tensor_parallel_size": found.within} if found.within > 1 else {}
        content["expert_parallel"] = {"enabled": True, "autoep_size": found.experts, **own}
    if found.context > 1:
        content["sequence_parallel_size"] = found.context
    return json.dumps(content, indent=1) + "\n"
