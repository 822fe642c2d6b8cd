"""Names of axes that Flax keeps beside parameters name dimensions: boxes of Linen, variables of NNX, pytrees
of PartitionSpecs. The boxes are stand-ins with Flax's attributes; one test asks Flax itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class

import layoutopt
import mesh_tf_core as mtf
from tests.importers.jax_models import compared, numbers


class _Boxed:
    """An array in a box, as Flax has them."""

    def __init__(self, value: Any, names: Any) -> None:
        self.value, self.noted = value, names

    def tree_flatten_with_keys(self) -> Any:
        return ((GetAttrKey("value"), self.value),), self.noted

    def tree_flatten(self) -> Any:
        return (self.value,), self.noted

    @classmethod
    def tree_unflatten(cls, names: Any, children: Any) -> Any:
        return cls(children[0], names)


@register_pytree_with_keys_class
class Partitioned(_Boxed):
    """`flax.linen.Partitioned`."""

    @property
    def names(self) -> Any:
        return self.noted

    def unbox(self) -> Any:
        return self.value


@register_pytree_with_keys_class
class Logical(Partitioned):
    """`flax.linen.LogicallyPartitioned`."""

    rules = None


@register_pytree_with_keys_class
class Variable(_Boxed):
    """`flax.nnx.Param`."""

    def get_metadata(self) -> dict[str, Any]:
        return {"out_sharding": self.noted}


def unboxed(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: x.value if isinstance(x, _Boxed) else x, tree, is_leaf=lambda x: isinstance(x, _Boxed)
    )


def loss(params: Any, batch: Any) -> Any:
    """A feed-forward block, residual, and a head of its own."""
    p = unboxed(params)
    x = p["table"][batch["tokens"]]
    x = x + jax.nn.relu(x @ p["up"]) @ p["down"]
    log = jax.nn.log_softmax((x * p["norm"]) @ p["head"])
    return -jnp.take_along_axis(log, batch["tokens"][..., None], -1).mean()


NAMES = {
    "table": ("vocab", "embed"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "norm": ("norm",),
    "head": ("embed", "vocab"),
}
SHAPES = {"table": (16, 8), "up": (8, 12), "down": (12, 8), "norm": (8,), "head": (8, 16)}


def arguments(box: Any = Logical, **names: Any) -> tuple[Any, Any]:
    f = numbers()
    params = {k: box(f(*shape), {**NAMES, **names}[k]) for k, shape in SHAPES.items()}
    return params, {"tokens": jnp.asarray(np.arange(12).reshape(2, 6), jnp.int32)}


def axes_of(model: Any) -> dict[str, str]:
    return {a.path: str(a).partition(" ")[2] for a in model.origin.parameters.values()}


@pytest.mark.parametrize("box", [Logical, Partitioned, Variable])
def test_boxes_name_dimensions_and_are_no_part_of_paths(box: Any) -> None:
    given = arguments(box)
    model = layoutopt.from_jax(loss, *given)
    assert axes_of(model) == {
        "table": "[vocab embed]",
        "up": "[embed mlp]",
        "down": "[mlp embed]",
        "norm": "[embed]",
        "head": "[embed vocab]",
    }
    assert list(model.origin.notes) == [
        "the logical axes 'embed', 'norm' are the same dimension, which is named 'embed'"
    ]
    if box is Logical:
        off = compared(model, loss, given, [("data:2", "vocab:data;mlp:data")])
        assert max(off.values()) <= 1e-5


def test_what_one_logical_name_unites_is_apart_without_it() -> None:
    params, batch = arguments()
    model = layoutopt.from_jax(loss, unboxed(params), batch)
    found = axes_of(model)
    assert found["table"] == "[vocab d_model]" and found["head"] == "[d_model vocab_2]"


def test_one_logical_name_unites_no_factor_with_a_whole_axis() -> None:
    def halves(params: Any, batch: Any) -> Any:
        p = unboxed(params)
        cut = (batch["x"] @ p["up"]).reshape(-1, 2, 6)
        return (jnp.tanh(cut[:, :1] * cut[:, 1:]) ** 2).mean() + (
            jnp.tanh(batch["x"] @ p["other"]) ** 2
        ).mean()

    params = {k: Logical(jnp.ones((8, 12)), ("embed", "mlp")) for k in ("up", "other")}
    model = layoutopt.from_jax(halves, params, {"x": jnp.ones((4, 8))})
    assert model.origin.parameters["up"].sizes[1] == (2, 6)
    other = model.origin.parameters["other"]
    assert other.sizes[1] == (12,) and other.axes[1][0] not in model.origin.parameters["up"].axes[1]


def test_specs_beside_plain_arrays_say_the_same() -> None:
    params, batch = arguments()
    specs = {k: P(*names) for k, names in NAMES.items()}
    model = layoutopt.from_jax(loss, unboxed(params), batch, names={**specs, "embed": "d_model"})
    assert axes_of(model)["up"] == "[d_model mlp]" and axes_of(model)["head"] == "[d_model vocab]"


def test_names_of_the_user_come_first() -> None:
    model = layoutopt.from_jax(loss, *arguments(), names={"head": (None, "classes"), "mlp": "hidden"})
    assert axes_of(model)["head"] == "[embed classes]" and axes_of(model)["up"] == "[embed hidden]"


def test_axes_of_a_mesh_are_no_names() -> None:
    mesh = {"table": ("tp", "fsdp"), "up": ("fsdp", "tp"), "down": ("tp", "fsdp"), "norm": (None,)}
    model = layoutopt.from_jax(loss, *arguments(Partitioned, **mesh, head=("fsdp", "tp")))
    assert axes_of(model)["up"] == "[d_model d_ff]"
    (note,) = model.origin.notes
    assert "read as mesh axes" in note and "'tp' occurs with the sizes 12, 16" in note


def test_a_logical_name_of_several_dimensions_is_numbered() -> None:
    model = layoutopt.from_jax(loss, *arguments(up=("embed", "embed")))
    assert axes_of(model)["up"] == "[embed mlp]"  # `down` says what its other side is called, too
    model = layoutopt.from_jax(loss, *arguments(up=("embed", "embed"), down=("embed", "embed")))
    assert axes_of(model)["up"] == "[embed embed_2]"
    assert any("'embed' stands for several dimensions" in note for note in model.origin.notes)


@pytest.mark.parametrize(
    ("names", "own", "said"),
    [
        (
            {"norm": ("norm", "embed")},
            None,
            r"'norm' has the logical axes \(norm, embed\), but its shape \(8,\) has 1 axes",
        ),
        (
            {},
            {"head": (None, "embed")},
            "gives axis 1 of 'head' the name 'embed', but the logical axes",
        ),
        (
            {},
            {"heads": P("embed", "vocab")},
            "names has an entry for 'heads', but no array has this path; did you mean",
        ),
        ({}, {"head": {"kernel": 3}}, "names has the value 3 at 'head/kernel'; give a tuple of names"),
    ],
)
def test_conflicts_are_refused(names: dict[str, Any], own: Any, said: str) -> None:
    with pytest.raises(mtf.UserError, match=said):
        layoutopt.from_jax(loss, *arguments(**names), names=own)


def test_fewer_names_than_axes_name_none() -> None:
    model = layoutopt.from_jax(loss, *arguments(up=("mlp",)))
    assert axes_of(model)["up"] == "[embed mlp]"
    assert any(note.startswith("up has the logical axes (mlp), but its shape") for note in model.origin.notes)


def test_a_parameter_may_be_called_value() -> None:
    f = numbers()
    model = layoutopt.from_jax(
        lambda p, b: ((b["x"] @ p["head"]["value"]) ** 2).mean(), {"head": {"value": f(4, 3)}}, {"x": f(2, 4)}
    )
    assert list(model.origin.parameters) == ["head/value"]


def test_flax_itself() -> None:
    import flax.linen as nn
    from flax import nnx

    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    net = nn.Dense(12, kernel_init=init, use_bias=False)
    x = jnp.ones((4, 8))
    params = jax.eval_shape(net.init, jax.random.key(0), x)
    model = layoutopt.from_jax(lambda p, b: net.apply(p, b).mean(), params, x)
    assert axes_of(model) == {"params/kernel": "[embed mlp]"}
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    with nnx.use_eager_sharding(False):
        made = nnx.eval_shape(lambda: nnx.Linear(8, 12, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(made, nnx.Param)
    model = layoutopt.from_jax(lambda p, b: nnx.merge(graph, p)(b).mean(), state, x)
    assert axes_of(model) == {"kernel": "[embed mlp]"}
