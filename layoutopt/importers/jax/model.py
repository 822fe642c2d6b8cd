"""`from_jax`: a JAX loss as a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mesh_tf_core as mtf
from layoutopt.importers.jax import drawing, elementwise, indexed, loops, products, reductions, shapes
from layoutopt.importers.jax.arguments import arguments
from layoutopt.importers.jax.classes import classes
from layoutopt.importers.jax.equations import (
    KEY,
    EquationBlock,
    Operand,
    Var,
    has_fractions,
)
from layoutopt.importers.jax.factors import Factors, factors
from layoutopt.importers.jax.jax_plan import JaxPlan
from layoutopt.importers.jax.keys import Keys
from layoutopt.importers.jax.leaves import Leaf, flat, leaves, leaves_of, new_state, stacked_leaf
from layoutopt.importers.jax.logical import logical_axes, said_of, same_dimensions
from layoutopt.importers.jax.names import ArgumentArrays
from layoutopt.importers.jax.naming import named
from layoutopt.importers.jax.optax_of import optax_of, optimizer_of
from layoutopt.importers.jax.origin import ArrayAxes, ImportedFunction
from layoutopt.importers.jax.parts import why_whole
from layoutopt.importers.jax.placing import ArrayPlacing, inner_dims
from layoutopt.importers.jax.reader import KEEPS, traced
from layoutopt.importers.jax.relations import Axis
from layoutopt.importers.jax.reroll import Rerolled, rerolled
from layoutopt.importers.jax.roles import GIVEN_LENGTH
from layoutopt.importers.jax.shardings import jax_mesh
from layoutopt.importers.jax.writer import Handler, Writer
from layoutopt.plan.build import Plan, check_plan_model
from layoutopt.plan.exported import ExportedTensor
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.model import TrainingStep
from mesh_tf_core.optimizers import Optimizer
from mesh_tf_core.tracing.graph import Graph

TABLE: Mapping[str, Handler] = {
    **elementwise.TABLE,
    **reductions.TABLE,
    **drawing.TABLE,
    **shapes.TABLE,
    **products.TABLE,
    **indexed.TABLE,
    **loops.TABLE,
}
"""Primitive -> the function that writes it as operations of the graph."""


@dataclass
class JaxModel(mtf.Model):
    """A model that a JAX function is."""

    origin: ImportedFunction | None = field(default=None, repr=False, compare=False)

    def applied(self, plan: Plan) -> JaxPlan:
        """The plan in the user's own function: `plan.jax`.

        Raises:
          UserError: the plan is for another model, or places single operations by rules.
        """
        check_plan_model(plan, self)
        if plan.layout.refined:
            path = plan.layout.refined[0][0]
            raise UserError(
                f"plan.jax: the plan places {path!r} by rules for single operations, which cannot be "
                "applied to a JAX function; remove the field `refined` from the plan, or search again"
            )
        for dim, count in self.stages(plan.mesh, plan.layout).items():
            raise UserError(
                f"plan.jax: the plan splits {dim!r} into {count} stages of a pipeline, but a JAX function "
                f"has no pipeline stages; search again without --pipeline {dim}"
            )
        return self.under(plan.mesh, plan.layout, plan.options, jax_mesh(plan.mesh, plan.slices))

    def arrays(self, plan: Plan) -> dict[str, tuple[ExportedTensor, ...]]:
        """The user's own arrays as the plan stores them; UserError as `plan.jax` has it."""
        check_plan_model(plan, self)
        origin = self.origin
        assert origin is not None
        lies = ArrayPlacing(plan.mesh, plan.layout, origin, self.lower(plan.mesh, plan.layout, plan.options))
        found = {
            "PARAMETERS": [(a, lies.stored(a)) for a in origin.parameters.values()],
            "OPTIMIZER": [(a, lies.stored(a, slot=True)) for a in origin.parameters.values()],
            "STATE": [(a, lies.stored(a)) for a in origin.state.values()],
            "INPUTS": [(a, lies.argument(a)) for a in origin.batch.values()],
        }
        return {
            name: tuple(
                ExportedTensor(a.path, a.named, tuple(axes or () for axes in spec), a.shape)
                for a, spec in listed
            )
            for name, listed in found.items()
            if listed
        }

    def notes(self, options: mtf.Options) -> tuple[str, ...]:
        """Notes on parts of the function that are not in the graph, and on options that differ from the
        function's own."""
        assert self.origin is not None
        parts = [
            f"{w}: this jax.checkpoint covers only part of a layer and is ignored; {KEEPS}"
            for w in self.origin.parts_recomputed
        ]
        own = sorted(self.origin.recomputed - {each.dim for each in options.recompute})
        left = [
            f"the function applies jax.checkpoint to the loop over {', '.join(own)}, but the plan does "
            "not recompute this loop, so this jax.checkpoint is not applied"
        ]
        return (*super().notes(options), *self.origin.notes, *parts, *(left if own else ()))

    def _in_parts(self, microbatches: int) -> TrainingStep:
        """Only where the user's own step can be run so too: no search finds what `plan.jax` would refuse."""
        origin, batch = self.origin, self.batch_dim
        if origin is None or batch is None:
            return super()._in_parts(microbatches)
        if why := self.graph.remembered("why_whole", lambda: why_whole(self.loss, origin, batch)):
            raise UserError(f"microbatches={microbatches}: {why}; use one microbatch")
        return super()._in_parts(microbatches)

    def under(self, mesh: mtf.Mesh, layout: mtf.Layout, options: mtf.Options, devices: Any = None) -> JaxPlan:
        """The user's function under a layout; `devices` as `Shardings` has them."""
        assert self.origin is not None
        return JaxPlan(self, self.origin, mesh, layout, options, devices)

    def step_on(self, mesh: mtf.Mesh, layout: mtf.Layout, options: mtf.Options, devices: Any) -> Any:
        """The user's own training step under a layout, traced and not yet compiled."""
        assert self.origin is not None
        return self.under(mesh, layout, options, devices).train_step(None, optax_of(self.optimizer)).traced()


