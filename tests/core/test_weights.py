"""Weights from elsewhere: by name, transposed, layer by layer, under any layout; what is missing is named."""

from __future__ import annotations

import io
import json
import os
import re
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.training import array_files
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


@pytest.mark.parametrize("name", ["{0}", "{head", "{x!r:>9}"])
def test_other_braces_of_a_name_are_its_own(name: str) -> None:
    run, given = trainer(), torch_like()
    given[name] = given.pop("head.weight")
    run.load(given, {**NAMES, "head": mtf.Source(name, (1, 0))})
    np.testing.assert_array_equal(run.engine.read("head"), given[name].T)


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
    with pytest.raises(
        mtf.UserError, match=r"names has 3 arrays for 'attention/q' .* one array for each layer"
    ):
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
    with pytest.raises(
        mtf.UserError,
        match=r"no weights for 'lora/down'.*'lora/up'.*; map them with names=",
    ):
        run.load(tmp_path)


def test_what_is_wrong_is_named_and_nothing_is_set(tmp_path: Path) -> None:
    run, given = trainer(), torch_like()
    before = run.engine.read("head")
    with pytest.raises(
        mtf.UserError, match=r"'head' \[d_model:4 out:5\] needs an array of shape \[4, 5\], but 'head.weight'"
    ):
        run.load(given, {**NAMES, "head": "head.weight"})
    with pytest.raises(mtf.UserError, match=r"'haed' in `names` is not a variable; did you mean 'head'"):
        run.load(given, {"haed": "head.weight"})
    with pytest.raises(mtf.UserError, match="is not a permutation of the axes"):
        run.load(given, {**NAMES, "head": mtf.Source("head.weight", (0, 2))})
    with pytest.raises(mtf.UserError, match="has only 0 stacked dimensions; use one placeholder for each"):
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
    with pytest.raises(mtf.UserError, match=r"is neither a .npz or .safetensors file nor a directory"):
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


# -- damaged files, and values that are not numbers --

F32, ZEROS8 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, b"\0" * 8


