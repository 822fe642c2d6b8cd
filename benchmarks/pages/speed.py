"""How long searches take, how well they do on the contest, and how fast the engine runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.pages.tables import caption, stored, table

HEAD = """\
# Speed

CPU seconds count the whole command on two shared cores: loading Python and the model, the search, the named
alternatives and the plan.

## Searches

`512, K axes` searches every shape of a mesh of 512 devices with up to K axes.
"""
CONTEST = """\
## The contest of ASPLOS 2025 on intra-operator parallelism

The public instances, within the contest's time limits. A ratio below 1 is better than the best published
cost.
"""
LIMITS = """\
## Time limits

Random searches with `--time-limit` of 1 to 20 s, by the wall clock.
"""
ENGINE = """\
## Steps of the JAX engine beside plain JAX

A language model of two layers on 8 virtual CPU devices, ten interleaved rounds. GSPMD is plain JAX with
shardings.
"""
SIZE = """\
## Searching sizes

`layoutopt size` over 30 sizes of Llama 3's family on four machines, for a budget of 1e21 FLOP.
"""


def page() -> Iterator[str]:
    """docs/results/speed.md."""
    yield HEAD
    yield caption("python benchmarks/search.py", "search")
    heads = ("model", "layers", "mesh", "options", "layouts", "status", "CPU seconds")
    yield from table(heads, map(_search, stored("search")["rows"]))
    yield "With `clip_norm=1`, which adds a sum over all gradients:\n"
    yield caption("python benchmarks/search.py --clip", "clipping")
    yield from table(("model", "mesh", "without", "with `clip_norm`"), _clipped(stored("clipping")["rows"]))
    yield CONTEST
    yield caption("python -m benchmarks.contest", "contest")
    heads = ("instance", "limit", "seconds", "cost", "best published", "ratio", "bound / cost", "status")
    yield from table(heads, map(_instance, stored("contest")["rows"]))
    yield LIMITS
    yield caption("python benchmarks/time_limits.py", "time_limits")
    yield from _limits(stored("time_limits")["rows"])
    yield ENGINE
    engine = stored("engine_jax")
    yield caption(engine["command"], "engine_jax")
    means = engine["geometric_mean_of_ratios"]
    yield (
        f"Geometric mean of ours over GSPMD: {means['wall_ms']:.2f} in wall time, "
        f"{means['cpu_ms']:.2f} in CPU time.\n"
    )
    heads = ("step", "mesh", "wall, ms", "CPU, ms", "first step, s")
    yield from table(
        heads,
        (
            (r["peer"], r["mesh"], f"{r['wall_ms']:.0f}", f"{r['cpu_ms']:.0f}", f"{r['first_step_s']:.1f}")
            for r in engine["rows"]
        ),
    )
    yield SIZE
    sizes = stored("size_frontier")
    yield caption("python benchmarks/size_frontier.py", "size_frontier")
    yield from table(
        ("case", "searched", "beaten by a bound", "CPU seconds", "peak memory"),
        (
            (name, r["searched"], r["beaten"], r["cpu_seconds"], f"{r['peak_mib']:,} MiB")
            for name, r in sizes.items()
        ),
    )


def _search(row: dict[str, Any]) -> tuple[object, ...]:
    where = _mesh(row)
    asked = f"`{row['asked']}`" if row["asked"] else ""
    return row["model"], row["layers"] or "", where, asked, row["layouts"], row["status"], row["cpu_seconds"]


def _mesh(row: dict[str, Any]) -> str:
    devices, _, axes = str(row["where"]).partition(" ")
    return f"{devices}, {axes} axes" if axes else devices


def _clipped(rows: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    pairs: dict[tuple[str, object, str, str], dict[float, float]] = {}
    for r in rows:
        key = (r["model"], r["layers"], _mesh(r), r["asked"])
        pairs.setdefault(key, {})[r["clip_norm"]] = r["cpu_seconds"]
    for (model, _, where, _), seconds in pairs.items():
        if len(seconds) == 2:
            yield model, where, seconds[min(seconds)], seconds[max(seconds)]


def _instance(row: dict[str, Any]) -> tuple[object, ...]:
    cost, best = f"{row['cost']:,.0f}", f"{row['best_published']:,.0f}"
    bound = f"{row['bound'] / row['cost']:.4f}"
    limit = f"{row['limit']:.0f} s"
    return row["instance"], limit, row["seconds"], cost, best, f"{row['ratio']:.4f}", bound, row["status"]


def _limits(rows: list[dict[str, Any]]) -> Iterator[str]:
    late = max(r["seconds"] - r["limit"] for r in rows)
    ends = Counter(
        {0: "an answer", 3: "a proof that nothing fits", 4: "nothing found"}.get(r["exit"]) for r in rows
    )
    said = ", ".join(f"{n} with {words}" for words, n in ends.most_common())
    yield f"{len(rows)} searches ended at most {late:.2f} s after their limit: {said}.\n"
