"""A module's own placements: parameters that `parallelize_module` and `fully_shard` made DTensors.

An axis of a device mesh is found among the axes of the model's mesh by its ranks, whatever both are called.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from layoutopt.analysis.lint import UnlikeArray
from layoutopt.importers.arrays.placing import ArrayAxes
from layoutopt.importers.arrays.written import NAMED, ReadArray, WrittenLayout, implied, read_array
from layoutopt.importers.torch.calls import dtype_of, torch_module
from layoutopt.importers.torch.model import TorchModel
from layoutopt.plan.units import some
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import STAGES

WRAPPED = re.compile(r"(_checkpoint_wrapped_module|_orig_mod)\.")
"""Names that wrappers put into the paths of parameters."""


@contextmanager
def fake_ranks(mesh: Mesh) -> Iterator[None]:
    """A process group of as many ranks as the mesh has devices, of which this process is the first and which
    send nothing; none where a launcher has started ranks."""
    distributed = torch_module().distributed
    if not distributed.is_available() or distributed.is_initialized() or "RANK" in os.environ:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=mesh.devices, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def written(model: TorchModel, mesh: Mesh, module: Any, rows: Any, options: Options) -> WrittenLayout:
    """The layout and the storage of a module's own placements.

    Args:
      module: the model's, after `parallelize_module`, `distribute_tensor` or `fully_shard`.
      rows: the mesh axes that the rows of the batch are split over, as a name or a sequence of names; None:
        those of `fully_shard`.
      options: what else is decided; they store the parameters that the module does not.

    Raises:
      UserError: another module, other ranks than the mesh has, a placement that no layout has, or other
        element types than `from_torch` was given.
    """
    return _PlacementReading(model, mesh, module, rows).written(options)


class _PlacementReading:
    def __init__(self, model: TorchModel, mesh: Mesh, module: Any, rows: Any) -> None:
        if not isinstance(module, torch_module().nn.Module):
            raise UserError(f"shardings(): {module!r} is not a torch.nn.Module; return the module")
        own = module.named_parameters(remove_duplicate=False)
        self.model, self.mesh = model, mesh
        self.parameters = {WRAPPED.sub("", path): p for path, p in own}
        self.groups = dict(_groups(module))
        ranks = np.arange(mesh.devices).reshape([size for _, size in mesh.axes])
        self._lines = {
            tuple(ranks[tuple(slice(None) if a in axes else 0 for a in mesh.names)].ravel().tolist()): axes
            for count in range(len(mesh.axes) + 1)
            for axes in combinations([a for a, size in mesh.axes if size > 1], count)
        }
        groups = [group.mesh_info.mesh for group in self.groups]
        meshes = [*(p.device_mesh for p in self.parameters.values() if hasattr(p, "device_mesh")), *groups]
        lines = [(m.mesh_dim_names or (), self._axes(m)) for m in dict.fromkeys(meshes)]
        named = {n: axes for names, several in lines for n, axes in zip(names, several, strict=False)}
        named |= {n: (n,) for n in mesh.names}
        said = [rows] if isinstance(rows, str) else rows or ()
        if wrong := next((axis for axis in said if axis not in named), None):
            raise UserError(
                f"shardings(): the rows of the batch are over {wrong!r}, which is no axis of mesh {mesh}; "
                f"{known_names(str(wrong), named)}"
            )
        split = [axes for m in groups for axes in self._axes(m)] if rows is None else map(named.get, said)
        over = {a for axes in split for a in axes or ()}
        self.rows = tuple(a for a in mesh.names if a in over and mesh.size(a) > 1)

    def written(self, options: Options) -> WrittenLayout:
        origin, styles, batch = self.model.origin, self.model.styles, self.model.batch_dim
        assert origin is not None and styles is not None
        self._check_types()
        arrays, padded, apart = list[ReadArray](), list[str](), list[str]()
        for array in origin.batch.values():
            spec = tuple(self.rows if batch in names else () for names in array.axes)
            arrays.append(read_array(array, spec, self.mesh, fed=True))
        stages = {id(p.sharded_param): s for group, s in self.groups.items() for p in group.fsdp_params}
        first = dict[str, Any]()
        for path, array in styles.parameters.items():
            p = self.parameters.get(path)
            if p is None:
                hint = known_names(path, self.parameters)
                raise UserError(f"shardings(): the module has no parameter {path!r}; {hint}")
            if array.path in first:
                apart += [path] if first[array.path] is not p else []
                continue
            first[array.path] = p
            said = self._spec(path, p)
            spec = self._even(array, said)
            if sum(map(len, spec)) < sum(map(len, said)):
                padded.append(path)
            stage = STAGES.index(stages.get(id(p), "zero3"))
            arrays.append(read_array(array, spec, self.mesh, stage=stage))
        found = implied(self.model, self.mesh, arrays, options, self._text)
        unlike = [*found.unlike, *_said(padded, apart)]
        if further := self._alike():
            names, why = styles.limits["elsewhere"]
            if names:
                rule = f"{names[0]}@elsewhere:{'+'.join(further)}"
                found = replace(found, layout=Layout(";".join(filter(None, (str(found.layout), rule)))))
            else:
                unlike.append(UnlikeArray(f"sequence parallelism is not in the prediction: {why}", "add it"))
        return replace(found, unlike=unlike)

    def _alike(self) -> Axes:
        """The axes over which modules have whole parameters that are DTensors all the same: these modules get
        pieces of a sequence, as under `SequenceParallel`."""
        found: dict[str, list[set[str]]] = {}
        for path, p in self.parameters.items():
            own = getattr(p, "placements", ())
            said = zip(self._axes(p.device_mesh), own, strict=True) if own else ()
            whole = {a for axes, placement in said if placement.is_replicate() for a in axes}
            found.setdefault(path.rpartition(".")[0], []).append(whole)
        over = {a for sets in found.values() for a in set.intersection(*sets)} - {*self.rows}
        return tuple(a for a in self.mesh.names if a in over)

    def _text(self, spec: Sequence[Axes]) -> str:
        """A placement as DTensor has it for each axis of the mesh."""
        at = {a: f"Shard({d})" for d, axes in enumerate(spec) for a in axes}
        return f"[{', '.join(at.get(a, 'Replicate()') for a in self.mesh.names)}]"

    def _axes(self, devices: Any) -> list[Axes]:
        """The axes of the model's mesh that each axis of a device mesh is."""
        found = list[Axes]()
        for d, size in enumerate(devices.shape):
            ranks = devices.mesh.movedim(d, -1).reshape(-1, size)[0].tolist()
            axes = self._lines.get(tuple(r - ranks[0] for r in ranks))
            if axes is None:
                names, root = devices.mesh_dim_names, devices._get_root_mesh()
                text = ";".join(
                    f"{n}:{s}" for n, s in zip(root.mesh_dim_names or "abcdef", root.shape, strict=False)
                )
                raise UserError(
                    f"shardings(): axis {names[d] if names else d!r} of a device mesh has ranks "
                    f"{some([*map(str, ranks)], 2 * NAMED)}, which are no axes of mesh {self.mesh}; give the "
                    f'mesh of the module, as in --mesh "{text}"'
                )
            found.append(axes)
        return found

    def _spec(self, path: str, p: Any) -> list[Axes]:
        """The mesh axes of each axis of a parameter, from the outermost."""
        from torch.distributed.tensor import DTensor

        found: list[Axes] = [()] * p.ndim
        if not isinstance(p, DTensor):
            return found
        for placement, axes in [*zip(p.placements, self._axes(p.device_mesh), strict=True)][::-1]:
            if placement.is_replicate() or not axes:
                continue
            dim, own = getattr(placement, "dim", None), self.mesh.group_size
            # A strided shard is of the pieces that later axes of the mesh have split first.
            later, ways = found[dim] if dim is not None else (), getattr(placement, "split_factor", 1)
            at = next((n for n in range(len(later) + 1) if own(later[:n]) == ways), None)
            if dim is None or at is None:
                raise UserError(
                    f"shardings(): {path!r} is placed {[*p.placements]}, and no rule of a layout is "
                    f"{placement}; place it by Shard(axis) and Replicate()"
                )
            found[dim] = (*later[:at], *axes, *later[at:])
        return found

    def _even(self, array: ArrayAxes, spec: Sequence[Axes]) -> tuple[Axes, ...]:
        """A placement in pieces of one size. Axes of the batch only store: where they do not divide their
        axis, they split another one, or storage pads. Other axes that do not divide theirs are left out."""
        found, stored = list[Axes](), list[tuple[int, Axes]]()
        for d, (size, axes) in enumerate(zip(array.shape, spec, strict=True)):
            if size % self.mesh.group_size(axes):
                stored.append((d, tuple(a for a in axes if a in self.rows)))
                axes = tuple(a for a in axes if a not in self.rows)
            found.append(() if size % self.mesh.group_size(axes) else axes)
        for d, over in stored:
            sizes = enumerate(array.shape)
            found[next((a for a, n in sizes if n % self.mesh.group_size(found[a] + over) == 0), d)] += over
        return tuple(found)

    def _check_types(self) -> None:
        """UserError if `fully_shard` gathers parameters in another element type than the model reads."""
        for group in self.groups:
            kind = group.mp_policy.param_dtype
            own = {p.sharded_param.dtype for p in group.fsdp_params} - {kind}
            if kind is not None and own and dtype_of(kind) != self.model.param_dtype:
                raise UserError(
                    f"shardings(): fully_shard gathers parameters in {kind}, but from_torch was given "
                    f"param_dtype={self.model.param_dtype or None}; give from_torch(param_dtype={kind})"
                )


def _groups(module: Any) -> Iterator[tuple[Any, str]]:
    """The parameters that each call of `fully_shard` gathers together, and their stage of storage."""
    for each in module.modules():
        state: Any = each._get_fsdp_state() if hasattr(each, "_get_fsdp_state") else None
        for group in state._fsdp_param_groups if state is not None else ():
            # The outermost group stays whole until backward, if nothing else is asked for.
            whole = each is module and state._auto_reshard_after_forward
            yield group, "zero2" if whole or group.post_forward_mesh_info is None else "zero3"


def _said(padded: Sequence[str], apart: Sequence[str]) -> Iterator[UnlikeArray]:
    if padded:
        yield UnlikeArray(
            f"{some([*map(repr, padded)], NAMED)}: its ranks do not divide the axis, so DTensor pads it; the "
            "prediction has it whole",
            "pad the axis, or split it over fewer ranks",
        )
    if apart:
        yield UnlikeArray(
            f"{some([*map(repr, apart)], NAMED)}: a tied parameter that became one of its own, so each has "
            "only its part of the gradient and they train apart",
            "tie it again after parallelize_module",
        )
