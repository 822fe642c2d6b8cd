"""A graph of torch.export as a program of `importers.arrays`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import (
    CapturedArray,
    EquationBlock,
    Operand,
    Var,
    has_fractions,
    live,
)
from layoutopt.importers.arrays.mixtures import sorts_left, without_sorts
from layoutopt.importers.torch import indexing, products, recurrent, reductions, scattered, shapes
from layoutopt.importers.torch.autocast import Autocast
from layoutopt.importers.torch.calls import array_of, dtype_of, torch_module
from layoutopt.importers.torch.capture import MODULE, RECOMPUTED
from layoutopt.importers.torch.elementwise import TABLE, Type
from layoutopt.importers.torch.emitter import Equations
from layoutopt.importers.torch.masks import KnownArray, Shadow, followed, hidden
from layoutopt.importers.torch.nodes import (
    check_operands,
    check_read,
    check_type,
    decomposed,
    is_batch_norm,
    name_of,
    place_of,
    scope_of,
    writes,
)
from layoutopt.importers.torch.selected import REAL, Complex, Selections, is_about, made_of_halves
from layoutopt.importers.torch.shapes import INVERSES
from mesh_tf_core.errors import UserError

__all__ = ["ReadProgram", "read"]

_TABLES = (indexing, products, recurrent, reductions, scattered, shapes)
"""They register their rules in `TABLE` when they are imported."""
_CHECKS = re.compile(r"_assert|sym_constrain|_check")


@dataclass
class ReadProgram:
    """A program that was read.

    Attributes:
      arguments: (kind, name, variable) of every array that the program gets: "PARAMETER", "BUFFER",
        "CONSTANT_TENSOR" or "USER_INPUT", and the name in the module or the batch.
      new_state: variable -> which result is its new value.
      key: the random key, if anything is drawn.
      whole, norms: as `Equations` has them.
      autocast: some of it runs under torch.autocast.
    """

    block: EquationBlock
    arguments: list[tuple[str, str, Var]]
    new_state: dict[Var, int]
    key: Var | None
    notes: list[str] = field(default_factory=list)
    whole: list[Operand] = field(default_factory=list)
    norms: set[str] = field(default_factory=set)
    autocast: bool = False


def read(
    program: Any, buffers: Mapping[str, Any], ties: Mapping[str, str], autocast: str = ""
) -> ReadProgram:
    """The equations of an exported program.

    Args:
      buffers: name -> array, of those whose values are known.
      ties: name -> the first name of the same array.
      autocast: the element type of torch.autocast around it all.
    """
    reader = _NodeReader(program, buffers, ties)
    reader.autocast.enter(autocast)
    return reader.done()


def _innermost(n: Any) -> str:
    """The path of the module whose own code makes a node."""
    stack = n.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0] if stack else ""


class _NodeReader:
    """Walks over nodes.

    Writes in place become new values: a view that is written to is written back to what it is a view of, and
    other views of that are made again.
    """

    def __init__(self, program: Any, buffers: Mapping[str, Any], ties: Mapping[str, str]) -> None:
        self.program, self.buffers, self.ties, self.m = program, buffers, ties, Equations()
        self.torch = torch_module()
        self.values: dict[Any, Any] = {}
        self.shadows: dict[Any, Shadow] = {}
        self.same: dict[Any, Any] = {}
        self.inner: dict[Any, Any] = {}
        self.views: dict[Any, tuple[Any, str, Any]] = {}
        self.arguments: list[tuple[str, str, Var]] = []
        self.first: dict[Any, Var] = {}
        self.parameters = set[Any]()
        self.named: dict[str, Var] = {}
        self.smaller: dict[Any, Any] = {}
        self.call = ""
        self.autocast = Autocast()
        self.selections = Selections(self.m)

    def done(self) -> ReadProgram:
        graph = self.program.graph
        kinds = {s.arg.name: s for s in self.program.graph_signature.input_specs}
        for n in graph.nodes:
            if n.op == "placeholder":
                self._argument(n, kinds[n.name])
        (outs,) = self._run(self.program.graph_module, graph)[:1]
        new_state: dict[Var, int] = {}
        results: list[Operand] = [outs]
        for n, v in self.first.items():
            if self.values[n] is not v:
                new_state[v] = len(results)
                results.append(self.values[n])
        ins = [v for _, _, v in self.arguments] + ([self.m.key] if self.m.key else [])
        block = without_sorts(EquationBlock(ins, live(self.m.equations, results), results))
        read = {id(x) for e in block.walk() for x in (*e.ins, *e.outs)}
        told = [note for note, of in self.m.notes.items() if of is None or id(of) in read]
        notes, met = [*told, *sorts_left(block)], self.autocast.met
        own = self.m
        return ReadProgram(block, self.arguments, new_state, own.key, notes, own.whole, own.norms, met)

    def _argument(self, n: Any, spec: Any) -> None:
        value, kind = n.meta.get("val"), spec.kind.name
        if not isinstance(value, self.torch.Tensor):
            self.values[n] = value if value is not None else getattr(spec.arg, "value", None)
            return
        name = spec.target or n.name
        name = self.ties.get(name, name)
        if name in self.named:
            self.values[n] = self.named[name]
            return
        array = self.buffers.get(name)
        if value.is_complex():
            real = REAL[str(value.dtype).removeprefix("torch.")]
            halves: list[Any] = [Var(tuple(map(int, value.shape)), real) for _ in range(2)]
            if array is not None:
                halves = [self.m.constant(x, real) for x in (array.real, array.imag)]
            else:
                each = zip(("re", "im"), halves, strict=True)
                self.arguments += [(kind, f"{name}.{half}", v) for half, v in each]
            self.values[n] = Complex(*halves)
            return
        shape, dtype = tuple(map(int, value.shape)), dtype_of(value.dtype)
        if kind == "CONSTANT_TENSOR":
            array = np.zeros(shape) if 0 in shape else array_of(self.program.constants.get(name))
        written = any(is_batch_norm(x) or (writes(name_of(x)) and x.args[0] is n) for x in n.users)
        if array is not None and not written:
            self.shadows[n] = KnownArray(array, shape)
            if kind == "CONSTANT_TENSOR" or not spec.persistent:
                self.values[n] = self.m.constant(array, dtype)
                return
        v = self.values[n] = Var(shape, dtype)
        if kind != "USER_INPUT":
            self.named[name] = v
        self.arguments.append((kind, name, v))
        if kind in ("BUFFER", "PARAMETER"):
            self.first[n] = v
        if kind == "PARAMETER":
            self.parameters.add(n)

    def _run(self, owner: Any, graph: Any) -> Any:
        """The results of a graph whose arguments have values."""
        for n in graph.nodes:
            if n.op == "get_attr":
                self.values[n] = operator.attrgetter(n.target)(owner)
            elif n.op == "call_function":
                self._call(n)
            elif n.op == "output":
                return self.torch.fx.node.map_arg(n.args[0], self._value)
        return ()

    def _value(self, n: Any) -> Any:
        return self.values[self._root(n)]

    def _call(self, n: Any) -> None:
        if n.target is operator.getitem:
            found = self._value(n.args[0])
            self.values[n] = None if found is None else found[n.args[1]]
            if n.args[0] in self.inner:
                shadow = self.shadows.get(self._root(self.inner[n.args[0]][n.args[1]]))
                self.shadows |= {} if shadow is None else {n: shadow}
            return
        target = str(n.target)
        if _CHECKS.search(target):
            self.values[n] = None
            return
        self._locate(n)
        args = self.torch.fx.node.map_arg(n.args, self._value)
        more = self.torch.fx.node.map_arg(n.kwargs, self._value)
        if target in ("wrap_with_autocast", "wrap_with_set_grad_enabled"):
            self.values[n] = self._inlined(n, target, args)
            return
        name = name_of(n)
        if is_batch_norm(n):
            y = self._batch_norm(n, args)
            self.values[n] = [y, None, None] if isinstance(n.meta["val"], tuple) else y
            return
        written = writes(name)
        if isinstance(size := n.meta.get("val"), self.torch.SymInt | self.torch.SymBool):
            self.values[n] = self.selections.count(size) if isinstance(size, self.torch.SymInt) else None
            return
        chosen, why = self.selections.selected(n, name, args)
        result = self.selections.type_of(n.meta.get("val"))
        mask = self._mask(n, name, args)
        if mask is not None:
            args = (*args[:3], mask, *args[4:])
        own = n.args[0] if written else None
        if written and (schema := getattr(n.target, "_schema", None)):
            left = schema.arguments[len(args) :]  # `x.bernoulli_()` is not `bernoulli(x)`
            args = (*args, *(a.default_value for a in left if not a.kwarg_only and a.name not in more))
        if own is not None and self._of_parameter(own):
            why = "it changes a parameter, which only an optimizer may"
        if chosen is not None or why:
            found = self._unknown(name, result, args, why) if why else chosen
        else:
            found = self._made(n, name.rstrip("_") if written else name, result, args, more)
        if own is not None:
            self._assign(own, found)
            self.same[n] = own
            return
        self.values[n] = found
        self._follow(n, name, result)
        if name in INVERSES and args and isinstance(args[0], Var | CapturedArray):
            self.views[n] = self._root(n.args[0]), name, (n, result, args, more)

    def _of_parameter(self, n: Any) -> bool:
        """True for a parameter of the module, and for a view of one."""
        while (n := self._root(n)) in self.views:
            n = self.views[n][0]
        return n in self.parameters

    def _root(self, n: Any) -> Any:
        while n in self.same:
            n = self.same[n]
        return n

    def _locate(self, n: Any) -> None:
        """The module, the line and the checkpoint that a node is in."""
        self.m.scope = scope_of(_innermost(n))
        trace = n.meta.get("stack_trace") or ""
        self.m.where = place_of(trace) or self.m.where
        self.m.recomputed = (n.meta.get("custom") or {}).get(RECOMPUTED, "")

    def _made(self, n: Any, name: str, v: Any, args: Sequence[Any], more: Mapping[str, Any]) -> Any:
        """The result of an operation; of one without a rule, a value that the import refuses."""
        rule: Callable[..., Any] | None = TABLE.get(name)
        before = len(self.m.equations)
        self.m.call = ""
        try:
            args, v = self.autocast.typed(self.m, n, self._value, args, v)
            self.m.call = self.call or n.name
            if is_about(name, args):
                return made_of_halves(self.m, name, v, args)
            if rule is None:
                return self._in_smaller_ones(n, name, v, args, "")
            check_read(rule, n, args, more)
            apart = self.selections.concerns(n)
            args = self.selections.left_out(n, name, args) if apart else args
            if not self.autocast.dtype and (why := check_operands(name, args)):
                return self._unknown(name, v, args, why)
            found = rule(self.m, v, *args, **more)
            check_type(found, v)
            found = self.selections.finished(n, name, found) if apart else found
        except UserError:
            raise
        except Exception as error:  # whatever a rule meets in a form that it does not know
            del self.m.equations[before:]
            own = isinstance(error, NotImplementedError)
            why = str(error) if own else "it is called in a form that has no rule"
            return self._in_smaller_ones(n, name, v, args, why)
        return found

    def _unknown(self, name: str, v: Any, args: Sequence[Any], why: str) -> Any:
        ins = [x for x in self.torch.utils._pytree.tree_leaves(args) if isinstance(x, Var | CapturedArray)]
        types = [t for t in (v if isinstance(v, list) else [v]) if t is not None]
        outs = [Var(t.shape, t.dtype) for t in types]
        self.m.several(f"torch.{name}", ins, outs, why=why)
        return outs if isinstance(v, list) else outs[0] if outs else None

    def _in_smaller_ones(self, n: Any, name: str, v: Any, args: Sequence[Any], why: str) -> Any:
        """The result of an operation without a rule, as the operations that PyTorch itself makes it of."""
        body, before = decomposed(n, self.smaller), len(self.m.equations)
        if body is not None:
            places = (x for x in body.graph.nodes if x.op == "placeholder")
            self.same.update(zip(places, n.all_input_nodes, strict=True))
            for x in body.graph.nodes:  # of all nodes with such arguments
                self.shadows.pop(x, None)
                x.meta |= {k: n.meta.get(k) for k in ("stack_trace", "nn_module_stack", "custom")}
            outer = self.call, self.autocast.dtype
            self.call = self.call or n.name  # PyTorch runs it as one, and keeps its operands
            self.autocast.enter("")
            found = self._run(body, body.graph)
            self.call, self.autocast.dtype = outer
            if not any(e.prim.startswith("torch.") for e in self.m.equations[before:]):
                return list(found) if isinstance(v, list) else found
            del self.m.equations[before:]
        return self._unknown(name, v, args, why)

    def _inlined(self, n: Any, target: str, args: Sequence[Any]) -> Any:
        """The results of a part of the graph that a context is around."""
        if target == "wrap_with_autocast":
            dtype, enabled, body, given = args[1], args[2], args[4], n.args[5:]
            old = self.autocast.dtype
            self.autocast.enter(dtype_of(dtype) if enabled and dtype else "")
        else:
            enabled, body, given, old = args[0], args[1], n.args[2:], self.autocast.dtype
        inner = body.graph
        self.same.update(zip((x for x in inner.nodes if x.op == "placeholder"), given, strict=True))
        self.inner[n] = inner.output_node().args[0]
        found = self._run(body, inner)
        self.autocast.enter(old)
        if target == "wrap_with_set_grad_enabled" and not enabled:
            own = self.m.unary
            return [own("stop_gradient", x) if isinstance(x, Var) and has_fractions(x) else x for x in found]
        return found

    def _batch_norm(self, n: Any, args: Sequence[Any]) -> Operand:
        x, *given = args[:5]
        self.m.call = n.name
        train, momentum, epsilon = args[5:8]
        y, read, made = products.batch_norm(self.m, x, given, train, momentum, epsilon)
        path = _innermost(n).removeprefix("L['self'].")
        # Only what a module calls so has the statistics of all ranks under a plan.
        if path.split(".")[0] == MODULE and name_of(n) == "batch_norm" and (train or None in given[2:]):
            self.m.whole += read
            self.m.norms.add(path.removeprefix(MODULE).removeprefix("."))
        for own, new in zip(n.args[3:5], made, strict=True):
            if own is not None and new is not None:
                self._assign(own, new)
        return y

    def _assign(self, n: Any, value: Operand, written: Any = None) -> None:
        """Gives a node another value, and what it is a view of; `written`: the view of it that has it."""
        n = self._root(n)
        self.values[n] = value
        self.shadows.pop(n, None)
        if n in self.views:
            base, name, (_, _, args, _) = self.views[n]
            self._assign(base, INVERSES[name](self.m, self._value(base), value, args[1:]), n)
        self._remake(n, written)

    def _remake(self, base: Any, but: Any) -> None:
        for n, (of, name, (_, result, args, more)) in list(self.views.items()):
            if of is base and n is not but:
                self.values[n] = self._made(n, name, result, (self.values[base], *args[1:]), more)
                self.shadows.pop(n, None)
                self._remake(n, None)

    def _follow(self, n: Any, name: str, v: Any) -> None:
        shadows = {x: self.shadows.get(self._root(x)) for x in n.all_input_nodes}
        if not isinstance(v, Type) or None in shadows.values():
            return
        args, more = (self.torch.fx.node.map_arg(a, shadows.get) for a in (n.args, n.kwargs))
        plain = {k: x for k, x in more.items() if k not in ("device", "pin_memory", "dtype", "layout")}
        found = followed(name, v.shape, v.dtype, args, plain)
        if found is not None:
            self.shadows[n] = found

    def _mask(self, n: Any, name: str, args: Sequence[Any]) -> Any:
        """What the mask of an attention hides, if it is made of positions alone."""
        if name != "scaled_dot_product_attention" or len(n.args) < 4 or n.args[3] is None:
            return None
        shadow = self.shadows.get(self._root(n.args[3]))
        return None if shadow is None else hidden(shadow, args[0].shape[-2], args[1].shape[-2])
