"""Weights from elsewhere: by name, transposed, layer by layer, under any layout; what is missing is named."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.kernels.numpy_kernel import np_dtype
from mesh_tf_core.training.weights import read_weights, write_weights

B, L, D = mtf.Dim("batch", 2), mtf.Dim("length", 3), mtf.Dim("d_model", 4)
HEADS, KV, N = mtf.Dim("heads", 2), mtf.Dim("d_kv", 3), mtf.Dim("layers", 2)
RNG = np.random.default_rng(0)


def model(adapter: bool = False, dtype: str = "float32") -> mtf.Model:
    """Attention twice, and a head; with an adapter on the head."""
    g = mtf.Graph()
    x = g.input("x", [B, L, D], "float32")
    attend = layers.Attention(HEADS, KV)
    h = mtf.scan(lambda h: h + attend(h), x, N)
    w = g.variable("head", [D, mtf.Dim("out", 5)], mtf.Normal(0.1), dtype, "float32")
    y = mtf.einsum([h, w], [B, L, mtf.Dim("out", 5)])
    if adapter:
        low = mtf.Dim("rank", 2)
        down = g.variable("lora/down", [D, low], mtf.Normal(0.1))
        up = g.variable("lora/up", [low, mtf.Dim("out", 5)], mtf.ZEROS)
        y = y + mtf.einsum([mtf.einsum([h, down], [B, L, low]), up], y.shape)
    return mtf.Model(mtf.reduce_mean(mtf.square(y)), mtf.Adam(0.01))


def trainer(layout: str = "heads:x", **kinds: Any) -> mtf.Trainer:
    return mtf.Trainer(model(**kinds), "x:2", layout, engine="lockstep")


def torch_like() -> dict[str, np.ndarray]:
    """Weights as PyTorch's linear layers have them: [outputs, inputs], one array per layer."""
    found = {"head.weight": RNG.normal(size=(5, 4)).astype(np.float32)}
    for n in range(2):
        for name in "qkv":
            found[f"model.layers.{n}.attn.{name}_proj.weight"] = RNG.normal(size=(6, 4)).astype(np.float32)
        found[f"model.layers.{n}.attn.o_proj.weight"] = RNG.normal(size=(4, 6)).astype(np.float32)
    return found


NAMES = {
    "head": mtf.Source("head.weight", (1, 0)),
    **{f"attention/{n}": mtf.Source("model.layers.{}.attn." + n + "_proj.weight", (1, 0)) for n in "qkvo"},
}


