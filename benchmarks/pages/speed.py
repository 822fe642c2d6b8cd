"""How long searches take, how well they do on the contest, and how fast the engine runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from benchmarks.pages.tables import caption, prose, stored, table

HEAD = """\
# Speed

## Searches

CPU seconds of the whole command on two shared cores: loading Python and the model, the search, the named
alternatives and the plan. An asterisk marks a search that ended without a proof. *Least memory* is
`--objective memory`; *tight memory* is a limit just above it. The largest of these searches has {layouts}
layouts.
"""
CLIPPED = """\
{rows} of these searches were repeated with `clip_norm=1`, which adds a sum over all gradients. They took
{mean:.2f} times as long on average, and {most:.2f} times in the worst case.
"""
CONTEST = """\
## The contest of ASPLOS 2025 on intra-operator parallelism

The public instances, within the contest's limit of {limit:.0f} s. The last columns are the cost over the
best published cost, and the proven bound over the cost. {better} of {rows} costs are below the best
published one and {worse} are above it; {proven} are proven optimal.
"""
LIMITS = """\
## Time limits

{runs} random searches with `--time-limit` of 1 to 20 s ended at most {late:.2f} s after their limit by
the wall clock: {ends}.
"""
ENGINE = """\
## Steps of the JAX engine beside plain JAX

A language model of two layers on 8 virtual CPU devices, ten interleaved rounds. GSPMD is plain JAX with
shardings. The geometric mean of the engine's time over GSPMD's is {wall_ms:.2f} in wall time and
{cpu_ms:.2f} in CPU time.
"""
SIZE = """\
## Searching sizes

`layoutopt size` compares {sizes} sizes of Llama 3's family on {machines} machines, for a budget of
{budget} FLOP. A bound rules out {beaten} of the {pairs} pairs of size and machine; {searched} are
searched. This takes {seconds:.0f} CPU seconds and {mib:,} MiB.
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
    "512, all meshes of 3 axes",
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
    words = {0: "an answer", 3: "a proof that nothing fits", 4: "nothing found"}
    ends = Counter(words[r["exit"]] for r in rows).most_common()
    return prose(LIMITS, runs=len(rows), late=late, ends=", ".join(f"{n} with {how}" for how, n in ends))
