"""Trials of a module without values, on shapes that a plan would give it."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from layoutopt.importers.arrays.placing import ArrayAxes
from layoutopt.importers.torch.autocast import on_gpus
from layoutopt.importers.torch.capture import flex_written_out, library, own_line
from layoutopt.importers.torch.checks import checks_passed
from layoutopt.importers.torch.internals import called, copied, torch_module


def run_on_pieces(
    module: Any,
    parameters: Mapping[str, ArrayAxes],
    batch: Any,
    pieces: Mapping[str, int] | None = None,
    prepare: Callable[[Any], Any] | None = None,
) -> tuple[str, dict[int, str]]:
    """Why a module does not run on one of some pieces of dimensions, '' if it does; and the numbers of
    elements of a head in attention, which code such as `x.view(b, t, self.heads, -1)` would change in
    silence, each with a line of the user's.

    Args:
      pieces: dimension -> how many pieces of it there are.
      prepare: changes a copy of the module first, or returns what is to run instead.
    """
    torch = torch_module()
    heads: dict[int, str] = {}

    class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
        def __torch_function__(self, of: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if of is torch.nn.functional.scaled_dot_product_attention:
                size = next(iter([*args, *(kwargs or {}).values()])).shape[-1]
                heads[size] = heads.get(size) or own_line(traceback.extract_stack())
            if "grouped_mm" in getattr(of, "__name__", ""):
                given = [x for x in (*args, *(kwargs or {}).values()) if torch.is_tensor(x)]
                assert len({len(x) for x in given if x.ndim != 2}) < 2, "matrices and groups of rows differ"
            return of(*args, **(kwargs or {}))

    def piece(path: str, tensor: Any) -> Any:
        own = parameters[path].axes if path in parameters else ()
        shape = [*tensor.shape]
        for a, names in enumerate(own):
            shape[a] //= math.prod((pieces or {}).get(name, 1) for name in names)
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.is_floating_point())

    held = {p: piece(p, t) for p, t in module.named_parameters()}
    held |= {p: t.to("meta") for p, t in module.named_buffers()}
    given = torch.utils._pytree.tree_map(lambda x: x.to("meta") if torch.is_tensor(x) else x, batch)
    own = copied(module)  # so that what its code keeps of this call is not the user's
    if prepare is not None:
        own = prepare(own) or own
        kept = {p for p, _ in (*own.named_parameters(), *own.named_buffers())}
        held = {p: t for p, t in held.items() if p in kept}
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            # Modules that read values, such as those of a mask, do not read them while they are exported.
            for flag in ("_is_exporting_flag", "_is_compiling_flag"):
                stack.enter_context(patch.object(torch.compiler, flag, True))
            stack.enter_context(flex_written_out())
            stack.enter_context(checks_passed(library))
            stack.enter_context(on_gpus())
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # parts may be compiled
            stack.enter_context(Mode())
            args, kwargs = called(module, given)
            torch.func.functional_call(own, held, args, kwargs)
    except Exception as error:  # whatever the user's code raises
        place = own_line(traceback.extract_tb(error.__traceback__))
        why = str(error).partition("\n")[0] or type(error).__name__
        return f"{place}: {why}" if place else why, heads
    return "", heads
