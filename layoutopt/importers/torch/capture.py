"""A module and its loss as a graph of ATen operations, by torch.export, at full size and without values."""

from __future__ import annotations

import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from layoutopt.importers.torch.autocast import left, on_gpus
from layoutopt.importers.torch.calls import PartCall, batch_path, called, dtype_of, recorded, torch_module
from layoutopt.importers.torch.checks import DERIVED, checks_passed, known_values
from layoutopt.importers.torch.instead import other_functions
from mesh_tf_core.errors import UserError

MODULE = "module"
"""Name of the user's module inside of the one that is exported."""
INSTEAD = (
    "select with torch.where instead of branching or picking elements, set the rate of LayerDrop to 0, and "
    "give arrays of lengths and grids with their values, not on the device meta, or pad_packed_sequence its "
    'total_length; of transformers\' mixtures, load the model with experts_implementation="grouped_mm"'
)
RECOMPUTED = "layoutopt_recomputed"
"""The key of a node's metadata that says which checkpoint it is inside of."""


class NotTracedError(UserError):
    """A failure of torch.export that may be the module's own on this batch."""


class ValuesNeededError(UserError):
    """The program depends on values."""


@dataclass(frozen=True)
class Captured:
    """An exported module.

    Attributes:
      program: of torch.export.
      notes: how the program differs from the module as it is called.
      batch: path of an input -> the tensor that was given for it.
      autocast: the element type of torch.autocast around the call; "" outside of one.
      calls: of the module's parts.
    """

    program: Any
    notes: tuple[str, ...]
    batch: Mapping[str, Any]
    autocast: str
    calls: Sequence[PartCall]

    @property
    def heads(self) -> set[Any]:
        """Numbers of elements of a head in attention."""
        attention = torch_module().ops.aten.scaled_dot_product_attention.default
        inner = (m for m in self.program.graph_module.modules() if hasattr(m, "graph"))
        nodes = (n for m in inner for n in m.graph.nodes if n.target is attention)
        return {n.args[0].meta["val"].shape[-1] for n in nodes}


def captured(
    module: Any, batch: Any, loss: Callable[..., Any] | None, param_dtype: Any = None, follow: bool = False
) -> Captured:
    """The module's loss of a batch as a graph, in training mode.

    Args:
      param_dtype: in which the module reads its parameters and the batch; None: in their own.
      follow: values of the batch that the code reads are those of the example.

    Raises:
      UserError: torch.export refuses it (with the line of the module), or it has no loss.
    """
    torch = torch_module()
    notes: list[str] = []
    flat, tree = torch.utils._pytree.tree_flatten_with_path(batch)
    # The same tensor given twice would be one input, and its other reader would lose its own.
    seen, devices = set[int](), {p.device for p in module.parameters()}
    tensors: dict[str, Any] = {}
    values = []
    for keys, x in flat:
        if isinstance(x, torch.Tensor):
            if id(x) in seen:
                x = x.clone()
            seen.add(id(x))
            if not x.numel():
                raise UserError(
                    f"from_torch: {batch_path(keys) or 'all'!r} of the batch has shape {tuple(x.shape)}, "
                    "which has no elements; give it the shape that a training step has"
                )
            if len(devices | {x.device}) == 2 and any(d.type == "meta" for d in (*devices, x.device)):
                # No values are read, so one device is enough.
                x = torch.empty_like(x, device=next(iter(devices)))
            tensors[batch_path(keys)] = x
        values.append(x)
    given = torch.utils._pytree.tree_unflatten(values, tree)
    whole = _with_loss(torch, module, given, loss, param_dtype)
    listed = given if isinstance(given, list | tuple) else [given]
    args, kwargs = ((), given) if isinstance(given, Mapping) else (tuple(listed), {})
    try:
        whole.signature.bind(*args, **whole.taken(kwargs))
    except TypeError as error:
        raise UserError(
            f"from_torch: the module cannot be called with this batch: {error}; give the arguments of its "
            "forward(), by name or in order"
        ) from None
    read, outside = dict[str, None](), [x for _, x in flat]

    def told() -> None:
        read[own_line(traceback.extract_stack())] = None

    if follow:
        whole.following = lambda inside: known_values([*zip(inside, outside, strict=True)], told)
    calls: list[PartCall] = []
    with recorded(module, calls):
        program, around = _exported(whole, args, kwargs, param_dtype, notes)
    notes += [f"{line} reads values: the program is that of those of this batch" for line in read if line]
    return Captured(program, tuple(notes), tensors, "" if around is None else dtype_of(around), calls)


