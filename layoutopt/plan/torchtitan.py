"""A plan as settings of torchtitan: a configuration file up to 0.2, Python from 0.3 on.

Names are those of torchtitan/config at 0.2.2, 0.3.0 and b5bcd76.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from costmodels.frameworks import load_framework
from layoutopt.plan.degrees import ParallelDegrees, heading, stages_of, within_experts
from layoutopt.plan.exported import HALVES, Exported, cannot, comment
from mesh_tf_core.ir.schedules import kind_name
from mesh_tf_core.lower.storage import STAGES

_USE = """\
# In a file mine.py beside this one, plan.py, for torchtitan.train --module mine --config mine:
#     from plan import planned
#     from torchtitan.models.MODEL.config_registry import CONFIG  # your model's, as llama3 has llama3_8b
#     def mine(): return planned(CONFIG())
"""
_PLANNED = """
def planned(config):
    \"\"\"A Trainer.Config with this plan.\"\"\"
    from dataclasses import replace

    from torchtitan.distributed import activation_checkpoint

    config.parallelism = replace(config.parallelism, **parallelism)
    config.training = replace(config.training, **training)
    config.compile = replace(config.compile, **compile)
    config.activation_checkpoint = {}
    return config
"""


def torchtitan(what: Exported) -> str:
    """The settings as a configuration file of releases up to 0.2, or as Python for later ones."""
    found, decided = ParallelDegrees.of(what, "torchtitan"), what.decided
    parts = decided.microbatches
    options = load_framework(what.framework or "torchtitan").options()
    version = options.get("version", "main")
    staged, old = found.stages > 1, version == "0.2"
    shards = found.shards // found.context if found.stage != STAGES[0] else 1
    if shards * found.context * found.tensor % found.experts:
        but = f"{shards} here, but this plan has {found.experts} ways of experts"
        raise cannot("torchtitan", f"splits experts over ranks that shard the weights, {but}")
    if found.stage == STAGES[1] and not staged:
        why = "reduces gradients with every microbatch, except in stages, but this plan (zero1) once"
        raise cannot("torchtitan", why)
    if found.within > 1 and within_experts(what) is not None:
        raise cannot("torchtitan", "does not split the matrices of an expert over tensor ranks")
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": found.data // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if found.stage.startswith("zero3") else "never",
        "tensor_parallel_degree": found.tensor,
        "context_parallel_degree": found.context,
        "pipeline_parallel_degree": found.stages,
        "expert_parallel_degree": found.experts,
    }
    if staged:
        names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "circular": "LoopedBFS"}
        names |= {"zb-v": "ZBVZeroBubble", "dualpipev": "DualPipeV"}
        parallelism["pipeline_parallel_schedule"] = names[kind_name(decided.schedule or "gpipe")]
        order, counts = stages_of(what)
        if counts:
            ends = itertools.pairwise((0, *itertools.accumulate(counts)))
            own = [[f"layers.{n}" for n in range(*each)] for each in ends]
            head = "output" if old else "lm_head"
            own = [["tok_embeddings", *own[0]], *own[1:-1], [*own[-1], "norm", head]]
            parallelism["module_fqns_per_model_part"] = own
        else:  # By default both ends have a layer less.
            parallelism["pipeline_parallel_first_stage_less_layers"] = 0
            parallelism["pipeline_parallel_last_stage_less_layers"] = 0
            if order.rounds > 2:  # By default one stage of a rank, or two.
                layers = next(map(what.size, decided.pipeline))
                parallelism["pipeline_parallel_layers_per_stage"] = layers // (found.stages * order.rounds)
    if found.context > 1:
        form = next(iter(decided.context.values()), "gather")
        exchange = {"context_parallel_rotate_method": "allgather" if form == "gather" else "alltoall"}
        parallelism |= exchange if old else {"context_parallel_load_balancer": None}
    compiled = {"enable": True}
    tensor_messages = options.get("tensor_messages") == "async"
    (parallelism if old else compiled)["enable_async_tensor_parallel"] = tensor_messages
    if found.tensor > 1 and not old:
        parallelism["enable_sequence_parallel"] = found.sequence
    rank = found.examples(1 if staged else parts)
    training: dict[str, Any] = {"local_batch_size": rank, "global_batch_size": found.batch}
    training["seq_len"] = found.length
    if version in ("0.2", "0.3"):
        parallelism |= {"pipeline_parallel_microbatch_size": found.examples(parts)} if staged else {}
    else:
        parallelism |= {"num_pp_microbatches": parts} if staged else {}
        training = {
            "num_tokens_per_microbatch_per_dp_rank": found.examples(parts) * found.length,
            "num_tokens_per_train_step": found.batch * found.length,
            "max_context_length": found.length,
        }
    if what.dtype in (*HALVES, "float32"):
        training["mixed_precision_param"] = what.dtype
    if not old and (staged or found.experts > 1):
        training["disable_cuda_graphs"] = True  # which are on by default
    mode, count = what.recomputed
    mode = mode or "none"
    sections: dict[str, dict[str, Any]]
    sections = {"parallelism": parallelism, "training": training, "compile": compiled}
    if old:
        which = str(what.every(count)) if count else "op" if mode == "selective" else ""
        checkpoint = {"mode": "selective", "selective_ac_option": which} if which else {"mode": mode}
        sections["activation_checkpoint"] = checkpoint
        always = "This release splits the sequence over the tensor ranks; this plan does not."
        said = [comment(always)] if found.tensor > 1 and not found.sequence else []
        said = [*heading(what, found, "torchtitan"), *said]
        return "\n".join([*said, *_lines(sections, "[{}]", "{} = {}", json.dumps)])
    modes = {"selective": "SelectiveAC", "full": "FullAC"}
    lines = _lines(sections, "{} = dict(", "    {}={},", repr, [")"])
    recomputed = f"activation_checkpoint.{modes[mode]}.Config()" if mode in modes else None
    return "\n".join([*heading(what, found, "torchtitan"), _USE, *lines, _PLANNED.format(recomputed)])


def _lines(
    sections: Mapping[str, Any], head: str, line: str, text: Any, end: Sequence[str] = ()
) -> Iterator[str]:
    for name, own in sections.items():
        yield from (head.format(name), *(line.format(key, text(x)) for key, x in own.items()), *end, "")
