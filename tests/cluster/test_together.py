"""Checkpoints that several processes write and read together; the processes are threads of this one."""

from __future__ import annotations

import os
import shutil
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.jax.cluster import Cluster
from mesh_tf_core.engines.pieces import VariablePiece, region, writers
from mesh_tf_core.training import array_files, checkpoint
from mesh_tf_core.training.finite import FinitePieces
from mesh_tf_core.training.saving import Saver
from tests.cluster.test_agreement import Job, N, job

__all__ = ["job"]

SHAPE = (12, 5)
W = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def rows(process: int, of: int = N, whole: tuple[int, ...] = SHAPE) -> VariablePiece:
    """A process's rows of w."""
    own = whole[0] // of
    return VariablePiece("w", "float32", whole, (process * own, 0), (own, whole[1]))


def values(process: int, scale: float = 1.0) -> dict[VariablePiece, Any]:
    piece = rows(process)
    found = {piece: scale * W[region(piece.begin, piece.shape)]}
    if process == 1:
        found[VariablePiece("step", "int32", (), (), ())] = np.array(7, np.int32)
    return found


def save(one: Cluster, saver: Saver, place: Path, step: int, scale: float = 1.0) -> None:
    saver.save(place, step, values(one.index, scale), {"layout": ""})
    saver.wait()


