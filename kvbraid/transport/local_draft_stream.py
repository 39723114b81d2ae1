"""DraftStream over a Unix-domain socket that the engine's thread itself writes and reads.

No event loop is between the engine and the kernel. The gRPC call that the handshake was made on
stays open beside it: it brings the goodbye and says when the service is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from kvbraid.errors import DataLossError, KVBraidError, UnavailableError
from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_rows import RowCarrier, row_carrier
from kvbraid.transport.draft_step import fill_step
from kvbraid.transport.draft_stream import SentStep, UnansweredSteps, open_request
from kvbraid.transport.draft_terms import DraftTerms, LocalSocketOffer
from kvbraid.transport.grpc_draft_stream import GrpcDraftStream
from kvbraid.transport.local_socket import (
    ACCEPTED,
    ReceivedFrames,
    abstract_address,
    check_same_user,
    frame_of,
)
from kvbraid.transport.shared_rows import RowMemory, SharedRows, memory_bytes, new_row_memory
from kvbraid.v1 import draft_pb2 as pb

_RECEIVE_BYTES = 64 << 10
_MAX_ANSWERS_BYTES = 4 << 20
# Longest wait for room in the socket. All that it has to hold is a step and some grants, so a
# service that leaves no room is as good as gone.
_SEND_S = 0.05


class LocalDraftStream:
    """See DraftStream. control: the open call, whose `run` and `close` are this one's from now on.
    connection: to the service, accepted. memory: shared with it.

    Whoever waits for an answer reads the socket, and resolves every step whose answer comes
    meanwhile.
    """

    wire = "local_socket"

    def __init__(
        self, control: GrpcDraftStream, connection: socket.socket, memory: RowMemory
    ) -> None:
        connection.setblocking(False)
        self.terms = control.terms
        self._control = control
        self._socket = connection
        self._inline = row_carrier(self.terms.row_format)
        self._shared = SharedRows(self.terms.row_format, memory)
        self._memory_user: SentStep | None = None
        self._unanswered = UnansweredSteps(control.address)
        self._frames = ReceivedFrames(_MAX_ANSWERS_BYTES)
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[KVBraidError] = self._loop.create_future()

    def begin_step(self, tasks: Sequence[DraftTask], dropped: Sequence[str]) -> SentStep:
        """See DraftStream."""
        step = _ReadStep(len(tasks), self)
        request = pb.DraftRequest()
        with self._sending:
            carrier = self._carrier(step if tasks else None)
            fill_step(request.step, tasks, dropped, epoch=self.terms.epoch, carrier=carrier)
            request.step.step_id = self._unanswered.add(step)
            self._send(request)
        return step

    def open_grant(self, key: str, transfer_id: bytes, end_position: int) -> None:
        """See DraftStream."""
        with self._sending:
            self._send(open_request(key, transfer_id, end_position))

    async def run(self) -> None:
        """See DraftStream."""
        control = self._loop.create_task(self._control.run())
        try:
            ends: set[asyncio.Future[Any]] = {control, self._broken}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            control.cancel()
            self.close()
            await asyncio.wait({control})
        if not control.cancelled():
            control.result()
        elif self._broken.done():
            raise self._broken.result()

    def close(self) -> None:
        """See DraftStream."""
        self._control.close()
        self._end()
        # Nobody waits on the socket any more: it was shut down.
        with self._reading, self._sending:
            self._socket.close()

    def receive_until_done(self, step: SentStep, seconds: float) -> bool:
        """See SentStep.wait."""
        give_up = time.monotonic() + seconds
        if not self._reading.acquire(timeout=seconds):
            return step.is_done
        try:
            while not step.is_done and not self._is_closed:
                left_ms = max(0.0, give_up - time.monotonic()) * 1e3
                if not self._readable.poll(left_ms):
                    return False
                self._receive()
        finally:
            self._reading.release()
        return step.is_done

    def _carrier(self, step: SentStep | None) -> RowCarrier:
        """The memory is the service's until it has answered the step that used it."""
        if step is None or not (self._memory_user is None or self._memory_user.is_done):
            return self._inline
        self._memory_user = step
        return self._shared

    def _send(self, request: pb.DraftRequest) -> None:
        if self._is_closed:
            self._unanswered.end()
            return
        left = memoryview(frame_of(request.SerializeToString()))
        try:
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    if not self._writable.poll(_SEND_S * 1e3):
                        raise TimeoutError(f"no room in the socket for {_SEND_S} s") from None
        except OSError as error:
            self._break(UnavailableError(f"{self._control.address}: local socket: {error}"))

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("ended by the service")
            self._frames.feed(data)
            for frame in self._frames:
                self._take(pb.DraftResponse.FromString(frame))
        except OSError as error:
            self._break(UnavailableError(f"{self._control.address}: local socket: {error}"))
        except DecodeError as error:
            self._break(DataLossError(f"{self._control.address}: local socket: {error}"))
        except DataLossError as error:
            self._break(error)

    def _take(self, response: pb.DraftResponse) -> None:
        content = response.WhichOneof("content")
        if content != "answers":
            raise DataLossError(f"{self._control.address} sent {content} over the local socket")
        self._unanswered.take(response.answers)

    def _break(self, error: KVBraidError) -> None:
        self._end()
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody runs the stream
            self._loop.call_soon_threadsafe(self._tell_broken, error)

    def _tell_broken(self, error: KVBraidError) -> None:
        if not self._broken.done():
            self._broken.set_result(error)

    def _end(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._unanswered.end()


class _ReadStep(SentStep):
    """Resolved by whoever reads the socket."""

    def __init__(self, num_tasks: int, stream: LocalDraftStream) -> None:
        super().__init__(num_tasks)
        self._stream = stream

    def wait(self, seconds: float) -> bool:
        """See SentStep."""
        return self.is_done or self._stream.receive_until_done(self, seconds)


def connect_local_socket(
    offer: LocalSocketOffer, terms: DraftTerms, *, timeout_s: float
) -> tuple[socket.socket, RowMemory]:
    """Connect to what a service offers and share memory for rows with it. Blocks.

    Raises UnavailableError when the socket is not there or not accepted, IncompatibleError when
    it is another user's.
    """
    num_bytes = memory_bytes(terms.row_format, terms.max_rows_per_message)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(abstract_address(offer.socket_name))
        check_same_user(connection)
        fd = new_row_memory(num_bytes)
        memory = RowMemory(os.dup(fd), num_bytes)
        try:
            socket.send_fds(connection, [offer.token], [fd])
        finally:
            os.close(fd)
        if connection.recv(len(ACCEPTED)) != ACCEPTED:
            raise UnavailableError(f"{offer.socket_name} did not accept this worker")
    except OSError as error:
        connection.close()
        raise UnavailableError(f"local socket {offer.socket_name}: {error}") from error
    except KVBraidError:
        connection.close()
        raise
    return connection, memory
