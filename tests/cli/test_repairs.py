"""What was left out of any one kind of decision is offered where it alone makes a layout fit, and the offer
can be followed, as a command and in Python."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import layoutopt
import mesh_tf_core as mtf
from layoutopt.models.loading import load_model
from layoutopt.space.collective_matmul import CollectiveMatmul
from layoutopt.space.context import Context
from layoutopt.space.decisions import ARGUMENTS, KINDS
from layoutopt.space.diloco import Rarely
from layoutopt.space.kind import Decision, Target
from layoutopt.space.microbatches import Microbatches
from layoutopt.space.offload import OptimizerOffload, Weights
from layoutopt.space.recompute import Recompute
from layoutopt.space.schedule import ScheduleDecision
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.splits import Split
from layoutopt.space.stages import StageSplit
from layoutopt.space.storage import Storage
from tests.cli.conftest import INFEASIBLE

NO_HOST, HOST = "tpu-v2", "tpu-v5e"
UNSPLIT = "d:none;length:none"
FILE = """
import mesh_tf_core as mtf

def model(batch=1, length=1, d=8, f=32, layers=2, loop=False, momentum=0.0):
    g = mtf.Graph("small")
    b, s, d, f = (mtf.Dim(n, size) for n, size in zip(["batch", "length", "d", "f"], [batch, length, d, f]))
    made = iter(range(9))

    def product(x, old, new):
        weight = g.variable(f"w{next(made)}", [old, new], mtf.Normal(0.1))
        return mtf.einsum([x, weight], [b, s, new])

    def layer(x):
        return x + product(mtf.relu(product(x, d, f)), f, d)

    x = g.input("x", [b, s, d], "float32")
    if loop:
        x = mtf.scan(layer, x, mtf.Dim("layers", layers))
    for _ in range(0 if loop else layers):
        x = layer(x)
    return mtf.Model(mtf.reduce_mean(mtf.square(x)), mtf.SGD(0.1, momentum=momentum), name="small")
"""


@dataclass(frozen=True)
class Question:
    """A question in which a layout needs the left-out choices of one kind.

    Attributes:
      sizes: of the model of `FILE`.
      less: what is allowed, and how it is written on the command line.
      more: what the kind can add, with which a device holds less.
    """

    sizes: dict[str, Any]
    more: dict[str, Any]
    less: dict[str, Any] = field(default_factory=dict)
    mesh: str = "x:1"
    hardware: str = NO_HOST

    @property
    def asked(self) -> dict[str, Any]:
        return {"mesh": self.mesh, "hardware": self.hardware, "microbatches": (1,), **self.less}


QUESTIONS: dict[type[Decision], Question] = {
    OptimizerOffload: Question({"momentum": 0.9}, {"offload": ("optimizer",)}, hardware=HOST),
    Weights: Question({}, {"offload": ("weights",)}, hardware=HOST),
    Recompute: Question(
        {"batch": 8, "length": 4, "layers": 8, "loop": True},
        {"recompute": (False, True)},
        {"recompute": (False,)},
    ),
    Microbatches: Question({"batch": 8, "length": 16}, {"microbatches": (1, 4)}),
    Storage: Question(
        {"batch": 2},
        {"storage": ("layout", "zero3")},
        {"storage": ("layout",), "pins": f"batch:x;f:none;{UNSPLIT}"},
        "x:2",
    ),
    Elsewhere: Question(
        {"length": 16, "f": 2, "d": 32},
        {"elsewhere": ("length",)},
        {"pins": f"f:x;batch:none;{UNSPLIT}"},
        "x:2",
    ),
    StageSplit: Question(
        {"f": 31, "d": 63, "layers": 6, "loop": True}, {"pipeline": ("layers",)}, mesh="x:2"
    ),
    ScheduleDecision: Question(
        {"batch": 4, "d": 65, "f": 1, "layers": 4, "loop": True},
        {"schedule": ("gpipe", "1f1b")},
        {
            "microbatches": (4,),
            "pipeline": ("layers",),
            "schedule": ("gpipe",),
            "recompute": (True,),
            "storage": ("layout",),
            "pins": f"layers:x;batch:none;f:none;{UNSPLIT}",
        },
        "x:2",
    ),
}
LONG = (StageSplit, ScheduleDecision, Elsewhere, Storage)
"""Those whose questions take longer than others."""
EXPLAINED: dict[type[Decision], str] = {
    Split: "every split is allowed unless a pin forbids it; without pins, only orders are left out",
    Rarely: "replicas are another step, which the user has to ask for",
    CollectiveMatmul: "a value that is gathered in chunks lies there whole",
    Context: "no small model is known in which a ring holds less than the gathered keys",
}
"""Kinds without a question, and why."""


def test_every_kind_has_a_question() -> None:
    assert not QUESTIONS.keys() & EXPLAINED.keys()
    assert {*QUESTIONS, *EXPLAINED} == {*KINDS}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.nightly if kind in LONG else ()) for kind in QUESTIONS]
)
@pytest.mark.one_in(6)
def test_what_was_left_out_of_a_kind_is_offered(
    kind: type[Decision], tmp_path: Path, run: Callable[..., Result]
) -> None:
    question, file = QUESTIONS[kind], tmp_path / "small.py"
    file.write_text(FILE, encoding="utf-8")
    model = load_model(str(file), question.sizes).model
    asked = question.asked
    wide = layoutopt.search(model, objective="memory", alternatives=False, **{**asked, **question.more})
    limit = wide.predicted.peak_memory_bytes
    with pytest.raises(mtf.InfeasibleError) as caught:
        layoutopt.search(model, memory=limit, **asked)
    repair, *others = caught.value.repairs
    assert all("without" not in each.change for each in (repair, *others) if each.free)
    plan = layoutopt.search(model, **repair.asked)
    assert plan.predicted.peak_memory_bytes <= limit
    own = kind.everything(Target(model, mtf.Mesh(question.mesh)))
    assert {*repair.change.split()[::2]} <= {f"--{name}" for name in own}
    assert not [each for each in others if {*repair.change.split()[::2]} & {*each.change.split()}]
    texts: dict[str, str | None] = {}
    for name in ARGUMENTS.keys() & asked.keys():
        texts |= ARGUMENTS[name].texts(ARGUMENTS[name].parse(asked[name]))
    words = ["search", str(file), "--mesh", question.mesh, "--hardware", question.hardware]
    words += ["--memory", f"{limit}B", "--json"]
    words += [w for name, value in question.sizes.items() for w in ("--set", f"{name}={value}")]
    words += [w for option, text in texts.items() if text for w in (option, text)]
    refused = run(*words)
    assert refused.exit_code == INFEASIBLE
    first = json.loads(refused.stderr)["repairs"][0]
    assert first["change"] == repair.change
    assert run(*shlex.split(first["command"])[1:]).exit_code == 0
