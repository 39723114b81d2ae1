"""Calls to other processes fail with our own errors."""

from __future__ import annotations

from types import TracebackType

import grpc

from kvbraid.rpc.status import error_from_rpc


class ErrorTranslation:
    """See translated_rpc_errors. It may be entered again, as for every message of a stream."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            raise error_from_rpc(error, self._peer) from error


def translated_rpc_errors(peer: str) -> ErrorTranslation:
    """Inside the block a failed call to `peer` raises the KVBraidError it stands for.

        with translated_rpc_errors(address):
            async for event in stub.Decode(request, timeout=30):
                ...

    OverloadedError.retry_after_s is the peer's own. asyncio.CancelledError is left alone.
    """
    return ErrorTranslation(peer)
