"""Loops that run again in backward and keep some of their values: the same numbers, less run again."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.liveness import memory
from examples.moe_lm import model as mixture
from examples.transformer_lm import data
from examples.transformer_lm import model as transformer
from layoutopt.space.decisions import SearchSpace, decisions
from mesh_tf_core.engines import open_engine
from mesh_tf_core.ir.blocks import loop_name
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Loop, Program
from mesh_tf_core.lower import loops
from mesh_tf_core.lower.remat_policy import KINDS, KeptKind, Recomputed, kept_values
from mesh_tf_core.lower.verify import verify
from tests.marks import by_day

SIZES = {"d_model": 8, "d_kv": 2, "heads": 4, "d_ff": 16, "vocab": 16, "batch": 4, "length": 8}
FORMS: dict[str, dict[str, Any]] = {
    "fused": {"attention": "fused", "gated": True},
    "written out": {"attention": "plain", "dropout": 0.3},
    "bfloat16": {"attention": "fused", "dtype": "bfloat16", "kv_heads": 2},
}
MESH, SPLIT = "x:2;y:2", "batch:x;heads:y;d_ff:y;vocab:y"


def test_what_is_between_the_products_of_attention_is_attention() -> None:
    """Megatron-LM's "selective" keeps everything but attention: no score, and nothing that is made of it."""
    model = transformer(layers=2, **SIZES, attention="plain", dropout=0.3)
    program = model.lower(
        mtf.Mesh("all:1"), mtf.Layout(), mtf.Options(recompute={"layers:keep=products+others"})
    )
    loops = [instr for instr, _ in program.walk() if isinstance(instr, Loop)]
    stacked = [program.values[r.outer].shape.names for loop in loops for r in loop.stacked]
    assert stacked and not any({"length", "memory_length"} <= {*names} for names in stacked)
    whole = model.lower(mtf.Mesh("all:1"), mtf.Layout(), mtf.Options())
    kept = [
        whole.values[r.outer].shape.names for i, _ in whole.walk() if isinstance(i, Loop) for r in i.stacked
    ]
    assert any({"length", "memory_length"} <= {*names} for names in kept)


@cache
def made(form: str) -> mtf.Model:
    return transformer(layers=2, **SIZES, **FORMS[form])


def trained(program: Program, kind: str = "lockstep") -> dict[str, Any]:
    """The loss and the variables after two steps; bytes are those that the program says."""
    engine, batches = open_engine(program, kind), data(**{k: SIZES[k] for k in ("batch", "length", "vocab")})
    for _ in range(2):
        batch = next(batches)
        found = engine.step(
            {n: batch[n].reshape(program.values[i].shape.sizes) for n, i in program.feeds.items()}
        )
    assert engine.communication_bytes == program.communication_bytes()
    return {"loss": np.asarray(found["loss"]), **{name: engine.read(name) for name in program.variables}}


def run(form: str, recompute: str, mesh: str = MESH, layout: str = SPLIT, **options: Any) -> Any:
    """What two steps give, and the program."""
    again = frozenset(filter(None, [recompute]))
    chosen = mtf.Options(recompute=again, **options)
    program = verify(made(form).lower(mtf.Mesh(mesh), mtf.Layout(layout), chosen))
    return trained(program), program


@cache
def plain(form: str) -> dict[str, Any]:
    found: dict[str, Any] = run(form, "", "one:1", "")[0]
    return found


def same(found: dict[str, Any], form: str) -> None:
    for name, value in plain(form).items():
        loose = 2e-2 if form == "bfloat16" else 1e-5
        np.testing.assert_allclose(found[name], value, rtol=loose, atol=loose, err_msg=name)


def drawn(seed: int, form: str = "fused") -> Program:
    """A step under a random layout, whose layers keep one of the sets that a search decides between."""
    model, rng = made(form), random.Random(seed)
    mesh, parts = mtf.Mesh(rng.choice(["x:2", "x:2;y:2", "x:4;y:2"])), rng.choice([1, 2])
    allowed = SearchSpace(recompute=("selective",), microbatches=(parts,), elsewhere=("length",))
    free = decisions(model.training_step(parts).graph, mesh, allowed)
    while True:
        layout, options = free.read({name: rng.choice(found) for name, found in free.options.items()})
        try:
            return model.lower(mesh, layout, options)
        except mtf.LayoutError:
            continue


def again(program: Program) -> Counter[str]:
    """What runs again, by name."""
    return Counter(i.name for i, _ in program.walk() if i.origin.phase == Phase.RECOMPUTE)


def stacks(program: Program) -> Counter[str]:
    """Dimensions of what the first loop stacks."""
    loop = next(i for i, _ in program.walk() if isinstance(i, Loop))
    return Counter(" ".join(program.values[r.outer].shape.names) for r in loop.stacked)


