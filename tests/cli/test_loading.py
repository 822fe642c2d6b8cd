"""Model files: where they may lie, what they may import, and one line for whatever goes wrong in them."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from pathlib import Path

import pytest

from layoutopt.cli.terminal import Terminal
from layoutopt.models.loading import Loaded, hyperparameters, load_model
from layoutopt.models.source import user_errors
from layoutopt.plan.fields import Data
from mesh_tf_core.errors import LayoutError, UserError

MODEL = """
import mesh_tf_core as mtf

def model(batch: int = 4, rate: float = 0.1, wide: bool = False, kind: str = "sgd", extra=None, sizes=(1, 2)):
    g = mtf.Graph("one")
    b, n = mtf.Dim("batch", batch), mtf.Dim("n", 16 if wide else 8)
    x = g.input("x", [b, n], "float32")
    return mtf.Model(mtf.reduce_mean(mtf.einsum([x, g.variable("w", [n], mtf.ZEROS)], [b])), name="one")
"""


def written(folder: Path, text: str, name: str = "model.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def loaded(folder: Path, more: str = "", *settings: str) -> Loaded:
    return load_model(written(folder, MODEL + more), settings)


# -- finding it ----------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    ["examples/mlp.py", "examples/mlp.py:model", "./examples/mlp.py", "examples.mlp:model", "examples.mlp"],
)
def test_every_form_of_a_name_gives_the_same_model(source: str) -> None:
    assert load_model(source).model.fingerprint == load_model("examples/mlp.py").model.fingerprint


def test_a_file_in_a_package_imports_its_neighbours_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Path("examples/transformer_lm.py").resolve()
    monkeypatch.chdir(tmp_path)
    batch = next(load_model(str(example), ["batch=2", "length=8"]).data())
    assert {name: array.shape for name, array in batch.items()} == {"tokens": (2, 8), "targets": (2, 8)}


def test_relative_imports_and_plain_neighbours(tmp_path: Path) -> None:
    package = tmp_path / "shop_of_models"
    package.mkdir()
    written(package, "", "__init__.py")
    written(package, "SIZE = 6", "sizes_next_door.py")
    text = MODEL.replace("batch: int = 4", "batch: int = SIZE")
    source = written(package, "from .sizes_next_door import SIZE\n" + text)
    assert load_model(source).hparams["batch"] == 6
    alone = tmp_path / "alone"
    alone.mkdir()
    written(alone, "SIZE = 7", "neighbour_of_alone.py")
    source = written(alone, "from neighbour_of_alone import SIZE\n" + text)
    assert load_model(source).hparams["batch"] == 7


def test_another_package_of_the_same_name_is_not_taken(tmp_path: Path) -> None:
    load_model("examples/mlp.py")
    package = tmp_path / "examples"
    package.mkdir()
    written(package, "", "__init__.py")
    assert load_model(written(package, MODEL)).model.name == "one"


def test_two_files_of_one_name_are_two_models(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = load_model(written(tmp_path / "a", MODEL))
    second = load_model(written(tmp_path / "b", MODEL.replace("16 if wide else 8", "5")))
    assert (first.model.parameters, second.model.parameters) == (8, 5)


def test_a_named_function(tmp_path: Path) -> None:
    source = written(tmp_path, MODEL + "\ndef twice(batch: int = 4):\n    return model(2 * batch)\n")
    found = load_model(f"{source}:twice")
    assert found.model.graph.inputs["x"].shape.sizes == (8, 8)
    assert found.hparams == {"batch": 4}


def test_what_a_file_prints_stays_out_of_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded(tmp_path, "\nprint('hello from the file')\n")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello from the file\n")


def test_prints_of_threads_leave_the_streams_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Two that enter and leave in any order, as a thread of batches and the main thread do."""
    own, told = sys.stdout, Terminal(as_json=True)
    for first in (0, 1):
        inside = [contextlib.ExitStack() for _ in range(2)]
        for each in inside:
            each.enter_context(user_errors("model", None))
        print("prints")
        inside[first].close()
        told.result(Data())
        inside[1 - first].close()
        assert sys.stdout is own
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (2 * "{}\n", 2 * "prints\n")


