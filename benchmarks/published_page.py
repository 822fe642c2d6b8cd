"""The page of the documentation on published runs; nobody else writes it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.published_criteria import Criterion

HEAD = """\
# Predictions against what others published

This page is written by `python -m benchmarks.published --page docs/published.md` on {date}, with presets as
they ship. Nothing is set per run but the network between nodes, where a source says which it was (vTrain:
100 GB/s a node, OneFlow: 12.5 GB/s: `--set-hardware node_egress=100GB/s`). Tables, layouts and sources are in
`benchmarks/data`, `benchmarks/published_gpu.py` and `benchmarks/published_tpu.py`.
"""

TABLES = """\
## By table

Mean error, and in brackets its sign. {pipelined} rows with pipeline stages are apart
(`python -m benchmarks.published_pipelines`). Rows not
judged recompute every second layer (priced with nothing recomputed), or lie on several slices.

| table | rows | which | error | largest | regret, mean and largest |
|---|---|---|---|---|---|"""

CONSTANTS = """\
## Fitted constants

At most four for a stack of software; every other number of a preset is measured or specified. The interval
of 90 % is of fits to models drawn with replacement. Where what ships is not the fit: `sustained` 0.88 lies
between the fit in which models count alike (0.83) and the one in which rows do (1), and was set when the
errors of all rows were known; of collectives, compiled programs on GPUs hide 0.5 by how steps of
`dgxc_benchmarking_h100` grow from 8 to 2048 GPUs; of programs launched from Python the three numbers were
set by errors and orders of vTrain's rows together, and lie inside the intervals of the fit.
`unaligned_efficiency` 0.33 is no fit to steps: it is what the logits of one GPU (50257 tokens, 88 TFLOP/s)
take over those of two (25128 each, 183), by how everything but the layers of a microbatch grows with hidden
size and micro batch. These rows count as having had a part. Programs launched from Python hide nothing:
their sources sum gradients after backward; that this is so was first seen in OneFlow's rows, which count as
having had a part, too.

| stack | constant | ships | fitted | interval | to |
|---|---|---|---|---|---|"""

LAYERS = """\
## Rows that are ranked wrong

**Rows of one program.** Runs of `dgxc_benchmarking_h100` llama3-8b are one layout on 8 to 128 GPUs under
three releases of NeMo, and the release decides: 25.04 takes 12.27 to 12.33 s, 24.11.1 and 25.02 12.78 to
13.16 s. Rows that differ in nothing but the release have one prediction, so that there is a most that any
can reach.

**vTrain.** Its {rows} steps of one node are no {rows} measurements: up to {off:.2f} % in the mean they are
parts · (layers · a + b) + layers · c + e, with a and b by tensor ways and micro batch, c and e by tensor
and data ways (`benchmarks/published_layers.py`). Milliseconds of a layer (a), published and predicted:

| hidden | tensor | {head} |
|---|---|{line}|"""

LAYERS_END = """
Where the host launches too slowly for the GPU, a layer takes about 3 ms whatever it does, and published
times of more work are even lower than of less: hidden 1024, tensor 2, micro batch 4 takes less than micro
batch 1 and 2. It is this layout that every regret above 10 % misses: 12 and 16 layers with a batch of 4 for
each GPU, where tensor 1, micro batch 2 is picked. A kernel is priced alone, at least an interval of the
host's; in truth the host runs ahead while a long kernel works, and the launches of short ones are hidden
behind it (docs/cost_model.md). Priced as the larger of all launches and all kernels, with the same constants,
that layout comes to what was published; but the one that is picked gets cheaper too and stays first, small
micro batches come out far too low, and such a price does not add up over operations, as the proof needs. What
8 ways take longer than predictions there, and others less, no property of the layout explains.

**Activations of Korthikanti et al.** That the sum agrees says less than it seems: of a layer of the model of
22 billion, in units of sequence · batch · hidden bytes, they hold 26.3 and we 25.7. Ours keeps a normalised
array of each norm beside its input and its result, 4 that theirs makes again; theirs keeps masks of dropout,
4.7 that ours draws again.

