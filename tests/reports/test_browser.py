"""The page in a browser (chromium on the PATH): it fits telephones and desktops, light and dark; readers
sort, copy, open and move what they see; it prints on few sheets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import reports
from tests.reports import sample

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH"),
]
MOST_SHEETS = 12
QUIETLY = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
    *("--disable-background-networking", "--enable-logging=stderr", "--v=0"),
)
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def chromium(folder: Path, html: str, *words: str) -> str:
    """What a browser prints of a page."""
    page = folder / "page.html"
    page.write_text(html, encoding="utf-8")
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *QUIETLY, f"--user-data-dir={folder / 'profile'}", *words, page.as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    refused = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert refused == []
    return done.stdout


def found(folder: Path, html: str, script: str, *words: str) -> Any:
    """What a script of the test finds on the page; the page's own policy would not let it run."""
    told = f"<script>addEventListener('load', () => {{ {script} }});</script></body>"
    open_page = POLICY.sub("", html).replace("</body>", told)
    shown = chromium(folder, open_page, "--dump-dom", "--virtual-time-budget=3000", *words)
    answer = re.search(r'data-found="([^"]*)"', shown)
    assert answer is not None, shown[-2000:]
    return json.loads(unescape(answer[1]))


TELL = "const tell = (x) => document.body.setAttribute('data-found', JSON.stringify(x));"
ONE = "const one = (s) => document.querySelector(s);"
ALL = "const all = (s) => [...document.querySelectorAll(s)];"


@pytest.fixture(scope="module")
def page() -> str:
    return reports.report_html([sample.full_plan()], written="")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("several", [False, True])
