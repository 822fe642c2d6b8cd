"""What `measure` and `train` share: devices of this machine, batches, and the numbers of real steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layoutopt.cli.terminal import Terminal

if TYPE_CHECKING:
    from layoutopt.cli.options import Given
    from layoutopt.loading import Loaded
    from mesh_tf_core import Model
    from mesh_tf_core.trainer import Trainer


def open_trainer(terminal: Terminal, loaded: Loaded, given: Given) -> Trainer:
    """The model on this machine's mesh, its variables at their initial values."""
    start_devices(terminal, given.mesh.devices)
    from mesh_tf_core.trainer import Trainer

    return Trainer(loaded.model, given.mesh, given.layout, given.options)


def start_devices(terminal: Terminal, count: int) -> None:
    """Makes this process's devices, before TensorFlow is used for anything else."""
    terminal.say(f"starting {count} devices")
    with hushed():
        from mesh_tf_core.engines import prepare

        prepare(count)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Keeps what TensorFlow's libraries write to stderr while they start; shows it if starting fails."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except ImportError:
            kept.seek(0)
            os.write(saved, kept.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@dataclass(frozen=True)
class Timed:
    """Steps from the initial values on, and the seconds of each."""

    seconds: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)


def timed_steps(
    trainer: Trainer,
    fed: Sequence[Mapping[str, Any]],
    warm_up: int,
    on_step: Callable[[int, float | None], None] = lambda done, seconds: None,
) -> Timed:
    """Times one step per batch; the data is ready before the clock starts.

    Args:
      warm_up: steps before, not timed and forgotten: the first one compiles.
      on_step: hears the number of steps done and the seconds of a timed one.
    """
    seconds, losses = [], []
    for n in range(warm_up):
        trainer.step(fed[n % len(fed)])
        on_step(n + 1, None)
    trainer.engine.initialize()
    for n, batch in enumerate(fed):
        began = time.perf_counter()
        losses.append(float(trainer.step(batch)["loss"]))
        seconds.append(time.perf_counter() - began)
        on_step(warm_up + n + 1, seconds[-1])
    return Timed(tuple(seconds), tuple(losses))


def held_out_results(loaded: Loaded, trainer: Trainer, count: int) -> dict[str, float]:
    """Means of the model's results over `count` batches that it was not trained on, without dropout.

    Only the forward part is built and run, under the layout of the training, on the trained values.
    """
    from layoutopt.loading import load_model
    from mesh_tf_core import lower
    from mesh_tf_core.engines import open_engine

    still = {"dropout": type(loaded.hparams["dropout"])(0)} if "dropout" in loaded.hparams else {}
    model = load_model(loaded.source, {**loaded.hparams, **still}).model
    engine = open_engine(
        lower(model.graph, trainer.mesh, trainer.layout, {"loss": model.loss, **model.metrics})
    )
    for name in model.graph.variables:
        engine.write(name, trainer.engine.read(name))
    totals: dict[str, float] = {}
    for batch in itertools.islice(loaded.data("held-out"), count):
        for name, value in engine.step(batch).items():
            totals[name] = totals.get(name, 0.0) + float(value.mean()) / count
    engine.close()
    return totals


def batches(terminal: Terminal, loaded: Loaded) -> Iterator[dict[str, Any]]:
    """The file's data, or zeros of the right shapes: enough to time a step."""
    if loaded.function("data") is not None:
        return loaded.data()
    terminal.say(f"{loaded.source} has no data(): the steps run on zeros")
    return _zeros(loaded.model)


def _zeros(model: Model) -> Iterator[dict[str, Any]]:
    import numpy as np

    from mesh_tf_core.kernels.numpy_kernel import np_dtype

    inputs = model.graph.inputs
    while True:
        yield {name: np.zeros(t.shape.sizes, np_dtype(t.dtype)) for name, t in inputs.items()}


def items_of(model: Model) -> tuple[int, str]:
    """How many things a step learns from, and what they are: tokens of texts, or else examples."""
    sizes = [t.shape for t in model.graph.inputs.values() if t.dtype.startswith("int") and len(t.shape) > 1]
    if sizes:
        return max(shape.size for shape in sizes), "tokens"
    firsts = [t.shape.sizes[0] for t in model.graph.inputs.values() if len(t.shape)]
    return max(firsts, default=1), "examples"
