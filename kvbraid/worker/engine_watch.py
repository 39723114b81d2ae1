"""Notices an engine that has been in one step for too long: a rank that hangs, a stuck collective.

Heartbeats see processes that are dead or frozen; this sees one that lives and gets nowhere. The
worker then takes no new requests, its running ones fail so that they go on elsewhere, and its
health says that it is not live, so that whoever started it may restart it. Should the step end
after all, everything is as before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvbraid.errors import KVBraidError, UnavailableError
from kvbraid.rpc.server import RpcServer

logger = logging.getLogger(__name__)

# How often a step is looked at, as a part of how long it may take, and at most.
_LOOKS_PER_TIMEOUT = 8
_MAX_PAUSE_S = 1.0


class EngineWatch:
    """Follows the age of the engine's step and says on `server` what it means."""

    def __init__(
        self,
        server: RpcServer,
        *,
        step_age_s: Callable[[], float],
        give_up: Callable[[KVBraidError], None],
        stack: Callable[[], str],
        timeout_s: float,
    ) -> None:
        """step_age_s: seconds in the current step, 0 without one. give_up: ends running requests
        with an error. stack: where the engine is, for the log. timeout_s: longest step."""
        self._server = server
        self._step_age_s = step_age_s
        self._give_up = give_up
        self._stack = stack
        self._timeout_s = timeout_s
        self._is_stuck = False

    async def run(self) -> None:
        """Watch until cancelled. To be started once the worker serves."""
        pause_s = min(_MAX_PAUSE_S, self._timeout_s / _LOOKS_PER_TIMEOUT)
        while True:
            await asyncio.sleep(pause_s)
            await self._look()

    async def _look(self) -> None:
        age_s = self._step_age_s()
        is_stuck = age_s > self._timeout_s
        if is_stuck != self._is_stuck:
            self._is_stuck = is_stuck
            if is_stuck:
                logger.error(
                    "the engine is stuck: %.1f s in one step, accepted: at most %g",
                    age_s, self._timeout_s, extra={"stack": self._stack()},
                )  # fmt: skip
            else:
                logger.warning("the engine is no longer stuck")
            await self._server.set_serving(not is_stuck)
            await self._server.set_live(not is_stuck)
        if is_stuck:
            # In every look: a request may have come before its sender heard of it.
            self._give_up(UnavailableError(f"the engine has been in one step for {age_s:.1f} s"))
