"""Calls to other processes fail with our own errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from kvbraid.rpc.status import error_from_rpc


@contextmanager
def translated_rpc_errors(peer: str) -> Iterator[None]:
    """Inside the block a failed call to `peer` raises the KVBraidError it stands for.

        with translated_rpc_errors(address):
            async for event in stub.Decode(request, timeout=30):
                ...

    OverloadedError.retry_after_s is the peer's own. asyncio.CancelledError is left alone.
    """
    try:
        yield
    except grpc.aio.AioRpcError as failure:
        raise error_from_rpc(failure, peer) from failure
