"""When a decode worker comes back to a draft service that it has lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvbraid.errors import UnavailableError
from kvbraid.settings import TlsSettings
from kvbraid.transport.draft_terms import DraftPeer
from kvbraid.worker import draft_link
from kvbraid.worker.draft_link import DraftLink

FIRST_S = 0.5


class Stream:
    wire = "grpc"

    def __init__(self, run: Any) -> None:
        self.run = run

    def close(self) -> None:
        pass


async def pauses_between(
    lasting_s: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Pauses after streams that open and last so long, the next one told once it is over."""
    now, left, pauses, is_over = [100.0], list(lasting_s), list[float](), asyncio.Event()

    async def lose() -> None:
        now[0] += left.pop(0)
        raise UnavailableError("gone")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if not left:
            is_over.set()
            await asyncio.Event().wait()

    async def opened(*_: object, **__: object) -> Stream:
        return Stream(lose)

    alike = SimpleNamespace(uniform=lambda low, high: 1.0)
    monkeypatch.setattr(draft_link, "random", alike)
    monkeypatch.setattr(draft_link, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(draft_link, "open_draft_stream", opened)
    link = DraftLink(
        address="host:1",
        peer=cast(DraftPeer, None),
        channels=lambda address: cast(Any, None),
        wire="grpc",
        tls=TlsSettings(),
        on_change=lambda stream: None,
        first_retry_s=FIRST_S,
    )
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        link.start()
        await is_over.wait()
        await link.stop()
    return pauses


async def test_streams_that_end_at_once_are_opened_less_and_less_often_and_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert await pauses_between([0.0] * 6, monkeypatch) == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert [record.getMessage() for record in caplog.records] == [
        "no drafts, decoding plainly: gone"
    ]


async def test_a_stream_that_has_lasted_is_opened_again_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert await pauses_between([0.0, 0.0, 60.0, 0.0], monkeypatch) == [0.5, 1.0, 0.5, 1.0]
    assert len(caplog.records) == 2
