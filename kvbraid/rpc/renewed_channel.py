"""A channel whose next call may go over a new connection, made with newer credentials."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

Credentials = TypeVar("Credentials")


class RenewedChannel(grpc.aio.Channel, Generic[Credentials]):
    """A channel of gRPC keeps the credentials that it was made with. This one makes another when
    they have changed: calls that run stay where they are, new ones use it, and the old one is
    closed after its last call.

    Use it from the loop that made it.
    """

    def __init__(
        self,
        credentials: Callable[[], Credentials],
        make: Callable[[Credentials], grpc.aio.Channel],
    ) -> None:
        """credentials: those of now, the same object until they change. make: a channel with
        them."""
        self._credentials = credentials
        self._make = make
        self._used = credentials()
        self._newest = _CountedChannel(make(self._used))
        self._old: set[_CountedChannel] = set()

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._method("unary_unary", method, *arguments, **options)

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._method("unary_stream", method, *arguments, **options)

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._method("stream_unary", method, *arguments, **options)

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._method("stream_stream", method, *arguments, **options)

    def _method(self, kind: str, *arguments: Any, **options: Any) -> Any:
        """What starts calls; the method is bound again where the channel is another."""
        bound_to: _CountedChannel | None = None
        method: Any = None

        def start(*request: Any, **call_options: Any) -> Any:
            nonlocal bound_to, method
            counted = self._renewed()
            if counted is not bound_to:
                bound_to, method = counted, getattr(counted.channel, kind)(*arguments, **options)
            return counted.count(method(*request, **call_options))

        return start

    def _renewed(self) -> _CountedChannel:
        current = self._credentials()
        if current is not self._used:
            old, self._used = self._newest, current
            self._newest = _CountedChannel(self._make(current))
            self._old.add(old)
            old.close_when_idle(lambda: self._old.discard(old))
        return self._newest

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel; ends the calls of older connections too."""
        channels = [counted.channel for counted in (self._newest, *self._old)]
        self._old.clear()
        await asyncio.gather(*(channel.close(grace) for channel in channels))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self._renewed().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._renewed().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._renewed().channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


class _CountedChannel:
    """A channel and how many of its calls run."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._num_running = 0
        self._closed: Callable[[], None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def count(self, call: Any) -> Any:
        """`call`, which has begun; it counts until it ends, however it does."""
        self._num_running += 1
        call.add_done_callback(self._count_down)
        return call

    def close_when_idle(self, closed: Callable[[], None]) -> None:
        """Close after the last call, at once when none runs, and call `closed`."""
        self._closed = closed
        self._close_if_idle()

    def _count_down(self, _: object) -> None:
        self._num_running -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._closed is not None and self._num_running == 0 and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(self._closed))

    async def _close(self, closed: Callable[[], None]) -> None:
        await self.channel.close()
        closed()
