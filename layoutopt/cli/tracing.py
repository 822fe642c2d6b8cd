"""`--trace DIR`: records steps while they run, beside the predicted step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from layoutopt.cli.options import path_option
from layoutopt.cli.running import Session

if TYPE_CHECKING:
    from layoutopt.optimize.evaluation import Evaluation

TRACED = 3
"""Steps that are recorded."""
WARM = 2
"""Steps before them: the first one compiles, the second fills caches."""
NAME = "steps.json.gz"

HELP = f"Folder for a trace of {TRACED} steps and of the predicted step, e.g. for the Perfetto viewer."
TraceOption = Annotated[Path | None, path_option("DIR", HELP, "--trace")]


class Trace:
    """The steps of one run that are recorded; nothing where no directory is named.

    Args:
      directory: value of `--trace`; each of several processes has its own folder in it.

    Raises:
      UserError: the engine records nothing, or the directory cannot be made.
    """

    def __init__(self, session: Session, directory: Path | None) -> None:
        self._terminal, self._place = session.terminal, directory
        self._open = contextlib.ExitStack()
        self._begun = False
        if directory is None:
            return
        from mesh_tf_core.errors import UserError
        from mesh_tf_core.files import unwritable

        if (kind := session.kind) != "jax":
            raise UserError(
                f"--trace records only what JAX runs, but the engine is '{kind}'; add --engine jax"
            )
        own = directory if session.cluster is None else directory / f"worker-{session.cluster.index}"
        self._place = own
        try:
            for folder in {directory: None, own: None}:
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(directory, error, "--trace") from None

    def at(self, done: int, of: int, found: Evaluation) -> None:
        """Begins or ends the recording, if it is time.

        Args:
          done: steps since the run began; `of`: total number of steps.
        """
        first = min(WARM, of - 1)
        if self._place is not None and not self._begun and first <= done < of:
            self.begin()
        elif self._begun and done >= first + TRACED:
            self.end(found)

    def record(self, run: Callable[[int], object], found: Evaluation) -> None:
        """Records steps that `run` does, by their numbers, if a directory is named."""
        if self._place is not None:
            self.begin()
            for number in range(TRACED):
                run(number)
            self.end(found)

    def begin(self) -> None:
        """From here on steps are recorded."""
        from mesh_tf_core.engines.jax.profile import recording

        assert self._place is not None
        self._begun = True
        self._open.enter_context(recording(self._place))

    def end(self, found: Evaluation) -> None:
        """Writes the recorded steps, if there are any, with the predicted step beside the first."""
        from layoutopt.analysis.perfetto import measured, predicted, written
        from mesh_tf_core.engines.jax.profile import recorded
        from mesh_tf_core.files import write_file

        if not self._begun or self._place is None:
            return
        place, self._place, self._begun = self._place, None, False
        self._open.close()
        steps, begin = measured(recorded(place))
        write_file(place / NAME, written([*predicted(found, begin), *steps], packed=True), "--trace")
        self._terminal.say(f"wrote the trace to {place / NAME}; open it at https://ui.perfetto.dev")
