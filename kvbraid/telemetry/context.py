"""What a log record or a metric needs to know about the request in hand, per asyncio task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_request_id: ContextVar[str] = ContextVar("kvbraid_request_id", default="")


def current_request_id() -> str:
    """The id of the request that this task works for, empty outside of one."""
    return _request_id.get()


def bind_request_id(request_id: str) -> None:
    """Let the rest of this task work for `request_id`. A task of its own need not unbind it."""
    _request_id.set(request_id)


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Work for `request_id` inside the block."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)
