"""The options `--tokens` and `--price`: days and cost of training with a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli.units import parse_count

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.plan.schema import Predicted
    from layoutopt.plan.training import TrainingForecast

TokensOption = Annotated[
    str | None,
    typer.Option(
        metavar="T",
        help="Also report the days of training on this many tokens, e.g. 300B, and the cost if --price is "
        "given.",
    ),
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]P",
        help="Price per chip-hour, e.g. 4.2, or that of one --hardware, e.g. tpu-v5p=4.2 (repeatable).",
    ),
]


def read_tokens(text: str | None) -> float | None:
    """The number of `--tokens`."""
    return None if text is None else parse_count(text, "--tokens", "300B")


def read_prices(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Hardware -> price of a chip-hour, of `4.2` for all of it, or `tpu-v5p=4.2` for one."""
    from mesh_tf_core.errors import UserError, known_names

    found: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        if equals and name not in names:
            raise UserError(
                f"--price {text}: {name!r} is not the hardware of this command; {known_names(name, names)}"
            )
        value = parse_count(number, "--price", f"{name or names[0]}=4.2")
        found.update(dict.fromkeys([name] if equals else names, value))
    return found


def training_cost(
    predicted: Predicted, machine: Hardware, devices: int, tokens: float | None, price: float | None
) -> TrainingForecast | None:
    """The time and cost of training; None where neither tokens nor a price are given."""
    from layoutopt.plan.training import check_tokens, training

    if tokens is None and price is None:
        return None
    check_tokens(tokens, predicted.tokens_per_second)
    return training(predicted.tokens_per_second, machine.chips(devices), tokens, price)
