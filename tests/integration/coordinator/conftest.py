"""A real coordinator over fake workers, all on loopback sockets of this process."""

from __future__ import annotations

import asyncio
import functools
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio

from coordinator.config import (
    ApiSettings,
    ConnectionSettings,
    CoordinatorConfig,
    RoutingSettings,
)
from coordinator.registry import Pool
from coordinator.server import CoordinatorServer
from kvbraid.request import SamplingParams
from kvbraid.settings import ServerSettings
from kvbraid.testing import FakeCluster
from kvbraid.tokenizer import Tokenizer, load_tokenizer
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc
from kvbraid.wire import sampling_to_proto

MODEL = Path(__file__).parents[2] / "assets" / "tiny-mla"
PROMPT = tuple(range(100, 140))
TIMEOUT_S = 10.0


@dataclass
class Answer:
    """What came back over gRPC."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    last: dict[int, coordinator_pb2.GenerateResponse] = field(default_factory=dict)

    def add(self, response: coordinator_pb2.GenerateResponse) -> None:
        self.tokens.setdefault(response.index, []).extend(response.chunk.token_ids)
        self.texts[response.index] = self.texts.get(response.index, "") + response.text
        self.last[response.index] = response


@dataclass
class Stack:
    """The running system and its clients."""

    cluster: FakeCluster
    server: CoordinatorServer
    tokenizer: Tokenizer
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub
    channel: grpc.aio.Channel
    http: aiohttp.ClientSession

    def expected(
        self, prompt: Sequence[int] = PROMPT, index: int = 0, **sampling: Any
    ) -> list[int]:
        """Tokens of an undisturbed generation."""
        return self.cluster.model.generate(prompt, params(**sampling), index)

    def call(
        self, prompt: Sequence[int] = PROMPT, *, timeout_s: float = TIMEOUT_S, **sampling: Any
    ) -> Any:
        """A running Generate call."""
        request = coordinator_pb2.GenerateRequest(
            prompt_ids=coordinator_pb2.TokenIds(ids=prompt),
            sampling=sampling_to_proto(params(**sampling)),
        )
        return self.stub.Generate(request, timeout=timeout_s)

    async def generate(
        self, prompt: Sequence[int] = PROMPT, *, timeout_s: float = TIMEOUT_S, **sampling: Any
    ) -> Answer:
        """A whole Generate call."""
        answer = Answer()
        async for response in self.call(prompt, timeout_s=timeout_s, **sampling):
            answer.add(response)
        return answer

    async def post(self, path: str, body: Any) -> tuple[int, Any, Any]:
        """Status, parsed body and headers of a POST."""
        raw = body.encode() if isinstance(body, str) else body
        kind = {"data": io.BytesIO(raw)} if isinstance(raw, bytes) else {"json": body}
        async with self.http.post(path, **kind) as response:
            return response.status, await response.json(), response.headers

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        return sum(
            sample.value
            for family in self.server.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def is_idle(self) -> None:
        """Returns once no worker holds anything of any request, nor is promised to."""
        async with asyncio.timeout(5):
            while not self._holds_nothing():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def _holds_nothing(self) -> bool:
        workers = (*self.cluster.prefill, *self.cluster.decode)
        known = [worker for pool in Pool for worker in self.server.registry.workers(pool)]
        promised = sum(worker.num_in_flight + worker.num_reserved_tokens for worker in known)
        return not (any(worker.active for worker in workers) or promised or self.server.num_running)


def params(**sampling: Any) -> SamplingParams:
    """Greedy and 24 tokens long unless the test says otherwise."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **sampling})


StartStack = Callable[..., Awaitable[Stack]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


async def open_stack(
    exits: AsyncExitStack,
    tokenizer: Tokenizer,
    cluster: FakeCluster | None = None,
    api: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    connections: dict[str, Any] | None = None,
    **routing: Any,
) -> Stack:
    """A coordinator over `cluster` (one worker of each kind), closed by `exits`."""
    running = await exits.enter_async_context(cluster or FakeCluster())
    config = CoordinatorConfig(
        server=ServerSettings(**(server or {"drain_seconds": 5.0})),
        api=ApiSettings(**(api or {})),
        connections=ConnectionSettings(**(connections or {})),
        routing=RoutingSettings(
            **{
                "prefill_workers": running.prefill_workers,
                "decode_workers": running.decode_workers,
                "poll_seconds": 0.1,
                **routing,
            }
        ),
    )
    coordinator = CoordinatorServer(config, tokenizer)
    await coordinator.start()
    exits.push_async_callback(coordinator.stop)
    await coordinator.wait_serving()
    channel = await exits.enter_async_context(grpc.aio.insecure_channel(coordinator.address))
    http = await exits.enter_async_context(
        aiohttp.ClientSession(f"http://{coordinator.http_address}")
    )
    stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    return Stack(running, coordinator, tokenizer, stub, channel, http)


@pytest.fixture
async def start_stack(tokenizer: Tokenizer) -> AsyncIterator[StartStack]:
    """`open_stack` for this test; the keyword arguments are its own."""
    async with AsyncExitStack() as exits:
        yield functools.partial(open_stack, exits, tokenizer)


@pytest.fixture
async def stack(start_stack: StartStack) -> Stack:
    """One prefill and one decode worker."""
    return await start_stack()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stack(tokenizer: Tokenizer) -> AsyncIterator[Stack]:
    """Like `stack`, for all tests of a module that runs in one event loop."""
    async with AsyncExitStack() as exits:
        yield await open_stack(exits, tokenizer)
