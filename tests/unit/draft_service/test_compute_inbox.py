"""What reaches the compute thread: calls in order, sockets once each, nothing after its end."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from draft_service.compute_inbox import ComputeInbox


class Ear:
    """A socket that is listened to. heard: how often it was ready."""

    def __init__(self, inbox: ComputeInbox) -> None:
        self.num_sequences = 3
        self.heard = 0
        self.inbox = inbox
        self.mouth, self.socket = socket.socketpair()

    def fileno(self) -> int:
        return self.socket.fileno()

    def on_ready(self) -> None:
        self.heard += 1


@pytest.fixture
def inbox() -> Iterator[ComputeInbox]:
    made = ComputeInbox()
    yield made
    made.end()


@pytest.fixture
def ear(inbox: ComputeInbox) -> Iterator[Ear]:
    made = Ear(inbox)
    yield made
    made.mouth.close()
    made.socket.close()


def test_calls_of_other_threads_run_in_order_and_wake_it(inbox: ComputeInbox) -> None:
    ran: list[tuple[int, int]] = []
    done = threading.Event()

    def serve() -> None:
        inbox.begin()
        while not done.is_set():
            inbox.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    for number in range(100):
        inbox.run(lambda number=number: ran.append((number, threading.get_ident())))
    inbox.run(done.set)
    thread.join(10)
    assert not thread.is_alive()
    assert ran == [(number, thread.ident) for number in range(100)]


def test_its_own_calls_run_at_once_or_in_the_next_turn(inbox: ComputeInbox) -> None:
    inbox.begin()
    ran: list[str] = []
    inbox.run(lambda: ran.append("now"))
    assert ran == ["now"]
    inbox.later(lambda: inbox.later(lambda: ran.append("after")))
    inbox.serve()
    assert ran == ["now"]
    inbox.serve()
    assert ran == ["now", "after"]


def test_a_socket_is_told_once_until_it_is_watched_again(inbox: ComputeInbox, ear: Ear) -> None:
    inbox.watch(ear, select.EPOLLIN)
    ear.mouth.send(b"x")
    inbox.serve()
    inbox.serve(0)
    assert ear.heard == 1
    inbox.watch(ear, select.EPOLLIN)
    inbox.serve()
    assert ear.heard == 2
    inbox.watch(ear, select.EPOLLIN)
    inbox.forget(ear)
    inbox.serve(0)
    assert ear.heard == 2


def test_what_waits_in_sockets_is_counted(inbox: ComputeInbox, ear: Ear) -> None:
    inbox.watch(ear, select.EPOLLIN)
    assert inbox.num_unread_sequences == 0
    ear.mouth.send(b"x")
    assert inbox.num_unread_sequences == 3
    inbox.serve()
    assert inbox.num_unread_sequences == 0


def test_what_came_during_a_computation_counts_from_its_beginning(
    inbox: ComputeInbox, ear: Ear
) -> None:
    inbox.watch(ear, select.EPOLLIN)
    inbox.serve(0)
    computing = time.monotonic()
    ear.mouth.send(b"x")
    inbox.serve()
    assert inbox.arrived_at <= computing
    inbox.serve(0)
    assert inbox.arrived_at > computing


def test_waiting_ends_with_its_time(inbox: ComputeInbox) -> None:
    inbox.begin()
    for timeout_s in (0, 1e-4):
        inbox.serve(timeout_s)


def test_nothing_is_lost_at_the_end(ear: Ear) -> None:
    inbox, ran = ComputeInbox(), list[str]()
    inbox.watch(ear, select.EPOLLIN)
    inbox.run(lambda: ran.append("waited"))
    num_open = len(os.listdir("/proc/self/fd"))
    inbox.end()
    assert ran == ["waited"]
    inbox.run(lambda: ran.append("after"))
    assert ran == ["waited", "after"]
    inbox.watch(ear, select.EPOLLIN)
    inbox.forget(ear)
    assert len(os.listdir("/proc/self/fd")) == num_open - 2
