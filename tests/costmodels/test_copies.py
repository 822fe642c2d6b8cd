"""What a compiled step does besides its operations: arrays laid out anew, small kernels between large ones,
small messages that travel with large ones; and attention that no library has a kernel for."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.compilers import compiler_of
from costmodels.pricing.explanation import formula
from costmodels.pricing.hidden import Line
from costmodels.pricing.items import Sent
from costmodels.pricing.pricer import price, pricer
from examples.transformer_lm import model as transformer
from mesh_tf_core import Dim, Layout, Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.lower import Options, lower
from tests.engines.programs import P, Q, every_collective

B, D = Dim("batch", 256), Dim("d", 512)


def copies(program: mtf.Program, hardware: str) -> list[Line]:
    return [line for line in price(program, load_hardware(hardware)).lines if line.name == "copy"]


def test_what_an_all_to_all_brings_is_written_once_more() -> None:
    program = every_collective("x:2", ("x",), "float32")
    found = copies(program, "tpu-v5e")
    assert [line.bytes for line in found] == [2 * 4 * P.size * Q.size / 2] * 2
    assert all(line.seconds > 0 and not line.axes for line in found)


@pytest.mark.parametrize("hardware", ["h100", "a100-eager", "cpu-local"])
def test_copies_are_known_of_these_compilers_alone(hardware: str) -> None:
    assert not copies(every_collective("x:2", ("x",), "float32"), hardware)


def test_what_virtual_cpus_gather_along_an_inner_dimension_is_written_once_more() -> None:
    """Read and written whole; along the outermost one XLA writes it in order at once."""
    found = copies(every_collective("x:2", ("x",), "float32"), "cpu-jax")
    assert [line.bytes for line in found] == [2 * 4 * P.size * Q.size]
    assert all(line.seconds > 0 and not line.axes for line in found)


def test_a_stack_of_what_a_collective_made_is_copied() -> None:
    """The sums of a row-split product are kept for backward; those of an unsplit one its kernel writes."""

    def stacked(layout: str) -> list[float]:
        g = mtf.Graph("m")
        x, layers = g.input("x", [B, D], "float32"), Dim("layers", 4)

        def layer(h: mtf.Tensor) -> mtf.Tensor:
            f = Dim("f", 128)
            wide = mtf.einsum([h, g.variable("up", [D, f], mtf.Normal(0.1))], [B, f])
            narrow = mtf.einsum([wide, g.variable("down", [f, D], mtf.Normal(0.1))], [B, D])
            return mtf.tanh(narrow) * narrow

        y = mtf.scan(layer, x, layers)
        mtf.minimize(mtf.reduce_mean(y), mtf.optimizers.SGD(0.1))
        program = lower(g, Mesh("x:2"), Layout(layout), {"y": y})
        lines = price(program, load_hardware("tpu-v5e")).lines
        return sorted(x.bytes for x in lines if x.name == "stack" and x.origin.phase == Phase.FORWARD)

    once = 4.0 * 4 * B.size * D.size
    assert stacked("f:x").count(2 * once) == 1 and stacked("f:x").count(once) == stacked("").count(once) - 1


def test_gradients_of_strided_convolutions_are_not_written_apart() -> None:
    n, h, w, c, o = (Dim(*d) for d in (("n", 8), ("h", 16), ("w", 16), ("c", 128), ("o", 256)))
    taps = [Dim("th", 3), Dim("tw", 3)]

    g = mtf.Graph("m")
    x = g.input("x", [n, h, w, c], "float32")
    y = mtf.conv(x, g.variable("k", [*taps, c, o], mtf.Normal(0.1)), [h, w], taps, c, 2)
    (dx,) = mtf.gradients(mtf.reduce_sum(y * y), [x])
    assert not copies(lower(g, Mesh("x:1"), Layout(), {"dx": dx}), "tpu-v5e")


def test_what_follows_a_reduction_alone_is_a_kernel_of_its_own_on_tpus() -> None:
    """A normalisation: two sums, what is made of each of them, and the result."""
    g = mtf.Graph("m")
    out = mtf.layer_norm(g.input("x", [B, D], "float32"), "d")
    program = lower(g, Mesh("x:2"), Layout(), {"out": out})
    whole = {
        h: [x.item.quantity.elements for x in price(program, load_hardware(h)).lines]
        for h in ("tpu-v5e", "h100")
    }
    assert whole["h100"] == [B.size * D.size] * 3
    assert whole["tpu-v5e"].count(B.size * D.size) == 3 and whole["tpu-v5e"].count(B.size) == 2


def gathers(hardware: str) -> dict[tuple[int, ...], tuple[Sent, float, str]]:
    """The gathers of a step whose weights lie split over 8 devices, by what a device puts in."""
    sizes = {
        "layers": 2,
        "d_model": 512,
        "d_kv": 64,
        "heads": 8,
        "d_ff": 2048,
        "vocab": 512,
        "batch": 8,
        "length": 128,
    }
    model = transformer(**sizes)
    trained = [
        v.name for v in model.step_graph and model.graph.variables.values() if v.trainable and len(v.shape)
    ]
    program = model.lower(Mesh("data:8"), Layout("batch:data"), Options(dict.fromkeys(trained, 3)))
    prices = pricer(load_hardware(hardware), program)
    return {
        x.item.payloads: (x.item, x.seconds, formula(prices, x))
        for x in prices.cost(program).lines
        if isinstance(x.item, Sent) and x.name == "all_gather"
    }


def test_small_weights_are_gathered_with_large_ones_on_gpus() -> None:
    found = gathers("h100")
    scale, large = found[(4 * 512 // 8,)], found[max(found)]
    assert scale[0].joined and "sent together with a larger message" in scale[2] and not large[0].joined
    alone = gathers("tpu-v5e")[(4 * 512 // 8,)]
    assert not alone[0].joined
    assert scale[1] < 0.05 * large[1]


def attention(hardware: str, **more: object) -> list[str]:
    sizes = {
        "layers": 1,
        "d_model": 32,
        "d_kv": 16,
        "heads": 2,
        "d_ff": 32,
        "vocab": 32,
        "batch": 2,
        "length": 128,
    }
    model = transformer(**{**sizes, "dtype": "bfloat16", **more})
    program = model.lower(Mesh("data:2"), Layout("batch:data"))
    return [*compiler_of(load_hardware(hardware)).lacking(program)]


@pytest.mark.parametrize(
    ("hardware", "more", "reason"),
    [
        ("tpu-v5e", {"dropout": 0.1}, "dropout"),
        ("h100", {"dropout": 0.1}, "dropout"),
        ("tpu-v5e", {"length": 100}, "100 queries and 100 keys, which must be multiples of 128"),
        ("h100", {"dtype": "float32"}, "float32"),
    ],
)
def test_attention_without_a_kernel_is_said(hardware: str, more: dict[str, object], reason: str) -> None:
    (said,) = attention(hardware, **more)
    assert f"supports attention with {reason} (" in said and "blocks" in said


@pytest.mark.parametrize(
    ("hardware", "more"),
    [
        ("tpu-v5e", {}),
        ("h100", {}),
        ("h100", {"length": 100}),
        ("tpu-v5e", {"dtype": "float32"}),
        ("a100-eager", {"dropout": 0.1}),
        ("cpu-local", {"dropout": 0.1}),
    ],
)
def test_nothing_is_said_of_attention_that_has_one(hardware: str, more: dict[str, object]) -> None:
    assert attention(hardware, **more) == []
