"""What is imported from JAX computes what JAX computes, under layouts too; its dimensions have the names
that a user would give them; what cannot be imported is refused by name."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import layoutopt
import mesh_tf_core as mtf
from layoutopt.space.parallelism import parallelism
from tests.docs.console import steps
from tests.importers.jax_models import (
    MODELS,
    compared,
    imported,
    numbers,
    perceptron,
    perceptron_arguments,
)
from tests.marks import by_day
from tests.searching import search

ROOT = Path(__file__).resolve().parents[2]

EXPECTED = {
    "transformer": {
        "embedding": "[vocab d_model]",
        "blocks/1/qkv": "[d_model (qkv_parts heads d_kv_parts d_kv)]",
        "blocks/1/out": "[(heads d_kv_parts d_kv) d_model]",
        "blocks/0/gate_up": "[d_model (gate_up_parts d_ff)]",
        "blocks/0/down": "[d_ff d_model]",
        "tokens": "[batch length]",
    },
    "scanned transformer": {
        "blocks/qkv": "[layers d_model (qkv_parts heads d_kv_parts d_kv)]",
        "blocks/down": "[layers d_ff d_model]",
        "blocks/first_norm": "[layers d_model]",
    },
    "convolutions": {
        "stem": "[height_taps width_taps channels stem]",
        "head": "[(height width stem) head]",
        "image": "[batch height width channels]",
    },
    "perceptron": {
        "layers/0/w": "[x layers_0]",
        "layers/1/w": "[layers_0 layers_1]",
        "layers/2/w": "[layers_1 classes]",
    },
    "recurrence": {"x": "[batch time x]", "w": "[x w]", "u": "[u w]"},
    "experts": {"router": "[x experts]", "up": "[experts x up]", "down": "[experts up x]"},
}


@pytest.mark.parametrize("name", by_day(MODELS))
@pytest.mark.one_in(2)
def test_loss_and_gradients_are_those_of_jax(name: str) -> None:
    loss, _, layouts = MODELS[name]
    model, given = imported(name)
    off = compared(model, loss, given, layouts)
    assert {path: by for path, by in off.items() if not by <= 1e-5} == {}


def test_operations_know_the_users_lines() -> None:
    model, _ = imported("perceptron")
    source = Path(perceptron.__code__.co_filename).read_text(encoding="utf-8").splitlines()
    first = perceptron.__code__.co_firstlineno
    written = {place for path, place in model.graph.places.items() if "einsum" in path}
    lines = [int(place.rpartition(":")[2]) for place in written]
    assert lines and all(place.startswith(perceptron.__code__.co_filename) for place in written)
    assert all(first < line <= first + 20 and "@" in source[line - 1] for line in lines)


@pytest.mark.parametrize("name", EXPECTED)
def test_dimensions_have_the_names_of_what_they_do(name: str) -> None:
    model, _ = imported(name)
    arrays = {**model.origin.parameters, **model.origin.batch}
    found = {path: str(arrays[path]).partition(" ")[2] for path in EXPECTED[name]}
    assert found == EXPECTED[name]


def test_equal_sizes_of_other_layers_are_other_dimensions() -> None:
    """The last layer of the second stage has as many outputs as the first of the first: no evidence."""

    def loss(params, batch):
        h = batch["x"]
        for stage in params.values():
            h = (
                jnp.tanh(h @ stage["fc_1"]["w"] + stage["fc_1"]["b"]) @ stage["fc_2"]["w"]
                + stage["fc_2"]["b"]
            )
        return (h**2).mean()

    def layer(n, m):
        return {"w": jax.ShapeDtypeStruct((n, m), jnp.float32), "b": jax.ShapeDtypeStruct((m,), jnp.float32)}

    params = {
        "stage_0": {"fc_1": layer(6, 64), "fc_2": layer(64, 32)},
        "stage_1": {"fc_1": layer(32, 16), "fc_2": layer(16, 64)},
    }
    model = layoutopt.from_jax(loss, params, {"x": jax.ShapeDtypeStruct((8, 6), jnp.float32)})
    made = {path: array.named[-1] for path, array in model.origin.parameters.items() if path.endswith("b")}
    assert len(set(made.values())) == 4, made


def test_state_is_stored_and_metrics_are_reported() -> None:
    model, _ = imported("convolutions")
    assert list(model.metrics) == ["norm"]
    assigned = [n.op.variable.name for n in model.graph.nodes if n.op.name == "assign"]
    assert assigned == ["state/mean", "state/var"]
    assert not model.graph.variables["state/mean"].trainable


def test_channels_that_a_filter_keeps_apart_are_one_dimension() -> None:
    model, _ = imported("convolutions")
    assert {n for n in model.graph.dims() if n.startswith("_")} == {"_single"}


def test_layers_of_a_scan_are_one_block_of_stacked_parameters() -> None:
    model, _ = imported("scanned transformer")
    assert model.graph.variables["blocks/down"].stacked == 1
    assert [n.op.dim for n in model.graph.nodes if n.body is not None] == [mtf.Dim("layers", 2)]


def test_dropout_is_one_operation() -> None:
    def loss(params, batch, key):
        h = batch["x"] @ params["w"]
        return (jnp.where(jax.random.bernoulli(key, 0.75, h.shape), h / 0.75, 0.0) ** 2).mean()

    f = numbers()
    model = layoutopt.from_jax(loss, {"w": f(4, 6)}, {"x": f(8, 4)}, rng=jax.random.PRNGKey(0))
    kinds = [n.op.name for n in model.graph.nodes]
    assert "dropout" in kinds and "where" not in kinds and "randomuniform" not in kinds


def test_grouped_queries_have_dimensions_of_their_own() -> None:
    def loss(params, batch):
        q = jnp.einsum("bld,dhk->blhk", batch["x"], params["q"])
        k, v = (jnp.repeat(jnp.einsum("bld,dhk->blhk", batch["x"], params[n]), 2, 2) for n in "kv")
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return (jnp.einsum("bhqk,bkhd,hdm->bqm", weights, v, params["o"]) ** 2).mean()

    f = numbers()
    params = {"q": f(6, 4, 8), "k": f(6, 2, 8), "v": f(6, 2, 8), "o": f(4, 8, 6)}
    model = layoutopt.from_jax(loss, params, {"x": f(2, 5, 6)})
    found = {a.path: str(a).partition(" ")[2] for a in model.origin.parameters.values()}
    assert found["q"] == "[d_model (heads group) d_kv]" and found["k"] == "[d_model heads d_kv]"
    off = compared(model, loss, (params, {"x": f(2, 5, 6)}), [("data:2", "heads:data")])
    assert max(off.values()) <= 1e-5


def test_heads_have_their_name_where_rotary_positions_take_d_kv_apart() -> None:
    def rotated(x):
        a, b = x[..., ::2], x[..., 1::2]
        return jnp.stack([a - b, a + b], -1).reshape(x.shape)

    def loss(params, tokens):
        x = params["embed"][tokens]
        q, k, v = (jnp.einsum("bld,dhk->blhk", x, params[n]) for n in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)))
        x = x + jnp.einsum("bqhd,hdm->bqm", jnp.einsum("bhqk,bkhd->bqhd", weights, v), params["o"])
        return ((x + jax.nn.relu(x @ params["wi"]) @ params["wo"]) ** 2).mean()

    f = numbers()
    params = {n: f(6, 4, 8) for n in "qkv"} | {
        "o": f(4, 8, 6),
        "wi": f(6, 12),
        "wo": f(12, 6),
        "embed": f(9, 6),
    }
    model = layoutopt.from_jax(loss, params, jax.ShapeDtypeStruct((2, 5), jnp.int32))
    found = {a.path: str(a).partition(" ")[2].strip("[]").split() for a in model.origin.parameters.values()}
    assert found["wi"] == ["d_model", "d_ff"]
    assert [found[n][1] for n in "qkv"] == ["heads"] * 3 and found["o"] == ["heads", "d_v", "d_model"]


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.one_in(2)
def test_the_length_is_that_of_the_layers_whether_or_not_targets_are_cut_from_the_tokens(more: int) -> None:
    def loss(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens[:, : tokens.shape[1] - more]]
        scores = jax.nn.softmax(jnp.einsum("bid,bjd->bij", x @ params["q"], x @ params["k"]))
        logits = jax.nn.log_softmax(jnp.einsum("bij,bjd->bid", scores, x) @ params["table"].T)
        return -jnp.take_along_axis(logits, tokens[:, more:, None], -1).mean()

    S = jax.ShapeDtypeStruct
    params = {"table": S((32, 8), jnp.float32), "q": S((8, 4), jnp.float32), "k": S((8, 4), jnp.float32)}
    model = layoutopt.from_jax(loss, params, S((4, 16 + more), jnp.int32))
    sizes = model.graph.dims()
    assert (sizes["length"], sizes["memory_length"]) == ({16}, {16})
    assert model.tokens == 4 * (16 + more)
    sequence = {"length", "memory_length"} | ({"given_length"} if more else set())
    assert sequence <= set(parallelism(model).sequence)
    plan = layoutopt.search(model, mesh="x:2", hardware="tpu-v5e", allow="+sequence")
    assert "length" in plan.allowed.elsewhere


def test_ends_of_edges_are_no_tokens() -> None:
    """Numbers that are places in other values count edges, those that look up parameters a text."""

    def loss(params, batch):
        h = batch["nodes"] @ params["w"]
        sent = jax.vmap(lambda x, at: x[at])(h, batch["senders"])
        got = jax.vmap(lambda x, at: jnp.zeros((6, 4)).at[at].add(x))(sent, batch["receivers"])
        return (got**2).mean()

    f = numbers()
    ends = {k: jnp.zeros((2, 5), jnp.int32) for k in ("senders", "receivers")}
    model = layoutopt.from_jax(loss, {"w": f(3, 4)}, {"nodes": f(2, 6, 3), **ends})
    assert "length" not in model.graph.dims()
    assert str(model.origin.batch["receivers"]) == "receivers [batch receivers]"


def test_a_model_keeps_the_arrays_that_it_was_given() -> None:
    params, batch = {"w": np.ones((2, 3), np.float32)}, {"x": np.ones((4, 2), np.float32)}
    model = layoutopt.from_jax(lambda p, b: (b["x"] @ p["w"]).sum(), params, batch)
    params["w"][:] = 7
    initial = model.graph.variables["w"].initializer
    assert (initial.piece("w", (2, 3), (0, 0), (2, 3)) == 1).all()
    assert copy.deepcopy(model.graph).variables["w"].initializer == initial


def test_an_array_in_a_function_is_no_parameter() -> None:
    """The user's program holds all of it on each device: storage cannot split it, and no count names it."""
    table = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    params, batch = {"w": np.ones((8, 8), np.float32)}, {"x": np.ones((4, 8), np.float32)}
    model = layoutopt.from_jax(lambda p, b: (jnp.tanh(b["x"] @ table) @ p["w"]).sum(), params, batch)
    priced = layoutopt.cost(model, "data:4", "batch:data", hardware="h100", storage="zero3")
    assert {*priced.data.storage} == {"w"} and model.frozen == 0