def from_jax(
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    optimizer: str | Optimizer = "adamw",
    rng: Any = None,
    names: Any = None,
    state: Any = None,
    name: str = "",
) -> JaxModel:
    """Builds a model from a JAX loss function. The function is traced once and not changed.

    Args:
      loss: loss(params, batch), or loss(params, state, batch, rng) without the arguments that are not given.
        The function returns a scalar, or (scalar, auxiliary). If `auxiliary` is a mapping, its scalars are
        reported with the loss, and a pytree in it with the structure of `state` is the new state.
      params: a pytree of arrays to train, or of their types (jax.ShapeDtypeStruct). Arrays are the initial
        values; matrices that are given as types are initialised with small random numbers.
      batch: a pytree of arrays or types. The path of an array is the name of the model's input.
      optimizer: adamw, adam, sgd, adafactor (with optax's defaults), or an `mtf.Optimizer`.
      rng: a random key, or its type. Random numbers are the same under every layout, but differ from JAX's.
      names: {"path/of/a/parameter": ("d_model", "d_ff")} names dimensions, and {"d_ff_2": "bottleneck"}
        renames a dimension. A pytree of PartitionSpec with the structure of `params` gives logical axes to
        parameters that have no Flax metadata.
      state: a pytree of arrays or types that are stored and not trained, such as batch statistics.

    Raises:
      UserError: a JAX primitive is not supported (the message names the line of the function), or the
        arguments do not match the function.

    Example:
      >>> import jax, layoutopt
      >>> def loss(params, batch):
      ...     return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()
      >>> def array(*shape):
      ...     return jax.ShapeDtypeStruct(shape, "float32")
      >>> model = layoutopt.from_jax(loss, {"w": array(4, 2)}, {"x": array(8, 4), "y": array(8, 2)})
      >>> model.parameters
      8
    """
    if not callable(loss):
        raise UserError(f"from_jax: {loss!r} is not a function; give loss(params, batch)")
    given = [("params", params), ("state", state), ("batch", batch), ("rng", rng)]
    given = [(role, tree) for role, tree in given if role in ("params", "batch") or tree is not None]
    found: dict[str, list[Leaf]] = {}
    types = []
    for role, tree in given:
        found[role], tree_types = leaves_of(tree)
        types.append(tree_types)
    if not found["params"]:
        raise UserError("from_jax: params has no arrays; give the pytree of arrays to train")
    said, noted = said_of(names, [leaf for listed in found.values() for leaf in listed])
    trace = traced(loss, types)
    variables = iter(trace.block.ins)
    pairs = {
        role: [(next(variables), replace(x, noted=noted.get(x.path, x.noted))) for x in listed]
        for role, listed in found.items()
    }
    for listed in pairs.values():
        for v, leaf in listed:
            v.path = leaf.path
    given_arrays = ArgumentArrays(pairs["params"], pairs.get("state", []), pairs["batch"])
    results = _Results(trace.results, state, trace.block, [v for v, _ in given_arrays.state])
    again, arrays = _in_loops(trace.block, given_arrays, pairs.get("rng", []), results)
    block, cut, notes = again.block, factors(again.block), [*trace.notes, *again.notes]
    logical = logical_axes(list(arrays.all()), notes)
    parameters, inputs = [v for v, _ in arrays.parameters], [v for v, _ in arrays.batch]
    named_alike = same_dimensions(logical, {v.path for leaf, v, _ in arrays.given() if leaf.path in said})
    dims = classes(block, cut, parameters, inputs, _hints(said, arrays, cut), named_alike, again.stacks)
    called = named(block, dims, arrays, said, logical, notes)
    again.alias(dims)
    title = name or _name_of(loss)
    writer = Writer(Graph(title), dims, called, TABLE)
    changed = {id(v) for v, n in results.new_state.items() if trace.block.outs[n] is not v}
    arguments(writer, block, arrays, pairs.get("rng", []), changed)
    writer.function(block)
    for v, leaf in arrays.state:
        member = again.stacks.get(v, (v,))[0]
        if member in results.new_state:
            _store(writer, v, leaf, block.outs[results.new_state[member]])
    tokens = _tokens(writer, arrays)
    origin = ImportedFunction(
        loss,
        tuple(types),
        tuple(found),
        _in_order(given_arrays.parameters, _axes(writer, arrays, arrays.parameters)),
        _in_order(given_arrays.state, _axes(writer, arrays, arrays.state, "state/")),
        _axes(writer, arrays, arrays.batch),
        tuple(path for path, _, _ in flat(trace.results)),
        writer.sources,
        (*notes, *writer.notes),
        trace.block,
        dims,
        called,
        again,
        {number: found.id for number, found in writer.values.items() if isinstance(found, Tensor)},
    )
    writer.graph.unsplit.update(
        inner_dims([*origin.parameters.values(), *origin.state.values(), *origin.batch.values()])
    )
    return JaxModel(
        writer.tensor(block.outs[results.first]),
        optimizer_of(optimizer),
        results.metrics(writer, block),
        title,
        token_dims=tokens,
        framework="jax",
        origin=origin,
    )


