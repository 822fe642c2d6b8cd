"""Coming from other trainers: every row of the page's tables runs, and means what its left side means."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import layoutopt
from examples import moe_lm, transformer_lm
from layoutopt.frameworks import says
from layoutopt.frameworks.maxtext import MAXTEXT_ROWS
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.plan.build import decided
from layoutopt.space.decisions import beyond
from mesh_tf_core import Model
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Program
from tests.docs.console import run, steps, unlike

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "coming_from.md"
ROW = re.compile(r"^\|(.*)\|$", re.MULTILINE)
REFUSED = re.compile(r"\(.*\)")
"""A setting that a search under its framework does not consider."""
MESHES = {"replica": "replica:2;data:2", "pipe": "pipe:2", "model": "model:2", "seq": "seq:2"}
MESHES |= {"data": "data:2;expert:2", "": "data:2"}
"""An axis that a right-hand side names -> a mesh to try it on; the first one that is named counts."""
NUMBERS = {"N": 4, "V": 2}
SIZES = {"batch": 16, "length": 16}
Meaning = Callable[[Evaluation], bool]


@cache
def model(mixture: bool, **sizes: int) -> Model:
    own = {"layers": 4, "d_model": 16, "d_kv": 4, "heads": 4, "d_ff": 32, "vocab": 32, **sizes}
    return moe_lm.model(**own, experts=4) if mixture else transformer_lm.model(**own, gated=True)


def tables() -> Iterator[list[list[str]]]:
    """The translations: the head, and the rows."""
    for table in PAGE.read_text(encoding="utf-8").split("\n\n"):
        found = [[cell.strip() for cell in row.split("|")] for row in ROW.findall(table)]
        if found and found[0][-1] in ("layoutopt", "in layoutopt"):
            yield [found[0], *found[2:]]


def rows() -> Iterator[tuple[str, str]]:
    """The first cell of each row of a translation that is not empty, and the right-hand side."""
    for table in tables():
        for cells in table[1:]:
            left = next(filter(None, cells))
            yield left[1:-1] if REFUSED.fullmatch(left) else left, cells[-1]


@cache
def priced(text: str) -> Evaluation:
    """A right-hand side with some numbers, for a small model on the mesh that it names."""
    layout, sizes, chosen = "", dict(SIZES), dict[str, Any]()
    for code in re.findall(r"`([^`]+)`", text):
        word = re.sub(r"\b[NV]\b", lambda found: str(NUMBERS[found[0]]), code)
        if not word.startswith("--"):
            layout = word
            continue
        option, value = shlex.split(word)
        name = option.removeprefix("--").replace("-", "_")
        if name == "set":
            hparam, _, size = value.partition("=")
            sizes[hparam] = int(size)
        else:
            several = name in ("recompute", "offload")
            chosen[name] = int(value) if value.isdigit() else [value] if several else value
    axes = "+".join(re.findall(r":([a-z+]+)", layout))
    mesh = next(mesh for axis, mesh in MESHES.items() if axis in axes)
    built = model("expert" in text, **sizes)
    return layoutopt.cost(built, mesh, layout, "h100", **chosen).evaluation


def over(program: Program, name: str, trainable: bool) -> list[set[str]]:
    """The axes that split a weight, or each part of its optimizer's state."""
    named = (v for n, v in program.variables.items() if name in n.split("/"))
    own = [v for v in named if v.variable.trainable == trainable]
    return [{axis for axes in v.value.splits for axis in axes} for v in own]


def split(**dims: str) -> Meaning:
    """Some array has each dimension over its axes."""

    def holds(of: Evaluation) -> bool:
        values = of.program.values
        seen = {(d.name, axes) for v in values for d, axes in zip(v.shape.dims, v.splits, strict=True)}
        return all((name, tuple(axes.split("+"))) in seen for name, axes in dims.items())

    return holds


def zero(stage: int, axis: str = "data", weight: str = "wi") -> Meaning:
    """What is split over an axis: the optimizer's state (1), gradients (2), weights between steps (3)."""

    def holds(of: Evaluation) -> bool:
        state, held = over(of.program, weight, False), over(of.program, weight, True)
        sent = Counter(i.name for i, _ in of.program.walk() if axis in getattr(i, "axes", ()))
        scatters = sent["reduce_scatter"] > 0
        return all(axis in s for s in state) and all((axis in s) == (stage == 3) for s in held) and scatters

    return holds


def shared(ways: int, inner: Meaning) -> Meaning:
    """Devices do no work twice: each does its part of what one device does alone."""

    def holds(of: Evaluation) -> bool:
        alone = layoutopt.cost(of.model, "data:1", "", "h100").predicted.flops_per_device
        return inner(of) and of.predicted.flops_per_device * ways < 1.1 * alone

    return holds


