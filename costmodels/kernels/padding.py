"""The padding of matrix products, equations (3) and (4) of `costmodels.kernels.compute`."""

from __future__ import annotations

import math

from costmodels.hardware import MatrixUnit


def padding_ratio(unit: MatrixUnit, dims: tuple[int, int, int, int] | None) -> float:
    """FLOPs of the matrix unit, padding included / FLOPs of a product of m, n, k and batch, at least 1."""
    if dims is None:
        return 1.0
    m, n, k, batch = dims
    deep = up(k, unit.k.value) / k
    if unit.processors is not None:
        return min(_waves(unit, m, n, batch, tm, tn) for tm, tn in _tiles(unit)) * deep
    one = up(m, unit.m.value) * up(n, unit.n.value)
    other = up(m, unit.n.value) * up(n, unit.m.value)
    return min(one, other) / (m * n) * deep


def _tiles(unit: MatrixUnit) -> tuple[tuple[float, float], ...]:
    """Output tiles that a library chooses from: the whole one, half of it, a quarter."""
    m, n = unit.m.value, unit.n.value
    return (m, n), (m / 2, n), (m, n / 2), (m / 2, n / 2)


def _waves(unit: MatrixUnit, m: int, n: int, batch: int, tile_m: float, tile_n: float) -> float:
    """Output elements that all waves have room for / elements of the product."""
    processors = unit.processors.value if unit.processors else 1.0
    waves = math.ceil(math.ceil(m / tile_m) * math.ceil(n / tile_n) * batch / processors)
    return waves * processors * tile_m * tile_n / (m * n * batch)


def up(size: int, tile: float) -> float:
    """The next multiple of a tile."""
    return math.ceil(size / tile) * tile
