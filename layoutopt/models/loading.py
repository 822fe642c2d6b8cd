"""Model files: from MODEL as a user types it to a built model and its batches.

    path/to/file.py            the function `model` of a file
    path/to/file.py:function   another one
    package.module:function    of an installed module (or one below the working directory)
    path/to/config.json        the model of a Hugging Face configuration

A .py file may import its neighbours. Every error in a model file is reported as one line with the line's
number.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from layoutopt.models.hparams import Defaults, defaults_of, parse_settings
from layoutopt.models.recorded import MOST, file_and_function, hashes, loaded_files
from layoutopt.models.source import TORCH, at_once, function_of, is_torch, typed, user_errors
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.model import Model

TEXTS = "OSUMm"
"""Kinds of NumPy elements that are not numbers: objects, texts, dates."""


@dataclass(frozen=True)
class Loaded:
    """A model as its file builds it.

    Attributes:
      source: MODEL as the user typed it.
      hparams: every hyperparameter that `model` was called with.
      imported: files of the modules that were imported while loading.
    """

    model: Model
    source: str
    hparams: Mapping[str, Any]
    module: ModuleType
    imported: tuple[Path, ...] = ()

    def hashes(self) -> dict[str, str]:
        """SHA-256 of the model file and of every local file that it imports; nothing of installed modules."""
        named = file_and_function(self.source)
        return {} if named is None else hashes(named[0].resolve(), self.imported)

    def rebuilt(self, **hparams: Any) -> Model:
        """The model with other hyperparameters; nobody chose those that are as they are by default."""
        model, known = load_model(self.source, hparams).model, self.model.assumed
        model.assumed = {n: why for n, why in known.items() if hparams.get(n) == self.hparams[n]}
        return model

    def function(self, name: str) -> Callable[..., Any] | None:
        """A function of the model file that need not be there (`data`, `reference_losses`)."""
        found = getattr(self.module, name, None)
        return found if callable(found) else None

    def needed(self, name: str) -> Callable[..., Any]:
        """A function of the model file that must be there; UserError if it is not."""
        function = self.function(name)
        if function is None:
            raise UserError(
                f"{self.source} has no function {name}(); define {name}(**hparams) in the same file as "
                "model()"
            )
        return at_once(function, self.source)

    def call(self, name: str, **extra: Any) -> Any:
        """Calls a function of the file with those hyperparameters (and `extra`) that it takes.

        Raises:
          UserError: the file has no such function, or it raises.
        """
        function = self.needed(name)
        parameters = inspect.signature(function).parameters.values()
        given = {**self.hparams, **extra}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            given = {p.name: given[p.name] for p in parameters if p.name in given}
        with user_errors(f"{self.source}: {name}()", self.module):
            return function(**given)

    def data(self, split: str = "train", rows: Any = None, endless: bool = True) -> Batches:
        """The file's batches.

        Args:
          split: "train" or "held-out", for a `data` function that takes it.
          endless: the data starts again when it is through; else it ends, and batches may be short.
          rows: int64 [n], the rows of every batch that this process needs. A `data` function with a parameter
            `rows` gives these alone, another one whole batches.
        """
        return Batches(self, split, rows if self.takes_rows else None, endless)

    @property
    def takes_rows(self) -> bool:
        """True if `data` of the file makes a process's rows alone."""
        function = self.function("data")
        return function is not None and "rows" in inspect.signature(function).parameters

    def checked(self, batch: Any, rows: Any, short: bool) -> dict[str, Any]:
        """A batch with all inputs of the model in their shapes (if it may be short, with any number of rows);
        UserError for anything else."""
        if not isinstance(batch, Mapping):
            raise UserError(
                f"{self.source}: data() yielded a value of type {type(batch).__name__}; yield a dict from "
                "input names to arrays"
            )
        for name, tensor in self.model.graph.inputs.items():
            if name not in batch:
                raise UserError(
                    f"{self.source}: data() yielded a batch without the input {name!r}; "
                    f"{known_names(name, map(str, batch))}"
                )
            value, wanted = batch[name], tuple(tensor.shape.sizes)
            if not _is_numbers(value):
                what = f"an array of {value.dtype}" if hasattr(value, "dtype") else typed(value)
                raise UserError(
                    f"{self.source}: batch input {name!r} is {what}, not an array of numbers; "
                    "convert the input with np.asarray"
                )
            found = tuple(getattr(value, "shape", ()))
            if rows is not None:
                wanted = (len(rows), *wanted[1:])
            least = 1 if rows is None else 0  # other processes may have rows of a short batch
            fewer = short and found and found[1:] == wanted[1:] and least <= found[0] < wanted[0]
            if found != wanted and not fewer:
                whose = (
                    "the shape in the model"
                    if rows is None
                    else f"the shape of the {len(rows)} requested rows"
                )
                raise UserError(
                    f"{self.source}: batch input {name!r} has shape {found}, but {whose} is "
                    f"{wanted} [{tensor.shape}]"
                )
        return dict(batch)


