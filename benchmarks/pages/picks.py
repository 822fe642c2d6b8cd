"""The search's answers beside published recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.pages.tables import caption, prose, share, stored, table
from layoutopt.plan.units import bytes_text

HEAD = """\
# Answers beside published recipes

Each model is searched on the machine of a public recipe. The table shows the answer, the predicted step
of the recipe's layout, and the published step. Presets are as they ship; no run on this page set a number
of a preset. MFU follows [one definition](../explanation/cost_model.md#model-flops-and-mfu), also for
published seconds. Llama 3 8B has length 8192, bfloat16, Adam and float32 master weights.
"""
NOTES = {
    "8 v6e": "The answer is the recipe's layout with weights kept whole where memory allows. The recipe "
    "keeps inputs, queries, keys, values and attention's result in host memory; its prediction recomputes "
    "them.",
    "256 v5p": "No run of this model on this slice is published.",
    "8 H100": "The answer places one sequence on a GPU, the recipe half of one. The prediction of the "
    "recipe gathers all keys; the recipe sends them round a ring and balances the work.",
    "64 H100": "As on 8 H100.",
    "Llama 3.1 405B, 512 v5p": "The recipe keeps attention's results in host memory; its prediction "
    "keeps them on the chip.",
    "GPT of 1T parameters, 2,048 cores of TPU v3": "The recipe's layout was published for a quarter of "
    "the cores and of the batch.",
    "DeepSeek-V3's sizes, 512 v5p": "The recipe keeps activations in host memory, sorts tokens by "
    "experts and drops none. layoutopt's model sends tokens to experts by matrix products, so every "
    "predicted step is slower than the published one.",
    "DeepSeek-V3's sizes, 2,048 H100": "The recipe multiplies in float8 and has 16 pipeline stages of "
    "unequal layers that run both ways (DualPipe). layoutopt cannot run these, so its prediction of the "
    "recipe splits only experts and storage, in bfloat16. The published step follows from 180 thousand "
    "GPU hours for 10^12 tokens.",
}
"""Case -> what a reader must know to compare its rows."""


def page() -> Iterator[str]:
    """docs/results/picks.md."""
    yield prose(HEAD)
    yield caption("python -m benchmarks.llama_picks", "llama_picks")
    yield caption("python -m benchmarks.large_models", "large_models")
    llama, large = stored("llama_picks")["cases"], stored("large_models")
    assert NOTES.keys() == {*llama, *large}
    heads = ("model, machine, batch", "what", "layout", "step", "MFU", "memory")
    yield from table(heads, [*_llama(llama), *(row for each in large.items() for row in _large(*each))])
    sources = {n: c["case"]["source"] for n, c in llama.items() if c["case"]["seconds"]}
    sources |= {n: c["source"].split(": ")[0].split("; ")[0] for n, c in large.items()}
    for name, note in NOTES.items():
        source = f" Source: {sources[name]}." if name in sources else ""
        yield prose(f"- **{name}.** {note}{source}").rstrip("\n")


def _llama(cases: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, found in cases.items():
        seconds, mfu = found["case"]["seconds"], found["published_mfu"]
        head = f"Llama 3 8B, {name}, {found['case']['batch']} sequences"
        yield from _rows(head, found, found["status"], seconds and (seconds, mfu))


def _large(name: str, found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    solver, published = found["solver"], found.get("published")
    proof = f"{solver['status']}, gap {share(solver['gap'])}" if solver["gap"] else solver["status"]
    recomputed = ", all layers recomputed" if found.get("allowed") == [True] else ""
    head = f"{name}: {found['parameters'] / 1e9:,.0f} B, {found['tokens']:,} tokens"
    yield from _rows(head, found, proof + recomputed, published and (published["seconds"], published["mfu"]))


def _rows(
    head: str, found: Mapping[str, Any], proof: str, published: tuple[float, float] | None
) -> Iterator[tuple[str, ...]]:
    for kind, what in (("pick", f"answer, {proof}"), ("practice", "recipe, predicted")):
        priced = found[kind]
        memory = bytes_text(priced["peak_memory_bytes"]) + ("" if priced["fits"] else ": does not fit")
        yield head, what, _layout(priced), f"{priced['step_seconds']:.3f} s", share(priced["mfu"]), memory
        head = ""
    if published:
        yield "", "recipe, published", "", f"{published[0]:.3f} s", share(published[1]), ""


def _layout(said: Mapping[str, Any]) -> str:
    return f"`{said['mesh']}`: `{said['layout']}`; {said['decided']}"