def _name_of(loss: Callable[..., Any]) -> str:
    """What a function is called; a lambda, or an object, is a model."""
    found = str(getattr(loss, "__name__", ""))
    return found if found.isidentifier() else "model"


def _in_loops(
    block: EquationBlock, arrays: ArgumentArrays, keys: Sequence[tuple[Var, Leaf]], results: _Results
) -> tuple[Rerolled, ArgumentArrays]:
    """The block with its equal layers as loops, and its arguments then."""
    state = {v: results.new_state.get(v, -1) for v, _ in arrays.state}
    again = rerolled(block, [v for v, _ in arrays.parameters], state, [v for v, _ in keys])
    return again, _stacked(arrays, again)


def _stacked(arrays: ArgumentArrays, again: Rerolled) -> ArgumentArrays:
    """The arguments, with those of several layers as one."""
    if not again.stacks:
        return arrays
    leaves = dict((*arrays.parameters, *arrays.state))
    owns = {stack: [leaves[v] for v in members] for stack, members in again.stacks.items()}
    gone = {v for members in again.stacks.values() for v in members}

    def kept(listed: Sequence[tuple[Var, Leaf]]) -> list[tuple[Var, Leaf]]:
        own = {v for v, _ in listed}
        rest = [(v, leaf) for v, leaf in listed if v not in gone]
        return rest + [(s, stacked_leaf(s, owns[s])) for s, m in again.stacks.items() if m[0] in own]

    return ArgumentArrays(kept(arrays.parameters), kept(arrays.state), arrays.batch, owns)


def _hints(names: Mapping[str, Any], arrays: ArgumentArrays, cut: Factors) -> Iterable[list[Axis]]:
    """Axes to which the user gives one name; and arrays of whole numbers of one shape in the batch (tokens,
    masks, labels) have the same axes."""
    same: dict[tuple[str, int], list[Axis]] = defaultdict(list)
    tables: dict[tuple[int, ...], list[Var]] = defaultdict(list)
    for v, _ in arrays.batch:
        if v.dtype.startswith("int"):
            tables[v.shape].append(v)
    for leaf, v, first in arrays.given():
        said = names.get(leaf.path)
        if not isinstance(said, tuple | list) or len(said) != len(leaf.shape):
            continue
        for a, text in enumerate(said, first):
            if isinstance(text, str) and len(cut.of(v, a)) == 1:
                same[text, v.shape[a]].append((v, a))
    found = list(same.values())
    for shape, listed in tables.items():
        found += [[(v, a) for v in listed] for a in range(len(shape))]
    return found