def test_names_are_those_that_the_user_gives() -> None:
    params, batch = perceptron_arguments()
    names = {"layers/0/w": ("inputs", "hidden"), "classes": "labels"}
    model = layoutopt.from_jax(perceptron, params, batch, names=names)
    found = [str(a) for a in model.origin.parameters.values()]
    assert "layers/0/w [inputs hidden]" in found and "layers/2/b [labels]" in found


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            {"layers/0/q": ("a", "b")},
            "names has an entry for 'layers/0/q', but no array has this path; did you mean",
        ),
        (
            {"layers/0/w": ("a",)},
            r"names\['layers/0/w'\] has 1 entries, but the array's shape \(12, 16\) has 2 axes",
        ),
        (
            {"layers/0/w": ("a", "b"), "layers/0/b": ("c",)},
            "gives two names to one dimension",
        ),
        ({"layers/1/w": ("a", "a")}, "both occur in one array, or their sizes differ"),
        ({"vocabulary": "labels"}, "names renames 'vocabulary', which is not a dimension"),
    ],
)
def test_names_that_do_not_fit_are_refused(names: dict[str, object], said: str) -> None:
    params, batch = perceptron_arguments()
    with pytest.raises(mtf.UserError, match=said):
        layoutopt.from_jax(perceptron, params, batch, names=names)


