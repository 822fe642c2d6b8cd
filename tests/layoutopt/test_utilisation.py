"""Model FLOPs against formulas from outside; MFU and throughput of predictions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mesh_tf_core as mtf
from benchmarks import large_models
from benchmarks.llama_picks import published_mfu
from benchmarks.published_tpu import maxtext
from costmodels import load_hardware
from costmodels.hardware import machine_of
from examples.bert import model as bert
from examples.moe_lm import model as mixture
from examples.resnet import model as resnet
from examples.transformer_lm import model as transformer
from layoutopt.importers.huggingface import from_huggingface
from layoutopt.optimize.evaluation.evaluation import unsplit_flops
from layoutopt.optimize.evaluation.evaluator import evaluate
from mesh_tf_core import layers as nn

SIZES: dict[str, Any] = {
    "layers": 3,
    "d_model": 64,
    "d_kv": 16,
    "heads": 4,
    "d_ff": 256,
    "vocab": 512,
    "batch": 4,
    "length": 32,
    "dtype": "bfloat16",
}
TOKENS = 4 * 32
MESH, LAYOUT = mtf.Mesh("data:2;model:2"), mtf.Layout("batch:data;d_ff:model")
LAYOUT_DATA = mtf.Layout("batch:data")
PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "huggingface_losses.json").read_text())[
    "models"
]["mixtral"]["config"]


def total(model: mtf.Model) -> float:
    return sum(unsplit_flops(model).values())


def lm_parameters(kv_heads: int, matrices: int) -> int:
    """Weights that a token is multiplied with: not the embedding, which is a lookup, nor scales."""
    d, kv, layers = SIZES["d_model"], SIZES["d_kv"], SIZES["layers"]
    attention = 2 * d * kv * (SIZES["heads"] + kv_heads)
    return layers * (attention + matrices * d * SIZES["d_ff"]) + d * SIZES["vocab"]


def attention_flops(pairs: int) -> int:
    """Forward two products over d_kv for every pair and head, backward twice as many."""
    return 12 * SIZES["layers"] * SIZES["heads"] * SIZES["d_kv"] * SIZES["batch"] * pairs


@pytest.mark.parametrize(
    ("given", "parameters", "pairs"),
    [
        ({}, lm_parameters(4, 2), 32 * 33 // 2),
        ({"attention": "plain"}, lm_parameters(4, 2), 32 * 33 // 2),
        ({"kv_heads": 2, "gated": True, "positions": "rotary"}, lm_parameters(2, 3), 32 * 33 // 2),
        ({"tied": True, "positions": "relative", "dropout": 0.1}, lm_parameters(4, 2), 32 * 33 // 2),
        ({"optimizer": "adafactor"}, lm_parameters(4, 2), 32 * 33 // 2),
    ],
)
def test_a_language_model_is_6nd_and_attention(given: dict[str, Any], parameters: int, pairs: int) -> None:
    assert unsplit_flops(transformer(**{**SIZES, **given})) == {
        "bfloat16": 6 * parameters * TOKENS + attention_flops(pairs)
    }


def test_a_window_counts_the_pairs_in_it() -> None:
    def flops(**mask: Any) -> float:
        attend = nn.Attention(mtf.Dim("heads", 4), mtf.Dim("d_kv", 16), **mask)
        x = mtf.Graph("window").input(
            "x", [mtf.Dim("b", 2), mtf.Dim("length", 32), mtf.Dim("d_model", 8)], "float32"
        )
        return total(mtf.Model(mtf.reduce_mean(attend(x))))

    seen = sum(min(position + 1, 5) for position in range(32))
    assert flops() - flops(causal=True, window=5) == 12 * 2 * 4 * 16 * (32 * 32 - seen)


def test_a_residual_network_by_hand() -> None:
    """Three times the forward products, without the gradient of the image, which nobody asks for."""
    batch, size, stages, blocks = 8, 32, 3, 2
    first = batch * size**2 * 9 * 1 * 16
    products, width, side = first, 16, size
    for stage in range(stages):
        out, side = 16 << stage, size >> stage
        places = batch * side**2
        products += places * 9 * (width * out + (2 * blocks - 1) * out * out)
        products += places * width * out if stage else 0
        width = out
    products += batch * width * 10
    made = resnet(batch=batch, size=size, stages=stages, blocks=blocks)
    assert unsplit_flops(made) == {"float32": 2 * (3 * products - first)}


def test_a_mixture_counts_what_its_experts_do() -> None:
    """Not the products with ones and zeros that bring tokens there and back. The router works in float32."""
    sizes = {**SIZES, "layers": 2, "length": 64, "experts": 4, "capacity_factor": 1.0, "chosen": 2}
    d, tokens, pairs = 64, 4 * 64, 64 * 65 // 2
    active = 4 * d * 64 + 2 * 2 * d * 256
    found = unsplit_flops(mixture(**sizes))
    assert found["float32"] == 6 * tokens * 2 * d * 4
    assert found["bfloat16"] == 6 * tokens * (2 * active + d * 512) + 12 * 2 * 4 * 16 * 4 * pairs


def test_words_that_a_product_with_ones_chooses_are_looked_up() -> None:
    """BERT passes on its masked positions so."""
    sizes = {"layers": 1, "d_model": 32, "d_kv": 8, "heads": 4, "d_ff": 64, "vocab": 128}
    found = bert(**sizes, batch=2, length=20)
    masked = found.graph.inputs["targets"].shape.size
    in_layer = 2 * 20 * (4 * 32 * 32 + 2 * 32 * 64)
    after = masked * (32 * 32 + 32 * 128)
    assert total(found) == 6 * (in_layer + after) + 12 * 4 * 8 * 2 * 20 * 20


@pytest.mark.parametrize(("batch", "out"), [(1, 4), (4, 1)])
def test_a_vectors_product_counts_and_a_scale_does_not(batch: int, out: int) -> None:
    """One example, or one result. Nobody asks for the gradient of what is fed."""
    g = mtf.Graph("two_layers")
    b, d, h, o = mtf.Dim("batch", batch), mtf.Dim("d", 8), mtf.Dim("h", 16), mtf.Dim("out", out)
    x = g.input("x", [b, d], "float32")
    y = mtf.einsum([x, g.variable("w", [d, h], mtf.ZEROS)], [b, h]) * g.variable("s", [h], mtf.ZEROS)
    z = mtf.einsum([y, g.variable("v", [h, o], mtf.ZEROS)], [b, o])
    assert total(mtf.Model(mtf.reduce_mean(z))) == 2 * batch * (2 * 8 * 16 + 3 * 16 * out)


def test_recomputation_microbatches_stages_and_layouts_change_no_model_flops() -> None:
    """Three layers on two stages leave one of four slots empty."""
    model, hardware = transformer(**SIZES), load_hardware("tpu-v5p")
    piped = [("layers:data", mtf.Options(microbatches=2, schedule=s)) for s in ("gpipe", "1f1b")]
    kinds = (
        ("batch:data;d_ff:model", mtf.Options()),
        ("batch:data;d_ff:model", mtf.Options(recompute=frozenset({"layers"}))),
        ("batch:data;d_ff:model", mtf.Options(microbatches=2)),
        ("batch:data;d_ff:model", mtf.Options({"feed_forward/wi": 3})),
        ("length:model", mtf.Options()),
        *piped,
    )
    found = [evaluate(model, MESH, mtf.Layout(layout), hardware, options) for layout, options in kinds]
    assert len({e.predicted.model_flops for e in found}) == 1
    assert len({e.predicted.flops_per_device for e in found}) > 4
    again = found[1].predicted
    assert again.flops_per_device > found[0].predicted.flops_per_device and again.mfu < found[0].predicted.mfu


def in_layer(made: Callable[..., Any], *names: str) -> Callable[[float], float]:
    """A layer's model FLOPs over capacity factors."""

    def flops(capacity: float) -> float:
        x = mtf.Graph("layer").input(
            "x", [*(mtf.Dim(n, 16) for n in names), mtf.Dim("d_model", 8)], "float32"
        )
        y, loss = made(capacity)(x)
        return total(mtf.Model(mtf.reduce_mean(y) + loss))

    return flops


