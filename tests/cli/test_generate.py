"""Texts from a checkpoint that `train` wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

Run = Callable[..., Result]
Json = Callable[..., dict[str, Any]]

MODEL = '''
from examples.transformer_lm import *
import numpy as np

def data(batch=4, length=16, **_):
    """The alphabet's first letters, again and again, beginning anywhere."""
    text = np.tile(np.frombuffer(b"abcdef", np.uint8), 20).astype(np.int32)
    rng = np.random.default_rng(0)
    while True:
        window = np.stack([text[b : b + length + 1] for b in rng.integers(0, 6, batch)])
        yield {"tokens": window[:, :-1], "targets": window[:, 1:]}
'''
SIZES = ("layers=1", "d_model=16", "d_kv=8", "heads=2", "d_ff=32", "vocab=128", "length=16", "tied=true")
SETTINGS = [part for text in SIZES for part in ("--set", text)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model file and a checkpoint of it, trained until it knows the alphabet."""
    from layoutopt.models.loading import load_model
    from mesh_tf_core import Trainer

    place = tmp_path_factory.mktemp("generate")
    (place / "alphabet.py").write_text(MODEL)
    loaded = load_model(str(place / "alphabet.py"), [*SIZES, "batch=4", "learning_rate=0.02"])
    trainer = Trainer(loaded.model, "data:1", engine="lockstep")
    trainer.fit(loaded.data(), 60, place / "run")
    return str(place / "alphabet.py"), str(place / "run")


def test_a_trained_model_continues_texts(trained: tuple[str, str], result: Json) -> None:
    file, run = trained
    found = result(
        "generate", file, "--checkpoint", run, "--prompt", "ab", "--prompt", "def", *SETTINGS, "-q"
    )
    texts = [text["continuations"][0] for text in found["texts"]]
    assert [t["text"] for t in texts] == ["cdefabcdefabcd", "abcdefabcdefa"]
    assert all(-3 < t["score"] < 0 for t in texts)
    assert [len(t["tokens"]) for t in texts] == [16, 16]
    assert (found["step"], found["mesh"], found["model"]["hparams"]["batch"]) == (60, {"device": 1}, 2)


def test_beams_under_a_layout(trained: tuple[str, str], result: Json) -> None:
    file, run = trained
    found = result(
        *("generate", file, "--checkpoint", run, "--prompt", "abcdefabcdefa", *SETTINGS, "--set", "beams=2"),
        *("--mesh", "x:2", "--layout", "beam:x", "-q"),
    )
    best, other = found["texts"][0]["continuations"]
    assert best["text"] == "bcd" != other["text"]
    assert best["score"] > other["score"]


def test_what_is_shown_and_what_is_said(trained: tuple[str, str], run: Run) -> None:
    file, place = trained
    done = run("generate", file, "--checkpoint", place, "--prompt", "abcdefabcdefab", *SETTINGS)
    assert done.exit_code == 0
    assert "── 'abcdefabcdefab', score -" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == "cd"
    assert "step 60 of" in done.stderr and "starting 1 device\n" in done.stderr
    assert "scores are log probabilities of the text after the prompt" in done.stderr


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--prompt", "a" * 17], "has 17 tokens, but the model takes 1 to 15; change"),
        (["--prompt", ""], "--prompt '' has 0 tokens, but the model takes 1 to 15"),
        (["--prompt", "a", "--prompt", "b", "--set", "batch=1"], "2 prompts do not fit into a batch of 1"),
        (["--prompt", "a", "--set", "beans=4"], "has no hyperparameter 'beans'; did you mean 'beams'?"),
        (["--prompt", "a", "--set", "beams=2", "--set", "top=3"], "cannot be combined with temperature="),
        (["--prompt", "a", "--set", "d_ff=64"], "variable 'feed_forward/wi' has shape"),
        (
            ["--prompt", "a", "--checkpoint", "nowhere"],
            "'nowhere': this folder has no checkpoint; make one with",
        ),
    ],
)
def test_bad_input(trained: tuple[str, str], run: Run, options: list[str], match: str) -> None:
    file, place = trained
    done = run("generate", file, "--checkpoint", place, *SETTINGS, *options)
    assert done.exit_code == 2
    assert match in done.stderr


@pytest.mark.parametrize(
    ("code", "match"),
    [
        (
            "def encode(text): return {'prompt': [1]}",
            "'prompt', which is not an input of shape [batch, length]",
        ),
        ("def encode(text): return {}", "encode() does not return the model's input 'prompts'"),
        ("del encode", "has no function encode(); define encode(**hparams) in the same file as model()"),
        ("del generate", "has no function 'generate' to build a model"),
        (
            "def generate(**h): return decoding.generate(mtf.Model(model(**h).loss))",
            "cannot generate text, because it was made without a network",
        ),
    ],
)
def test_files_that_lack_something(tmp_path: Path, run: Run, code: str, match: str) -> None:
    (tmp_path / "lacking.py").write_text(f"{MODEL}\n{code}\n")
    done = run("generate", str(tmp_path / "lacking.py"), "--checkpoint", "x", "--prompt", "a", *SETTINGS)
    assert done.exit_code == 2
    assert match in done.stderr
