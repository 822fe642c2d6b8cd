"""Predicted step times and memory beside published ones."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.pages.tables import caption, prose, ratio, share, span, stored, table
from mesh_tf_core.ir.schedules import PipelineSchedule

HEAD = """\
# Accuracy

Predicted step times and memory beside published ones, with every preset as it ships. An error is
(predicted − published) / published, and *sign* is its mean with the sign. Only the bandwidth between
nodes is set per run, where the source states it. `benchmarks/data` has every row with its layout and
source. Others published all these runs; [our own measurements](gpu.md) are of one H100.

## Tables that came later

No constant was fitted to these tables: they were collected after the presets were complete. The models
are those of `examples/`, so the errors include what the published programs do differently, such as
kernels that PyTorch launches. Tables marked *read* are not held out: we looked at them while we chose
rules of the cost model.
"""
HELD = """\
**Memory of nanotron.** layoutopt runs one program on all stages; nanotron runs one program per stage.
`benchmarks/unseen_memory.py` states {rules} rules about what nanotron's stages keep, read from its
source. With these rules the mean error of {rows} peaks falls from {mean} to {last}. {lost} more layouts
ran out of memory, and the rules call {fitting} of them feasible.
"""
NEMO = """\
**Interleaved pipelines without recomputation.** *Idle* is the share of time in which a stage waits for
others. Ranges are over the numbers of GPUs.
"""
EARLIER_TABLES = """\
## Earlier tables

Rows in the upper part of the table did not set a constant, but their errors were known while rules of the
cost model were chosen. Rows in the lower part helped to set a constant.
"""
NO_PART = {
    "no part in a fit": "no constant",
    "keep some values": "no constant; layers recompute all but some values",
}
PARTS = {
    **NO_PART,
    "part in a fit": "set a constant",
    "not judged": "not counted: every second layer recomputed, or several slices",
}
RANKS = """\
## Choosing by prediction

Rank correlation (Spearman) compares the predicted order of one model's layouts with the published order.
Regret is the published time of the layout with the least predicted time, over the best published time,
minus one. Runs of llama3-8b differ in the release of NeMo, which no prediction sees: the highest possible
correlation is {most:.2f}.
"""
CHOICES = """\
The mean regret on one node of vTrain is {mean}, worst {most}. Among {runs} published runs, {large} are
predicted to need more memory than the device has.
"""
STAGES = """\
## Pipelines

vTrain publishes {rows} runs with pipeline stages. No constant was fitted to them, but two rules of the
cost model (kernel launches by the host, messages between stages) were found by their errors. Each stage
is a program of its own, and the table predicts it so. The mean error is {one} for one program on all
stages, as layoutopt runs them. Over {workloads} workloads the layout with the least predicted time has a
mean regret of {mean}, worst {most}.
"""
CONSTANTS = """\
## Fitted constants

A software stack has at most four fitted constants. All other numbers of a preset are measured or
specified; `layoutopt hardware NAME` prints the source of each. The 90 % interval comes from fits to
models drawn with replacement.
"""
REASONS = """\
## Where errors come from

- **Kernel launches.** With small microbatches the host launches kernels more slowly than the GPU runs
  them. The model then predicts short kernels behind a long one too slow. The published time of a vTrain
  layer (hidden size {hidden}, {tensor}-way tensor parallelism, microbatch {micro}) is {published:.2f} ms,
  the predicted time {predicted:.2f} ms.
- **Activations.** The published peaks of Korthikanti et al. 2022 and the predicted peaks differ by at
  most {memory}. The parts differ more: the prediction keeps one more normalised array per norm and no
  dropout masks.
- **Context parallelism in NeMo** sends keys round a ring in zigzag order; the prediction gathers them.
- **float8 in torchtitan** is predicted with bfloat16 activations. PyTorch's cross entropy also holds
  float32 copies of the logits, which the prediction lacks. Llama 3.1 8B takes {small}; 70B takes {large}.
- **Layers that keep some values.** Paxml embeds tokens by a matrix product and adds biases everywhere;
  torchtitan sums gradients in float32 and copies through buffers between kernels.
