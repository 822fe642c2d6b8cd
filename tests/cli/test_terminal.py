"""What a terminal shows and a pipe does not; what Ctrl-C leaves."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pkgutil
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import Result

from layoutopt.cli.options import complete_setting
from layoutopt.cli.progress import Bounds, StepProgress, bounds_text
from layoutopt.cli.terminal import GOOD, Sheet, Terminal, facts, plain
from layoutopt.optimize.entry import SearchStatus
from layoutopt.plan.build import load_plan
from layoutopt.plan.units import seconds_text
from reports.reader import plan_of
from reports.views.layouts import frontier
from reports.views.view import BYTES, SECONDS, TIMES, Cell, Column, Kind, View, texts
from tests.reports import sample

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(Path(sys.executable).parent / "layoutopt")
PLAIN = ["--storage", "layout", "--recompute", "never", "--microbatches", "1"]
SEARCH = [COMMAND, "search", "examples/mlp.py", "--mesh", "data:2;model:2", *PLAIN]


def on_a_terminal(args: list[str], **variables: str) -> tuple[str, str]:
    """What a command writes to stdout (a pipe) and to stderr (a terminal of 100 columns)."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **variables}
    environment.pop("NO_COLOR", None) if "NO_COLOR" not in variables else None
    started = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=slave, cwd=ROOT, env=environment)
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux tells the end of a terminal by an error
            break
        if not part:
            break
        shown += part
    os.close(master)
    out, _ = started.communicate()
    assert started.returncode == 0, shown.decode()
    return out.decode(), shown.decode()


def test_progress_is_drawn_on_terminals_only() -> None:
    out, shown = on_a_terminal(SEARCH)
    assert "searching" in shown and "\x1b[" in shown
    assert "\x1b[" not in out and "the answer" in out
    out, shown = on_a_terminal([*SEARCH, "--quiet", "--json"])
    assert shown == ""
    assert out.startswith("{")


@pytest.mark.nightly
def test_no_color_is_obeyed() -> None:
    _, shown = on_a_terminal(SEARCH, NO_COLOR="1")
    assert "searching" in shown
    assert not re.search(r"\x1b\[[\d;]*3\d[;m]", shown)


def test_progress_in_words() -> None:
    inf = float("inf")
    assert bounds_text(inf, -inf, str) == "nothing found yet"
    assert bounds_text(4.0, -inf, str) == "best 4.0"
    assert bounds_text(4.0, 3.0, str) == "best 4.0, bound 3.0, gap 25.00%"
    assert bounds_text(4.0, 0.0, str) == "best 4.0, no bound yet"


def test_json_has_no_numbers_that_are_none() -> None:
    assert plain({"gap": float("inf"), "all": (1.5, float("nan")), "path": Path("a")}) == {
        "gap": None,
        "all": [1.5, None],
        "path": "a",
    }


def interrupted(folder: Path, at: str, how: str) -> str:
    """The starter model, stopped as by Ctrl-C at a place in its text."""
    text = (ROOT / "examples/starters/mesh_tf.py").read_text(encoding="utf-8")
    assert at in text
    file = folder / "model.py"
    file.write_text(text.replace(at, how), encoding="utf-8")
    return str(file)


def test_ctrl_c_is_quiet(run: Callable[..., Result], tmp_path: Path) -> None:
    file = interrupted(tmp_path, '    g = mtf.Graph("two_layers")', "    raise KeyboardInterrupt")
    done = run("cost", file, "--mesh", "data:2")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "")


