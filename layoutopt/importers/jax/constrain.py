"""The user's function with its values placed as a plan says: the same equations, with constraints in between.

The function is traced again and read as the importer reads it (`internals`), equation by equation, so each
value meets the one that was imported. A constraint stands where XLA's own propagation from the operands could
choose otherwise: not behind an element-wise operation whose operands lie as its result does, and not on the
parts that a loop takes of what lies so already. What forward hands to backward is saved as it lies, so each
constraint more could be one array more that is saved.

A parameter that is stored split (ZeRO 3) is gathered where it is used, a layer at a time in a loop, and again
for backward: what was gathered is not among what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layoutopt.importers.jax import elementwise
from layoutopt.importers.jax.equations import Block, Equation, Operand, Var, layered
from layoutopt.importers.jax.internals import jax_module
from layoutopt.importers.jax.origin import Origin
from layoutopt.importers.jax.placing import Placing, Spec, partition_spec
from layoutopt.importers.jax.replay import Calls
from mesh_tf_core.errors import UserError


@dataclass
class Constrained:
    """A traced function that constrains its values when it runs.

    Attributes:
      placing, mesh: how values lie, on which mesh of JAX.
      recompute: dimensions of loops whose bodies run again in backward.
      split: ids of parameters that are stored otherwise than operations read them.
      shared: of these, those that loops take apart: each layer's part is gathered inside of the loop.
      met: of `recompute`, those that a loop was found for.
      gathers: PartitionSpecs that parameters were gathered to.
    """

    placing: Placing
    mesh: Any
    recompute: frozenset[str]
    split: frozenset[int]
    shared: set[int]
    met: set[str] = field(default_factory=set)
    gathers: set[Any] = field(default_factory=set)

    def run(self, closed: Any, whole: Any, args: Sequence[Any], block: Block) -> list[Any]:
        """The results of a closed jaxpr.

        Args:
          whole: the same function of the whole batch, whose numbers count: a mean over a part of the batch
            divides by the size of the whole.
          block: the same function as it was imported.
        """
        calls = Calls()
        begin = [self.entry(x, v) for x, v in zip(args, block.ins, strict=True)]
        equations = iter(block.equations)
        found = self._inline(calls, closed, whole, begin, equations)
        if next(equations, None) is not None:
            raise _differs("it ends before the imported one does")
        return found

    def entry(self, x: Any, v: Var) -> Any:
        """An argument, as operations read it."""
        if id(v) in self.shared:
            return x
        return self.gathered(x, v) if id(v) in self.split else self.placed(x, v)

    def gathered(self, x: Any, v: Operand) -> Any:
        """A parameter that is stored split, as operations read it; not saved for backward."""
        self.gathers.add(partition_spec(self.placing.value(v)))
        return self.placed(x, v)

    def placed(self, x: Any, v: Operand) -> Any:
        """A value where the plan has it."""
        spec = self.placing.value(v)
        if not spec or not hasattr(x, "shape") or len(x.shape) != len(spec):
            return x
        jax = jax_module()
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        sharding = jax.sharding.NamedSharding(self.mesh, partition_spec(spec))
        return jax.lax.with_sharding_constraint(x, sharding)

    def _inline(
        self, calls: Calls, closed: Any, whole: Any, args: Sequence[Any], equations: Iterator[Equation]
    ) -> list[Any]:
        known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known.update(zip(closed.jaxpr.invars, args, strict=True))
        if len(closed.jaxpr.eqns) != len(whole.jaxpr.eqns):
            raise _differs("a part of the batch is computed by other operations than the whole")
        for eqn, same in zip(closed.jaxpr.eqns, whole.jaxpr.eqns, strict=True):
            ins = [
                calls.literal(x, y) if calls.is_literal(x) else known[x]
                for x, y in zip(eqn.invars, same.invars, strict=True)
            ]
            outs = self._equation(calls, eqn, same, ins, equations)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [x.val if calls.is_literal(x) else known[x] for x in closed.jaxpr.outvars]

    def _equation(
        self, calls: Calls, eqn: Any, same: Any, ins: list[Any], equations: Iterator[Equation]
    ) -> Sequence[Any]:
        kind = calls.kind(eqn)
        if kind == "inline":
            inner = calls.inner(eqn)
            return self._inline(calls, inner, calls.inner(same), ins, equations)
        if kind == "kept":
            # JAX's own function with its own derivative: as it is, its equations are passed over.
            for _ in range(calls.count(eqn)):
                next(equations)
            return calls.bind(eqn, ins)
        e = next(equations, None)
        if e is None or e.prim != calls.name(eqn):
            raise _differs(
                f"{e.where if e else 'its end'} had {e.prim if e else 'nothing'}, now {calls.name(eqn)}"
            )
        outs = self._scan(calls, eqn, same, ins, e) if e.prim == "scan" else calls.bind(eqn, ins)
        if any(id(x) in self.shared for x in e.ins) and e.prim in _PASSING:
            self.shared.update(map(id, e.outs))
            return outs
        return [self.placed(x, v) if self._unsure(e, v) else x for x, v in zip(outs, e.outs, strict=True)]

    def _scan(self, calls: Calls, eqn: Any, same: Any, ins: list[Any], e: Equation) -> Sequence[Any]:
        body = e.body
        assert body is not None
        inner, whole = calls.scanned(eqn), calls.scanned(same)
        first, last = e.params["consts"], e.params["consts"] + e.params["carry"]
        places = [
            self.placed
            if first <= i < last
            else self.gathered
            if i >= last and id(x) in self.shared
            else _as_it_is
            for i, x in enumerate(e.ins)
        ]

        def run(*xs: Any) -> list[Any]:
            placed = [place(x, v) for place, x, v in zip(places, xs, body.ins, strict=True)]
            equations = iter(body.equations)
            return self._inline(calls, inner, whole, placed, equations)

        stacks = [*e.ins[last:], *e.outs[e.params["carry"] :]]
        classes, names = self.placing.origin.classes, self.placing.origin.names
        dims = {names[c] for x in stacks if x.shape for c in classes.of(x, 0)}
        again = dims & self.recompute
        self.met |= again
        # In a loop nothing is computed twice by mistake: backward is another loop.
        if again:
            run = jax_module().checkpoint(run, prevent_cse=False)
        elif self.gathered in places:
            run = jax_module().checkpoint(run, prevent_cse=False, policy=_all_but(self.gathers))
        return calls.bind_scan(eqn, inner, run, ins)

    def _unsure(self, e: Equation, v: Var) -> bool:
        """Whether propagation could place a result otherwise than the plan."""
        spec = self.placing.value(v)
        operands = [x for x in e.ins if x.shape]
        specs = [self.placing.value(x) for x in operands]
        if not any(map(_split, [spec, *specs])):
            return False
        alike = [s for x, s in zip(operands, specs, strict=True) if x.shape == v.shape]
        return len(alike) < len(operands) or any(s != spec for s in alike) or e.prim not in elementwise.TABLE


def _all_but(gathers: set[Any]) -> Callable[..., bool]:
    """What is saved for backward: all but what constraints to these specs give."""

    def saved(prim: Any, *_: Any, **params: Any) -> bool:
        constrains = str(prim) == "sharding_constraint"
        return not constrains or getattr(params["sharding"], "spec", None) not in gathers

    return saved


def _as_it_is(x: Any, _: Operand) -> Any:
    return x


_PASSING = ("convert_element_type", "copy", "reduce_precision")


def _split(spec: Spec) -> bool:
    return any(a is None or a for a in spec)


def _differs(how: str) -> UserError:
    return UserError(
        f"plan.jax: the function is not the one that was imported: {how}; import this one with from_jax "
        "and search again"
    )


def constrained(
    loss: Callable[..., Any], placing: Placing, mesh: Any, recompute: frozenset[str], split: frozenset[int]
) -> Callable[..., Any]:
    """`loss` with its values placed; of the same arguments, or of a part of their batch.

    Args:
      split: see `Constrained`.
    """
    origin: Origin = placing.origin
    shared, gathers = split & layered(origin.block), set[Any]()

    def applied(*args: Any) -> Any:
        calls = Calls()
        closed, tree = calls.traced(loss, args)
        jax = jax_module()
        sizes = [
            [np.shape(x) for x in jax.tree_util.tree_leaves(given)] for given in (args, origin.arguments)
        ]
        # Only a part of the batch has other numbers than the whole.
        whole = closed if sizes[0] == sizes[1] else calls.traced(loss, origin.arguments)[0]
        run = Constrained(placing, mesh, recompute, split, set(shared), gathers=gathers)
        flat = run.run(closed, whole, jax.tree_util.tree_leaves(args), origin.block)
        missing = recompute - run.met
        if missing:
            raise UserError(
                f"plan.jax: the plan recomputes {', '.join(sorted(missing))}, which is no jax.lax.scan of "
                "the function; write the layers as a scan, or search again with --recompute never"
            )
        return jax.tree_util.tree_unflatten(tree, flat)

    if split == shared:
        return applied
    whole: Callable[..., Any] = jax_module().checkpoint(applied, policy=_all_but(gathers))
    return whole
