"""Processes that meet and watch each other, as threads of this one; a failure names who is to blame."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import mesh_tf_core as mtf
from layoutopt.launching import free_ports
from mesh_tf_core.cluster import Members, hub, link
from mesh_tf_core.cluster.hub import Hub
from mesh_tf_core.cluster.lines import Lines
from mesh_tf_core.cluster.link import END, Link

N = 3
SOON = 20.0
"""Seconds after which a test has failed; what it waits for takes a fraction of one."""


class Meeting:
    """A hub, and links that join it."""

    def __init__(self, timeout: float = SOON, start_timeout: float = SOON) -> None:
        self.addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(N))
        self.links: list[Link] = []
        self.heard: list[str] = []
        Hub(self.members(0), timeout, start_timeout).start()

    def members(self, index: int) -> Members:
        return Members(self.addresses, index)

    def join(self, *indices: int) -> list[Link]:
        made = [Link(self.members(i), self.heard.append) for i in indices]
        for one in made:
            one.connect(SOON)
        self.links += made
        return made

    def joined_raw(self, index: int) -> Lines:
        """One that joins and then is silent."""
        lines = Lines(socket.create_connection(self.members(0).meeting_point, timeout=SOON))
        assert lines.send(join=index, job=self.members(0).job)
        return lines

    def together(self, call: Callable[[Link], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.links)) as pool:
            return list(pool.map(call, self.links))


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life every few milliseconds."""
    for module in (hub, link):
        monkeypatch.setattr(module, "BEAT", 0.02)
        monkeypatch.setattr(module, "SILENCE", 0.5)


@pytest.fixture
def meet() -> Iterator[Callable[..., Meeting]]:
    made: list[Meeting] = []

    def make(**options: float) -> Meeting:
        made.append(Meeting(**options))
        return made[-1]

    yield make
    for meeting in made:
        for one in meeting.links:
            one.leave()
    assert made


def test_values_go_round(meet: Callable[..., Meeting]) -> None:
    meeting = meet()
    meeting.join(2, 0, 1)
    assert meeting.together(lambda one: one.round("a", one.members.index)) == [[0, 1, 2]] * N
    assert meeting.together(lambda one: one.round("b", {"x": [1.5, None]})) == [[{"x": [1.5, None]}] * N] * N
    assert meeting.together(lambda one: one.round(END, None)) == [[None] * N] * N
    assert meeting.heard == []


def test_all_end_after_the_same_step(meet: Callable[..., Meeting], fast: None) -> None:
    """Whoever is asked in a step, or between two: nobody ends before a step that another has begun."""
    meeting = meet()
    meeting.join(0, 1, 2)

    def train(one: Link) -> int:
        step = 0
        while one.begins(step + 1):
            step += 1
            if one.members.index == 1 and step == 7:
                one.ask_to_stop()
            one.round(f"step {step}", None)  # as a collective: it needs all
        return step

    ends = meeting.together(train)
    assert ends[0] >= 7 and ends == [ends[0]] * N
    assert meeting.together(lambda one: one.round(END, None)) == [[None] * N] * N
    assert meeting.heard == []


def test_an_ended_process_is_named_with_what_it_did(meet: Callable[..., Meeting], fast: None) -> None:
    meeting = meet()
    first, second = meeting.join(0, 1)
    third = meeting.joined_raw(2)
    third.send(doing="in step 7", **{"for": 0.0})
    third.close()
    text = rf"worker 2 \({meeting.addresses[2]}\) was lost: its process ended \(last heard: in step 7\)"
    for one in (first, second):
        with pytest.raises(mtf.ClusterError, match=text):
            one.round("values", None)
        with pytest.raises(mtf.ClusterError, match=text):
            one.check()
    assert len(meeting.heard) == 2


def test_a_frozen_process_is_named(meet: Callable[..., Meeting], fast: None) -> None:
    meeting = meet()
    first, _ = meeting.join(0, 2)
    silent = meeting.joined_raw(1)
    with pytest.raises(mtf.ClusterError, match=r"worker 1 \(.*\) was lost: no sign of life .* frozen or cut"):
        first.round("values", None)
    silent.close()