# -- hyperparameters ----------------------------------------------------------------


def test_values_are_read_by_the_type_of_the_default(tmp_path: Path) -> None:
    found = loaded(
        tmp_path, "", "batch=1e1", "rate=1e-3", "wide=true", "kind=1", "extra=none", "sizes=(3, 4)"
    )
    assert found.hparams == {
        "batch": 10,
        "rate": 1e-3,
        "wide": True,
        "kind": "1",
        "extra": None,
        "sizes": (3, 4),
    }
    assert found.model.hparams == found.hparams
    assert found.model.parameters == 16


@pytest.mark.parametrize("example", ["mlp", "transformer_lm", "moe_lm"])
def test_every_number_has_a_limit(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, layers and rates of 400 digits are refused by name or by the hyperparameter's meaning, at once;
    no size of 10**18 is taken."""
    monkeypatch.setattr("mesh_tf_core.tracing.graph.MOST_OPERATIONS", 200)
    source = f"examples/{example}.py"
    for name, default in hyperparameters(source).items():
        if default.kind in ("int", "float"):
            with pytest.raises(UserError, match=r" must be | is not a finite | more than 200 op"):
                load_model(source, [f"{name}={'9' * 400}"])
        if default.kind == "int" and name != "warmup":
            with pytest.raises(UserError, match=r" must be | more than 200 operations"):
                load_model(source, [f"{name}=1e18"])


@pytest.mark.parametrize(("text", "value"), [("True", True), ("1", True), ("false", False), ("0", False)])
def test_truth_values(tmp_path: Path, text: str, value: bool) -> None:
    assert loaded(tmp_path, "", f"wide={text}").hparams["wide"] is value


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "wyde=1",
            r"has no hyperparameter 'wyde'; did you mean 'wide'\? known: batch, extra, kind, rate,",
        ),
        ("wide=maybe", r"'maybe' is not true or false, which 'wide' requires \(default: False"),
        ("batch=2.5", r"'2.5' is not a whole number, which 'batch' requires \(default: 4"),
        ("rate=fast", r"'fast' is not a finite number, which 'rate' requires \(default: 0.1"),
        ("batch", "--set 'batch' is not NAME=VALUE; write for example --set layers=12"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        loaded(tmp_path, "", setting)


PASSED_ON = """

def small(batch=4, **hparams):
    return model(batch, **hparams)
"""


def test_hyperparameters_that_are_passed_on(tmp_path: Path) -> None:
    """A function with **hparams takes any; what it makes of them is its own affair."""
    source = written(tmp_path, MODEL + PASSED_ON)
    found = load_model(f"{source}:small", ["batch=6", "wide=True"])
    # Beside `model`, which takes none but its own, those are known.
    assert found.hparams["batch"] == 6 and found.hparams["wide"] is True
    with pytest.raises(UserError, match=r"has no hyperparameter 'wyde'; did you mean 'wide'"):
        load_model(f"{source}:small", ["wyde=True"])
    alone = written(
        tmp_path, MODEL.replace("def model(", "def made(") + PASSED_ON.replace("model(", "made("), "alone.py"
    )
    found = load_model(
        f"{alone}:small", ["batch=6", "wide=True", "kind=adam", "sizes=(1, 2, 3)", "rate=1e-2"]
    )
    assert found.hparams == {"batch": 6, "wide": True, "kind": "adam", "sizes": (1, 2, 3), "rate": 0.01}
    assert found.model.hparams == found.hparams
    again = load_model(f"{alone}:small", found.hparams)  # as a plan has them
    assert again.model.fingerprint == found.model.fingerprint
    with pytest.raises(UserError, match=r"small\(wyde=1\).*unexpected keyword argument 'wyde'"):
        load_model(f"{alone}:small", ["wyde=1"])


def test_a_hyperparameter_without_default(tmp_path: Path) -> None:
    source = written(tmp_path, MODEL.replace("batch: int = 4", "batch: int"))
    with pytest.raises(
        UserError, match="model\\(\\) has no default for 'batch'; add a default, or pass --set batch=VALUE"
    ):
        load_model(source)
    assert load_model(source, ["batch=3"]).hparams["batch"] == 3


# -- what goes wrong ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"has no function 'model' to build a model; known: none"),
        (
            "def modle(): ...\n",
            r"has no function 'model' to build a model; did you mean 'modle'\? known: modle",
        ),
        ("model = 3\n", r"has a int, not a function, 'model'"),
        (
            "def model():\n    return 3\n",
            r"model\(\) returned a value of type int; return a mesh_tf_core.Model",
        ),
        (
            "async def model(): ...\n",
            r"model\(\) is asynchronous; write def model\(...\) instead of async def",
        ),
        ("def model(): ...\n", r"model\(\) returned nothing; return a mesh_tf_core.Model"),
        ("\n\n1 / 0\n", r"model.py, line 3 raised ZeroDivisionError: division by zero"),
        (
            "class Module:\n    __module__ = 'torch.nn'\n\nclass Net(Module): ...\n\nmodel = lambda: Net()\n",
            r"model\(\) returned a value of type Net; return layoutopt.from_torch\(.*config.json",
        ),
        (
            'raise ModuleNotFoundError("No torch", name="torch")\n',
            r"line 1 raised ModuleNotFoundError: .*: pip install 'layoutopt\[torch\]'",
        ),
        ("def model(:\n", r"model.py, line 1: SyntaxError: invalid syntax"),
        (
            "import no_such_package_here\n",
            r"line 1 raised ModuleNotFoundError: No module named 'no_such_package_here'",
        ),
        (
            "def inner():\n    raise KeyError('a\\nb')\n\ndef model():\n    inner()\n",
            r"model\(\), line 2 raised KeyError: 'a\\nb'",
        ),
        ("def model():\n    exit(3)\n", r"model\(\), line 2 raised SystemExit: 3"),
        (
            "import mesh_tf_core as mtf\n\ndef model():\n    mtf.AdamW(1e-3)\n",
            r"model\(\), line 4 raised AttributeError: .* has no attribute 'AdamW'; did you mean 'Adam'\?",
        ),
        (
            "import mesh_tf_core as mtf\n\ndef model():\n    mtf.Dim('a', -1)\n",
            r"model\(\), line 4: .*-1",
        ),
    ],
)
def test_a_faulty_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_model(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_an_error_keeps_its_exit_code(tmp_path: Path) -> None:
    text = "import mesh_tf_core as mtf\n\ndef model():\n    raise mtf.LayoutError('no such thing')\n"
    with pytest.raises(LayoutError, match=r"model\(\), line 4: no such thing"):
        load_model(written(tmp_path, text))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("examples/mpl.py", r"model file 'examples/mpl.py' does not exist; did you mean 'mlp.py'\? known: "),
        (
            "no/such/folder/m.py",
            r"model file 'no/such/folder/m.py' does not exist; give the path of a .py file",
        ),
        ("no_such_module_here", r"Python finds no module 'no_such_module_here'; give a file"),
        ("examples.nothing:model", r"Python finds no module 'examples.nothing'"),
        ("what is this", r"is not in a known form; give FILE.py, FILE.py:FUNCTION"),
        (
            "llama3_8b.toml",
            r"not a file with the suffix '.toml'; layoutopt cannot read recipes of other tools",
        ),
        ("README.md", r"'README.md': give FILE.py or a Hugging Face CONFIG.json, not .* '.md'$"),
        ("examples/mlp.py:mode", r"has no function 'mode' to build a model; did you mean 'model'\?"),
        ("examples/transformer_lm.py:llama3-8b", r"to build a model; did you mean 'llama3_8b'\?"),
    ],
)
def test_names_of_nothing(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_model(source)


# -- data ----------------------------------------------------------------

DATA = """
import numpy as np

def data(batch, split="train"):
    for i in range(2):
        yield {"x": np.full((batch, 8), i if split == "train" else 10 + i, np.float32)}
"""


def test_data_gets_what_it_takes_and_starts_again(tmp_path: Path) -> None:
    found = loaded(tmp_path, DATA, "batch=3")
    firsts = [batch["x"][0, 0] for batch in itertools.islice(found.data(), 5)]
    assert firsts == [0, 1, 0, 1, 0]
    assert next(found.data("held-out"))["x"].shape == (3, 8)
    assert next(found.data("held-out"))["x"][0, 0] == 10


def test_data_may_be_a_tensorflow_dataset(tmp_path: Path) -> None:
    text = (
        "\ndef data(batch):\n"
        "    import tensorflow as tf\n"
        "    return tf.data.Dataset.from_tensors({'x': tf.ones([batch, 8])})\n"
    )
    first, again = itertools.islice(loaded(tmp_path, text).data(), 2)
    assert first["x"].sum() == again["x"].sum() == 32


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", r"has no function data\(\); define data\(\*\*hparams\) in the same file"),
        ("def data():\n    return iter(())\n", r"data\(\) yielded no batch for the split 'train'"),
        ("def data():\n    yield 3\n", r"data\(\) yielded a value of type int; yield a dict"),
        ("def data():\n    yield {'y': 3}\n", r"yielded a batch without the input 'x'; known: y"),
        (
            "import numpy as np\ndef data():\n    yield {'x': np.zeros((4, 9))}\n",
            r"batch input 'x' has shape \(4, 9\), but the shape in the model is \(4, 8\)",
        ),
        ("def data():\n    yield 1 / 0\n", r"data\(\), line \d+ raised ZeroDivisionError"),
    ],
)
def test_faulty_data_is_one_line(tmp_path: Path, data: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        next(loaded(tmp_path, "\n" + data).data())


PLACED = """
import numpy as np

class Batches:
    def __init__(self):
        self.at = 0
    def __iter__(self):
        return self
    def __next__(self):
        self.at += 1
        print("made", self.at)
        if self.at > 3:
            raise StopIteration
        return {"x": np.full((4, 8), self.at, np.float32)}
    def get_state(self):
        return self.at
    def set_state(self, state):
        self.at = state

def data():
    return Batches()
"""


@pytest.mark.parametrize("data", [DATA, PLACED])
def test_data_goes_to_a_place(tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = loaded(tmp_path, data)
    batches = found.data()
    numbers = [batch["x"][0, 0] for batch in itertools.islice(batches, 5)]
    place = batches.get_state()
    following = [next(batches)["x"][0, 0] for _ in range(4)]
    assert numbers + following == (numbers[:3] * 3 if data == PLACED else numbers[:2] * 5)[:9]
    again = found.data()
    capsys.readouterr()
    again.set_state(place)
    assert "made" not in capsys.readouterr().err  # what can go to its place makes no batches on the way
    assert [next(again)["x"][0, 0] for _ in range(4)] == following


def test_held_out_data_ends_and_its_last_batch_may_be_short(tmp_path: Path) -> None:
    text = DATA.replace("(batch, 8)", "(batch - i, 8)")
    batches = list(loaded(tmp_path, text).data("held-out", endless=False))
    assert [batch["x"].shape for batch in batches] == [(4, 8), (3, 8)]
    with pytest.raises(UserError, match=r"batch input 'x' has shape \(3, 8\)"):
        list(itertools.islice(loaded(tmp_path, text).data("held-out"), 2))


def test_the_examples_text_goes_to_a_place_that_json_holds() -> None:
    found = load_model("examples/transformer_lm.py", ["batch=2", "length=8"])
    batches = found.data()
    for _ in range(3):
        next(batches)
    place, following = json.loads(json.dumps(batches.get_state())), next(batches)
    again = found.data()
    again.set_state(place)
    assert (next(again)["tokens"] == following["tokens"]).all()
    assert (next(found.data())["tokens"] != following["tokens"]).any()
