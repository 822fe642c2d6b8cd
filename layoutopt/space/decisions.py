"""What is decided for a model on a mesh: splits of dimensions, storage of variables, recomputation of blocks.

Every decision has a name and a finite list of options, each a tuple of words; `()` is the plain one:
  a dimension's name      the mesh axes that it is split over
  "storage of <class>"    (), ("zero1",), ("zero2",), ("zero3",): see `mesh_tf_core.lower.storage`
  "recompute <dim>"       (), ("on",): the loop over <dim> runs its body again in backward
Variables of the same dimensions are one storage class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.rematerialization import recomputable
from mesh_tf_core.lower.storage import STAGES, stage_number
from mesh_tf_core.tracing.graph import Graph

Choice = tuple[str, ...]
STORAGE, RECOMPUTE = "storage of ", "recompute "


def storage_class(variable: Variable) -> str:
    """Name of the decision about a variable's storage."""
    return STORAGE + " ".join(variable.shape.names)


def recompute_name(dim: str) -> str:
    """Name of the decision about the loops over a dimension."""
    return RECOMPUTE + dim


def stored_classes(graph: Graph) -> dict[str, list[Variable]]:
    """Storage class -> its trained variables; scalars have none."""
    out: dict[str, list[Variable]] = {}
    for v in graph.variables.values():
        if v.trainable and len(v.shape):
            out.setdefault(storage_class(v), []).append(v)
    return out


@dataclass(frozen=True)
class Decisions:
    """All decisions of one search.

    Attributes:
      options: name -> what may be chosen, the plain option first.
      classes: storage class -> names of its variables.
    """

    options: Mapping[str, tuple[Choice, ...]]
    classes: Mapping[str, tuple[str, ...]]
    microbatches: int = 1

    @cached_property
    def fixed(self) -> dict[str, Choice]:
        """Decisions with one option that is not the plain one."""
        return {n: o[0] for n, o in self.options.items() if len(o) == 1 and o[0]}

    @property
    def free(self) -> tuple[str, ...]:
        """Decisions with more than one option."""
        return tuple(n for n, o in self.options.items() if len(o) > 1)

    def read(self, chosen: Mapping[str, Choice]) -> tuple[Layout, Options]:
        """The layout and options that some choices mean; what is not chosen has its only or its plain
        option."""
        rules: dict[str, Choice] = {}
        storage: dict[str, int] = {}
        again: list[str] = []
        for name, choice in {**self.fixed, **chosen}.items():
            if not choice:
                continue
            if name.startswith(STORAGE):
                storage.update(dict.fromkeys(self.classes[name], stage_number(choice[0])))
            elif name.startswith(RECOMPUTE):
                again.append(name.removeprefix(RECOMPUTE))
            else:
                rules[name] = choice
        return Layout(rules), Options(storage, frozenset(again), self.microbatches)

    def write(self, layout: Layout, options: Options) -> dict[str, Choice]:
        """The choices that mean a layout and options."""
        out: dict[str, Choice] = {}
        for name in self.options:
            if name.startswith(STORAGE):
                stages = {options.storage.get(v, 0) for v in self.classes[name]}
                out[name] = (STAGES[stages.pop()],) if len(stages) == 1 and stages != {0} else ()
            elif name.startswith(RECOMPUTE):
                out[name] = ("on",) if name.removeprefix(RECOMPUTE) in options.recompute else ()
            else:
                out[name] = layout.axes(name)
        return out


def decisions(
    graph: Graph,
    splits: Mapping[str, tuple[Axes, ...]],
    storage: Sequence[str] = STAGES,
    recompute: Sequence[bool] = (False, True),
    microbatches: int = 1,
) -> Decisions:
    """The decisions about a graph.

    Args:
      splits: dimension -> options, from `domains`.
      storage: which stages may be used.
      recompute: whether loops may, must or must not run again in backward.
    """
    options: dict[str, tuple[Choice, ...]] = dict(splits)
    classes = stored_classes(graph)
    stages: tuple[Choice, ...] = tuple(() if s == STAGES[0] else (s,) for s in storage)
    for name in classes:
        options[name] = stages
    for dim in recomputable(graph):
        options[recompute_name(dim)] = tuple(("on",) if r else () for r in recompute)
    return Decisions(options, {n: tuple(v.name for v in vs) for n, vs in classes.items()}, microbatches)
