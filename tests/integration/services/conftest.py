"""Real services on loopback with tiny-mla: coordinator, prefill and striped decode workers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvbraid.cluster.local_cluster import SERVICE_COMMANDS, ClusterSpec, LocalCluster
from kvbraid.cluster.worker_spec import WorkerSpec
from kvbraid.rpc.tls import Caller
from kvbraid.settings import TlsSettings
from kvbraid.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    generation_pb2,
    info_pb2,
    info_pb2_grpc,
)

ASSETS = Path(__file__).parents[2] / "assets"
TINY_MLA = ASSETS / "tiny-mla"
SMALL = "kv_cache_tokens=4096,page_size=4,threads_per_rank=1,log_level=info"


@dataclass(frozen=True)
class Reference:
    """A prompt and its greedy continuation."""

    prompt_ids: list[int]
    output_ids: list[int]


@pytest.fixture(scope="session")
def references() -> dict[int, Reference]:
    lines = (ASSETS / "reference" / "tiny-mla-greedy.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["id"]: Reference(row["prompt_ids"], row["output_ids"]) for row in rows}


@contextmanager
def running_cluster(
    directory: Path,
    *,
    prefill: tuple[str, ...] = ("tp=1,dcp=1",),
    decode: tuple[str, ...] = ("tp=2,dcp=2",),
    coordinator: tuple[str, ...] = (),
    commands: Mapping[str, tuple[str, ...]] = SERVICE_COMMANDS,
    drafter: str = "",
    draft: tuple[str, ...] = (),
    everyone: tuple[str, ...] = (),
) -> Iterator[LocalCluster]:
    spec = ClusterSpec(
        model=str(TINY_MLA),
        prefill=tuple(WorkerSpec.parse("prefill", f"{text},{SMALL}") for text in prefill),
        decode=tuple(WorkerSpec.parse("decode", f"{text},{SMALL}") for text in decode),
        coordinator=("--local-prefill-max-tokens=0", "--poll-seconds=0.2", *coordinator),
        everyone=everyone,
        drain_seconds=5.0,
        commands=commands,
        drafter=drafter,
        draft=tuple(WorkerSpec.parse("draft", text) for text in draft),
    )
    with LocalCluster(spec, directory) as cluster:
        cluster.start(timeout_s=110)
        yield cluster


@pytest.fixture(scope="session")
def cluster_of() -> Callable[..., object]:
    """A context manager that starts a cluster: cluster_of(directory, prefill=..., decode=...)."""
    return running_cluster


class Client:
    """A gRPC client of one process."""

    def __init__(self, address: str, tls: TlsSettings | None = None) -> None:
        self._channel = Caller(tls or TlsSettings()).open(address, [])
        self.coordinator = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        self._info = info_pb2_grpc.InfoServiceStub(self._channel)

    async def __aenter__(self) -> Client:
        await self._channel.channel_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def start(
        self, prompt_ids: list[int], max_tokens: int, *, timeout: float = 60, **sampling: object
    ) -> grpc.aio.UnaryStreamCall:
        request = coordinator_pb2.GenerateRequest(
            prompt_ids=coordinator_pb2.TokenIds(ids=prompt_ids),
            sampling=generation_pb2.SamplingParams(
                **({"temperature": 0.0, "max_tokens": max_tokens} | sampling)
            ),
        )
        return self.coordinator.Generate(request, timeout=timeout)

    async def tokens(self, call: grpc.aio.UnaryStreamCall) -> AsyncIterator[int]:
        async for response in call:
            for token_id in response.chunk.token_ids:
                yield token_id

    async def all_tokens(self, prompt_ids: list[int], max_tokens: int, **options: object) -> list:
        return [t async for t in self.tokens(self.start(prompt_ids, max_tokens, **options))]

    async def info(self, *, with_rows: bool = False) -> info_pb2.InfoResponse:
        return await self._info.Info(info_pb2.InfoRequest(with_rows=with_rows), timeout=10)


async def eventually(is_so: Callable[[], object], seconds: float, what: str) -> None:
    """Returns once the (async) predicate holds; fails the test after `seconds`."""
    give_up = time.monotonic() + seconds
    while not await is_so():
        assert time.monotonic() < give_up, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)


async def free_of_leaks(addresses: list[str], seconds: float = 10.0) -> None:
    """Every worker ends up with no active page and no sequence."""
    for address in addresses:
        async with Client(address) as client:

            async def is_idle(client: Client = client) -> bool:
                info = await client.info()
                return info.pages["active"] == 0 and info.num_running == 0 and info.num_waiting == 0

            await eventually(is_idle, seconds, f"pages of {address} are free")


async def busy_worker(cluster: LocalCluster, role: str) -> str:
    """Name of the worker of `role` that runs a sequence now."""
    found: list[str] = []

    async def is_found() -> bool:
        for name, report in cluster.workers.items():
            if report.role == role:
                async with Client(report.grpc) as client:
                    if (await client.info()).num_running:
                        found.append(name)
                        return True
        return False

    await eventually(is_found, 20, f"a {role} worker is busy")
    return found[0]


@pytest.fixture(scope="session")
def support() -> object:
    """Client, eventually, free_of_leaks and busy_worker for test modules."""

    class Support:
        client = Client
        leak_free = staticmethod(free_of_leaks)
        wait_for = staticmethod(eventually)
        busy_worker = staticmethod(busy_worker)

    return Support
