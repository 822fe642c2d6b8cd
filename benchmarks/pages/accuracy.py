"""Predicted step times and memory beside published ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.pages.tables import caption, ratio, share, stored, table
from mesh_tf_core.ir.schedules import PipelineSchedule

HEAD = """\
# Accuracy

Predictions with presets as they ship, beside step times and memory that others published. Nothing is set
per run but the network between nodes, where a source states it. Tables, layouts and sources are in
`benchmarks/data`, `benchmarks/published_gpu.py` and `benchmarks/published_tpu.py`.
"""
UNSEEN = """\
## Tables that came later

These tables were priced after the presets were made: no constant used them. Models are those of
`examples/`, so what differs from the run (kernels that PyTorch launches, an unstated share of recomputed
layers) is part of the error. Tables marked *read* were read while rules were chosen (schedules of
pipelines; which axes lie over TPU slices; memory as nanotron holds it).
"""
HELD = """\
**Memory as nanotron holds it.** `layoutopt.cost` prices one program for all stages, which keeps up to 2 P - 1
microbatches of the first of P stages. nanotron runs a program for each stage. `benchmarks/unseen_memory.py`
has what its source says, as rules that are applied one after the other to the predicted program. No number is
fitted, but the rules were read beside these rows. {lost} further layouts ran out of memory; the last columns
count those that a prediction calls fitting, plainly or with a warning that it may not fit.
"""
NEMO = """\
**Interleaved stages of Nemotron-4 340B and GPT-3 175B.** No layer is recomputed, in the runs or in the
predictions. *Idle* is the share of ticks in which a stage idles, (P - 1) / (V M + P - 1) with P stages of V
virtual stages and M microbatches. The columns behind it are predicted seconds; the rest are norms, masks and
what waits for gradients and weights.
"""
APART = """\
## Rows with no part in any constant

No fitted constant used these rows. They are not blind: their errors were known while rules of the cost
model were chosen. Errors are (predicted − published) / published; the sign is the mean with its sign.
"""
PART = """\
## Rows that helped to set a constant
"""
PARTS = {
    "no part in a fit": "all other rows",
    "keep some values": "layers recompute all but some values",
    "part in a fit": "set a constant",
    "not judged": "not counted: every second layer recomputed, or several slices",
}
RANKS = """\
## Choosing by prediction

Rank correlation (Spearman) counts the order of layouts of one model. Regret is the published time of the
layout that is predicted fastest, over the best published time, minus one. Rows of `dgxc_benchmarking_h100`
llama3-8b differ in the release of NeMo, which no prediction sees; the highest possible correlation there is
0.51.
"""
STAGES = """\
## Pipelines

{rows} rows of vTrain with pipeline stages. No constant was fitted to them, but two rules of the model (host
launches, messages between stages) were found by their errors. Their stages are programs of their own. For
one program on all stages, as layoutopt runs them, the mean error is {one}. Over {workloads} workloads, the
layout that is predicted fastest, with or without stages, has a mean regret of {mean}, worst {most}.
"""
CONSTANTS = """\
## Fitted constants

At most four per software stack; every other number of a preset is measured or specified. The 90 % interval
is from fits to models drawn with replacement. `sustained` ships between two fits (models weighted equally:
0.83; rows weighted equally: 1). Compiled programs on GPUs hide half of a message; that half follows from
how steps of `dgxc_benchmarking_h100` grow from 8 to 2048 GPUs. `unaligned_efficiency` 0.33 follows from the
logits of one GPU (50257 tokens, 88 TFLOP/s) and of two (25128 tokens each, 183 TFLOP/s).
"""
REASONS = """\
## Where errors come from

**vTrain, small micro-batches.** The host launches kernels too slowly for the GPU. Published times of a
layer are then near 3 ms whatever the work. The model takes the larger of kernel and launch interval for
each kernel, so short kernels behind a long one come out too slow. Nothing in the layout explains the excess
with 8-way tensor parallelism. Published (first) and predicted (second) milliseconds of a layer:
"""
CAUSES = """\
**Activations of Korthikanti et al.** The sum agrees, the parts do not: per layer, in units of sequence ·
batch · hidden bytes, 26.3 published and 25.7 predicted. The prediction keeps one more normalised array per
norm (4) and no dropout masks (4.7).

