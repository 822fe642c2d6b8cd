"""Activation checkpointing: whether loops over a dimension are recomputed in backward instead of saving the
values of their bodies, and which values they keep (`mesh_tf_core.lower.remat_policy`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Option, Space, argument, names
from layoutopt.space.kind import (
    ALWAYS,
    NEVER,
    OFFLOADING,
    Affects,
    Beyond,
    Choice,
    Chosen,
    Decision,
    Feature,
    LeftOut,
    PlanField,
    Target,
    Typed,
    Words,
    missing,
)
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import TICK, loop_name
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.options import ACTIVATIONS
from mesh_tf_core.lower.recomputed import keep_sets
from mesh_tf_core.lower.remat_policy import SETS, Recomputed, Sets, policies
from mesh_tf_core.lower.rematerialization import check_recompute, recomputable
from mesh_tf_core.tracing.graph import Graph

ON: Choice = ("on",)
SELECTIVE = "selective"
"""Every set of kinds that a search may keep (`remat_policy.SETS`)."""
SOME = "some"
"""A quarter, a half and three quarters of the iterations."""
KEEP, COUNT = "keep=", "count="
"""Prefixes of an allowed keep set of the user's own, "keep=attention+wi", and of a number of iterations."""
NESTED = "nested"
"""Layers that are recomputed within recomputed stages (`TICK`): no framework has a setting for it."""
HOST = "host"
"""The last word of a choice: kept values are stored on the hosts (`mesh_tf_core.lower.options`)."""
RunsAgain = frozenset[tuple[str, Choice]]
"""Loops that run again: the name of the decision about them, and its option."""

WORDS: Mapping[str, tuple[bool | str, ...]] = {
    "auto": (False, True),
    "selective": (False, SELECTIVE, True),
    "some": (False, SOME, True),
    "every": (False, SELECTIVE, SOME, True),
    ALWAYS: (True,),
    NEVER: (False,),
    "always-selective": (SELECTIVE, True),
    "never-whole": (False, SELECTIVE),
    "only-selective": (SELECTIVE,),
    "only-some": (SOME,),
}
"""The values of `--recompute` as text, and the options that each allows."""
SHOWN = tuple(WORDS)[:6]
"""Those that help names."""


def _again(value: Any) -> tuple[bool | str, ...]:
    if isinstance(value, str):
        words = [word.strip() for word in value.split(",") if word.strip()]
        for word in words:
            if word not in WORDS and not word.startswith((KEEP, COUNT)):
                keep = Recomputed.parse(word).keep
                own = f"; to allow a set of kept values, write --keep {'+'.join(keep)}" * bool(keep)
                raise UserError(f"--recompute {word!r}: {known_names(word, SHOWN)}{own}")
        value = [each for word in words for each in WORDS.get(word, (word,))]
    return tuple(each if isinstance(each, str) else bool(each) for each in names(value, "recompute"))


def _again_text(value: Sequence[bool | str]) -> str | None:
    own = [str(each) for each in value if str(each).startswith((KEEP, COUNT))]
    rest = {each for each in value if each not in own}
    word = next((word for word, means in WORDS.items() if {*means} == rest), None)
    return ",".join([*([word] if word else []), *own]) or None


def _again_within(value: Sequence[bool | str], said: Sequence[bool | str]) -> tuple[bool | str, ...]:
    """What is allowed, of what software says: of "selective" every set that it has, of "some" any number;
    beside others, in place of never the set that keeps most, its last one, where it always recomputes."""
    own = [SELECTIVE] if SELECTIVE in said else [each for each in said if str(each).startswith(KEEP)]
    means = {SELECTIVE: own} | ({False: own[-1:]} if len(value) > 1 and False not in said else {})
    every = dict.fromkeys(each for one in value for each in means.get(one, [one]))
    kinds = {COUNT: SOME, KEEP: SELECTIVE}
    return tuple(one for one in every if one in said or kinds.get(f"{one}".split("=")[0] + "=") in said)