**Context parallelism.** NeMo's rows with `cp2` send keys and values round a ring, in a zigzag, and are priced
with all keys gathered: 13.54 s on 8 H100 (published 12.27 to 12.91). Priced as a zigzag they take 14.14 s,
of which 0.98 s send operands to their zigzag and results back, and 0.55 s cut and choose pieces, in every
layer: NeMo's loader lays tokens out in a zigzag once, and without these the price is 12.6 s.

**Layers that keep some values**, by who published them:

| program | rows | error | largest | what is kept |
|---|---|---|---|---|"""

STAGES = """\
## Pipeline stages

{rows} rows of vTrain with pipeline stages: mean error {mape} ({bias:+.1f} %), largest {worst}. No number that
ships was fitted to them; that hosts count, and what stages send each other, was found by their errors. The
layout of a workload that is predicted fastest, of those with stages and without, takes {mean} more than the
fastest in the mean of {workloads} workloads, {most} at most.

Their stages are programs of their own. One program for all stages, as ours are run, sums over them what
leaves the last one, and sends whole what goes from one to the next (`benchmarks/published_pipelines.py`):
priced so, the mean error is {one}.

| stages | rows | error | largest |
|---|---|---|---|"""

MEMORY = """
**Memory of torchtitan.** Rows in float8 that recompute everything save bfloat16 activations and float32
variables, and are priced so below; they are shown, not judged. At 32,768 tokens a GPU a float32 copy of the
logits (128,256 tokens) is 15.7 GiB. PyTorch's cross entropy, operation by operation, holds three at once,
and a compiled one holds one.

| run | published GiB | predicted |
|---|---|---|"""

PARTS = {
    "no part in a fit": "no part in any number",
    "keep some values": "keep some values of a layer, no part in any number",
    "part in a fit": "had a part",
    "not judged": "not judged",
}


KEPT_BY = {"MaxText": "maxtext", "Paxml": "pax", "torchtitan": "torchtitan"}
"""Program -> what the names of its runs, or of its tables, have in them."""

KEPT_END = """
Paxml's GPT embeds tokens by a product, adds biases everywhere and lies split inside a node alone where its
source says so; torchtitan adds gradients up in float32, copies what it gathers and what it scatters through
buffers between kernels, takes FlashAttention-2 on H100 too, and what it does not compile is priced with a
kernel for every operation. Its rows on A100 are closer than those on H100 with a limit of 500 W, of whose
clock `h100-hbm2e` assumes the cube root of the power. Of Paxml, newer software took {least:.2f} to
{most:.2f} of the older's seconds in one configuration. Of 5B on 256 H100 with TransformerEngine kernels are
priced 0.88 s and messages 0.28 s, of which half is hidden: with all of them exposed it is 1.16 s, where newer
software took 1.24 s and older 1.92 s. No row of these had a part in a number that ships;
the fit of `sustained` above knows Paxml's."""


def page(result: Mapping[str, Any], judged: Sequence[Criterion], pipelines: Mapping[str, Any]) -> str:
    """The whole page; `pipelines` are the results of `benchmarks.published_pipelines`."""
    parts = [_criteria(judged), _tables(result), _stages(pipelines), _constants(result["constants"])]
    if result["layers"]:
        parts.append(_layers(result["layers"], result["float8"], result["tables"]))
    return HEAD.format(date=result["date"]) + "".join("\n" + "\n".join(part) + "\n" for part in parts)


def _criteria(judged: Sequence[Criterion]) -> Iterator[str]:
    yield "## What is reached\n"
    yield "| what | reached | without rows that had a part | bound | |"
    yield "|---|---|---|---|---|"
    for c in judged:
        sign, reached = ("≥" if c.least else "≤"), "no rows" if c.reached is None else _text(c, c.reached)
        apart = "" if c.unfitted is None or not c.fitted else _text(c, c.unfitted)
        verdict = "" if c.reached is None else "met" if c.met else "**not met**"
        if not c.met and c.most is not None and c.most < c.bound:
            verdict += f", nor can be: at most {c.most:.2f}"
        yield f"| {c.name} ({c.rows} rows) | {reached} | {apart} | {sign} {_text(c, c.bound)} | {verdict} |"