def test_what_has_no_rule_is_refused_with_the_users_line() -> None:
    def loss(params, batch):
        return jnp.linalg.det(params["w"]) + batch["x"].sum()

    f = numbers()
    line = loss.__code__.co_firstlineno + 1
    with pytest.raises(mtf.UserError, match=rf"test_from_jax.py:{line}.*cannot import lu of float32\[4,4\]"):
        layoutopt.from_jax(loss, {"w": f(4, 4)}, {"x": f(3)})


def test_all_that_cannot_be_imported_is_listed_at_once() -> None:
    """Also behind what is refused, and in loops; not what fails because of another refusal alone."""

    def loss(params, batch):
        h = jnp.cumprod(batch["x"] @ params["w"], 1)
        h = jax.lax.cond(h.sum() > 0, lambda h: h, lambda h: 2 * h, h)

        def layer(h, w):
            return jnp.cumprod(jnp.sin(h @ w), 1)[:, ::-1], None

        h, _ = jax.lax.scan(layer, h, params["layers"])
        return h.mean() + jax.lax.sort((h[0], h[1]), num_keys=2)[0].sum()

    f = numbers()
    first = loss.__code__.co_firstlineno
    here = "[^ ]*test_from_jax.py"
    with pytest.raises(mtf.UserError) as error:
        layoutopt.from_jax(loss, {"w": f(4, 4), "layers": f(3, 4, 4)}, {"x": f(8, 4)})
    said = (
        rf"from_jax: \(1\) {here}:{first + 1}, {here}:{first + 5}: cannot import cumprod of float32\[8,4\]"
        rf": .* \(2\) {here}:{first + 2}: cannot import cond .*"
        rf" \(3\) {here}:{first + 8}: cannot import sort .*: it sorts by more than one key; sort by one key"
    )
    assert re.fullmatch(said, str(error.value)), str(error.value)


