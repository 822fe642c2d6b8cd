"""Options that say what a search may choose: of `search`, and of `size`, which searches each candidate."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer


class Orders(StrEnum):
    """In which order a split over several axes may have them."""

    MESH = "mesh"
    ALL = "all"


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
    """What a search may choose, but for what names axes of its mesh: all other fields of
    `layoutopt.space.kind.Allowed`."""

    storage: Annotated[
        str,
        typer.Option(
            "--storage",
            metavar="STAGES",
            help="How variables may be stored (ZeRO; hybrid: zero3 inside a node), of these.",
        ),
    ] = "layout,zero1,zero2,zero3,hybrid"
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

    microbatches: Annotated[
        str,
        typer.Option("--microbatches", metavar="NUMBERS", help="Into how many parts the batch may be split."),
    ] = "1,2,4,8,16,32"
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload",
            metavar="KINDS",
            help="What may lie in host memory between its uses: optimizer, its state; weights, variables "
            "themselves; activations, what loops save to run again.",
            show_default=False,
        ),
    ] = None
    orders: Annotated[
        Orders,
        typer.Option(
            "--orders", help="A split over several axes: in the order of the mesh, or in every order."
        ),
    ] = Orders.MESH

    def asked(self) -> dict[str, Any]:
        """They as keywords of `layoutopt.search`."""
        return {
            "storage": _stages(self.storage),
            "recompute": [*RECOMPUTE[self.recompute], *(f"keep={words}" for words in listed(self.keep))],
            "context": None if self.context is None else listed(self.context),
            "elsewhere": listed(self.elsewhere),
            "pipeline": listed(self.pipeline),
            "schedule": listed(self.schedule),
            "collective_matmul": listed(self.collective_matmul),
            "microbatches": _numbers(self.microbatches),
            "offload": listed(self.offload),
            "orders": self.orders.value,
        }


USUAL = AllowedOptions()


def listed(text: str | None) -> list[str]:
    """The names of a list with commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def recompute_words(allowed: Collection[bool | str]) -> tuple[str, str | None]:
    """The values of `--recompute` and `--keep` that mean this."""
    own = [each for each in allowed if isinstance(each, str) and each.startswith("keep=")]
    rest = {each for each in allowed if each not in own}
    word = next((word for word, means in RECOMPUTE.items() if {*means} == rest), Recompute.AUTO)
    return word.value, ",".join(each.removeprefix("keep=") for each in own) or None


def _stages(text: str) -> list[str]:
    from layoutopt.space.kind import HYBRID
    from mesh_tf_core.lower.storage import read_stage

    parts = [part.strip() for part in text.split(",")]
    return [part if part == HYBRID else str(read_stage(part)) for part in parts]


def _numbers(text: str) -> list[int]:
    from mesh_tf_core.errors import UserError

    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", part) for part in parts):
        raise UserError(
            f"--microbatches {text!r} is not a list of numbers; write for example --microbatches 1,2,4"
        )
    return [int(part) for part in parts]
