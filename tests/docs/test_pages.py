"""All pages: names, files and links exist, every page is in the index, measured numbers say where from."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import math
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import mesh_tf_core
from layoutopt.cli import app
from layoutopt.solver import cost
from layoutopt.solver.files import problem_from
from mesh_tf_core.ir.schedules import KINDS, ONE_WAY, PipelineSchedule
from mesh_tf_core.ir.stage_orders import StageAction
from reports.page import sections
from reports.reader import plan_of
from tests.reports import sample
from tests.slot_seconds import together

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCES = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PACKAGES = ("mesh_tf_core", "costmodels", "layoutopt", "reports")


def text_of(page: Path) -> str:
    return FENCES.sub("", page.read_text(encoding="utf-8"))


def exists(name: str) -> bool:
    """Whether a dotted name is a module or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_what_is_missing_is_found() -> None:
    assert exists("costmodels.network.closed_forms.ring_gather") and exists(
        "costmodels.network.topology.MeshPlacement.route"
    )
    assert not exists("costmodels.network.closed_forms.ring") and not exists("costmodels.formula.ring_gather")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_exist(page: Path) -> None:
    text = text_of(page)
    names = re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`", text)
    assert [n for n in names if not n.endswith(".py") and not exists(n)] == []
    ours = re.findall(r"`mtf\.(\w+)[`(.]", text)
    assert [n for n in ours if not hasattr(mesh_tf_core, n)] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_links_exist(page: Path) -> None:
    text = text_of(page)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    folders = "mesh_tf_core|costmodels|layoutopt|reports|tests|benchmarks|examples|docs"
    files = re.findall(rf"`((?:{folders})/[\w/.]*)", text)
    assert [f for f in files if not (ROOT / f).exists()] == []


def unknown(found: list[tuple[str, str]]) -> list[str]:
    """The commands, each with the rest of its line, that do not exist or have an option that does not."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    wrong = []
    for name, rest in found:
        known = {option for p in commands[name].params for option in p.opts} if name in commands else set()
        used = re.findall(r"(?<= )--[a-z][a-z-]*", rest.split("#")[0]) if name != "launch" else []
        if name not in commands or not {*used} <= {*known, "--help"}:
            wrong.append(f"layoutopt {name}{rest}")
    return wrong


STARTS = r"^(?:\$ | *(?:exec |srun [^\n]*?|mpirun [^\n]*?|~/env/bin/)?)"
"""Before a command, in a block or a script."""


def typed(script: str) -> list[tuple[str, str]]:
    """The commands of a script or of blocks, each with the rest of its line."""
    return re.findall(
        rf"{STARTS}layoutopt ([a-z][a-z-]+)((?: .*)?)$", script.replace("\\\n", " "), re.MULTILINE
    )


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    whole = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = typed("\n".join(FENCES.findall(whole)))
    found += re.findall(r"`layoutopt ([a-z][a-z-]+)((?: [^`\n]*)?)`", FENCES.sub("", whole))
    assert unknown(found) == []


SCRIPTS = sorted((ROOT / "examples" / "clusters").iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_of_clusters_parse_and_their_options_exist(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    commands = typed(text)
    assert commands and unknown(commands) == []
    assert parsed(script.suffix[1:], text)


def test_an_option_that_does_not_exist_is_seen() -> None:
    assert unknown([("search", " model.py --devises 8"), ("serch", "")]) == [
        "layoutopt search model.py --devises 8",
        "layoutopt serch",
    ]


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    names = [str(page.relative_to(DOCS)) for page in PAGES]
    assert [name for name in names if name != "README.md" and f"]({name})" not in index] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as renderers of Markdown make them."""
    heads = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", head)).lower().replace(" ", "-")
        for head in heads
    }


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_anchors_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text_of(page))
    ours = [(page.parent / name if name else page, anchor) for name, anchor in links]
    assert [str(p) for p, anchor in ours if p.suffix == ".md" and anchor not in anchors(p)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sentences_begin_with_their_subject(page: Path) -> None:
    """No sentence begins with "Of" or "What", and none tells the history of the project."""
    lines = [line for line in text_of(page).splitlines() if not line.startswith(("|", "#", "    "))]
    text = " ".join(lines)
    assert re.findall(r"(?:^|[.;] |- )(?:Of|What) [a-z]+ [^.]{0,40}", text) == []
    assert re.findall(r"[^.]{0,40}(?:today's|busy machine|older code|in the mean)[^.]{0,20}", text) == []


def test_the_report_page_explains_every_section() -> None:
    page = (ROOT / "docs" / "guides" / "report.md").read_text(encoding="utf-8")
    for section in sections.sections([plan_of(sample.full_plan())]):
        assert f"| {section.title} |" in page


def test_measured_numbers_of_the_cost_model_name_their_command() -> None:
    """A paragraph with a measured number says by which command it can be had, or who published it."""
    number = re.compile(r"\d(?:[\d.,]*)\s?(?:ms|µs|us|%|GiB|MiB|times as)(?!\w)")
    source = re.compile(r"`(?:layoutopt|python|benchmarks)[ /.]|\b(?:19|20)\d\d\b")
    found = text_of(ROOT / "docs" / "explanation" / "cost_model.md").split("\n\n")
    assert [p for p in found if number.search(p) and not source.search(p)] == []


def test_schedules_take_what_their_table_says() -> None:
    """The first row of the table, by the command above it."""
    page = (DOCS / "explanation" / "pipelines.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    layoutopt cost (.*batch=8 .*)$", page, re.MULTILINE)
    (row,) = re.findall(r"^\| h100 \| 8 \| (.*) \|$", page, re.MULTILINE)
    for schedule, cell in zip(("1f1b", "zb-h1", "interleaved:2"), row.split(" | "), strict=True):
        words = shlex.split(command.replace("--schedule 1f1b", f"--schedule {schedule}"))
        done = CliRunner().invoke(app, ["cost", *words, "--json"])
        found = json.loads(done.stdout)["predicted"]
        assert f"{found['step_seconds']:.2f} s, {found['peak_memory_bytes'] / 2**30:.0f} GiB" == cell, (
            schedule
        )


def test_what_schedules_store_is_what_their_records_say() -> None:
    """One row for each schedule: the values in flight, and those that gradients of weights wait for."""
    page = (DOCS / "explanation" / "pipelines.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w:-]+)` \(.*?\) \| ([^|]*) \|", page, re.MULTILINE))
    assert rows.keys() == {name.replace(":2", ":R") for name in ONE_WAY}
    for name, (p, m, r) in itertools.product(rows, ((2, 4, 2), (4, 16, 2), (4, 16, 3), (8, 32, 2))):
        schedule = PipelineSchedule.named(name.replace("R", str(r)), p, m)
        found = [schedule.in_flight]
        if KINDS[schedule.kind].split:
            found.append(schedule.ring(StageAction.BACKWARD))
        said = [part.split(" for ")[0].split() for part in rows[name].split("; ")]
        sizes = {"P": p, "M": m, "R": r}
        assert [formula(words, sizes) for words in said] == found, name