def test_nothing_is_wider_than_the_screen(
    page: str, tmp_path: Path, width: int, dark: bool, several: bool
) -> None:
    html = reports.report_html(sample.five_plans(), written="") if several else page
    script = f"""{TELL}{ALL}
    const wide = document.documentElement.clientWidth;
    const over = all('main *, header *').filter((x) => !x.closest('.sr, thead') && !x.closest('svg')
      && x.getBoundingClientRect().right > wide + 1 && getComputedStyle(x).position !== 'absolute');
    tell([document.documentElement.scrollWidth - wide, over.map((x) => x.outerHTML.slice(0, 80)),
          getComputedStyle(document.body).backgroundColor]);"""
    size = [f"--window-size={width},1000", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
    past, over, ground = found(tmp_path, html, script, *size)
    assert (past, over) == (0, [])
    assert sum(map(int, re.findall(r"\d+", ground)[:3])) < 150 if dark else 600


def test_no_number_or_short_word_is_broken(tmp_path: Path) -> None:
    """Where other columns have much to say, too."""
    plan = sample.full_plan()
    for each in plan["alternatives"]:
        each["mesh"] = {"data": 64, "model": 8}
        each["reason"] = (
            "peak memory is over the limit; largest tensors: " + "variable of a layer (70 GiB), " * 9
        )
    script = f"""{TELL}{ALL}
    const broken = [], range = document.createRange();
    for (const text of all('main td .text, main td .sub').map((x) => x.firstChild).filter((x) => x && x.data))
      for (const word of text.data.matchAll(/[^\\s-]+/g)) {{
        range.setStart(text, word.index); range.setEnd(text, word.index + word[0].length);
        const lines = new Set([...range.getClientRects()].map((box) => box.top));
        if (word[0].length < 17 && lines.size > 1) broken.push(word[0]);
      }}
    tell(broken);"""
    assert found(tmp_path, reports.report_html([plan], written=""), script, "--window-size=1400,1000") == []


def test_the_policy_lets_the_pages_own_script_run(page: str, tmp_path: Path) -> None:
    """And the page says nothing on the console, which `chromium` asserts."""
    shown = chromium(tmp_path, page, "--dump-dom", "--virtual-time-budget=3000")
    assert '<button type="button" class="sort">' in shown and 'class="copy"' in shown


def test_tables_are_sorted_folded_rows_too(page: str, tmp_path: Path) -> None:
    script = f"""{TELL}{ONE}{ALL}
    const data = one('#operations .data'), rows = () => [...data.querySelectorAll('tbody tr')];
    const numbers = () => rows().map((row) => Number(row.cells[1].dataset.v));
    const first = rows().map((row) => row.innerText), head = data.querySelectorAll('thead th')[1];
    const states = [];
    for (let i = 0; i < 3; i++) {{ head.firstChild.click(); states.push([numbers(), head.ariaSort]); }}
    head.parentNode.cells[0].firstChild.click();
    const named = rows().map((row) => row.cells[0].querySelector(".text").textContent);
    tell([states, named, data.querySelectorAll('table').length]);"""
    (down, up, back), named, tables = found(tmp_path, page, script)
    assert len(down[0]) > 12 and tables == 2
    assert down == [sorted(down[0], reverse=True), "descending"]
    assert up == [sorted(down[0]), "ascending"]
    assert back[1] is None and sorted(back[0]) == up[0]
    assert named and [n[:3] for n in named] == sorted(n[:3] for n in named)


def test_what_is_typed_elsewhere_is_copied(page: str, tmp_path: Path) -> None:
    script = f"""{TELL}{ONE}
    let taken = '';
    Object.defineProperty(navigator, 'clipboard', {{value: {{writeText: async (x) => {{ taken = x; }}}}}});
    const button = one('.typed [data-copy=layout]').nextSibling;
    button.click();
    setTimeout(() => tell([taken, button.textContent]), 50);"""
    assert found(tmp_path, page, script) == ["batch:data;vocab:model;heads:model;d_ff:model", "Copied"]


def test_marks_say_their_values(page: str, tmp_path: Path) -> None:
    script = f"""{TELL}{ONE}
    const at = (x, dx) => {{
      const box = x.getBoundingClientRect();
      const place = {{clientX: box.x + box.width / 2 + dx, clientY: box.y + 1, bubbles: true}};
      x.dispatchEvent(new PointerEvent('pointermove', place));
      return one('.tip').hidden ? null : one('.tip').textContent;
    }};
    const near = one('[data-near]').closest('svg');
    tell([at(one('#time [data-tip]'), 0), at(near, 0), at(one('h1'), 0)]);"""
    bar, timeline, nothing = found(tmp_path, page, script)
    assert bar.replace("\u00a0", " ") == "This plan: 297 ms compute"
    assert re.match(r"[\d.]+\sGiB", timeline) and nothing is None


def test_sliders_say_what_was_searched(page: str, tmp_path: Path) -> None:
    script = f"""{TELL}{ONE}
    const control = one('.whatif'), range = control.querySelector('input');
    const before = control.querySelector('output').textContent;
    range.value = 0;
    range.dispatchEvent(new Event('input'));
    tell([control.hidden, before, control.querySelector('output').textContent, range.ariaValueText]);"""
    hidden, before, after, spoken = found(tmp_path, page, script)
    assert not hidden and spoken == after
    assert before.replace("\u00a0", " ").startswith(
        "1×: 412 ms per step (±0 %), with layout b: batch:data; vocab"
    )
    assert after.replace("\u00a0", " ").startswith(
        "0.25×: 634 ms per step (+54 %), with layout a: batch:data; "
    )


@pytest.mark.parametrize(
    "plans",
    [[sample.full_plan()], [sample.plain_plan()], sample.five_plans()],
    ids=["full", "plain", "five"],
)
def test_plans_print_on_few_sheets(tmp_path: Path, plans: list[Any]) -> None:
    out = tmp_path / "page.pdf"
    html = reports.report_html(plans, written="")
    chromium(tmp_path, html, f"--print-to-pdf={out}", "--no-pdf-header-footer")
    sheets = len(re.findall(rb"/Type\s*/Page\b", out.read_bytes()))
    assert 0 < sheets <= MOST_SHEETS
