"""Shell completion of names that depend on the words typed so far."""

from __future__ import annotations

import contextlib
import io

import typer


def complete_setting(context: typer.Context, incomplete: str) -> list[str]:
    """Hyperparameters of the MODEL on the command line as `name=`, the values of those that are on or off;
    nothing where there is no model, or none that can be read."""
    name, equals, value = incomplete.partition("=")
    source = context.params.get("model")
    if not source:
        return []
    # What a model file prints, or is wrong with it, has no place on a line that is being typed.
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        from layoutopt.models.loading import hyperparameters

        known = hyperparameters(source)
        if not equals:
            return [f"{each}=" for each in known if each.startswith(name)]
        if name in known and known[name].kind == "bool":
            return [f"{name}={each}" for each in ("true", "false") if each.startswith(value)]
    return []
