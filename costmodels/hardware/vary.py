"""The same hardware with other numbers: drawn within their uncertainties, or scaled."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from costmodels.hardware.curve import Curve
from costmodels.hardware.measured import CollectiveCurve, ComputeCurve, Efficiency
from costmodels.hardware.model import Hardware
from costmodels.hardware.numbers import Number
from mesh_tf_core.tables import words

NumberFactor = Callable[[str, float | None], float]
"""factor(path, relative uncertainty) -> factor of a number, or of a rate."""

NETWORK = words(
    "topology.link_bandwidth topology.core_bandwidth topology.network_bandwidth topology.node_bandwidth "
    "topology.node_egress topology.nic_bandwidth topology.copy_bandwidth topology.switch_reduce.bandwidth"
)
"""Paths, or their beginnings, of the bandwidths between devices; the limits of protocols are theirs too."""


def varied(hardware: Hardware, factor: NumberFactor) -> Hardware:
    """The hardware with every number times its factor; curves of seconds are divided by it.

    Fractions (efficiencies, hidden shares) stay at most 1.
    """
    return replace(
        hardware,
        chip=_varied("chip", hardware.chip, factor),
        topology=_varied("topology", hardware.topology, factor),
        overlap=_varied("overlap", hardware.overlap, factor),
        collective_curves=tuple(
            _slower(f"collective_curves.{c.collective}.{c.group_size}", c, factor)
            for c in hardware.collective_curves
        ),
        compute_curves=tuple(
            _slower(f"compute_curves.{c.op_class}", c, factor) for c in hardware.compute_curves
        ),
    )


def with_bandwidth(hardware: Hardware, times: float) -> Hardware:
    """The hardware with all bandwidth between devices times a factor; latencies stay."""

    def factor(path: str, _uncertainty: float | None) -> float:
        limits = path.startswith("topology.protocols") and path.endswith("bandwidth_limit")
        return times if limits or path.startswith((*NETWORK, "collective_curves")) else 1.0

    return varied(hardware, factor)


def drawn(hardware: Hardware, seed: int) -> Hardware:
    """One machine that the description may be of: every number with an uncertainty is drawn from it.

    Numbers are drawn independently, log-normally, with the relative standard deviation of the file.
    """
    draw = random.Random(seed)
    return varied(hardware, lambda _, doubt: draw.lognormvariate(0.0, doubt) if doubt else 1.0)


def _varied(path: str, value: Any, factor: NumberFactor) -> Any:
    if isinstance(value, Number):
        found = value.value * factor(path, value.uncertainty)
        share = "efficiency" in path or path.startswith(("overlap", "chip.sustained"))
        fraction = value.value <= 1.0 and share
        return replace(value, value=min(found, 1.0) if fraction else found)
    if isinstance(value, Efficiency):
        times = factor(path, value.uncertainty)
        points = tuple((x, min(y * times, 1.0)) for x, y in value.curve.points)
        return replace(value, curve=Curve(points))
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _varied(f"{path}.{f.name}", getattr(value, f.name), factor) for f in fields(value)}
        return replace(value, **parts)
    if isinstance(value, tuple):
        return tuple(_item(f"{path}.{i}", item, path, factor) for i, item in enumerate(value))
    return value


def _item(place: str, item: Any, path: str, factor: NumberFactor) -> Any:
    """An element of a tuple; pairs are named by their first part."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str | int):
        return item[0], _varied(f"{path}.{item[0]}", item[1], factor)
    return _varied(place, item, factor)


def _slower(path: str, curve: Any, factor: NumberFactor) -> Any:
    assert isinstance(curve, CollectiveCurve | ComputeCurve)
    times = factor(path, curve.uncertainty)
    return replace(curve, seconds=Curve(tuple((x, y / times) for x, y in curve.seconds.points)))