def _is_numbers(value: Any) -> bool:
    """Whether a value of a batch is an array of numbers, or a number."""
    if not hasattr(value, "dtype"):
        return isinstance(value, int | float)
    return getattr(value.dtype, "kind", "f") not in TEXTS


_END = object()
"""What an iterator gives after its last batch: not None, which a faulty one may give."""


class Batches(Iterator[dict[str, Any]]):
    """The batches that the function `data` of a model file yields, from a position that can be saved.

    The position is the number of batches taken since `data` was called. If the iterator has `get_state()` and
    `set_state(state)`, as those of the library Grain have, its state is part of the position. Without these,
    batches are skipped.
    """

    def __init__(self, loaded: Loaded, split: str, rows: Any, endless: bool) -> None:
        self._loaded, self._split, self._rows, self._endless = loaded, split, rows, endless
        self._made: Any = None
        self._count = 0

    def __next__(self) -> dict[str, Any]:
        if self._made is None:
            self._open()
        with self._told():
            batch = next(self._made, _END)
        if batch is _END:
            if not self._count:
                raise UserError(
                    f"{self._loaded.source}: data() yielded no batch for the split {self._split!r}; yield "
                    "at least one batch"
                )
            if not self._endless:
                raise StopIteration
            self._made = None
            return next(self)
        self._count += 1
        return self._loaded.checked(batch, self._rows, short=not self._endless)

    def get_state(self) -> dict[str, Any]:
        """The place, as plain data."""
        from mesh_tf_core.training.prefetch import position

        with self._told():
            return {"batches": self._count, "inner": position(self._made)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` returned."""
        from mesh_tf_core.training.prefetch import position

        self._open()
        with self._told():
            if state["inner"] is not None and position(self._made) is not None:
                self._made.set_state(state["inner"])
            else:
                for _ in range(state["batches"]):
                    if next(self._made, _END) is _END:
                        break
        self._count = state["batches"]

    def _open(self) -> None:
        part = {} if self._rows is None else {"rows": self._rows}
        batches = self._loaded.call("data", split=self._split, **part)
        with self._told():
            self._made = (
                batches.as_numpy_iterator() if hasattr(batches, "as_numpy_iterator") else iter(batches)
            )
        self._count = 0

    def _told(self) -> contextlib.AbstractContextManager[None]:
        return user_errors(f"{self._loaded.source}: data()", self._loaded.module)


def load_model(
    source: str, settings: Sequence[str] | Mapping[str, Any] = (), devices: int | None = None
) -> Loaded:
    """Builds the model that `source` names, with hyperparameters changed by `settings`.

    Args:
      settings: texts `name=value`, or a mapping of values.
      devices: number of devices; the default batch of a config.json is a multiple of it. None: unknown.

    Raises:
      UserError: no such file or function, an unknown hyperparameter, a file that raises, a function that
        returns anything but a Model.
    """
    before = tuple(sys.modules)
    module, name, function = function_of(source)
    defaults = _defaults(function, source, module)
    if isinstance(settings, Mapping):
        changed = {defaults.also.get(n, n): value for n, value in settings.items()}
    else:
        changed = parse_settings(settings, defaults, source)
    defaults.check(changed, source)
    open_: dict[str, tuple[Any, str]] = getattr(function, "assumed", lambda _: {})(devices)
    kept = {n: open_.get(n, (d.value, "")) for n, d in defaults.items() if d.given}
    hparams = {**{n: value for n, (value, _) in kept.items()}, **changed}
    missing = [n for n in defaults if n not in hparams]
    if missing:
        raise UserError(
            f"{source}: {name}() has no default for {missing[0]!r}; add a default, or pass --set "
            f"{missing[0]}=VALUE"
        )
    asked = ", ".join(f"{n}={value!r}"[:MOST] for n, value in changed.items())
    with user_errors(f"{source}: {name}({asked})", module):
        model = function(**hparams)
    if not isinstance(model, Model):
        must = TORCH if is_torch(model) else "return a mesh_tf_core.Model(loss, optimizer)"
        raise UserError(f"{source}: {name}() returned {typed(model)}; {must}")
    model.hparams = hparams
    model.assumed = {n: why for n, (_, why) in kept.items() if n not in changed}
    return Loaded(model, source, hparams, module, loaded_files(before))


def hyperparameters(source: str) -> Defaults:
    """Hyperparameters of the model that `source` names; the model is not built.

    Raises:
      UserError: no such file or function, or a file that raises.
    """
    module, _, function = function_of(source)
    return _defaults(function, source, module)


def _defaults(function: Callable[..., Any], source: str, module: ModuleType) -> Defaults:
    """The hyperparameters of a function; one that takes any, as generate(beams=0, **hparams) does, has those
    of the file's `model` too, and others only if `model` has."""
    found = defaults_of(function, source)
    base = getattr(module, "model", None)
    if not found.open or base is function or not callable(base):
        return found
    both = defaults_of(base, source)
    both.update(found)
    return both