RUNS = ("--mesh", "data:2", "--layout", "batch:data")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "words",
    [("cost", *RUNS), ("lower", *RUNS), ("measure", *RUNS), ("validate", *RUNS[:2]), ("train", *RUNS)],
)
def test_other_signals_end_a_command_as_ctrl_c_does(
    run: Callable[..., Result], tmp_path: Path, words: tuple[str, ...], number: int
) -> None:
    stop = f"    import os\n    os.kill(os.getpid(), {int(number)})\n"
    file = interrupted(tmp_path, '    g = mtf.Graph("two_layers")', stop)
    done = run(words[0], file, *words[1:])
    told = "stopped before training began\n" if words[0] == "train" else ""
    assert (done.exit_code, done.stdout, done.stderr) == (128 + number, "", told)
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_search_is_saved_and_says_how_it_ended(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, as_json: bool
) -> None:
    said, out = Terminal.say, tmp_path / "plan.json"

    def say(self: Terminal, text: str) -> None:
        said(self, text)
        if text.startswith("best so far"):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Terminal, "say", say)
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background
    try:
        done = run(*SEARCH[1:], "--out", str(out), *(["--json"] if as_json else []))
    finally:
        signal.signal(signal.SIGINT, heard)
    assert done.exit_code == 128 + number
    assert "stopped: this is the best layout found so far" in done.stderr
    assert f"wrote the plan to {out}" in done.stderr
    kept = load_plan(out)
    assert kept.solver.status == "FEASIBLE"
    if as_json:
        assert json.loads(done.stdout)["layout"] == kept.data.layout
    else:
        assert "FEASIBLE" in done.stdout


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "place",
    [
        "layoutopt.optimize.answers.plan_details.with_details",
        "layoutopt.plan.build.Plan.save",
        "layoutopt.cli.search.training_cost",
    ],
)
def test_a_plan_that_was_found_is_not_lost(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """SIGTERM while the plan's details are made, or its file is written."""
    known, out, calls = pkgutil.resolve_name(place), tmp_path / "plan.json", itertools.count()

    def ended(*given: Any, **named: Any) -> Any:
        if next(calls) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return known(*given, **named)

    monkeypatch.setattr(place, ended)
    done = run(*SEARCH[1:], "--out", str(out))
    assert done.exit_code == 143
    assert load_plan(out).solver.status == "OPTIMAL"
    assert "stopped" in done.stderr and f"wrote the plan to {out}" in done.stderr


def test_a_search_says_how_far_it_is() -> None:
    shown: list[str] = []
    bounds = Bounds(Terminal(), "searching mlp", seconds_text)
    bounds.progress.update = lambda task, description: shown.append(description)  # type: ignore[method-assign]
    bounds.show(SearchStatus("mesh 4x2, 2 microbatches", 3, 12, 0.004, 0.003, 0.25, "usual"))
    bounds.show(SearchStatus("mesh 8", 1, 12, math.inf, 0.0))
    assert shown == [
        "searching mlp, usual, mesh 4x2, 2 microbatches (3 of 12, 25% of its tables): best 4.00 ms, "
        "bound 3.00 ms, gap 25.00%",
        "searching mlp, mesh 8 (1 of 12): nothing found yet, no bound yet",
    ]


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("layoutopt.cli.progress.EVERY", 0.01)

    def said(enter: Callable[[Terminal], Bounds | StepProgress], quiet: bool = False) -> list[str]:
        with enter(Terminal(quiet=quiet)):
            time.sleep(0.1)
        return capsys.readouterr().err.splitlines()

    def searching(terminal: Terminal) -> Bounds:
        bounds = Bounds(terminal, "searching mlp", seconds_text)
        bounds.update(0.004, 0.003)
        return bounds

    def measuring(terminal: Terminal) -> StepProgress:
        steps = StepProgress(terminal, "measuring", 12)
        steps.update(3, "a product")
        return steps

    lines = said(searching)
    assert len(lines) > 1 and {*lines} == {"searching mlp: best 4.00 ms, bound 3.00 ms, gap 25.00% (0 s)"}
    assert {*said(measuring)} == {"measuring 3/12, a product"}
    assert said(searching, quiet=True) == [] == said(lambda t: StepProgress(t, "training", 3, lines=False))


def test_ctrl_c_keeps_what_was_trained(run: Callable[..., Result], tmp_path: Path) -> None:
    file = interrupted(tmp_path, "    while True:\n", "    for _ in range(3):\n")
    with open(file, "a", encoding="utf-8") as more:
        more.write("    if split == 'train':\n        raise KeyboardInterrupt\n")
    args = (
        "train",
        file,
        "--mesh",
        "data:2",
        "--layout",
        "batch:data",
        "--checkpoint",
        str(tmp_path / "run"),
    )
    done = run(*args)
    assert done.exit_code == 130
    assert done.stdout == ""
    assert f"stopped after step 3 of 100, saved in {tmp_path / 'run'}" in done.stderr
    done = run(*args, "--steps", "3", "--held-out", "0")
    assert done.exit_code == 0, done.stderr
    assert "nothing to do: the checkpoint is already at step 3" in done.stdout


def drawn(shown: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(Sheet(shown) if isinstance(shown, View) else shown)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


SPLITS = "batch:data+model; hidden_1:model; vocabulary:data"
FIGURE = Kind(str)
"""A number that is in words already."""
ROWS = [["the answer", SPLITS, "6.30 ms", "224 KiB"], ["data parallel", "", "41.2 ms", "1.32 MiB"]]


@pytest.mark.parametrize("width", [60, 71, 80, 100, 200])
def test_no_width_breaks_a_word(width: int) -> None:
    columns = (*texts("layout", "splits"), Column("step", "step", FIGURE), Column("memory", "memory", FIGURE))
    lines = drawn(View("Layouts", columns, ROWS), width)
    assert all(len(line) <= width for line in lines)
    words = " ".join(lines).split()
    assert all(word in words for word in SPLITS.split())
    assert any("41.2 ms" in line for line in lines) and any("1.32 MiB" in line for line in lines)


def test_a_table_without_room_is_a_block_for_each_row() -> None:
    lines = [
        line.rstrip() for line in drawn(View("Layouts", texts("layout", "splits", "step"), [ROWS[0][:3]]), 30)
    ]
    assert lines == [
        "Layouts",
        "the answer",
        "  splits  batch:data+model;",
        "          hidden_1:model;",
        "          vocabulary:data",
        "  step    6.30 ms",
    ]


def test_where_its_first_column_leaves_no_room_rows_stand_below_it() -> None:
    rows = [["feed_forward_norm/normalizegrad", "forward", "4", "140 µs"], ["step", "", "21", "1.56 ms"]]
    columns = (*texts("operation", "phase"), Column("runs", "runs", FIGURE), Column("time", "time", FIGURE))
    assert drawn(View("Per operation", columns, rows, total=True), 40) == [
        "Per operation",
        "  phase    runs     time",
        "feed_forward_norm/normalizegrad",
        "  forward     4   140 µs",
        "step",
        "             21  1.56 ms",
    ]


def test_columns_of_less_worth_leave_a_narrow_terminal_and_may_stand_beside_others() -> None:
    columns = (
        Column("layout", "layout"),
        Column("splits", "splits"),
        Column("stored", "stored", rank=1, beside="splits"),
        Column("step", "step", SECONDS),
        Column("exposed", "exposed", SECONDS, rank=2),
        Column("sent", "sent", BYTES, on="page, data"),
    )
    view = View("Layouts", columns, [("data parallel", "batch:data", "zero1 ×9", 0.2, 0.05, 1024.0)])
    heads = {width: drawn(view, width)[1].split() for width in (40, 46, 56)}
    assert [*heads.values()] == [
        ["layout", "┃", "splits", "┃", "step"],
        ["layout", "┃", "splits", "┃", "stored", "┃", "step"],
        ["layout", "┃", "splits", "┃", "stored", "┃", "step", "┃", "exposed"],
    ]
    assert "zero1 ×9" in drawn(view, 40)[4]


def test_rows_that_are_left_out_are_summed_up() -> None:
    columns = (Column("name", "name", lead=True), Column("time", "time", SECONDS), Column("of", "of", TIMES))
    rows = [("a", 3.0, 1.0), ("b", Cell("two", value=2.0), 1.0), ("c", None, 1.0), ("d", 1.0, 1.0)]
    view = View("Rows", columns, rows)
    assert view.first(4) is view
    assert [*view.first(1).rows] == [rows[0], ["3 others", 3.0, None]]


def test_nothing_is_padded_where_nobody_looks(run: Callable[..., Result]) -> None:
    done = run("cost", "examples/mlp.py", "--mesh", "data:2", "--layout", "batch:data")
    lines = done.stdout.splitlines()
    assert len(lines) > 20 and all(line == line.rstrip() for line in lines)


def test_sixty_columns_hold_every_table(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = run("cost", "examples/mlp.py", "--mesh", "data:2;model:2", "--layout", "batch:data;hidden:model")
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and max(map(len, lines)) <= 60
    titles = {"Per operation", "Per axis", "Overlap", "Per phase", "Memory"}
    assert titles <= {*lines} and any("┃" in line for line in lines)


def test_a_long_layout_breaks_between_its_rules() -> None:
    lines = drawn(facts([("layout", SPLITS.replace("; ", ";")), ("step", "6 ms")]), 40)
    assert [line.split() for line in lines] == [
        ["layout", "batch:data+model;"],
        ["hidden_1:model;", "vocabulary:data"],
        ["step", "6", "ms"],
    ]


def test_verdicts_have_colours_on_terminals() -> None:
    console = Console(width=60, file=io.StringIO(), color_system="standard", force_terminal=True)
    console.print(facts([("fits", "yes"), ("step", "6 ms")], {"fits": GOOD}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1;32myes" in text and text.count("\x1b[1;32m") == 1


def test_steps_say_how_long_the_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, which compiles, does not count."""
    steps, said = StepProgress(Terminal(), "calibrating", 10, left=True), []
    clock = iter([100.0, 102.0, 104.0, 106.0])
    monkeypatch.setattr("layoutopt.cli.progress.time.monotonic", lambda: next(clock))
    steps.progress.update = lambda task, completed, facts, total: said.append(facts)  # type: ignore[method-assign]
    for done in range(1, 5):
        steps.update(done, "a product")
    assert said == ["a product"] * 3 + ["a product, about 12 s left"]


def test_settings_are_completed(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(params={"model": "examples/mlp.py"})
    assert complete_setting(context, "la") == ["layers="]
    assert {"batch=", "hidden=", "clip_norm="} < set(complete_setting(context, ""))
    context.params["model"] = "examples/transformer_lm.py"
    assert complete_setting(context, "tied=") == ["tied=true", "tied=false"]
    broken = tmp_path / "model.py"
    broken.write_text("print('loud')\nraise ValueError\n", encoding="utf-8")
    for model in (str(broken), "nowhere.py", None):
        context.params["model"] = model
        assert complete_setting(context, "la") == []


def test_a_frontier_names_its_knees() -> None:
    lines = drawn(frontier(plan_of(sample.full_plan()), lambda a: "yes"), 200)
    assert [line.split(" ┃")[0].split(" │")[0].strip() for line in lines if "knee" in line] == [
        "point 2, knee"
    ]
