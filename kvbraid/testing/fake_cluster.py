"""Some fake workers that know each other."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, Self

from kvbraid.settings import TlsSettings
from kvbraid.testing.fake_decode import FakeDecodeWorker
from kvbraid.testing.fake_prefill import FakePrefillWorker
from kvbraid.testing.handoffs import Handoffs
from kvbraid.testing.toy_model import ToyModel


class FakeCluster:
    """Fake prefill and decode workers on loopback ports; a context manager that serves."""

    def __init__(
        self,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        model: ToyModel | None = None,
        tls: TlsSettings | None = None,
        **info: Any,
    ) -> None:
        """tls: of every worker; None: plaintext. info: fields of every worker's InfoResponse that
        differ from the defaults."""
        self.model = model or ToyModel()
        handoffs = Handoffs()
        options = {"tls": tls, **info}
        self.prefill = [
            FakePrefillWorker(self.model, handoffs, **options) for _ in range(num_prefill)
        ]
        self.decode = [FakeDecodeWorker(self.model, handoffs, **options) for _ in range(num_decode)]
        self._stack = AsyncExitStack()

    @property
    def prefill_workers(self) -> list[str]:
        """Addresses for the coordinator's prefill_workers."""
        return [worker.address for worker in self.prefill]

    @property
    def decode_workers(self) -> list[str]:
        """Addresses for the coordinator's decode_workers."""
        return [worker.address for worker in self.decode]

    async def __aenter__(self) -> Self:
        for worker in (*self.prefill, *self.decode):
            await self._stack.enter_async_context(worker)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
