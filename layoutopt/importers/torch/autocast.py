"""Element types under torch.autocast of a GPU, which no trace records: PyTorch says them of fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from layoutopt.importers.arrays.contract import CapturedArray, Var
from layoutopt.importers.torch.calls import FLOATS, torch_module
from layoutopt.importers.torch.elementwise import Type
from layoutopt.importers.torch.emitter import Equations
from mesh_tf_core.errors import UserError


class Autocast:
    """The types of values in and after the regions of torch.autocast.

    Attributes:
      dtype: of the region that is read, "" outside of one; `met`: one was read.
    """

    def __init__(self) -> None:
        self.dtype, self.met = "", False
        self._known: dict[str, list[str] | str] = {}
        self._torch = torch_module()
        self._fakes = self._torch._subclasses.FakeTensorMode()

    def enter(self, dtype: str) -> None:
        """Begins a region; "" ends it."""
        self.dtype = dtype
        self.met = self.met or bool(dtype)

    def typed(
        self, m: Equations, n: Any, value: Callable[[Any], Any], args: Sequence[Any], v: Any
    ) -> tuple[Sequence[Any], Any]:
        """A node's operands and result type as PyTorch chooses them; NotImplementedError: it refuses them."""
        if not self.met or not all(hasattr(value(x), "dtype") for x in n.all_input_nodes):
            return args, v
        plain, found = (self._called(n, value, dtype) for dtype in ("", self.dtype))
        if isinstance(found, str):
            raise NotImplementedError(f"with the types of torch.autocast, {found}")
        tree = self._torch.utils._pytree
        if found != plain and (wide := {*found} & {*FLOATS}):
            args = tree.tree_map(lambda x: m.cast(x, max(wide)) if _fractions(x) else x, list(args))
        kinds = iter(x for x in found if x in FLOATS)
        return args, tree.tree_map(lambda t: Type(t.shape, next(kinds)) if _fractions(t) else t, v)

    def _called(self, n: Any, value: Callable[[Any], Any], dtype: str) -> list[str] | str:
        """The element types that an operation gives on a GPU in a region of a type, or why it gives none."""
        torch = self._torch

        def fake(x: Any) -> Any:
            told = x.meta["val"]  # it has the widths of integers, which the contract does not
            kind = getattr(torch, value(x).dtype) if told.is_floating_point() else told.dtype
            return torch.empty(told.shape, dtype=kind, device="cuda")

        given, mapped = (n.args, n.kwargs), torch.fx.node.map_arg
        alike = mapped(given, lambda x: (value(x).dtype, x.meta["val"].dtype, *x.meta["val"].shape))
        if (key := str((n.target, dtype, alike))) in self._known:
            return self._known[key]
        old = torch.get_autocast_dtype("cuda")
        with self._fakes:
            args, more = mapped(given, fake)
            torch.set_autocast_enabled("cuda", bool(dtype))
            torch.set_autocast_dtype("cuda", getattr(torch, dtype or "bfloat16"))
            try:
                found = torch.utils._pytree.tree_leaves(n.target(*args, **more))
            except Exception as error:  # whatever PyTorch raises, often for operands of two types
                return self._known.setdefault(key, str(error).partition("\n")[0])
            finally:
                torch.set_autocast_enabled("cuda", False)
                torch.set_autocast_dtype("cuda", old)
        types = [str(x.dtype).removeprefix("torch.") for x in found if x is not None]
        return self._known.setdefault(key, types)


def _fractions(x: Any) -> bool:
    return isinstance(x, Var | CapturedArray | Type) and x.dtype in FLOATS


@contextmanager
def on_gpus() -> Iterator[None]:
    """torch.autocast in a module as on a GPU: without one it would be off, and no device is called meta."""
    torch = torch_module()
    begin = torch.autocast.__init__

    def begun(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, "cuda" if device_type == "meta" else device_type, *args, **kwargs)

    with (
        patch.object(torch.autocast, "__init__", begun),
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True),
    ):
        yield


@contextmanager
def left(notes: list[str]) -> Iterator[Any]:
    """Leaves torch.autocast around a call, and gives its type, None outside of one; UserError: PyTorch has
    switched it off, and which it was is lost."""
    torch = torch_module()
    on = [kind for kind in ("cuda", "cpu", "xpu", "mps", "hpu") if torch.is_autocast_enabled(kind)]
    found = torch.get_autocast_dtype(on[0]) if on else None
    torch.autocast_increment_nesting()
    inside = torch.autocast_decrement_nesting() > 0
    if inside and not on and not torch.cuda.is_available():
        found = torch.get_autocast_dtype("cuda")
        if found != torch.bfloat16:
            raise UserError(
                "from_torch: torch.autocast around this call is off (no GPU here, or enabled=False); write "
                'torch.autocast("cpu", dtype=torch.bfloat16), which is imported as on a GPU, or leave it'
            )
        notes.append(
            "torch.autocast around from_torch is off, because this machine has no GPU; the module was "
            "imported under bfloat16, as on a GPU"
        )
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield found
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)
