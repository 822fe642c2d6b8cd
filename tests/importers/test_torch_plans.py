"""`plan.torch` on four processes: loss, gradients and what a rank holds."""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import layoutopt
from mesh_tf_core import Layout, Mesh, Options
from mesh_tf_core.errors import UserError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.importers.torch_modules import MODULES, Given, literal, perceptron  # noqa: E402
from tests.importers.torch_ranks import on_four  # noqa: E402

SQUARE = "data:2;model:2"
HEADS = "batch:data;kv_heads:model;d_ff:model;vocab:model"
KEEP = ("layers:keep=products+attention",)
CASES: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "tensor": ("llama", SQUARE, HEADS, "zero3@data", {}),
    "model axis first": ("llama", "model:2;data:2", HEADS, "zero2@data", {"microbatches": 2}),
    "replicas": ("llama", "data:4", "batch:data", "", {"recompute": ("layers",)}),
    "kept": ("llama", SQUARE, HEADS, "zero2@data", {"recompute": KEEP}),
    "tied, tensor": ("tied", SQUARE, HEADS, "zero3@data", {}),
    "tied": ("tied", "data:4", "batch:data", "zero3", {"microbatches": 2}),
    "norms of heads": ("qwen3", SQUARE, HEADS, "zero3@data", {}),
    "gpt2, hybrid": ("gpt2", "far:2;near:2", "batch:far+near", "zero3@near", {}),
    "mixer": ("mixer", SQUARE, "batch:data;wide:model;tokens_in:model", "zero3@data", {}),
    "statistics": ("convolutions", "data:4", "batch:data", "zero3", {}),
    "frozen": ("perceptron", SQUARE, "batch:data;blocks:model", "zero2@data", {"microbatches": 2}),
    "tensor alone": ("perceptron", "model:4", "blocks:model", "", {"recompute": ("layers",)}),
}
"""Name -> module, mesh, layout, stage of storage, options."""


DAILY = ("tensor", "statistics", "frozen")


@cache
def imported(name: str) -> tuple[Any, Given]:
    """A model of a module, and the module with its batch."""
    given = MODULES[name]()
    return layoutopt.from_torch(*given), given


def four(cases: Any, folder: Path) -> dict[str, Any]:
    """Name -> what four ranks found under a plan, and the most elements that a rank holds by it."""
    plans = {}
    for case in cases:
        name, mesh, layout, stage, options = CASES[case]
        model, (module, batch) = imported(name)
        storage = dict.fromkeys(model.graph.variables, stage) if stage else {}
        plans[case] = model.under(Mesh(mesh), Layout(layout), Options(storage, **options)), module, batch
    model, (module, batch) = imported("llama")
    asked = {"hardware": "h100", "framework": "torch", "alternatives": False}
    plans["searched"] = layoutopt.search(model, mesh=SQUARE, **asked).torch, module, batch
    found = {}
    for case, ranks in on_four(plans, folder).items():
        planned, module, _ = plans[case]
        paths = {id(p): path for path, p in module.named_parameters()}
        most = sum(planned.ranks.elements(planned.ranks.parameters[path]) for path in paths.values())
        found[case] = ranks, most
    return found


@pytest.mark.parametrize("cases", [DAILY, pytest.param({*CASES} - {*DAILY}, marks=pytest.mark.nightly)])
def test_loss_gradients_and_parameters_on_four_processes(cases: Any, tmp_path: Path) -> None:
    """Also with padding that leaves ranks unequal numbers of tokens, tied and frozen weights, statistics of
    batches, and norms of single heads."""
    # In a process of its own: ranks are forked, and other tests of this one have threads of JAX.
    command = [sys.executable, "-m", "tests.importers.torch_alone", str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    every = pickle.loads((tmp_path / "found.pickle").read_bytes())
    assert every.keys() == {*cases, "searched"}
    for case, (ranks, most) in every.items():
        for found in ranks:
            assert found.loss < 1e-6 and found.gradient < 1e-5 and found.state < 1e-6, (case, found)
            assert not found.misplaced, (case, found)
        assert max(found.held for found in ranks) == most, case


def test_dimensions_that_no_style_splits_are_left_out_of_the_search() -> None:
    """A norm of d_ff would be that of a piece; a literal number of heads fails on a piece."""
    for given, dim, why in (
        (perceptron(normed=True), "blocks", "is neither of a linear map nor of an embedding"),
        (literal(), "heads", "does not run on a part of it"),
        (literal(rest=-1), "heads", "attention would have heads of [4] elements in place of [8]"),
        (MODULES["qwen3"](), "query_group", "combines it with values that all ranks have alike"),
    ):
        model = layoutopt.from_torch(*given)
        assert why in model.graph.unsplit[dim], model.graph.unsplit
        with pytest.raises(UserError):
            layoutopt.search(model, mesh="data:2;model:2", hardware="h100", pins=f"{dim}:model")


def test_a_search_has_no_decision_that_is_not_applied() -> None:
    model, _ = imported("llama")
    for asked in ({"pipeline": "layers"}, {"storage": "zero1"}, {"elsewhere": ("length",)}):
        with pytest.raises(UserError, match="torch cannot express this"):
            layoutopt.search(model, mesh="data:2;model:2", hardware="h100", framework="torch", **asked)
    mixed, _ = imported("mixer")
    with pytest.raises(UserError, match="torch cannot express this"):  # its blocks have no forward
        layoutopt.search(mixed, mesh="data:4", hardware="h100", framework="torch", recompute="always")


@pytest.mark.parametrize(
    "asked", [{"framework": "megatron", "storage": "zero1"}, {"pipeline": "layers", "pins": "layers:model"}]
)
def test_a_plan_with_other_decisions_is_refused(asked: dict[str, Any]) -> None:
    model, _ = imported("llama")
    asked = {"framework": "layoutopt", "alternatives": False, **asked}
    plan = layoutopt.search(model, mesh="data:2;model:2", hardware="h100", **asked)
    with pytest.raises(UserError, match="does not apply this plan"):
        plan.torch.placements()


def test_batch_norm_has_neither_microbatches_nor_recomputation() -> None:
    model, _ = imported("convolutions")
    plan = layoutopt.search(model, mesh="data:4", hardware="h100", alternatives=False)
    assert plan.options.microbatches == 1 and not plan.options.recompute
    with pytest.raises(UserError, match="torch cannot express this"):
        layoutopt.search(model, mesh="data:4", hardware="h100", framework="torch", microbatches="2")


def test_placements_name_the_axes_of_the_mesh() -> None:
    from torch.distributed.tensor import Replicate, Shard

    model, (module, _) = imported("llama")
    asked = {"pins": "kv_heads:model;d_ff:model", "storage": "layout", "alternatives": False}
    plan = layoutopt.search(model, mesh="data:2;model:2", hardware="h100", **asked)
    placements = plan.torch.placements()
    assert set(placements) == {path for path, _ in module.named_parameters()}
    assert placements["model.layers.1.self_attn.q_proj.weight"] == [Replicate(), Shard(0)]
    assert placements["model.layers.1.mlp.down_proj.weight"] == [Replicate(), Shard(1)]
    with pytest.raises(UserError, match="not parallelized"):
        plan.torch.train_step(module, torch.optim.SGD(module.parameters()))
    with pytest.raises(UserError, match="the module has no parameter 'model"):
        plan.torch.parallelize(MODULES["mixer"]()[0])