SETS = ["products", "outputs", "attention", "others", "attention+products", "others+products", "q+wi+o"]
SETS += ["attention+products/2", "outputs+products/2-q", "attention/2+others/3"]
CASES = [
    pytest.param(form, keep, marks=() if (row + column) % 3 == 0 else pytest.mark.nightly)
    for row, form in enumerate(FORMS)
    for column, keep in enumerate(SETS)
]


@pytest.mark.parametrize(("form", "keep"), CASES)
@pytest.mark.one_in(6)
def test_the_numbers_stay(form: str, keep: str) -> None:
    at = SETS.index(keep)
    layout = (SPLIT, "batch:x;vocab:y", "batch:x+y", "heads:x;d_ff:x+y")[at % 4]
    options: dict[str, Any] = {}
    if at % 4 == 1 and not FORMS[form].get("dropout"):  # microbatches draw their own
        options["microbatches"] = 2
    if at % 3 == 2:
        trained = [v.name for v in made(form).graph.variables.values() if v.trainable and len(v.shape)]
        options["storage"] = dict.fromkeys(trained, 1 + at % 2 * 2)
    same(run(form, f"layers:keep={keep}", layout=layout, **options)[0], form)


RANDOM = [(kind, seed) for seed in range(30) for kind in ("lockstep", "local")]


@pytest.mark.parametrize(("kind", "seed"), by_day(RANDOM, every=29))
@pytest.mark.one_in(3)
def test_random_layouts_give_the_numbers_of_one_device(kind: str, seed: int) -> None:
    same(trained(verify(drawn(seed)), kind), "fused")


def test_what_is_kept_does_not_run_again() -> None:
    whole, products, attention, rest = (
        run("fused", text)[1]
        for text in (
            "layers",
            "layers:keep=products",
            "layers:keep=attention",
            "layers:keep=products+attention",
        )
    )
    # q, k, v, o and the two that widen; the last product of a layer is not read by its backward.
    assert again(whole)["einsum"] == 6 == again(attention)["einsum"]
    assert again(whole)["attention"] == 1 == again(products)["attention"]
    assert not again(products)["einsum"] and not again(attention)["attention"]
    assert not {"einsum", "attention"} & again(rest).keys()
    assert again(rest)["normalize"]
    # The sum of the heads over devices is not taken again either.
    assert again(whole)["all_reduce"] == 1 and not again(products)["all_reduce"]
    assert not again(run("fused", "layers:keep=outputs")[1])["all_reduce"]
    every, none = (
        [i.name for i, _ in run("fused", text)[1].walk()]
        for text in ("layers:keep=products+attention+others", "")
    )
    assert every == none


def test_products_in_eight_bits_are_products() -> None:
    """Their weights are factors of eight bits, which are none of the model's variables."""
    found = {
        keep: again(
            transformer(layers=2, **SIZES, float8="tensor").lower(mtf.Mesh(MESH), mtf.Layout(SPLIT), o)
        )
        for keep in ("", ":keep=products", ":keep=attention")
        for o in (mtf.Options(recompute=frozenset({f"layers{keep}"})),)
    }
    assert found[""]["scaledeinsum"] == found[":keep=attention"]["scaledeinsum"] > 0
    assert not found[":keep=products"]["scaledeinsum"]
    assert found[":keep=products"]["attention"] and not found[":keep=attention"]["attention"]


