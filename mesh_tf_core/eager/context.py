"""The eager context: a mesh, a layout and the variables' values."""

from collections.abc import Callable, Mapping
from typing import Any

from mesh_tf_core.eager.machine import EagerMachine
from mesh_tf_core.eager.staged import Staged
from mesh_tf_core.eager.step import EagerStep
from mesh_tf_core.eager.store import VariableStore
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh


class Eager:
    """Runs model code at once, operation by operation, on a mesh under a layout.

    Variables keep their values from step to step: code that creates a variable with a known name gets the
    current value. `staged` makes one program of a function instead.

    Args:
      mesh, layout: the mesh and the layout.
      engine: `local` (TensorFlow, also `auto`) or `lockstep` (NumPy, exact).

    Example:
      >>> import mesh_tf_core as mtf
      >>> batch, d_model = mtf.Dim("batch", 2), mtf.Dim("d_model", 2)
      >>> run = mtf.Eager("data:2", "batch:data", engine="lockstep")
      >>> with run.step() as graph:
      ...     x = graph.constant([[1.0, 2.0], [3.0, 4.0]], [batch, d_model])
      ...     print(mtf.reduce_sum(x, [batch]).numpy())
      [4. 6.]
    """

    def __init__(self, mesh: Mesh | str, layout: Layout | str = "", engine: str = "auto") -> None:
        self.mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
        self.layout = Layout(layout) if isinstance(layout, str) else layout
        self.machine = EagerMachine(self.mesh, self.layout, engine)
        self.store = VariableStore(self.machine)
        self._staged: list[Staged] = []

    def step(self, batch: Mapping[str, Any] | None = None, unroll: bool = True) -> EagerStep:
        """A new step.

        Args:
          batch: arrays by name, for code that declares inputs (`graph.input`).
          unroll: `scan` and `while_loop` run iteration by iteration, so that values inside their bodies can
            be looked at. Else a loop is one operation, as in a program: its body is built once.
        """
        return EagerStep(self.machine, self.store, batch or {}, unroll)

    def staged(self, fn: Callable[..., Any]) -> Staged:
        """`fn` traced into one program, once per signature; a decorator.

        Args:
          fn: takes tensors (in tuples, lists and dicts too) and hashable values; returns tensors.
        """
        self._staged.append(Staged(fn, self.machine, self.store))
        return self._staged[-1]

    @property
    def variables(self) -> dict[str, Variable]:
        """The variables made so far, by name."""
        return {name: held.variable for name, held in self.store.held.items()}

    def read(self, name: str) -> Any:
        """The global array of a variable, as the last finished step left it."""
        return self.store.read(name)

    def write(self, name: str, array: Any) -> None:
        """Replaces the value of a variable."""
        self.store.write(name, array)

    def close(self) -> None:
        """Gives the memory of staged programs back; neither they nor the variables can be used afterwards."""
        for staged in self._staged:
            staged.close()
        self.store.held.clear()
