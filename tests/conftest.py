"""Settings of every test process, made before any numeric library is imported."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import hypothesis
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Most of the time of JAX's tests is XLA compiling for CPUs, most of that its newer emitters of fused loops.
FAST_COMPILER = "--xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILER}".strip()

# Imports and collected tests stay: to look for garbage among them takes a tenth of their time.
gc.disable()

# What the user calibrated, and how the user's terminal looks, are no part of the checkout.
_CACHE = tempfile.mkdtemp(prefix="layoutopt-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = _CACHE
# The proof of the usual layouts depends on no time limit. Commands in processes of their own inherit it.
os.environ["LAYOUTOPT_ALLOW"] = "usual"
# The processes that run tests use the cores.
os.environ["LAYOUTOPT_CORES"] = "1"
# A shell that starts the suite in the background ignores Ctrl-C, `nohup` a closed terminal, and what tests
# start would inherit that.
if threading.current_thread() is threading.main_thread():
    for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, _default)
TERMINAL = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")
JOB = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
for _name in TERMINAL + JOB:
    os.environ.pop(_name, None)

# Two busy cores make any deadline a coin toss; derandomised, a failure is the same failure everywhere.
# To explain a failure hypothesis traces it; CPython 3.11 was seen to hang in this, in a process that ran JAX.
PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
hypothesis.settings.register_profile(
    "layoutopt", deadline=None, derandomize=True, print_blob=True, phases=PHASES
)
hypothesis.settings.load_profile("layoutopt")


def pytest_configure(config: pytest.Config) -> None:
    """Several processes take the files in the order of the tests, not those of most tests first. A marker per
    kind of decision is known, and none brings hunts with it that nobody asked for."""
    from tests.marks import features

    for name in features():
        config.addinivalue_line("markers", f"{name}: tests about it (`tests.marks`)")
    if (asked := config.option.markexpr) and "nightly" not in asked:
        config.option.markexpr = f"({asked}) and not nightly"
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One in so many of a test's parameters stays by day, if it says so. Tests get the markers of what they
    are about, if any is asked for. Files with slow tests come first, so that no process ends on one alone."""
    from tests.marks import about, features

    seen = Counter[str]()
    for item in items:
        one = item.get_closest_marker("one_in")
        if one is None or item.get_closest_marker("nightly"):
            continue
        seen[name := item.nodeid.partition("[")[0]] += 1
        if seen[name] % one.args[0] != 1 % one.args[0]:
            item.add_marker("nightly")
    asked = config.option.markexpr
    for item in items if any(name in asked for name in features()) else ():
        for name in about(item):
            item.add_marker(name)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_unconfigure() -> None:
    """pytest collects several times at its end, which walks all that JAX, PyTorch and TensorFlow hold."""
    gc.freeze()


@pytest.fixture
def everything_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches without words go on to everything, as those of users do."""
    monkeypatch.delenv("LAYOUTOPT_ALLOW")


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """TensorFlow fixes its devices when it first runs anything; any test of a process may be the first."""
    from mesh_tf_core.engines import prepare

    prepare(8)
    # Walking again and again what the libraries keep for good was a sixth of the suite's CPU time; a walk for
    # every 5,000 new objects, in which JAX too collects, another one.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 10)
    gc.enable()


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Forgets what was worked out before a fault is planted; at the end, what was with it."""
    _forget()
    yield _forget
    _forget()


def _forget() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("mesh_tf_core."):
            for found in vars(module).values():
                if hasattr(found, "cache_clear"):
                    found.cache_clear()
