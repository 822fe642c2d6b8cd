"""The user's function with its values placed as in a plan: the same equations with constraints between them.

The function is traced again and read with the importer's interpreter (`interpreter`), equation by equation,
so each value is matched with the imported one. Layers that the importer made a loop of (`reroll`) run one
after the other as they are written, each as a loop's body would. A constraint is added where XLA's
propagation from the operands could choose otherwise. It is not added after an element-wise operation whose
operands have the result's placement, nor on slices that a loop takes of values with that placement. Values
that forward passes to backward are saved as they are placed, so an unnecessary constraint could save one more
array.

A parameter that is stored split (ZeRO 3) is gathered where it is used, one layer at a time, and layers are
gathered again in backward: gathered values are not saved.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from layoutopt.importers.arrays import elementwise
from layoutopt.importers.arrays.contract import Equation, EquationBlock, Operand, Var, layered
from layoutopt.importers.arrays.placing import ArrayPlacing, ImportedFunction
from layoutopt.importers.jax.internals import jax_module, without_dead
from layoutopt.importers.jax.replay import (
    KnownValue,
    Ref,
    ReplayedEquation,
    ReplayVisitor,
    Site,
    bind,
    bind_scan,
    differs,
    interpret,
    retraced,
)
from layoutopt.importers.jax.shardings import partition_spec
from mesh_tf_core.errors import UserError

SAVED = "layoutopt_saved"
"""The names that `jax.ad_checkpoint.checkpoint_name` gives saved values."""


@dataclass
class Constrained:
    """A traced function that constrains its values when it runs.

    Attributes:
      placing, mesh: how values lie, on which mesh of JAX.
      recompute: dimensions of loops that backward recomputes.
      split: ids of parameters that are stored otherwise than operations read them.
      shared: those of them that loops slice, their layers' parts, and casts of these: gathered where they are
        read otherwise.
      saved: ids of values that are saved though their layer runs again.
      met: members of `recompute` for which a loop was found; `named`: members of `saved` that were computed.
      gathers: PartitionSpecs that parameters were gathered to, and shapes in which they were cast before.
    """

    placing: ArrayPlacing
    mesh: Any
    recompute: frozenset[str]
    split: frozenset[int]
    shared: set[int]
    saved: frozenset[int] = frozenset()
    met: set[str] = field(default_factory=set)
    named: set[int] = field(default_factory=set)
    gathers: set[Any] = field(default_factory=set)
    refs: Iterator[Ref] = field(default_factory=itertools.count)
    values: dict[Ref, Operand] = field(default_factory=dict)

    def run(self, closed: Any, whole: Any, args: Sequence[Any], block: EquationBlock) -> list[Any]:
        """The results of a closed jaxpr.

        Args:
          whole: the same function of the whole batch, whose numbers are used: a mean over a part of the batch
            divides by the size of the whole.
          block: the same function as it was imported.
        """
        begin = [self.entry(x, v) for x, v in zip(args, block.ins, strict=True)]
        return self._results(closed, whole, begin, block, self._layers(block))

    def _layers(self, block: EquationBlock) -> dict[int, tuple[int, bool]]:
        """Number of an equation -> the layer that it is of, and whether this is recomputed."""
        number = {id(y): n for n, e in enumerate(block.ran) for y in e.outs}
        found: dict[int, tuple[int, bool]] = {}
        for run in self.placing.origin.rerolled.runs:
            again = self._again(run.loop)
            for layer in run.layers:
                numbers = [number[id(e.out)] for e in layer if id(e.out) in number]
                found.update((n, (numbers[0], again)) for n in numbers)
        return found

    def _again(self, loop: Equation) -> bool:
        """Whether a loop's body runs again in backward."""
        again = self.placing.origin.loop_dims(loop) & self.recompute
        self.met |= again
        return bool(again)

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

    def _results(
        self,
        closed: Any,
        whole: Any,
        args: Sequence[Any],
        block: EquationBlock,
        layers: Mapping[int, tuple[int, bool]],
    ) -> list[Any]:
        """Runs a closed jaxpr of these arguments, layer by layer."""
        begin = [next(self.refs) for _ in args]
        self.values.update(zip(begin, block.ins, strict=True))
        visitor = ReplayVisitor(iter(block.ran), self.refs, self.values)
        outs = interpret(visitor, closed, begin, whole)
        steps = visitor.steps
        if next(visitor.rest, None) is not None:
            raise differs("it has fewer operations than the imported function")
        known = dict(zip(begin, args, strict=True))
        number = {id(e): n for n, e in enumerate(block.ran)}
        parts = itertools.groupby(
            steps, key=lambda s: layers.get(number[id(s.equations[0])]) if s.equations else None
        )
        listed = [(layer, list(part)) for layer, part in parts]
        read = Counter(x for s in steps for x in s.ins if not isinstance(x, KnownValue))
        read.update(x for x in outs if not isinstance(x, KnownValue))
        for layer, part in listed:
            read.subtract(x for s in part for x in s.ins if not isinstance(x, KnownValue))
            if layer is None:
                self._run(part, known)
            else:
                self._layer(part, known, +read, layer[1])
        return [x.value if isinstance(x, KnownValue) else known[x] for x in outs]

    def _layer(
        self, part: Sequence[ReplayedEquation], known: dict[Ref, Any], later: Mapping[Ref, int], again: bool
    ) -> None:
        """Runs the steps of one layer, whose parameters are placed here as a loop's are inside of it."""
        made = dict.fromkeys(y for s in part for y in s.outs)
        read = dict.fromkeys(x for s in part for x in s.ins if not isinstance(x, KnownValue))
        given, left = [x for x in read if x not in made], [y for y in made if y in later]
        gathers = any(id(self.values.get(ref)) in self.shared for ref in given)

        def run(*xs: Any) -> list[Any]:
            inside = dict(zip(given, xs, strict=True))
            self._run(part, inside)
            return [inside[y] for y in left]

        saving = self._saving(run, again, gathers)
        known.update(zip(left, saving(*(known[x] for x in given)), strict=True))

    def _run(self, steps: Sequence[ReplayedEquation], known: dict[Ref, Any]) -> None:
        for step in steps:
            waits = all(e.prim in (*_PASSING, "scan") for e in step.equations)
            ins = [
                x.value if isinstance(x, KnownValue) else known[x] if waits else self._read(known[x], x)
                for x in step.ins
            ]
            known.update(zip(step.outs, self._step(step, ins), strict=True))

    def _read(self, x: Any, ref: Ref) -> Any:
        """A value as operations read it: gathered only there, since what is computed of a gathered parameter
        before (a cast) would be saved for backward whole."""
        v = self.values.get(ref)
        return x if v is None or id(v) not in self.shared else self.gathered(x, v)

    def _step(self, step: ReplayedEquation, ins: list[Any]) -> Sequence[Any]:
        if step.site.own:
            return bind(step.site.eqn, ins)
        (e,) = step.equations
        outs = self._scan(step.site, ins, e) if e.prim == "scan" else bind(step.site.eqn, ins)
        if any(id(x) in self.shared for x in e.ins) and e.prim in _PASSING:
            self.shared.update(map(id, e.outs))
            self.gathers.update(x.shape for x in outs)
            return outs
        outs = [self.placed(x, v) if self._unsure(e, v) else x for x, v in zip(outs, e.outs, strict=True)]
        return [self._named(x, v) if id(v) in self.saved else x for x, v in zip(outs, e.outs, strict=True)]

    def _named(self, x: Any, v: Var) -> Any:
        """A value under the name that the policy of its layer saves."""
        self.named.add(id(v))
        named: Any = import_module("jax.ad_checkpoint").checkpoint_name(x, SAVED)
        return named

    def _scan(self, site: Site, ins: list[Any], e: Equation) -> Sequence[Any]:
        body = e.body
        assert body is not None
        inner, whole = (without_dead(x.params["jaxpr"]) for x in (site.eqn, site.whole))
        first, last = e.params["consts"], e.params["consts"] + e.params["carry"]
        sliced = zip(e.ins[last:], body.ins[last:], strict=True)
        parts = {id(v) for x, v in sliced if id(x) in self.shared}
        self.shared |= parts
        ins = [
            self.gathered(x, v) if i < last and id(v) in self.shared else x
            for i, (x, v) in enumerate(zip(ins, e.ins, strict=True))
        ]

        def run(*xs: Any) -> list[Any]:
            placed = [
                self.placed(x, v) if first <= i < last else x
                for i, (x, v) in enumerate(zip(xs, body.ins, strict=True))
            ]
            return self._results(inner, whole, placed, body, {})

        run = self._saving(run, self._again(e), bool(parts))
        return bind_scan(site.eqn, inner, run, ins)

    def _saving(self, run: Callable[..., Any], again: bool, gathers: bool) -> Callable[..., Any]:
        """A layer that saves for backward nothing that it gathers, and if it runs again only what is kept."""
        if not again and not gathers:
            return run
        jax = jax_module()
        names = jax.checkpoint_policies.save_only_these_names(SAVED) if self.saved else None
        policy = names if again else _all_but(self.gathers)
        saving: Callable[..., Any] = jax.checkpoint(run, policy=policy)
        return saving

    def _unsure(self, e: Equation, v: Var) -> bool:
        """Whether propagation could place a result otherwise than the plan."""
        spec = self.placing.value(v)
        operands = [x for x in e.ins if x.shape]
        specs = [self.placing.value(x) for x in operands]
        if not any(a is None or a for s in (spec, *specs) for a in s):
            return False
        alike = [s for x, s in zip(operands, specs, strict=True) if x.shape == v.shape]
        return len(alike) < len(operands) or any(s != spec for s in alike) or e.prim not in elementwise.TABLE


