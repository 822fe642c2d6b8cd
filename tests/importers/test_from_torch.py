"""PyTorch modules as models: loss and gradients as PyTorch's, parameters, loops, names; what is refused."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import layoutopt
import mesh_tf_core as mtf
from layoutopt.importers.torch import masks
from layoutopt.importers.torch.flex import flex_written_out
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.errors import UserError
from mesh_tf_core.lower.storage import narrow_reads
from tests.importers.torch_models import (
    MIXTURES,
    MODULES,
    classified,
    compared,
    llama,
    numpy_of,
    perceptron,
    tokens,
)
from tests.marks import by_day


@pytest.mark.parametrize("name", by_day(MODULES))
@pytest.mark.one_in(2)
def test_loss_and_gradients_are_those_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    make, loops = MODULES[name]
    module, batch = make()
    model, worst = compared(module, batch, classified if "y" in batch else None)
    assert worst < 1e-5
    assert model.origin is not None and model.framework == "torch"
    assert model.parameters == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert sorted(len(run.layers) for run in model.origin.rerolled.runs) == sorted(loops)


def test_a_layout_changes_no_number() -> None:
    torch.manual_seed(0)
    module, batch = llama()
    _, worst = compared(
        module, batch, None, "data:2;model:2", "batch:data;kv_heads:model;d_ff:model;vocab:model"
    )
    assert worst < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_three_steps_under_random_layouts_learn_the_same(seed: int) -> None:
    """The losses before and after each of three steps."""
    rng, names = random.Random(seed), sorted(MODULES)
    torch.manual_seed(0)
    module, batch = MODULES[names[seed % len(names)]][0]()
    loss = classified if "y" in batch else None
    model = layoutopt.from_torch(module, dict(batch), loss=loss, optimizer=mtf.SGD(0.02))
    dims = [name for name, sizes in model.step_graph.dims().items() if all(n % 2 == 0 for n in sizes)]
    program = None
    while program is None:
        layout = mtf.Layout(";".join(f"{rng.choice(dims)}:{axis}" for axis in ("x", "y")))
        with contextlib.suppress(UserError):
            program = model.lower(mtf.Mesh("x:2;y:2"), layout)
    engine = LockstepEngine(program)
    engine.initialize()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    given = {k: v for k, v in batch.items() if loss is None or k != "y"}
    for _ in range(4):
        found = engine.step({path: numpy_of(batch[path]) for path in program.feeds})["loss"]
        outputs = module(**given)
        own = loss(outputs, batch) if loss is not None else getattr(outputs, "loss", outputs)
        assert float(found) == pytest.approx(float(own.detach()), rel=1e-5), layout
        own.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_dimensions_are_called_as_the_field_calls_them() -> None:
    module, batch = llama()
    model = layoutopt.from_torch(module, batch)
    assert model.origin is not None and model.token_dims == ("batch", "length")
    named = {path: " ".join(a.named) for path, a in model.origin.parameters.items() if "/1/" not in path}
    layer = "model/layers/0"
    assert named["model/embed_tokens/weight"] == named["lm_head/weight"] == "vocab d_model"
    assert named[f"{layer}/self_attn/q_proj/weight"] == "(kv_heads query_group d_kv_parts d_kv) d_model"
    assert named[f"{layer}/self_attn/v_proj/weight"] == "(kv_heads d_v) d_model"
    assert named[f"{layer}/self_attn/o_proj/weight"] == "d_model (kv_heads query_group d_v)"
    assert named[f"{layer}/mlp/gate_proj/weight"] == "d_ff d_model"
    assert model.origin.parameters[f"{layer}/mlp/gate_proj/weight"].layer == 0
    renamed = layoutopt.from_torch(module, batch, names={"d_ff": "hidden"})
    assert "hidden" in renamed.graph.dims() and "d_ff" not in renamed.graph.dims()


def test_a_search_takes_the_module() -> None:
    module, batch = llama()
    plan = layoutopt.search(layoutopt.from_torch(module, batch), devices=4, hardware="h100")
    assert plan.data.framework == "torch" and plan.solver.status == "OPTIMAL"


DOORS = ("llama", "bert")


@pytest.mark.parametrize("family", by_day(DOORS))
def test_a_configuration_is_the_same_model(family: str, tmp_path: Path) -> None:
    """Parameters, and the layout and storage that are found for them."""
    module, batch = MODULES[family][0]()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(module.config.to_dict(), default=str), encoding="utf-8")
    described = layoutopt.from_huggingface(str(file), batch=4, length=16)
    traced = layoutopt.from_torch(module, batch)
    assert described.parameters == traced.parameters
    plans = [
        layoutopt.search(model, devices=2, hardware="h100", framework="torch", alternatives=False)
        for model in (described, traced)
    ]
    first, second = ((p.mesh, p.layout, {*p.data.storage.values()}) for p in plans)
    assert first == second


def test_meta_tensors_are_enough() -> None:
    config = llama()[0].config
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config).train()
    ids = torch.empty(4, 16, dtype=torch.int64, device="meta")
    model = layoutopt.from_torch(module, {"input_ids": ids, "labels": ids})
    assert model.parameters == sum(p.numel() for p in module.parameters())


# -- what the program is, and what a trace makes of it -------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Layers(nn.Module):
    """Equal layers, each in a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(Block() for _ in range(3)), reentrant

    def forward(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


class Attention(nn.Module):
    """Attention under a mask of positions: `seen` of a query's and a key's."""

    def __init__(self, seen: Any, additive: bool = False) -> None:
        super().__init__()
        self.project, self.seen, self.additive = nn.Linear(8, 24), seen, additive

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        place = torch.arange(x.shape[1])
        mask = self.seen(place[:, None], place[None, :])[None, None].expand(x.shape[0], 1, -1, -1)
        if self.additive:
            mask = torch.where(mask, 0.0, torch.finfo(x.dtype).min)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()


MASKS = {
    "causal": (lambda i, j: j <= i, (True, 0)),
    "strictly": (lambda i, j: ~(j > i), (True, 0)),
    "window": (lambda i, j: (j <= i) & (j > i - 4), (True, 4)),
    "both ways": (lambda i, j: ((i - j) < 4) & ((j - i) < 4), (False, 4)),
    "none": (lambda i, j: j >= 0 * i, (False, 0)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_positions_are_no_arrays(name: str) -> None:
    """Trap 1 and 2: an exported program has whole masks where the model says causal or a window."""
    seen, wanted = MASKS[name]
    for additive in (False, True):
        model, worst = compared(Attention(seen, additive), {"x": torch.randn(2, 12, 8)})
        (found,) = (e for e in model.origin.block.walk() if e.prim == "attention")  # type: ignore[union-attr]
        assert ((found.params["causal"], found.params["window"]), found.params["extra"]) == (wanted, "")
        assert worst < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gemma3"])
def test_masks_of_long_texts_are_no_arrays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those too long for a mask to be computed, as that of 4096 tokens is."""
    monkeypatch.setattr(masks, "LARGEST", 100)
    module, batch = MODULES[name][0]()
    model = layoutopt.from_torch(module, batch)
    assert model.origin is not None and not model.combines
    found = [e.params for e in model.origin.block.walk() if e.prim == "attention"]
    assert found and all(each["causal"] and not each["extra"] for each in found)


class Flexed(Attention):
    """The same by `flex_attention`; `cap` bounds the scores."""

    cap: Any = None

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        sizes = x.shape[1], x.shape[1]
        mask = create_block_mask(lambda b, h, i, j: self.seen(i, j), None, None, *sizes, device=x.device)
        return self.attend(q, k, v, self.cap, mask).square().mean()

    attend = staticmethod(flex_attention)


UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@UNFUSED
@pytest.mark.parametrize("name", MASKS)
def test_flexible_attention_is_attention(name: str) -> None:
    seen, wanted = MASKS[name]
    batch = {"x": torch.randn(2, 12, 8)}
    module = Flexed(seen)
    with flex_written_out():  # PyTorch has no gradients of it on CPUs
        model, worst = compared(module, batch)
    (found,) = (e for e in model.origin.block.walk() if e.prim == "attention")  # type: ignore[union-attr]
    assert ((found.params["causal"], found.params["window"]), found.params["extra"]) == (wanted, "")
    plain = Attention(seen)
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.allclose(module(batch["x"]), plain(batch["x"]))
    assert worst < 1e-5


@UNFUSED
def test_scores_that_a_module_changes_are_written_out() -> None:
    module, batch = Flexed(MASKS["causal"][0]), {"x": torch.randn(2, 12, 8)}
    module.cap = lambda score, b, h, i, j: torch.tanh(score) + h * (i - j)
    with flex_written_out():
        assert compared(module, batch)[1] < 1e-5
        written = module(batch["x"]).detach()
    with torch.no_grad():
        assert torch.allclose(module(batch["x"]), written)


def test_other_masks_stay() -> None:
    model, worst = compared(Attention(lambda i, j: (j <= i) | (j == 3)), {"x": torch.randn(2, 12, 8)})
    (found,) = (e for e in model.origin.block.walk() if e.prim == "attention")  # type: ignore[union-attr]
    assert found.params["extra"] == "mask" and worst < 1e-5


class Turned(nn.Module):
    """Rotary positions as complex numbers, looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("turns", torch.polar(torch.ones(4, 3), torch.arange(12.0).reshape(4, 3)))

    def forward(self, x, at):
        z = torch.view_as_complex(self.linear(x).unflatten(-1, (3, 2)))
        z = z * torch.gather(self.turns, 0, at[:, None].expand(-1, 3))
        return torch.view_as_real(z).pow(3).sum()


def test_complex_buffers_are_looked_up_and_need_no_values() -> None:
    batch = {"x": torch.randn(4, 6), "at": torch.tensor([2, 0, 1, 1])}
    assert compared(Turned(), batch)[1] < 1e-5
    model = layoutopt.from_torch(Turned().to("meta"), {name: x.to("meta") for name, x in batch.items()})
    held = {name: tuple(v.shape.sizes) for name, v in model.graph.variables.items() if "turns" in name}
    assert [*held.values()] == [(4, 3)] * 2 and model.parameters == 42


def test_tied_weights_are_one() -> None:
    """Trap 3."""
    model, worst = compared(*MODULES["gpt2"][0]())
    assert worst < 1e-5 and "lm_head/weight" not in model.origin.parameters  # type: ignore[union-attr]


def test_a_tensor_given_twice_is_two_inputs() -> None:
    """Trap 4."""
    x = torch.randn(4, 8)

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, y):
            return F.mse_loss(self.linear(x), y)

    model = layoutopt.from_torch(Difference(), {"x": x, "y": x})
    program = model.lower(mtf.Mesh("data:1"), mtf.Layout(""))
    assert {*program.feeds} == {"x", "y"}


def test_frozen_parameters_are_not_trained() -> None:
    """Trap 5: adapters (LoRA) beside weights with requires_grad=False."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    module, batch = llama()
    frozen = sum(p.numel() for p in module.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own
        adapted = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model, worst = compared(adapted, batch)
    assert model.parameters == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert model.frozen >= frozen and worst < 1e-5


class Written(nn.Module):
    """Writes in place: to a value, to views of it, and at indices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        whole = torch.zeros_like(y)
        whole[:, 1:] = y[:, :-1]
        whole[:, 0] = 0.5
        whole.view(-1)[:8].mul_(2.0)
        half = whole.transpose(0, 1)
        half[2:4].add_(y.t()[2:4])
        whole.masked_fill_(y > 1, 0.0)
        whole[torch.tensor([1, 2])] = y[torch.tensor([0, 3])]
        return (whole * half.t()).square().mean() + whole.sum()


def test_writes_in_place_are_followed() -> None:
    """Trap 6."""
    assert compared(Written(), {"x": torch.randn(4, 8)})[1] < 1e-5


def test_statistics_of_batch_norm_are_state() -> None:
    """Trap 6 and 11."""
    module, batch = MODULES["convolutions"][0]()
    model = layoutopt.from_torch(module, batch)
    assert model.origin is not None
    assert {"norm/running_mean", "norm/running_var", "norm/num_batches_tracked"} <= {*model.origin.state}
    engine = mtf.Trainer(model, mtf.Mesh("data:1"), mtf.Layout(""), engine="lockstep")
    engine.step({"image": batch["image"].numpy(), "label": batch["label"].numpy().astype("int32")})
    module(**batch)
    found = engine.engine.read("state/norm/running_var")
    assert abs(found - module.norm.running_var.numpy()).max() < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_module_are_kept(reentrant: bool) -> None:
    """Trap 7."""
    model = layoutopt.from_torch(Layers(reentrant), {"x": torch.randn(4, 8)})
    assert model.origin is not None and model.origin.recomputed == {"layers"}
    note = "the function applies torch.utils.checkpoint to the loop over layers, but the plan"
    assert any(note in text for text in model.notes(mtf.Options()))


def test_transformers_checkpoints_are_kept() -> None:
    module, batch = llama()
    module.activation_checkpointing_enable()
    model = layoutopt.from_torch(module, batch)
    assert model.origin is not None and model.origin.recomputed == {"layers"}


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
    with pytest.raises(UserError, match=r"param_dtype is torch\.int8; give None or torch\.bfloat16"):
        layoutopt.from_torch(module, batch, param_dtype=torch.int8)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_groups_of_queries_are_found_under_autocast(attention: str) -> None:
    """Its casts lie between the repetition of keys and their reader; rotary positions are outside of it."""
    module, batch = llama(attn_implementation=attention)
    with torch.autocast("cpu", torch.bfloat16):
        model = layoutopt.from_torch(module, batch)
    assert model.origin is not None
    q = model.origin.parameters["model/layers/0/self_attn/q_proj/weight"]
    assert "kv_heads query_group" in " ".join(q.named)
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


def test_experts_chosen_by_python_are_refused_with_what_to_do() -> None:
    """Trap 9."""
    module, batch = MODULES["mixtral"][0]()
    config = module.config
    config._experts_implementation = "eager"
    with pytest.raises(UserError, match='experts_implementation="grouped_mm"'):
        layoutopt.from_torch(transformers.AutoModelForCausalLM.from_config(config).train(), batch)


class Grouped(nn.Module):
    """A mixture written by hand: rows of a token's experts are added up in place; `mixed`: in an order that
    mixes them first."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.router, self.mixed = nn.Linear(8, 4, bias=False), mixed
        self.inner, self.outer = (nn.Parameter(torch.randn(4, 8, 8)) for _ in range(2))

    def forward(self, x):
        tokens = x.reshape(-1, 8)
        gates, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.view(-1).argsort(stable=True)
        rows = tokens[order // 2]
        rows = rows.roll(1, 0) if self.mixed else rows
        ends = torch.bincount(chosen.view(-1), minlength=4).cumsum(0).to(torch.int32)
        rows = torch._grouped_mm(
            torch.relu(torch._grouped_mm(rows, self.inner, offs=ends)), self.outer, offs=ends
        )
        rows = rows * gates.reshape(-1)[order][:, None]
        return torch.zeros_like(tokens).index_add(0, order // 2, rows).square().mean()


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.one_in(4)
def test_mixtures_are_products_of_tokens_with_their_experts(family: str) -> None:
    """Trap 9: what is sorted over the whole batch is split by no layout."""
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(MIXTURES[family]).train()
    model, worst = compared(module, {"input_ids": tokens(), "labels": tokens()})
    assert worst < 1e-5 and model.origin is not None and not model.combines
    prims = [e.prim for e in model.origin.block.walk()]
    assert "expert_product" in prims and "sort" not in prims and "ragged_dot_general" not in prims


def test_lengths_that_a_module_cuts_are_no_tokens() -> None:
    """Mamba 2 sums over pieces of a sequence."""
    sizes = {"num_heads": 4, "head_dim": 16, "vocab_size": 64, "hidden_size": 32, "state_size": 8}
    config = transformers.Mamba2Config(**sizes, num_hidden_layers=3, n_groups=1, expand=2, chunk_size=8)
    module = transformers.AutoModelForCausalLM.from_config(config).train()
    model = layoutopt.from_torch(module, {"input_ids": tokens(), "labels": tokens()})
    assert model.parameters == sum(p.numel() for p in module.parameters()) and not model.token_dims


class Contrastive(nn.Module):
    """Two towers whose loss compares all pairs, as CLIP's."""

    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(6, 8), nn.Linear(10, 8)

    def forward(self, text, image):
        logits = self.text(text) @ self.image(image).t()
        targets = torch.arange(logits.shape[0])
        return F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)


def test_two_inputs_of_a_loss_over_pairs_have_one_batch() -> None:
    torch.manual_seed(0)
    batch = {"text": torch.randn(4, 6), "image": torch.randn(4, 10)}
    model, worst = compared(Contrastive(), batch, None, "data:2", "batch:data")
    assert worst < 1e-5 and model.batch_dim == "batch" and model.combines
    plan = layoutopt.search(model, mesh="data:4", hardware="h100", framework="torch")
    assert plan.layout.axes("batch") == ("data",) and any("combines examples" in n for n in plan.data.notes)


class Decoded(nn.Module):
    """PyTorch's own layers with a causal mask, whose values they look at."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
        return self.transformer(x, y, tgt_mask=mask).square().mean()


def test_the_masks_of_pytorchs_own_transformer_are_causal() -> None:
    torch.manual_seed(0)
    model, worst = compared(Decoded(), {"x": torch.randn(2, 6, 8), "y": torch.randn(2, 4, 8)})
    assert worst < 1e-5 and model.origin is not None
    found = [e.params["causal"] for e in model.origin.block.walk() if e.prim == "attention"]
    assert sorted(found) == [False, False, True]


class Picked(nn.Linear):
    def forward(self, x):
        found = super().forward(x)
        return found[found > 0].mean()


class Mean(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()


def test_sizes_that_are_not_known_or_nothing_are_refused() -> None:
    with pytest.raises(UserError, match=r"test_from_torch\.py:\d+: a size depends on values of a batch"):
        layoutopt.from_torch(Picked(8, 8), {"x": torch.ones(4, 8)})
    with pytest.raises(UserError, match=r"'x' of the batch has shape \(0, 8\), which has no elements"):
        layoutopt.from_torch(Mean(8, 8), {"x": torch.ones(0, 8)})


@pytest.mark.parametrize("of_module", ["meta", "cpu"])
def test_a_module_or_its_batch_may_be_on_meta(of_module: str) -> None:
    other = "cpu" if of_module == "meta" else "meta"
    model = layoutopt.from_torch(Mean(8, 8, device=of_module), {"x": torch.ones(4, 8, device=other)})
    assert model.batch_dim == "batch" and model.parameters == 72


def test_rows_of_experts_that_mix_stay_sorted() -> None:
    for mixed in (False, True):
        x = torch.randn(4, 6, 8, dtype=torch.bfloat16)
        model = layoutopt.from_torch(Grouped(mixed).bfloat16(), {"x": x})
        said = [note for note in model.origin.notes if "sorted by expert" in note]  # type: ignore[union-attr]
        assert bool(said) == mixed


def test_means_over_counted_tokens_are_those_of_the_whole_batch() -> None:
    """Trap 10: microbatches are not means of means."""
    module, batch = llama()
    for given in (batch, {**batch, "num_items_in_batch": 60}):
        model = layoutopt.from_torch(module, given)
        assert model.lower(mtf.Mesh("data:1"), mtf.Layout(""), mtf.Options(microbatches=2))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.linear(x)).square().mean()


def test_switches_are_said() -> None:
    """Trap 12: evaluation mode, dropout, caches."""
    module = Dropped()
    drawn = layoutopt.from_torch(module.eval(), {"x": torch.randn(4, 8)})
    assert drawn.origin is not None and any(e.prim == "random_uniform" for e in drawn.origin.block.walk())
    assert any("evaluation mode" in note for note in drawn.origin.notes) and not module.training
    module.train()
    module.drop.eval()
    fixed = layoutopt.from_torch(module, {"x": torch.randn(4, 8)})
    assert not any(e.prim == "random_uniform" for e in fixed.origin.block.walk())  # type: ignore[union-attr]
    decoder, batch = llama()
    model = layoutopt.from_torch(decoder, batch)
    assert any("use_cache" in note for note in model.origin.notes)  # type: ignore[union-attr]
    assert decoder.config.use_cache


class Drawing(nn.Module):
    def __init__(self, high: int) -> None:
        super().__init__()
        self.linear, self.high = nn.Linear(8, 8), high

    def forward(self, x):
        drawn = torch.randint(0, self.high, x.shape, device=x.device)
        return (self.linear(x) * drawn).mean()


def test_numbers_are_drawn_in_their_own_type() -> None:
    """Rounded from a wider one, some would be 1."""
    for dtype in (torch.float32, torch.bfloat16):
        module = nn.Linear(8, 8, dtype=dtype)
        module.register_forward_hook(lambda own, given, y: (y * torch.rand_like(y)).mean())
        model = layoutopt.from_torch(module, {"input": torch.randn(4, 8, dtype=dtype)})
        (drawn,) = (e for e in model.origin.block.walk() if e.prim == "random_uniform")
        assert str(dtype).endswith(drawn.out.dtype)


def test_whole_numbers_are_drawn_from_as_many_as_a_draw_has() -> None:
    """One of 24 bits never has the lowest bit of more."""
    x = {"x": torch.randn(4, 8)}
    layoutopt.from_torch(Drawing(2**24), x)
    with pytest.raises(UserError, match=r"it draws from 16777217 numbers, more than 2\*\*24"):
        layoutopt.from_torch(Drawing(2**24 + 1), x)


# -- refusals ------------------------------------------------------------------------------------------------


class Unsupported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.linalg.inv(self.linear(x))
        z = torch.cumprod(y, 0)
        return torch.sort(z, descending=True).values.mean() + torch.poisson(y.abs()).mean()


def test_all_that_cannot_be_imported_is_listed_with_its_lines() -> None:
    with pytest.raises(UserError) as error:
        layoutopt.from_torch(Unsupported(), {"x": torch.randn(8, 8)})
    text = str(error.value)
    assert text.startswith("from_torch: (1) ")
    for what in ("torch.linalg_inv", "torch.cumprod", "torch.sort", "torch.poisson"):
        assert re.search(rf"test_from_torch\.py:\d+: cannot import {re.escape(what)}\b", text)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        return y.mean()


REFUSED = {
    "data": (Branching(), {"x": torch.zeros(8, 8)}, r"test_from_torch\.py:\d+: .* depends on values"),
    "no loss": (nn.Linear(8, 8), torch.zeros(8, 8), r"returns a tensor of shape \(8, 8\)"),
    "no module": (3, {}, "3 is not a torch.nn.Module"),
    "arguments": (nn.Linear(8, 8), {"y": torch.zeros(2)}, "cannot be called with this batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_to_do(name: str) -> None:
    module, batch, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as error:
        layoutopt.from_torch(module, batch)
    assert str(error.value).startswith("from_torch: ")


def test_importing_needs_no_jax() -> None:
    code = (
        "import sys, layoutopt.importers.torch.model as m\n"
        "print('torch' in sys.modules, 'jax' in sys.modules)\n"
        "m.torch_module()\nprint('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]
