"""Element types of PyTorch modules: autocast, parameters read in another type, the optimizer's state."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch import nn

import layoutopt
import mesh_tf_core as mtf
from mesh_tf_core.errors import UserError
from mesh_tf_core.lower.storage import narrow_reads
from tests.importers.torch_models import (
    classified,
    llama,
    perceptron,
)


class Narrow(nn.Module):
    """A module under torch.autocast of a device; of none, its caller is."""

    def __init__(self, device: str | None) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 8)
        self.device = device

    def inside(self, x):
        q, k, v = torch.relu(self.first(x)).view(4, 3, 8).permute(1, 0, 2)
        return self.second(self.norm(torch.cat([q * k, v]))) * 2

    def forward(self, x):
        with torch.autocast(self.device, torch.bfloat16) if self.device else nullcontext():
            y = self.inside(x)
        return y.float().square().mean()


AUTOCASTS = {
    "inside": [("cuda", "meta"), ("cuda", "cpu"), ("cpu", "cpu"), ("meta", "meta")],
    "around": [("cuda", "meta"), ("cpu", "cpu")],
}


"""Place -> the device of torch.autocast, and that of the tensors."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", AUTOCASTS)
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_is_in_the_program(place: str) -> None:
    """Trap 8: the trace records float32, and without a GPU PyTorch switches its autocast off."""
    for device, tensors in AUTOCASTS[place]:
        module, batch = Narrow(device if place == "inside" else None), {"x": torch.randn(4, 8)}
        with torch.autocast(device, torch.bfloat16) if place == "around" else nullcontext():
            model = layoutopt.from_torch(module.to(tensors), {n: x.to(tensors) for n, x in batch.items()})
        assert model.origin is not None
        found = [(e.prim, e.out.dtype) for e in model.origin.block.walk()]
        assert [dtype for prim, dtype in found if prim == "dot_general"] == ["bfloat16"] * 2
        assert {("normalize", "float32"), ("max", "bfloat16"), ("square", "float32")} <= {*found}
        assert {v.dtype for v in model.graph.variables.values() if v.trainable} == {"float32"}
        off = (place, device) == ("around", "cuda") and not torch.cuda.is_available()
        assert off == any("around from_torch is off" in note for note in model.notes(mtf.Options()))


@pytest.mark.nightly
def test_a_policy_reads_parameters_in_its_type_and_stores_them_in_theirs() -> None:
    """As FSDP's MixedPrecisionPolicy; a scalar it leaves as it is. The module is as it was."""
    module, batch = llama()
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    plain, narrow = (layoutopt.from_torch(module, batch, param_dtype=t) for t in (None, torch.bfloat16))
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    for model, read in ((plain, "float32"), (narrow, "bfloat16")):
        assert {v.dtype for v in model.step_graph.variables.values() if v.slot_of or v.trainable} == {
            "float32"
        }
        assert model.origin is not None
        products = {e.out.dtype for e in model.origin.block.walk() if e.prim == "dot_general"}
        assert products == {read} and bool(narrow_reads(model.step_graph)) == (model is narrow)
    asked = {"mesh": "data:4", "hardware": "h100", "pins": "batch:data", "storage": "zero3"}
    sent = [layoutopt.search(m, **asked, alternatives=False).predicted for m in (plain, narrow)]
    whole, half = (p.communication_bytes_per_device["data"] for p in sent)
    assert 0.45 < half / whole < 0.6
    types = {"torch": ("bfloat16", "float32"), "torch:gradients=bfloat16": ("bfloat16", "bfloat16")}
    for framework, reduced in (types | {"torch:gradients=buffer": ("float32", "float32")}).items():
        for microbatches, each in zip((1, 2), reduced, strict=True):
            options = mtf.Options(microbatches=microbatches)
            plan = narrow.under(mtf.Mesh("data:4"), mtf.Layout("batch:data"), options, framework)
            assert plan.ranks.reduced == each
    with pytest.raises(UserError, match=r"param_dtype is torch\.int8; give None or torch\.bfloat16"):
        layoutopt.from_torch(module, batch, param_dtype=torch.int8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_groups_of_queries_are_found_under_autocast(attention: str) -> None:
    """Its casts lie between the repetition of keys and their reader; rotary positions are outside of it."""
    module, batch = llama(attn_implementation=attention)
    with torch.autocast("cpu", torch.bfloat16):
        model = layoutopt.from_torch(module, batch)
    assert model.origin is not None
    q = model.origin.parameters["model/layers/0/self_attn/q_proj/weight"]
    assert "heads group" in " ".join(q.named)
    assert any("leaves parameters in float32" in note for note in model.notes(mtf.Options()))


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_whose_type_is_lost_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU, also where there is one."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with torch.autocast("cuda"), pytest.raises(UserError, match=r"is off .no GPU here, or enabled=False"):
        layoutopt.from_torch(Narrow(None), {"x": torch.randn(4, 8)})


def test_state_of_the_optimizer_has_the_type_of_the_parameters() -> None:
    """Trap 8: AdamW of bfloat16 parameters keeps its averages in bfloat16."""
    module, batch = perceptron()
    model = layoutopt.from_torch(module.bfloat16(), {**batch, "x": batch["x"].bfloat16()}, loss=classified)
    slots = {v.dtype for v in model.step_graph.variables.values() if v.slot_of}
    assert slots == {"bfloat16"}


def test_products_with_a_bias_have_the_type_of_autocast() -> None:
    """GPT-2's Conv1D is `addmm` of float32 weights, and of a norm's float32 rows."""

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.w = torch.nn.LayerNorm(16), torch.nn.Parameter(torch.randn(16, 16))
            self.b = torch.nn.Parameter(torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = torch.addmm(self.b, self.norm(x), self.w)
                return torch.addmm(self.b, y, self.w).float().square().mean()

    graph = layoutopt.from_torch(Rows(), {"x": torch.randn(8, 16)}).graph
    products = [n for n, _ in graph.walk() if n.op.kind == "matmul"]
    assert len(products) == 2 and {graph.tensor(i).dtype for n in products for i in n.inputs} == {"bfloat16"}
