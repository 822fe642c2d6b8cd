"""Weights and plans with damaged bytes, headers and arrays: refused in one line, with nothing set, or loaded
as what the file says, which other code reads here a second time."""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import mesh_tf_core as mtf
from layoutopt.plan.build import load_plan
from mesh_tf_core.errors import UserError
from tests.fuzz import hostile
from tests.reports import sample

A, B, C = mtf.Dim("a", 3), mtf.Dim("b", 4), mtf.Dim("c", 4)
TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
    "C64": "<c8", "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
Arrays = dict[str, Any]


def trainer() -> mtf.Trainer:
    """Two variables of one shape, so that they can be mixed up, and one of another shape and type."""
    g = mtf.Graph()
    y = g.input("x", [A, B], "float32")
    v, w = (g.variable(name, [B, C], mtf.Normal(0.1)) for name in ("v", "w"))
    total = mtf.reduce_mean(mtf.square(mtf.einsum([y, v + w], [A, C])))
    bias = g.variable("bias", [C], mtf.ZEROS, "bfloat16")
    total = total + mtf.reduce_mean(mtf.square(bias.cast("float32")))
    return mtf.Trainer(mtf.Model(total, mtf.SGD(0.1)), "d:1", "", engine="lockstep")


def weights() -> Arrays:
    rng = np.random.default_rng(0)
    found = {name: rng.normal(size=(4, 4)).astype(np.float32) for name in ("v", "w")}
    return {**found, "bias": rng.normal(size=4).astype(np.float32)}


# -- what files say ------------------------------------------------------------------------------------------


