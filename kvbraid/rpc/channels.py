"""Channels to other processes: one an address, kept warm, quick to notice a frozen peer.

async with ChannelPool(settings.server) as pool:
    stub = DecodeServiceStub(pool.channel("127.0.0.1:50053"))
    with translated_rpc_errors("127.0.0.1:50053"):
        await stub.Abort(request, timeout=2)          # every call has a timeout
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import grpc

from kvbraid.rpc.tls import Caller
from kvbraid.settings import ServerSettings

# Bytes of a stream that may be on their way to a reader: some twenty messages of a token.
_WINDOW_BYTES = 512


def channel_options(settings: ServerSettings) -> list[tuple[str, int | str]]:
    """Client options. A frozen peer is found after keepalive + keepalive timeout (about 2 s).

    ping_timeout_ms must be set as well: left alone it is 60 s and overrules the keepalive timeout.
    """
    return [
        ("grpc.keepalive_time_ms", round(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.http2.ping_timeout_ms", round(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        # A restarted worker is back in a moment; the defaults back off for up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # http_proxy and https_proxy are for the world outside; gRPC would take them for 127.0.0.1.
        ("grpc.enable_http_proxy", 0),
        # A retry must get a new attempt number, so only the coordinator may make one.
        ("grpc.enable_retries", 0),
        # Pools of one process must not share a connection: one's load would delay another's pings.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def token_stream_options() -> list[tuple[str, int]]:
    """More client options, for whoever reads streams of tokens.

    A worker sends tokens that wait as one message. With the window of gRPC, 64 KiB and growing,
    they would wait as thousands of messages on this side instead, and each has to be read. A
    message longer than the window arrives too, it takes a round trip more.
    """
    return [("grpc.http2.lookahead_bytes", _WINDOW_BYTES), ("grpc.http2.bdp_probe", 0)]


class ChannelPool:
    """One channel an address, over TLS as `settings.tls` says. Not thread-safe: use it from the
    loop that made it."""

    def __init__(self, settings: ServerSettings, options: Sequence[tuple[str, int]] = ()) -> None:
        """options: of gRPC, beside those of every client. Raises ConfigError for certificates that
        cannot be used."""
        self._options = [*channel_options(settings), *options]
        self._caller = Caller(settings.tls)
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` (host:port), made on first use. The pool closes it."""
        if address not in self._channels:
            self._channels[address] = self._caller.open(address, self._options)
        return self._channels[address]

    async def forget(self, address: str) -> None:
        """Close the channel to `address`, ending its calls; a later one starts afresh."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Close every channel, ending their calls."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
