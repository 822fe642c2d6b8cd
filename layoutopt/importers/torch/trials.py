"""Trials of a module without values, on shapes that a plan would give it."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any
from unittest.mock import patch

from layoutopt.importers.arrays.placing import ArrayAxes
from layoutopt.importers.torch.calls import PartCall, called, copied, known_calls, replay, torch_module
from layoutopt.importers.torch.capture import converted, own_line, without_cache, without_values


@dataclass
class ModuleTrials:
    """Runs of a module on pieces of its dimensions.

    Attributes:
      parameters: path of a parameter -> its axes.
      calls: those of the trace, which need not be made again.
      param_dtype: in which the module reads its parameters and the batch; None: in their own.
      heads: numbers of elements of a head in attention.
    """

    module: Any
    batch: Any
    parameters: Mapping[str, ArrayAxes] = field(default_factory=dict)
    calls: Sequence[PartCall] = ()
    param_dtype: Any = None
    heads: Collection[int] = ()

    @cached_property
    def _known(self) -> tuple[Any, dict[str, Any], dict[int, Any]]:
        """Calls of the trace, parameters by path, and parameters and buffers without values by number."""
        own = dict(self.module.named_parameters(remove_duplicate=False))
        whole = {id(t): self._piece(t) for t in (*own.values(), *self.module.buffers())}
        return known_calls(self.calls), own, whole

    def _piece(self, tensor: Any, cut: Sequence[int] = ()) -> Any:
        """A tensor without values as a rank's module reads it, each axis cut into some pieces."""
        shape = [n // ways for n, ways in zip(tensor.shape, cut, strict=True)] if cut else tensor.shape
        trained = isinstance(tensor, torch_module().nn.Parameter)
        kind = converted(tensor.new_empty(()), self.param_dtype if trained and tensor.ndim else None).dtype
        return tensor.new_empty(shape, dtype=kind, device="meta").requires_grad_(
            trained and kind.is_floating_point
        )

    def owners(self, names: Collection[str]) -> set[str]:
        """Paths of the parts that have parameters with one of some dimensions."""
        found = (p for p, a in self.parameters.items() if {*names} & {*sum(a.axes, ())})
        return {p.rpartition(".")[0] for p in found}

    def run(
        self,
        pieces: Mapping[str, int] | None = None,
        prepare: Callable[[Any], Any] | None = None,
        parts: Collection[str] = (),
    ) -> str:
        """Why the module does not run on one of some pieces of dimensions, '' if it does.

        Args:
          pieces: dimension -> how many pieces of it there are.
          prepare: changes a copy of the module first, or returns what is to run instead.
          parts: paths of parts that run also where they are given what they were in the trace; those with
            parameters that are cut always do.
        """
        torch, heads, ways = torch_module(), self.heads, pieces or {}

        class TrialMode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
            def __torch_function__(self, of: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                given = [x for x in (*args, *(kwargs or {}).values()) if torch.is_tensor(x)]
                if of is torch.nn.functional.scaled_dot_product_attention and heads:
                    # Code such as `x.view(b, t, self.heads, -1)` would change them in silence.
                    size = given[0].shape[-1]
                    assert size in heads, f"attention would have heads of {size} elements, not of {[*heads]}"
                if "grouped_mm" in getattr(of, "__name__", ""):
                    counts = {len(x) for x in given if x.ndim != 2}
                    assert len(counts) < 2, "matrices and groups of rows differ"
                return of(*args, **(kwargs or {}))

        given = torch.utils._pytree.tree_map(
            lambda x: converted(x, self.param_dtype).to("meta") if torch.is_tensor(x) else x, self.batch
        )
        calls, parameters, whole = self._known
        cut = {}
        for p, a in self.parameters.items():
            if any(by := [math.prod(ways.get(n, 1) for n in names) - 1 for names in a.axes]):
                cut[id(parameters[p])] = self._piece(parameters[p], [n + 1 for n in by])

        def once(*contexts: AbstractContextManager[Any]) -> str:
            own = copied(self.module, whole | cut)  # what its code keeps of this call is not the user's
            replay(calls, own, self.owners(ways).union(parts))
            own = (prepare(own) if prepare is not None else None) or own
            try:
                with ExitStack() as stack:
                    stack.enter_context(warnings.catch_warnings(action="ignore"))
                    # Modules that read values, such as those of a mask, do not read them while exported.
                    for flag in ("_is_exporting_flag", "_is_compiling_flag"):
                        stack.enter_context(patch.object(torch.compiler, flag, True))
                    # Rows that a mask selects are all rows, as they are imported.
                    selects = import_module("torch.fx.experimental._config")
                    stack.enter_context(patch.object(selects, "meta_nonzero_assume_all_nonzero", True))
                    stack.enter_context(without_cache(own, []))
                    stack.enter_context(without_values())
                    stack.enter_context(torch.compiler.set_stance("force_eager"))  # parts may be compiled
                    for each in contexts:
                        stack.enter_context(each)
                    stack.enter_context(TrialMode())
                    args, kwargs = called(self.module, given)
                    own(*args, **kwargs)
            except Exception as error:  # whatever the user's code raises
                place = own_line(traceback.extract_tb(error.__traceback__))
                why = str(error).partition("\n")[0] or type(error).__name__
                return f"{place}: {why}" if place else why
            return ""

        # Code such as `torch.zeros(n)` makes arrays on the default device, which have no values there either.
        return (why := once()) and ("meta" not in why or once(torch.device("meta"))) and why