def test_a_lost_hub_is_worker_0(fast: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        members = Members((f"127.0.0.1:{port - 1}", f"127.0.0.1:{port + 1}"), 1)
        assert members.meeting_point[1] == port
        heard: list[str] = []
        ended, silent = Link(members, heard.append), Link(members, heard.append)
        ended.connect(SOON)
        door.accept()[0].close()
        silent.connect(SOON)
        kept, _ = door.accept()
        assert "worker 0" in ended.settle(SOON) and "its process ended" in ended.failure
        assert "worker 0" in silent.settle(SOON) and "no sign of life" in silent.failure
        kept.close()
    absent = Link(Members((f"127.0.0.1:{port - 1}", "127.0.0.1:1"), 1), heard.append)
    with pytest.raises(mtf.ClusterError, match=rf"worker 0 .* does not answer on port {port} within 0 s"):
        absent.connect(0.0)


def test_those_that_do_not_come_are_named(meet: Callable[..., Meeting], fast: None) -> None:
    meeting = meet(start_timeout=0.2)
    (first,) = meeting.join(1)
    with pytest.raises(mtf.ClusterError, match=r"worker 0 \(.*\), worker 2 \(.*\) did not come within 0 s"):
        first.round("the start", None)
    (late,) = meeting.join(2)
    with pytest.raises(mtf.ClusterError, match="did not come"):
        late.round("the start", None)


def test_one_that_lives_but_does_not_come_is_named(meet: Callable[..., Meeting], fast: None) -> None:
    meeting = meet(timeout=0.2)
    first, second, third = meeting.join(0, 1, 2)
    with third.doing("reading a batch"), ThreadPoolExecutor(2) as pool:
        found = [pool.submit(one.round, "values", None) for one in (first, second)]
        with pytest.raises(
            mtf.ClusterError, match=r"worker 2 \(.*\) did not come to values .*reading a batch"
        ):
            found[0].result()
        with pytest.raises(mtf.ClusterError, match="worker 2"):
            found[1].result()


def test_who_is_late_for_a_collective(meet: Callable[..., Meeting], fast: None) -> None:
    meeting = meet()
    first, second, third = meeting.join(0, 1, 2)
    with third.doing("step 3"):
        pass
    with first.doing("step 4"), second.doing("step 4"):
        meeting.together(lambda one: one.round("everybody's state is known", None))
        first.overdue("all_reduce over mesh axis 'data'")
        text = first.settle(SOON)
    assert f"worker 2 ({meeting.addresses[2]}) did not come to all_reduce over mesh axis 'data'" in text
    assert "(after step 3)" in text and "worker 1" not in text


def test_all_are_there_and_wait(meet: Callable[..., Meeting], fast: None) -> None:
    meeting = meet()
    first, *_ = meeting.join(0, 1, 2)
    first.overdue("all_to_all over mesh axis 'model'")
    assert "while every other worker is there too" in first.settle(SOON)


def test_the_first_failure_counts(meet: Callable[..., Meeting], fast: None) -> None:
    meeting = meet()
    first, second, third = meeting.join(0, 1, 2)
    second.report("ValueError: no such file")
    for one in (first, third):
        assert one.settle(SOON) == f"worker 1 ({meeting.addresses[1]}) failed: ValueError: no such file"
    third.report("UnavailableError: others are gone")
    assert "worker 1" in third.failure


def test_a_second_start_and_another_job_are_refused(meet: Callable[..., Meeting], fast: None) -> None:
    meeting = meet()
    first, _ = meeting.join(0, 1)
    (again,) = meeting.join(1)
    assert "still ran the job that this process had left" in again.settle(SOON)
    assert "worker 1" in first.settle(SOON) and "was started again" in first.failure
    stranger = Lines(socket.create_connection(meeting.members(0).meeting_point, timeout=SOON))
    assert stranger.send(join=0, job="another")
    assert "runs another job" in (stranger.receive() or [{}])[0]["failure"]
    stranger.close()


def test_what_is_not_a_message_ends_the_connection(meet: Callable[..., Meeting], fast: None) -> None:
    meeting = meet()
    (first,) = meeting.join(0)
    browser = socket.create_connection(meeting.members(0).meeting_point, timeout=SOON)
    browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert browser.recv(1) == b""
    browser.close()
    first.check()


def test_the_hub_says_that_its_port_is_taken() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(mtf.UserError, match=rf"cannot listen on port {port} of 127.0.0.1"):
            Hub(Members((f"127.0.0.1:{port - 1}",), 0), 1.0, 1.0)
