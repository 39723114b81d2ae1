"""The messages of one decode worker on a socket."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from functools import partial

from draft_service.compute_inbox import ComputeInbox
from draft_service.step_answer import Outcome
from kvbraid.errors import KVBraidError, UnavailableError
from kvbraid.transport.draft_answers import AnsweredStep
from kvbraid.transport.outgoing_bytes import OutgoingBytes
from kvbraid.transport.socket_frames import Frame, ReceivedFrames, frame_of
from kvbraid.transport.step_socket import StepSocket

# None: a message that has no answer has been dealt with.
OnOver = Callable[[Outcome | None], object]
TakeFrame = Callable[[Frame, OnOver], None]

# Of a message, for everything but its rows: names of ended sequences at most.
_MAX_OVERHEAD_BYTES = 2 << 20


class SocketConnection:
    """Requests in order, one at a time: the next one is taken once the one before is over and its
    answer written. What a worker sends or leaves unread meanwhile waits in the kernel, bounded.

    take: gets each frame in the compute thread, whose rows it must copy, and what to call, from any
    thread, when it is over; what it raises ends the connection. encode: makes the message of an
    answer. on_failure: called once, in the compute thread, with why the connection has ended by
    itself.

    `begin` and `end` are for any thread, everything else is the compute thread's own.
    """

    def __init__(
        self,
        connection: StepSocket,
        inbox: ComputeInbox,
        *,
        max_rows_bytes: int,
        take: TakeFrame,
        encode: Callable[[AnsweredStep], bytes],
        on_failure: Callable[[KVBraidError], object],
    ) -> None:
        self.num_sequences = 1
        self._socket = connection
        self._inbox = inbox
        self._frames = ReceivedFrames(max_rows_bytes + _MAX_OVERHEAD_BYTES)
        self._take = take
        self._encode = encode
        self._on_failure = on_failure
        self._unsent = OutgoingBytes()
        self._is_busy = False
        self._is_closed = False
        # The descriptor must not be another socket's when `end` shuts it down.
        self._closing = threading.Lock()

    # Any thread

    def begin(self) -> None:
        """Take messages."""
        self._inbox.run(self._go_on)

    def end(self) -> None:
        """Nothing is taken or sent any more: the peer is told at once, whatever the compute thread
        does. Harmless when repeated."""
        with self._closing, contextlib.suppress(OSError):
            if not self._is_closed:
                self._socket.shutdown(socket.SHUT_RDWR)
        self._inbox.run(self._close)

    # Compute thread

    def fileno(self) -> int:
        """See Watched."""
        return self._socket.fileno()

    def on_ready(self) -> None:
        """See Watched."""
        try:
            if self._unsent:
                self._unsent.write(self._socket)
            else:
                self._read()
            self._go_on()
        except OSError as error:
            self._fail(UnavailableError(f"socket: {error}"))
        except KVBraidError as error:
            self._fail(error)

    def _read(self) -> None:
        try:
            if not self._frames.receive(self._socket):
                raise UnavailableError("the worker ended its socket")
        except BlockingIOError:
            pass  # on_ready goes on

    def _go_on(self) -> None:
        """Take what is here; wait for what comes."""
        if self._is_busy or self._is_closed:
            return
        try:
            if not self._unsent and self._take_next():
                return
        except KVBraidError as error:
            self._fail(error)
            return
        self._inbox.watch(self, select.EPOLLOUT if self._unsent else select.EPOLLIN)

    def _take_next(self) -> bool:
        frame = next(iter(self._frames), None)
        if frame is None:
            return False
        self._is_busy = True
        self._take(frame, lambda outcome: self._inbox.run(partial(self._over, outcome)))
        return True

    def _over(self, outcome: Outcome | None) -> None:
        """The message that was taken last needs nothing more."""
        if self._is_closed:
            return
        self._is_busy = False
        try:
            if isinstance(outcome, KVBraidError):
                raise outcome
            if outcome is not None:
                self.num_sequences = len(outcome.answers)
                self._unsent.add(frame_of(self._encode(outcome)))
                self._unsent.write(self._socket)  # on_ready goes on
        except OSError as error:
            self._fail(UnavailableError(f"socket: {error}"))
        except KVBraidError as error:
            self._fail(error)
        # Not here: others of the same batch wait for their answers.
        self._inbox.later(self._go_on)

    def _fail(self, error: KVBraidError) -> None:
        if not self._is_closed:
            self._close()
            self._on_failure(error)

    def _close(self) -> None:
        if self._is_closed:
            return
        self._inbox.forget(self)
        with self._closing:
            self._is_closed = True
            self._socket.close()