def check_loaded(run: mtf.Trainer, given: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(run.engine.read("head"), given["head.weight"].T)
    for n in range(2):
        for name, shape in (("q", (4, 2, 3)), ("k", (4, 2, 3)), ("v", (4, 2, 3)), ("o", (2, 3, 4))):
            want = given[f"model.layers.{n}.attn.{name}_proj.weight"].T.reshape(shape)
            np.testing.assert_array_equal(run.engine.read(f"attention/{name}")[n], want)


@pytest.mark.parametrize("layout", ["", "heads:x", "d_model:x"])
def test_names_transposes_and_layers(layout: str) -> None:
    run, given = trainer(layout), torch_like()
    found = run.load({**given, "unused": np.zeros(3)}, NAMES)
    check_loaded(run, given)
    assert found.unused == ("unused",) and not found.new and len(found.variables) == 5
    assert np.isfinite(run.step({"x": np.ones((2, 3, 4), np.float32)})["loss"])


def test_a_name_for_each_of_a_stack() -> None:
    """Layer by layer, or over the first two dimensions, as experts have one array each; no other number."""
    given, split = torch_like(), trainer()
    names = {
        n: mtf.Source(tuple(s.name.format(i) for i in range(2)), s.transpose) if "{}" in s.name else s
        for n, s in NAMES.items()
    }
    split.load(given, names)
    check_loaded(split, given)
    each = tuple(f"row {i} {j}" for i in range(2) for j in range(4))
    turned = {n: x.reshape(2, 3) for n, x in zip(each, np.arange(48.0).reshape(8, 6), strict=True)}
    split.load({**given, **turned}, {**names, "attention/q": mtf.Source(each)})
    np.testing.assert_array_equal(split.engine.read("attention/q"), np.arange(48.0).reshape(2, 4, 2, 3))
    with pytest.raises(mtf.UserError, match=r"3 arrays are named for 'attention/q' .* one for each layer"):
        split.load({**given, **turned}, {**names, "attention/q": mtf.Source(each[:3])})


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files(suffix: str, tmp_path: Path) -> None:
    """Saved under one layout, loaded under another, bfloat16 too; without the optimizer's variables."""
    run = trainer(dtype="bfloat16")
    run.load(torch_like(), NAMES)
    run.save_weights(tmp_path / f"w{suffix}")
    other = trainer("d_model:x", dtype="bfloat16")
    assert set(other.load(tmp_path / f"w{suffix}").variables) == {
        "head", *(f"attention/{n}" for n in "qkvo")
    }  # fmt: skip
    for name in ("head", "attention/q", "attention/o"):
        np.testing.assert_array_equal(other.engine.read(name), run.engine.read(name))


def test_safetensors_of_others(tmp_path: Path) -> None:
    """Bytes as the format says, in several files of a folder."""
    given = torch_like()
    for n, (name, array) in enumerate(given.items()):
        size = array.nbytes
        header = f'{{"__metadata__": {{"format": "pt"}}, "{name}": {{"dtype": "F32", '
        header += f'"shape": [{array.shape[0]}, {array.shape[1]}], "data_offsets": [0, {size}]}}}}'
        content = len(header).to_bytes(8, "little") + header.encode() + array.tobytes()
        (tmp_path / f"model-{n}.safetensors").write_bytes(content)
    run = trainer()
    run.load(tmp_path, NAMES)
    check_loaded(run, given)


def test_a_base_checkpoint_into_a_model_with_adapters(tmp_path: Path) -> None:
    base = trainer()
    base.load(torch_like(), NAMES)
    base.save(tmp_path)
    run = trainer("d_model:x", adapter=True)
    before = run.engine.read("lora/down")
    found = run.load(tmp_path, new="^lora/")
    assert found.new == ("lora/down", "lora/up")
    np.testing.assert_array_equal(run.engine.read("head"), base.engine.read("head"))
    np.testing.assert_array_equal(run.engine.read("lora/down"), before)
    with pytest.raises(mtf.UserError, match=r"no weights for 'lora/down'.*'lora/up'.* new= for what keeps"):
        run.load(tmp_path)


def test_what_is_wrong_is_named_and_nothing_is_set(tmp_path: Path) -> None:
    run, given = trainer(), torch_like()
    before = run.engine.read("head")
    with pytest.raises(
        mtf.UserError, match=r"'head' \[d_model:4 out:5\] needs shape \[4, 5\], 'head.weight'"
    ):
        run.load(given, {**NAMES, "head": "head.weight"})
    with pytest.raises(mtf.UserError, match=r"names has 'haed', which is no variable; did you mean 'head'"):
        run.load(given, {"haed": "head.weight"})
    with pytest.raises(mtf.UserError, match="cannot be transposed"):
        run.load(given, {**NAMES, "head": mtf.Source("head.weight", (0, 2))})
    with pytest.raises(mtf.UserError, match=r"counts layers; 'head' .* has 0 dimensions that do"):
        run.load(given, {**NAMES, "head": "head.{}"})
    missing = {n: a for n, a in given.items() if "layers.1.attn.q" not in n}
    with pytest.raises(mtf.UserError, match=r"no weights for 'attention/q' \(looked for 'model.layers.1"):
        run.load(missing, NAMES)
    np.testing.assert_array_equal(run.engine.read("head"), before)
    run.save_weights(tmp_path / "w.safetensors")
    whole = (tmp_path / "w.safetensors").read_bytes()
    for content in (b"", whole[:7], whole[:40], whole[:-1], b"\xff" * 16, whole[:8] + b"[" + whole[9:]):
        (tmp_path / "torn.safetensors").write_bytes(content)
        with pytest.raises(mtf.UserError, match=r"torn.safetensors' cannot be read"):
            run.load(tmp_path / "torn.safetensors")
    with pytest.raises(mtf.UserError, match=r"must end in .npz or .safetensors"):
        run.save_weights(tmp_path / "w.bin")
    with pytest.raises(mtf.UserError, match=r"is no .npz or .safetensors file"):
        run.load(tmp_path / "w.bin")


def test_bfloat16_bytes(tmp_path: Path) -> None:
    run = trainer(dtype="bfloat16")
    run.save_weights(tmp_path / "w.safetensors")
    assert b'"head": {"dtype": "BF16"' in (tmp_path / "w.safetensors").read_bytes()
    assert run.engine.read("head").dtype == np_dtype("bfloat16")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_scalar_has_no_axis_in_a_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    scalar = Variable("temperature", mtf.Shape([]), "float32", mtf.ONES)
    write_weights(path, {"temperature": scalar}, lambda _: np.float32(0.5))
    ((name, array),), loaded = read_weights([scalar], path, {})
    assert (name, np.shape(array), float(array)) == ("temperature", (), 0.5)
    assert loaded.variables == ("temperature",)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_one_variable_is_held_at_a_time(suffix: str, tmp_path: Path) -> None:
    """However many are written, and without a copy of any."""
    size, names = 1 << 18, "abcdef"
    each = {n: Variable(n, mtf.Shape([mtf.Dim("n", size)]), "float32", mtf.ONES) for n in names}
    tracemalloc.start()
    try:
        write_weights(tmp_path / f"w{suffix}", each, lambda name: np.full(size, ord(name), np.float32))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * 4 * size
    made, _ = read_weights(each.values(), tmp_path / f"w{suffix}", {})
    assert {name: (array.shape, float(array[-1])) for name, array in made} == {
        n: ((size,), float(ord(n))) for n in names
    }
