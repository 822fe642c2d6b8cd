"""`plan.jax`: a plan back in the user's own JAX program.

Every decision of the plan is applied, or refused by name:
  layout        shardings of arguments, constraints of values (`constrain`)
  storage       shardings of parameters, gradients and the optimizer's state; parameters that are stored split
                are gathered where they are used
  recompute     jax.checkpoint of a loop's body, or of each layer that is written out, with a policy
                that saves what they keep; refused where that is not a value of the function
  microbatches  a loop over parts of the batch that adds up gradients
  others        refused (`layoutopt.frameworks.jax`): no sharding says them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layoutopt.frameworks import says
from layoutopt.importers.arrays.model import added_results
from layoutopt.importers.arrays.placing import ImportedFunction
from layoutopt.importers.jax.constrain import constrained
from layoutopt.importers.jax.internals import jax_module
from layoutopt.importers.jax.shardings import Shardings, new_state
from layoutopt.plan.build import decided
from layoutopt.space.decisions import beyond
from layoutopt.space.keywords import in_keywords
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Block
from mesh_tf_core.lower.recomputed import recomputed
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.rematerialization import Rematerialization
from mesh_tf_core.tracing.graph import Graph


class OptimizerStep:
    """step(params, optimizer state, batch, ...) -> (params, optimizer state, loss).

    The arguments after the optimizer's state are those of the loss after its parameters. A loss that returns
    (loss, auxiliary) gives that instead of the loss. Parameters and state are given away, but on CPUs: use
    the new.

    Attributes:
      function: the compiled function, to be lowered for other devices.
    """

    def __init__(self, plan: Shardings, applied: Callable[..., Any], optimizer: Any) -> None:
        self.plan, self.applied, self.optimizer = plan, applied, optimizer
        self.parts = plan.options.microbatches
        self._compiled: Any = None

    def init(self, params: Any, *state: Any) -> tuple[Any, ...]:
        """Parameters and a new optimizer's state, where the plan stores them; then the loss's own state, if
        it is given."""
        jax = jax_module()
        params = jax.device_put(params, self.plan.shardings(params))
        shapes = jax.eval_shape(self.optimizer.init, params)
        shardings = self.plan.state_shardings(shapes, params)
        own = [jax.device_put(tree, self.plan.stored_shardings(tree)) for tree in state]
        return params, jax.jit(self.optimizer.init, out_shardings=shardings)(params), *own

    def __call__(self, params: Any, state: Any, *rest: Any) -> tuple[Any, Any, Any]:
        """One step."""
        # What lies elsewhere is another type to JAX: the step would be traced and compiled once more.
        given = [
            jax_module().device_put(tree, self.plan.stored_shardings(tree)) if role == "state" else tree
            for role, tree in zip(self.plan.origin.roles[1:], rest, strict=True)
        ]
        if self._compiled is None:
            self._compiled = self.jitted(params, state, *given)
        found: tuple[Any, Any, Any] = self._compiled(params, state, *given)
        return found

    def jitted(self, params: Any, state: Any, *rest: Any) -> Any:
        """The step under `jax.jit`, for arguments of these types."""
        jax, plan = jax_module(), self.plan
        stored, kept = plan.shardings(params), plan.state_shardings(state, params)
        shardings = {"batch": plan.batch_shardings, "state": plan.stored_shardings}
        roles = plan.origin.roles[1:]
        given = [
            shardings[role](tree) if role in shardings else None
            for role, tree in zip(roles, rest, strict=True)
        ]
        return jax.jit(
            self.function,
            in_shardings=(stored, kept, *given),
            out_shardings=(stored, kept, self._result_shardings(params, rest, given)),
            # On CPUs an update in place is slower: its loops are not vectorised.
            donate_argnums=() if plan.mesh.devices.flat[0].platform == "cpu" else (0, 1),
        )

    def _result_shardings(self, params: Any, rest: tuple[Any, ...], given: list[Any]) -> Any:
        """Of what the loss gives: the new value of its state lies as the next step takes it."""
        jax, roles = jax_module(), self.plan.origin.roles[1:]
        if "state" not in roles:
            return None
        found = jax.eval_shape(self.applied, params, *rest)
        auxiliary = found[1] if isinstance(found, tuple | list) and len(found) > 1 else None
        at = roles.index("state")
        if (new := new_state(auxiliary, rest[at])) is None:
            return None
        where = jax.tree_util.tree_map(
            lambda x: given[at] if x is new else None, auxiliary, is_leaf=lambda x: x is new
        )
        return None, where

    def traced(self) -> Any:
        """The step for the types that were imported, as `jax.jit` lowers it."""
        params, *rest = self.plan.origin.arguments
        state = jax_module().eval_shape(self.optimizer.init, params)
        return self.jitted(params, state, *rest).lower(params, state, *rest)

    def function(self, params: Any, state: Any, *rest: Any) -> tuple[Any, Any, Any]:
        """One step, not compiled."""
        jax, plan = jax_module(), self.plan
        stored = plan.shardings(params)
        value, grads = self._gradients(params, rest)
        grads = self._placed(grads, plan.gradient_shardings(params))
        params = self._placed(params, plan.updated_shardings(params))
        updates, state = self.optimizer.update(grads, state, params)
        params = jax.tree_util.tree_map(lambda p, u: (p + u).astype(p.dtype), params, updates)
        return self._placed(params, stored), state, value

    def _gradients(self, params: Any, rest: tuple[Any, ...]) -> tuple[Any, Any]:
        jax = jax_module()

        def whole(*given: Any) -> tuple[Any, Any]:
            """The loss, and what the function returns: (loss, {}) is a pair too, of one array."""
            found = self.applied(*given)
            return found[0] if isinstance(found, tuple | list) else found, found

        of = jax.value_and_grad(whole, has_aux=True)
        if self.parts == 1:
            (_, found), grads = of(params, *rest)
            return found, grads
        origin, batch = self.plan.origin, self.plan.model.batch_dim
        added = added_results(self.plan.model.loss, origin, str(batch))
        flat, tree = jax.tree_util.tree_flatten(rest)
        counts = [len(jax.tree_util.tree_leaves(given)) for given in rest]
        roles = [role for role, n in zip(origin.roles[1:], counts, strict=True) for _ in range(n)]
        keys = origin.keys[len(origin.keys) - len(flat) :]
        # Every device keeps its rows: part i has every parts-th row of it.
        cut = [self._in_parts(x) if role == "batch" else x for x, role in zip(flat, roles, strict=True)]

        def part(i: Any, drawn: Callable[[Any, Any], Any]) -> Any:
            own = [
                x[i] if role == "batch" else drawn(x, i) if key or role == "rng" else x
                for x, role, key in zip(cut, roles, keys, strict=True)
            ]
            return jax.tree_util.tree_unflatten(tree, own)

        def add(total: Any, i: Any) -> tuple[Any, Any]:
            (_, found), grads = of(params, *part(i, self._drawn))
            grads = jax.tree_util.tree_map(jax.numpy.add, total, grads)
            leaves = zip(jax.tree_util.tree_leaves(found), added, strict=True)
            return self._placed(grads, self.plan.gradient_shardings(params)), [x for x, sum in leaves if sum]

        zero = jax.tree_util.tree_map(jax.numpy.zeros_like, params)
        grads, parts = jax.lax.scan(add, zero, jax.numpy.arange(self.parts))
        sums = iter(x.sum(0) for x in parts)
        # What does not depend on the batch is that of one call of the function, with the keys as they are.
        once, form = jax.tree_util.tree_flatten(self.applied(params, *part(0, lambda key, _: key)))
        found = [next(sums) if sum else x for x, sum in zip(once, added, strict=True)]
        return jax.tree_util.tree_unflatten(form, found), grads

    def _drawn(self, keys: Any, i: Any) -> Any:
        jax = jax_module()
        typed = jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key)
        lead = keys.shape if typed else keys.shape[:-1]
        folded = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1, *keys.shape[len(lead) :]), i)
        return folded.reshape(keys.shape)

    def _placed(self, tree: Any, shardings: Any) -> Any:
        return jax_module().lax.with_sharding_constraint(tree, shardings)

    def _in_parts(self, x: Any) -> Any:
        jnp = jax_module().numpy
        return jnp.moveaxis(jnp.reshape(x, (x.shape[0] // self.parts, self.parts, *x.shape[1:])), 1, 0)


class JaxPlan(Shardings):
    """A plan for a JAX function; arguments and attributes as `Shardings` has them."""

    def apply(self, loss: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The same function with its values placed and its loops recomputed as in the plan.

        Args:
          loss: the function that was imported; the default.

        Raises:
          UserError: a kept value is not a value of the function.
        """
        again = self.options.recompute
        saved = saved_values(self.model.step_graph, self.origin, again)
        mesh, layout = self.placing.mesh, self.placing.layout
        said = decided(self.options, layout, self.model.stages(mesh, layout))
        if lost := beyond(says("jax"), said):
            why = f"plan.jax: JAX shardings cannot express this plan, in which {lost.words}; {lost.instead}"
            raise UserError(in_keywords(why))
        return constrained(
            loss or self.origin.loss,
            self.placing,
            self.mesh,
            frozenset(each.dim for each in again),
            self.placing.split_stored,
            saved,
        )

    def train_step(self, loss: Callable[..., Any] | None, optimizer: Any) -> OptimizerStep:
        """A training step under the plan, compiled when it first runs.

        Args:
          loss: the function that was imported, None for that.
          optimizer: of optax, or anything with its `init` and `update`.
        """
        return OptimizerStep(self, self.apply(loss), optimizer)