def _text(criterion: Criterion, value: float) -> str:
    return f"{value:.2f}" if criterion.least else f"{100 * value:.1f} %"


def _tables(result: Mapping[str, Any]) -> Iterator[str]:
    yield TABLES.format(pipelined=result["pipelined"])
    for name, table in result["tables"].items():
        for part, q in table["quality"].items():
            regret = "" if q["regret"] is None else f"{_percent(q['regret'])}, {_percent(q['worst_regret'])}"
            error = f"{_percent(q['mape'])} ({100 * q['bias']:+.1f} %)"
            yield f"| `{name}` | {q['rows']} | {PARTS[part]} | {error} | {_percent(q['worst'])} | {regret} |"


def _stages(found: Mapping[str, Any]) -> Iterator[str]:
    by, regret = found["by stages"], found["regret"]
    every = by["all"]
    yield STAGES.format(
        rows=every["rows"],
        mape=_percent(every["mape"]),
        bias=100 * every["bias"],
        worst=_percent(every["worst"]),
        mean=_percent(regret["mean"]),
        workloads=regret["workloads"],
        most=_percent(regret["worst"]),
        one=_percent(found["one program"]["mape"]),
    )
    for stages in sorted((name for name in by if name != "all"), key=int):
        q = by[stages]
        error = f"{_percent(q['mape'])} ({100 * q['bias']:+.1f} %)"
        yield f"| {stages} | {q['rows']} | {error} | {_percent(q['worst'])} |"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _constants(fitted: Mapping[str, Any]) -> Iterator[str]:
    yield CONSTANTS
    for stack, found in fitted.items():
        for name, k in found["constants"].items():
            low, high = k["interval"]
            yield (
                f"| {stack} | `{name}` | {k['ships']:.3g} | {k['fitted']:.3g} | {low:.3g} to {high:.3g} "
                f"| {found['rows']} rows of {', '.join(found['models'])} |"
            )


def _kept(tables: Mapping[str, Any]) -> Iterator[str]:
    """Rows whose layers keep some values, by program."""
    rows = [(f"{name} {row['run']}", row) for name, table in tables.items() for row in table["rows"]]
    rows = [(name, row) for name, row in rows if row["keeps"] and not row["not_judged"]]
    for program, part in KEPT_BY.items():
        own = [row for name, row in rows if part in name.removeprefix("published/jax_toolbox_pax.csv ")]
        errors = [row["predicted_seconds"] / row["published_seconds"] - 1 for row in own]
        mean, bias, most = statistics.fmean(map(abs, errors)), statistics.fmean(errors), max(map(abs, errors))
        kept = ", ".join(f"`{keep}`" for keep in dict.fromkeys(row["keeps"] for row in own))
        said = f"{_percent(mean)} ({100 * bias:+.1f} %) | {_percent(most)}"
        yield f"| {program} | {len(own)} | {said} | {kept} |"
    ratios = _newer(row for name, row in rows if "pax gpt-5b" in name)
    yield KEPT_END.format(least=min(ratios), most=max(ratios))


def _newer(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Published seconds of the newer software over those of the older, of runs that else are the same."""
    seconds = defaultdict(list)
    for row in rows:
        name, at, _ = row["run"].partition(" @")
        if at:
            seconds[name].append(row["published_seconds"])
    return [last / first for first, last in seconds.values()]


def _layers(
    found: Mapping[str, Any], float8: Sequence[Mapping[str, Any]], tables: Mapping[str, Any]
) -> Iterator[str]:
    micro = found["micro"]
    head = " | ".join(f"micro batch {m}" for m in micro)
    line = "|".join("---" for _ in micro)
    yield LAYERS.format(rows=found["rows"], off=100 * found["off"], head=head, line=line)
    for hidden, tensor, pairs in found["times"]:
        cells = " | ".join(f"{published:.2f}, {predicted:.2f}" for published, predicted in pairs)
        yield f"| {hidden} | {tensor} | {cells} |"
    yield LAYERS_END
    yield from _kept(tables)
    yield MEMORY
    for row in float8:
        yield f"| {row['run']} | {row['published_gib']:.1f} | {row['predicted_gib']:.1f} |"
