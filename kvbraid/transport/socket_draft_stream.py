"""DraftStream over a socket that the engine's thread itself writes and reads.

No event loop is between the engine and the kernel. The gRPC call that the handshake was made on
stays open beside it: it brings the goodbye and says when the service is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from kvbraid.errors import DataLossError, KVBraidError, UnavailableError
from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_rows import FollowingRows, RowCarrier, row_carrier
from kvbraid.transport.draft_socket import DraftSocket
from kvbraid.transport.draft_step import fill_step
from kvbraid.transport.draft_stream import SentStep, UnansweredSteps, open_request
from kvbraid.transport.grpc_draft_stream import GrpcDraftStream
from kvbraid.transport.outgoing_bytes import OutgoingBytes
from kvbraid.transport.shared_rows import SharedRows
from kvbraid.transport.socket_frames import ReceivedFrames, frame_of
from kvbraid.v1 import draft_pb2 as pb

_MAX_ANSWERS_BYTES = 4 << 20
# Behind a message that the socket has no room for. The engine sends one step at a time, and what
# else it sends is small: a service that takes none of it is as good as gone.
_MAX_UNSENT_BYTES = 1 << 20


class SocketDraftStream:
    """See DraftStream. control: the open call, whose `run` and `close` are this one's from now on.
    connected: to the service, accepted.

    Whoever waits for an answer reads the socket, and resolves every step whose answer comes
    meanwhile. Nobody waits for room: the event loop sends what the socket does not take at once.
    """

    def __init__(self, control: GrpcDraftStream, connected: DraftSocket) -> None:
        self.terms = control.terms
        self.wire = connected.wire
        self._control = control
        self._socket = connected.connection
        row_format, memory = self.terms.row_format, connected.memory
        self._inline = row_carrier(row_format)
        self._shared = None if memory is None else SharedRows(row_format, memory)
        self._following = FollowingRows(row_format)
        self._memory_user: SentStep | None = None
        self._unanswered = UnansweredSteps(control.address)
        self._frames = ReceivedFrames(_MAX_ANSWERS_BYTES)
        self._unsent = OutgoingBytes()
        self._num_behind = 0
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
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
            self._send(request, self._following.to_follow if carrier is self._following else ())
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
            if self._socket.fileno() >= 0:
                self._loop.remove_writer(self._socket.fileno())
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
        if self._shared is None:
            return self._following
        if step is None or not (self._memory_user is None or self._memory_user.is_done):
            return self._inline
        self._memory_user = step
        return self._shared

    def _send(self, request: pb.DraftRequest, rows: Sequence[memoryview] = ()) -> None:
        if self._is_closed:
            self._unanswered.end()
            return
        frame, was_idle = frame_of(request.SerializeToString(), rows), not self._unsent
        self._num_behind = 0 if was_idle else self._num_behind + len(frame) + sum(map(len, rows))
        self._unsent.add(frame, *rows)
        self._write()
        self._unsent.keep()
        if self._num_behind > _MAX_UNSENT_BYTES:
            self._break(UnavailableError(f"{self._control.address} does not read its {self.wire}"))
        elif was_idle and self._unsent:
            self._in_loop(self._send_rest)

    def _write(self) -> None:
        """As much as there is room for. With `_sending`."""
        try:
            self._unsent.write(self._socket)
        except OSError as error:
            self._unsent.clear()
            self._break(self._failed(error))

    def _send_rest(self) -> None:
        with self._sending:
            if (descriptor := self._socket.fileno()) < 0:
                return
            if not self._is_closed:
                self._write()
            if self._unsent and not self._is_closed:
                self._loop.add_writer(descriptor, self._send_rest)
            else:
                self._loop.remove_writer(descriptor)

    def _receive(self) -> None:
        try:
            if not self._frames.receive(self._socket):
                raise ConnectionResetError("ended by the service")
            for frame in self._frames:
                self._take(pb.DraftResponse.FromString(frame.message))
        except BlockingIOError:
            return
        except OSError as error:
            self._break(self._failed(error))
        except DecodeError as error:
            self._break(DataLossError(f"{self._control.address}: {self.wire}: {error}"))
        except DataLossError as error:
            self._break(error)

    def _failed(self, error: OSError) -> UnavailableError:
        return UnavailableError(f"{self._control.address}: {self.wire}: {error}")

    def _take(self, response: pb.DraftResponse) -> None:
        content = response.WhichOneof("content")
        if content != "answers":
            raise DataLossError(f"{self._control.address} sent {content} by {self.wire}")
        self._unanswered.take(response.answers)

    def _break(self, error: KVBraidError) -> None:
        self._end()
        self._in_loop(self._tell_broken, error)

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody runs the stream
            self._loop.call_soon_threadsafe(call, *arguments)

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

    def __init__(self, num_tasks: int, stream: SocketDraftStream) -> None:
        super().__init__(num_tasks)
        self._stream = stream

    def wait(self, seconds: float) -> bool:
        """See SentStep."""
        return self.is_done or self._stream.receive_until_done(self, seconds)
