"""Layers that predict further tokens: as published, and as transformers' own layers compute them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from layoutopt.importers.huggingface import from_huggingface
from mesh_tf_core.engines.lockstep import LockstepEngine

DATA = Path(__file__).parents[1] / "data"
LOSSES = json.loads((DATA / "huggingface_losses.json").read_text())["models"]
PUBLISHED = json.loads((DATA / "published_configurations.json").read_text())["models"]
COUNTS = json.loads((DATA / "huggingface_counts.json").read_text())["models"]
RNG = np.random.default_rng(0)
BATCH = {n: RNG.integers(0, 32, (2, 12)).astype(np.int32) for n in ("tokens", "targets")}


@pytest.mark.parametrize(
    ("name", "count"), [("MiMo-7B-Base", 7_833_409_536), ("Qwen3-Next-80B-A3B", 81_324_862_720)]
)
def test_parameters_are_those_of_the_published_weights(name: str, count: int) -> None:
    config = (PUBLISHED | COUNTS)[name]["config"]
    model = from_huggingface(config, mtp=1)
    assert model.parameters == count
    assert not any("multi-token" in remark for remark in model.remarks)


def run(model: mtf.Model, mesh: str = "one:1", layout: str = "") -> tuple[float, dict[str, Any]]:
    """The loss, and the weights that it is of."""
    engine = LockstepEngine(mtf.lower(model.graph, mtf.Mesh(mesh), mtf.Layout(layout), {"loss": model.loss}))
    engine.initialize()
    weights = {}
    for number, v in enumerate(model.graph.variables.values()):
        array = np.random.default_rng(number).normal(scale=0.3, size=v.shape.sizes).astype(np.float32)
        engine.write(v.name, array)
        weights[v.name] = array
    return float(engine.step(BATCH)["loss"]), weights


def test_losses_are_those_of_layers_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.nn.functional import cross_entropy, rms_norm

    config = LOSSES["qwen3"]["config"] | {"attention_bias": False}
    found, w = run(from_huggingface(config, batch=2, length=12, mtp=2, mtp_weight=0.1))
    made = transformers.AutoConfig.for_model(
        **{**config, "num_hidden_layers": config["num_hidden_layers"] + 2}
    )
    made._attn_implementation = "eager"
    module = transformers.AutoModelForCausalLM.from_config(made).eval()
    t = {n: torch.from_numpy(x) for n, x in w.items()}
    layers, first = module.model.layers, config["num_hidden_layers"]

    def put(layer: Any, top: str, number: int) -> None:
        for own, their in (
            *((f"attention/{n}", getattr(layer.self_attn, f"{n}_proj").weight) for n in "qkvo"),
            *((f"attention/{n}_norm/scale", getattr(layer.self_attn, f"{n}_norm").weight) for n in "qk"),
            ("attention_norm/scale", layer.input_layernorm.weight),
            ("feed_forward_norm/scale", layer.post_attention_layernorm.weight),
            ("feed_forward/in/0/weight", layer.mlp.gate_proj.weight),
            ("feed_forward/in/1/weight", layer.mlp.up_proj.weight),
            ("feed_forward/out/weight", layer.mlp.down_proj.weight),
        ):
            x = t[f"{top}/{own}"][number]
            into = own.endswith("/o")
            x = x if x.ndim < 2 else x.reshape(-1, x.shape[-1]) if into else x.reshape(x.shape[0], -1)
            their.copy_(x.T if x.ndim > 1 else x)

    with torch.no_grad():
        for i in range(first):
            put(layers[i], "layers", i)
        for k in (1, 2):
            put(layers[first + k - 1], f"mtp_{k}/layers", 0)
        table, head = t["embedding/tokens"], t.get("output/projection")
        head = table.T if head is None else head
        tokens, targets = (torch.from_numpy(BATCH[n]).long() for n in ("tokens", "targets"))
        place = torch.arange(12)[None]
        mask = torch.full((12, 12), -1e9).triu(1)[None, None]

        def norm(x: Any, name: str) -> Any:
            return rms_norm(x, (x.shape[-1],), t[f"{name}/scale"], config["rms_norm_eps"])

        def step(x: Any, layer: Any) -> Any:
            about = module.model.rotary_emb(x, place)
            return layer(x, attention_mask=mask, position_embeddings=about, position_ids=place)

        x = table[tokens]
        for layer in layers[:first]:
            x = step(x, layer)
        x = norm(x, "final_norm")
        loss = cross_entropy((x @ head).flatten(0, 1), targets.flatten())
        for k in (1, 2):
            top = f"mtp_{k}"
            seen = torch.zeros_like(targets)
            seen[:, : 13 - k] = targets[:, k - 1 :]
            x = (
                norm(table[seen], f"{top}/tokens_norm") @ t[f"{top}/tokens"]
                + norm(x, f"{top}/hidden_norm") @ t[f"{top}/hidden"]
            )
            x = norm(step(x, layers[first + k - 1]), f"{top}/final_norm")
            logits = (x @ head)[:, : 12 - k]
            loss += 0.05 * cross_entropy(logits.flatten(0, 1), targets[:, k:].flatten())
    assert found == pytest.approx(float(loss), rel=5e-6)


@pytest.mark.parametrize("layout", ["batch:data;vocab:model", "length:data;d_expert:model", "heads:data"])
def test_layouts_give_the_same_loss(layout: str) -> None:
    """Neighbours along a split length exchange the tokens further on."""
    model = from_huggingface(LOSSES["mixtral"]["config"], batch=2, length=12, mtp=1, balance=0.01)
    whole, _ = run(model)
    found, _ = run(model, "data:2;model:2", layout)
    assert found == pytest.approx(whole, rel=1e-5)


def test_what_predicts_one_token_is_refused() -> None:
    for name in ("roberta", "t5", "clip"):
        with pytest.raises(mtf.UserError, match=r"mtp=1.*; remove mtp"):
            from_huggingface(LOSSES[name]["config"], mtp=1)
    with pytest.raises(mtf.UserError, match="needs texts of more than 2 tokens"):
        from_huggingface(LOSSES["llama"]["config"], mtp=2, length=2)
    with pytest.raises(mtf.UserError, match="mtp is -1; give"):
        from_huggingface(LOSSES["llama"]["config"], mtp=-1)
