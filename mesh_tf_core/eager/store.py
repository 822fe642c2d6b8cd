"""The variables of an eager context: each is stored as shards here, in engines of staged functions, or
both."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mesh_tf_core.eager.machine import EagerMachine
from mesh_tf_core.engines import Engine
from mesh_tf_core.engines.feeds import check_array
from mesh_tf_core.engines.pieces import DevicePieces
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.kernels.array_kernel import np_dtype


@dataclass
class HeldVariable:
    """The place of a variable's value.

    Attributes:
      engines: those with the current copy.
    """

    variable: Variable
    pieces: DevicePieces | None = None
    engines: list[Engine] = field(default_factory=list)


class VariableStore:
    """Variables by name. A value is copied only when it is read in another place."""

    def __init__(self, machine: EagerMachine) -> None:
        self.machine = machine
        self.held: dict[str, HeldVariable] = {}
        self._versions: Counter[str] = Counter()

    def pieces(self, variable: Variable) -> DevicePieces:
        """The value, as eager operations read it; a variable that is new is initialised."""
        held = self._known(variable)
        if held is None:
            sizes = variable.shape.sizes
            array = variable.initializer.piece(variable.name, sizes, [0] * len(sizes), sizes)
            held = self.held[variable.name] = HeldVariable(variable, self._placed(variable, array))
        elif held.pieces is None:
            held.pieces = self._placed(variable, held.engines[0].read(variable.name))
        assert held.pieces is not None
        return held.pieces

    def put(self, variable: Variable, pieces: DevicePieces) -> None:
        """Replaces the value."""
        self._replace(HeldVariable(variable, pieces))

    def bring(self, variable: Variable, engine: Engine) -> None:
        """Makes the engine's copy the present one. An engine's variables begin with their initial values."""
        held = self._known(variable)
        if held is None:
            self.held[variable.name] = HeldVariable(variable, None, [engine])
        elif not any(e is engine for e in held.engines):
            engine.write(variable.name, self.read(variable.name))
            held.engines.append(engine)

    def wrote(self, variable: Variable, engine: Engine) -> None:
        """A step of the engine has replaced the value."""
        self._replace(HeldVariable(variable, None, [engine]))

    def _replace(self, held: HeldVariable) -> None:
        self.held[held.variable.name] = held
        self._versions[held.variable.name] += 1

    def version(self, name: str) -> int:
        """The number of times that the value has been replaced."""
        return self._versions[name]

    def read(self, name: str) -> Any:
        """The global array."""
        held = self._named(name)
        if held.pieces is None:
            return held.engines[0].read(name)
        return self.machine.joined(held.pieces, held.variable.type)

    def write(self, name: str, array: Any) -> None:
        """Replaces the value by a global array."""
        variable = self._named(name).variable
        self.put(variable, self._placed(variable, check_array(variable, array)))

    def _named(self, name: str) -> HeldVariable:
        if name not in self.held:
            raise UserError(f"there is no variable {name!r} yet; {known_names(name, self.held)}")
        return self.held[name]

    def _known(self, variable: Variable) -> HeldVariable | None:
        held = self.held.get(variable.name)
        if held is not None and held.variable.type != variable.type:
            raise UserError(
                f"variable {variable.name!r} was made with type {held.variable.type} in an earlier step "
                f"and is now requested with type {variable.type}; give the new variable another name, or "
                "use a new mtf.Eager"
            )
        return held

    def _placed(self, variable: Variable, array: Any) -> DevicePieces:
        array = np.asarray(array).astype(np_dtype(variable.dtype))
        return self.machine.placed(array, variable.type, f"variable {variable.name!r}")
