"""Input that is ready when a step wants it: the next batches are made in a thread while the devices work. A
user's batch becomes the inputs of a program."""

from __future__ import annotations

import collections
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from mesh_tf_core.arguments import BATCH, check
from mesh_tf_core.engines.feeds import widened
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import REPLICA
from mesh_tf_core.ir.program import Program
from mesh_tf_core.model import Model

DEPTH = 2
"""Batches that wait ready: one for the step after the running one, one for a batch that takes longer."""
GRACE = 5.0
"""Seconds that the end of a run waits for a batch that is being made."""
LOOK = 0.1
"""Seconds between two looks, while no batch is ready, at whether any is still wanted."""


def position(stream: Any) -> Any:
    """The position of an iterator, if it reports one (`get_state`, as iterators of the library Grain do), or
    None."""
    return stream.get_state() if hasattr(stream, "get_state") and hasattr(stream, "set_state") else None


def continued(stream: Any, position: Any, step: int) -> Any:
    """The iterator, set to a reported position, or else advanced past the batches of `step` steps."""
    if position is not None and hasattr(stream, "set_state"):
        stream.set_state(position)
    else:
        collections.deque(itertools.islice(stream, step), maxlen=0)
    return stream


class BatchGroups(Iterator[Mapping[str, Any]]):
    """Groups of `count` batches of a stream, each made into one; its place in the data is that of all.

    Args:
      needed: of a last few that are fewer, something is made if they are as many (None: all).
    """

    def __init__(
        self,
        batches: Iterator[Mapping[str, Any]],
        count: int,
        made: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]],
        needed: int | None = None,
    ) -> None:
        self._batches, self._count, self._made, self._needed = batches, count, made, needed or count

    def __next__(self) -> Mapping[str, Any]:
        found = [*itertools.islice(self._batches, self._count)]
        if len(found) < self._needed:
            raise StopIteration
        return self._made(found)

    def __getattr__(self, name: str) -> Any:
        if name in ("get_state", "set_state"):  # if the data can tell its place, so can this
            return getattr(self._batches, name)
        raise AttributeError(name)


@dataclass(frozen=True)
class Ready:
    """A prepared batch.

    Attributes:
      position: position of the data after it, None if the data do not report it.
    """

    fed: Any
    position: Any


class Prefetch:
    """The next `count` batches of a stream (None: all of them), prepared in a thread.

    Args:
      prepare: batch -> input of a step; runs in the thread.
      stop: once it is true, the batches end.

    Attributes:
      waited: seconds that the consumer has waited for input.
    """

    def __init__(
        self,
        stream: Iterator[Any],
        prepare: Callable[[Any], Any],
        count: int | None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.waited, self._stop = 0.0, stop
        self._stream, self._prepare, self._count = stream, prepare, count
        self._ready: queue.Queue[Ready | BaseException | None] = queue.Queue(DEPTH)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="input", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for _ in itertools.count() if self._count is None else range(self._count):
                try:
                    batch = next(self._stream)
                except StopIteration:
                    break
                if not self._put(Ready(self._prepare(batch), position(self._stream))):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Ready | BaseException | None) -> bool:
        """False if nobody wants it any more."""
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[Ready]:
        while not self._stop():
            began = time.perf_counter()
            try:
                item = self._ready.get(timeout=LOOK)
            except queue.Empty:
                continue
            finally:
                self.waited += time.perf_counter() - began
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return
            yield item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread, which may have taken batches that nobody used. One that is stuck in the stream is
        left to the end of the process."""
        self._stopped.set()
        self._thread.join(GRACE)


def fitted(batch: Mapping[str, Any], model: Model, program: Program, rows: Any) -> dict[str, Any]:
    """The inputs of the model in the shapes of the program: with microbatches, in parts; with replicas, one
    part for each.

    Args:
      rows: those that this process's devices read, int64 [n]; a batch may hold these alone. None: all.

    Raises:
      UserError: an input is missing, or its shape differs from the model's.
    """
    check("training", batch=(batch, BATCH))
    replicas = program.layout.axes(REPLICA)
    of = (program.mesh.group_size(replicas),) if replicas else ()
    found = {}
    for name, tensor in model.graph.inputs.items():
        if name not in batch:
            raise UserError(
                f"the batch has no array for the model's input {name!r}; the inputs are "
                f"{', '.join(model.graph.inputs)}"
            )
        array, wanted = batch[name], (*of, *tensor.shape.sizes)
        shape = tuple(getattr(array, "shape", ()))
        if rows is not None and wanted and len(rows) < wanted[0] and shape[:1] == (len(rows),):
            array = widened(np.asarray(array), rows, wanted[0])
            shape = array.shape
        if shape != wanted:
            raise UserError(
                f"the batch's array {name!r} has shape {shape}, but the model was built for "
                f"[{tensor.shape}]" + (f" and {of[0]} replicas, which need shape {wanted}" if of else "")
            )
        found[name] = array
    feeds = {name: program.values[id].shape.sizes for name, id in program.feeds.items()}
    return {name: np.reshape(found[name], sizes) for name, sizes in feeds.items()}


def plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Results, scalars as numbers."""
    return {name: value.item() if getattr(value, "ndim", 1) == 0 else value for name, value in found.items()}
