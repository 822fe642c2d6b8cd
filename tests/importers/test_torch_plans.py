"""`plan.torch` on four processes: loss, gradients and what a rank holds."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import layoutopt
from mesh_tf_core import Layout, Mesh, Options
from mesh_tf_core.lower.storage import BACKWARD, GRADIENT, SPLIT, STAGES

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


from tests.importers.torch_modules import imported  # noqa: E402
from tests.importers.torch_ranks import on_ranks  # noqa: E402

SQUARE = "data:2;model:2"
TENSORS = "heads:model;d_ff:model;vocab:model"
HEADS = f"batch:data;{TENSORS}"
PIPED = "batch:data;layers:stage"
MIXED = {"param_dtype": torch.float32}
"""Of modules in float64, so that rounding hides nothing."""
KEEP = ("layers:keep=products+attention",)
CAST = "autocast"
"""Option of a case: its step runs inside torch.autocast."""
CASES: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "tensor": ("llama", SQUARE, HEADS, "zero3@data", {}),
    "model axis first": ("llama", "model:2;data:2", HEADS, "zero2@data", {"microbatches": 2}),
    "replicas": ("llama", "data:4", "batch:data", "", {"recompute": ("layers",)}),
    "reduced once": (
        "llama",
        SQUARE,
        HEADS,
        "zero3-once@data",
        {"microbatches": 2, "recompute": ("layers:count=1",)},
    ),
    "kept": ("llama", SQUARE, HEADS, "zero1@data", {"microbatches": 2, "recompute": KEEP}),
    "tied, tensor": ("tied", SQUARE, HEADS, "zero3@data", {}),
    "tied": ("tied", "data:4", "batch:data", "zero3", {"microbatches": 2}),
    "tied by code": ("rereading", "data:4", "batch:data", "zero3", {}),
    "norms of heads": ("qwen3", SQUARE, HEADS, "zero3@data", {}),
    "gpt2, hybrid": ("gpt2", "far:2;near:2", "batch:far+near", "zero3@near", {}),
    "mixer": ("mixer", SQUARE, "batch:data;wide:model;tokens_in:model", "zero3@data", {}),
    "statistics": ("convolutions", "data:4", "batch:data", "zero3", {}),
    "frozen": ("perceptron", SQUARE, "batch:data;blocks:model", "zero2@data", {"microbatches": 2}),
    "sequence": ("llama", SQUARE, f"{HEADS};length@elsewhere:model", "zero3@data", {"recompute": KEEP}),
    "sequence, norms of heads": ("qwen3", SQUARE, f"{HEADS};length@elsewhere:model", "", {"microbatches": 2}),
    "stages": ("four layers", "stage:2;data:2", PIPED, "zero2@data", {"microbatches": 4}),
    "stages of tensors": (
        "four layers",
        "stage:2;model:2",
        f"layers:stage;{TENSORS};length@elsewhere:model",
        "",
        {"microbatches": 2, "schedule": "1f1b", "recompute": ("layers",)},
    ),
    "rounds": (
        "four layers",
        "stage:2;data:2",
        PIPED,
        "zero3@data",
        {"microbatches": 2, "schedule": "interleaved:2"},
    ),
    "stages, reduced once": (
        "four layers",
        "stage:2;data:2",
        PIPED,
        "zero3-once@data",
        {"microbatches": 4, "schedule": "1f1b"},
    ),
    "rounds at once": (
        "four layers",
        "stage:2;data:2",
        PIPED,
        "",
        {"microbatches": 4, "schedule": "circular:2"},
    ),
    "unequal stages": ("images", "stage:4", "layers:stage", "", {"microbatches": 4, "schedule": "1f1b"}),
    "experts": ("mixture", "data:4", "batch:data;experts:data", "zero3", {}),
    "experts on two": (
        "mixture",
        "far:2;near:2",
        "batch:far+near;experts:near",
        "zero2",
        {"microbatches": 2},
    ),
    "experts, tensor": (
        "mixture",
        SQUARE,
        "batch:data;heads:model;vocab:model;experts:data",
        "zero3@data",
        {"recompute": ("layers",)},
    ),
    "masked": ("masked", "data:4", "batch:data", "zero2", {"microbatches": 2}),
    "masked, stages": (
        "masked",
        "stage:2;data:2",
        "batch:data;blocks:stage",
        "",
        {"microbatches": 4, "schedule": "1f1b"},
    ),
    "scalars": ("scalar", "data:4", "batch:data", "zero3", {"microbatches": 2}),
    "gains and biases": ("biased", SQUARE, "batch:data;heads:model", "zero3@data", {}),
    "mixed precision": ("llama", SQUARE, HEADS, "zero3@data", {"microbatches": 2, **MIXED}),
    "autocast": ("llama", "data:4", "batch:data", "zero3", {"microbatches": 2, CAST: True}),
    "autocast, recomputed": ("llama", SQUARE, HEADS, "zero3@data", {"recompute": ("layers",), CAST: True}),
    "autocast, stages": (
        "four layers",
        "stage:2;data:2",
        PIPED,
        "zero3@data",
        {"microbatches": 4, CAST: True},
    ),
    "mixed, tensor alone": ("perceptron", "model:4", "blocks:model", "", MIXED),
    "mixed, stages": ("four layers", "stage:2;data:2", PIPED, "zero2@data", {"microbatches": 4, **MIXED}),
    "mixed, experts": ("mixture", "data:4", "batch:data;experts:data", "zero3", MIXED),
    "tables and convolutions": ("images", "data:4", "batch:data", "zero3", {"microbatches": 2}),
    "tensor alone": ("perceptron", "model:4", "blocks:model", "", {"recompute": ("layers",)}),
}
"""Name -> module, mesh, layout, stage of storage, options."""


TRAPS = ("tied", "masked", "statistics", "scalars")
"""3: `parallelize_module` unties; 10: means of means; 11: statistics by rank, and `ignored_params`, whose
gradients FSDP does not add up."""
DAILY = ("sequence", "stages of tensors", "mixed precision", "autocast", *TRAPS)


def four(cases: Any, folder: Path) -> dict[str, Any]:
    """Name -> what four ranks found under a plan."""
    plans = dict[str, Any]()
    for case in cases:
        name, mesh, layout, stage, options = CASES[case]
        more = {k: options[k] for k in MIXED if k in options}
        options, cast = {k: v for k, v in options.items() if k not in (*MIXED, CAST)}, CAST in options
        model, (module, batch) = imported(name, **more)
        storage = dict.fromkeys(model.graph.variables, stage) if stage else {}
        under = model.under(Mesh(mesh), Layout(layout), Options(storage, **options))
        plans[case] = under, module, batch, cast
    model, (module, batch) = imported("llama")
    asked = {"hardware": "h100", "framework": "torch", "alternatives": False}
    plans["searched"] = layoutopt.search(model, mesh=SQUARE, **asked).torch, module, batch
    names = {case: {n for n, _ in module.named_parameters()} for case, (_, module, *_) in plans.items()}
    return {case: (ranks, names[case]) for case, ranks in on_ranks(plans, folder).items()}


@pytest.mark.parametrize("cases", [DAILY, pytest.param({*CASES} - {*DAILY}, marks=pytest.mark.nightly)])
def test_loss_gradients_and_parameters_on_ranks_processes(cases: Any, tmp_path: Path) -> None:
    """Also with padding that leaves ranks unequal numbers of tokens, tied and frozen weights, statistics of
    batches, and norms of single heads."""
    # In a process of its own: ranks are forked, and other tests of this one have threads of JAX.
    command = [sys.executable, "-m", "tests.importers.torch_alone", str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    every = pickle.loads((tmp_path / "found.pickle").read_bytes())
    assert every.keys() == {*cases, "searched"}
    for case, (ranks, names) in every.items():
        for found in ranks:
            mixed = case in CASES and MIXED.keys() <= CASES[case][-1].keys()
            cast = case in CASES and CAST in CASES[case][-1]
            near = 5e-3 if cast else 1e-5 if mixed else 1e-6
            assert found.loss < near and found.gradient < 10 * near and found.state < 1e-6, (case, found)
            assert cast or found.read <= {"torch.float32" if mixed else "torch.float64"}, (case, found)
            assert not found.misplaced, (case, found)
        assert max(found.held for found in ranks) == max(found.planned for found in ranks), case
        if case in CASES:
            *_, stage, options = CASES[case]
            each = (GRADIENT, BACKWARD) in SPLIT[stage.partition("@")[0] or STAGES[0]]
            times = options.get("microbatches", 1) if each else 1
            assert max(found.reduced for found in ranks) in (0, times), (case, ranks[0].reduced)
        assert names <= set().union(*(found.names for found in ranks)), case