**Context parallelism in NeMo.** Rows with `cp2` send keys round a ring in a zigzag. They are predicted with
gathered keys.

**Layers that keep some values.** Paxml embeds by a product and adds biases everywhere; torchtitan sums
gradients in float32 and copies through buffers between kernels.
"""
MEMORY = """\
**Memory of torchtitan in float8.** These rows are predicted with bfloat16 activations and float32
variables. At 32,768 tokens per GPU, PyTorch's cross entropy holds one to three float32 copies of the logits
(15.7 GiB each).
"""
KEPT_BY = {"MaxText": "maxtext", "Paxml": "pax", "torchtitan": "torchtitan"}
"""Program -> what the names of its runs, or of its tables, have in them."""
ERRORS = ("rows", "mean error", "sign", "worst")


def page() -> Iterator[str]:
    """docs/results/accuracy.md."""
    found, pipelines = stored("published"), stored("published_pipelines")
    yield HEAD
    yield UNSEEN
    yield caption("python -m benchmarks.unseen", "unseen")
    yield from table(("runs", "what", *ERRORS, "memory: mean error, rows"), _unseen())
    yield from _held(stored("unseen")["tables"]["nanotron_llama1b_h100"])
    yield NEMO
    yield from _nemo(stored("unseen")["tables"]["dgxc_pipelines_h100"])
    yield APART
    yield caption("python -m benchmarks.published", "published")
    free = _rows(found["tables"], ("no part in a fit", "keep some values"))
    yield from table(("runs", "kind of row", *ERRORS), [_every(found["tables"]), *free])
    yield PART
    yield from table(
        ("runs", "kind of row", *ERRORS), _rows(found["tables"], ("part in a fit", "not judged"))
    )
    yield RANKS
    yield from table(
        ("what", "rows", "value", "without rows that set a constant"), _criteria(found["criteria"])
    )
    yield from _stages(pipelines)
    yield CONSTANTS
    yield from table(
        ("stack", "constant", "ships", "fitted", "90 % interval", "rows"), _constants(found["constants"])
    )
    yield REASONS
    yield from _layers(found["layers"])
    yield CAUSES
    yield from table(("program", *ERRORS, "kept values"), _kept(found["tables"]))
    yield MEMORY
    yield from table(
        ("run", "published, GiB", "predicted, GiB"),
        ((r["run"], f"{r['published_gib']:.1f}", f"{r['predicted_gib']:.1f}") for r in found["float8"]),
    )


LATER = {
    "maxtext_multislice_tpu": "MaxText, 2 to 32 slices of TPU v5e and v5p",
    "fms_fsdp_llama2": "PyTorch FSDP, Llama 2 on 96 to 128 A100 and H100",
    "nemo_gpt3_a100": "NeMo Megatron, GPT-3 of 5B to 20B on A100",
    "libai_megatron_v100": "LiBai and Megatron-LM, BERT and GPT on V100",
    "dgxc_grok1_h100": "NeMo, Grok-1 (mixture of experts), some with pipelines, on H100",
    "dgxc_pipelines_h100": "NeMo, interleaved pipelines of 70B to 405B on H100",
    "nanotron_llama1b_h100": "nanotron, 1F1B pipelines of a 1.1B Llama on H100",
}
"""Table that came later -> what it is of; the first are of what layoutopt can say best."""


def _unseen() -> Iterator[tuple[object, ...]]:
    tables = stored("unseen")["tables"]
    assert LATER.keys() == tables.keys()
    for name, what in LATER.items():
        found, q, m = tables[name], tables[name]["time"], tables[name]["memory"]
        signs = f"{100 * q['signed_mean']:+.1f} %", share(abs(q["worst"]))
        held = f"{share(m['mean'])}, {m['rows']}" if m else ""
        read = ", *read*" if found["looked_at"] else ""
        yield f"`{name}.csv`{read}", what, q["rows"], share(q["mean"]), *signs, held


def _held(found: Mapping[str, Any]) -> Iterator[str]:
    yield HELD.format(lost=found["out_of_memory"])
    heads = "after the rule", "rows", "mean error", "sign", "worst", "called fitting", "with a warning"
    lost = found["out_of_memory_called_fitting"]
    rows = [{"rule": "none: `layoutopt.cost`", "memory": found["memory"], OOM: lost, BARELY: ""}]
    yield from table(
        heads,
        (
            (r["rule"], r["memory"]["rows"], *_signed(r["memory"]), r[OOM], r[BARELY])
            for r in (*rows, *found["as_held"])
        ),
    )


OOM, BARELY = "out_of_memory_called_fitting", "out_of_memory_called_barely_fitting"


def _signed(q: Mapping[str, Any]) -> tuple[str, str, str]:
    return share(q["mean"]), f"{100 * q['signed_mean']:+.1f} %", share(abs(q["worst"]))


def _nemo(found: Mapping[str, Any]) -> Iterator[str]:
    def row(run: Mapping[str, Any]) -> tuple[object, ...]:
        of, parts = run["decided"], run["seconds_by_kind"]
        stages = int(run["mesh"].partition("pipe:")[2].partition(";")[0])
        idle = PipelineSchedule.named(of["schedule"], stages, of["microbatches"]).bubble
        error = run["predicted_seconds"] / run["seconds"] - 1
        kinds = "products and attention", "messages over model", "messages over pipe", "stacks and sums"
        texts = (f"{x:.2f}" for x in (run["seconds"], run["predicted_seconds"]))
        named = (f"{parts[k]:.2f}" for k in kinds)
        return run["name"], *texts, f"{100 * error:+.0f} %", share(idle), *named

    heads = "run", "published, s", "predicted, s", "error", "idle", "products, attention"
    more = "messages: tensor", "messages: stages", "stacks and sums"
    judged = [r for r in found["found"] if r["name"].startswith(("nemotron4", "gpt3"))]
    return table((*heads, *more), map(row, judged))


def readme() -> Iterator[str]:
    """The table of README.md: tables that came later first."""
    tables, held = stored("unseen")["tables"], stored("published")["tables"]
    heads = "step time of", "runs", "mean error", "median", "worst", "part in the model"

    def rows() -> Iterator[tuple[object, ...]]:
        for name, what in LATER.items():
            q, read = tables[name]["time"], tables[name]["looked_at"]
            part = "read when a rule was chosen" if read else "none"
            yield what, q["rows"], share(q["mean"]), share(q["median"]), share(abs(q["worst"])), part
        steps = stored("one_gpu")["steps"].values()
        own = [abs(ratio({k: r[k]["step_seconds"] for k in r}, "measured") - 1) for r in steps]
        middle = share(statistics.median(own))
        yield OWN, len(own), share(statistics.fmean(own)), middle, share(max(own)), "none"
        for what, (names, part) in EARLIER.items():
            found = (r for name in names for r in held[name]["rows"])
            judged = [r for r in found if not r["not_judged"] and not r["keeps"]]
            sizes = [abs(r["predicted_seconds"] / r["published_seconds"] - 1) for r in judged]
            mean, middle = statistics.fmean(sizes), statistics.median(sizes)
            yield what, len(sizes), share(mean), share(middle), share(max(sizes)), part

    return table(heads, rows())


OWN = "layoutopt itself, models of 0.1 B to 1.2 B on one H100"
EARLIER = {
    "MaxText on TPU v4, v5e and v5p, one slice": (("maxtext_tpu.csv",), "read when rules were chosen"),
    "NeMo, Paxml and torchtitan on A100 and H100": (
        tuple(f"published/{n}.csv" for n in ("dgxc_benchmarking_h100", "jax_toolbox_pax", "torchtitan")),
        "54 of 60 set constants",
    ),
    "vTrain, GPT on one node of A100": (
        ("vtrain_a100_h1024.csv", "published/vtrain_a100_h2048.csv"),
        "set constants",
    ),
}
"""What README shows besides -> its tables, and their part in the model."""


def _errors(errors: Sequence[float]) -> tuple[object, ...]:
    sizes = [abs(e) for e in errors]
    return (
        len(sizes),
        share(statistics.fmean(sizes)),
        f"{100 * statistics.fmean(errors):+.1f} %",
        share(max(sizes)),
    )


def _every(tables: Mapping[str, Any]) -> tuple[object, ...]:
    """The rows of all tables that had no part in a constant, as one."""
    parts = [q for t in tables.values() for k, q in t["quality"].items() if k in list(PARTS)[:2]]
    count = sum(q["rows"] for q in parts)
    mean, bias = (sum(q["rows"] * q[k] for q in parts) / count for k in ("mape", "bias"))
    worst = share(max(q["worst"] for q in parts))
    return "**all**", "", count, share(mean), f"{100 * bias:+.1f} %", worst


def _rows(tables: Mapping[str, Any], parts: Sequence[str]) -> Iterator[tuple[object, ...]]:
    for name, found in tables.items():
        for part, q in found["quality"].items():
            if part in parts:
                error = share(q["mape"]), f"{100 * q['bias']:+.1f} %", share(q["worst"])
                yield f"`{name.removeprefix('published/')}`", PARTS[part], q["rows"], *error


def _criteria(judged: Sequence[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    for c in judged:
        if c["reached"] is not None:
            apart = "" if c["unfitted"] is None or not c["fitted"] else _value(c, c["unfitted"])
            yield c["name"], c["rows"], _value(c, c["reached"]), apart


def _value(criterion: Mapping[str, Any], value: float) -> str:
    return f"{value:.2f}" if criterion["least"] else share(value)


def _stages(found: Mapping[str, Any]) -> Iterator[str]:
    by, regret = found["by stages"], found["regret"]
    yield STAGES.format(
        rows=by["all"]["rows"],
        one=share(found["one program"]["mape"]),
        workloads=regret["workloads"],
        mean=share(regret["mean"]),
        most=share(regret["worst"]),
    )
    yield caption("python -m benchmarks.published_pipelines", "published_pipelines")
    yield from table(
        ("stages", *ERRORS),
        (
            (k, q["rows"], share(q["mape"]), f"{100 * q['bias']:+.1f} %", share(q["worst"]))
            for k, q in sorted(by.items(), key=lambda each: (each[0] == "all", each[0].zfill(3)))
        ),
    )


def _constants(fitted: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for stack, found in fitted.items():
        for name, k in found["constants"].items():
            low, high = k["interval"]
            interval = f"{low:.3g} to {high:.3g}"
            yield stack, f"`{name}`", f"{k['ships']:.3g}", f"{k['fitted']:.3g}", interval, found["rows"]


def _layers(found: Mapping[str, Any]) -> Iterator[str]:
    heads = ("hidden", "tensor", *(f"micro-batch {m}" for m in found["micro"]))
    yield from table(
        heads,
        (
            (hidden, tensor, *(f"{published:.2f}, {predicted:.2f}" for published, predicted in pairs))
            for hidden, tensor, pairs in found["times"]
        ),
    )


def _kept(tables: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """Rows whose layers keep some values, by program."""
    rows = [(f"{name} {row['run']}", row) for name, found in tables.items() for row in found["rows"]]
    rows = [(name, row) for name, row in rows if row["keeps"] and not row["not_judged"]]
    for program, part in KEPT_BY.items():
        own = [row for name, row in rows if part in name.removeprefix("published/jax_toolbox_pax.csv ")]
        errors = [row["predicted_seconds"] / row["published_seconds"] - 1 for row in own]
        kept = ", ".join(f"`{keep}`" for keep in dict.fromkeys(row["keeps"] for row in own))
        yield program, *_errors(errors), kept
