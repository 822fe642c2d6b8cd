"""Functions of eager tensors traced into one program: the same code, lowered whole and run by an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mesh_tf_core.eager.machine import EagerMachine
from mesh_tf_core.eager.step import EagerStep
from mesh_tf_core.eager.store import VariableStore
from mesh_tf_core.eager.tensor import EagerTensor
from mesh_tf_core.engines import Engine, open_engine
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.program import WriteVariable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower import lower
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class PatternLeaf:
    """In a pattern: a tensor by its number, or another value."""

    tensor: int | None
    kind: type | None = None
    value: Any = None


@dataclass(frozen=True)
class Many:
    """In a pattern: a tuple, list or dict."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[PatternLeaf | Many, ...]


Pattern = PatternLeaf | Many


def taken_apart(x: Any, tensors: list[Tensor]) -> Pattern:
    """The pattern of nested tuples, lists and dicts; the tensors in it are appended to `tensors`."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return PatternLeaf(len(tensors) - 1)
    if isinstance(x, dict):
        return Many(dict, tuple(x), tuple(taken_apart(v, tensors) for v in x.values()))
    if type(x) in (tuple, list):
        return Many(type(x), (), tuple(taken_apart(v, tensors) for v in x))
    return PatternLeaf(None, type(x), x)


def put_together(pattern: Pattern, tensors: list[Any]) -> Any:
    """The inverse of `taken_apart`, with other tensors."""
    if isinstance(pattern, PatternLeaf):
        return pattern.value if pattern.tensor is None else tensors[pattern.tensor]
    items = [put_together(p, tensors) for p in pattern.items]
    return dict(zip(pattern.keys, items, strict=True)) if pattern.kind is dict else pattern.kind(items)


@dataclass(frozen=True)
class TracedSignature:
    """One signature's program.

    Attributes:
      result: pattern of the function's result; its tensors are the program's results, in order.
      shapes: of those.
      written: variables that the program stores.
    """

    engine: Engine
    result: Pattern
    shapes: tuple[Any, ...]
    written: tuple[Variable, ...]


class Staged:
    """A function of tensors that runs as one program, so all passes see the whole function.

    Its variables are those of the context, read at the beginning of a call and stored at its end. Returned
    tensors are constants for gradients; compute gradients inside the function.

    Attributes:
      programs: number of signatures that were traced.
    """

    def __init__(self, fn: Callable[..., Any], machine: EagerMachine, store: VariableStore) -> None:
        self.fn, self.machine, self.store = fn, machine, store
        self._traced: dict[Any, TracedSignature] = {}
        functools.update_wrapper(self, fn)

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", "function")

    @property
    def programs(self) -> int:
        return len(self._traced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, with eager tensors of the step that the arguments belong to.

        Called with tensors of a graph that is being built, it adds its operations there.
        """
        found: list[Tensor] = []
        pattern = taken_apart((args, kwargs), found)
        if found and not any(isinstance(x, EagerTensor) for x in found):
            return self.fn(*args, **kwargs)
        tensors = [self._checked(x, found[0]) for x in found]
        if not tensors:
            raise UserError(f"staged {self.name}: found no tensor among the arguments; pass at least one")
        step = tensors[0].graph
        assert isinstance(step, EagerStep)
        step.check_open(f"staged {self.name}")
        traced = self._program(pattern, tensors)
        for stored in traced.engine.program.variables.values():
            self.store.bring(stored.variable, traced.engine)
        arrays = traced.engine.step({f"tensor {i}": x.numpy() for i, x in enumerate(tensors)})
        for axes, sent in traced.engine.communication_bytes.items():
            self.machine.sent[axes] = self.machine.sent.get(axes, 0.0) + sent
        for variable in traced.written:
            self.store.wrote(variable, traced.engine)
        made = [step.constant(arrays[f"result {i}"], shape) for i, shape in enumerate(traced.shapes)]
        return put_together(traced.result, made)

    def close(self) -> None:
        """Closes the engines."""
        for traced in self._traced.values():
            traced.engine.close()
        self._traced.clear()

    def _checked(self, x: Tensor, first: Tensor) -> EagerTensor:
        if not isinstance(x, EagerTensor) or x.graph is not first.graph:
            raise UserError(
                f"staged {self.name}: {first!r} and {x!r} belong to different steps; copy one of them "
                "into the other's step with step.constant(x)"
            )
        if x.machine is not self.machine:
            raise UserError(
                f"staged {self.name}: {x!r} and the function belong to different mtf.Eager objects; copy "
                "the tensor into a step of the function's object with step.constant(x)"
            )
        return x

    def _program(self, pattern: Pattern, tensors: list[EagerTensor]) -> TracedSignature:
        key = pattern, tuple(x.type for x in tensors)
        try:
            known = self._traced.get(key)
        except TypeError:
            raise UserError(
                f"staged {self.name}: each argument must be a tensor or a hashable value; convert arrays "
                "to tensors with step.constant(array, dims)"
            ) from None
        if known is None:
            known = self._traced[key] = self._trace(pattern, tensors)
        return known

    def _trace(self, pattern: Pattern, tensors: list[EagerTensor]) -> TracedSignature:
        graph = Graph(self.name)
        inputs = [graph.input(f"tensor {i}", x.shape.dims, x.dtype) for i, x in enumerate(tensors)]
        args, kwargs = put_together(pattern, inputs)
        returned: list[Tensor] = []
        result = taken_apart(self.fn(*args, **kwargs), returned)
        results = {f"result {i}": graph.visible(x, self.name) for i, x in enumerate(returned)}
        known = graph.dims()
        layout = Layout({n: axes for n, axes in self.machine.layout.items() if n in known})
        program = lower(graph, self.machine.mesh, layout, results)
        engine = open_engine(program, self.machine.kind)
        engine.initialize()
        written = [i.variable for i in program.every(WriteVariable)]
        return TracedSignature(
            engine,
            result,
            tuple(x.shape for x in returned),
            tuple(program.variables[n].variable for n in dict.fromkeys(written)),
        )