# -- results -------------------------------------------------------------------------------------------------


class _Results:
    """The function's results: the loss, metrics, new state.

    Attributes:
      first: which result of the block the loss is.
      new_state: variable of the state -> which result is its new value; empty if the function returns none.
    """

    def __init__(self, tree: Any, state: Any, block: EquationBlock, variables: Sequence[Var]) -> None:
        self.aux: Any = None
        first = tree
        if isinstance(tree, tuple | list):
            if not tree or len(tree) > 2:
                raise UserError(
                    f"from_jax: the loss returns {len(tree)} values; return a scalar, or (scalar, auxiliary)"
                )
            first, self.aux = tree[0], tree[1] if len(tree) == 2 else None
        if not isinstance(first, int):
            raise UserError(
                "from_jax: the loss returns a nested structure; return a scalar, or (scalar, auxiliary)"
            )
        self.first, found = first, block.outs[first]
        if found.shape != () or not has_fractions(found):
            raise UserError(
                f"from_jax: the loss returns {found.dtype}{list(found.shape)}, not a floating-point "
                "scalar; return a scalar, e.g. with jnp.mean"
            )
        self.new_state: dict[Var, int] = dict(
            zip(variables, leaves(new_state(self.aux, state)), strict=False)
        )

    def metrics(self, writer: Writer, block: EquationBlock) -> dict[str, Tensor]:
        """The numbers of the auxiliary's mappings."""
        out: dict[str, Tensor] = {}
        for part in (self.aux, *(self.aux if isinstance(self.aux, tuple | list) else ())):
            if isinstance(part, Mapping):
                for name, i in part.items():
                    found = block.outs[i] if isinstance(i, int) else None
                    if found is not None and found.shape == () and has_fractions(found):
                        out[str(name)] = writer.tensor(found)
        return out


def _store(w: Writer, v: Var, leaf: Leaf, value: Operand) -> None:
    """Stores the new value of a state."""
    variable = w.graph.variables.get(f"state/{leaf.path}")
    if variable is None or value is v or isinstance(w.value(value), Keys):
        return
    if value.shape != v.shape:
        raise UserError(
            f"from_jax: the new state of {leaf.path} has shape {value.shape}, but the state has shape "
            f"{v.shape}; return new state of the same shape"
        )
    t = mtf.broadcast(w.drawn(w.elementwise(value, v), value), w.shape(v)).cast(variable.dtype)
    w.graph.assign(variable, mtf.stop_gradient(t))


def _tokens(w: Writer, arrays: ArgumentArrays) -> tuple[str, ...]:
    for v, _ in arrays.batch:
        names = [d.name for d in w.shape(v)]
        known = len(names) > 1 and names[0] == "batch" and names[1] in ("length", GIVEN_LENGTH)
        if v.dtype.startswith("int") and known and id(v) in w.values:
            return ("batch", names[1])
    return ()


def _axes(
    w: Writer, arrays: ArgumentArrays, listed: Sequence[tuple[Var, Leaf]], prefix: str = ""
) -> dict[str, ArrayAxes]:
    """The user's arrays by path, those of layers that became one too."""
    found = {}
    for v, whole in listed:
        dims = [w.dims(v, a) if v.dtype != KEY else () for a in range(len(v.shape))]
        stacked = v in arrays.stacks
        own = dims[int(stacked) :]
        for n, leaf in enumerate(arrays.stacks.get(v, (whole,))):
            found[leaf.path] = ArrayAxes(
                leaf.path,
                leaf.shape,
                v.dtype,
                tuple(tuple(d.name for d in axis) for axis in own),
                tuple(tuple(d.size for d in axis) for axis in own),
                prefix + whole.path or "params",
                n if stacked else None,
            )
    return found


def _in_order(given: Sequence[tuple[Var, Leaf]], found: Mapping[str, ArrayAxes]) -> dict[str, ArrayAxes]:
    """Arrays in the order of the function's arguments."""
    return {leaf.path: found[leaf.path] for _, leaf in given}