"""
ERRORS = ("rows", "mean error", "sign", "worst")


def page() -> Iterator[str]:
    """docs/results/accuracy.md."""
    found, pipelines, unseen = stored("published"), stored("published_pipelines"), stored("unseen")["tables"]
    yield HEAD
    yield caption("python -m benchmarks.unseen", "unseen")
    yield from table(("runs", "table", *ERRORS), _unseen())
    yield _held(unseen["nanotron_llama1b_h100"])
    yield NEMO
    yield from _nemo(unseen["dgxc_pipelines_h100"])
    yield EARLIER_TABLES
    yield caption("python -m benchmarks.published", "published")
    free, rest = _rows(found["tables"], NO_PART), _rows(found["tables"], PARTS.keys() - NO_PART.keys())
    yield from table(("table", "part in the model", *ERRORS), [_every(found["tables"]), *free, *rest])
    criteria = {c["name"]: c for c in found["criteria"]}
    yield prose(RANKS, most=criteria[f"dgxc_benchmarking_h100 llama3-8b{RANK}"]["most"])
    yield from table(("runs", "models", "rows", "rank correlation"), _ranks(criteria))
    yield _choices(criteria)
    yield from _stages(pipelines)
    yield CONSTANTS
    yield from table(
        ("stack", "constant", "ships", "fitted", "90 % interval", "rows"), _constants(found["constants"])
    )
    yield _reasons(found)


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
        found = tables[name]
        read = ", *read*" if found["looked_at"] else ""
        yield f"{what}{read}", f"`{name}`", found["time"]["rows"], *_signed(found["time"])


def _held(found: Mapping[str, Any]) -> str:
    """Memory of nanotron, with no rule and with all."""
    rules, last = found["as_held"], found["as_held"][-1]
    return prose(
        HELD,
        rules=len(rules),
        rows=found["memory"]["rows"],
        mean=share(found["memory"]["mean"]),
        last=share(last["memory"]["mean"]),
        lost=found["out_of_memory"],
        fitting=last["out_of_memory_called_fitting"],
    )


def _signed(q: Mapping[str, Any]) -> tuple[str, str, str]:
    return share(q["mean"]), f"{100 * q['signed_mean']:+.1f} %", share(abs(q["worst"]))


def _nemo(found: Mapping[str, Any]) -> Iterator[str]:
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for run in found["found"]:
        if run["name"].startswith(("nemotron4", "gpt3")):
            model, release, *_ = run["name"].split()
            groups[f"{model}, NeMo {release}"].append(run)

    def row(name: str, runs: Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
        of = runs[0]["decided"]
        stages = int(runs[0]["mesh"].partition("pipe:")[2].partition(";")[0])
        idle = PipelineSchedule.named(of["schedule"], stages, of["microbatches"]).bubble
        errors = [100 * (r["predicted_seconds"] / r["seconds"] - 1) for r in runs]
        seconds = (span([r[k] for r in runs], "{:.2f}") for k in ("seconds", "predicted_seconds"))
        return name, len(runs), *seconds, f"{span(errors, '{:+.0f}')} %", share(idle)

    heads = "model, release", "rows", "published, s", "predicted, s", "error", "idle"
    return table(heads, (row(name, runs) for name, runs in groups.items()))


def readme() -> Iterator[str]:
    """The table of README.md: tables that came later first."""
    tables, held = stored("unseen")["tables"], stored("published")["tables"]
    heads = "step time of", "runs", "mean error", "median", "worst", "used to build the model"

    def rows() -> Iterator[tuple[object, ...]]:
        for name, what in LATER.items():
            q, read = tables[name]["time"], tables[name]["looked_at"]
            part = "to choose a rule" if read else "no"
            yield what, q["rows"], share(q["mean"]), share(q["median"]), share(abs(q["worst"])), part
        steps = stored("one_gpu")["steps"].values()
        own = [abs(ratio({k: r[k]["step_seconds"] for k in r}, "measured") - 1) for r in steps]
        middle = share(statistics.median(own))
        yield OWN, len(own), share(statistics.fmean(own)), middle, share(max(own)), "no"
        for what, (names, part) in EARLIER.items():
            found = (r for name in names for r in held[name]["rows"])
            judged = [r for r in found if not r["not_judged"] and not r["keeps"]]
            sizes = [abs(r["predicted_seconds"] / r["published_seconds"] - 1) for r in judged]
            mean, middle = statistics.fmean(sizes), statistics.median(sizes)
            yield what, len(sizes), share(mean), share(middle), share(max(sizes)), part

    return table(heads, rows())


OWN = "layoutopt's own training of 0.1B to 1.2B models on one H100"
EARLIER = {
    "MaxText on TPU v4, v5e and v5p, one slice": (("maxtext_tpu.csv",), "to choose rules"),
    "NeMo, Paxml and torchtitan on A100 and H100": (
        tuple(f"published/{n}.csv" for n in ("dgxc_benchmarking_h100", "jax_toolbox_pax", "torchtitan")),
        "54 of 60, to set constants",
    ),
    "vTrain, GPT on one node of A100": (
        ("vtrain_a100_h1024.csv", "published/vtrain_a100_h2048.csv"),
        "to set constants",
    ),
}
"""What README shows besides -> its tables, and their part in the model."""


def _every(tables: Mapping[str, Any]) -> tuple[object, ...]:
    """The rows of all tables that had no part in a constant, as one."""
    parts = [q for t in tables.values() for k, q in t["quality"].items() if k in NO_PART]
    count = sum(q["rows"] for q in parts)
    mean, bias = (sum(q["rows"] * q[k] for q in parts) / count for k in ("mape", "bias"))
    worst = share(max(q["worst"] for q in parts))
    return "all of the upper part", "no constant", count, share(mean), f"{100 * bias:+.1f} %", worst


def _rows(tables: Mapping[str, Any], parts: Collection[str]) -> Iterator[tuple[object, ...]]:
    for name, found in tables.items():
        for part, q in found["quality"].items():
            if part in parts:
                error = share(q["mape"]), f"{100 * q['bias']:+.1f} %", share(q["worst"])
                yield (
                    f"`{name.removeprefix('published/').removesuffix('.csv')}`",
                    PARTS[part],
                    q["rows"],
                    *error,
                )


RANK = ": rank correlation"


def _ranks(criteria: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, c in criteria.items():
        if name.endswith(RANK):
            runs, model = name.removesuffix(RANK).split(" ", 1)
            groups[runs][model] = c
    for runs, models in groups.items():
        values = [c["reached"] for c in models.values()]
        rows = sum(c["rows"] for c in models.values())
        yield f"`{runs}`", ", ".join(models), rows, span(values, "{:.2f}")


def _choices(criteria: Mapping[str, Any]) -> str:
    mean, most = (
        criteria[f"vTrain, one node: {k}"]["reached"] for k in ("regret in the mean", "largest regret")
    )
    large = criteria["ran, and called too large"]
    return prose(
        CHOICES, mean=share(mean), most=share(most), runs=large["rows"], large=share(large["reached"])
    )


def _stages(found: Mapping[str, Any]) -> Iterator[str]:
    by, regret = found["by stages"], found["regret"]
    yield prose(
        STAGES,
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


def _reasons(found: Mapping[str, Any]) -> str:
    micro = found["layers"]["micro"]
    pairs = [
        (h, t, m, *pair) for h, t, row in found["layers"]["times"] for m, pair in zip(micro, row, strict=True)
    ]
    worst = min(pairs, key=lambda each: each[-1] / each[-2])
    memory = max(abs(r["error"]) for r in found["memory"])
    named = dict(zip(("hidden", "tensor", "micro", "published", "predicted"), worst, strict=True))
    sizes = {"small": _gib(found["float8"], "-8b "), "large": _gib(found["float8"], "-70b ")}
    return prose(REASONS, **named, memory=share(memory), **sizes)


def _gib(rows: Sequence[Mapping[str, Any]], model: str) -> str:
    held = ([r[k] for r in rows if model in r["run"]] for k in ("published_gib", "predicted_gib"))
    published, predicted = (span(values, "{:.1f}") for values in held)
    return f"{published} GiB, predicted {predicted} GiB"