def packed(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def nothing(at: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [0], "data_offsets": [at, at]}


OF_THE_LIBRARY = {
    "whole": (packed({"w": F32}, ZEROS8), True),
    "padded header": (packed(json.dumps({"w": F32}).encode() + b"   ", ZEROS8), True),
    "about it": (packed({"__metadata__": {"format": "pt"}, "w": F32}, ZEROS8), True),
    "an array of nothing": (packed({"z": nothing(0), "w": F32}, ZEROS8), True),
    "another order": (packed({"v": {**F32, "data_offsets": [8, 16]}, "w": F32}, ZEROS8 * 2), True),
    "a byte before": (packed({"w": F32}, b"x" + ZEROS8), False),
    "a byte after": (packed({"w": F32}, ZEROS8 + b"x"), False),
    "a byte less": (packed({"w": F32}, ZEROS8[1:]), False),
    "a gap": (packed({"w": F32, "v": {**F32, "data_offsets": [12, 20]}}, ZEROS8 + b"1234" + ZEROS8), False),
    "an overlap": (packed({"w": F32, "v": {**F32, "data_offsets": [4, 12]}}, ZEROS8 + b"1234"), False),
    "all at one place": (packed({"w": F32, "v": F32}, ZEROS8), False),
    "a nothing inside": (packed({"z": nothing(4), "w": F32}, ZEROS8), False),
    "too few bytes": (packed({"w": {**F32, "shape": [1]}}, ZEROS8), False),
    "backwards": (packed({"w": {**F32, "data_offsets": [8, 0]}}, ZEROS8), False),
    "a size with a point": (packed({"w": {**F32, "shape": [2.0]}}, ZEROS8), False),
    "a size of true": (packed({"w": {**F32, "shape": [2, True]}}, ZEROS8), False),
    "about it a number": (packed({"__metadata__": {"a": 1}, "w": F32}, ZEROS8), False),
    "about it a list": (packed({"__metadata__": [1], "w": F32}, ZEROS8), False),
    "half a letter": (packed(b'{"\\ud800":' + json.dumps(F32).encode() + b"}", ZEROS8), False),
    "UTF-16": (packed(json.dumps({"w": F32}).encode("utf-16-le"), ZEROS8), False),
    "a byte order mark": (packed(b"\xef\xbb\xbf" + json.dumps({"w": F32}).encode(), ZEROS8), False),
    "zeros after the header": (packed(json.dumps({"w": F32}).encode() + b"\0\0", ZEROS8), False),
    "NaN in the header": (packed(json.dumps({"w": {**F32, "x": np.nan}}).encode(), ZEROS8), False),
    "a size twice": (packed(b'{"w":{"dtype":"F32",' + json.dumps(F32)[1:].encode() + b"}", ZEROS8), False),
}  # fmt: skip
"""Files, and whether the official library (safetensors 0.8.0) loads them."""


@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_what_the_official_library_refuses_is_refused(name: str, tmp_path: Path) -> None:
    content, loads = OF_THE_LIBRARY[name]
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    if loads:
        np.testing.assert_array_equal(array_files.places(path)["w"].mapped(), np.zeros(2, np.float32))
        return
    with pytest.raises(ValueError, match=r"^w\.safetensors") as found:
        array_files.places(path)
    assert "\n" not in str(found.value)


def test_an_array_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    """The format forbids it; the official library takes the last."""
    said = json.dumps(F32).encode()
    (tmp_path / "w.safetensors").write_bytes(packed(b'{"w":' + said + b',"w":' + said + b"}", ZEROS8))
    with pytest.raises(ValueError, match="a name occurs twice"):
        array_files.places(tmp_path / "w.safetensors")
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for content in (np.zeros(2), np.ones(2)):
            file = io.BytesIO()
            np.save(file, content)
            archive.writestr("w.npy", file.getvalue())
    with pytest.raises(ValueError, match="a name occurs twice"):
        array_files.zipped(tmp_path / "w.npz")


HELD: list[tuple[Any, str, bool]] = [
    ([1.5, -2], "float32", True),
    ([1.1], "bfloat16", True),
    ([3e38], "float32", True),
    ([1e300], "float32", False),
    ([7e4], "float16", False),
    ([1e-300], "float32", True),
    ([np.nan], "float32", False),
    ([np.inf], "float64", False),
    (np.array([1e9], np.longdouble), "float32", True),
    ([2**24, -(2**24)], "float32", True),
    ([2**24 + 1], "float32", False),
    ([2**63 - 1], "float64", False),
    ([-(2**63)], "float64", True),
    (np.array([2**64 - 1], np.uint64), "float64", False),
    (np.array([2**63], np.uint64), "float32", True),
    ([256], "bfloat16", True),
    ([257], "bfloat16", False),
    ([65536], "float16", False),
    ([True, False], "float32", True),
    ([True], "int8", True),
    ([3.0, -7.0], "int32", True),
    ([3.5], "int32", False),
    ([2.0**31], "int32", False),
    ([np.nan], "int32", False),
    ([2**31], "int32", False),
    ([-1], "uint32", False),
    ([127, -128], "int8", True),
    ([0, 1], "bool", True),
    ([2], "bool", False),
    ([-(2.0**63)], "int64", True),
    ([2.0**63], "int64", False),
]


@pytest.mark.parametrize(("array", "dtype", "held"), HELD)
def test_no_number_becomes_another_in_silence(array: Any, dtype: str, held: bool) -> None:
    """Floats may be rounded to narrower ones; else conversions are exact; and all is finite."""
    variable = Variable("w", mtf.Shape([mtf.Dim("n", len(array))]), dtype, mtf.ONES)
    if held:
        ((_, found),), _ = read_weights([variable], {"w": array}, {})
        np.testing.assert_array_equal(found, np.asarray(array))
        return
    bad = str(np.asarray(array)[0])
    with pytest.raises(
        mtf.UserError, match=rf"'w' contains {re.escape(bad)}, but 'w' needs finite numbers that {dtype} can"
    ):
        read_weights([variable], {"w": array}, {})


@pytest.mark.parametrize(
    "array",
    [
        np.array([1j, 2]), np.array(["1", "2"]), np.array([b"1", b"2"]), np.array([1, 2], "M8[s]"),
        np.array([1, 2], "m8[s]"), np.array([(1,), (2,)], [("x", "f4")]), np.array([1, None]),
        np.zeros(2, "V4"),
    ],
    ids=lambda array: str(array.dtype),
)  # fmt: skip
def test_what_is_no_number_is_refused(array: Any, tmp_path: Path) -> None:
    variable = Variable("w", mtf.Shape([mtf.Dim("n", 2)]), "float32", mtf.ONES)
    sources: list[Any] = [{"w": array}]
    np.savez(tmp_path / "w.npz", w=array)
    sources.append(tmp_path / "w.npz")
    for source in sources:
        with pytest.raises(mtf.UserError, match="needs real numbers, but 'w' has dtype"):
            read_weights([variable], source, {})
        assert read_weights([], source, {})[1].unused == ("w",)


def test_nothing_is_set_where_one_number_is_wrong() -> None:
    run, given = trainer(), torch_like()
    before = {name: run.engine.read(name) for name in NAMES}
    given["head.weight"][2, 1] = np.nan
    with pytest.raises(
        mtf.UserError, match=r"'head.weight' contains nan, but 'head' needs finite .*; no variable was"
    ):
        run.load(given, NAMES)
    assert all(np.array_equal(run.engine.read(name), x) for name, x in before.items())


def test_a_load_that_is_interrupted_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer()
    write = run.engine.write

    def interrupted(name: str, array: Any) -> None:
        write(name, array)
        raise KeyboardInterrupt

    monkeypatch.setattr(run.engine, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.load(torch_like(), NAMES)
    with pytest.raises(mtf.UserError, match="was interrupted"):
        run.save(tmp_path / "ckpt")


def test_an_archive_that_unfolds_to_gibibytes_is_not_unfolded(tmp_path: Path) -> None:
    """A quarter of a GiB in a MB: neither where no variable takes it nor where that has another shape."""
    path, whole = tmp_path / "w.npz", np.arange(2, dtype=np.float32)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, count in (("w", 2), ("bomb", 1 << 26)):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                head = {"descr": "<f4", "fortran_order": False, "shape": (count,)}
                np.lib.format.write_array_header_1_0(entry, head)
                for _ in range(max(1, count >> 20)):
                    entry.write(bytes(4 * min(count, 1 << 20)) if count > 2 else whole.tobytes())
    small = Variable("w", mtf.Shape([mtf.Dim("n", 2)]), "float32", mtf.ONES)
    tracemalloc.start()
    try:
        ((_, found),), loaded = read_weights([small], path, {})
        with pytest.raises(
            mtf.UserError, match=r"needs an array of shape \[2\], but 'bomb' has shape \[67108864\]"
        ):
            read_weights([small], path, {"w": "bomb"})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found, whole)
    assert loaded.unused == ("bomb",) and peak < 4 << 20


@pytest.mark.parametrize("name", ["w.npz", "w.safetensors", "folder"])
def test_what_is_no_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        os.mkfifo(path / "w.safetensors")
    else:
        os.mkfifo(path)
    with pytest.raises(mtf.UserError, match="give a complete file"):
        trainer().load(path)
    (tmp_path / f"zero{path.suffix or '.npz'}").symlink_to("/dev/zero")
    with pytest.raises(mtf.UserError, match="give a complete file"):
        trainer().load(tmp_path / f"zero{path.suffix or '.npz'}")


class Counted:
    """An array that counts how often it is read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.reads += 1
        return self.array


class Process:
    """One of two in a cluster, of which the other has found what is given."""

    processes = 2

    def __init__(self, index: int, other: list[str]) -> None:
        self.index, self.other, self.own = index, other, None

    def gather(self, what: str, value: Any, patient: bool = False) -> list[Any]:
        self.own = value
        return [value, self.other] if self.index == 0 else [self.other, value]


@pytest.mark.parametrize("index", [0, 1])
def test_processes_share_the_look_and_all_refuse(index: int) -> None:
    variables = [Variable(n, mtf.Shape([mtf.Dim("n", 2)]), "float32", mtf.ONES) for n in "abcd"]
    given = {n: Counted(np.full(2, np.nan if n == "c" else 1, np.float32)) for n in "abcd"}
    said = "'c' contains nan, but 'c' needs finite numbers that float32 can represent"
    process = Process(index, [said] if index else [])
    with pytest.raises(mtf.UserError, match=f"^load: {said}; no variable was loaded$"):
        read_weights(variables, given, {}, cluster=process)
    assert process.own == ([] if index else [said])
    assert [each.reads for each in given.values()] == ([0, 1, 0, 1] if index else [1, 0, 1, 0])
