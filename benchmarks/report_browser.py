"""Looks at reports in a real browser: headless Chromium driven through chromedriver, nothing else to install.

    python benchmarks/report_browser.py REPORT.html … --out SCREENSHOTS

Every report is opened from disk at 400 and 1400 pixels, light and dark. Checked are: every section is there;
nothing on the console; no request to the network; no text outside the window or its figure, none over
another in a figure; every figure has a name and a description; contrast of every text as WCAG 2.1 AA asks.
Screenshots of the whole page and of the first screen are for people to look at. Ends with code 1 if a check
fails. Chromium and its driver come with `apt-get install chromium chromium-driver`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZES = ((400, 800), (1400, 900))
TALLEST = 16000
SECTIONS = [
    *("mesh", "split", "pieces", "time", "memory", "frontier"),
    *("sensitivity", "operations", "evidence", "calibration", "assumptions", "record"),
]
CHECKS = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


class Browser:
    """One session of headless Chromium."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        options = {
            "args": ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"],
            "perfLoggingPrefs": {"enableNetwork": True},
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        made = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/session/{made['sessionId']}"

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            self.base + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, path: Path, width: int, height: int, scheme: str) -> None:
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._send("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def log(self, kind: str) -> list[dict[str, Any]]:
        return self._send("POST", "/se/log", {"type": kind})

    def screenshot(self) -> bytes:
        return base64.b64decode(self.cdp("Page.captureScreenshot")["data"])

    def page(self, width: int) -> bytes:
        """The whole page, or as much of its top as one picture can hold."""
        height = min(self.run("return document.documentElement.scrollHeight"), TALLEST)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        return base64.b64decode(
            self.cdp("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        )

    def pdf(self) -> bytes:
        return base64.b64decode(self.cdp("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        self._send("DELETE", "")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None:
        sys.exit("chromedriver is not installed: apt-get install chromium chromium-driver")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield _session(port)
    finally:
        process.terminate()
        process.wait()


def _session(port: int) -> Browser:
    """The driver needs a moment before it listens."""
    for _ in range(100):
        try:
            return Browser(port)
        except urllib.error.URLError:
            time.sleep(0.1)
    sys.exit("chromedriver does not answer")


def look(at: Browser, path: Path, out: Path, width: int, height: int, scheme: str) -> list[str]:
    """Opens one report one way; returns what is wrong with it."""
    at.log("browser"), at.log("performance")
    at.open(path, width, height, scheme)
    found = at.run(CHECKS, SECTIONS)
    at.run("window.scrollTo(0, 0)")
    name = f"{path.stem}-{width}-{scheme}"
    (out / f"{name}-first.png").write_bytes(at.screenshot())
    (out / f"{name}.png").write_bytes(at.page(width))
    wrong = [
        f"{kind}: {text}"
        for kind in ("missing", "overflow", "figures", "contrast", "overlaps")
        for text in found[kind]
    ]
    wrong += [f"console: {entry['message'][:120]}" for entry in at.log("browser")]
    wrong += [f"network: {url}" for url in requests(at.log("performance"))]
    print(f"{name}: {found['texts']} texts, {len(wrong)} wrong")
    return [f"{name}: {w}" for w in wrong]


def requests(log: list[dict[str, Any]]) -> list[str]:
    """Addresses asked for that are not on disk or in the page."""
    found = []
    for entry in log:
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            if not url.startswith(("file:", "data:")):
                found.append(url)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="directory for the screenshots")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    with browser() as at:
        for path in asked.reports:
            for width, height in SIZES:
                for scheme in ("light", "dark"):
                    wrong += look(at, path, asked.out, width, height, scheme)
            (asked.out / f"{path.stem}.pdf").write_bytes(at.pdf())
        at.close()
    print("\n".join(wrong) or "nothing wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
