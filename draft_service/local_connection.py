"""The messages of one decode worker on a Unix-domain socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

from kvbraid.errors import KVBraidError, UnavailableError
from kvbraid.transport.draft_answers import AnsweredStep
from kvbraid.transport.local_socket import ReceivedFrames, frame_of

TakeMessage = Callable[[bytes, Callable[[AnsweredStep], None]], asyncio.Future[AnsweredStep] | None]

_RECEIVE_BYTES = 256 << 10
# Of a message, for everything but its rows: names of ended sequences at most.
_MAX_OVERHEAD_BYTES = 2 << 20


class LocalConnection:
    """The messages of one worker: requests in order, answers from whichever thread has them.

    take: gets each message and what sends the answer to it, from any thread; returns the future of
    that answer, None for messages without; what it raises ends the connection. encode: makes the
    message of an answer, in any thread. failure: resolves with why the connection has ended.
    """

    def __init__(
        self,
        connection: socket.socket,
        max_rows_bytes: int,
        take: TakeMessage,
        encode: Callable[[AnsweredStep], bytes],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[KVBraidError] = self._loop.create_future()
        self._socket = connection
        self._frames = ReceivedFrames(max_rows_bytes + _MAX_OVERHEAD_BYTES)
        self._take = take
        self._encode = encode
        self._writing = threading.Lock()
        self._is_closed = False
        self._reply: _Reply | None = None
        self._is_paused = False
        self._loop.add_reader(connection, self._receive)

    def close(self) -> None:
        """Nothing is taken or sent any more. Harmless when repeated."""
        with self._writing:
            if self._is_closed:
                return
            self._is_closed = True
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def send(self, answered: AnsweredStep) -> None:
        """Write an answer; from any thread, and without waiting: a worker that leaves no room for
        it does not read. Raises UnavailableError when it cannot be written."""
        frame = frame_of(self._encode(answered))
        with self._writing:
            try:
                if self._is_closed or self._socket.send(frame) != len(frame):
                    raise UnavailableError("the worker does not read its answers")
            except OSError as error:
                raise UnavailableError(f"local socket: {error}") from error

    def _receive(self) -> None:
        if self._is_waiting:
            # No more of it until the answer is there: what waits is in the kernel, and bounded.
            self._is_paused = True
            self._loop.remove_reader(self._socket)
            return
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(UnavailableError(f"local socket: {error}"))
            return
        if not data:
            self._fail(UnavailableError("the worker ended its local socket"))
            return
        self._frames.feed(data)
        self._take_requests()

    @property
    def _is_waiting(self) -> bool:
        """Whether a step has not been answered; the next one waits until then."""
        return self._reply is not None and not self._reply.is_over

    def _take_requests(self) -> None:
        try:
            while not self._is_closed and not self._is_waiting:
                frame = next(iter(self._frames), None)
                if frame is None:
                    return
                reply = _Reply(self)
                answer = self._take(frame, reply.send)
                if answer is not None:
                    self._reply = reply
                    answer.add_done_callback(reply.settle)
        except KVBraidError as error:
            self._fail(error)

    def resume(self, error: KVBraidError | None) -> None:
        """A step is over; `error` tells why there was no answer."""
        if self._is_closed:
            return
        if error is not None:
            self._fail(error)
            return
        self._take_requests()
        if self._is_paused and not self._is_closed:
            self._is_paused = False
            self._loop.add_reader(self._socket, self._receive)

    def _fail(self, error: KVBraidError) -> None:
        self.close()
        if not self.failure.done():
            self.failure.set_result(error)


class _Reply:
    """The answer to one step: sent at once by the thread that has computed it, or by the event
    loop where it was known already."""

    def __init__(self, connection: LocalConnection) -> None:
        self.is_over = False
        self._connection = connection
        self._error: KVBraidError | None = None

    def send(self, answered: AnsweredStep) -> None:
        """Never fails: the event loop hears of it."""
        try:
            self._connection.send(answered)
        except KVBraidError as error:
            self._error = error
        self.is_over = True

    def settle(self, answer: asyncio.Future[AnsweredStep]) -> None:
        """The event loop has the answer."""
        if not self.is_over and not answer.cancelled() and answer.exception() is None:
            self.send(answer.result())
        if not self.is_over:
            self.is_over = True
            error = None if answer.cancelled() else answer.exception()
            self._error = error if isinstance(error, KVBraidError) else UnavailableError("given up")
        self._connection.resume(self._error)
