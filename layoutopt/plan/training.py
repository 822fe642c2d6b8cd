"""The time, chip-hours and money of training with a plan."""

from __future__ import annotations

from layoutopt.plan.fields import Amount, Data
from layoutopt.plan.units import count, duration_text, rounded
from mesh_tf_core.errors import UserError

HOUR = 3600.0


class TrainingForecast(Data):
    """Training on a number of tokens, or an hour of it where none is given.

    Attributes:
      tokens: number of tokens.
      seconds, chip_hours: by the predicted step alone, without starts and failures.
      price: of a chip-hour; money: total cost, in its unit.
    """

    tokens: Amount | None = None
    seconds: Amount
    chip_hours: Amount
    price: Amount | None = None
    money: Amount | None = None

    @property
    def words(self) -> str:
        """'300 B tokens take 18 h 45 min: 1,203 chip-hours, 5,053 at 4.2 each'."""
        hours = f"{self.chip_hours:,.0f}" if self.chip_hours >= 10 else f"{self.chip_hours:.3g}"
        takes = "an hour"
        if self.tokens:
            takes = f"{rounded(count(self.tokens))} tokens take {lasts(self.seconds)}"
        found = f"{takes}: {hours} chip-hours"
        if self.money is None:
            return found
        return f"{found}, {money_text(self.money)} at {self.price:g} each"


def lasts(seconds: float) -> str:
    """The duration of training: '12.5 days', '18 h 45 min'."""
    days = seconds / 24 / HOUR
    return f"{days:,.1f} days" if days >= 2 else duration_text(seconds)


def money_text(money: float) -> str:
    """Money in whatever it is counted: '5,053', '4.173'."""
    return f"{money:,.0f}" if money >= 1000 else f"{money:.4g}"


def check_tokens(tokens: float | None, own: float | None) -> None:
    """UserError for tokens if the model does not name the dimensions of its `own` tokens."""
    if tokens is not None and not own:
        raise UserError(
            "--tokens: the model does not define its tokens; name the dimensions that count tokens, "
            'e.g. Model(..., token_dims=("batch", "length"))'
        )


def training(rate: float | None, chips: float, tokens: float | None, price: float | None) -> TrainingForecast:
    """The training at a rate of tokens a second; an hour of it without `tokens`."""
    seconds = HOUR
    if tokens is not None:
        assert rate
        seconds = tokens / rate
    hours = chips * seconds / HOUR
    money = None if price is None else hours * price
    return TrainingForecast(tokens=tokens, seconds=seconds, chip_hours=hours, price=price, money=money)
