"""How all tests run: property tests not against the clock, for a busy machine must not fail them;
coroutines on the event loop that services run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop
from hypothesis import settings

settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """See pytest-asyncio."""
    return {"uvloop": uvloop.new_event_loop}