def hsdp(of: Evaluation) -> bool:
    """Over `data` alone."""
    found = [*over(of.program, "wi", True), *over(of.program, "wi", False)]
    return all("data" in axes and "replica" not in axes for axes in found)


def again(**counts: int) -> Meaning:
    """How often operations run a second time in a layer's backward pass."""

    def holds(of: Evaluation) -> bool:
        seen = Counter(i.name for i, _ in of.program.walk() if i.origin.phase == Phase.RECOMPUTE)
        return bool(seen) and all(seen[name] == count for name, count in counts.items())

    return holds


def parts(count: int, batch: int = SIZES["batch"], length: int = SIZES["length"]) -> Meaning:
    """So many microbatches make up the global batch."""

    def holds(of: Evaluation) -> bool:
        tokens = of.program.values[of.program.feeds["tokens"]]
        found = {d.name: d.size for d in tokens.shape.dims}
        many = found.get("microbatch", 1)
        return (many, many * found["batch"], found["length"]) == (count, batch, length)

    return holds


def stages(schedule: str) -> Meaning:
    """Two stages of layers pass four microbatches in this schedule."""

    def holds(of: Evaluation) -> bool:
        said = of.decided.schedule, of.decided.microbatches
        return of.pipeline == {"layers": 2} and said == (schedule, 4)

    return holds


def sends(*names: str) -> Meaning:
    """These collectives are in the program."""
    return lambda of: {*names} <= {i.name for i, _ in of.program.walk()}


def hosted(kind: str) -> Meaning:
    return lambda of: of.program.host_bytes > 0 and kind in {each[0] for each in of.decided.offload}


TENSOR = split(heads="model", d_ff="model", vocab="model")
SEQUENCE = split(heads="model", d_ff="model", vocab="model", length="model")
EXPERT = shared(4, split(batch="data+expert", expert_batch="data", experts="expert"))
CONTEXT = split(length="seq", memory_length="seq")
FULL = again(einsum=6, attention=1)
"""q, k, v, o and the two that widen: backward does not read the last product of a layer."""
SELECTIVE = again(einsum=3, attention=0)
"""k, o and the third product of the feed-forward layer: every second one."""
MEANINGS: dict[str, Meaning] = {
    "data parallelism": split(batch="data"),
    "ZeRO-1, distributed optimizer": zero(1),
    "ZeRO-2": zero(2),
    "FSDP, ZeRO-3": zero(3),
    "FSDP of a mixture of experts": shared(2, zero(3)),
    "HSDP: sharded over `data`, replicated over `replica`": hsdp,
    "tensor parallelism": TENSOR,
    "sequence parallelism, with tensor parallelism": SEQUENCE,
    "collective matmul, TP overlap, async tensor parallelism": sends("permute"),
    "context parallelism, ring": sends("permute"),
    "context parallelism, load-balanced (zigzag, head-tail)": sends("permute"),
    "context parallelism, Ulysses": sends("all_to_all"),
    "expert parallelism inside data parallelism": EXPERT,
    "pipeline parallelism, GPipe": stages("gpipe"),
    "1F1B": stages("1f1b"),
    "interleaved 1F1B with V virtual stages per rank": stages("interleaved:2"),
    "circular pipeline with V repeats": stages("circular:2"),
    "ZB-H1": stages("zb-h1"),
    "stages that are recomputed from their input": stages("1f1b"),
    "full activation checkpointing, remat": FULL,
    "remat that saves all matmuls and attention": again(einsum=0, attention=0),
    "optimizer (CPU) offload": hosted("optimizer"),
    "parameter offload": hosted("weights"),
    "activation offload": hosted("activations"),
    "gradient accumulation, microbatches": parts(4),
    "DiLoCo, local SGD": lambda of: of.replicas is not None,
    "`ici_data_parallelism`": split(batch="data"),
    "`ici_fsdp_parallelism`": zero(3),
    "the same, mixture of experts": shared(2, zero(3)),
    'also `fsdp_reshard_after_forward = "never"`': zero(2),
    "`shard_optimizer_over_data`": zero(1),
    "`ici_tensor_parallelism`": TENSOR,
    "rules of `activation_norm_length`": SEQUENCE,
    "`enable_async_tensor_parallel`": sends("permute"),
    "`ici_context_parallelism`": CONTEXT,
    "`context_parallel_degree`": sends("all_gather"),
    "`ici_expert_parallelism`": EXPERT,
    "`ici_pipeline_parallelism`": stages("1f1b"),
    '`pipeline_parallel_schedule = "Interleaved1F1B"`, V stages per rank': stages("interleaved:2"),
    "`num_pipeline_repeats` = V": stages("circular:2"),
    "`remat_policy: full`": FULL,
    '`mode = "selective"`, `selective_ac_option = "4"` of four layers, up to 0.2': FULL,
    "`remat_policy: minimal`": again(einsum=0, attention=1),
    "`remat_policy: save_qkv_proj`": again(einsum=3, attention=1),
    "`remat_policy: save_dot_except_mlp`": again(einsum=2, attention=1),
    '`mode = "selective"`, `selective_ac_option = "op"`': SELECTIVE,
    "the same, with tensor parallelism": again(einsum=2, attention=0, all_reduce=0),
    "the same as selective/op, mixture of experts": again(attention=0),
    "`--recompute-activations`, `--recompute-granularity selective`": again(einsum=0, attention=1),
    "`--recompute-granularity selective --recompute-modules mlp`": again(einsum=2, attention=0),
    "`--recompute-granularity selective --recompute-modules layernorm mlp`": again(einsum=2, attention=0),
    "`optimizer_memory_host_offload`": hosted("optimizer"),
    "`parameter_memory_host_offload`": hosted("weights"),
    "`gradient_accumulation_steps`": parts(4),
    "`per_device_batch_size` × devices × `gradient_accumulation_steps`": parts(1, batch=4),
    "`max_target_length`": parts(1, length=4),
}
"""The left-hand side of a row -> what its right-hand side must do."""


