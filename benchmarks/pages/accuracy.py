"""Predicted step times and memory beside published ones."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from benchmarks.errors import errors_of
from benchmarks.pages.tables import caption, prose, ratio, share, stored, table
from costmodels.hardware.known import FILE

HEAD = """\
# Accuracy

This page compares predicted step times and memory with published ones. Each run is priced under the
framework that ran it (`layoutopt frameworks`), as frameworks and presets ship; only the bandwidth
between nodes is set per run, where the source states it. `benchmarks/data` lists every run with its
layout and source. [Our own measurements](gpu.md) are of one H100.

An error is (predicted − published) / published. *Mean* and *worst* ignore the sign of the errors;
*bias* is the mean with the sign. *Order* is Kendall's tau of predicted and published times per token,
the mean over models with at least four runs on one chip.

## By framework

Frameworks have at most six fitted constants. The models of each framework are sorted by name. Every
second one is *judged*: its runs had no part in a fit. The other models are *fitted*. So is every run
with Megatron's option `launches=each`, which was added for the errors of these runs. The programs are
the models of `examples/` (Paxml's GPT: with its one-hot embedding and biases), so the errors include
the differences between these models and the published programs.
"""
FIRST = """\
## Priced for the first time

These runs were priced as everything shipped, before anyone had looked at them: *first* is evidence of how
well others are predicted. Faults that they showed were mended since, so *today* is none. Nothing was mended
for the first table: {unseen} recipes of MaxText, predicted before their published steps were read, have a
mean error of {mean:.1f} % (bias {bias:+.1f} %).

The second table is of layouts of BigScience (GPT of 1.3B on V100 and of 180B on 384 A100), of nanotron's best
layouts (1.3B to 80B on up to 512 H100) and of AMD's Primus, each asked and predicted before its time was
read; only the rates of Primus on MI300X had been read. BigScience's 180B ran with `CUDA_LAUNCH_BLOCKING=1`,
where nothing is sent beside kernels, and was timed at its second step. nanotron showed faults of eager
PyTorch's kernels, and its source two options that its runs have (`kernels=norms`, `tensor_messages=async`).
Primus was asked again with 12 of 80 layers recomputed, as its configuration says. XTuner (Llama 2 and Yi
under DeepSpeed, lengths of 8k to 1M on A100) and Qwen3-235B-A22B with Megatron-Core on 256 H800 were asked
likewise. The latter showed that messages of tokens to their experts were hidden as those of tensor
parallelism; its layouts with 8 stages and microbatches of one sample, without CUDA graphs, are still
predicted too fast. The bfloat16 rows of Megatron-Bridge (`megatron_bridge_bf16`) had not been priced because
their page does not state the models; their times were known. The error of Qwen3-235B-A22B is at most 9.5 %;
gpt-oss-120b is predicted 18 to 51 % too fast on every chip. Its source says why in part. Megatron-Core sorts
rows by experts around the products, and bounds gated units outside of the fused kernel; the two are priced
since. Rotary positions of YaRN are not fused, biases of the second product are added in four passes, and
activations are a kernel beside products, which is priced as a part of these. At the full bandwidth of a GB200
these last three take about 5 % of a step. They are not priced. PyTorch's kernels on halves of arrays and on
broadcast biases may reach less than that; no published measurement of their rates was found.

`llm_foundry_mpt`: MPT of 125M to 70B parameters under eager FSDP, lengths of 512 to 65,536. {priced} of
{rows} runs were priced, those on A100, and {refused} of these were called too large. Two arrays that PyTorch
does not keep were counted: rows normalised but not scaled yet, and copies of logits in float32, of which the
fused loss of LLM Foundry has none (`loss=fused`). The rate of its kernel of attention on H100 is not known:
runs on H100 are priced with FlashAttention 2, and only up to lengths of 2,048.

Recipes of MaxText on TPU v7 (Ironwood), priced from published config.json files: attention was predicted too
slow and products of experts too fast. The two hid each other in mixtures. The rate of attention is now
derived from two recipes of Llama 3.1 70B, that of experts from Qwen3-235B-A22B; the other rows had no part.
MaxText's kernel works out whole blocks of queries and keys, also beside the windows of gpt-oss. It multiplies
the results of experts by gates, so backward makes the last product again. In float8, it gathers the weights
of experts in eight bits.
*First*, recipes in float8 were predicted with scales that are found in each step; they have fixed ones
(`float8=fixed`), which *today* has.
"""
FITTED = """\
## Constants of frameworks

These constants were fitted to half of the models of each framework. The interval of 90 % is of fits to
models drawn with replacement. A number that *ships* may be rounded within it, or lie nearer to what
sources say; `layoutopt frameworks NAME` prints its source and date. A fit is *not adopted* where judged
runs would be further off: what ships then had no part in it.
"""
LEARNED = """\
## Learnt from a few runs

The table shows how [`layoutopt learn`](../guides/coming_from.md#your-measured-steps) changes the error of
other runs. The rows of one table, chip and framework stand for the runs of one user; some of them, drawn four
times at random, are learnt from. The mean errors are those of the other rows, with the constants that ship
and with those that were learnt; *as told* is the error that `learn` prints. Rows *not fitted* are predicted
under `layoutopt`, whose constants were fitted to other software.

Three numbers of `learn` (the least gain of one more constant and of all, and how little few runs move one)
were chosen on draws from most of these tables, so they are shown at their best. Rows of a table that differ
in options of their framework or in settings of the chip count as one machine here, with the constants of the
first; `learn` refuses such runs. At most 40 rows of a table have a part.
"""
KIND = """\
## By kind of run

`search`, `cost`, `explain` and reports show the errors of the plan's kind: its chip, its framework, with
or without pipeline stages, a dense model or a mixture of experts. The rows are all runs of this page and
of [our own measurements](gpu.md) that had no part in a fit (`benchmarks/known.py`). *Memory* is the mean
by which predicted peaks were too low; a plan that leaves less memory free *barely* fits.
"""
EARLIER_TABLES = """\
## Programs built for their runs

These runs are of programs that the examples cannot build. Some of the runs were used to fit constants
of the presets. The others are not held out either: we knew their errors while we chose rules of the cost
model. *Selective* means that recomputed layers keep some values; *stages*, that a pipeline's stages are
programs of their own.
"""
NO_PART = {"no part in a fit": "no", "keep some values": "no (selective)"}
PARTS = {
    **NO_PART,
    "part in a fit": "yes",
    "pipeline stages": "yes (stages)",
}
RANKS = """\
## Choosing by prediction

The rank correlation (Spearman) compares the predicted with the published order of a model's layouts. It
is {low:.2f} to {high:.2f} for {models} models of {tables} tables.
"""
CHOICES = """\
Regret is the published time of the layout that is predicted fastest, divided by the best published
time, minus 1. For vTrain's models on one node, the mean regret is {mean}, worst {most}.

Memory is predicted for {runs} runs of [frameworks](#by-framework) that ran, of which {large} are
predicted not to fit, and for {lost} that ran out of memory, of which {fits} are predicted to fit, {barely} of
them *barely*, as answers say.
Recipes that move values of some of their layers to the host (Llama 3 70B under FSDP on GB200 and GB300) are
not among them: nothing predicts such a move.
Megatron-LM's functional tests publish the peak of the last rank. Above 8 GiB, the mean error of predicted
peaks is {dense_mean} for {dense} runs of dense models (worst {dense_worst}) and {moe_mean} for {moe} runs of
mixtures (worst {moe_worst}).
"""
STAGES = """\
## Pipelines

These are {rows} of vTrain's runs with 1F1B pipelines (one in four), whose stages are programs of their
own. The constants of `megatron:kernels=2022` were fitted to runs of half of these models, here
priced as other programs. For {workloads} workloads, the layout that is predicted
fastest is {mean} slower than the best published layout on average, worst {most}.
"""
REASONS = """\
## Where errors come from

- **Kernel launches in eager PyTorch.** A host launches ahead of its GPU, so a step takes the longer of the
  two. The model adds up kernels, each with at least a fixed launch time: it predicts short kernels beside
  long ones too slow, and small microbatches, for which the host is slower, too fast. A vTrain layer (hidden
  size {hidden}, {tensor}-way tensor parallelism, microbatch {micro}) takes {published:.2f} ms and is
  predicted to take {predicted:.2f} ms. Modules of transformers need about 30 μs of the host for each kernel
  ([small batch](gpu.md#pytorch)).
- **Activations.** Predicted peaks differ from those of Korthikanti et al. 2022 by at most {memory}. Two
  larger differences partly cancel: the prediction keeps one more normalised array per norm, but no
  dropout masks.
- **Context parallelism in NeMo** sends keys round a ring in zigzag order; the prediction gathers them.
- **Pipelines between nodes in nanotron.** Steps with stages in one node are {inside} too fast on average,
  those on several nodes {between}. Messages between stages need less than a second of a step at the
  network's rate. What the latter need beyond it follows neither the number nor the bytes of these messages,
  and Aleph Alpha's code does not need it: its 2 stages are {two} too fast on average, its 4 stages {four}.
  The authors of these runs later changed the versions and the linked libraries of their environment to "fix
  throughput issue" (huggingface/bench_cluster @f55b5e5). Their runs of 2025 with stages on several nodes
  (`nanotron_best_h100`) have a mean error of {later}, median {half}. With 16 stages, nanotron sends the
  logits from the stage of the head to that of the loss, which the prediction does not. With ZeRO-1, it copies
  the part of each parameter from each rank by itself (src/nanotron/distributed.py @2411b022,
  `all_gather_coalesced`): 8,576 and 21,760 copies on 128 ranks. Steps there are 0.25 and 0.29 s longer than
  predicted, 29 and 13 μs for each copy.
- **gpt-oss-120b.** In bfloat16 it is predicted too fast by as much as in MXFP8, on H100, B200, GB200 and
  GB300. Qwen3-235B-A22B is not, so the error is of the model, not of the type. The sources state no cause.
- **Releases and printed layouts.** gpt-oss-120b on GB200 and GB300 took 1.6 times as long in release 26.06.01
  of Megatron-Bridge as in 26.06 and 26.08. Llama 3 70B in MXFP8 on GB300 is printed in 26.02.01 with one
  chunk a stage and two samples a microbatch, which does not fit; the row has the five and one of its recipe.
- **Work that is not modelled.** FSDP1 and FSDP2 copy parameters and gradients between buffers and wait for
  the host, which YaFSDP does not: steps of FSDP1 with short sequences are predicted too fast.
"""
ERRORS = ("runs", "mean error", "bias", "worst")
KIND_ERRORS = (*ERRORS, "memory (peaks)")


def page() -> Iterator[str]:
    """docs/results/accuracy.md."""
    found = stored("published")
    yield prose(HEAD)
    yield caption("python -m benchmarks.unseen", "unseen")
    yield from table(("framework, chip", "half", *ERRORS, "order", "memory (peaks)"), _by_framework())
    yield from table(("table", "framework", "half", *ERRORS), _by_table())
    yield from _first()
    yield prose(FITTED)
    yield caption("python -m benchmarks.framework_fit", "framework_fit")
    yield from table(("framework", "chips", "constant", "ships", "fitted", "90 % interval"), _of_frameworks())
    yield prose(LEARNED)
    yield caption("python -m benchmarks.learned", "learned")
    yield from table(("constants", "runs", "as shipped", "learnt", "as told", "worse by 1 %"), _learned())
    yield prose(KIND)
    yield from table(("chip", "framework", "model", "pipeline", *KIND_ERRORS), _by_kind())
    yield prose(EARLIER_TABLES)
    yield caption("python -m benchmarks.published", "published")
    free, rest = _rows(found["tables"], NO_PART), _rows(found["tables"], PARTS.keys() - NO_PART.keys())
    yield from table(("table", "used in a fit", *ERRORS), [_every(found["tables"]), *free, *rest])
    criteria = {c["name"]: c for c in found["criteria"]}
    yield _ranks(criteria)
    yield _choices(criteria)
    yield from _stages(found["stages"])
    yield _reasons(found)


def _first() -> Iterator[str]:
    """Runs of others as they were predicted when they were priced for the first time."""
    (known,), now = stored("unseen_first")["tables"].values(), stored("unseen")["tables"]["llm_foundry_mpt"]
    refused = known["ran_called_too_large"]
    recipes = stored("recipes")["rows"]
    unseen = [r for r in recipes if r.get("unseen")]
    errors = errors_of(r["first"]["seconds"] / r["seconds"] - 1 for r in unseen)
    assert errors is not None
    of = {"unseen": len(unseen), "mean": 100 * errors["mean"], "bias": 100 * errors["signed_mean"]}
    yield prose(FIRST, rows=known["rows"], priced=known["priced"], refused=refused, **of)
    yield caption("python -m benchmarks.recipes", "recipes")
    yield from table(("recipe", "mesh", "published", "first"), (_recipe(r)[:4] for r in unseen))
    yield caption("python -m benchmarks.unseen", "unseen_first")
    first = stored("unseen_first")["runs"]
    yield from table(
        ("table", *ERRORS, "mean today", "bias"), (_then(name, own) for name, own in first.items())
    )
    rows = [("first, a100", known["priced"], *_signed(known), refused)]
    for chip in ("a100", "h100"):
        own = [r for r in now["found"] if r["hardware"].startswith(chip)]
        if q := errors_of(r["predicted_seconds"] / r["seconds"] - 1 for r in own):
            rows.append((f"today, {chip}", q["rows"], *_signed(q), sum(not r["fits"] for r in own)))
    yield from table(("LLM Foundry", *ERRORS, "called too large"), rows)
    yield caption("python -m benchmarks.recipes", "recipes")
    yield from table(
        ("recipe", "mesh", "published", "first", "today", "memory"),
        (_recipe(r) for r in recipes if not r.get("unseen")),
    )


def _then(table: str, first: Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
    """Errors of a table as it was predicted first, and today."""
    found = stored("unseen")["tables"][table]["found"]
    then, now = (
        errors_of(
            row["predicted_seconds"] / row["seconds"] - 1
            for row in rows
            if row.get("predicted_seconds") and row.get("seconds")
        )
        for rows in (first, found)
    )
    assert then is not None and now is not None
    return f"`{table}`", then["rows"], *_signed(then), *_signed(now)[:2]


def _recipe(row: Mapping[str, Any]) -> tuple[object, ...]:
    errors = (f"{100 * (row[of]['seconds'] / row['seconds'] - 1):+.1f} %" for of in ("first", "predicted"))
    return (
        f"{row['name']}, {row['hardware'].removeprefix('tpu-')}",
        f"`{row['mesh']}`",
        f"{row['seconds']:.2f} s",
        *errors,
        f"{row['predicted']['gib']:.0f} GiB",
    )


def _learned() -> Iterator[tuple[object, ...]]:
    for row in stored("learned")["learned"]:
        errors = (share(row[name]) for name in ("before", "after", "told"))
        yield row["framework"], row["runs"], *errors, f"{row['worse']} of {row['draws']} draws"


HALVES = ("judged", "fitted")
"""Parts of runs in the constants of frameworks, those that tell most first."""


def _by_framework() -> Iterator[tuple[object, ...]]:
    for half in HALVES:
        for name, found in stored("unseen")["kinds"].items():
            if half in found and found[half]["time"]:
                q = found[half]
                held = f"{share(q['memory']['mean'])} ({q['memory']['rows']})" if q["memory"] else ""
                order = "" if q["order"] is None else f"{q['order']:.2f}"
                yield name, half, q["time"]["rows"], *_signed(q["time"]), order, held


def _by_table() -> Iterator[tuple[object, ...]]:
    for name, found in stored("unseen")["tables"].items():
        groups = defaultdict[tuple[str, str], list[float]](list)
        for row in found["found"]:
            if row["seconds"] and "predicted_seconds" in row:
                error = row["predicted_seconds"] / row["seconds"] - 1
                groups[row["framework"].partition(":")[0], row["half"]].append(error)
        for (framework, half), errors in sorted(groups.items()):
            q = errors_of(errors)
            assert q is not None
            yield f"`{name}`", framework, half, q["rows"], *_signed(q)


def _of_frameworks() -> Iterator[tuple[object, ...]]:
    for name, found in stored("framework_fit")["frameworks"].items():
        for each in found["constants"]:
            low, high = each["interval"]
            last = each["name"].partition(".")[2]
            constant = f"`{last}`" + (", s" if last in ("launch_interval", "launch") else "")
            values = f"{each['ships']:.3g}", f"{each['value']:.3g}", f"{low:.3g} to {high:.3g}"
            software = f"`{name}`" + ("" if found["adopted"] else ", not adopted")
            yield software, ", ".join(each["chips"]), constant, *values


def _by_kind() -> Iterator[tuple[object, ...]]:
    for kind in json.loads(FILE.read_text(encoding="utf-8"))["kinds"]:
        errors, low = kind["seconds"], [max(0.0, -e) for e in kind["memory"]]
        if kind["fitted"] or not errors:
            continue
        yield (
            f"`{kind['hardware']}`",
            f"`{kind['framework']}`",
            "mixture of experts" if kind["mixture"] else "dense",
            "yes" if kind["stages"] else "no",
            len(errors),
            share(statistics.fmean(map(abs, errors))),
            f"{100 * statistics.fmean(errors):+.1f} %",
            share(max(map(abs, errors))),
            f"{share(statistics.fmean(low))} ({len(low)})" if low else "",
        )


def _signed(q: Mapping[str, Any]) -> tuple[str, str, str]:
    return share(q["mean"]), f"{100 * q['signed_mean']:+.1f} %", share(abs(q["worst"]))


def readme() -> Iterator[str]:
    """The table of README.md: judged halves of frameworks first."""
    held = stored("published")["tables"]
    heads = "step time of", "runs", "mean error", "bias", "worst", "used to build the model"

    def rows() -> Iterator[tuple[object, ...]]:
        judged = defaultdict[str, list[float]](list)
        for row in (r for t in stored("unseen")["tables"].values() for r in t["found"]):
            if row["half"] == "judged" and row["seconds"] and "predicted_seconds" in row:
                stages = ", stages" * ("layers:" in row["layout"])
                name = f"`--framework {row['framework'].partition(':')[0]}`{stages}"
                judged[name].append(row["predicted_seconds"] / row["seconds"] - 1)
        for name, errors in sorted(judged.items()):
            yield name, len(errors), *_of(errors), "no"
        steps = stored("one_gpu")["steps"].values()
        own = [ratio({k: r[k]["step_seconds"] for k in r}, "measured") - 1 for r in steps]
        yield OWN, len(own), *_of(own), "to set a constant"
        for what, (names, part) in EARLIER.items():
            listed = (r for name in names for r in held[name]["rows"])
            fair = [r for r in listed if r["stages"] == 1 and not r["keeps"]]
            errors = [r["predicted_seconds"] / r["published_seconds"] - 1 for r in fair]
            yield what, len(errors), *_of(errors), part

    return table(heads, rows())


def _of(errors: Sequence[float]) -> tuple[str, str, str]:
    q = errors_of(errors)
    assert q is not None
    return _signed(q)


OWN = "layoutopt's own training of 0.1B to 1.2B models on one H100"
EARLIER = {
    "MaxText on TPU v4, v5e and v5p, one slice": (("maxtext_tpu.csv",), "to choose rules"),
    "vTrain, GPT on one node of A100": (
        ("published/vtrain_a100_h1024.csv", "published/vtrain_a100_h2048.csv"),
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
    return "all runs not used in a fit", "no", count, share(mean), f"{100 * bias:+.1f} %", worst


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


def _ranks(criteria: Mapping[str, Any]) -> str:
    found = {name.removesuffix(RANK): c["reached"] for name, c in criteria.items() if name.endswith(RANK)}
    tables = len({name.split()[0] for name in found})
    ends = {"low": min(found.values()), "high": max(found.values())}
    return prose(RANKS, models=len(found), tables=tables, **ends)


def _choices(criteria: Mapping[str, Any]) -> str:
    mean, most = (
        criteria[f"vTrain, one node: {k}"]["reached"] for k in ("regret in the mean", "largest regret")
    )
    names = {"runs": "ran", "large": "ran_called_too_large", "lost": "out_of_memory"}
    names |= {"fits": "out_of_memory_called_fitting", "barely": "out_of_memory_called_barely"}
    tables = stored("unseen")["tables"]
    said: dict[str, Any] = {n: sum(found[key] for found in tables.values()) for n, key in names.items()}
    for kind in ("dense", "moe"):
        peaks = tables[f"megatron_lm_golden_{kind}"]["memory"]
        said |= {kind: peaks["rows"], f"{kind}_mean": share(peaks["mean"])}
        said[f"{kind}_worst"] = share(peaks["worst"])
    return prose(CHOICES, mean=share(mean), most=share(most), **said)


def _stages(found: Mapping[str, Any]) -> Iterator[str]:
    by, regret = found["by_stages"], found["regret"]
    yield prose(
        STAGES,
        rows=by["all"]["rows"],
        workloads=regret["workloads"],
        mean=share(regret["mean"]),
        most=share(regret["worst"]),
    )
    numbered = sorted(by.items(), key=lambda each: (each[0] == "all", each[0].zfill(3)))
    yield from table(("stages", *ERRORS), ((k, q["rows"], *_signed(q)) for k, q in numbered))


def _reasons(found: Mapping[str, Any]) -> str:
    micro = found["layers"]["micro"]
    pairs = [
        (h, t, m, *pair) for h, t, row in found["layers"]["times"] for m, pair in zip(micro, row, strict=True)
    ]
    worst = min(pairs, key=lambda each: each[-1] / each[-2])
    memory = max(abs(r["error"]) for r in found["memory"])
    named = dict(zip(("hidden", "tensor", "micro", "published", "predicted"), worst, strict=True))
    return prose(REASONS, **named, **_pipelines(), memory=share(memory))


def _pipelines() -> dict[str, str]:
    """The mean error of steps with stages, without its sign, by nodes and by stages."""
    groups = defaultdict[str, list[float]](list)
    tables = {"nanotron_llama1b_h100": "", "nanotron_best_h100": "later", "alephalpha_13b_a100": ""}
    for name, later in tables.items():
        for row in stored("unseen")["tables"][name]["found"]:
            mesh = {a: int(n) for a, _, n in (each.partition(":") for each in row["mesh"].split(";"))}
            if not row["seconds"] or "predicted_seconds" not in row or "pipe" not in mesh:
                continue
            where = "inside" if prod(mesh.values()) <= 8 else "between"
            kind = where if name.startswith("nanotron") else {2: "two", 4: "four"}[mesh["pipe"]]
            groups[later + kind].append(row["predicted_seconds"] / row["seconds"] - 1)
    sizes = [*map(abs, groups.pop("laterbetween"))]
    later_ones = {"later": share(statistics.fmean(sizes)), "half": share(statistics.median(sizes))}
    return {name: share(-statistics.fmean(errors)) for name, errors in groups.items()} | later_ones
