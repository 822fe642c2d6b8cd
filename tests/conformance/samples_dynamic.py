"""Samples: one element read and written at a position that is known when the program runs."""

from __future__ import annotations

from typing import Any

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.ir.schedules import PipelineSchedule
from mesh_tf_core.ir.stage_orders import Interleaved, StageAction
from mesh_tf_core.ops import few_bits
from mesh_tf_core.ops.stages import ARRIVALS, CHUNK, RINGS, LayerNumbers, Passing, ScheduleColumn
from tests.conformance.helper import Arg, Sample

AB = Arg("a:8 b:4")


def _read(x: np.ndarray, i: Any, axis: int) -> np.ndarray:
    return x.take(int(i), axis) if 0 <= i < x.shape[axis] else np.zeros_like(x.take(0, axis))


def _written(x: np.ndarray, piece: np.ndarray, i: Any, axis: int) -> np.ndarray:
    out = x.copy()
    if 0 <= i < x.shape[axis]:
        np.moveaxis(out, axis, 0)[int(i)] = piece
    return out


def _table(column: str) -> Sample:
    s, tick, stage = PipelineSchedule("interleaved", 4, 6, 2), mtf.Dim("tick", 5), mtf.Dim("a", 4)

    def apply(g: mtf.Graph, x: mtf.Tensor) -> Any:
        read = g.apply(ScheduleColumn(s, StageAction.BACKWARD, column, tick, stage, 9))
        return x + read.cast(x.dtype), x + g.apply(Passing(s, StageAction.BACKWARD, True, tick, 9)).cast(
            x.dtype
        )

    def dense(x: np.ndarray) -> Any:
        table = s.table[9:14, :, StageAction.BACKWARD]
        numbers = {"microbatch": table[..., 0], CHUNK: table[..., 1]}
        numbers |= {name: s.places[put][9:14, :, StageAction.BACKWARD] for name, put in RINGS.items()}
        arrivals = s.arrivals[StageAction.BACKWARD][9:14]
        numbers |= {name: arrivals[..., way] for way, name in enumerate(ARRIVALS)}
        last = np.where(table[:, 3, 1] == 1, table[:, 3, 0], -1)
        return x + numbers[column], x + last[:, None]

    return Sample(f"{column} of a schedule", "dynamic", apply, (Arg("tick:5 a:4"),), dense)


def _turning() -> Sample:
    s, tick = PipelineSchedule("circular", 2, 3, 2), mtf.Dim("tick", 7)

    def apply(g: mtf.Graph, x: mtf.Tensor) -> Any:
        return x + g.apply(Passing(s, StageAction.FORWARD, True, tick, 1, 2)).cast(x.dtype)

    def dense(x: np.ndarray) -> Any:
        return x + np.array([-1, -1, 0, 1, -1, -1, 0])[:, None]

    return Sample("places of losses", "dynamic", apply, (Arg("tick:7 b:4"),), dense)


def _layers_of_stages() -> Sample:
    order, stage, place = Interleaved(4, 2), mtf.Dim("a", 4), mtf.Dim("place", 4)

    def apply(g: mtf.Graph, x: mtf.Tensor) -> Any:
        return x + g.apply(LayerNumbers(order, 13, stage, place)).cast(x.dtype)

    return Sample(
        "layers of stages", "dynamic", apply, (Arg("a:4 place:4"),), lambda x: x + order.numbers(13)
    )


def _few_bits(bits: int) -> Sample:
    def apply(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        row = x.shape.dims[-1]
        codes, scales = few_bits.coded(mtf.stop_gradient(x), row, bits)
        return (few_bits.unpacked(few_bits.packed(codes, row, bits), row, bits) * scales).cast(x.dtype)

    def dense(x: np.ndarray) -> np.ndarray:
        return few_bits.restored(*few_bits.quantised(x, bits), x.shape, bits).astype(x.dtype)

    return Sample(f"{bits} bits", "dynamic", apply, (Arg("a:4 b:16"),), dense, stops=(0,))


SAMPLES = (
    _few_bits(4),
    _few_bits(8),
    _layers_of_stages(),
    *map(_table, ("microbatch", CHUNK, *RINGS, ARRIVALS[2])),
    _turning(),
    Sample(
        "dynamic_slice",
        "dynamic",
        lambda g, x, i: (mtf.dynamic_slice(x, i, "a"), mtf.dynamic_slice(x, i, "b")),
        (AB, Arg("", "int:4")),
        lambda x, i: (_read(x, i, 0), _read(x, i, 1)),
    ),
    Sample(
        "dynamic_slice in the last piece, and outside",
        "dynamic",
        lambda g, x, i: (mtf.dynamic_slice(x, i + 4, "a"), mtf.dynamic_slice(x, i + 8, "a")),
        (AB, Arg("", "int:4")),
        lambda x, i: (_read(x, i + 4, 0), _read(x, i + 8, 0)),
    ),
    Sample(
        "dynamic_update",
        "dynamic",
        lambda g, x, row, i: mtf.dynamic_update(x, row, i, "a"),
        (AB, Arg("b:4"), Arg("", "int:8")),
        lambda x, row, i: _written(x, row, i, 0),
    ),
    Sample(
        "dynamic_update along an inner dimension, before and behind its ends",
        "dynamic",
        lambda g, x, piece, i: (
            mtf.dynamic_update(x, piece, i, "b"),
            mtf.dynamic_update(x, piece, i - 4, "b"),
            mtf.dynamic_update(x, piece, i + 4, "b"),
        ),
        (Arg("a:4 b:4 c:2"), Arg("c:2 a:4"), Arg("", "int:4")),
        lambda x, piece, i: tuple(_written(x, piece.T, i + by, 1) for by in (0, -4, 4)),
    ),
)
