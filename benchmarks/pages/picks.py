"""The search's answers beside published recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.pages.tables import caption, prose, share, stored, table
from layoutopt.plan.units import bytes_text

HEAD = """\
# Plans beside published recipes

For each public recipe, the table shows layoutopt's plan for the same model, machine and batch, the
predicted step of the recipe's layout, and the published step. Presets are used as they ship and were
not fitted to any run of this page. MFU follows [one
definition](../explanation/cost_model.md#model-flops-and-mfu), also for published steps. `zero3 ×9`
means that 9 classes of variables have this storage stage. Llama 3 8B has length 8192, bfloat16, Adam
and float32 master weights.
"""
NOTES: dict[tuple[str, ...], str] = {
    ("8 v6e",): "The plan is the recipe's layout, but stores some weights whole. The recipe keeps inputs, "
    "queries, keys, values and attention results in host memory; the prediction recomputes them.",
    ("256 v5p",): "No run of this model on 256 v5p is published.",
    ("8 H100", "64 H100"): "The plan does not split sequences; the recipe splits each one over two GPUs. The "
    "recipe sends keys round a ring and balances the work; its prediction gathers all keys.",
    ("Llama 3.1 405B, 512 v5p",): "The recipe keeps attention results in host memory; its prediction keeps "
    "them on the chip.",
    ("GPT of 1T parameters, 2,048 cores of TPU v3",): "The recipe's layout was published for a quarter of "
    "the cores and of the batch.",
    (
        "DeepSeek-V3's sizes, 512 v5p",
    ): "Plan and recipe run under `maxtext`. The recipe keeps activations in host memory; its prediction "
    "recomputes layers from inputs on the chip, and does not fit.",
    ("DeepSeek-V3's sizes, 2,048 H100",): "Plan and recipe run under `examples/frameworks/dualpipe.json`: "
    "products in float8, stages in both directions (DualPipe), exchanges of experts hidden behind the other "
    "microbatch of a block. The first stage has the embedding, the three dense layers and one layer with "
    "experts, the last one has one and the output layer; each device has the layers of two stages. For "
    "this mesh, schedule and number of microbatches, the search decided about splits, storage, stages and "
    "recomputation. The prediction lacks the second prediction head. The published step is derived from "
    "180 thousand GPU hours for 10^12 tokens on H800, whose links within a node are slower.",
}
"""Cases -> what a reader must know to compare their rows."""
WORTH = """\
## Decisions of the recipe for {name}

Each row changes one decision of the recipe and nothing else. Memory is that of the fullest stage.
"""


def page() -> Iterator[str]:
    """docs/results/picks.md."""
    yield prose(HEAD)
    yield caption("python -m benchmarks.llama_picks", "llama_picks")
    yield caption("python -m benchmarks.large_models", "large_models")
    llama, large = stored("llama_picks")["cases"], stored("large_models")
    assert {n for names in NOTES for n in names} == {*llama, *large}
    heads = ("model, machine, batch", "result", "layout", "step", "MFU", "memory")
    yield from table(heads, [*_llama(llama), *(row for each in large.items() for row in _large(*each))])
    sources = {n: c["case"]["source"] for n, c in llama.items() if c["case"]["seconds"]}
    sources |= {n: c["source"].split(": ")[0].split("; ")[0].split(", on four")[0] for n, c in large.items()}
    for names, note in NOTES.items():
        source = "".join(f" Source: {each}." for each in {sources[n]: n for n in names if n in sources})
        yield prose(f"- **{' and '.join(names)}.** {note}{source}").rstrip("\n")
    for name, found in large.items():
        if found.get("changes"):
            yield ""
            yield prose(WORTH.format(name=name)).rstrip("\n")
            yield ""
            yield from table(("the recipe, but", "step", "memory"), _changes(found))


def _changes(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of predictions of practice, as it is and with one decision changed."""
    for words, priced in {"(nothing)": found["practice"], **found["changes"]}.items():
        memory = bytes_text(priced["peak_memory_bytes"]) + ("" if priced["fits"] else ": does not fit")
        yield words, f"{priced['step_seconds']:.2f} s", memory


def _llama(cases: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, found in cases.items():
        seconds, mfu = found["case"]["seconds"], found["published_mfu"]
        head = f"Llama 3 8B, {name}, {found['case']['batch']} sequences"
        yield from _rows(head, found, found["status"], seconds and (seconds, mfu))


def _large(name: str, found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    solver, published = found["solver"], found.get("published")
    proof = f"{solver['status']}, gap {share(solver['gap'])}" if solver["gap"] else solver["status"]
    recomputed = ", all layers recomputed by request" if found.get("allowed") == [True] else ""
    head = f"{name}: {found['tokens']:,} tokens"
    yield from _rows(head, found, proof + recomputed, published and (published["seconds"], published["mfu"]))


def _rows(
    head: str, found: Mapping[str, Any], proof: str, published: tuple[float, float] | None
) -> Iterator[tuple[str, ...]]:
    for kind, what in (("pick", f"plan, {proof}"), ("practice", "recipe, predicted")):
        priced = found[kind]
        memory = bytes_text(priced["peak_memory_bytes"]) + ("" if priced["fits"] else ": does not fit")
        yield head, what, _layout(priced), f"{priced['step_seconds']:.3f} s", share(priced["mfu"]), memory
        head = ""
    if published:
        yield "", "recipe, published", "", f"{published[0]:.3f} s", share(published[1]), ""


def _layout(said: Mapping[str, Any]) -> str:
    decided = said["decided"].removesuffix("; 1 microbatches")
    return f"`{said['mesh']}`: `{said['layout']}`; {decided}"
