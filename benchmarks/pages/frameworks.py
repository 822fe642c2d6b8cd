"""The reference of frameworks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.pages.tables import prose, table
from costmodels.frameworks import Framework, framework_names, load_framework
from costmodels.hardware import hardware_names, load_hardware
from layoutopt.frameworks import says
from layoutopt.front_ends import FRONT_ENDS
from layoutopt.space.kind import ALL

HEAD = """\
# Frameworks

The same layout on the same chips takes up to twice as long in one training stack as in another, and holds
other things in memory. `--framework NAME` names the stack that a prediction, a search or an explanation is
for; a plan records it. Without it, a model from JAX is `jax`, one from PyTorch `torch`, and any other
`layoutopt`, this project's own programs.

A chip's file has its physics. A framework's file replaces numbers of it: the compiler profile, the share of
the peak that whole steps keep, launches, overlap, the memory that a process takes beside the step, and the
rules of what stays for the backward pass ([list](../explanation/cost_model.md#memory)).
`layoutopt frameworks NAME` prints them all with source and date; `NAME[@VERSION][:variant=option,…]` chooses
options of its variants. A JSON file of your own takes `"like"` a framework and its differences
([how](../guides/extending.md#a-framework)). A whole hardware file that names its compiler, as calibrated
ones do, keeps its own numbers under any framework: only what may be searched changes.
"""

RUNS = """
The last column is what each runs. torchtitan, Megatron-LM and MaxText have models of their own: an imported
program, or a `config.json` of another family, is predicted as if they had it, and a note says so.
"""
EXPRESSED = """
## What each can express

A search under a framework considers only what the framework can express; its proof names it, and its plan
can be written in the framework's form where `export` has one. With `--framework`, the plan also has
`unrestricted`, the best layout with the same prices if the framework could express every layout, and `left`,
the share of the step that it saves. Without a time limit, this comparison takes at most 20 s, or as long as
the answer took.

In PyTorch's frameworks, Megatron-LM, DeepSpeed and MaxText each axis of the mesh splits the batch, the
weights (heads, d_ff and vocab together) or the sequence, and experts lie over some of these axes. ZeRO shards
over the axes that do not split weights.

Megatron-LM cuts each sequence into two chunks per context rank, so twice these ranks divide the length. In
torchtitan, context parallelism needs FlexAttention, which gathers keys and values, and a multiple of 128
tokens on each rank; `torchtitan@0.2` also has rings and recomputes some of the layers.

On NVIDIA's GPUs, XLA's frameworks and Megatron-LM (TransformerEngine) compute products of float32 in TF32.
PyTorch's compute them in float32, which is 7 to 16 times as slow from H100 to GB200, and convolutions in
TF32; `float32=tf32` is `torch.set_float32_matmul_precision("high")`.

Megatron-LM pads the vocabulary of its models to a multiple of 128: parameters, time and memory are those of
the padded model, and `export` writes the option with which tensor ranks pad to no more. MaxText recomputes
something in every layer, so its policy that keeps most (`keep=products+attention`) stands for never.

The model of a `config.json` is written as the framework writes it. Megatron-LM multiplies the hidden units of
experts by their gates; PyTorch's frameworks, DeepSpeed and MaxText multiply the experts' results, which are
kept for backward (`--set gates=hidden` or `gates=results`). transformers' root-mean-square norms are steps on
a float32 copy (`--set norms=steps`, or `norms=library`, which `transformers:kernels=fused` has too). With
grouped products of experts, the default of transformers, predicted activations of Llama, Qwen3-MoE, Mixtral,
gpt-oss and DeepSeek-V3 are within 3 % of what autograd saves, in float32 and bfloat16; with
`experts_implementation="eager"` one product more of every choice is kept. PyTorch's frameworks and
Megatron-LM compute delta rules and state spaces by kernels of libraries (flash-linear-attention, mamba_ssm),
of which backward keeps what these save (`mamba_inner_fn`: the first projections and the scan's result);
MaxText computes them in steps (`--set scans=kernel` or `scans=steps`).

In PyTorch's frameworks, the prices of pipelines with `zero2` or `zero3` are those of stages that reduce
gradients with each microbatch (and, with `zero3`, release the weights), as those of `plan.torch` do. A
`PipelineStage` of torch 2.13 whose module is under `fully_shard` keeps both whole until the last microbatch:
such a program needs more memory.
"""
FIELDS = ("storage", "recompute", "offload", "context", "schedule")


def page() -> Iterator[str]:
    """docs/reference/frameworks.md."""
    found = [load_framework(name) for name in framework_names()]
    yield prose(HEAD)
    yield from table(("name", "software", "chips", "compiler profile", "runs"), map(_row, found))
    yield prose(RUNS)
    yield EXPRESSED
    yield from table(("framework", "alike for all variables", *FIELDS), map(_expressed, found))
    variants = [each for each in found if each.variants]
    if variants:
        yield "\n## Variants\n"
        yield from table(("framework", "variant", "options", "meaning"), _variants(variants))


def _row(found: Framework) -> tuple[object, ...]:
    kinds = [kind for kind in found.kinds if kind != "cpu"]  # a machine's own profile stays
    profiles = [f"`{load_hardware(_chip(kind), found.name).compiler}`" for kind in kinds]
    return f"`{found.name}`", found.summary, ", ".join(found.kinds), ", ".join(profiles), _runs(found)


def _runs(found: Framework) -> str:
    """The programs that it runs."""
    runs = found.programs
    if runs is None:
        return "any model"
    own = [f"your {FRONT_ENDS[each].title} programs" for each in runs.libraries]
    if runs.families is not None:
        own.append("models of its own" + f" ({len(runs.families)} families)" * bool(runs.families))
    return ", ".join(own)


def _expressed(found: Framework) -> tuple[object, ...]:
    own = says(found.says)
    alike = ", ".join(name for name, granularity in own.granularity.items() if granularity == ALL)
    return f"`{found.name}`", alike, *(_values(own.says, name) for name in FIELDS)


def _values(said: Mapping[str, tuple[object, ...] | None] | None, name: str) -> str:
    values = None if said is None else said.get(name, ())
    words = {True: "always", False: "never"}
    listed = [str(words.get(v, v)) for v in values or ()]  # type: ignore[call-overload]
    more = [v for v in listed if v.startswith("keep=") and "-" in v]
    listed = [v for v in listed if v not in more] + [f"{len(more)} sets by modules"] * bool(more)
    return "any" if values is None else ", ".join(listed) or "no"


def _chip(kind: str) -> str:
    """The first preset of a kind of chips."""
    return next(name for name in hardware_names() if load_hardware(name).kind == kind)


def _variants(found: list[Framework]) -> Iterator[tuple[object, ...]]:
    for each in found:
        for name, variant in each.variants.items():
            options = (
                f"`{option}`"
                + " (default)" * (option == variant.default)
                + f" ({', '.join(its.only)})" * bool(its.only)
                for option, its in variant.options.items()
            )
            yield f"`{each.name}`", f"`{name}`", ", ".join(options), variant.summary