@dataclass(frozen=True)
class Recompute(Decision):
    """The loops over one dimension: () saves, ("on",) recomputes, ("on", "products") recomputes all but kept
    values, ("on", "products", "host") and stores these on the hosts, ("on", "count=8") recomputes the first
    eight iterations.

    Attributes:
      kept: values that some option keeps, also if only a part of the options remains.
    """

    kept: Sets = ()
    granular = "recompute"
    beside = True
    prefix = "recompute "
    label = "recomputation"
    asks: ClassVar[Mapping[str, Any]] = {
        "recompute": argument(
            (False, True),
            Option(
                "--recompute",
                f"[{'|'.join(SHOWN)}]",
                "Activation checkpointing to consider: never, always, auto (the search chooses), selective "
                "(it may also keep some values of a block and recompute the rest), some (or recompute some "
                "layers only; count=N: so many) or every.",
                usual="auto",
            ),
            Option(
                "--keep",
                "SETS",
                "Sets of values that recomputed blocks may keep, e.g. wi+attention,q+k+v (comma-separated).",
                prefix=KEEP,
            ),
            parse=_again,
            plan=tuple[bool | str, ...],
            text=_again_text,
            within=_again_within,
        ),
    }
    says = PlanField("recompute", list[str], list, lambda again: sorted(map(str, again)), policies)
    always = True
    by_hand = Option(
        "--recompute",
        "DIM[:keep=KIND+...][:count=N]",
        "Loops to recompute in the backward pass: always, never, or DIM for the loop over this dimension. "
        "keep= lists values to save instead: products, outputs, attention, others (all other values), or "
        "names of weights and scopes; count= recomputes the first N layers (repeatable).",
        usual="never; for a JAX model, as its program does",
        several=True,
    )
    word = "recompute"
    place = 2
    features = (
        Feature("recompute", "recompute", bool),
        Feature(
            "selective",
            "recompute",
            lambda again: again == SELECTIVE or str(again).startswith(KEEP),
            lambda _, options: any(each.keep for each in options.recompute),
        ),
        Feature(
            "some_layers",
            "recompute",
            lambda again: again == SOME or str(again).startswith(COUNT),
            lambda _, options: any(each.only for each in options.recompute),
        ),
    )

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        if not recomputable(target.model.step_graph):
            return {"recompute": (), "offload": ()}
        return {"recompute": (False, SELECTIVE, SOME, True), "offload": (ACTIVATIONS,) * target.hosts}

    @classmethod
    def useless(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        if any(chosen.get("recompute", (True,))):
            return {}
        return {"offload": tuple(each for each in chosen.get("offload", ()) if each != ACTIVATIONS)}

    @classmethod
    def left_out(cls, target: Target, allowed: Space) -> Iterator[LeftOut]:
        every = cls.everything(target)
        words = {False: "never", True: "always"}
        for left in missing(cls.label, "recompute", allowed.recompute, every["recompute"]):
            less = [words.get(value, value) for value in every["recompute"] if value not in allowed.recompute]
            what = f"{cls.label}: {', '.join(map(str, less))}" if left.finer else cls.label
            yield LeftOut(cls.label, what, "--recompute every", left.finer)
        for left in missing(OFFLOADING, "offload", allowed.offload, every["offload"]):
            yield replace(left, what=f"{OFFLOADING} of saved activations", finer=bool(allowed.offload))
        if every["recompute"]:
            yield LeftOut(cls.label, f"{cls.label} with your own sets", "--keep SETS", finer=True)
            yield LeftOut(cls.label, f"{cls.label} of other numbers of layers", "--recompute count=N", True)

    @classmethod
    def check(cls, allowed: Space) -> None:
        if not allowed.recompute:
            raise UserError("recompute is empty; write False, True or both")
        for one in allowed.recompute:
            its = Recomputed.parse(f"loops:{one}") if str(one).startswith((KEEP, COUNT)) else None
            known = not (its.keep and its.only) if its else isinstance(one, bool) or one in (SELECTIVE, SOME)
            if not known:
                raise UserError(
                    f"recompute {one!r}: write False, True, {SELECTIVE!r}, {SOME!r}, a set such as "
                    "'keep=attention+wi' or a number of layers such as 'count=8', not both in one"
                )

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        plain = [() for again in allowed.recompute if again is False]
        whole = [ON for again in allowed.recompute if again is True]
        for asked in sorted(allowed.again):
            yield cls(asked.dim, (choice_of(asked, False)[1],))
        once = TICK in {each.dim for each in allowed.again} and not allowed.restriction.expresses(
            "recompute", NESTED
        )
        for dim in () if once else recomputable(graph):
            kept = keep_sets(graph, dim, kept_sets(allowed.recompute))
            some = [(*ON, *keep) for keep in kept]
            there = [(*each, HOST) for each in (*some, *whole)] if ACTIVATIONS in allowed.offload else []
            size = min(b.dim.size for b in graph.blocks if loop_name(b, graph) == dim)
            some_layers = [(n, Recomputed(dim, (), n)) for n in counts(size, allowed.recompute)]
            parts = [(*ON, f"{COUNT}{n}") for n, policy in some_layers if not _refused(graph, policy)]
            yield cls(dim, (*plain, *some, *parts, *there, *whole) or (ON,), kept)

    def apply(self, choice: Choice, to: Chosen) -> None:
        if choice:
            hosted, count = choice[-1] == HOST, [each for each in choice if each.startswith(COUNT)]
            keep = tuple(each for each in choice[1:] if each not in (HOST, *count))
            policy = Recomputed(self.subject, keep, *(int(each[len(COUNT) :]) for each in count))
            to.options["recompute"] = to.options.get("recompute", frozenset()) | {policy}
            there = {(ACTIVATIONS, self.subject)} if hosted else set()
            to.options["offload"] = to.options.get("offload", frozenset()) | there

    def read(self, layout: Layout, options: Options) -> Choice:
        return next((choice for name, choice in again_in(options) if name == self.name), ())

    @classmethod
    def changing(cls, touched: Affects) -> list[str]:
        return [recompute_name(dim) for dim in touched.recomputed]

    @classmethod
    def typed(cls, texts: Sequence[str], about: Typed) -> dict[str, Any]:
        return {"recompute": about.recomputed}

    @classmethod
    def in_words(cls, said: Any) -> Words:
        return ", ".join(said.recompute), "; ".join(f"recompute {dim}" for dim in said.recompute)

    @classmethod
    def beyond(cls, said: Any) -> Iterator[Beyond]:
        if TICK in said.recompute and said.recompute[1:]:
            words = f"layers are recomputed within recomputed stages ({', '.join(said.recompute)})"
            yield Beyond("recompute", NESTED, words, f"recompute {TICK} alone")
        for text in said.recompute:
            keep, count = Recomputed.parse(text)[1:]
            if text == TICK:
                words = f"whole stages are recomputed from their inputs ({TICK})"
                yield Beyond("recompute", TICK, words, "recompute layers instead")
                continue
            if count:
                words = f"only {count} of the layers are recomputed ({text})"
                yield Beyond("recompute", SOME, words, "search without --recompute some or every")
            if keep:
                value, words = KEEP + "+".join(keep), f"some values of a recomputed block are kept ({text})"
                yield Beyond("recompute", value, words, "search without --recompute selective and --keep")
            if not keep and not count:
                words = f"the loop over {text} is recomputed"
                yield Beyond("recompute", True, words, "search with --recompute never")


def kept_sets(allowed: Iterable[bool | str]) -> Sets:
    """The allowed keep sets (remat policies) of recomputed loops."""
    found: list[tuple[str, ...]] = []
    for one in allowed:
        if one == SELECTIVE or str(one).startswith(KEEP):
            found += SETS if one == SELECTIVE else [Recomputed.parse(f"loops:{one}").keep]
    return tuple(dict.fromkeys(found))


def counts(size: int, allowed: Iterable[bool | str]) -> list[int]:
    """The allowed numbers of iterations, of so many, that may be recomputed alone."""
    found = set[int]()
    for one in map(str, allowed):
        found |= {round(size * q / 4) for q in (1, 2, 3)} if one == SOME else set()
        found |= {Recomputed.parse(f"loops:{one}").only} if one.startswith(COUNT) else set()
    return [n for n in sorted(found) if 0 < n < size]


def check_named(graph: Graph, allowed: Iterable[bool | str]) -> None:
    """UserError for a set that no loop has all of.

    Args:
      graph: a model's own step, with the loops that users know; stages replace them.
    """
    loops = recomputable(graph)
    for one in (a for a in allowed if isinstance(a, str) and a not in (SELECTIVE, SOME)):
        refused = [error for dim in loops if (error := _refused(graph, Recomputed.parse(f"{dim}:{one}")))]
        if refused and len(refused) == len(loops):
            raise refused[0]


def _refused(graph: Graph, policy: Recomputed) -> UserError | None:
    try:
        check_recompute(graph, frozenset({policy}))
    except UserError as error:
        return error
    return None


def choice_of(policy: Recomputed, hosted: bool) -> tuple[str, Choice]:
    """The decision about some loops, and its option; `hosted`: their kept values are stored on the hosts."""
    count = [f"{COUNT}{policy.only}"] if policy.only else []
    return recompute_name(policy.dim), (*ON, *count, *policy.keep, *([HOST] if hosted else []))


def again_in(options: Options) -> RunsAgain:
    """The recomputed loops, their kept values, and whether these are on the hosts."""
    there = {name for kind, name in options.offload if kind == ACTIVATIONS}
    return frozenset(choice_of(policy, policy.dim in there) for policy in options.recompute)


def options_of(again: RunsAgain) -> dict[str, Any]:
    """The fields of `Options` for recomputed loops."""
    found = Chosen()
    for name, choice in again:
        Recompute(name.removeprefix(Recompute.prefix), (choice,)).apply(choice, found)
    return found.options


def recompute_name(dim: str) -> str:
    """Name of the decision about the loops over a dimension."""
    return Recompute.prefix + dim
