"""MaxText: logical axes over mesh axes, one storage for all matrices, one `remat_policy` for all layers.

Names are those of its base.yml (github.com/AI-Hypercomputer/maxtext, src/MaxText/configs/base.yml).
"""

from collections.abc import Mapping, Sequence

from layoutopt.space.degrees import Degrees
from layoutopt.space.kind import ALL, Choice, Decision
from layoutopt.space.recompute import KEEP
from layoutopt.space.restriction import ANY, Even, Only, Restriction
from layoutopt.space.splits import Split
from mesh_tf_core.lower.options import OPTIMIZER, WEIGHTS

_BATCH = "batch batch_no_exp batch_attn batch_moe embed_and_logits_batch kv_batch kv_batch_no_exp"
_LENGTH = "length length_no_exp attn_length attn_length_no_exp norm_length q_length q_length_no_exp"
_AXES = "data tensor fsdp tensor_transpose fsdp_transpose sequence context expert"
# Dimension -> the logical axes that mean it, of activations and of weights (`logical_axis_rules`).
MAXTEXT_DIMS: Mapping[str, Sequence[str]] = {
    "batch": tuple(f"activation_{name}" for name in _BATCH.split()),
    "length": tuple(f"activation_{name}" for name in _LENGTH.split()),
    "memory_length": ("activation_kv_length",),
    "d_model": ("embed", "embed_no_exp", "embed_moe", "embed_vocab", "norm", "activation_embed"),
    "d_ff": ("mlp", "mlp_no_fsdp", "mlp_moe", "activation_mlp", "activation_mlp_moe"),
    "heads": ("heads", "q_heads", "kv_heads", "activation_heads", "activation_kv_heads"),
    "d_kv": ("kv", "kv_head_dim", "activation_kv", "activation_kv_head_dim"),
    "vocab": ("vocab", "activation_vocab"),
    "experts": ("exp", "activation_exp"),
    "expert_batch": (),  # an expert's tokens: those of the batch that chose it
}
# MaxText's mesh axes are fixed names (`mesh_axes` of the same file); ours take the first one that is free.
MAXTEXT_AXES = tuple(_AXES.split())
MAXTEXT_ALIKE = {"batch": "data", "model": "tensor", "experts": "expert"}
MAXTEXT_ROWS: Mapping[str, Sequence[str]] = {
    **{each: row for row in MAXTEXT_DIMS.values() for each in row},
    **MAXTEXT_DIMS,
}
"""The same, with MaxText's own names for a model with its parameters."""
# The logical axes of each matrix, which MaxText splits for FSDP (`d_model` here); the length between layers.
MAXTEXT_WEIGHTS, MAXTEXT_BETWEEN = ("embed", "embed_vocab"), "activation_norm_length"
# The same of the matrices of experts, and the axis that moves their tokens (`_expert_parallelism_name` of
# src/maxtext/layers/moe.py): it splits the batch too, and what is stored of other matrices.
MAXTEXT_BESIDE_EXPERTS, MAXTEXT_EXPERTS = ("embed_no_exp", "embed_moe"), "expert"
MAXTEXT_HOST = {OPTIMIZER: "optimizer_memory_host_offload", WEIGHTS: "parameter_memory_host_offload"}
"""The kind of values on the hosts -> its name in MaxText."""
MAXTEXT_STORED = {"zero1": "data", "zero3": "fsdp"}
"""Stage -> the axis of MaxText that splits the batch, and at this stage the state too, or the weights too."""
MAXTEXT_REMAT: Mapping[tuple[str, ...], str] = {
    (): "full",
    ("o",): "save_out_proj",
    ("k", "q", "v"): "save_qkv_proj",
    ("products-feed_forward",): "save_dot_except_mlp",
    ("products-feed_forward", "attention"): "save_dot_with_context_except_mlp",
    ("products",): "minimal",
    ("products", "attention"): "minimal_with_context",
}
"""The values that a recomputed layer keeps -> the `remat_policy` that keeps them. The last saves the most;
"none" recomputes all of scanned layers (src/maxtext/layers/nnx_decoders.py @e591f30)."""


def _has_axes(decision: Decision, choice: Choice) -> bool:
    return not isinstance(decision, Split) or not choice or decision.subject in MAXTEXT_ROWS


SAYS = Restriction(
    "maxtext",
    says={
        "storage": ("layout", *MAXTEXT_STORED, "hybrid"),
        "elsewhere": ("length",),
        "recompute": (True, *(f"{KEEP}{'+'.join(keep)}" for keep in MAXTEXT_REMAT if keep)),
        "offload": ("optimizer", "weights"),
        "microbatches": ANY,
    },
    relations=(
        Only(_has_axes),
        Degrees(copies=True, stored_over_context=False, experts_on_data=True, experts_without=("zero1",)),
        Even(),
    ),
    granularity={"storage": ALL, "offload": ALL, "recompute": ALL},
)
