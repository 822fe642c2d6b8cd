"""Itemised cost: what the search sums is what lines show, item by item; and what has no measured price is
said."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import ComputeCurve, Curve, Hardware, Number, load_hardware
from costmodels.pricing.explanation import formula
from costmodels.pricing.items import Computed
from costmodels.pricing.pricer import Pricer, price, pricer
from costmodels.pricing.templates import ItemisedCost, Templates
from examples.transformer_lm import model as transformer
from layoutopt.optimize.entry import search
from layoutopt.space.decisions import decisions
from mesh_tf_core.ops.basic import Scale
from tests.layoutopt.models import EXAMPLES, SMALL, some_choices
from tests.marks import by_day

MESH = mtf.Mesh("data:2;model:2")


def op_by_op() -> Hardware:
    """A made-up machine whose array functions are measured."""

    def curve(name: str, start: float, rate: float) -> ComputeCurve:
        points = ((0.0, start), (1e4, start + 2e4 * rate), (1e6, start + 1.1e6 * rate))
        return ComputeCurve(name, "float32", "bytes", 4, Curve(points), "made up", "2026")

    curves = (
        curve("kernel", 2e-6, 1e-10),
        curve("kernel.fresh", 0.0, 3e-11),
        curve("kernel.step", 1e-4, 0.0),
    )
    return replace(load_hardware("cpu-local"), compute_curves=curves)


def hiding() -> Hardware:
    numbers = tuple(
        (n, Number(f, str(f), "a test", "2026")) for n, f in (("gradient", 0.5), ("parameter", 0.7))
    )
    return replace(load_hardware("tpu-v4"), overlap=numbers)


HARDWARE: dict[str, Callable[[], Hardware]] = {
    "fused and hidden": hiding,
    "alone": lambda: replace(load_hardware("a100-eager"), compiler="eager"),
    "op by op": op_by_op,
}


def items_of(prices: Pricer, cost: ItemisedCost) -> Counter[Any]:
    """Every item with how often it runs."""
    found: Counter[Any] = Counter()
    for instance, times in cost:
        for item in instance.items(prices.itemiser, prices._piece, MESH):
            found[item] += times  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(("name", "hardware"), by_day(itertools.product(EXAMPLES, HARDWARE)))
@pytest.mark.one_in(6)
def test_an_itemised_cost_adds_up_to_the_lines(name: str, hardware: str) -> None:
    """One store of templates for several layouts, so that what one layout taught the next is tried too."""
    model, machine = EXAMPLES[name](), HARDWARE[hardware]()
    graph = model.training_step(1).graph
    decided = decisions(graph, MESH)
    prices, rng = pricer(machine, MESH), random.Random(f"{name} {hardware}")
    templates, tried = Templates(prices.itemiser), 0
    while tried < 3:
        layout, options = decided.read(some_choices(decided, rng))
        try:
            program = model.lower(MESH, layout, options)
        except mtf.LayoutError:
            continue
        itemised, cost = templates.itemised(program), price(program, machine)
        where = f"{name} on {machine.name} under {layout}"
        total = prices.total(itemised) + prices.fixed_seconds(program)
        assert total == pytest.approx(cost.step_seconds, rel=1e-12), where
        shown: Counter[Any] = Counter()
        for line in cost.lines:
            if line.kind != "step":
                shown[line.item] += line.times  # type: ignore[assignment]
        assert items_of(prices, itemised) == shown, where
        assert all(formula(prices, line) for line in cost.lines)
        tried += 1


def test_a_host_that_launches_counts_itself() -> None:
    """The same kernels as a compiled step has, but for single whole numbers: the seeds of its dropout, the
    number of the step."""
    model = transformer(**{**SMALL, "layers": 4, "dropout": 0.1})
    program = model.lower(mtf.Mesh("data:2"), mtf.Layout("batch:data"), mtf.Options(microbatches=2))
    launched = replace(load_hardware("a100-eager"), compiler="launched")
    compiled = replace(load_hardware("a100"), compiler="xla-gpu")

    def items(machine: Hardware) -> Counter[Any]:
        """But for launches that kernels of the update share."""
        lines = price(program, machine).lines
        found = [x.item for x in lines]
        same = [
            replace(i, quantity=replace(i.quantity, joins=False)) if isinstance(i, Computed) else i
            for i in found
        ]
        return Counter((x.name, x.text, x.origin, x.times, i) for x, i in zip(lines, same, strict=True))

    assert items(launched) < items(compiled)
    left = items(compiled) - items(launched)
    assert "shift" in {name for name, *_ in left}
    for *_, item in left:
        assert (item.quantity.elements, item.quantity.dtype) == (1, "int32")
    prices = pricer(launched, program)
    assert prices.total(Templates(prices.itemiser).itemised(program)) == pytest.approx(
        prices.seconds(program)
    )


class Odd(Scale):
    """ResourceUsage an array function of its own."""

    def kernel(self, k: Any, at: Any, *slices: Any) -> Any:
        return k.nothing_like_it(slices[0])


class Wrong(Scale):
    """Has a mistake in it."""

    def kernel(self, k: Any, at: Any, *slices: Any) -> Any:
        return k.unary("exp", slices[0].no_such_field)


def with_op(op: Scale) -> mtf.Model:
    g = mtf.Graph("odd")
    a, b = mtf.Dim("a", 8), mtf.Dim("b", 4)
    x = g.input("x", [a, b], "float32") * g.variable("w", [a, b], mtf.ZEROS)
    return mtf.Model(mtf.reduce_mean(g.apply(op, x)), mtf.SGD(0.1))


def test_an_array_function_without_a_price_is_said() -> None:
    machine, model = op_by_op(), with_op(Odd(2.0))
    prices = pricer(machine, MESH)
    cost = prices.cost(model.lower(MESH, mtf.Layout()))
    (note,) = cost.notes
    assert "no time for the array function 'nothing_like_it'" in note and "FLOPs and bytes" in note
    words = [formula(prices, x) for x in cost.lines if x.name == Odd(2.0).name]
    assert any("'nothing_like_it', so predicted from FLOPs and bytes: " in w for w in words)
    assert note in search(model, mesh=MESH, hardware=machine).data.notes
    assert not prices.cost(EXAMPLES["mlp"]().lower(MESH, mtf.Layout())).notes


def test_a_mistake_in_an_operation_is_not_taken_for_a_lack() -> None:
    with pytest.raises(AttributeError, match="no_such_field"):
        price(with_op(Wrong(2.0)).lower(MESH, mtf.Layout()), op_by_op())