TRICKS = """
import jax
import jax.numpy as jnp


@jax.custom_jvp
def straight_through(x):
    return jnp.round(x)


straight_through.defjvp(lambda p, t: (jnp.round(p[0]), t[0]))
"""


@pytest.mark.parametrize("folder", ["/home/me/jax/nn", f"{Path(jax.__file__).parent}opt"])
def test_whose_a_derivative_is_goes_by_where_jax_lies(folder: str) -> None:
    tricks: dict[str, Any] = {}
    exec(compile(TRICKS, f"{folder}/tricks.py", "exec"), tricks)

    def loss(params: Any, batch: Any) -> Any:
        return (tricks["straight_through"](batch["x"] @ params["w"]) ** 2).mean()

    f = numbers()
    given = {"w": 5 * f(4, 6)}, {"x": 5 * f(8, 4)}
    off = compared(layoutopt.from_jax(loss, *given), loss, given, [])
    assert max(off.values()) <= 1e-5


def test_a_branch_is_refused_with_what_to_write() -> None:
    def loss(params, batch):
        return jax.lax.cond(batch["x"].sum() > 0, lambda w: w.sum(), lambda w: w.prod(), params["w"])

    f = numbers()
    with pytest.raises(mtf.UserError, match=r"test_from_jax.py:\d+.*cannot import cond.*jnp.where"):
        layoutopt.from_jax(loss, {"w": f(4)}, {"x": f(3)})


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    f = numbers()
    with pytest.raises(mtf.UserError, match=r"the loss returns float32\[3\], not a floating-point scalar"):
        layoutopt.from_jax(lambda p, b: p["w"] + b["x"], {"w": f(3)}, {"x": f(3)})


def test_types_are_enough_and_a_search_proves_its_answer() -> None:
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), perceptron_arguments())
    model = layoutopt.from_jax(perceptron, *types)
    plan = search(model, mesh="data:2", hardware="tpu-v5e", microbatches=[1], recompute=[False])
    assert plan.to_json()["solver"]["status"] == "OPTIMAL"


def test_types_begin_as_ones_where_they_scale_also_layer_by_layer() -> None:
    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ p["w"] + p["b"]) * p["g"], None

        x, _ = jax.lax.scan(layer, batch, {k: params[k] for k in "bgw"})
        return jnp.square(x * params["ln"].astype(x.dtype) + params["last"]).mean()

    shapes = {"b": (2, 8), "g": (2, 8), "w": (2, 8, 8), "ln": (8,), "last": (8,)}
    params = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}
    model = layoutopt.from_jax(loss, params, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    begin = {name: v.initializer for name, v in model.loss.graph.variables.items()}
    assert {k for k, v in begin.items() if v == mtf.ONES} == {"g", "ln"}
    assert {k for k, v in begin.items() if v == mtf.ZEROS} == {"b", "last"}


def test_the_page_is_true() -> None:
    names: dict[str, object] = {"__name__": __name__}
    found = steps((ROOT / "docs" / "guides" / "jax.md").read_text(encoding="utf-8"))
    for step in found:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(step.source, "docs/guides/jax.md", "exec"), names)
        assert output.getvalue().splitlines() == list(step.shown), step.source


def test_layoutopt_does_not_load_jax(tmp_path: Path) -> None:
    code = "import sys, layoutopt, layoutopt.importers.jax.model; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("order", [(0, 1, 2, 0), (0, 0, 1, 2), (0, 1, 2, 0, 1, 2)])
def test_layers_that_share_their_weights_add_up_their_gradients(order) -> None:
    def loss(params, batch):
        h = batch["x"]
        for i in order:
            h = jnp.tanh(h @ params["layers"][i] @ params["mix"])
        return (h**2).mean()

    f = numbers()
    given = {"layers": [5 * f(6, 6) for _ in range(3)], "mix": 5 * f(6, 6)}, {"x": f(4, 6)}
    # Six steep layers amplify the last digit.
    assert max(compared(layoutopt.from_jax(loss, *given), loss, given, []).values()) <= 3e-5