def saved_values(graph: Graph, origin: ImportedFunction, recompute: Policies) -> frozenset[int]:
    """Ids of the values of the traced function that are saved.

    Args:
      graph: with the gradients.
      recompute: loops that backward recomputes, and the values that they keep.

    Raises:
      UserError: a kept value is not a value of the function (it is part of a fused operation).
    """
    remat = recomputed(graph, recompute)
    kept = [(b, t) for b in graph.blocks if remat.again(b) for t in sorted(remat.second(b).kept)]
    if not kept:
        return frozenset()
    first: dict[int, int] = {}
    for e in origin.rerolled.block.walk():
        for y in e.outs:
            if id(y) in origin.tensors:
                first.setdefault(_named_so(origin.tensors[id(y)], graph), id(y))
    found: set[int] = set()
    for block, tensor in kept:
        value = first.get(_named_so(tensor, graph))
        if value is None:
            raise _lacking(remat, block, tensor, graph, origin)
        found.add(value)
    found |= {number for number, twin in origin.rerolled.twins.items() if id(twin) in found}
    return frozenset(found.intersection(id(y) for e in origin.block.walk() for y in e.outs))


def _named_so(tensor: int, graph: Graph) -> int:
    """What a tensor is another name of."""
    while (node := graph.producer.get(tensor)) is not None and node.op.free and node.inputs:
        tensor = node.inputs[0]
    return tensor


def _lacking(
    remat: Rematerialization, block: Block, tensor: int, graph: Graph, origin: ImportedFunction
) -> UserError:
    maker, dim = graph.producer.get(tensor), block.dim.name
    what = maker.path if maker is not None else "a loop inside"
    return UserError(
        f"{origin.front_end.plan}: the plan keeps {'+'.join(remat.names[dim])} of the loop over {dim}, but "
        f"{what} computes a value that does not occur in {origin.front_end.program}; recompute everything "
        f"(--recompute {dim}), or keep another kind of value"
    )
