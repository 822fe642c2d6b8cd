"""What eager PyTorch keeps for backward: predicted, and as autograd saves it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import layoutopt
from costmodels.kept import STEPS
from layoutopt.importers.huggingface import from_huggingface
from layoutopt.importers.huggingface.form import ACTIVATIONS
from mesh_tf_core.ir.phase import Phase


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            own(y).view(*y.shape[:2], self.heads, -1).transpose(1, 2) for own in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def attention() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block(64, 4) for _ in range(4))), torch.empty(8, 32, 64)


def narrow() -> tuple[nn.Module, torch.Tensor]:
    """In a type that kernels compute in a wider one."""
    module, x = attention()
    return module.bfloat16(), x.bfloat16()


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Of different widths, so that no loop is made of them."""
    widths = (3, 8, 16, 24)
    layers = [
        part
        for a, b in pairwise(widths)
        for part in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
    ]
    return nn.Sequential(*layers), torch.empty(4, 3, 16, 16)


def saved(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd saves for backward, of which several views are one array; without parameters."""
    own, found = {p.untyped_storage().data_ptr() for p in module.parameters()}, dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
        loss = getattr(out, "logits", out).sum()
    assert loss.requires_grad  # what it keeps is there until here, so no address is of two arrays
    return sum(found.values())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("build", [attention, narrow, convolutions])
def test_eager_pytorch_keeps_what_autograd_saves(
    build: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> None:
    """Each call's operands, once under all their names, in layers that became a loop and in others."""
    module, x = build()
    model = layoutopt.from_torch(module, x, loss=lambda out, batch: out.sum())
    found = layoutopt.cost(model, "data:1", hardware="h100", framework="torch").evaluation.memory
    *_, last = (p for p in found.points if p.origin.phase == Phase.FORWARD and p.depth == 0)
    assert (last.bytes - found.variables) / saved(module, x) == pytest.approx(1.0, abs=0.06)


class Written(nn.Module):
    """Attention that is written out, or a layer between two products that read what it gives, or added to
    its operand, of which nothing is kept."""

    def __init__(self, form: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.form, self.function = form, function
        self.parts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *_, last = self.parts
        if self.form != "attention":
            y = self.function(first(x))
            return x + (last(y) if self.form == "between" else y)
        q, k, v = (own(x).unflatten(-1, (4, 8)).transpose(1, 2) for own in self.parts[:3])
        weights = self.function(q @ k.transpose(-1, -2) / 8**0.5)
        return x + last((weights @ v).transpose(1, 2).flatten(-2))


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "softmax in float32": lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "clamp": lambda x: x.clamp(-1, 1),
    "leaky_relu": F.leaky_relu,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "selu": F.selu,
    "tanh beside its operand": lambda x: torch.tanh(x) + x.square(),
    "relu beside its operand": lambda x: F.relu(x) + x.square(),
    "softmax beside its operand": lambda x: F.softmax(x, -1) + x.square(),
    "clamp beside its operand": lambda x: x.clamp(-1, 1) + x.square(),
    "leaky_relu beside its operand": lambda x: F.leaky_relu(x) + x.square(),
}
"""Those whose derivative reads their result, their operand, or an array within."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["attention", "between", "added"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.one_in(30)
def test_functions_keep_what_autograd_saves(name: str, form: str, dtype: torch.dtype) -> None:
    """Up to the number of the loop's iterations, and the sums of rows where log_softmax is kept by nobody."""
    module = nn.Sequential(*(Written(form, FUNCTIONS[name]) for _ in range(3))).to(dtype)
    x = torch.randn(4, 32, 32, dtype=dtype)
    model = layoutopt.from_torch(module, x, loss=lambda out, batch: out.sum())
    found = layoutopt.cost(model, "data:1", hardware="h100", framework="torch").evaluation.memory
    *_, last = (p for p in found.points if p.origin.phase == Phase.FORWARD and p.depth == 0)
    real = saved(module, x)
    assert 0 <= last.bytes - found.variables - x.nbytes - real < 0.02 * real


def test_a_loss_makes_arrays_in_the_type_of_its_logits() -> None:
    """PyTorch's cross entropy computes in float32 within its kernels; a cast before it is an array."""
    rows, classes = 4096, 512

    def peak(cast: Callable[[Any], Any]) -> float:
        module = nn.Linear(8, classes).bfloat16()
        batch = {"input": torch.empty(rows, 8, dtype=torch.bfloat16)}

        def loss(out: Any, batch: Any) -> Any:
            return F.cross_entropy(cast(out), torch.zeros(rows, dtype=torch.long))

        model = layoutopt.from_torch(module, batch, loss=loss)
        return layoutopt.cost(model, "data:1", hardware="h100", framework="torch").predicted.peak_memory_bytes

    own, wide = peak(lambda out: out), peak(lambda out: out.float())
    assert wide - own >= 3 * 2 * rows * classes * 0.99


ROWS, WIDE, LAYERS = 64, 128, 2
SIZES = {
    "hidden_size": 16, "intermediate_size": WIDE, "num_attention_heads": 2, "num_hidden_layers": LAYERS
}  # fmt: skip


def kept_by_form(activation: str) -> float:
    """Arrays of the width inside a feed-forward block that a layer of a configuration is predicted to keep,
    beside what it keeps with relu: one."""

    def forward(name: str) -> int:
        config = {"model_type": "gpt_neox", "vocab_size": 16, **SIZES, "hidden_act": name}
        model = from_huggingface(config, batch=1, length=ROWS)
        found = layoutopt.cost(model, "data:1", hardware="h100", framework="transformers").evaluation.memory
        *_, last = (p for p in found.points if p.origin.phase == Phase.FORWARD and p.depth == 0)
        return last.bytes - found.variables

    return 1 + (forward(activation) - forward("relu")) / (4 * LAYERS * ROWS * WIDE)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.one_in(12)
def test_every_activation_of_a_configuration_keeps_what_autograd_saves(name: str) -> None:
    """Of transformers' own modules: of one kernel, or written in functions that have one each."""
    activations = pytest.importorskip("transformers.activations")
    act = activations.ACT2FN[name].float()
    x = torch.randn(ROWS, 8, requires_grad=True)
    found = saved(nn.Sequential(nn.Linear(8, WIDE), act, nn.Linear(WIDE, 8)), x) - x.nbytes
    assert kept_by_form(name) == pytest.approx(found / (4 * ROWS * WIDE), abs=0.01)


class Attended(torch.autograd.Function):
    """Attention that keeps what fused kernels keep: operands, result, and a number of each row."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
        out = weights.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        out = out.transpose(1, 2).contiguous()
        # Kernels take values in an array of their own.
        ctx.save_for_backward(q, k, v.contiguous(), out, weights.float().logsumexp(-1))
        return out


OWN_EXPERTS = {"moe_intermediate_size": 192, "num_experts_per_tok": 4, "norm_topk_prob": True}
WIDTHS = {
    "vocab_size": 16, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 896, "num_hidden_layers": 2, "max_position_embeddings": 128,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
MODULES: dict[str, dict[str, Any]] = {
    "llama": {},
    "olmo2": {},
    "qwen3_moe": {"num_experts": 16, "head_dim": 32, **OWN_EXPERTS},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32},
    "deepseek_v3": {
        "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 0, **LATENT, **OWN_EXPERTS,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MODULES)
@pytest.mark.one_in(30)
def test_configured_layers_keep_what_transformers_modules_save(family: str, dtype: str) -> None:
    """What a longer batch keeps more: experts as grouped products, the default of transformers, whose gates
    multiply results, and norms on float32 copies."""
    transformers = pytest.importorskip("transformers", minversion="5.20")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attended(
        module: Any, q: Any, k: Any, v: Any, mask: Any, s_aux: Any = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        out = Attended.apply(q, k, v)  # type: ignore[no-untyped-call]
        return (out if s_aux is None else out * s_aux.sigmoid()[:, None]), None  # sinks scale what is kept

    ALL_ATTENTION_FUNCTIONS.register("attended", attended)
    sizes, length = {**WIDTHS, **MODULES[family]}, 128
    config = transformers.AutoConfig.for_model(family, **sizes)
    module = transformers.AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation="attended"
    )
    if family not in ("llama", "olmo2"):
        module.set_experts_implementation("grouped_mm")

    def both(batch: int) -> tuple[int, int]:
        model = from_huggingface(
            {"model_type": family, **sizes}, batch=batch, length=length, dtype=dtype, attention="fused"
        )
        found = layoutopt.cost(model, "data:1", hardware="h100", framework="transformers").evaluation.memory
        *_, last = (p for p in found.points if p.origin.phase == Phase.FORWARD and p.depth == 0)
        ids = torch.randint(0, 16, (batch, length))
        return last.bytes - found.variables, saved(module, ids)

    (ours, real), (more, also) = both(2), both(4)
    assert (more - ours) / (also - real) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("fn", STEPS)
def test_functions_in_steps_are_as_many_kernels_as_pytorch_runs(fn: str) -> None:
    act = pytest.importorskip("transformers.activations").ACT2FN[fn]
    x = torch.randn(8, 8, requires_grad=True)

    class Counted(TorchDispatchMode):
        ran = 0

        def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ran += fn is not torch.ops.aten.detach.default
            return fn(*args, **(kwargs or {}))

    with Counted() as forward:
        y = act(x)
    ones = torch.ones_like(y)
    with Counted() as backward:
        torch.autograd.grad(y, x, ones)
    assert STEPS[fn][1:] == (forward.ran, backward.ran)