def _exported(whole: Any, args: Any, kwargs: Any, param_dtype: Any, notes: list[str]) -> tuple[Any, Any]:
    """The program of torch.export, and the element type of the torch.autocast that is left meanwhile."""
    torch, module = torch_module(), getattr(whole, MODULE)
    try:
        with (
            _quiet(),
            _unchanged(module),
            _training(module, notes),
            without_cache(module, notes),
            _read_in(module, param_dtype),
            without_checkpoints(),
            _own_backwards(torch, notes),
            patch.object(torch.autograd, "grad", _no_second_derivative),
            without_values(),
            left(notes) as around,
            torch.fx.traceback.preserve_node_meta(),
        ):
            return torch.export.export(whole, args, dict(kwargs)), around
    except UserError:
        raise
    except Exception as error:
        raise _refused(error) from error


def _with_loss(torch: Any, module: Any, batch: Any, loss: Callable[..., Any] | None, param_dtype: Any) -> Any:
    """A module that returns the loss of a batch alone."""

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, MODULE, module)
            self.signature = inspect.signature(module.forward)
            self.following: Callable[[Any], Any] = lambda inside: nullcontext()

        def taken(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
            """What the module gets: with `loss`, the batch may have more."""
            return kwargs if loss is None else called(module, kwargs)[1]

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with self.following(torch.utils._pytree.tree_leaves((args, kwargs))):
                return self.lost(args, kwargs)

        def lost(self, args: Any, kwargs: Any) -> Any:
            read = (args, self.taken(kwargs))
            read = torch.utils._pytree.tree_map(lambda x: converted(x, param_dtype), read)
            found = getattr(self, MODULE)(*read[0], **read[1])
            if loss is None:
                return loss_of(found)
            given = args if isinstance(batch, list | tuple) else kwargs or args[0]
            return loss_of(loss(found, given))

    whole = Whole()
    whole.training = module.training
    return whole


def loss_of(found: Any) -> Any:
    """The loss among what a module returns."""
    torch = torch_module()

    def scalar(x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.ndim == 0 and x.is_floating_point()

    own = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
    if scalar(own):
        return own
    listed = [x for x in (found if isinstance(found, list | tuple) else [found]) if scalar(x)]
    if len(listed) == 1:
        return listed[0]
    known = isinstance(found, torch.Tensor)
    what = f"a tensor of shape {tuple(found.shape)}" if known else f"a {type(found).__name__}"
    raise UserError(
        f"from_torch: the module returns {what}, in which no number is the loss; give "
        "loss=function(outputs, batch), or a batch with labels if the module computes its loss from them"
    )


def converted(x: Any, dtype: Any) -> Any:
    """A tensor of fractions in another type, if one is given; all else as it is."""
    fractions = isinstance(x, torch_module().Tensor) and x.is_floating_point()
    return x.to(dtype) if fractions and dtype is not None else x


@contextmanager
def without_values() -> Iterator[None]:
    """A module's code as it runs without values and on a GPU."""
    unchecked = patch.object(torch_module().distributions.Distribution, "_validate_args", False)
    with other_functions(library), checks_passed(library), on_gpus(), unchecked:
        yield


@contextmanager
def _read_in(module: Any, dtype: Any) -> Iterator[None]:
    """The parameters with axes in another element type, as a MixedPrecisionPolicy of FSDP gathers them."""
    with ExitStack() as stack:
        for p in module.parameters() if dtype is not None else ():
            if p.ndim and p.is_floating_point():
                stack.callback(setattr, p, "data", p.data)
                p.data = p.data.to(dtype)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export warns of its own internals."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()):  # where it prints graphs
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


@contextmanager
def _unchanged(module: Any) -> Iterator[None]:
    """Takes back what the module's code keeps of a call, which has no values."""
    own = [(m, dict(m.__dict__)) for m in module.modules()]
    try:
        yield
    finally:
        for each, kept in own:
            each.__dict__.clear()
            each.__dict__.update(kept)


@contextmanager
def _training(module: Any, notes: list[str]) -> Iterator[None]:
    """The module as it trains: where all of it is in evaluation mode, in training mode."""
    with ExitStack() as stack:
        if not module.training:
            for each in module.modules():
                stack.callback(setattr, each, "training", each.training)
            notes.append(
                "the module is in evaluation mode; it was imported in training mode, as by module.train()"
            )
            module.train()
        yield


@contextmanager
def without_cache(module: Any, notes: list[str]) -> Iterator[None]:
    """transformers' keys and values of earlier steps, which no training step reads."""
    configs = (getattr(m, "config", None) for m in module.modules())
    own = {id(c): c for c in configs if getattr(c, "use_cache", None)}
    if own:
        notes.append("config.use_cache is true, but a training step keeps no cache, so none was imported")
    with ExitStack() as stack:
        for config in own.values():
            stack.enter_context(patch.object(config, "use_cache", False))
        yield


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Code inside of torch.utils.checkpoint runs as if it was not, but for a mark of its operations."""
    own, mark = torch_module().utils.checkpoint, torch_module().fx.traceback.annotate

    def without_reentry(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with mark({RECOMPUTED: _place(function)}):
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            with mark({RECOMPUTED: _place(function)}):
                return function(*args)

    plain = patch.object(own, "_checkpoint_without_reentrant_generator", without_reentry)
    with plain, patch.object(own, "CheckpointFunction", Reentrant):
        yield


@contextmanager
def _own_backwards(torch: Any, notes: list[str]) -> Iterator[None]:
    """Notes functions of the user with a derivative of their own, which no trace of what they compute has."""
    own = torch.autograd.Function.apply.__func__

    def apply(kind: Any, *args: Any, **more: Any) -> Any:
        code = kind.forward.__code__
        note = f"{code.co_filename}:{code.co_firstlineno}: {kind.__name__} {DERIVED}"
        if not library(code.co_filename) and note not in notes:
            notes.append(note)
        return own(kind, *args, **more)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def _no_second_derivative(*args: Any, **kwargs: Any) -> Any:
    raise UserError(
        f"from_torch: {own_line(traceback.extract_stack())}: torch.autograd.grad is called in the forward, "
        "as in a gradient penalty; derivatives of derivatives are not imported: plan without it, by loss="
    )


def _place(function: Any) -> str:
    """What a checkpoint is around."""
    inner = getattr(function, "func", function)
    owner = getattr(inner, "__self__", inner)
    forward = getattr(type(owner), "forward", None)
    code = getattr(inner, "__code__", getattr(forward, "__code__", None))
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else type(owner).__name__


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')


def own_line(stack: Iterable[traceback.FrameSummary], more: Iterable[tuple[str, Any]] = ()) -> str:
    """The last line of a stack that is in neither PyTorch nor this importer, as FILE:LINE; '' if none is."""
    lines = (*((frame.filename, frame.lineno) for frame in stack), *more)
    return next((f"{file}:{line}" for file, line in lines[::-1] if not library(file)), "")


def _refused(error: Exception) -> UserError:
    """What torch.export could not trace, with the last line of the module that it was in."""
    said = ((file, line) for file, line, _ in _FRAME.findall(str(error)))
    place = own_line(traceback.extract_tb(error.__traceback__), said)
    place = f"{place}: " if place else ""
    kind = type(error).__name__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    instead = "rewrite this line without it, or export the module with torch.export to see more"
    if ".numpy()" in text:
        instead = "NumPy reads values, as to match boxes with targets: plan with loss=, without this matching"
    if "GuardOnDataDependent" in kind or "data-dependent" in str(error):
        text = (
            "the program depends on values, of the batch, parameters or a draw, which a traced program cannot"
        )
        instead = INSTEAD
    found = ValuesNeededError if instead is INSTEAD else NotTracedError
    return found(f"from_torch: {place}torch.export cannot trace this module: {kind}: {text}; {instead}")


@cache
def library(file: str) -> bool:
    """True for files of PyTorch, and of this importer."""
    own = (str(Path(torch_module().__file__).parent), str(Path(__file__).parent), "<")
    return file.startswith(own)
