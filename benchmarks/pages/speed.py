"""How long searches take, how well they do on the contest, and how fast the engine runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from benchmarks.pages.tables import caption, prose, stored, table
from layoutopt.plan.units import seconds_text

HEAD = """\
# Speed

## Searches

The table shows CPU seconds of the whole command on two shared cores, from loading Python to writing the
plan. Columns name the mesh. An asterisk marks a search that ended without a proof. The largest of these
searches covers {layouts} layouts. *Least memory* is `--objective memory`; *tight memory* is `--memory`
with 3 % more than the least.
"""
CLIPPED = """\
{rows} of these searches were repeated with gradient clipping (`clip_norm=1`). On average, a search with
clipping took {mean:.2f} times the CPU time of the same search without clipping (worst: {most:.2f}
times).
"""
PLAIN = """\
## Plain searches

Each search has no option about its space, so it covers everything, and `--time-limit {limit:.0f}` (in CPU
seconds, on one core). The hardware is {hardware}; language models have 512 sequences of 4,096 tokens.
{proven} of the {rows} searches ended with a proof; the others show the gap.
"""
CONTEST = """\
## The contest of ASPLOS 2025 on intra-operator parallelism

`layoutopt solve-problem` ran on the {rows} public instances with the contest's limit of {limit:.0f} s.
It found {better} costs below the best published cost and {worse} above it. {proven} costs are proven
optimal (bound / cost = 1).
"""
LIMITS = """\
## Time limits

{runs} random searches had a `--time-limit` of 1 to 20 s. The latest ended {late:.2f} s after its limit.
{ends}.
"""
ENGINE = """\
## Steps of the JAX engine beside plain JAX

The table shows a training step of a two-layer language model on 8 virtual CPU devices, measured in
alternating runs. GSPMD is plain JAX with the same shardings. The engine takes {wall_ms:.2f} times the
wall time of GSPMD and {cpu_ms:.2f} times its CPU time (geometric means).
"""
SIZE = """\
## Searching sizes