def safetensors(arrays: Arrays) -> tuple[dict[str, Any], bytes]:
    header, data = {}, b""
    names = {np.dtype(dtype): name for name, dtype in TYPES.items()}
    for name, x in arrays.items():
        ends = [len(data), len(data) + x.nbytes]
        header[name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": ends}
        data += x.tobytes()
    return header, data


def packed(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def said_by_safetensors(content: bytes) -> Arrays:
    """What the format says that a file holds; AssertionError where it says that it is none."""
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    data, found = content[8 + size :], {}
    covered = bytearray(len(data))
    for name, x in header.items():
        if name == "__metadata__":
            continue
        begin, end = x["data_offsets"]
        dtype = np.dtype(TYPES[x["dtype"]])
        assert 0 <= begin <= end <= len(data) and end - begin == dtype.itemsize * math.prod(x["shape"])
        assert not any(covered[begin:end])
        covered[begin:end] = b"\1" * (end - begin)
        found[name] = np.frombuffer(data[begin:end], dtype).reshape(x["shape"])
    assert all(covered)
    return found


def npz(arrays: Arrays, pack: Callable[..., None] = np.savez) -> bytes:
    file = io.BytesIO()
    pack(file, **arrays)
    return file.getvalue()


def said_by_npz(content: bytes) -> Arrays:
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return dict(found)


# -- what is done to them ------------------------------------------------------------------------------------

at = st.integers(0, 10**6)


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Bytes cut off, put in, taken out and changed, anywhere or at the beginning, where most is said."""
    places = st.one_of(at, st.integers(0, 300), st.integers(-300, -1)).map(lambda n: n % len(content))
    more = st.binary(min_size=1, max_size=4) | st.sampled_from([b"\0", b" ", b"}", b"\xff" * 8, content[:40]])
    return st.one_of(
        places.map(lambda n: content[:n]),
        st.tuples(places, more).map(lambda x: content[: x[0]] + x[1] + content[x[0] :]),
        st.tuples(places, more).map(lambda x: content[: x[0]] + x[1] + content[x[0] + len(x[1]) :]),
        st.tuples(places, st.integers(1, 20)).map(lambda x: content[: x[0]] + content[x[0] + x[1] :]),
        more.map(lambda x: content + x),
        st.binary(max_size=50),
    )


def damaged_safetensors() -> st.SearchStrategy[bytes]:
    header, data = safetensors(weights())
    fault = st.tuples(
        st.sampled_from(sorted(hostile.places(header), key=str)[1:]),
        st.sampled_from(["set", "left out", "renamed"]),
        st.one_of(hostile.small, st.sampled_from([*TYPES, 0, 16, 64, 65, 128, 144, "v", "w"])),
    )
    names = st.permutations(list(header))
    mixed = names.map(lambda order: {n: header[m] for n, m in zip(header, order, strict=True)})

    def moved(name: str, by: int) -> dict[str, Any]:
        return {
            **header,
            name: {**header[name], "data_offsets": [e + by for e in header[name]["data_offsets"]]},
        }

    shifted = st.builds(moved, st.sampled_from(list(header)), st.sampled_from([-64, -4, -1, 1, 4, 16, 64]))
    value = st.tuples(
        st.integers(0, len(data) // 4 - 1), st.sampled_from([math.nan, math.inf, -math.inf, 1e38])
    )
    return st.one_of(
        damaged(packed(header, data)),
        fault.map(lambda x: packed(hostile.changed(header, *x), data)),
        mixed.map(lambda x: packed(x, data)),
        shifted.map(lambda x: packed(x, data)),
        st.binary(min_size=1, max_size=9).map(lambda more: packed(header, more + data)),
        value.map(
            lambda x: packed(header, data[: 4 * x[0]] + struct.pack("<f", x[1]) + data[4 * x[0] + 4 :])
        ),
        arrays().map(lambda x: packed(*safetensors({n: a for n, a in x.items() if a.dtype in KNOWN}))),
    )


KNOWN = {np.dtype(dtype) for dtype in TYPES.values()}
KINDS = (
    "<f8", "<f4", "<f2", ">f4", "<i8", "<i4", "u1", "<u8", "?", "<c8", "<c16", "U3", "S2", "M8[s]", "m8[s]",
    "V4", "O", [("x", "<f4")], "g",
)  # fmt: skip


def arrays() -> st.SearchStrategy[Arrays]:
    """The weights, of which one has another type, order, shape, or a number that is too large."""

    def changed(name: str, kind: Any, number: float, turned: bool, where: int) -> Arrays:
        found = {n: np.array(x) for n, x in weights().items()}
        with np.errstate(all="ignore"):
            x = found[name].astype(np.float64)
            x.flat[where % x.size] = number
            try:
                x = x.astype(kind) if np.dtype(kind).kind not in "mM" else x.astype("<i8").astype(kind)
            except (TypeError, ValueError, OverflowError):
                x = np.zeros(x.shape, kind)
        found[name] = np.asfortranarray(x) if turned else x
        return found

    numbers = st.sampled_from([0.0, 1.0, 3.0, 2.0**24 + 1, 1e300, -1e39, math.nan, math.inf, 1e-300])
    names = st.sampled_from(["v", "w", "bias"])
    return st.builds(changed, names, st.sampled_from(KINDS), numbers, st.booleans(), at)


def damaged_npz() -> st.SearchStrategy[bytes]:
    whole = weights()

    def rebuilt(x: tuple[str, bytes, bool]) -> bytes:
        """One entry holds other bytes, with a checksum that is right."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if x[2] else zipfile.ZIP_STORED) as archive:
            for name, array in whole.items():
                entry = io.BytesIO()
                np.save(entry, array)
                archive.writestr(f"{name}.npy", x[1] if name == x[0] else entry.getvalue())
        return file.getvalue()

    entry = io.BytesIO()
    np.save(entry, whole["v"])
    return st.one_of(
        damaged(npz(whole)),
        damaged(npz(whole, np.savez_compressed)),
        st.tuples(st.sampled_from(list(whole)), damaged(entry.getvalue()), st.booleans()).map(rebuilt),
        arrays().map(npz),
        arrays().map(partial(npz, pack=np.savez_compressed)),
    )


# -- the hunt ------------------------------------------------------------------------------------------------


def same(held: Any, given: Any) -> bool:
    """Whether a variable is what a file says, of real and finite numbers: rounded if they are floats."""
    assert given.dtype.kind in "biuf" or given.dtype.type is not np.void, given.dtype
    assert np.isfinite(given.astype(np.longdouble)).all()
    wanted = given.astype(held.dtype)
    if given.dtype.kind in "biu":
        assert (wanted.astype(np.longdouble) == given.astype(np.longdouble)).all()
    return np.array_equal(held, wanted) and bool(np.isfinite(wanted.astype(np.float64)).all())


WEIGHTS = {
    "w.safetensors": (damaged_safetensors, said_by_safetensors, lambda: packed(*safetensors(weights()))),
    "w.npz": (damaged_npz, said_by_npz, lambda: npz(weights())),
}


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", WEIGHTS)
def test_damaged_weights_are_refused_or_what_the_file_says(name: str, more: bool, tmp_path: Path) -> None:
    make, said, whole = WEIGHTS[name]
    run, path = trainer(), tmp_path / name
    path.write_bytes(whole())
    run.load(path)
    before = {n: run.engine.read(n) for n in weights()}
    assert all(same(x, weights()[n]) for n, x in before.items())
    counts = {"loaded": 0, "refused": 0}

    def look(content: bytes) -> None:
        path.write_bytes(content)
        try:
            run.load(path)
        except UserError as error:
            counts["refused"] += 1
            hostile.one_clear_line(error)
            assert all(np.array_equal(run.engine.read(n), x) for n, x in before.items()), "half loaded"
            return
        counts["loaded"] += 1
        given = said(content)
        for n in weights():
            assert same(run.engine.read(n), given[n]), (n, given[n])
            run.engine.write(n, before[n])

    hostile.hunt(40, more, make(), look)
    print(name, counts)
    assert counts["refused"] > counts["loaded"] > 0


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_damaged_plan_is_refused_or_what_the_file_says(more: bool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    def look(content: bytes) -> None:
        path.write_bytes(content)
        try:
            plan = load_plan(path)
        except UserError as error:
            hostile.one_clear_line(error)
            return
        given = json.loads(content.decode("utf-8-sig"))
        assert plan.mesh.as_dict() == given["mesh"]
        assert {n: list(axes) for n, axes in plan.layout.items()} == {
            n: x for n, x in given["layout"].items() if x
        }

    hostile.hunt(20, more, hostile.damaged(sample.plain_plan()), look)
