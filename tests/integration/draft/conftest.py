"""A real draft service on loopback whose proposer is scripted, and clients of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from grpc.aio import EOF
from prometheus_client import CollectorRegistry

from draft_service.batcher import Batcher
from draft_service.config import DraftSettings
from draft_service.local_door import LocalDoor
from draft_service.servicer import DraftServicer
from draft_service.socket_listener import SocketListener
from draft_service.tcp_door import TcpDoor
from draft_service.worker import DraftWorker
from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings, SpeculativeSettings, TlsSettings
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal, Resync
from kvbraid.telemetry.metrics import DraftServiceMetrics
from kvbraid.telemetry.speculation_metrics import SpeculationMetrics
from kvbraid.transport.draft_rows import row_carrier
from kvbraid.transport.draft_socket import connect_local_socket, connect_tcp
from kvbraid.transport.draft_step import fill_step
from kvbraid.transport.draft_terms import DraftPeer, DraftTerms, offers_from_proto
from kvbraid.transport.socket_frames import frame_of
from kvbraid.v1 import draft_pb2 as pb
from kvbraid.v1.draft_pb2_grpc import DraftServiceStub, add_DraftServiceServicer_to_server
from kvbraid.worker.remote_drafting import RemoteDrafting
from kvbraid.worker.row_pusher import RowPusher

HIDDEN, VOCAB = 4, 50
PLAINTEXT = TlsSettings()


class ScriptedProposer:
    """Holds what it is given and drafts anchor + 1, anchor + 2 ... modulo the vocabulary.

    answer: overrides what a task is answered. gate: steps wait while it is cleared.
    """

    def __init__(self) -> None:
        self.rows: dict[str, torch.Tensor] = {}
        self.bases: dict[str, int] = {}
        self.tasks: list[DraftTask] = []
        self.batches: list[list[str]] = []
        self.dropped: list[str] = []
        self.answer: Callable[[DraftTask], Answer] | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()

    num_evicted = 0
    num_free_tokens = 1 << 20

    @property
    def num_sequences(self) -> int:
        return len(self.rows)

    def end(self, key: str) -> int:
        return self.bases[key] + len(self.rows[key]) if key in self.rows else 0

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer]:
        self.arrived.set()
        assert self.gate.wait(60)
        assert len({task.key for task in tasks}) == len(tasks)
        self.tasks += tasks
        self.batches.append([task.key for task in tasks])
        return [self._answer(task) for task in tasks]

    def _answer(self, task: DraftTask) -> Answer:
        first, end = task.first_position, self.end(task.key)
        if first > end and not task.starts_cold:
            return Resync(end)
        if task.starts_cold:
            self.rows[task.key], self.bases[task.key] = task.rows.clone(), first
        else:
            held = self.rows.get(task.key, torch.zeros(0, HIDDEN))
            kept = held[: first - self.bases.setdefault(task.key, 0)]
            self.rows[task.key] = torch.cat([kept, task.rows])
        if self.answer is not None:
            return self.answer(task)
        ids = tuple((task.anchor_id + 1 + i) % VOCAB for i in range(task.num_wanted))
        return Proposal(ids, (0.5,) * len(ids))

    def drop(self, key: str) -> None:
        self.dropped.append(key)
        self.rows.pop(key, None)
        self.bases.pop(key, None)


TERMS = DraftTerms(
    epoch=77,
    drafter_kind="dspark",
    drafter_digest="drafter",
    target_digest="target",
    hidden_size=HIDDEN,
    row_dtype="float32",
    tap_layers=(1, 3),
    max_draft_tokens=4,
    predicts_from_anchor=True,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    max_rows_per_message=16,
    max_sequences=8,
    max_position=1000,
)


class Service:
    """A running service. epoch changes from one to the next, as incarnations do."""

    def __init__(
        self,
        server: RpcServer,
        proposer: ScriptedProposer,
        registry: Any,
        listeners: dict[str, SocketListener],
    ) -> None:
        self.server = server
        self.listeners = listeners
        self.proposer = proposer
        self.registry = registry
        self.pool = ChannelPool(ServerSettings())

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def num_queued(self) -> float:
        return self.sample("kvbraid_draft_queued_sequences")

    @property
    def stub(self) -> Any:
        return DraftServiceStub(self.pool.channel(self.address))

    def sample(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def running_service(
    *, epoch: int = TERMS.epoch, port: int = 0, tls: TlsSettings = PLAINTEXT, **settings: Any
) -> AsyncIterator[Service]:
    metrics = DraftServiceMetrics()
    proposer = ScriptedProposer()
    draft = DraftSettings(**({"ingest_wait_ms": 50.0, "open_wait_ms": 200.0} | settings))
    batcher = Batcher(
        proposer,
        window_s=draft.batch_window_ms / 1000,
        max_batch=TERMS.max_sequences,
        max_chunk_rows=TERMS.max_rows_per_message,
        metrics=metrics.draft,
    )
    terms = replace(TERMS, epoch=epoch)
    worker = DraftWorker(terms=terms, settings=draft, batcher=batcher, metrics=metrics.draft)
    own = ServerSettings(port=port, drain_seconds=10, tls=tls)
    listeners: dict[str, SocketListener] = {
        "local_socket": SocketListener(LocalDoor(terms)),
        "tcp": SocketListener(TcpDoor(own, draft.step_port)),
    }
    for listener in listeners.values():
        listener.start()
    server = RpcServer(role="draft", settings=own, metrics=metrics.rpc)
    servicer = DraftServicer(
        worker,
        lease_s=draft.lease_seconds,
        address=lambda: server.address,
        inbox=batcher.inbox,
        listeners=tuple(listeners.values()),
    )
    server.add(add_DraftServiceServicer_to_server, servicer, "kvbraid.v1.DraftService")
    await server.start()
    server.admission.on_close(servicer.begin_goodbye)
    await server.set_serving(True)
    thread = threading.Thread(target=batcher.run)
    thread.start()
    service = Service(server, proposer, metrics.registry, listeners)
    try:
        yield service
    finally:
        proposer.gate.set()
        for listener in listeners.values():
            listener.close()
        batcher.close()
        await asyncio.to_thread(thread.join, 10)
        await service.pool.close()
        await server.stop()


class RawStream:
    """A Draft call by hand: what a client of another make may send."""

    def __init__(self, service: Service, **hello: Any) -> None:
        self.call = service.stub.Draft()
        self.hello = {
            "protocol_version": 1, "incarnation": 9, "target_digest": "target",
            "drafter_digest": "drafter", "vocab_size": VOCAB, "max_draft_tokens": 4,
        } | hello  # fmt: skip

    async def open(self) -> pb.DraftTerms:
        await self.call.write(pb.DraftRequest(hello=pb.DraftHello(**self.hello)))
        return (await self.call.read()).terms

    async def step(self, step_id: int, tasks: Sequence[DraftTask], **changes: Any) -> Any:
        """The answer to a step; `changes` replace fields of its message."""
        await self.call.write(step_request(step_id, tasks, **changes))
        response = await self.call.read()
        return response if response is EOF else response.answers


def step_request(step_id: int, tasks: Sequence[DraftTask], **changes: Any) -> pb.DraftRequest:
    """A step; `changes` replace fields of its message."""
    step = pb.DraftStep(step_id=step_id)
    carrier = row_carrier(TERMS.row_format)
    fill_step(step, tasks, changes.pop("dropped", ()), epoch=TERMS.epoch, carrier=carrier)
    for field, value in changes.items():
        step.ClearField(field)
        step.MergeFrom(pb.DraftStep(**{field: value}))
    return pb.DraftRequest(step=step)


class RawSocket(RawStream):
    """The same beside whose call a socket is used."""

    def __init__(self, service: Service, wire: str, **hello: Any) -> None:
        super().__init__(service, **hello)
        self.wire = wire
        self.socket: Any = None

    async def open(self) -> pb.DraftTerms:
        terms = await super().open()
        self.socket = await asyncio.to_thread(connect_by, self.wire, terms)
        return terms

    async def send(self, data: bytes) -> None:
        await asyncio.to_thread(self.socket.sendall, data)

    async def read(self) -> Any:
        """The next answers; None at the end of the socket."""
        head = await asyncio.to_thread(self.receive, 8)
        if len(head) < 8:
            return None
        body = await asyncio.to_thread(self.receive, int.from_bytes(head, "little"))
        return pb.DraftResponse.FromString(body).answers

    def receive(self, num_bytes: int) -> bytes:
        """So many bytes, fewer at the end."""
        data = b""
        while len(data) < num_bytes and (more := self.socket.recv(num_bytes - len(data))):
            data += more
        return data

    async def step(self, step_id: int, tasks: Sequence[DraftTask], **changes: Any) -> Any:
        request = step_request(step_id, tasks, **changes)
        await self.send(frame_of(request.SerializeToString()))
        return await self.read()


def connect_by(wire: str, terms: pb.DraftTerms) -> Any:
    """A socket that a service has accepted, blocking."""
    offers = offers_from_proto(terms)
    if wire == "tcp":
        assert offers.tcp is not None
        connected = connect_tcp(offers.tcp, PLAINTEXT, timeout_s=5)
    else:
        assert offers.local is not None
        connected = connect_local_socket(offers.local, TERMS, timeout_s=5)
    connection: Any = connected.connection
    connection.settimeout(20)
    return connection


class Target:
    """A decode worker as far as drafting goes."""

    def __init__(self, drafting: RemoteDrafting, registry: CollectorRegistry) -> None:
        self.drafting = drafting
        self.registry = registry

    async def step(self, *tasks: DraftTask) -> list[Answer | None]:
        return await asyncio.to_thread(self.drafting.step, tasks)

    async def connected(self) -> None:
        await eventually(lambda: not self.drafting.is_away)

    async def away(self) -> None:
        await eventually(lambda: self.drafting.is_away)

    @property
    def num_unacknowledged(self) -> float | None:
        return self.registry.get_sample_value("kvbraid_speculation_unacknowledged_rows")

    def fallbacks(self, reason: str) -> float:
        name = "kvbraid_speculation_fallbacks_total"
        return self.registry.get_sample_value(name, {"reason": reason}) or 0.0


@asynccontextmanager
async def running_target(
    address: str,
    *,
    wire: str = "auto",
    incarnation: int = 5,
    clock: Any = None,
    peer: Any = None,
    tls: TlsSettings = PLAINTEXT,
    **settings: Any,
) -> AsyncIterator[Target]:
    registry = CollectorRegistry()
    values: dict[str, Any] = {
        "draft_timeout_ms": 10000.0,
        "draft_timeout_fraction": 100.0,
        "draft_wire": wire,
    }
    values |= settings
    extra = {} if clock is None else {"clock": clock}
    async with ChannelPool(ServerSettings(tls=tls)) as pool:
        drafting = RemoteDrafting(
            address=address,
            peer=peer or DraftPeer(incarnation, "target", "drafter", VOCAB, 4),
            settings=SpeculativeSettings(**values),
            channels=pool.channel,
            tls=tls,
            metrics=SpeculationMetrics(registry),
            **extra,
        )
        drafting.start()
        try:
            yield Target(drafting, registry)
        finally:
            await drafting.stop()


class Pusher:
    """A prefill worker as far as drafting goes."""

    def __init__(self, rows: RowPusher, registry: CollectorRegistry) -> None:
        self.rows = rows
        self.registry = registry

    def failures(self, reason: str) -> float:
        name = "kvbraid_speculation_push_failures_total"
        return self.registry.get_sample_value(name, {"reason": reason}) or 0.0

    @property
    def num_unacknowledged(self) -> float | None:
        return self.registry.get_sample_value("kvbraid_speculation_unacknowledged_rows")

    @property
    def num_sent(self) -> float:
        return self.registry.get_sample_value("kvbraid_speculation_sent_rows_total") or 0.0


@asynccontextmanager
async def running_pusher(**options: Any) -> AsyncIterator[Pusher]:
    registry = CollectorRegistry()
    values: dict[str, Any] = {"drafter_digest": "drafter", "hidden_size": HIDDEN} | options
    async with ChannelPool(ServerSettings()) as pool:
        rows = RowPusher(channels=pool.channel, metrics=SpeculationMetrics(registry), **values)
        rows.start()
        try:
            yield Pusher(rows, registry)
        finally:
            await rows.stop()


async def eventually(is_so: Callable[[], object], seconds: float = 20.0) -> None:
    """Returns once `is_so` holds, looking after every turn of the loop."""
    give_up = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < give_up, f"not within {seconds} s"
        await asyncio.sleep(0.001)


def rows_of(first: int, num: int) -> torch.Tensor:
    """Rows that tell their position."""
    return torch.arange(first, first + num).float()[:, None].expand(num, HIDDEN).clone()


def task_of(key: str, first: int, ids: Sequence[int], wanted: int = 3, **more: Any) -> DraftTask:
    """A task of one row for each id; the last id is the anchor."""
    anchor = more.pop("anchor_id", ids[-1] if ids else 9)
    rows = more.pop("rows", rows_of(first, len(ids)))
    return DraftTask(key, first, rows, tuple(ids), anchor, wanted, **more)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running_service() as running:
        yield running


@pytest.fixture
def wire() -> str:
    """How targets' steps travel; modules have it take every value."""
    return "auto"


@pytest.fixture
async def target(service: Service, wire: str) -> AsyncIterator[Target]:
    async with running_target(service.address, wire=wire) as running:
        await running.connected()
        yield running


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


@pytest.fixture
def draft(wire: str) -> Any:
    """What test modules need of this one."""

    class Draft:
        service = staticmethod(running_service)
        target = staticmethod(partial(running_target, wire=wire))
        pusher = staticmethod(running_pusher)
        raw = RawStream
        raw_socket = RawSocket
        request = staticmethod(step_request)
        connect = staticmethod(connect_by)
        eventually = staticmethod(eventually)
        rows = staticmethod(rows_of)
        task = staticmethod(task_of)
        terms = TERMS
        hidden, vocab = HIDDEN, VOCAB

    return Draft
