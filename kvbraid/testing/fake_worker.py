"""What the fake workers share: a real gRPC server, an identity, a script of faults."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc

from kvbraid.kv.prefix_cache import HASH_BLOCK_TOKENS, block_hashes
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings, TlsSettings
from kvbraid.telemetry.metrics import WorkerMetrics
from kvbraid.testing.lossy_proxy import LossyProxy
from kvbraid.testing.toy_model import ToyModel
from kvbraid.v1 import info_pb2, info_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

DIGEST = "toy"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong once, in the first call that reaches `stage`.

    act: may raise a KVBraidError, wait for ever, or cut the network. after: for stage "token", how
    many tokens the call has sent before.
    """

    stage: str
    act: Callable[[], Awaitable[object]]
    after: int = 0


class FakeWorker(info_pb2_grpc.InfoServiceServicer):
    """A worker process without a model, behind a LossyProxy. A context manager that serves."""

    role = ""

    def __init__(self, model: ToyModel, *, tls: TlsSettings | None = None, **info: Any) -> None:
        """tls: None: plaintext. info: fields of InfoResponse that differ from the defaults here."""
        self.model = model
        self._tls = tls or TlsSettings()
        self.faults: deque[Fault] = deque()
        self.active: set[tuple[str, int, int]] = set()
        self.num_calls = 0
        self.info = info_pb2.InfoResponse(
            role=self.role,
            incarnation=secrets.randbits(64),
            model="toy",
            model_digest=DIGEST,
            max_model_len=model.max_model_len,
            num_pool_tokens=16 * model.max_model_len,
            num_free_tokens=16 * model.max_model_len,
            max_num_seqs=16,
        )
        self.info.MergeFrom(info_pb2.InfoResponse(**info))
        self._cached: set[bytes] = set()

    async def __aenter__(self) -> Self:
        settings = ServerSettings(drain_seconds=5.0, tls=self._tls)
        self.server = RpcServer(
            role=self.role, settings=settings, metrics=WorkerMetrics(self.role).rpc
        )
        self._add_services(self.server)
        await self.server.start()
        await self.server.set_serving(True)
        self.proxy = LossyProxy(self.server.address)
        await self.proxy.restore()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.proxy.cut()
        await self.server.stop()

    @property
    def address(self) -> str:
        """host:port for the coordinator."""
        return self.proxy.address

    async def die(self) -> None:
        """Vanish from the network at once; `come_back` makes it another process."""
        await self.proxy.cut()

    async def come_back(self) -> None:
        """Serve again on the same address, as a new process that knows nothing."""
        self.info.incarnation = secrets.randbits(64)
        self._cached.clear()
        await self.proxy.restore()

    async def restart(self) -> None:
        """Die and come back at once; may be called from a fault in the worker's own call."""
        # A task of its own: the death cancels the call, which must not cancel the coming back.
        self._restart = asyncio.create_task(self._die_and_come_back())
        await asyncio.shield(self._restart)

    async def _die_and_come_back(self) -> None:
        await self.die()
        await self.come_back()

    async def Info(self, request: info_pb2.InfoRequest, context: Context) -> info_pb2.InfoResponse:
        """See info.proto."""
        return self.info

    async def reach(self, stage: str, num_tokens: int = 0) -> None:
        """Lets the next fault of the script happen if it is its turn."""
        fault = self.faults[0] if self.faults else None
        if fault is not None and fault.stage == stage and fault.after == num_tokens:
            self.faults.popleft()
            await fault.act()

    def take_cached(self, token_ids: Sequence[int], cache_salt: str) -> int:
        """Leading tokens that an earlier prompt had; from now on all of these are cached."""
        hashes = block_hashes(token_ids, model_digest=DIGEST, cache_salt=cache_salt)
        known = next((i for i, h in enumerate(hashes) if h not in self._cached), len(hashes))
        self._cached.update(hashes)
        return min(known * HASH_BLOCK_TOKENS, len(token_ids) - 1)

    def _add_services(self, server: RpcServer) -> None:
        server.add(info_pb2_grpc.add_InfoServiceServicer_to_server, self, "kvbraid.v1.InfoService")
