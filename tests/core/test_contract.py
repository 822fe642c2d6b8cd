"""The contract of an operation: what a class that breaks it is told, and what every class of ours keeps."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest

import mesh_tf_core as mtf
import mesh_tf_core.ops
from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.op import NO_PRODUCT, Op, Roles, TensorType
from mesh_tf_core.lower.placing import Placing

A = mtf.Dim("a", 4)


class Whole(Op, abstract=True):
    """All required facets, so that a class below breaks one rule at a time."""

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=inputs[0].shape.names)

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[0]

    def kernel(self, k: Any, at: Any, *slices: Any) -> Any:
        return slices[0]

    def flops(self, *local: TensorType) -> float:
        return 0.0

    def gradient(self, dy: Any, inputs: Any, output: Any) -> Any:
        return [dy]


def lacking() -> None:
    class Half(Op):
        def roles(self, *inputs: Any) -> Any: ...

        def infer(self, *inputs: Any) -> Any: ...

        def kernel(self, k: Any, at: Any, *slices: Any) -> Any: ...


def of_unknown_kind() -> None:
    class Half(Whole):
        kind: ClassVar[str] = "matrix"


def of_unknown_linearity() -> None:
    class Half(Whole):
        linear = "mostly"  # type: ignore[assignment]


def with_a_misspelt_fact() -> None:
    class Half(Whole):
        liner: ClassVar[bool] = True


def with_a_short_lower() -> None:
    class Half(Whole):
        def lower(self, low: Any, inputs: Any) -> Any: ...


def with_a_long_lower() -> None:
    class Half(Whole):
        def lower(self, low: Any, inputs: Any, types: Any, more: Any) -> Any: ...


def with_a_deaf_expand() -> None:
    class Half(Whole):
        def expand(self) -> Any: ...


def with_a_short_static_facet() -> None:
    class Half(Whole):
        @staticmethod
        def gradient(dy: Any, inputs: Any) -> Any: ...


def with_a_facet_that_is_none() -> None:
    class Half(Whole):
        flops = None  # type: ignore[assignment]


def with_a_short_distributes() -> None:
    class Half(Whole):
        def distributes(self) -> Any: ...


def with_a_field_that_is_a_fact() -> None:
    @dataclass(frozen=True)
    class Half(Whole):
        scales: float  # type: ignore[misc]


def unhashable() -> None:
    @dataclass(frozen=True)
    class Half(Whole):
        sizes: list[int]


def mutable() -> None:
    @dataclass
    class Half(Whole):
        size: int


def bare() -> None:
    class Half(Whole):
        size: int

    Half(3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "made, match",
    [
        (lacking, r"operation Half does not define flops, gradient; add these methods$"),
        (
            of_unknown_kind,
            r"operation Half: kind is 'matrix'; choose from 'matmul', 'elementwise', 'reduce', 'gather', "
            r"'random', 'data', 'attention'$",
        ),
        (of_unknown_linearity, r"operation Half: linear is 'mostly'; choose from False, True$"),
        (
            with_a_misspelt_fact,
            "operations have no class attribute 'liner'; did you mean",
        ),
        (
            with_a_short_lower,
            r"the method lower\(self, low, inputs\) must have the signature "
            r"lower\(self, low, inputs, types\)$",
        ),
        (
            with_a_long_lower,
            r"the method lower\(self, low, inputs, types, more\) must have the signature "
            r"lower\(self, low, inputs, types\)$",
        ),
        (
            with_a_deaf_expand,
            r"the method expand\(self\) must have the signature expand\(self, \*inputs\)$",
        ),
        (
            with_a_short_static_facet,
            r"the method gradient\(dy, inputs\) must have the signature "
            r"gradient\(self, dy, inputs, output\)$",
        ),
        (
            with_a_facet_that_is_none,
            r"operation Half: flops is None; define a method flops\(self, \*local\)$",
        ),
        (
            with_a_short_distributes,
            r"the method distributes\(self\) must have the signature distributes\(self, constant\)$",
        ),
        (with_a_field_that_is_a_fact, "field 'scales' has the name of a facet of operations; rename it"),
        (unhashable, "field 'sizes' has type list"),
        (mutable, r"cannot inherit non-frozen dataclass from a frozen one"),
        (bare, "operation Half is not a dataclass; write @dataclass"),
    ],
)
def test_a_class_that_breaks_the_contract(made: Callable[[], None], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        made()


def test_a_facet_may_be_a_static_or_a_class_method() -> None:
    @dataclass(frozen=True)
    class Same(Whole):
        @staticmethod
        def flops(x: TensorType) -> float:
            return 3.0

        @classmethod
        def gradient(cls, dy: Any, inputs: Any, output: Any) -> Any:
            return [dy]

    assert Same().flops(TensorType(mtf.Shape([A]), "float32")) == 3.0


def test_roles_of_none_are_refused_by_name() -> None:
    @dataclass(frozen=True)
    class Lost(Whole):
        def roles(self, *inputs: TensorType) -> Any:
            return None

    g = mtf.Graph("lost")
    y = g.apply(Lost(), g.input("x", [A], "float32"))
    with pytest.raises(TypeError, match=r"operation Lost: roles returned None; it must return mtf.Roles"):
        mtf.lower(g, mtf.Mesh("data:2"), mtf.Layout("a:data"), {"y": y})


def test_what_an_operation_is_without_its_optional_facets() -> None:
    @dataclass(frozen=True)
    class Same(Whole):
        size: int = 3
        seen: ClassVar[list[int]] = []

    op, x = Same(), TensorType(mtf.Shape([A]), "float32")
    assert not op.lowers() and not op.expands()
    assert (op.expand(), op.work(x)) == (None, NO_PRODUCT)
    assert (op.describe(), op.kind) == ("same(size=3)", "elementwise")
    assert not any(getattr(op, fact) for fact in Op.FACTS if fact != "kind")
    assert (op.operands([1, 2]), op.labels(x), op.distributes([False])) == ([1, 2], None, False)
    assert op == Same() and hash(op) == hash(Same()) and op != Same(4)


def every_operation() -> list[type[Op]]:
    names = [m.name for m in pkgutil.iter_modules(mesh_tf_core.ops.__path__, "mesh_tf_core.ops.")]
    classes = [c for n in names for c in vars(importlib.import_module(n)).values() if inspect.isclass(c)]
    return sorted({c for c in classes if issubclass(c, Op) and c is not Op}, key=lambda c: c.__name__)


@pytest.mark.parametrize("op", every_operation(), ids=lambda c: c.__name__)
def test_every_operation_is_a_frozen_dataclass_with_a_text(op: type[Op]) -> None:
    assert op.__dataclass_params__.frozen and op.__dataclass_params__.eq  # type: ignore[attr-defined]
    assert op.__doc__ and all(f.compare or f.name == "function" for f in fields(op))


def test_lowering_offers_what_operations_may_ask() -> None:
    asked = {n for n, member in vars(Emitter).items() if callable(member) and not n.startswith("_")}
    assert asked and all(getattr(Placing, n) is not getattr(Emitter, n) for n in asked)
