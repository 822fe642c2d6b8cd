"""The search's answers beside published recipes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.pages.tables import caption, share, stored, table
from layoutopt.plan.units import bytes_text

HEAD = """\
# Answers beside published recipes

Each model is searched on the machine of a public recipe, with presets as they ship. The layout of the
recipe is predicted beside it, and the published seconds stand below. MFU is by [one
definition](../explanation/cost_model.md#model-flops-and-mfu), also for published seconds. No run on this
page had a part in any number of a preset.

## Llama 3 8B

Length 8192, bfloat16, Adam, float32 master weights.
"""
READING = """\
- **8 v6e**: the answer is the recipe's layout. ZeRO stages differ where memory is left: weights that stay
  whole save gathers. The recipe keeps what enters a layer, queries, keys, values and attention's result in
  the host's memory; the prediction of the recipe recomputes them.
- **256 v5p**: no run of this model on this slice is published. A note of the plan says that its MFU is
  above the highest published one.
- **8 and 64 H100**: the answer has one sequence on a GPU, the recipe half of one. The predicted recipe
  gathers all keys, and the device with most query–key pairs counts; the recipe balances the pairs in a
  zigzag.

## Large models
"""
LARGE = ("model, batch", "what", "layout", "step", "tokens/s", "MFU", "memory")


def page() -> Iterator[str]:
    """docs/results/picks.md."""
    yield HEAD
    yield caption("python -m benchmarks.llama_picks", "llama_picks")
    yield from table(("machine, batch", "what", "layout", "step", "MFU", "memory"), _llama())
    yield READING
    yield caption("python -m benchmarks.large_models", "large_models")
    results = stored("large_models")
    yield from table(LARGE, (row for name, found in results.items() for row in _large(name, found)))
    for name, found in results.items():
        why = f" The recipe {found['why']}." if found["why"] else ""
        took = found["solver"]["cpu_seconds"]
        yield f"- **{name}**: {found['source']}.{why} Searched in {took:.0f} CPU seconds."


def _llama() -> Iterator[tuple[str, ...]]:
    for name, found in stored("llama_picks")["cases"].items():
        case = found["case"]
        head = f"{name}, {case['batch']}"
        for kind, what in (("pick", f"answer, {found['status']}"), ("practice", "recipe, predicted")):
            priced = found[kind]
            memory = bytes_text(priced["peak_memory_bytes"]) + ("" if priced["fits"] else ": does not fit")
            yield head, what, _layout(priced), f"{priced['step_seconds']:.3f} s", share(priced["mfu"]), memory
            head = ""
        if case["seconds"]:
            mfu = share(found["published_mfu"])
            yield "", "recipe, published", case["source"], f"{case['seconds']:.3f} s", mfu, ""


def _layout(said: dict[str, Any]) -> str:
    return f"`{said['mesh']}`: `{said['layout']}`; {said['decided']}"


def _large(name: str, found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    solver, tokens = found["solver"], found["tokens"]
    proof = f"{solver['status']}, gap {share(solver['gap'])}" if solver["gap"] else solver["status"]
    recomputed = ", all layers recomputed" if found.get("allowed") == [True] else ""
    head = f"{name}: {found['parameters'] / 1e9:,.0f} B, {tokens:,} tokens"
    for kind, what in (("pick", f"answer, {proof}{recomputed}"), ("practice", "recipe, predicted")):
        priced = found[kind]
        memory = bytes_text(priced["peak_memory_bytes"]) + ("" if priced["fits"] else ": does not fit")
        speed = f"{priced['tokens_per_second']:,.0f}"
        yield (
            head,
            what,
            _layout(priced),
            f"{priced['step_seconds']:.3f} s",
            speed,
            share(priced["mfu"]),
            memory,
        )
        head = ""
    if "published" in found:
        seconds = found["published"]["seconds"]
        speed, mfu = f"{tokens / seconds:,.0f}", share(found["published"]["mfu"])
        yield "", "recipe, published", "", f"{seconds:.3f} s", speed, mfu, ""