def test_every_row_is_covered() -> None:
    lefts = [left for left, _ in rows()]
    assert sorted(lefts) == sorted(MEANINGS)


@pytest.mark.parametrize(("left", "right"), [*rows()])
def test_a_row_runs_and_means_what_it_says(left: str, right: str) -> None:
    assert MEANINGS[left](priced(right)), right


def test_a_setting_is_searched_under_its_framework_unless_it_stands_in_parentheses() -> None:
    _, (head, *found) = tables()
    for cells in found:
        of = priced(cells[-1])
        said = decided(of.decided, of.layout, of.pipeline)
        for name, cell in zip(head, cells[:-1], strict=False):
            framework = {"MaxText": "maxtext", "Megatron-LM": "megatron"}.get(name, name)
            if cell and cell != "(the remaining devices)":
                refused = beyond(says(framework), said) is not None
                refused |= framework == "maxtext" and not {*of.layout} <= {*MAXTEXT_ROWS, "layers"}
                assert refused == bool(REFUSED.fullmatch(cell)), (cell, framework, refused)


def test_a_wrong_translation_is_seen() -> None:
    """Those that the page once had: all products kept, experts' work repeated, the state alone split."""
    assert not SELECTIVE(priced("`--recompute layers:keep=products+attention`"))
    assert not MEANINGS["FSDP of a mixture of experts"](priced("`batch:data`, `--storage zero3` of experts"))
    assert not zero(3)(priced("`batch:data`, `--storage zero1`"))


def test_the_worked_example_prints_what_stands_below_it(tmp_path: Path) -> None:
    """GPT 175B under Megatron's flags, whose arithmetic gives the command's numbers."""
    page = PAGE.read_text(encoding="utf-8")
    (step,) = [s for s in steps(page) if "interleaved" in s.source]
    flags = dict(re.findall(r"--([\w-]+) (\d+)", page[page.index("## A worked example") :].split("```")[1]))
    tensor, pipe = (int(flags[f"{n}-model-parallel-size"]) for n in ("tensor", "pipeline"))
    data = 1024 // (tensor * pipe)
    asked = shlex.split(step.source)
    rounds = int(flags["num-layers"]) // (pipe * int(flags["num-layers-per-virtual-pipeline-stage"]))
    count = int(flags["global-batch-size"]) // (int(flags["micro-batch-size"]) * data)
    sizes = {
        f"layers={flags['num-layers']}",
        f"d_model={flags['hidden-size']}",
        f"vocab={flags['vocab-size']}",
    }
    sizes |= {f"heads={flags['num-attention-heads']}", f"length={flags['seq-length']}"}
    wanted = {f"pipe:{pipe};data:{data};model:{tensor}", f"interleaved:{rounds}", str(count)}
    assert {*wanted, *sizes, f"batch={flags['global-batch-size']}"} <= {*asked}
    (tmp_path / "examples").symlink_to(PAGE.parents[2] / "examples")
    code, output = run(step, tmp_path)
    assert code == 0 and unlike(step, output) == [], output
    assert [line for line in step.shown if line != "…" and line not in output] == []