def test_stages_idle_as_long_as_the_grammar_says() -> None:
    """One row for each schedule: a quotient, or a share of another schedule's (all parts of a tick alike)."""
    page = (DOCS / "reference" / "grammar.md").read_text(encoding="utf-8")
    section = page.partition("\n## Schedule\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w:-]+)` \|[^|]*\| ([^|]*) \|$", section, re.MULTILINE))
    assert rows.keys() == {name.replace(":2", ":R") for name in ONE_WAY}
    for (name, said), (p, m, r) in itertools.product(rows.items(), ((2, 4, 2), (4, 16, 3), (8, 32, 2))):
        schedule = PipelineSchedule.named(name.replace("R", str(r)), p, m)
        if quotient := re.fullmatch(r"\((.*)\) / \((.*)\)", said):
            sizes = {"P": p, "M": m, "R": r}
            above, below = (formula(part.split(), sizes) for part in quotient.groups())
            assert schedule.idle() == pytest.approx(above / below), name
        else:
            assert said == "about two thirds of that of `1f1b`"
            whole = PipelineSchedule.named("1f1b", p, m)
            idle = (
                together(schedule, (1, 1, 1)) - 3 * schedule.works,
                together(whole, (1, 2, 0)) - 3 * whole.works,
            )
            assert idle[0] / idle[1] == pytest.approx(2 / 3)


def formula(words: list[str], sizes: dict[str, int]) -> int:
    """The value of sums and differences of products, such as "2 P − 1"."""
    total, sign, product = 0, 1, 1
    for word in [*words, "+"]:
        if word in ("+", "−"):
            total, sign, product = total + sign * product, 1 if word == "+" else -1, 1
        else:
            product *= sizes[word] if word in sizes else int(word)
    return total


def test_the_problem_that_is_shown_is_solved() -> None:
    page = (ROOT / "docs" / "explanation" / "search.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    problem = problem_from(json.loads(shown))
    assert [cost(problem, each) for each in ((0, 0), (0, 1), (1, 0), (1, 1))] == [4, math.inf, math.inf, 4]


def parsed(kind: str, content: str) -> bool:
    """True if a file of this kind (a fence's name or a suffix) parses, and for kinds that nothing reads."""
    if kind == "yaml":
        yaml = pytest.importorskip("yaml")
        return all(part["kind"] for part in yaml.safe_load_all(content))
    if kind in ("bash", "sh"):
        done = subprocess.run(["bash", "-n"], input=content, capture_output=True, text=True, check=False)
        return (done.returncode, done.stderr) == (0, "")
    if kind == "python":
        ast.parse(content)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_complete_files_parse(page: Path) -> None:
    """What a reader copies into a file is one."""
    whole = page.read_text(encoding="utf-8")
    for kind, content in re.findall(r"^```(\w+)\n(.*?)^```$", whole, re.MULTILINE | re.DOTALL):
        assert parsed(kind, content), content