`layoutopt size` compared {sizes} sizes of Llama 3's family on {machines} machines, for a budget of
{budget} FLOP. A bound ruled out {beaten} of the {pairs} pairs of size and machine; the other {searched}
were searched. The command took {seconds:.0f} CPU seconds and {mib:,} MiB of memory.
"""


def page() -> Iterator[str]:
    """docs/results/speed.md."""
    rows = stored("search")["rows"]
    most = max(rows, key=lambda row: int(row["layouts"].replace(",", "")))
    yield prose(HEAD, layouts=most["layouts"])
    yield caption("python benchmarks/search.py", "search")
    yield from table(("model", *CASES), _searches(rows))
    ratios = [*_clipped(stored("clipping")["rows"])]
    yield prose(CLIPPED, rows=len(ratios), mean=fmean(ratios), most=max(ratios))
    yield caption("python benchmarks/search.py --clip", "clipping")
    plain = stored("plain_searches")
    rows, counts = plain["rows"], sorted({row["devices"] for row in plain["rows"]})
    proven = sum(row.get("status") == "OPTIMAL" for row in rows)
    yield prose(PLAIN, limit=plain["limit"], hardware=plain["hardware"], proven=proven, rows=len(rows))
    yield caption("python -m benchmarks.plain_searches", "plain_searches")
    yield from table(("model", *(f"{n} devices" for n in counts)), _plain(rows, counts))
    instances = stored("contest")["rows"]
    yield prose(CONTEST, **_contest(instances))
    yield caption("python -m benchmarks.contest", "contest")
    heads = ("instance", "seconds", "cost", "best published", "cost / best", "bound / cost")
    yield from table(heads, map(_instance, instances))
    yield _limits(stored("time_limits")["rows"])
    yield caption("python benchmarks/time_limits.py", "time_limits")
    engine = stored("engine_jax")
    yield prose(ENGINE, **engine["geometric_mean_of_ratios"])
    yield caption(engine["command"], "engine_jax")
    heads = ("mesh", *(f"{what}: engine, GSPMD" for what in ("wall, ms", "CPU, ms", "first step, s")))
    yield from table(heads, _engine(engine["rows"]))
    sizes = stored("size_frontier")
    found = sizes["frontier"]
    words = found["command"].split()
    asked = {"sizes": words[words.index("--candidates") + 1], "budget": words[words.index("--budget") + 1]}
    named = {
        **asked,
        "machines": words.count("--hardware"),
        "pairs": found["beaten"] + found["searched"],
        "seconds": found["cpu_seconds"],
    }
    yield prose(SIZE, **found, **named, mib=found["peak_mib"])
    yield caption("python benchmarks/size_frontier.py", "size_frontier")


CASES = (
    "8 × 8 × 8, 6 layers",
    "8 × 8 × 8, 96 layers",
    "512 devices, meshes of up to 3 axes",
    "4 × 4, least memory",
    "4 × 4, tight memory",
)
"""Columns of the table of searches."""


def _case(row: dict[str, Any]) -> str:
    """The column of a search."""
    asked = row["asked"]
    if asked:
        return CASES[3] if "objective" in asked else CASES[4]
    if row["where"] == "512 3":
        return CASES[2]
    return CASES[0] if row["layers"] == 6 else CASES[1]


def _plain(rows: list[dict[str, Any]], counts: list[int]) -> Iterator[tuple[str, ...]]:
    known = {(row["model"], row["devices"]): row for row in rows}
    for model in dict.fromkeys(row["model"] for row in rows):
        yield model, *(_answer(known[model, n]) for n in counts)


def _answer(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    step = seconds_text(row["step_seconds"])
    proven = row["status"] == "OPTIMAL"
    return f"{step}, proven in {row['seconds']:.0f} s" if proven else f"{step}, gap {100 * row['gap']:.1f} %"


def _searches(rows: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        proven = "" if row["status"] == "OPTIMAL" else " *"
        found[row["model"]][_case(row)] = f"{row['cpu_seconds']}{proven}"
    for model, cells in found.items():
        yield model, *(cells.get(case, "") for case in CASES)


def _clipped(rows: list[dict[str, Any]]) -> Iterator[float]:
    """Seconds with a norm over seconds without, for each search of which both are stored."""
    pairs: dict[tuple[object, ...], dict[float, float]] = defaultdict(dict)
    for r in rows:
        pairs[r["model"], r["layers"], r["where"], r["asked"]][r["clip_norm"]] = r["cpu_seconds"]
    for seconds in pairs.values():
        if len(seconds) == 2:
            yield seconds[max(seconds)] / seconds[min(seconds)]


def _contest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    (limit,) = {r["limit"] for r in rows}
    return {
        "limit": limit,
        "rows": len(rows),
        "better": sum(r["cost"] < r["best_published"] for r in rows),
        "worse": sum(r["cost"] > r["best_published"] for r in rows),
        "proven": sum(r["status"] == "OPTIMAL" for r in rows),
    }


def _engine(rows: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    keys = {"wall_ms": "{:.0f}", "cpu_ms": "{:.0f}", "first_step_s": "{:.1f}"}
    for mesh in dict.fromkeys(r["mesh"] for r in rows):
        peers = {r["peer"]: r for r in rows if r["mesh"] == mesh}
        both = [peers[name] for name in ("ours_jax", "jax_gspmd")]
        yield mesh, *(", ".join(form.format(r[key]) for r in both) for key, form in keys.items())


def _instance(row: dict[str, Any]) -> tuple[object, ...]:
    cost, best = f"{row['cost']:,.0f}", f"{row['best_published']:,.0f}"
    return (
        row["instance"],
        row["seconds"],
        cost,
        best,
        f"{row['ratio']:.4f}",
        f"{row['bound'] / row['cost']:.4f}",
    )


def _limits(rows: list[dict[str, Any]]) -> str:
    late = max(r["seconds"] - r["limit"] for r in rows)
    words = {0: "searches found a plan", 3: "proved that no plan fits", 4: "found no plan in time"}
    ends = Counter(words[r["exit"]] for r in rows).most_common()
    return prose(
        LIMITS,
        runs=len(rows),
        late=late,
        ends=" and ".join(", ".join(f"{n} {how}" for how, n in ends).rsplit(", ", 1)),
    )
