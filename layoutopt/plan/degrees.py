"""A plan as degrees of parallelism, and these as settings of Megatron-LM and DeepSpeed.

These two and torchtitan multiply degrees: a mesh axis splits the batch, the weights, the sequence or the
stages, and no other dimension. A plan found under one of them has this form (`layoutopt.space.degrees`); of
other plans, the first decision that does not is refused.

Names are those of Megatron-LM (megatron/training/arguments.py at d98e8a6) and of DeepSpeed
(deepspeed/runtime/constants.py at edaa722).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from costmodels.frameworks import load_framework
from layoutopt.frameworks import of_version, says
from layoutopt.frameworks.megatron import MEGATRON_MODULES
from layoutopt.plan.decided import ELSEWHERE
from layoutopt.plan.exported import HALVES, NAMED, Exported, ExportedTensor, cannot, comment
from layoutopt.plan.units import some
from layoutopt.space.degrees import EvenSequence
from layoutopt.space.kind import GATHER
from layoutopt.space.storage import chosen_stages
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import MICROBATCH, TICK
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.schedules import GPIPE, layer_order
from mesh_tf_core.ir.stage_orders import Interleaved
from mesh_tf_core.lower.options import OPTIMIZER, WEIGHTS
from mesh_tf_core.lower.remat_policy import Recomputed
from mesh_tf_core.lower.storage import STAGES, read_stage

EXPERTS, VOCAB = "experts", "vocab"


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
        features = {name for v in what.variables if not v.table for name in v.dims}
        seconds = (name for own in sizes for name in [*own][1:2])
        sequence = dict.fromkeys([*(n for n in seconds if n not in features), *what.decided.context])
        if not sequence and to in ("megatron", "torchtitan"):
            raise UserError(f"{to} trains on texts, but no input of this model is one; choose another format")
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
                raise cannot(to, f"gives each mesh axis one use, but this plan splits {dims} over {axis!r}")
        idle = [a for a, size in what.mesh.axes if size > 1 and a not in uses]
        if idle:
            raise cannot(to, f"has no use for mesh axis {idle[0]!r}, over which this plan splits nothing")

        def axes_of(use: str) -> Axes:
            return tuple(a for a in what.mesh.names if use in uses.get(a, {}))

        over = tuple(a for a in axes_of("tensor") if a not in alone)
        _even(what, over, to)
        inner = within_experts(what)
        ways = {use: what.mesh.group_size(axes_of(use)) for use in ("data", "context", "stages")}
        stage, shards = _stored(what, (*axes_of("data"), *axes_of("context")), to)
        if shards and not {*axes_of("context")} <= {*shards}:
            ranks = "+".join(shards)
            raise cannot(to, f"stores split over the ranks of the sequence too, but this plan over {ranks}")
        length = next((whole[dim] for dim in sequence if dim in whole), 0)
        for each in of_version(says(to), what.framework).relations:
            if isinstance(each, EvenSequence) and not each.fits((length,), what.mesh, axes_of("context")):
                but = f"but this plan splits {length} over {ways['context']}"
                raise cannot(to, f"gives each rank a multiple of {each.multiple} tokens of a sequence, {but}")
        return cls(
            **ways,
            tensor=what.mesh.group_size(over),
            shards=what.mesh.group_size(shards),
            experts=what.mesh.group_size(experts),
            within=what.mesh.group_size(over if inner is None else inner),
            sequence=bool(what.decided.refined.get(ELSEWHERE)),
            stage=stage,
            batch=next((whole[dim] for dim in batch), 0) * parts,
            length=length,
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
        raise cannot(to, f"stores all variables alike, but this plan uses {listed}")
    if not found:
        return STAGES[0], ()
    stage = read_stage(next(iter(found)))
    return STAGES[stage.number], tuple(a for a in ranks if a in (stage.over or ranks))


def _matrices(what: Exported) -> list[ExportedTensor]:
    """The matrices but those of experts, which ways of experts may split already."""
    return [v for v in what.variables if v.trained and len(v.dims) > 1 and EXPERTS not in v.dims]


def within_experts(what: Exported) -> Axes | None:
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
    times = Counter(dim for v in every for dim in v.dims)
    layers = [v for v in every if len(v.dims) > 2 and v.dims[0] in what.stacks]
    layers = [v for v in layers if all(times[dim] > 1 for dim in v.dims)]
    layers = [v for v in layers if not any({*v.dims} < {*other.dims} for other in layers)]
    ways = what.mesh.group_size(tensor)
    tables = [v for v in every if VOCAB in v.dims and v.sizes[v.dims.index(VOCAB)] % ways == 0]
    for v in (*layers, *tables):
        if not {*tensor} <= {axis for dim in v.dims for axis in what.layout.axes(dim)}:
            but = f"but this plan does not split {v.name} over {'+'.join(tensor)}"
            raise cannot(to, f"splits every matrix of the layers, and vocab, over its tensor ranks, {but}")


def _offloaded(what: Exported, kind: str, to: str) -> bool:
    """True if values of a kind lie on the hosts; UserError if only a part of them does."""
    names = what.decided.offload.get(kind, [])
    if names and (left := _left(what, names)):
        raise cannot(to, f"offloads all {kind} or nothing, but this plan keeps those of {some(left, NAMED)}")
    return bool(names)


def stages_of(what: Exported) -> tuple[Interleaved, list[int]]:
    """The stages, and the layers of each virtual stage in the model's order; no layers if these are equal."""
    for dim, count in what.decided.pipeline.items():
        order = layer_order(what.decided.schedule or GPIPE, count)
        counts = order.counts(what.size(dim)).tolist()
        return order, counts if len({*counts}) > 1 else []
    return Interleaved(1, 1), []


