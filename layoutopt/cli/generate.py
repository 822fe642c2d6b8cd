"""`layoutopt generate`: texts from a checkpoint, under any layout.

The model file defines three functions: `generate(**hparams)` builds the decoding model, `encode(text)`
returns the token ids of each input for a prompt, and `decode(tokens)` returns the text of generated ids.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli import options
from layoutopt.cli.given import GivenOptions, LayoutByHand
from layoutopt.cli.grouped import grouped
from layoutopt.cli.job import ALONE, Job
from layoutopt.cli.plans import is_plan
from layoutopt.cli.running import Session, restored
from layoutopt.cli.terminal import Terminal
from layoutopt.plan.units import seconds_text

if TYPE_CHECKING:
    import numpy as np

    from layoutopt.models.loading import Loaded
    from layoutopt.plan.results import Continuation, Continued

ONE_DEVICE = "device:1"


@grouped
def generate(
    model: options.ModelArgument,
    checkpoint: Annotated[
        Path, options.checkpoint_option("Checkpoint folder, written by `train --checkpoint`.")
    ],
    prompt: Annotated[list[str], typer.Option(metavar="TEXT", help="Text to continue (repeatable).")],
    mesh: options.MeshOption = None,
    layout: options.LayoutOption = None,
    settings: options.SetOption = None,
    seed: Annotated[
        int, typer.Option(min=-(2**31), max=2**31 - 1, help="Random seed, for models that sample.")
    ] = 0,
    job: Job = ALONE,
    output: options.Output = options.OUTPUT,
) -> None:
    """Continue prompts with a trained model, under any layout."""
    from layoutopt.plan.build import axes_of, model_info
    from layoutopt.plan.results import Continued, GenerateResult

    mesh = mesh if mesh or is_plan(layout) else ONE_DEVICE
    with job.open(output) as session:
        terminal = session.terminal
        loaded, given = _loaded(session, model, settings or [], len(prompt), mesh, layout)
        feeds, begun = _feeds(loaded, prompt, seed)
        _check_checkpoint(checkpoint)
        trainer = session.trainer(loaded, given)
        restored(terminal, trainer, checkpoint)
        step = trainer.step_number
        began = time.perf_counter()
        with terminal.waiting("compiling and generating", said=True):
            found = trainer.step(feeds)
        seconds = time.perf_counter() - began
        texts = [
            Continued(prompt=text, continuations=_continuations(loaded, found, row, begun[row]))
            for row, text in enumerate(prompt)
        ]
        terminal.result(
            GenerateResult(
                model=model_info(loaded.model),
                mesh=given.mesh.as_dict(),
                layout=axes_of(given.layout),
                step=step,
                seconds=seconds,
                texts=texts,
            )
        )
        terminal.say(
            f"step {step} of {checkpoint}, {seconds_text(seconds)} including compilation; scores are "
            "log probabilities of the text after the prompt (with beams, divided by a length penalty)"
        )
        _show(terminal, texts)


def _loaded(
    session: Session, source: str, settings: Sequence[str], rows: int, mesh: str | None, layout: str | None
) -> tuple[Loaded, GivenOptions]:
    """The decoding model, with a batch of as many texts as there are prompts (and the layout can split)."""
    from layoutopt.models.loading import load_model

    source = source if ":" in Path(source).name else f"{source}:generate"
    loaded = session.load(source, settings, mesh, layout)
    given = LayoutByHand(mesh, layout).read(loaded, session.plan)
    if "batch" not in loaded.hparams or any(s.partition("=")[0].strip() == "batch" for s in settings):
        return loaded, given
    ways = given.mesh.group_size(given.layout.axes("batch"))
    return load_model(source, {**loaded.hparams, "batch": -(-rows // ways) * ways}), given


def _feeds(loaded: Loaded, prompts: Sequence[str], seed: int) -> tuple[dict[str, np.ndarray], list[int]]:
    """What the model is fed, and how many tokens each text begins with."""
    import numpy as np

    inputs = loaded.model.graph.inputs
    encoded = [loaded.call("encode", text=text) for text in prompts]
    _check_names(loaded, encoded[0])
    feeds: dict[str, np.ndarray] = {"seed": np.array(seed, np.int32)}
    begun = [1] * len(prompts)
    for name in encoded[0]:
        rows, room = inputs[name].shape.sizes
        if len(prompts) > rows:
            from mesh_tf_core import UserError

            raise UserError(f"{len(prompts)} prompts do not fit into a batch of {rows}; remove --set batch")
        feeds[name] = np.zeros((rows, room), np.int32)
        for i in range(rows):
            # Places of the batch that no prompt has repeat the last one.
            ids = encoded[min(i, len(prompts) - 1)][name]
            _check_room(prompts[min(i, len(prompts) - 1)], len(ids), room - (name == "prompts"))
            feeds[name][i, : len(ids)] = ids
    if "lengths" in inputs:
        begun = [len(e["prompts"]) for e in encoded]
        rows = inputs["lengths"].shape.sizes[0]
        feeds["lengths"] = np.array([begun[min(i, len(begun) - 1)] for i in range(rows)], np.int32)
    return feeds, begun


def _check_names(loaded: Loaded, encoded: Mapping[str, Any]) -> None:
    from mesh_tf_core import UserError
    from mesh_tf_core.errors import known_names

    inputs = loaded.model.graph.inputs
    for name in encoded:
        if name not in inputs or len(inputs[name].shape) != 2:
            raise UserError(
                f"{loaded.source}: encode() returns {name!r}, which is not an input of shape [batch, "
                f"length]; {known_names(name, inputs)}"
            )
    for name in inputs:
        if name not in (*encoded, "lengths", "seed"):
            raise UserError(
                f"{loaded.source}: encode() does not return the model's input {name!r}; "
                f"{known_names(name, encoded)}"
            )


def _check_room(prompt: str, tokens: int, room: int) -> None:
    from mesh_tf_core import UserError

    if not 1 <= tokens <= room:
        raise UserError(
            f"--prompt {prompt[:40]!r} has {tokens} tokens, but the model takes 1 to {room}; change "
            "the prompt, or set the length that the model was trained with (--set length=…)"
        )


def _check_checkpoint(checkpoint: Path) -> None:
    """Refuses a place without any, before an engine starts for it."""
    from mesh_tf_core import UserError
    from mesh_tf_core.training.checkpoint import listed

    if not listed(checkpoint):
        raise UserError(
            f"--checkpoint {str(checkpoint)!r}: this folder has no checkpoint; make one with "
            "`layoutopt train --checkpoint`"
        )


def _continuations(loaded: Loaded, found: Mapping[str, Any], row: int, begun: int) -> list[Continuation]:
    """The texts of one prompt, best first: one, or those of the beams."""
    import numpy as np

    from layoutopt.plan.results import Continuation

    length = found["tokens"].shape[-1]
    tokens = found["tokens"][row].reshape(-1, length)
    scores = np.reshape(found["scores"][row], -1)
    return [
        Continuation(
            text=loaded.call("decode", tokens=ids[begun:].tolist()), score=float(score), tokens=ids.tolist()
        )
        for ids, score in zip(tokens, scores, strict=True)
    ]


def _show(terminal: Terminal, texts: Sequence[Continued]) -> None:
    for text in texts:
        for found in text.continuations:
            terminal.show(f"── {text.prompt!r}, score {found.score:.3f}", found.text)