PATTERNS = {
    # torchtitan's `selective_ac_option = "op"`: the first of every two matmuls, in the order of the program.
    "products/2": "q+v+wi+wo",
    "products/3": "q+o+wo",
    "products-o": "q+k+v+wi+wg+wo",
    "products/2-q-k": "v+wi+wo",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_of_products_in_the_order_of_the_program(pattern: str) -> None:
    found, same = (run("fused", f"layers:keep={keep}")[1] for keep in (pattern, PATTERNS[pattern]))
    assert again(found) == again(same) and stacks(found) == stacks(same)
    assert memory(found).peak == memory(same).peak


def test_a_pattern_is_an_option_of_a_search() -> None:
    allowed = SearchSpace(recompute=("keep=attention+products/2",))
    free = decisions(made("fused").training_step(1).graph, mtf.Mesh(MESH), allowed)
    (keeps,) = (options for name, options in free.options.items() if name == "recompute layers")
    assert keeps == (("on", "products/2", "attention"),)
    chosen = free.read({name: options[0] for name, options in free.options.items()})[1]
    assert {*map(str, chosen.recompute)} == {"layers:keep=products/2+attention"}


def test_a_pattern_leaves_out_what_it_names() -> None:
    graph = mixture(layers=2, **SIZES, experts=4).step_graph
    (block,) = (b for b in graph.blocks if loop_name(b, graph) == "layers" and b.saved)

    def makers(*words: str) -> set[str]:
        return {graph.producer[t].path for t in kept_values(words, block, graph)}

    everywhere, outside = makers("products"), makers("products-experts")
    assert outside == {path for path in everywhere if not path.startswith("experts/")} != everywhere
    assert makers("products-experts/router-wi-wo") == makers("q", "k", "v", "o")
    assert makers("products/2-experts") == makers("q", "v")


def test_what_is_kept_is_held() -> None:
    peaks = {
        text: memory(run("fused", text)[1]).peak
        for text in ("layers", "layers:keep=outputs", "layers:keep=products", "")
    }
    held = [*peaks.values()]
    assert held == sorted(held) and len(set(held)) == 4
    more = stacks(run("fused", "layers:keep=outputs")[1]) - stacks(run("fused", "layers")[1])
    assert more == {"layers batch length d_model": 1}


@pytest.mark.parametrize("kind", by_day(["lockstep", "local"]))
def test_another_value_in_the_place_of_a_kept_one_is_caught(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: two kept values of one shape change places."""
    saved = loops.Loops._saved

    def wrong(self: loops.Loops, *given: Any) -> Any:
        found, stacks = saved(self, *given), self.env
        shapes = {key: self.values[stack].shape for key, stack in stacks.items() if key < 0}
        pairs = [(a, b) for a in shapes for b in shapes if a < b and shapes[a] == shapes[b]]
        if pairs:
            a, b = pairs[0]
            stacks[a], stacks[b] = stacks[b], stacks[a]
        return found

    monkeypatch.setattr(loops.Loops, "_saved", wrong)
    chosen = mtf.Options(recompute=frozenset({"layers:keep=products"}))
    program = made("fused").lower(mtf.Mesh(MESH), mtf.Layout(SPLIT), chosen)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        same(trained(program, kind), "fused")


def test_narrow_values_are_kept_narrow() -> None:
    program = run("bfloat16", "layers:keep=products")[1]
    whole = memory(run("bfloat16", "layers")[1]).peak
    loop = next(i for i, _ in program.walk() if isinstance(i, Loop))
    assert {program.values[r.outer].dtype for r in loop.stacked} == {"bfloat16"}
    assert memory(program).peak > whole


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("layer:keep=products", "the model has no loop over 'layer'; did you mean 'layers'"),
        ("layers:keep=product", "have no values of kind or scope 'product'; did you mean 'products'"),
        ("layers:keep=", "write the dimension of a loop, or DIM:keep=KIND"),
        ("layers:products", "write the dimension of a loop, or DIM:keep=KIND"),
        ("layers:keep=products/2-rooter", "no scope or weight 'rooter' to leave out of 'products/2-rooter'"),
        ("layers:keep=products/0", "have no values of kind or scope 'products/0'; did you mean 'products'"),
    ],
)
def test_what_means_nothing_is_refused(text: str, why: str) -> None:
    with pytest.raises(mtf.UserError, match=why):
        run("fused", text)


def test_one_loop_is_named_once() -> None:
    both = mtf.Options(recompute=frozenset({"layers", "layers:keep=products"}))
    with pytest.raises(mtf.UserError, match="apply to the same loops; give only one entry for layers"):
        made("fused").lower(mtf.Mesh("one:1"), mtf.Layout(""), both)


def test_texts_have_one_form() -> None:
    assert str(Recomputed.parse("layers : keep = wi + attention+products+outputs")) == (
        "layers:keep=products+attention+wi"
    )
    assert mtf.Options(recompute=frozenset({"layers:keep=attention+products"})).recompute == {
        Recomputed("layers", ("products", "attention"))
    }
    assert Recomputed.parse("layers:keep=wi+attention+products/2-q+outputs").keep == (
        "products/2-q",
        "outputs",
        "attention",
        "wi",
    )
    assert Recomputed.parse("layers:keep=products/2+products").keep == ("products",)
    assert Recomputed.parse("layers") == Recomputed("layers") and len(KINDS) == 4


@pytest.mark.parametrize(
    ("word", "without"),
    [
        ("products-experts", ("experts",)),
        ("products/2-blocks/0-3", ("blocks/0-3",)),
        ("attention-a-b/0-31-c", ("a", "b/0-31", "c")),
    ],
)
def test_numbers_of_layers_belong_to_the_name_that_is_left_out(word: str, without: tuple[str, ...]) -> None:
    kind = KeptKind.of(word)
    assert kind is not None and kind.without == without
    assert KeptKind.of(f"products/{'1' * 5000}") is None
