"""Rows that travel behind their message on a TCP socket."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbraid.settings import TlsSettings
from kvbraid.testing.certificates import CertificateAuthority


@pytest.mark.parametrize("is_plain", [True, False])
async def test_rows_behind_their_message_are_those_of_the_step(
    is_plain: bool,
    draft: Any,
    monkeypatch: pytest.MonkeyPatch,
    stack: AsyncExitStack,
    tmp_path: Path,
) -> None:
    """Also where they have no room at first, and their owner writes over them."""
    monkeypatch.setattr("kvbraid.transport.draft_rows._MIN_FOLLOWING_BYTES", 0)
    tls = TlsSettings() if is_plain else CertificateAuthority(tmp_path).mutual("everybody")
    service = await stack.enter_async_context(draft.service(tls=tls))
    target = await stack.enter_async_context(draft.target(service.address, wire="tcp", tls=tls))
    await target.connected()
    await target.step(draft.task("a", 0, [1, 2, 3]), draft.task("b", 0, [1], wanted=0))
    service.proposer.gate.clear()
    service.proposer.arrived.clear()
    stream = target.drafting._stream
    option = (socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    getattr(stream._socket, "_connection", stream._socket).setsockopt(*option)
    stream.begin_step([draft.task("c", 0, [1])], ())
    await asyncio.to_thread(service.proposer.arrived.wait, 10)
    task = draft.task("a", 3, [4, 5])
    large = stream.begin_step([task], [f"{i:0200}" for i in range(4096)])
    assert stream._unsent
    task.rows.fill_(-1.0)
    service.proposer.gate.set()
    assert await asyncio.to_thread(large.wait, 20)
    rows = {key[-1]: rows for key, rows in service.proposer.rows.items()}
    torch.testing.assert_close(rows["a"], draft.rows(0, 5))
    torch.testing.assert_close(rows["b"], draft.rows(0, 1))