def _all_but(gathers: set[Any]) -> Callable[..., bool]:
    """What is saved for backward: all but what constraints to these specs and casts of these shapes give."""

    def saved(prim: Any, *given: Any, **params: Any) -> bool:
        if str(prim) in _PASSING:
            return given[0].shape not in gathers
        return str(prim) != "sharding_constraint" or getattr(params["sharding"], "spec", None) not in gathers

    return saved


_PASSING = ("convert_element_type", "copy", "reduce_precision", "stop_gradient")


def constrained(
    loss: Callable[..., Any],
    placing: ArrayPlacing,
    mesh: Any,
    recompute: frozenset[str],
    split: frozenset[int],
    saved: frozenset[int] = frozenset(),
) -> Callable[..., Any]:
    """`loss` with its values placed; of the same arguments, or of a part of their batch.

    Args:
      split, saved: see `Constrained`.
    """
    origin: ImportedFunction = placing.origin
    layers = layered(origin.block) | {id(v) for own in origin.rerolled.stacks.values() for v in own}
    shared, gathers = split & layers, set[Any]()

    def applied(*args: Any) -> Any:
        closed, tree = retraced(loss, args)
        jax = jax_module()
        sizes = [[np.shape(x) for x in jax.tree_util.tree_leaves(of)] for of in (args, origin.arguments)]
        # Only a part of the batch has other numbers than the whole.
        whole = closed if sizes[0] == sizes[1] else retraced(loss, origin.arguments)[0]
        run = Constrained(placing, mesh, recompute, split, set(shared), saved, gathers=gathers)
        flat = run.run(closed, whole, jax.tree_util.tree_leaves(args), origin.block)
        missing = recompute - run.met
        if missing:
            raise UserError(
                f"plan.jax: the plan recomputes the loop over {', '.join(sorted(missing))}, which is not "
                "a jax.lax.scan in this function; write these layers as a jax.lax.scan, or search again "
                "with --recompute never"
            )
        if saved - run.named:
            raise UserError(
                "plan.jax: the plan keeps values computed inside a jax.custom_vjp or jax.custom_jvp "
                "function, and JAX cannot name such values; search again with --recompute auto"
            )
        return jax.tree_util.tree_unflatten(tree, flat)

    return applied