def heading(what: Exported, found: ParallelDegrees, to: str) -> Iterator[str]:
    """`Exported.heading`, and whether the tensor ways do not divide vocab, which `to` pads or splits."""
    yield from what.heading(to)
    sizes = {dim: size for v in _matrices(what) for dim, size in zip(v.dims, v.sizes, strict=True)}
    if VOCAB in sizes and sizes[VOCAB] % found.tensor:
        yield comment(
            f"vocab of {sizes[VOCAB]} is whole in this plan: {found.tensor} ranks do not divide it."
        )


_CONTEXT = {GATHER: "all_gather", "ring": "p2p", "zigzag": "p2p", "all_to_all": "a2a"}
"""The form of context parallelism -> Megatron's `--cp-comm-type`."""


def megatron(what: Exported) -> str:
    """The settings as arguments of Megatron-LM's pretraining scripts; stages run in 1F1B without one."""
    found, decided = ParallelDegrees.of(what, "megatron"), what.decided
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
    if found.tensor > 1 and any(VOCAB in v.dims for v in what.variables):  # it pads to this times the ranks
        every = load_framework("megatron").pads[VOCAB].multiple
        flags.append(("make-vocab-size-divisible-by", max(1, every // found.tensor)))
    order, counts = stages_of(what)
    if counts and not order.given:
        own = ["t" * n for n in counts]
        layout = "|".join(["E" + own[0], *own[1:-1], own[-1] + "L"])
        flags.append(("pipeline-model-parallel-layout", f"'{layout}'"))  # "|" means a pipe in a shell
    elif order.rounds > 1:
        flags.append(("num-virtual-stages-per-pipeline-rank", order.rounds))
    given = order.given if counts else {}
    flags += [(f"decoder-{end}-pipeline-num-layers", layers) for end, layers in given.items()]
    if found.context > 1:
        flags.append(("cp-comm-type", _CONTEXT[next(iter(decided.context.values()), GATHER)]))
    mode, count = what.recomputed
    if mode:
        flags.append(("recompute-granularity", mode))
    if mode == "full":
        number = count or 1
        if TICK in decided.recompute:  # whole stages, from their inputs
            number = max(order.counts(what.size(dim)).max() for dim in decided.pipeline)
        flags += [("recompute-method", "block" if count else "uniform"), ("recompute-num-layers", number)]
    for text in decided.recompute if mode == "selective" else ():
        flags.append(("recompute-modules", " ".join(MEGATRON_MODULES[Recomputed.parse(text).keep])))
    offloads = _offloaded(what, OPTIMIZER, "megatron")
    options = load_framework(what.framework).options() if what.framework else {}
    dispatcher = [("moe-token-dispatcher-type", options.get("dispatcher", "alltoall"))]
    flags += dispatcher * (found.experts > 1)
    flags += [("moe-router-dtype", "fp32")] * (within_experts(what) is not None)  # as priced
    behind = found.sequence and options.get("tensor_messages") == "overlapped"
    early = found.data * found.context > 1 and options.get("kernels") == "core"  # behind backward
    switches = {
        **({HALVES[what.dtype]: True} if what.dtype in HALVES else {}),
        "grad-reduce-in-bf16": what.dtype == "bfloat16" and options.get("gradients") == "bfloat16",
        "moe-grouped-gemm": within_experts(what) is not None,  # as priced; else one product after the other
        "overlap-grad-reduce": early,
        "overlap-param-gather": early and found.stage == "zero1",
        "sequence-parallel": found.sequence,
        "use-distributed-optimizer": found.stage == "zero1",
        "tp-comm-overlap": behind or bool(decided.collective_matmul),
        "optimizer-cpu-offload": offloads,
        "use-precision-aware-optimizer": offloads,
    }
    lines = [f"--{name} {value}" for name, value in flags]
    lines += [f"--{name}" for name, on in switches.items() if on]
    return "\n".join([*heading(what, found, "megatron"), *lines, ""])


def deepspeed(what: Exported) -> str:
    """The settings as DeepSpeed's JSON file; a title is no part of one."""
    to, parts = "deepspeed", what.decided.microbatches
    found = ParallelDegrees.of(what, to)
    offload = {"offload_optimizer": OPTIMIZER, "offload_param": WEIGHTS}
    wide = what.framework and load_framework(what.framework).options().get("gradients") == "float32"
    content: dict[str, Any] = {
        "train_batch_size": found.batch,
        "train_micro_batch_size_per_gpu": found.examples(parts),
        "gradient_accumulation_steps": parts,
        **({HALVES[what.dtype]: {"enabled": True}} if what.dtype in HALVES else {}),
        **({"data_types": {"grad_accum_dtype": "fp32"}} if wide else {}),  # else the parameters' type
        "zero_optimization": {
            "stage": STAGES.index(found.stage),
            "overlap_comm": True,  # as predicted; its default at stage 3 alone
            **{name: {"device": "cpu"} for name, kind in offload.items() if _offloaded(what, kind, to)},
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
