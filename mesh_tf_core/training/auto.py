"""What `layout="auto"` means: a search that a package above the runtime provides when it is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model


class Planned(Protocol):
    """What a plan decides; `layoutopt.search` gives one."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def options(self) -> Options: ...


class Search(Protocol):
    """Finds layouts for this machine."""

    def best(self, model: Model, mesh: Mesh) -> Mapping[str, Any]:
        """The plan of the best layout, as JSON: what one process sends to others."""
        ...

    def read(self, plan: Mapping[str, Any]) -> Planned:
        """The plan of its JSON."""
        ...


_provided: list[Search] = []


def provide(search: Search) -> None:
    """Makes a search the one that `layout="auto"` asks, instead of any before."""
    _provided[:] = [search]


def provided() -> Search:
    """The search that `layout="auto"` asks.

    Raises:
      UserError: no package provides one.
    """
    if not _provided:
        raise UserError(
            'layout="auto" needs a search, and none is imported; write `import layoutopt` before, or give a '
            "layout instead"
        )
    return _provided[0]