def test_each_writes_its_own_and_any_part_is_read(job: Job, tmp_path: Path) -> None:
    savers = [Saver(one) for one in job.join(0, 1, 2)]
    for step in range(1, 7):
        job.together(lambda one, step=step: save(one, savers[one.index], tmp_path, step, float(step)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock", *(f"step-{step:09d}" for step in (4, 5, 6))
    ]  # fmt: skip
    files = sorted(path.name for path in (tmp_path / "step-000000006").iterdir())
    assert files == [*(f"{n:05d}.safetensors" for n in range(N)), "manifest.json"]
    own = array_files.places(tmp_path / "step-000000006" / "00001.safetensors")
    assert set(own) == {"w[4:8,0:5]", "step"}  # and nothing that another has

    opened = job.together(lambda one: checkpoint.newest(tmp_path, one))
    assert [found.step for found in opened] == [6] * N and opened[0].read("step") == 7
    np.testing.assert_array_equal(opened[2].read("w"), 6.0 * W)
    for begin, shape in (((0, 0), (6, 5)), ((3, 1), (6, 3)), ((11, 4), (1, 1)), ((0, 0), (12, 1))):
        np.testing.assert_array_equal(opened[1].part("w", begin, shape), 6.0 * W[region(begin, shape)])
    alone = checkpoint.newest(tmp_path)
    assert alone is not None
    np.testing.assert_array_equal(alone.read("w"), 6.0 * W)
    job.together(lambda one: one.close())
    left = [key for key in job.store.values if key.startswith("layoutopt/checkpoint")]
    assert len(left) <= 2 * (N + 1)  # what was said of older ones is let go


def test_damage_that_one_process_finds_is_passed_over_by_all(job: Job, tmp_path: Path) -> None:
    savers = [Saver(one) for one in job.join(0, 1, 2)]
    for step in (1, 2):
        job.together(lambda one, step=step: save(one, savers[one.index], tmp_path, step))
    file = tmp_path / "step-000000002" / "00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for found in job.together(lambda one: checkpoint.newest(tmp_path, one)):
        assert found.step == 1
        assert found.skipped == (
            "step-000000002: variable 'w' in 00002.safetensors does not match its checksum",
        )
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(
        mtf.ClusterError,
        match=r"the list of checkpoints in .* differs .*: 'step-0.*' in worker 0 .*, '' in worker 2",
    ):
        job.together(lambda one: checkpoint.newest(elsewhere if one.index == 2 else tmp_path, one))


class Full(Mapping[VariablePiece, Any]):
    """As on a disk without room."""

    def __getitem__(self, piece: VariablePiece) -> Any:
        raise OSError(28, "No space left on device")

    def __iter__(self) -> Iterator[VariablePiece]:
        return iter([rows(2)])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("lacking", [0, 2])
def test_who_cannot_write_is_told_to_all(job: Job, lacking: int, tmp_path: Path) -> None:
    savers = [Saver(one) for one in job.join(0, 1, 2)]
    job.together(lambda one: save(one, savers[one.index], tmp_path, 1))

    def fails(one: Cluster) -> str:
        full = one.index == lacking
        savers[one.index].save(tmp_path, 2, Full() if full else values(one.index), {})
        with pytest.raises(mtf.UserError) as told:
            savers[one.index].wait()
        return str(told.value)

    for text in job.together(fails):
        assert "cannot be written: No space left on device; give a directory with enough free space" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-000000001"]
    job.together(lambda one: save(one, savers[one.index], tmp_path, 3))
    assert [step for step, _ in checkpoint.listed(tmp_path)] == [3, 1]


class Late(Mapping[VariablePiece, Any]):
    """What is still being written when another process has failed."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def __getitem__(self, piece: VariablePiece) -> Any:
        time.sleep(0.3)
        self.said.append("written")
        return W[4:8]

    def __iter__(self) -> Iterator[VariablePiece]:
        return iter([rows(1)])

    def __len__(self) -> int:
        return 1


def test_a_folder_goes_when_the_last_has_written(job: Job, tmp_path: Path, monkeypatch: Any) -> None:
    savers, said, remove = [Saver(one) for one in job.join(0, 1, 2)], list[str](), shutil.rmtree

    def removes(path: Path, ignore_errors: bool) -> None:
        said.append("removed")
        remove(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", removes)

    def fails(one: Cluster) -> None:
        savers[one.index].save(tmp_path, 1, [Full(), Late(said), values(2)][one.index], {})
        with pytest.raises(mtf.UserError, match="No space left on device"):
            savers[one.index].wait()

    job.together(fails)
    assert said == ["written", "removed"]  # a late file would make the folder stay
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_one_does_not_see_is_said(job: Job, tmp_path: Path, monkeypatch: Any) -> None:
    savers = [Saver(one) for one in job.join(0, 1, 2)]
    monkeypatch.setattr(Path, "is_dir", lambda path: "step-" not in path.name and os.path.isdir(path))

    def fails(one: Cluster) -> str:
        with pytest.raises(mtf.UserError) as told:
            save(one, savers[one.index], tmp_path, 1)
        return str(told.value)

    for text in job.together(fails):
        assert "cannot find" in text and "created; use a checkpoint directory that all machines share" in text


def test_a_process_that_is_lost_in_a_checkpoint_leaves_the_one_before(job: Job, tmp_path: Path) -> None:
    first, second, third = job.join(0, 1, 2)
    savers = [Saver(one) for one in (first, second, third)]
    job.together(lambda one: save(one, savers[one.index], tmp_path, 1))
    job.silence(third)
    for one in (first, second):
        savers[one.index].save(tmp_path, 2, values(one.index), {})
    for one in (first, second):
        with pytest.raises(mtf.ClusterError, match="worker 2"):
            savers[one.index].wait()
    found = checkpoint.newest(tmp_path)
    assert found is not None and (found.step, found.skipped) == (1, ())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-000000001"]


def test_no_process_holds_a_whole_variable(tmp_path: Path) -> None:
    """Of 8 MiB, in four processes of two devices each, then read by three."""
    whole, count = (2048, 1024), 4
    bytes = 4 * whole[0] * whole[1]

    class Made(Mapping[VariablePiece, Any]):
        """Made when it is asked for, as from a device."""

        def __init__(self, process: int) -> None:
            self.pieces = [rows(2 * process + n, 2 * count, whole) for n in range(2)]

        def __getitem__(self, piece: VariablePiece) -> Any:
            return np.full(piece.shape, piece.begin[0], np.float32)

        def __iter__(self) -> Iterator[VariablePiece]:
            return iter(self.pieces)

        def __len__(self) -> int:
            return len(self.pieces)

    with checkpoint.beginning(tmp_path, 1) as folder:
        written: checkpoint.WrittenPieces = []
        for process in range(count):
            tracemalloc.start()
            written += checkpoint.write_pieces(folder, process, Made(process))
            assert bytes / 8 <= tracemalloc.get_traced_memory()[1] < bytes / 4
            tracemalloc.stop()
        checkpoint.finish(folder, 1, written, {})
    tracemalloc.start()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    piece = found.part("w", (0, 0), (whole[0], whole[1] // 4))
    assert bytes / 4 <= tracemalloc.get_traced_memory()[1] < 0.9 * bytes
    tracemalloc.stop()
    np.testing.assert_array_equal(piece[:, 0], np.repeat(np.arange(0, 2048, 256), 256))


@pytest.mark.parametrize(
    ("layout", "each"),
    [("d_ff:a", [1.0] * 4), ("", [1.0] * 4), ("d_ff:b", [1.0] * 4)],
)
def test_processes_write_equally_much(layout: str, each: list[float]) -> None:
    """Each piece once, by a process that holds it; also of what all hold."""
    g, d, f = mtf.Graph(), mtf.Dim("d", 4), mtf.Dim("d_ff", 8)
    h = g.input("x", [d], "float32")
    for n in range(4):
        h = mtf.einsum([h, g.variable(f"up{n}", [d, f], mtf.ONES)], [f])
        h = mtf.einsum([h, g.variable(f"down{n}", [f, d], mtf.ONES)], [d])
    program = mtf.lower(g, mtf.Mesh("a:4;b:2"), mtf.Layout(layout), {"loss": mtf.reduce_sum(h)})
    processes = [rank // 2 for rank in range(8)]
    load = [0] * 4
    for name, pieces in writers(program, processes).items():
        v = program.variables[name].value
        assert len(pieces) == v.shape.size // v.local(program.mesh).shape.size
        for begin, rank in pieces.items():
            assert v.begin(program.mesh, rank) == begin
            load[processes[rank]] += v.local(program.mesh).bytes
    assert [4 * n / sum(load) for n in load] == each


def test_what_one_process_finds_not_finite_is_saved_by_none(job: Job, tmp_path: Path) -> None:
    """Each looks at what it writes, and on reading at its share."""
    savers = [Saver(one) for one in job.join(0, 1, 2)]
    job.together(lambda one: save(one, savers[one.index], tmp_path, 1))

    def fails(one: Cluster) -> str:
        own = {piece: np.where(one.index == 2, np.nan, array) for piece, array in values(one.index).items()}
        pieces = FinitePieces(own, frozenset("w"), 2, lambda: "continue from step 1")
        savers[one.index].save(tmp_path, 2, pieces, {})
        with pytest.raises(mtf.UserError) as told:
            savers[one.index].wait()
        return str(told.value)

    said = "step 2 is not saved: variable 'w' contains NaN or infinite numbers; continue from step 1"
    assert job.together(fails) == [said] * N
    assert [step for step, _ in checkpoint.listed(tmp_path)] == [1]
    job.together(lambda one: save(one, savers[one.index], tmp_path, 3, np.inf if one.index == 1 else 1.0))
    for found in job.together(lambda one: checkpoint.newest(tmp_path, one, frozenset("w"))):
        assert found.step == 1
        assert found.skipped == ("step-000000003: variable 'w' contains NaN or infinite numbers",)


def test_all_go_on_from_the_step_that_is_chosen(job: Job, tmp_path: Path) -> None:
    savers = [Saver(one) for one in job.join(0, 1, 2)]
    for step in (1, 2, 3):
        job.together(lambda one, step=step: save(one, savers[one.index], tmp_path, step, float(step)))
    found = job.together(lambda one: checkpoint.of_step(tmp_path, 1, one))
    assert [one.step for one in found] == [1] * N
    assert [len(one.aside) for one in found] == [2, 0, 0]  # one renames
    np.testing.assert_array_equal(found[2].read("w"), W)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock", "step-000000001", "step-000000002.aside", "step-000000003.aside"
    ]  # fmt: skip
