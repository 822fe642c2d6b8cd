"""PyTorch modules as models: loss and gradients as PyTorch's, parameters, loops, names; what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import layoutopt
import mesh_tf_core as mtf
from mesh_tf_core.errors import UserError
from tests.importers.torch_models import MODULES, classified, compared, llama, perceptron


@pytest.mark.parametrize("name", MODULES)
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


@pytest.mark.parametrize("family", DOORS)
def test_a_configuration_is_the_same_model(family: str, tmp_path: Path) -> None:
    """Parameters, and the layout and storage that are found for them."""
    module, batch = MODULES[family][0]()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(module.config.to_dict(), default=str), encoding="utf-8")
    described = layoutopt.from_huggingface(str(file), batch=4, length=16)
    traced = layoutopt.from_torch(module, batch)
    assert described.parameters == traced.parameters
    plans = [
        layoutopt.search(model, devices=4, hardware="h100", framework="torch")
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


def test_other_masks_stay() -> None:
    model, worst = compared(Attention(lambda i, j: (j <= i) | (j == 3)), {"x": torch.randn(2, 12, 8)})
    (found,) = (e for e in model.origin.block.walk() if e.prim == "attention")  # type: ignore[union-attr]
    assert found.params["extra"] == "mask" and worst < 1e-5


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
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def inside(self, x):
        return self.second(self.norm(torch.relu(self.first(x)))) * 2

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.inside(x)
        return y.float().square().mean()


class Around(Narrow):
    def forward(self, x):
        return self.inside(x).float().square().mean()


def test_autocast_is_in_the_program() -> None:
    """Trap 8: around the import, and inside of the module, where the trace records float32."""
    with torch.autocast("cpu", torch.bfloat16):
        around = layoutopt.from_torch(Around(), {"x": torch.randn(4, 8)})
    for model in (layoutopt.from_torch(Narrow(), {"x": torch.randn(4, 8)}), around):
        found = [(e.prim, e.out.dtype) for e in model.origin.block.walk()]  # type: ignore[union-attr]
        assert [dtype for prim, dtype in found if prim == "dot_general"] == ["bfloat16"] * 2
        assert ("normalize", "float32") in found and ("max", "bfloat16") in found
        assert {v.dtype for v in model.graph.variables.values() if v.trainable} == {"float32"}


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


def test_sorted_experts_are_said() -> None:
    """Trap 9: no layout splits what is sorted over the whole batch."""
    model = layoutopt.from_torch(*MODULES["mixtral"][0]())
    assert any("sorted by expert" in note for note in model.origin.notes)  # type: ignore[union-attr]


def test_means_over_counted_tokens_are_not_cut() -> None:
    """Trap 10 and 11: microbatches would be means of means, or statistics of a part."""
    for name in ("llama", "convolutions"):
        module, batch = MODULES[name][0]()
        model = layoutopt.from_torch(module, batch)
        with pytest.raises(UserError, match="not a sum over the examples"):
            model.lower(mtf.Mesh("data:1"), mtf.Layout(""), mtf.Options(microbatches=2))
    module, batch = llama()
    counted = layoutopt.from_torch(module, {**batch, "num_items_in_batch": 60})
    assert counted.lower(mtf.Mesh("data:1"), mtf.Layout(""), mtf.Options(microbatches=2))


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


# -- refusals ------------------------------------------------------------------------------------------------


class Unsupported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.linalg.inv(self.linear(x))
        z = torch.cumprod(y, 0)
        return torch.sort(z, descending=True).values.mean() + torch.rand(8).mean()


def test_all_that_cannot_be_imported_is_listed_with_its_lines() -> None:
    with pytest.raises(UserError) as error:
        layoutopt.from_torch(Unsupported(), {"x": torch.randn(8, 8)})
    text = str(error.value)
    assert text.startswith("from_torch: (1) ")
    for what in ("torch.linalg_inv", "torch.cumprod", "torch.sort", "torch.rand"):
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
