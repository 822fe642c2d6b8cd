"""One device's share of a program: runs instructions on its pieces, with any kernel. How devices exchange
pieces is their engine's matter."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from mesh_tf_core.ir import program as ir
from mesh_tf_core.ir.dims import SparseDim
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh


def group_index(mesh: Mesh, rank: Any, axes: Axes) -> Any:
    """`mesh.group_index` for a rank that may be an integer scalar of a library."""
    strides, step = {}, 1
    for name, size in reversed(mesh.axes):
        strides[name] = step
        step *= size
    index: Any = 0
    for axis in axes:
        index = index * mesh.size(axis) + rank // strides[axis] % mesh.size(axis)
    return index


def at(program: ir.Program, instr: ir.Local) -> Callable[[Callable[[Axes], Any]], At]:
    """Returns the function that makes the `At` of an instruction, given a device's position in its group over
    some axes."""
    values = [program.values[i] for i in (*instr.inputs, *instr.outputs)]
    types = tuple(v.local(program.mesh) for v in values)
    split: Mapping[str, Axes] = {
        name: axes for v in values for name, axes in zip(v.shape.names, v.splits, strict=True) if axes
    }
    size = {d.name: d.size for t in types for d in t.shape}
    held = tuple(t.places for t in types)
    n, names = len(instr.inputs), frozenset(split)
    ways = {name: program.mesh.group_size(axes) for name, axes in split.items()}

    def placed(index: Callable[[Axes], Any]) -> At:
        return At(held[:n], held[n:], names, lambda name: index(split[name]) * size[name], ways)

    return placed


def applied(kernel: Kernel, instr: ir.Local, at: At, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of an operation on one device's pieces."""
    made = instr.op.kernel(kernel, at, *inputs)
    return made if isinstance(made, tuple) else (made,)


class Device:
    """One device of a program's mesh.

    Args:
      rank: its number, an integer or a scalar of the kernel's library.
    """

    def __init__(self, program: ir.Program, kernel: Kernel, rank: Any) -> None:
        self.program, self.kernel, self.rank = program, kernel, rank
        self._index: dict[Axes, Any] = {}

    def index(self, axes: Axes) -> Any:
        """This device's position in its group over `axes`."""
        if axes not in self._index:
            self._index[axes] = group_index(self.program.mesh, self.rank, axes)
        return self._index[axes]

    def part(self, piece: Any, v: ir.Value, dim: str, axes: Axes) -> Any:
        """This device's part of `dim`, of a piece of `v` that its group over `axes` shares out."""
        if isinstance(v.shape.dim(dim), SparseDim):  # other devices' experts leave their places empty
            return piece
        sizes, axis = list(v.local(self.program.mesh).shape.places.sizes), v.shape.index(dim)
        sizes[axis] //= self.program.mesh.group_size(axes)
        begin: list[Any] = [0] * len(sizes)
        begin[axis] = self.index(axes) * sizes[axis]
        return self.kernel.slice(piece, begin, sizes)


class Replica(Device):
    """Runs communication-free instructions of a program on one device's pieces.

    Args:
      read: variable name -> this device's piece.
      feed: input name -> this device's piece.
    """

    def __init__(
        self,
        program: ir.Program,
        kernel: Kernel,
        rank: Any,
        read: Callable[[str], Any],
        feed: Callable[[str], Any],
    ) -> None:
        super().__init__(program, kernel, rank)
        self.read, self.feed = read, feed

    def run(self, code: Sequence[ir.Instr], env: MutableMapping[int, Any]) -> None:
        """Adds the outputs of `code` to `env` (value id -> piece)."""
        for instr in code:
            if isinstance(instr, ir.Local):
                inputs = [env[i] for i in instr.inputs]
                made = applied(self.kernel, instr, at(self.program, instr)(self.index), inputs)
                env.update(zip(instr.outputs, made, strict=True))
            elif isinstance(instr, ir.Slice):
                (i,), (o,) = instr.inputs, instr.outputs
                env[o] = self.part(env[i], self.program.values[i], instr.dim, instr.axes)
            elif isinstance(instr, ir.ReadVariable):
                env[instr.outputs[0]] = self.read(instr.variable)
            elif isinstance(instr, ir.Input):
                env[instr.outputs[0]] = self.feed(instr.feed)
            elif isinstance(instr, ir.Transfer):  # here device and host have one memory
                env[instr.outputs[0]] = env[instr.inputs[0]]
            elif not isinstance(instr, ir.Done):  # the library waits for what it reads
                raise TypeError(
                    f"{instr.text()}: this engine has no code for this instruction; please report this bug"
                )


class WholeReplica(Replica, ABC):
    """A device's whole program as one function of a library that compiles it, loops and collectives included.

    Args:
      coordinate: axis of several devices -> the device's position on it, taken outside of all loops, so that
        their bodies may use it.

    Attributes:
      written: variable -> its new piece.
    """

    def __init__(
        self,
        program: ir.Program,
        kernel: Kernel,
        coordinate: Mapping[str, Any],
        read: Callable[[str], Any],
        feed: Callable[[str], Any],
    ) -> None:
        super().__init__(program, kernel, None, read, feed)
        self.coordinate = coordinate
        self.written: dict[str, Any] = {}

    def index(self, axes: Axes) -> Any:
        index: Any = 0
        for axis in axes:
            index = index * self.program.mesh.size(axis) + self.coordinate.get(axis, 0)
        return index

    def block(self, code: Sequence[ir.Instr], env: dict[int, Any], times: float) -> None:
        """Runs instructions; `times` is how often the block runs in a step (see `Loop.times`)."""
        for instr in code:
            if isinstance(instr, ir.Loop):
                self.loop(instr, env, times)
            elif isinstance(instr, ir.Collective):
                self.exchange(instr, env, times)
            elif isinstance(instr, ir.WriteVariable):
                self.written[instr.variable] = env[instr.inputs[0]]
            elif isinstance(instr, ir.Transfer):
                self.transfer(instr, env, times)
            else:
                self.run((instr,), env)

    @abstractmethod
    def loop(self, loop: ir.Loop, env: dict[int, Any], times: float) -> None:
        """Runs a loop, and adds its results to `env`."""

    @abstractmethod
    def exchange(self, instr: ir.Collective, env: dict[int, Any], times: float) -> None:
        """Runs a collective."""

    @abstractmethod
    def transfer(self, instr: ir.Transfer, env: dict[int, Any], times: float) -> None:
        """Moves a piece between the device and its host."""
