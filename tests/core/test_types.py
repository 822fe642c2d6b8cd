"""Dimensions, shapes, meshes, layouts, dtypes: parsing, arithmetic, and what is said about bad input."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_tf_core import Dim, Layout, LayoutError, Mesh, Shape, UserError
from mesh_tf_core.errors import known_names
from mesh_tf_core.ir.dims import LARGEST, divisors, union
from mesh_tf_core.ir.dtypes import check_dtype, itemsize, promote

A, B = Dim("a", 4), Dim("b", 6)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a;b", "a+b", "a[0]", None, 3])
def test_dim_names(name: Any) -> None:
    with pytest.raises(UserError, match="use a non-empty name without spaces"):
        Dim(name, 2)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "3", None])
def test_dim_sizes(size: Any) -> None:
    with pytest.raises(UserError, match="size must be a positive integer, found"):
        Dim("a", size)


def test_divisors_of_every_size_up_to_the_largest() -> None:
    """A loop over all numbers up to the largest would not end."""
    for size in range(1, 200):
        assert divisors(size) == tuple(n for n in range(1, size + 1) if size % n == 0)
    assert divisors(LARGEST) == tuple(2**n for n in range(49))


def test_shape() -> None:
    s = Shape([A, B])
    assert (s.names, s.sizes, s.size, str(s), len(s)) == (("a", "b"), (4, 6), 24, "a:4 b:6", 2)
    assert A in s and "b" in s and Dim("a", 5) not in s and "c" not in s
    assert s.without("a") == Shape([B]) and s.replace(a=8) == Shape([Dim("a", 8), B])
    assert s.index("b") == 1 and s.dim("a") is A and list(s) == [A, B]
    assert Shape() == Shape([]) and Shape().size == 1
    assert hash(s) == hash(Shape((A, B)))


def test_shape_errors() -> None:
    with pytest.raises(UserError, match=r"shape \[a:4 a:5\]: dimension 'a' appears twice"):
        Shape([A, Dim("a", 5)])
    with pytest.raises(
        UserError, match=r"shape \[length:4\] has no dimension 'lenght'; did you mean 'length'"
    ):
        Shape([Dim("length", 4)]).index("lenght")


def test_union() -> None:
    assert union(Shape([A]), Shape([B, A])) == Shape([A, B])
    with pytest.raises(UserError, match=r"'a' has size 4 in one operand and 5 in another: \[a:4\], \[a:5\]"):
        union(Shape([A]), Shape([Dim("a", 5)]))


@pytest.mark.parametrize("text", ["data:2;model:4", "data:2,model:4", " data:2 ; model:4 ;"])
def test_mesh_strings(text: str) -> None:
    mesh = Mesh(text)
    assert mesh == Mesh({"data": 2, "model": 4}) == Mesh([("data", 2), ("model", 4)])
    assert (str(mesh), mesh.names, mesh.shape, mesh.devices) == (
        "data:2;model:4",
        ("data", "model"),
        (2, 4),
        8,
    )
    assert mesh.as_dict() == {"data": 2, "model": 4} and mesh.group_size(["data", "model"]) == 8


@pytest.mark.parametrize(
    ("mesh", "match"),
    [
        ("data", "is not an axis NAME:SIZE; write e.g. 'data:8;model:4'"),
        ("data:x", "is not an axis NAME:SIZE; write e.g. 'data:8;model:4'"),
        ("data:2;data:4", "axis 'data' appears twice"),
        ({"data": 0}, "mesh axis 'data': size must be a positive integer, found 0"),
        ({"a b": 2}, "mesh axis name 'a b'"),
    ],
)
def test_mesh_errors(mesh: Any, match: str) -> None:
    with pytest.raises(UserError, match=match):
        Mesh(mesh)


def test_unknown_axis() -> None:
    with pytest.raises(UserError, match="has no axis 'modle'; did you mean 'model'"):
        Mesh("data:2;model:4").size("modle")


MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda s: Mesh(list(zip("xyz", s, strict=False)))
)


@given(MESHES, st.data())
def test_ranks_and_groups(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(
        st.permutations(mesh.names).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n]))
    )
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.devices))
    for group in groups:
        assert len(group) == mesh.group_size(axes)
        assert [mesh.group_index(rank, axes) for rank in group] == list(range(len(group)))
        fixed = [{n: c for n, c in mesh.coordinates(r).items() if n not in axes} for r in group]
        assert all(f == fixed[0] for f in fixed)
    for rank in range(mesh.devices):
        assert mesh.rank(mesh.coordinates(rank)) == rank


def test_layout_strings() -> None:
    layout = Layout("batch:data+pod;heads:model")
    assert (
        layout == Layout({"batch": ("data", "pod"), "heads": "model"}) == Layout("heads:model,batch:data+pod")
    )
    assert str(layout) == "batch:data+pod;heads:model" and Layout(str(layout)) == layout
    assert layout["batch"] == ("data", "pod") and layout.axes("other") == () and len(layout) == 2
    assert (
        Layout({"batch": ()}) == Layout()
        and str(Layout()) == ""
        and hash(layout) == hash(Layout(str(layout)))
    )
    with pytest.raises(KeyError):
        layout["other"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("batch", "'batch' is not a rule DIM:AXIS or DIM:AXIS[+]AXIS"),
        ("batch:", "is not a rule DIM:AXIS"),
        (":data", "is not a rule DIM:AXIS"),
        ("batch:data+", "is not a rule DIM:AXIS"),
        ("a:x;a:y", r"dimension 'a' has two rules, with the axes x and y"),
        ("a:x+x", "dimension 'a' is split over x[+]x, which names an axis twice"),
    ],
)
def test_layout_errors(text: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        Layout(text)


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ("batsh:x", "no operation has a dimension 'batsh'; did you mean 'batch'[?] known: batch, heads"),
        ("batch:z", "mesh x:2;y:4 has no axis 'z'; known: x, y"),
        (
            "batch:x+y",
            "has size 12, which is not divisible by the 8 devices of x",
        ),
    ],
)
def test_layout_check(layout: str, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        Layout(layout).check(Mesh("x:2;y:4"), {"batch": 12, "heads": 8})


def test_one_axis_on_two_dimensions() -> None:
    layout = Layout("a:x;b:x")
    assert layout.splits(Shape([A]), "t") == (("x",),)
    with pytest.raises(LayoutError, match="t has both 'a' and 'b' split over mesh axis 'x'"):
        layout.splits(Shape([A, B]), "t")


def test_dtypes() -> None:
    assert [itemsize(d) for d in ("float64", "float32", "bfloat16", "bool")] == [8, 4, 2, 1]
    assert promote("int32", "int32") == "int32"
    with pytest.raises(UserError, match="dtype 'float31' is not supported; did you mean 'float32'"):
        check_dtype("float31")
    with pytest.raises(UserError, match="operands have dtypes float32 and bfloat16; cast one of them"):
        promote("float32", "bfloat16")


def test_known_names() -> None:
    assert known_names("x", []) == "known: none"
