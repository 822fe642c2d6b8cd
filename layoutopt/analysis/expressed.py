"""Finds what a framework has no setting for in a layout that a person wrote."""

from __future__ import annotations

from costmodels.hardware import Hardware
from layoutopt.frameworks import restriction_of
from layoutopt.optimize.subproblems import SubproblemKey, listed
from layoutopt.plan.build import decided
from layoutopt.space.allow import EVERYTHING, resolved
from layoutopt.space.decisions import Decisions, SearchSpace, beyond
from layoutopt.space.kind import Choice, Target
from layoutopt.space.objective import Objective
from layoutopt.space.splits import Split
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import read_stage
from mesh_tf_core.model import Model


def unexpressed(
    model: Model, machine: Hardware, mesh: Mesh, layout: Layout, options: Options
) -> tuple[str, str]:
    """Finds what the machine's framework has no setting for, and one change that mends it, in words; "", "":
    it can run the layout."""
    restriction = restriction_of(machine.framework).of(model)
    if restriction.says is None:
        return "", ""
    if lost := beyond(restriction, decided(options, layout, model.stages(mesh, layout))):
        return f"a plan in which {lost.words}", ""
    target = Target.on(machine, model, mesh)
    space = resolved(SearchSpace(allow=(EVERYTHING,)), [target]).settled(Objective.TIME)
    space = restriction.narrowed(space.but(microbatches=(options.microbatches,))).but(restriction=restriction)
    near = tuple({a for stage in options.storage.values() for a in read_stage(stage).over or ()})
    wanted = SubproblemKey.of(model, mesh, layout, options)
    here = next((each for each in listed(model, [mesh], space, lambda _: near) if each.key == wanted), None)
    if here is None or here.refused:
        return "", ""
    return _odd(here.decided, here.decided.write(layout, options))


def _odd(found: Decisions, chosen: dict[str, Choice]) -> tuple[str, str]:
    def said(*names: str, **other: Choice) -> str:
        over = {n: "over " * isinstance(found.named[n], Split) for n in names}
        choices = {n: "+".join(other.get(n, chosen[n])) for n in names}
        return ", ".join(
            f"{n} {over[n] + c if c else 'whole' if over[n] else 'no'}" for n, c in choices.items()
        )

    if odd := [n for n, options in found.options.items() if chosen[n] not in options]:
        return said(*odd), ""
    broken = [each for each in found.couplings if not each.allows(chosen)]
    for name in dict.fromkeys(n for each in broken for n in reversed(each.names)):
        for other in found.options[name]:
            if all(each.allows({**chosen, name: other}) for each in found.couplings):
                return said(name), said(name, **{name: other})
    return said(*(n for each in broken[:1] for n in each.names if chosen[n])), ""
