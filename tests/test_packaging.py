"""The installed package: what its imports load, what lives together in one process, what is pinned."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = frozenset(
    {
        "tensorflow",
        "ortools",
        "matplotlib",
        "pandas",
        "scipy",
        "jax",
        "jaxlib",
        "sklearn",
        "torch",
        "transformers",
    }
)
COMMAND = str(Path(sys.executable).parent / "layoutopt")

SOLVE_AND_MULTIPLY = """
{imports}
model = cp_model.CpModel()
x, y = model.new_int_var(0, 10, "x"), model.new_int_var(0, 10, "y")
model.add(2 * x + 3 * y <= 12)
model.maximize(x + 2 * y)
solver = cp_model.CpSolver()
solver.parameters.num_workers = 2
status = solver.solve(model)
product = tf.linalg.matmul([[1.0, 2.0]], [[3.0], [4.0]])
print(solver.status_name(status), solver.objective_value, float(product[0, 0]))
"""
BASE = """
import importlib.util, sys
sys.modules |= dict.fromkeys(["tensorflow", "jax", "jaxlib", "optax"])
known = importlib.util.find_spec
hidden = ("tensorflow", "jax")
importlib.util.find_spec = lambda name, *rest: None if name in hidden else known(name, *rest)
from layoutopt.cli import app

def run(*words):
    try:
        app([*words, "examples/mlp.py", "--mesh", "data:2", "-q"])
    except SystemExit as end:
        return end.code

found = run("search", "--recompute", "never", "--report", {page!r}), run("cost")
from layoutopt.models import loading
loading.load_model = None  # a missing library is said before any work
found += tuple(run(*words) for words in {running!r})
print("exit codes", *found)
"""
"""TensorFlow and JAX are not there."""
ORTOOLS = "from ortools.sat.python import cp_model"
TENSORFLOW = "import tensorflow as tf"


def loaded_packages(*arguments: str) -> set[str]:
    """Top-level packages that a fresh interpreter loads for `arguments`, which must end with code 0."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", done.stderr, re.MULTILINE)
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["-c", "import layoutopt"], id="import layoutopt"),
        pytest.param(["-c", "import mesh_tf_core"], id="import mesh_tf_core"),
        pytest.param(["-c", "import costmodels"], id="import costmodels"),
        pytest.param(["-c", "import reports"], id="import reports"),
        pytest.param([COMMAND, "--help"], id="layoutopt --help"),
        pytest.param(["-m", "layoutopt", "--help"], id="python -m layoutopt --help"),
    ],
)
def test_imports_are_light(arguments: list[str]) -> None:
    assert loaded_packages(*arguments) & HEAVY == set()


def test_heavy_imports_are_noticed() -> None:
    assert {"scipy", "numpy"} <= loaded_packages("-c", "def late():\n    import scipy\nlate()")


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param((ORTOOLS, TENSORFLOW), id="solver first", marks=pytest.mark.nightly),
        pytest.param((TENSORFLOW, ORTOOLS), id="solver last", marks=pytest.mark.nightly),
    ],
)
def test_solver_and_tensorflow_share_a_process(imports: tuple[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SOLVE_AND_MULTIPLY.format(imports="\n".join(imports))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode} (negative: a signal)\n{done.stderr[-2000:]}"
    assert done.stdout.split() == ["OPTIMAL", "8.0", "11.0"]


def test_the_base_needs_no_engine(tmp_path: Path) -> None:
    """A search, a price and a report, with TensorFlow and JAX hidden; what runs asks for its extra."""
    running = [("measure",), *(("train", "--engine", kind) for kind in ("auto", "local", "jax"))]
    code = BASE.format(page=str(tmp_path / "r.html"), running=running)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "exit codes 0 0 2 2 2 2" in done.stdout
    local = "error: the engine 'local' needs TensorFlow, which is not installed; run: pip install "
    jax = "error: this needs jax, which is not installed; run: pip install 'layoutopt[jax]'"
    assert done.stderr.splitlines()[-4:] == [f"{local}'layoutopt[tensorflow]'"] * 3 + [jax]
    assert (tmp_path / "r.html").is_file() and re.search(r"^proof +optimal", done.stdout, re.MULTILINE)
    assert re.search(r"^fits +yes", done.stdout, re.MULTILINE)


def pins() -> dict[str, str]:
    """Name to version of every line of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_installed_versions_are_the_pinned_ones() -> None:
    expected = pins()
    # A local version says how a wheel was built: 2.13.0+cpu is PyTorch's for machines without a GPU.
    assert {name: metadata.version(name).partition("+")[0] for name in expected} == expected


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["optional-dependencies"]
    own, *_ = (each for each in groups["dev"] if each.startswith("layoutopt["))
    # What other extras want is not installed here.
    extras = [each for name in ("dev", *re.findall(r"\w+", own)[1:]) for each in groups[name]]
    names = {re.split(r"[\[=<>~!]", each)[0].lower() for each in project["dependencies"] + extras}
    assert names - {name.lower() for name in pins()} == {"layoutopt"}


def test_the_extra_tpu_has_what_jax_needs_on_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {re.split(r"[=<>]", each)[0] for each in project["optional-dependencies"]["tpu"]}
    asked = [each for each in metadata.requires("jax") or [] if 'extra == "tpu"' in each]
    assert {re.split(r"[=<>;]", each)[0] for each in asked} <= own


def test_installed_version_is_the_printed_one() -> None:
    done = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == metadata.version("layoutopt")


@pytest.mark.nightly
def test_tensorflow_loads_after_highs_has_solved() -> None:
    """MathOpt and TensorFlow cannot share a process in this order, so HiGHS runs in its own."""
    code = (
        "import numpy as np\n"
        "from layoutopt.solver import ChoiceVariable, Problem, Term, solve\n"
        "problem = Problem('p', (ChoiceVariable('a', 2), ChoiceVariable('b', 2)),"
        " (Term((0, 1), np.array([[3.0, 1.0], [2.0, 5.0]])), Term((0,), np.array([0.0, 0.5]))))\n"
        "print(solve(problem, 'highs').choices)\n"
        "import tensorflow as tf\n"
        "print(int(tf.constant(1) + 1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["(0,", "1)", "2"]


def test_the_runtime_imports_nothing_by_name() -> None:
    """What import-linter cannot see: a package above it, fetched while running. Only entry points, by which
    packages above name themselves, are one door; `lazy` loads what imports for type checkers name, and these
    import-linter sees; `written` finds the classes of its own package's rooms."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "mesh_tf_core").rglob("*.py")}
    by_name = re.compile(r"\bimport_module\b|\b__import__\b")
    assert {path.name for path, text in sources.items() if by_name.search(text)} == {"lazy.py", "written.py"}
    written = (ROOT / "mesh_tf_core" / "written.py").read_text(encoding="utf-8")
    assert set(re.findall(r"import_module\((.*?)\)", written)) == {'f"{__package__}.{room}"', "module"}
    doors = re.compile(r"\bentry_points\b")
    assert [path.name for path, text in sources.items() if doors.search(text)] == ["auto.py"]
