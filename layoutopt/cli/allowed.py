"""Options that say what a search may choose: of `search`, and of `size`, which searches each candidate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer


class Recompute(StrEnum):
    """Whether loops are recomputed in backward instead of saving what they computed."""

    AUTO = "auto"
    SELECTIVE = "selective"
    ALWAYS = "always"
    NEVER = "never"


RECOMPUTE: dict[Recompute, tuple[bool | str, ...]] = {
    Recompute.AUTO: (False, True),
    Recompute.SELECTIVE: (False, "selective", True),
    Recompute.ALWAYS: (True,),
    Recompute.NEVER: (False,),
}


MaxAxesOption = Annotated[
    int, typer.Option("--max-axes", metavar="K", help="With --devices: at most so many axes of a mesh.")
]


@dataclass(frozen=True)
class AllowedOptions:
    """What a search may choose, beside what is only asked of `search`."""

    recompute: Annotated[
        Recompute,
        typer.Option(
            "--recompute",
            help="Whether blocks are recomputed in backward (activation checkpointing); selective: or but "
            "for some of their values.",
        ),
    ] = Recompute.AUTO
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep",
            metavar="SETS",
            help="Sets of values that blocks which are recomputed may keep, of your own: wi+attention,q+k+v.",
            show_default=False,
        ),
    ] = None
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="FORMS",
            help="How attention to split keys may be done, of gather, ring, zigzag, all_to_all: all for the "
            "least time, else gather.",
            show_default=False,
        ),
    ] = None
    elsewhere: Annotated[
        str | None,
        typer.Option(
            "--elsewhere",
            metavar="DIMS",
            help="May be split further where axes split nothing else: length is sequence parallelism.",
            show_default=False,
        ),
    ] = None
    pipeline: Annotated[
        str | None,
        typer.Option(
            "--pipeline",
            metavar="DIMS",
            help="Layers that axes may split into stages, which the microbatches go through: layers.",
            show_default=False,
        ),
    ] = None
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule",
            metavar="NAMES",
            help="When stages may go backward: gpipe, after all microbatches; 1f1b, each at once; "
            "circular:2 and interleaved:2, as gpipe and 1f1b, with microbatches that go round twice, or more "
            "often; of these.",
        ),
    ] = "gpipe"

    collective_matmul: Annotated[
        str | None,
        typer.Option(
            "--collective-matmul",
            metavar="DIMS",
            help="Products with one of these dimensions may gather and scatter in chunks beside their work "
            "(with --elsewhere length): d_ff,heads.",
            show_default=False,
        ),
    ] = None

    def asked(self) -> dict[str, Any]:
        """They as keywords of `layoutopt.search`."""
        return {
            "recompute": [*RECOMPUTE[self.recompute], *(f"keep={words}" for words in listed(self.keep))],
            "context": None if self.context is None else listed(self.context),
            "elsewhere": listed(self.elsewhere),
            "pipeline": listed(self.pipeline),
            "schedule": listed(self.schedule),
            "collective_matmul": listed(self.collective_matmul),
        }


USUAL = AllowedOptions()


def listed(text: str | None) -> list[str]:
    """The names of a list with commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]
