"""Options that say what a search may choose: of `search`, and of `size`, which searches each candidate."""

from __future__ import annotations

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
RecomputeOption = Annotated[
    Recompute,
    typer.Option(
        "--recompute",
        help="Whether blocks are recomputed in backward (activation checkpointing); selective: or but "
        "for some of their values.",
    ),
]
ContextOption = Annotated[
    str,
    typer.Option(
        "--context",
        metavar="FORMS",
        help="How attention to split keys may be done: gather, ring, zigzag, all_to_all, of these.",
    ),
]
ElsewhereOption = Annotated[
    str | None,
    typer.Option(
        "--elsewhere",
        metavar="DIMS",
        help="May be split further where axes split nothing else: length is sequence parallelism.",
        show_default=False,
    ),
]
PipelineOption = Annotated[
    str | None,
    typer.Option(
        "--pipeline",
        metavar="DIMS",
        help="Layers that axes may split into stages, which the microbatches go through: layers.",
        show_default=False,
    ),
]


def read_allowed(
    recompute: Recompute, context: str, elsewhere: str | None, pipeline: str | None
) -> dict[str, Any]:
    """They as keywords of `layoutopt.search`."""
    return {
        "recompute": list(RECOMPUTE[recompute]),
        "context": _names(context),
        "elsewhere": _names(elsewhere),
        "pipeline": _names(pipeline),
    }


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
