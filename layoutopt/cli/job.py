"""The options by which several processes run one command together, and the job that they open."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from layoutopt.cli.options import LONGEST, EngineOption, Output, time_option
from layoutopt.cli.running import Session
from layoutopt.cli.terminal import Terminal


def _wait(name: str, help: str, default: str) -> Any:
    return time_option(name, f"{help} (with --cluster).", 1, LONGEST, show_default=default)


@dataclass(frozen=True)
class Job:
    """The engine of a command, and which processes run it together, as its options say; by default this one
    alone."""

    engine: EngineOption = "auto"
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Run as one process of a job that JAX detects from the environment (see "
            "docs/guides/clusters.md).",
        ),
    ] = False
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of the job's first process, HOST:PORT.")
    ] = None
    processes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of processes in the job (with --coordinator)."),
    ] = None
    process: Annotated[
        int | None,
        typer.Option(min=0, metavar="I", help="Rank of this process, from 0 (with --coordinator)."),
    ] = None
    timeout: Annotated[
        float | None, _wait("--timeout", "Time to wait at a step for a process that is alive but late", "25")
    ] = None
    start_timeout: Annotated[
        float | None, _wait("--start-timeout", "Time to wait for a process to start", "300")
    ] = None

    @property
    def several(self) -> bool:
        """True if there are other processes."""
        return self.cluster or self.coordinator is not None

    @contextlib.contextmanager
    def open(self, output: Output) -> Iterator[Session]:
        """The context that the command runs in once all processes have joined; only one of them prints.

        Raises:
          UserError: the options make no sense together, or the engine runs in one process alone.
          ClusterError: a process did not come, or was lost within.
        """
        from mesh_tf_core.errors import ClusterError

        if not self.several:
            self._refuse_alone()
            yield Session(output.terminal, self.engine)
            return
        from layoutopt.cli.exits import tell
        from mesh_tf_core.engines import Cluster, chosen

        waits = {"timeout": self.timeout, "start_timeout": self.start_timeout}
        made = Cluster(
            self.coordinator,
            self.processes,
            self.process,
            tell=lambda text: tell(text, ClusterError.exit_code, output.as_json),
            **{name: seconds for name, seconds in waits.items() if seconds is not None},
        )
        chosen(self.engine, made)  # before anybody waits for anybody
        _own_output()
        with made:
            yield Session(Terminal(output.as_json, output.quiet, made.is_writer), self.engine, made)

    def _refuse_alone(self) -> None:
        """What is for several processes says nothing to one."""
        from mesh_tf_core.errors import UserError

        if self.processes is not None or self.process is not None:
            raise UserError("--processes and --process need --coordinator HOST:PORT; add --coordinator")
        if self.timeout is not None or self.start_timeout is not None:
            raise UserError(
                "--timeout and --start-timeout limit how long processes wait for each other; add "
                "--cluster (or --coordinator HOST:PORT), or remove these two options"
            )


ALONE = Job()


def _own_output() -> None:
    """Keeps stdout for our results: the collectives of CPU devices announce themselves there."""
    old = sys.__stdout__
    if old is None or sys.stdout is not old:
        return
    old.flush()
    out = open(os.dup(1), "w", encoding=old.encoding, errors=old.errors)  # noqa: SIM115
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    sys.stdout = out
