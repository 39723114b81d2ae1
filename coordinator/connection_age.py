"""Limits how long HTTP clients keep a connection, as gRPC does it on the port beside.

A connection that has reached its age, or any while the server drains, is closed behind the answer
to its next request, which says so: no answer is cut, however long it is.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from aiohttp import web

# gRPC's own: connections made together are not closed together.
_JITTER = 0.1


class ConnectionAge:
    """Of all connections of one server, each counted from its first answer."""

    def __init__(self, max_age_s: float, *, is_leaving: Callable[[], bool]) -> None:
        """max_age_s: up to a tenth more or less; above 0. is_leaving: whether clients should go
        elsewhere whatever the age."""
        self._max_age_s = max_age_s
        self._is_leaving = is_leaving
        # By the task in which aiohttp answers all requests of a connection: a transport can be
        # the key only with asyncio's own loop.
        self._ends_s: WeakKeyDictionary[asyncio.Task[None], float] = WeakKeyDictionary()

    def limit(self, app: web.Application) -> None:
        """Of the connections that `app`, which does not run yet, will answer on."""
        app.on_response_prepare.append(self._close_if_old)

    async def _close_if_old(self, request: web.Request, response: web.StreamResponse) -> None:
        now_s = time.monotonic()
        age_s = self._max_age_s * random.uniform(1 - _JITTER, 1 + _JITTER)
        is_old = now_s >= self._ends_s.setdefault(request.task, now_s + age_s)
        if is_old or self._is_leaving():
            response.headers["Connection"] = "close"
            response.force_close()