ROUTERS: dict[str, Callable[[float], Any]] = {
    "switch": lambda c: nn.TokenChoice(c),
    "two": lambda c: nn.TokenChoice(c, chosen=2),
    "overflow": lambda c: nn.TokenChoice(c, chosen=2, later="overflow"),
    "best": lambda c: nn.TopExperts(c, chosen=2),
}
FEW, WIDE = mtf.Dim("experts", 4), mtf.Dim("d_ff", 32)
MIXTURES = {
    **{
        n: in_layer(lambda c, r=r: nn.MixtureOfExperts(FEW, WIDE, r(c)), "batch", "length")
        for n, r in ROUTERS.items()
    },
    "rows and columns": in_layer(
        lambda c: nn.MixtureOfExperts2D(
            mtf.Dim("rows", 2), mtf.Dim("columns", 4), WIDE, nn.TokenChoice(c, chosen=2), nn.TokenChoice(c)
        ),
        "outer_batch",
        "batch",
        "length",
    ),
    "attention": in_layer(
        lambda c: nn.ExpertsAttention(
            nn.Attention(mtf.Dim("heads", 2), mtf.Dim("d_kv", 4)), FEW, nn.TokenChoice(c)
        ),
        "batch",
        "length",
    ),
    "published": lambda c: total(from_huggingface(PUBLISHED, length=32, capacity_factor=c)),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_the_room_of_experts_changes_no_model_flops(name: str) -> None:
    """Tokens times the experts of a token, however many places stay empty."""
    least, *others = (MIXTURES[name](capacity) for capacity in (1.0, 1.25, 2.0, 4.0))
    assert others == pytest.approx([least] * 3, rel=1e-12)


@pytest.mark.parametrize("window", [0, 8])
def test_attention_counts_the_pairs_that_see_each_other_in_every_form(window: int) -> None:
    def flops(kind: Any, **form: Any) -> float:
        attend = kind(mtf.Dim("heads", 4), mtf.Dim("d_kv", 16), causal=True, window=window, **form)
        dims = [mtf.Dim("b", 2), mtf.Dim("length", 32), mtf.Dim("d_model", 8)]
        return total(mtf.Model(mtf.reduce_mean(attend(mtf.Graph("pairs").input("x", dims, "float32")))))

    fused = flops(nn.Attention)
    assert flops(nn.Attention, attention="plain") == pytest.approx(fused, rel=1e-12)
    if window:
        assert flops(nn.LocalAttention) == pytest.approx(fused, rel=1e-12)


def test_what_a_reversible_stack_computes_again_is_no_model_work() -> None:
    """Two matrices a layer: three products each, whatever runs again."""
    g = mtf.Graph("reversible")
    b, d, again = mtf.Dim("batch", 4), mtf.Dim("d", 8), mtf.Dim("d_again", 8)
    x = g.variable("x", [b, d], mtf.ZEROS)

    def half(name: str) -> Callable[[mtf.Tensor], mtf.Tensor]:
        def product(x: mtf.Tensor) -> mtf.Tensor:
            y = mtf.einsum([x, g.variable(name, [d, again], mtf.ZEROS)], [b, again])
            return mtf.rename(y, d_again="d")

        return product

    y, z = mtf.reversible_scan(half("f"), half("g"), x, x, mtf.Dim("layers", 3))
    model = mtf.Model(mtf.reduce_mean(mtf.square(y + z)))
    assert total(model) == 3 * 2 * 3 * 2 * 4 * 8 * 8
    assert evaluate(model, mtf.Mesh("data:2"), mtf.Layout(), load_hardware("tpu-v4")).predicted.mfu < 1


def test_mfu_is_model_flops_over_the_peak_of_all_chips() -> None:
    model = transformer(**SIZES)
    for name, peak in (("tpu-v5p", 459e12), ("h100", 989e12)):
        found = evaluate(model, MESH, LAYOUT, load_hardware(name)).predicted
        assert found.model_flops == total(model)
        assert found.mfu == pytest.approx(found.model_flops / (4 * peak * found.step_seconds), rel=1e-12)
        assert found.tokens_per_second == pytest.approx(TOKENS / found.step_seconds, rel=1e-12)
        assert found.examples_per_second == pytest.approx(4 / found.step_seconds, rel=1e-12)


def test_each_dtype_counts_against_its_own_peak() -> None:
    """float32 products of an A100 run at 156 TFLOP/s; a TPU multiplies them in bfloat16."""
    model = transformer(**{**SIZES, "dtype": "float32"})
    for name, peak in (("a100", 156e12), ("tpu-v4", 275e12)):
        found = evaluate(model, MESH, LAYOUT, load_hardware(name)).predicted
        assert found.mfu == pytest.approx(found.model_flops / (4 * peak * found.step_seconds), rel=1e-12)


def test_virtual_devices_share_the_peak_of_their_cores() -> None:
    """One device that does nothing else reaches as much of the machine as eight that share two cores."""
    hardware, model = load_hardware("cpu-local"), transformer(**{**SIZES, "dtype": "float32"})
    mesh = mtf.Mesh("data:4;model:2")
    found = evaluate(model, mesh, mtf.Layout("batch:data"), hardware).predicted
    cores = hardware.chip.host_cores.value
    peak = hardware.peak_flops("float32") * min(8, cores)
    assert found.mfu == pytest.approx(found.model_flops / (peak * found.step_seconds), rel=1e-12)


def test_a_model_without_tokens_has_examples_only() -> None:
    found = evaluate(resnet(batch=8), MESH, mtf.Layout("batch:data"), load_hardware("tpu-v4")).predicted
    assert found.tokens_per_second is None and "tokens_per_second" not in found.to_json()
    assert found.examples_per_second == pytest.approx(8 / found.step_seconds, rel=1e-12)
    assert found.speed.endswith(" examples/s")


def test_a_model_names_its_token_dimensions() -> None:
    g = mtf.Graph("named")
    ids = g.input("ids", [mtf.Dim("batch", 4), mtf.Dim("length", 6)])
    loss = mtf.reduce_mean(ids.cast("float32") * g.variable("w", [], mtf.ZEROS))
    assert mtf.Model(loss, token_dims=("length", "batch")).tokens == 24
    assert mtf.Model(loss).tokens is None
    speech = mtf.Graph("speech")
    heard = speech.input("audio", [mtf.Dim("batch", 4), mtf.Dim("length", 50), mtf.Dim("mels", 8)], "float32")
    text = speech.input("text", [mtf.Dim("batch", 4), mtf.Dim("length", 6)])
    both = mtf.reduce_mean(heard) + mtf.reduce_mean(text.cast("float32"))
    assert mtf.Model(both, token_dims=("batch", "length")).tokens == 24  # not those of spectra
    with pytest.raises(mtf.UserError, match="Model: no input has the token_dims batch, words; name"):
        mtf.Model(loss, token_dims=("batch", "words"))


def test_a_plan_says_where_it_claims_more_than_anyone_published() -> None:
    """By name of the run, and what its price leaves out; a chip of which no run is known says nothing."""
    sizes = {**SIZES, "d_model": 4096, "d_kv": 128, "heads": 32, "d_ff": 16384, "batch": 16, "length": 2048}
    found = {}
    for chip in ("tpu-v6e", "tpu-v6e, published_mfu=1"):
        found[chip] = evaluate(transformer(**sizes), mtf.Mesh("data:2"), LAYOUT_DATA, load_hardware(chip))
    above, below = found.values()
    assert above.predicted.mfu > 0.4 and below.notes == ()
    (note,) = above.notes
    assert re.search(
        r"^the predicted MFU of [\d.]+% is above .* \(40.0%: AI-Hypercomputer/tpu-recipes .*\);", note
    )
    assert (
        "0.0% of the step on recomputation" in note
        and "does not model input pipelines, host overhead and stragglers" in note
    )
    options = mtf.Options(recompute=frozenset({"layers"}))
    low = load_hardware("tpu-v6e, published_mfu=0.1")
    again = evaluate(transformer(**sizes), mtf.Mesh("data:2"), LAYOUT_DATA, low, options)
    assert "0.0% of the step on recomputation" not in again.notes[0]
    assert load_hardware("tpu-v7").chip.published_mfu is None


@pytest.mark.parametrize("run", ["1 x v5p-128 32B ici fsdp=16 tp=4", "1 x v5e-256 32B ici fsdp=256"])
def test_the_best_published_mfu_is_that_of_a_published_run(run: str) -> None:
    (row,) = [r for r in maxtext() if r.name == run]
    known = load_hardware(row.hardware).chip.published_mfu
    assert known is not None and published_mfu(row) == pytest.approx(known.value, abs=5e-4)


def test_what_runs_again_counts_as_the_hardwares() -> None:
    """A layer that runs again makes its products of forward twice, but for the last one, which backward does
    not read; the logits once. A chip of TPU v3 is two devices."""
    model, machine = transformer(**SIZES, attention="plain"), load_hardware("tpu-v3")
    mesh, again = mtf.Mesh("data:2"), mtf.Options(recompute=frozenset({"layers"}))
    plain, found = (
        evaluate(model, mesh, LAYOUT_DATA, machine, options).predicted for options in (mtf.Options(), again)
    )
    assert plain.hfu is None and found.hfu is not None and found.mfu is not None
    hidden = attention_flops(32 * 32) - attention_flops(32 * 33 // 2)
    layers = total(model) + hidden - 6 * SIZES["d_model"] * SIZES["vocab"] * TOKENS
    twice = layers / 3 - 2 * SIZES["layers"] * SIZES["d_model"] * SIZES["d_ff"] * TOKENS
    assert found.hfu / found.mfu == pytest.approx(1 + (twice + hidden) / total(model), rel=1e-3)
    assert found.tokens_per_second_per_chip == pytest.approx(TOKENS / found.step_seconds)
    assert found.model_flops_per_second_per_chip == pytest.approx(total(model) / found.step_seconds)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2", "zb-h1", "1f1b:layers=3+5"])
def test_stages_of_their_own_programs_run_what_the_layers_and_one_head_are(schedule: str) -> None:
    """Neither ticks in which a stage waits, nor its empty places, nor heads on every stage."""
    model, machine = transformer(**{**SIZES, "layers": 8}), machine_of("h100", "megatron")
    again = {"recompute": frozenset({"layers"})}
    whole = evaluate(model, mtf.Mesh("data:2"), LAYOUT_DATA, machine, mtf.Options(**again)).predicted
    options = mtf.Options(**again, schedule=schedule, microbatches=4)
    layout = mtf.Layout("layers:pipe")
    found = evaluate(model, mtf.Mesh("pipe:2"), layout, machine, options).predicted
    assert whole.hfu and whole.mfu and found.hfu and found.mfu
    assert found.hfu / found.mfu == pytest.approx(whole.hfu / whole.mfu, rel=1e-6)


def test_products_that_only_choose_are_said() -> None:
    """Trainers sort tokens by expert; the share of one-hot products stands with a price, and grows with the
    length at the same number of tokens."""

    def chosen_by_products(batch: int, length: int) -> mtf.Model:
        g = mtf.Graph("one_hot")
        dims = mtf.Dim("batch", batch), mtf.Dim("length", length), mtf.Dim("d_model", 512)
        router = nn.TokenChoice(1.25, chosen=2)
        mixture = nn.MixtureOfExperts(mtf.Dim("experts", 16), mtf.Dim("d_ff", SIZES["d_ff"]), router)
        y, balance = mixture(g.input("x", [*dims], "bfloat16"))
        return mtf.Model(mtf.reduce_mean(y.cast("float32") * y.cast("float32")) + balance, mtf.SGD(0.1))

    def shares(made: mtf.Model) -> list[float]:
        of = evaluate(made, mtf.Mesh("data:2"), LAYOUT_DATA, load_hardware("h100"))
        return [float(f[1]) for note in of.notes if (f := re.search("one-hot.* take ([0-9.]+)% of", note))]

    (short,), (long,) = shares(chosen_by_products(64, 512)), shares(chosen_by_products(16, 2048))
    assert 5 < short < long < 100
    assert not shares(transformer(**SIZES)) and not shares(mixture(**{**SIZES, "experts": 16}))


def test_published_steps_count_the_flops_of_the_predicted_ones() -> None:
    """MFU times seconds, by the peaks of the same products, is one number for a case."""
    cases = [
        c for c in json.loads(large_models.OUT.read_text(encoding="utf-8")).values() if c.get("published")
    ]
    assert len(cases) >= 3
    for case in cases:
        own, pick, recipe = case["published"], case["pick"], case["practice"]
        least = [own["mfu"] * own["seconds"], *(p["mfu"] * p["step_seconds"] for p in (pick, recipe))]
        assert least == pytest.approx([least[0]] * 3, rel=1e-6)
