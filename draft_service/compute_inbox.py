"""What the compute thread waits for: calls that other threads hand it, and sockets.

inbox.run(call)                   # any thread: `call` runs in the compute thread
inbox.watch(socket, EPOLLIN)      # compute thread: socket.on_ready() when it can be read
inbox.serve()                     # compute thread: wait, then run what has come

One thread for both, so that a step that comes over a socket wakes no other thread before it is
answered. It also keeps the rule simple: what `run` and `on_ready` reach is the compute thread's
own, and needs no locks.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

Call = Callable[[], object]


class Watched(Protocol):
    """A socket that the compute thread reads and writes."""

    num_sequences: int
    """About so many wait for the thread while the socket can be read."""

    def fileno(self) -> int:
        """Its descriptor, the same until `ComputeInbox.forget`."""
        ...

    def on_ready(self) -> None:
        """It can be read or written, or has failed. Never raises."""
        ...


class ComputeInbox:
    """See the module. Made at start-up, by whichever thread; `serve` is the compute thread's."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._posting = threading.Lock()
        self._has_ended = False
        self._thread: int | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._watched: dict[int, Watched] = {}
        self._registered: set[int] = set()
        self._looked_at = time.monotonic()
        # What `on_ready` reads came no earlier than this.
        self.arrived_at = self._looked_at

    # Any thread

    def run(self, call: Call) -> None:
        """Run `call` in the compute thread: now, when this is it, else soon and in order. Once
        that thread has ended, its things are nobody's, and `call` runs here."""
        if threading.get_ident() == self._thread:
            call()
            return
        with self._posting:
            if not self._has_ended:
                self._calls.append(call)
                os.eventfd_write(self._wake, 1)
                return
        call()

    @property
    def num_unread_sequences(self) -> int:
        """About how many wait in sockets because the thread computes."""
        watched = dict(self._watched)
        poll = select.poll()
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        return sum(
            watched[descriptor].num_sequences
            for descriptor, event in poll.poll(0)
            if event & select.POLLIN
        )

    # Compute thread

    def begin(self) -> None:
        """This is the compute thread."""
        self._thread = threading.get_ident()

    def later(self, call: Call) -> None:
        """Run `call` in the next `serve`."""
        self._calls.append(call)

    def watch(self, watched: Watched, events: int) -> None:
        """Call `on_ready` once, after one of `events` (of select.epoll) or the socket's end."""
        if self._has_ended:
            return
        descriptor = watched.fileno()
        self._watched[descriptor] = watched
        if descriptor in self._registered:
            self._epoll.modify(descriptor, events | select.EPOLLONESHOT)
        else:
            self._registered.add(descriptor)
            self._epoll.register(descriptor, events | select.EPOLLONESHOT)

    def forget(self, watched: Watched) -> None:
        """It is about to be closed."""
        descriptor = watched.fileno()
        self._watched.pop(descriptor, None)
        if descriptor in self._registered:
            self._registered.remove(descriptor)
            self._epoll.unregister(descriptor)

    def serve(self, timeout_s: float | None = None) -> None:
        """Run what has come; when nothing has, wait for it, None: as long as it takes."""
        ready = self._epoll.poll(0)
        self.arrived_at = self._looked_at
        if not ready and not self._calls:
            ready = self._wait(timeout_s)
            self.arrived_at = time.monotonic()
        self._looked_at = time.monotonic()
        for descriptor, _ in ready:
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif (watched := self._watched.pop(descriptor, None)) is not None:
                watched.on_ready()
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def end(self) -> None:
        """The thread ends: run what waits; nothing is watched any more."""
        with self._posting:
            self._has_ended = True
        while self._calls:
            self._calls.popleft()()
        self._watched.clear()
        self._registered.clear()
        self._epoll.close()
        os.close(self._wake)

    def _wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        if timeout_s is None:
            return self._epoll.poll()
        # epoll waits for whole milliseconds, select for microseconds. It takes descriptors below
        # 1024 only: this one was made at start-up.
        select.select([self._epoll], [], [], timeout_s)
        return self._epoll.poll(0)
