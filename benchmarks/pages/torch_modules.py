"""PyTorch modules at full size: their import, and their searches under PyTorch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from benchmarks.pages.tables import caption, prose, stored, table

HEAD = """\
# PyTorch modules

These {models} modules of transformers, of peft and in plain PyTorch are at their published sizes, without
values. {imported} of them have a stored import. {exact} of these have exactly the module's parameters, and
{loops} have the loops of layers that were written down before the first import. {right:,} of {pairs:,} pairs
of axes are the same dimension or two as written down. *Share* is the CPU time of the import without
`torch.export`, relative to that of `torch.export`.

The searches are for {devices} devices of {hardware} under `--framework {framework} --allow usual`. {searched}
were run, and {proven} of these proved a best layout. {about}
"""
STEPS = """
## Steps under searched plans

{count} rows of small modules train on {ranks} processes (gloo) under plans searched for {hardware} with
`--framework {framework}`. Loss and gradients in float64 differ from those of one process by at most
{loss} and {gradient} (relative). In {equal} rows every parameter lies as the plan's placements say, and
the fullest rank holds the elements that the plan says. Times are medians of {rounds} rounds of AdamW in
float32, in turns with the same module under hand-written FSDP2 on the same processes, and, where the plan
splits tensors, with the plan's own layout written by hand with `parallelize_module` (*by hand*). {about}
"""
FRESH = """
## Modules as people write them

{count} modules and losses that the importer had not met were written from memory in the words of public
code, at small sizes. Each is imported, its parameters are counted, its loss and every gradient are compared
with PyTorch on one device and under two random layouts of 2 x 2, and it is searched for 64 devices of h100
under `--framework torch` for at most 60 s. A difference may be 1e-5, or four times what the last bits of
the parameters change. {first} came through at first. {mended} come through with the code of this date: CTC,
packed sequences, extremes at places, what a module keeps of a call, and groups of examples were mended. The
graph network has the numbers of PyTorch, but its inputs are the nodes and edges of all graphs, which no
plan splits over data ranks.
"""
UNSEEN = """
## Every model type of transformers, reduced

