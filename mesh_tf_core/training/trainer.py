"""Training: a model under a layout on this machine's devices."""

import collections
import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mesh_tf_core.arguments import (
    BATCHES,
    FUNCTION,
    PATH,
    ArgumentKind,
    at_least,
    check,
    instance,
    is_whole,
    optional,
)
from mesh_tf_core.engines import Cluster, Engine, open_engine
from mesh_tf_core.engines.feeds import rows_of
from mesh_tf_core.engines.pieces import VariablePiece
from mesh_tf_core.errors import UserError
from mesh_tf_core.exclusions import CLUSTER, MEANS, MEETINGS, REPLICAS, refuse
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.pipeline import alone
from mesh_tf_core.model import Model
from mesh_tf_core.training import checkpoint as checkpoints
from mesh_tf_core.training.auto import DEFAULT, PlannedTraining, decided
from mesh_tf_core.training.decoupled import Decoupled
from mesh_tf_core.training.evaluation import NO_MEANS, EvaluationBatches, EvaluationPass, running_means
from mesh_tf_core.training.finite import FiniteLoss, FinitePieces, finite_names
from mesh_tf_core.training.fitting import Fitting, OnStep
from mesh_tf_core.training.opened import Checkpoint
from mesh_tf_core.training.outer_step_rounds import Meetings
from mesh_tf_core.training.prefetch import Ready, continued, fitted, plain
from mesh_tf_core.training.replicas import TrainedReplicas
from mesh_tf_core.training.saving import Saver, check_position
from mesh_tf_core.training.weights import GivenWeights, LoadedWeights, Source, read_weights, write_trained

MODEL = instance(Model, "an mtf.Model, e.g. mtf.Model(loss)")
MODE = optional(ArgumentKind(is_whole, "a file mode as a whole number, e.g. 0o700"))


