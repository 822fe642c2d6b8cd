"""The interface of every engine: it runs a program's steps on real devices, holds its variables, counts the
bytes it moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mesh_tf_core.engines.pieces import Begin, VariablePiece
from mesh_tf_core.ir.program import Program


class Engine(Protocol):
    """Runs one program. Arrays are NumPy's and global: engines cut them into pieces and join them again."""

    program: Program

    @property
    def is_chief(self) -> bool:
        """True if this process writes checkpoints and speaks for all; of several processes one does."""

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks of this process's devices."""

    def initialize(self) -> None:
        """Sets every variable to its initial value."""

    @property
    def in_flight(self) -> int:
        """The number of steps that may be started before the results of the first one are read. More than 1
        if `begin` does not wait for the devices, so that they always have the next step queued."""

    def step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one step on a batch (feed name -> global array); returns the program's results as global
        arrays.

        Every read of a variable sees the state before the step; after an error, the state is that before the
        step.
        """

    def feed(self, batch: Mapping[str, Any]) -> Any:
        """Checks a batch and hands its pieces to the devices, for `run`.

        May be called in another thread while a step runs.
        """

    def begin(self, fed: Any) -> Callable[[], dict[str, Any]]:
        """Starts a step on the result of `feed`; the returned function waits for the results, and is called
        in the order of the steps."""

    def run(self, fed: Any) -> dict[str, Any]:
        """`step` on the result of `feed`."""

    def read(self, name: str) -> Any:
        """The global value of a variable."""

    def write(self, name: str, array: Any) -> None:
        """Replaces the global value of a variable."""

    def fill(self, name: str, read: Callable[[Begin, Sequence[int]], Any]) -> None:
        """The same by shards: `read` returns the shard with a first index and a shape, and is called only for
        shards of this process's devices."""

    def snapshot(self) -> Mapping[VariablePiece, Any]:
        """The part of a checkpoint that this process writes: the current values of all variables, unaffected
        by later steps. In a process alone these are whole variables, else those pieces of its devices that no
        other process writes.

        A value is assembled when it is read, at most once, possibly in another thread.
        """

    def beside(self, program: Program) -> Engine:
        """An engine for another program on the same devices and variables (evaluation during training).

        Raises:
          UserError: the program has a variable that this one lacks or stores differently.
        """

    @property
    def communication_bytes(self) -> dict[str, float]:
        """Bytes that a device sent in the last step, per mesh axis (axes that act together are joined by
        '+').

        Counted from the tensors handed to collectives, by `program.wire_bytes`.
        """

    @property
    def transfer_bytes(self) -> dict[str, float]:
        """Bytes that a device loaded from its host in the last step, and stored there (`host_load`,
        `host_store`), counted from the tensors moved."""

    @property
    def variable_bytes(self) -> int:
        """Bytes of the variables' pieces on one device; not of those that lie on its host."""

    @property
    def host_variable_bytes(self) -> int:
        """Bytes of the variables' pieces that one device keeps on its host."""

    @property
    def peak_memory_bytes(self) -> int | None:
        """Most bytes that one device held at any moment of the steps so far.

        By the device's own counter where it has one. Virtual CPU devices share one allocator; there the
        compiler of a whole step reports the peak. Elsewhere, and in NumPy, the bytes of the values that the
        engine made are counted, each until its last reader has run (`engines.meter`). None before the first
        step.
        """

    @property
    def compile_seconds(self) -> float:
        """Time spent on tracing and compiling so far, in seconds."""

    def close(self) -> None:
        """Gives the devices' memory back; the engine cannot be used afterwards."""
