"""Processes that watch each other and agree, as threads of this one over a key-value store like JAX's; a
failure names who is to blame."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.jax import cluster as clusters
from mesh_tf_core.engines.jax import rendezvous, store, watch
from mesh_tf_core.engines.jax.cluster import Cluster

N = 3
SOON = 20.0
"""Seconds after which a test has failed; what it waits for takes a fraction of one."""


class Store:
    """The part of JAX's key-value store that is used."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.silent = False

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            self._answers()
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self.changed:
            self._answers()
            return [(k, v) for k, v in self.values.items() if k.startswith(key)]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            self._answers()
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            self.values.pop(key, None)

    def _answers(self) -> None:
        if self.silent:
            raise RuntimeError("UNAVAILABLE: the service is gone")


class Job:
    """Members of a job, by number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.told = Store(), list[str]()
        self.members: list[Cluster] = []
        monkeypatch.setattr(
            rendezvous, "join", lambda place, _: (store.JobStore(self.store), place.process, N)
        )
        for name in ("leave", "drop"):
            monkeypatch.setattr(rendezvous, name, lambda: None)
        monkeypatch.setattr(clusters.atexit, "register", lambda call: None)
        monkeypatch.setattr(Cluster, "_end", lambda one, text: self.told.append(text))

    def join(self, *numbers: int, timeout: float = SOON) -> list[Cluster]:
        made = [Cluster("127.0.0.1:1", N, i, timeout=timeout) for i in numbers]
        self.members += made
        with ThreadPoolExecutor(len(made)) as pool:
            list(pool.map(Cluster.join, made))
        for one in made:
            one._devices = 2
        return made

    def together(self, call: Callable[[Cluster], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.members)) as pool:
            return list(pool.map(call, self.members))

    def silence(self, one: Cluster) -> None:
        """As a process that was killed or stopped."""
        one._ended.set()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    for module in (clusters, store):
        monkeypatch.setattr(module, "BEAT", 0.05)
    monkeypatch.setattr(watch, "SILENCE", 1.0)
    monkeypatch.setattr(clusters, "GRACE", 1.0)
    made = Job(monkeypatch)
    yield made
    for one in made.members:
        one._ended.set()
    for thread in threading.enumerate():  # none may go on into other tests
        if "signs of life" in thread.name:
            thread.join(SOON)
            assert not thread.is_alive()


def failure(one: Cluster) -> str:
    """How the job failed, as one of its processes has it."""
    until = time.monotonic() + SOON
    while not one.failure and time.monotonic() < until:
        time.sleep(0.01)
    return one.failure


def test_values_go_round(job: Job) -> None:
    job.join(0, 1, 2)
    assert job.together(lambda one: one.gather("a", one.index)) == [[0, 1, 2]] * N
    assert job.together(lambda one: one.gather("b", {"x": [1.5, None]})) == [[{"x": [1.5, None]}] * N] * N
    assert job.together(lambda one: one.share("c", lambda: one.index)) == [0] * N
    assert len([key for key in job.store.values if "/round/" in key]) <= 2 * N  # what was read is let go
    with pytest.raises(
        mtf.ClusterError, match=r"the program differs between processes: 'x' in worker 0 .*, 'y' in worker 2 "
    ):
        job.together(lambda one: one.same("the program", "y" if one.index == 2 else "x"))
    job.together(lambda one: one.close())
    assert job.told == []


def test_who_counts_others_otherwise_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {2: N - 1}
    monkeypatch.setattr(
        rendezvous,
        "join",
        lambda place, _: (store.JobStore(job.store), place.process, counts.get(place.process, N)),
    )
    for one in (made := [Cluster("127.0.0.1:1", N, i) for i in range(N)]):
        job.members.append(one)
    with ThreadPoolExecutor(N) as pool:
        found = [pool.submit(one.join) for one in made]
    for each in found:
        with pytest.raises(
            mtf.UserError,
            match=r"was started for . processes, .* start all with the same --processes",
        ):
            each.result()


def test_all_end_after_the_same_step(job: Job) -> None:
    """Whoever is asked in a step, or between two: nobody ends before a step that another has begun."""
    job.join(0, 1, 2)

    def train(one: Cluster) -> int:
        step = 0
        while one.begins(step + 1):
            step += 1
            if one.index == 1 and step == 7:
                one.ask_to_stop()
            one.gather(f"step {step}", None)  # as a collective: it needs all
        return step

    ends = job.together(train)
    assert ends[0] >= 7 and ends == [ends[0]] * N
    assert job.told == []


def test_a_silent_process_is_named_with_what_it_did(job: Job) -> None:
    first, second, third = job.join(0, 1, 2)
    with third.doing("step 7"):
        time.sleep(0.2)
        job.silence(third)
    for one in (first, second):
        text = failure(one)
        assert (
            text.startswith("worker 2 (")
            and "was lost: no heartbeat for 1 s, because it ended, hangs or is" in text
        )
        assert "s, because it ended, hangs or is disconnected" in text
        with pytest.raises(mtf.ClusterError, match="worker 2"):
            one.gather("values", None)
        with pytest.raises(mtf.ClusterError, match=r"worker 2.* \(worker.*was at: "):
            one.explain("step 8")


def test_a_silent_service_is_worker_0(job: Job) -> None:
    (first, *_) = job.join(1, 0, 2)
    job.store.silent = True
    assert failure(first).startswith("worker 0 (") and "has not responded" in first.failure


def test_while_the_service_is_silent_nobody_else_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sign of a process is older than the last answer, which brought none of it."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    own = watch.Watch([0, 1], timeout=SOON)
    for now[0], number in ((0.0, 1), (0.9, 1), (1.8, 2)):
        own.hears({0: [now[0], "step", 0.0, 0, True], 1: [number // 2, "step", 0.0, 0, True]})
    own.hears({})
    now[0] = 2.5
    own.hears({})
    now[0] = 12.2
    assert own.missing(str) == ""
    now[0] = 12.6
    assert own.missing(str) == "0 was lost: its coordination service has not responded for 10 s"


def test_one_that_lives_but_does_not_come_is_named(job: Job) -> None:
    first, second, third = job.join(0, 1, 2, timeout=0.3)
    third._watch._timeout = SOON
    with third.doing("step 3"):
        pass
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(one.gather, "step 4", None) for one in (first, second)]
        for one in (first, second):
            one._watch.does("in step 4", 9, False)
        for each in found:
            with pytest.raises(mtf.ClusterError, match=r"worker 2.*did not reach step 4 within"):
                each.result()


def test_whoever_compiles_may_take_its_time(job: Job) -> None:
    first, second, third = job.join(0, 1, 2, timeout=0.1)
    job.together(lambda one: one.gather("step 1", None))

    def step(one: Cluster) -> None:
        with one.doing("compiling", patient=True):
            time.sleep(1.0 if one is third else 0.0)
        one.gather("step 2", None)

    job.together(step)
    assert [one.failure for one in (first, second, third)] == [""] * N


def test_an_error_of_one_is_told_to_all(job: Job) -> None:
    first, second, third = job.join(0, 1, 2)
    second.close(FileNotFoundError("no such file"))
    for one in (first, third):
        text = failure(one)
        assert text.startswith("worker 1 (") and text.endswith("failed: FileNotFoundError: no such file")
    assert second.failure == ""  # it says its own error


def test_an_error_at_the_very_end_is_told_too(job: Job) -> None:
    """As that of the last checkpoint, for which a process waits before it leaves."""
    first, second, third = job.join(0, 1, 2)

    def full() -> None:
        raise OSError("No space left on device")

    second.before_end(full)
    with pytest.raises(OSError, match="No space"):
        second.close()
    for one in (first, third):
        assert failure(one).endswith("failed: OSError: No space left on device")


def test_a_machine_that_slept_blames_nobody(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes stood still together, as on a laptop that was closed."""
    job.join(0, 1, 2)
    real, slept = time.monotonic, [0.0]
    monkeypatch.setattr(clusters.time, "monotonic", lambda: real() + slept[0])
    slept[0] = 100.0
    time.sleep(0.5)
    assert [one.failure for one in job.members] == [""] * N


def test_a_number_is_taken_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that come with one number the first has it; who comes when it was lost is no wrong input."""
    monkeypatch.setattr(rendezvous, "BEAT", 0.02)
    monkeypatch.setattr(rendezvous, "SILENCE", 0.3)
    keys = store.JobStore(job.store)
    for number in range(N):
        rendezvous.take_number(keys, number, N, "host0:1")
    made = job.join(0, 1, 2)
    with pytest.raises(mtf.UserError, match="cluster: the job at host0:1 already has a process 1"):
        rendezvous.take_number(keys, 1, N, "host0:1")
    job.silence(made[1])
    with pytest.raises(
        mtf.ClusterError,
        match="earlier and no longer responds; start again when that job has",
    ):
        rendezvous.take_number(keys, 1, N, "host0:1")


def test_the_address_to_listen_on_is_one() -> None:
    """Loopback stays loopback; a port is no part of it."""
    assert rendezvous._own_address("127.0.0.1:12345") == "127.0.0.1"
    assert rendezvous._own_address("localhost:12345") in ("127.0.0.1", "::1")
    assert rendezvous._own_address("no-such-host.invalid:1") is None