class Trainer:
    """Runs training steps of a model.

    Args:
      mesh, layout: the mesh and the layout. `layout="auto"` searches for the best layout on this machine (it
        needs layoutopt). A plan of this model may replace both: `Trainer(model, plan)`.
      options: storage, recomputation, microbatches and the other `Options` of lowering.
      engine: `auto`, `local` (TensorFlow), `jax` or `lockstep` (NumPy, exact and slow); see
        `engines.open_engine`.
      cluster: the processes that train together, each with the same Trainer; by default only this process.
        Each process writes its part of a checkpoint and reads the parts that its devices need.
      slices: mesh axis -> number of TPU slices that the axis spans (see `engines.jax.placing`); a plan sets
        this itself.
      checkpoint_mode: file mode of checkpoint folders, e.g. 0o700; files get the same mode without the
        execute bits. By default the umask decides.

    Attributes:
      layout: the layout in use.
      plan: the plan of the layout, if it was searched for or given; else None.
      step_number: number of steps done, including those before a resumed checkpoint.
      resumed: mesh, layout, processes and data position of the run that wrote the restored checkpoint; empty
        if none was restored.
      position: position of the data after the last step; None if the data do not report it.
      torn: True if a step or `load` was interrupted, so that the variables may mix two steps; `restore`
        repairs them.
      waited: fraction (0 to 1) of the last `fit` in which the devices were idle because they waited for
        input.
      rows: with a cluster, the rows of every batch (along the first dimension of its arrays) that this
        process's devices read, int64 [n]. A batch may hold only these rows, in this order. None: whole
        batches.

    Example:
      >>> import numpy as np, mesh_tf_core as mtf
      >>> from examples import mlp
      >>> trainer = mtf.Trainer(mlp.model(batch=8), "data:2", "batch:data", engine="lockstep")
      >>> batch = {"image": np.zeros([8, 64], np.float32), "label": np.zeros([8], np.int32)}
      >>> sorted(trainer.step(batch)), trainer.step_number
      (['accuracy', 'loss'], 1)
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh | str | PlannedTraining,
        layout: Layout | str = "",
        options: Options = DEFAULT,
        engine: str = "auto",
        cluster: Cluster | None = None,
        slices: Mapping[str, int] | None = None,
        checkpoint_mode: int | None = None,
    ) -> None:
        self.model, self.cluster = model, cluster
        check("Trainer", model=(model, MODEL), checkpoint_mode=(checkpoint_mode, MODE))
        found = decided(model, mesh, layout, options, cluster)
        self.plan: Any = found.plan
        self.mesh, self.layout, options = found.mesh, found.layout, found.options
        self.options = options
        rare = None if options.diloco is None else model.replicas(self.mesh, self.layout, options)
        self.program = model.lower(self.mesh, self.layout, options) if rare is None else rare.inner
        if slices is None and self.plan is not None:
            slices = self.plan.slices
        self.engine: Engine = open_engine(self.program, engine, cluster, slices)
        self.engine.initialize()
        self._replicas = None if rare is None else TrainedReplicas(self.engine, rare)
        whole = cluster is None or model.batch_dim is None or self._replicas is not None
        self.rows = None if whole else rows_of(self.program, str(model.batch_dim), self.engine.ranks)
        self.step_number = 0
        self.resumed: Mapping[str, Any] = {}
        self.position: Any = None
        self.torn = False
        self.waited = 0.0
        self._saver = Saver(cluster, checkpoint_mode)
        self._meetings: Meetings | None = None
        self._restored: Checkpoint | None = None
        self._evaluation: tuple[Model, bool, EvaluationPass] | None = None
        self._finite = finite_names(stored.variable for stored in self.program.variables.values())
        self._losses = FiniteLoss(model.optimizer.loss_scale is not None)

    def step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one training step; returns the loss and the metrics, as of before the update, as numbers."""
        return self._begun(Ready(self._prepared(batch), self.position))()

    def _begun(self, batch: Ready) -> Callable[[], dict[str, Any]]:
        """Begins a step and counts it; an interruption in between, as by Ctrl-C, leaves it `torn`. The
        function returned waits for the results."""
        torn, self.torn = self.torn, True
        try:
            results = self.engine.begin(batch.fed)
        except Exception:
            self.torn = torn  # engines keep the state of before
            raise
        replicas = self._replicas
        met: Callable[[], object] = dict
        if replicas is not None:
            met = replicas.after(self.step_number + 1)
        self.step_number, self.position = self.step_number + 1, batch.position
        self.torn = torn

        def found() -> dict[str, Any]:
            try:
                made = results()
                met()
                return plain(made if replicas is None else replicas.mean(made))
            except Exception:
                self.torn = True  # it had begun, and later ones may have
                raise

        return found

    def stream(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The stream that steps consume: a batch each; with replicas, one for each of them, stacked."""
        return iter(batches) if self._replicas is None else self._replicas.together(iter(batches))

    def _prepared(self, batch: Mapping[str, Any]) -> Any:
        """The batch, checked and handed to the devices."""
        return self.engine.feed(fitted(batch, self.model, self.program, self.rows))

    def fit(
        self,
        batches: Iterable[Mapping[str, Any]],
        steps: int,
        checkpoint: str | Path | None = None,
        every: int = 100,
        on_step: OnStep | None = None,
        stop: Callable[[], bool] = lambda: False,
        evaluate: Callable[[int], object] | None = None,
        evaluate_every: int = 100,
        keep: bool = True,
        meet: Decoupled | None = None,
    ) -> list[dict[str, Any]]:
        """Trains until `steps` steps are done in total; returns the results of the steps that this call ran.

        A thread prepares the next batches while a step runs, and checkpoints are written while later steps
        run. An error while writing a checkpoint is raised when the next one is due, or at the end.

        Args:
          batches: one dict of arrays per step, from the first step on: a resumed run skips those already
            used; with replicas, one for each of them in turn. An iterator with `get_state()` and
            `set_state(state)` (state: JSON data) is set to its position instead.
          checkpoint: directory to resume from, if no step has been run yet, and to save to, every `every`
            steps and at the end.
          on_step: called with (step number, results, seconds of the step).
          stop: called between steps, and while no batch is ready; once it returns True the training ends
            there, and is saved. It is meant for signals: KeyboardInterrupt may come in the middle of a step,
            after which nothing can be saved (`torn`).
          evaluate: called with the step's number after every `evaluate_every` steps, as `evaluate` of this
            trainer may be.
          keep: False returns no results, because those of a long training take memory, a quarter of a KiB a
            step; `on_step` gets them.
          meet: how this training, one of several jobs, synchronises with the others; `batches` are those of
            all, of which it takes its own.

        Raises:
          UserError: the loss is not a finite number, the data ended, a checkpoint is of another model, or
            another job writes into the directory.
        """
        check("fit", batches=(batches, BATCHES), steps=(steps, at_least(0)), every=(every, at_least(1)))
        check("fit", checkpoint=(checkpoint, optional(PATH)), evaluate_every=(evaluate_every, at_least(1)))
        check("fit", stop=(stop, FUNCTION))
        check("fit", on_step=(on_step, optional(FUNCTION)), evaluate=(evaluate, optional(FUNCTION)))
        check("fit", meet=(meet, optional(instance(Decoupled, "mtf.Decoupled"))))
        loop = Fitting(
            self,
            self._begun,
            self.engine.in_flight,
            self._saver,
            self._losses,
            steps=steps,
            every=every,
            on_step=on_step,
            stop=stop,
            evaluate=evaluate,
            evaluate_every=evaluate_every,
            keep=keep,
            checkpoint=checkpoint,
        )
        if checkpoint is None:
            return self._fit(loop, batches, meet)
        own: contextlib.AbstractContextManager[str] = contextlib.nullcontext("")
        if self.engine.is_chief:
            own = checkpoints.owned(checkpoint, self._saver.mode)
        with own as trouble:
            if trouble:
                warnings.warn(trouble, checkpoints.CheckpointWarning, stacklevel=2)
            if not self.step_number:
                self.restore(checkpoint)
            return self._fit(loop, batches, meet)

    def _fit(
        self, loop: Fitting, batches: Iterable[Mapping[str, Any]], meet: Decoupled | None
    ) -> list[dict[str, Any]]:
        """Runs the loop from the variables as they are."""
        if meet is not None:
            loop.meetings, loop.on_met = self._joined(meet), meet.on_met
            batches = loop.meetings.stream(iter(batches))
        stream = continued(self.stream(batches), self.position, self.step_number)
        return loop.run(stream, self._prepared)

    def _joined(self, meet: Decoupled) -> Meetings:
        """The meetings of this training: those of a `fit` before, or of the checkpoint, if they are the
        same."""
        alone = "" if self._replicas is None else "diloco"
        refuse({MEETINGS: "meet", REPLICAS: alone, CLUSTER: "" if self.cluster is None else "a cluster"})
        if self._meetings is None or self._meetings.how != meet:
            self._meetings = Meetings(meet, self.engine, self.program, self._restored)
        return self._meetings

    def evaluate(
        self, batches: EvaluationBatches, model: Model | None = None, ema: bool = False
    ) -> dict[str, float]:
        """Returns the means of the loss and the metrics over all examples of `batches` (name -> float), with
        the current variables.

        The evaluation uses the layout of the training. The last batch may be short: the means are over the
        examples that exist (see `evaluation`).

        Args:
          batches: whole ones; or a function of the rows that this process's devices read (of a short batch
            only existing rows), or of None for whole batches.
          model: the model for evaluation, with the same variables (built with `training=False`, for example);
            by default the trained one, without dropout.
          ema: True evaluates the running means of the variables (`Optimizer.ema`).
        """
        means = self._means("evaluate", ema)
        found, evaluated = self._evaluation, model or self.model
        if found is None or found[0] is not evaluated or found[1] != ema:
            options = alone(self.options, self.mesh)
            layout = self.layout if self._replicas is None else self._replicas.layout(self.layout)
            made = EvaluationPass(evaluated, self.engine, layout, options, means, self.cluster)
            found = self._evaluation = evaluated, ema, made
        return found[2].run(batches)

    def _means(self, what: str, ema: bool) -> Mapping[str, Variable]:
        """Variable -> what is read in its place: its running mean, or what replicas began from or have."""
        if self._replicas is None:
            return running_means(self.program, self.step_number, what) if ema else NO_MEANS
        refuse({REPLICAS: "diloco", MEANS: f"{what} on ema" if ema else ""})
        return {**self._replicas.shared, **self._replicas.own}

    def save(self, directory: str | Path, wait: bool = True) -> None:
        """Writes a checkpoint, which can be restored on any mesh and with any number of processes. If several
        processes train together, all must call this.

        Args:
          wait: False returns before the files are written; the next `save` then raises an error of this one.

        Raises:
          UserError: the checkpoint cannot be written, another job uses the directory, the variables are
            `torn`, or a variable contains NaN or infinite numbers.
        """
        check("save", directory=(directory, PATH))
        if self.torn:
            raise UserError(
                f"step {self.step_number + 1} was interrupted, so the variables may mix two steps and are "
                "not saved; restore a checkpoint first"
            )
        extra = {"layout": str(self.layout), "data": self.position, "mesh": str(self.mesh)}
        extra["processes"] = 1 if self.cluster is None else self.cluster.processes
        if self._replicas is not None:
            extra["diloco"] = str(self._replicas.diloco)
        check_position(self.position)
        self._saver.wait()  # then there is one snapshot at a time
        todo = partial(checkpoints.going_on, directory)
        pieces: Mapping[VariablePiece, Any] = FinitePieces(
            self.engine.snapshot(), self._finite, self.step_number, todo
        )
        if self._meetings is not None:
            kept, more = self._meetings.kept()
            pieces, extra = collections.ChainMap(kept, pieces), {**extra, **more}  # type: ignore[arg-type]
        self._saver.save(directory, self.step_number, pieces, extra)
        if wait:
            self._saver.wait()

    def restore(self, directory: str | Path, step: int | None = None) -> bool:
        """Restores the newest complete checkpoint; returns False if the directory has none. Checkpoints that
        are damaged or contain NaN or infinite numbers are skipped with a warning.

        Args:
          step: restores the checkpoint of this step instead. Later checkpoints are renamed to `step-….aside`,
            with a warning, and are ignored from then on.
        """
        check("restore", directory=(directory, PATH), step=(step, optional(at_least(0))))
        self._saver.wait()
        if step is None:
            found = checkpoints.newest(directory, self.cluster, self._finite)
        else:
            found = checkpoints.of_step(directory, step, self.cluster, self._finite)
        if found is None:
            return False
        said = [f"checkpoint {text}; {found.path.name} is used" for text in found.skipped]
        said += [f"checkpoint {text}" for text in found.aside]
        for text in said:
            warnings.warn(text, checkpoints.CheckpointWarning, stacklevel=2)
        every = self.program.variables
        # Unused ones, as a counter of dropout at rate 0, may not be saved. Replicas use all when they meet.
        used = self.program.used if self._replicas is None else every.keys()
        needed = {name: stored for name, stored in every.items() if name in found.variables or name in used}
        found.check_variables(stored.variable for stored in needed.values())
        if self._replicas is not None and "diloco" in found.extra:
            self._replicas.check_flight(str(directory), found.step, found.extra["diloco"])
        reading = contextlib.nullcontext() if self.cluster is None else self.cluster.doing("reading it", True)
        with reading:
            for name in needed:
                self.engine.fill(name, partial(found.part, name))
        self.step_number, self.position = found.step, found.extra.get("data")
        self._restored, self._meetings = found, None
        self.resumed = found.extra
        self.torn = False
        return True

    def load(
        self, weights: GivenWeights, names: Mapping[str, str | Source] | None = None, new: str = ""
    ) -> LoadedWeights:
        """Sets variables to weights of files and returns their names; see `weights`. Replicas that
        synchronise rarely all begin from them.

        Args:
          weights: arrays by name, a .npz or .safetensors file, several, or a directory of them or of
            checkpoints.
          names: variable -> the name of its weights, or their `mtf.Source` (a transpose; `{}` for the number
            of a layer); variables that are not named are looked for under their own names.
          new: regular expression; variables whose names contain a match may be missing in the weights, as an
            adapter's are, and keep their initial values.

        Raises:
          UserError: variables have no weights, or weights have other shapes or invalid numbers; the error
            names all of them, and no variable is set.
        """
        held, replicas = (stored.variable for stored in self.program.variables.values()), self._replicas
        variables = held if replicas is None else map(replicas.one, held)
        made, loaded = read_weights(variables, weights, names or {}, new, self.cluster)
        write = self.engine.write if replicas is None else replicas.write
        torn, self.torn = self.torn, True  # what ends it in between leaves weights of two models
        self._restored = self._meetings = None
        for name, array in made:
            write(name, array)
        self.torn = torn
        return loaded

    def save_weights(self, path: str | Path, ema: bool = False) -> None:
        """Writes the model's variables, without optimizer state, to a .npz or .safetensors file. With `ema`,
        the running means (`Optimizer.ema`) replace the trained variables, under the same names."""
        means, replicas = self._means("save_weights", ema), self._replicas
        if replicas is None:
            write_trained(path, self.program, means, self.engine)
            return
        ones = {name: replicas.one(v) for name, v in means.items()}
        write_trained(path, self.program, ones, self.engine, replicas.read)