Configurations of {types} model types of transformers {version} were reduced by the names of their fields.
PyTorch runs {ran} of the modules that this makes; of the others the reduction does not fit together. {equal}
of these import with all parameters, and with the loss and every gradient of PyTorch to 1e-5 or to four times
the differences that the last bits of its parameters make. {about}
"""


def page() -> Iterator[str]:
    """docs/results/torch_modules.md."""
    found = stored("torch_modules")
    rows = [r for r in found["rows"] if "parameters" in r]
    searched = [r["search"] for r in rows if "search" in r]
    yield prose(
        HEAD,
        models=len(found["rows"]),
        imported=len(rows),
        exact=sum(r["parameters"]["imported"] == r["parameters"]["module"] for r in rows),
        loops=sum(sorted(r["loops"]["found"]) == sorted(r["loops"]["expected"]) for r in rows),
        right=sum(r["axes"]["as_expected"] for r in rows),
        pairs=sum(r["axes"]["pairs"] for r in rows),
        devices=found["devices"],
        hardware=found["hardware"],
        framework=found["framework"],
        proven=sum(s["status"] == "OPTIMAL" for s in searched),
        searched=len(searched),
        about=found["about"],
    )
    yield caption("python benchmarks/torch_modules.py", "torch_modules")
    yield from table(
        (
            "module",
            "parameters",
            "loops",
            "import, CPU s",
            "share",
            "search",
            "search, CPU s",
            "step, ms",
            "plan",
        ),
        (_row(r) for r in found["rows"]),
    )
    yield from _steps()
    yield from _fresh()
    yield from _unseen()


def _fresh() -> Iterator[str]:
    """Modules as people write them, before and after what they met was mended."""
    found = stored("torch_fresh")
    first, later = ({r["type"]: r for r in found[of]} for of in ("first", "mended"))
    counts = {of: sum(r["end"] == "good" for r in found[of]) for of in ("first", "mended")}
    yield prose(FRESH, count=len(first), **counts)
    yield caption("python -m benchmarks.torch_fresh", "torch_fresh")

    def of(row: dict[str, Any], what: str) -> str:
        listed = [row.get(what), *(each[what] for each in row.get("layouts", {}).values())]
        known = [x for x in listed if x is not None]
        return f"{max(known):.0e}" if known else ""

    yield from table(
        ("module", "parameters", "first", "mended", "loss", "gradient", "search", "plan"),
        (
            (
                name,
                f"{r['parameters']:,}",
                first[name]["end"],
                r["end"],
                of(r, "loss"),
                of(r, "gradient"),
                r.get("status", "").lower(),
                r.get("plan", ""),
            )
            for name, r in later.items()
        ),
    )


def _unseen() -> Iterator[str]:
    """The sweep over model types of transformers."""
    found = stored("torch_unseen")
    ran = [r for r in found["rows"] if r["end"] != "unbuilt"]
    ends = defaultdict[str, list[str]](list)
    for r in ran:
        ends[r["end"] if r["end"] != "refused" else f"refused: {_reason(r['said'])}"].append(r["type"])
    yield prose(
        UNSEEN,
        types=len(found["rows"]),
        version=found["transformers"],
        ran=len(ran),
        equal=len(ends["equal"]),
        about=found["about"],
    )
    yield caption("python -m benchmarks.torch_unseen", "torch_unseen")
    listed = sorted(ends.items(), key=lambda end: -len(end[1]))
    few = ((end, str(len(kinds)), ", ".join(kinds) if len(kinds) < 25 else "") for end, kinds in listed)
    yield from table(("end", "types", "which"), few)


def _reason(said: str) -> str:
    """The kind of a refusal."""
    if "values" in said:
        return "its shapes or branches depend on values"
    what = re.search(r"cannot import ([\w.]+)|cannot trace this module: (\w+)", said)
    return "the module does not run without values" if what is None else what[1] or what[2]


def _steps() -> Iterator[str]:
    """Training on processes of this machine."""
    found = stored("torch_steps")
    rows = [r for r in found["rows"] if "error" not in r]
    yield prose(
        STEPS,
        count=len(rows),
        ranks=" and ".join(map(str, sorted({r["ranks"] for r in rows}))),
        hardware=found["hardware"],
        framework=found["framework"],
        loss=f"{max(r['loss'] for r in rows):.0e}",
        gradient=f"{max(r['gradient'] for r in rows):.0e}",
        equal=sum(max(r["held"]) == max(r["planned"]) and not r["misplaced"] for r in rows),
        rounds=found["rounds"],
        about=found["about"],
    )
    yield caption("python benchmarks/torch_steps.py", "torch_steps")
    yield from table(
        (
            "module",
            "processes",
            "plan",
            "loss",
            "gradient",
            "step, ms",
            "FSDP2, ms",
            "ratio",
            "ratio of CPU s",
            "by hand",
            "CPU s by hand",
        ),
        (
            (
                r["name"],
                str(r["ranks"]),
                "; ".join([*(f"{d}:{'+'.join(a)}" for d, a in r["layout"].items()), *r["storage"]]),
                f"{r['loss']:.0e}",
                f"{r['gradient']:.0e}",
                f"{1e3 * r['step_seconds']:.0f}",
                f"{1e3 * r['fsdp2_seconds']:.0f}",
                f"{r['ratio']:.2f}",
                f"{r['cpu_ratio']:.2f}",
                *(f"{r[f'layout_{n}ratio']:.2f}" if "layout_ratio" in r else "" for n in ("", "cpu_")),
            )
            for r in rows
        ),
    )


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return (row["note"], row["error"], *[""] * 7)
    own = row["import_cpu_seconds"] - row["export_cpu_seconds"]
    s = row.get("search", {})
    plan = [*(f"{d}:{'+'.join(axes)}" for d, axes in s.get("layout", {}).items()), *s.get("storage", ())]
    return (
        row["note"],
        f"{row['parameters']['imported']:,}",
        ", ".join(map(str, row["loops"]["found"])) or "none",
        f"{row['import_cpu_seconds']:.1f}",
        f"{own / row['export_cpu_seconds']:.2f}",
        s.get("status", "not run").lower(),
        str(s.get("cpu_seconds", "")),
        f"{1e3 * s['step_seconds']:.1f}" if "step_seconds" in s else "",
        "; ".join(plan),
    )
