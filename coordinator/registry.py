"""Who is there and how full: the configured workers, their health and their load."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable

from coordinator.clients import InfoClient
from coordinator.config import DNS_PREFIX
from coordinator.messages import WorkerInfo
from coordinator.served_weights import ServedWeights, described, holders
from kvbraid.address import join_address, split_address
from kvbraid.errors import KVBraidError, UnavailableError
from kvbraid.telemetry.metrics import PlacementMetrics
from kvbraid.validation import Limits

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.2
_MAX_SILENT_POLLS = 3
_DNS_REFRESH_S = 5.0


class Pool(enum.Enum):
    """Which phase a worker is configured for."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(enum.Enum):
    """Whether a worker takes requests."""

    DOWN = "down"
    LOADING = "loading"
    UP = "up"
    DRAINING = "draining"
    INCOMPATIBLE = "incompatible"


class Worker:
    """One worker process as this coordinator sees it."""

    def __init__(self, pool: Pool, address: str) -> None:
        self.pool = pool
        self.address = address
        self.info: WorkerInfo | None = None
        self.is_serving = False
        self.is_answering = False
        self.is_compatible = True
        # Serves, but the other decode workers have not all been heard yet.
        self.is_held_back = False
        self.has_told_health = False
        self.num_polls = 0
        self.num_in_flight = 0
        self.num_reserved_tokens = 0
        self.poll_now = asyncio.Event()
        self._served_incarnation: int | None = None

    @property
    def state(self) -> WorkerState:
        """Derived from its health, its last answer and the other workers' model."""
        if self.info is None or not self.is_answering:
            return WorkerState.DOWN
        if self.is_serving and self.is_held_back:
            return WorkerState.LOADING
        if not self.is_serving:
            served = self._served_incarnation == self.info.incarnation
            return WorkerState.DRAINING if served else WorkerState.LOADING
        return WorkerState.UP if self.is_compatible else WorkerState.INCOMPATIBLE

    @property
    def is_heard(self) -> bool:
        """Whether it had its say: it does not answer, or has told its weights and its health."""
        if self.info is None:
            return self.num_polls > 0
        has_told_all = self.is_serving or self.has_told_health
        return has_told_all or self.num_polls > _MAX_SILENT_POLLS

    @property
    def identity(self) -> tuple[str, int]:
        """Changes when the process is replaced, and with it everything that it had cached."""
        return self.address, self.info.incarnation if self.info else 0

    @property
    def max_sequence_len(self) -> int:
        """Longest prompt plus output that it can ever hold."""
        return min(self.info.max_model_len, self.info.num_pool_tokens) if self.info else 0

    def take(self, info: WorkerInfo) -> None:
        """Its newest answer."""
        if self.info is not None and self.info.incarnation != info.incarnation:
            logger.warning("worker was replaced", extra={"worker": self.address})
        self.info = info
        self.is_answering = True
        if self.is_serving:
            self._served_incarnation = info.incarnation

    def suspect(self) -> None:
        """A call to it failed: it counts as down until it answers again, which is asked at once."""
        self.is_answering = False
        self.poll_now.set()


class Registry:
    """Keeps the state of every configured worker current while it runs."""

    def __init__(
        self,
        *,
        prefill: list[str],
        decode: list[str],
        make_client: Callable[[str], InfoClient],
        poll_s: float,
        recovery_s: float,
        vocab_size: int,
        metrics: PlacementMetrics,
    ) -> None:
        """recovery_s: how long requests wait for a pool whose last worker went down."""
        self._targets = [*((Pool.PREFILL, t) for t in prefill), *((Pool.DECODE, t) for t in decode)]
        self._make_client = make_client
        self._poll_s = poll_s
        self._recovery_s = recovery_s
        self._down_since_s: dict[Pool, float] = {}
        self._was_up: set[Pool] = set()
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._workers: dict[tuple[Pool, str], Worker] = {}
        self._followers: dict[tuple[Pool, str], list[asyncio.Task[None]]] = {}
        # Entries of the configuration that stand for a worker now; it goes with the last of them.
        self._num_entries: Counter[tuple[Pool, str]] = Counter()
        self._weights = ServedWeights()
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Begins to follow the workers; `stop` ends it."""
        for pool, target in self._targets:
            if target.startswith(DNS_PREFIX):
                follow = self._follow_name(pool, target.removeprefix(DNS_PREFIX))
                self._tasks.append(asyncio.create_task(follow))
            else:
                self._add(pool, target)

    async def stop(self) -> None:
        """Stops following."""
        followers = [task for tasks in self._followers.values() for task in tasks]
        await _cancel([*self._tasks, *followers])

    def workers(self, pool: Pool) -> list[Worker]:
        """Every known worker of a pool, in whatever state."""
        return [worker for worker in self._workers.values() if worker.pool is pool]

    def up(self, pool: Pool) -> list[Worker]:
        """The workers of a pool that take requests."""
        return [worker for worker in self.workers(pool) if worker.state is WorkerState.UP]

    @property
    def are_all_known(self) -> bool:
        """Whether every configured worker serves, be it with other weights."""
        settled = (WorkerState.UP, WorkerState.INCOMPATIBLE)
        return all(worker.state in settled for worker in self._workers.values())

    def is_configured(self, pool: Pool) -> bool:
        """Whether the configuration names workers of a pool."""
        return any(named is pool for named, _ in self._targets)

    def patience_s(self) -> float:
        """Seconds that a request may wait for a pool whose last worker just went down, else 0."""
        since = max(self._down_since_s.values(), default=0.0)
        return max(0.0, since + self._recovery_s - time.monotonic()) if since else 0.0

    async def wait_limits(self) -> Limits:
        """`limits`, after waiting a moment for decode workers that just went down."""
        while not self.up(Pool.DECODE) and (patience_s := self.patience_s()) > 0:
            await self.wait_changed(patience_s)
        return self.limits()

    def limits(self) -> Limits:
        """What a request may take now. Raises UnavailableError while no decode worker is up."""
        decode = self.up(Pool.DECODE)
        if not decode:
            raise UnavailableError(self.why_none_is_up(Pool.DECODE))
        return Limits(max(w.max_sequence_len for w in decode), self._vocab_size)

    @property
    def model(self) -> WorkerInfo | None:
        """What the decode workers say of the model whose weights are served, or may be; None before
        one answered."""
        known = [worker.info for worker in self.workers(Pool.DECODE) if worker.info is not None]
        served = (info for info in known if info.model_digest == self._weights.digest)
        return next(served, known[0] if known else None)

    async def wait_changed(self, timeout_s: float) -> None:
        """Returns when a worker changed or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def suspect(self, worker: Worker) -> None:
        """A call to `worker` failed in a way that says it may be gone."""
        worker.suspect()
        self._note_change()

    def why_none_is_up(self, pool: Pool) -> str:
        """A sentence with the state of every worker of a pool."""
        states = [f"{worker.address} is {worker.state.value}" for worker in self.workers(pool)]
        why = f"no {pool.value} worker is up: {', '.join(states) or 'none is configured'}"
        held = holders(self.workers(Pool.DECODE))
        return f"{why}; weights differ: {described(held)}" if len(held) > 1 else why

    def _add(self, pool: Pool, address: str) -> None:
        self._num_entries[pool, address] += 1
        if (pool, address) in self._workers:
            return
        worker = Worker(pool, address)
        client = self._make_client(address)
        self._workers[pool, address] = worker
        self._followers[pool, address] = [
            asyncio.create_task(self._follow_health(worker, client)),
            asyncio.create_task(self._follow_info(worker, client)),
        ]

    async def _follow_health(self, worker: Worker, client: InfoClient) -> None:
        while True:
            try:
                async for is_serving in client.watch_health():
                    worker.is_serving = is_serving
                    worker.has_told_health = True
                    worker.poll_now.set()
                    self._note_change()
            except KVBraidError as error:
                if worker.is_answering:
                    logger.warning("lost worker %s: %s", worker.address, error)
            worker.is_serving = worker.is_answering = False
            self._note_change()
            await asyncio.sleep(_RECONNECT_S)

    async def _follow_info(self, worker: Worker, client: InfoClient) -> None:
        num_silent = 0
        while True:
            worker.poll_now.clear()
            try:
                worker.take(await client.info(timeout_s=max(self._poll_s, 1.0)))
                num_silent = 0
            except KVBraidError as error:
                num_silent += 1
                if num_silent >= _MAX_SILENT_POLLS and worker.is_answering:
                    logger.warning("worker %s does not answer: %s", worker.address, error)
                    worker.is_answering = False
            worker.num_polls += 1
            self._note_change()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await worker.poll_now.wait()

    async def _follow_name(self, pool: Pool, target: str) -> None:
        """Keeps one worker for every address that a DNS name has. While it has none, the known ones
        stay: a name server that fails says nothing of them, and polls find those that are gone."""
        host, port = split_address(target)
        mine: set[str] = set()
        failure = ""
        while True:
            try:
                addresses = await _resolve(host, port)
                failure = ""
            except (OSError, UnicodeError) as error:  # UnicodeError: a name that can be nobody's
                addresses = mine
                if str(error) != failure:
                    failure = str(error)
                    logger.warning("cannot resolve %s: %s", host, failure)
            for address in sorted(addresses - mine):
                self._add(pool, address)
            for address in mine - addresses:
                await self._remove(pool, address)
            mine = addresses
            await asyncio.sleep(_DNS_REFRESH_S if mine else _RECONNECT_S)

    async def _remove(self, pool: Pool, address: str) -> None:
        self._num_entries[pool, address] -= 1
        if self._num_entries[pool, address]:
            return
        await _cancel(self._followers.pop((pool, address)))
        del self._workers[pool, address]
        self._note_change()

    def _note_change(self) -> None:
        self._weights.compare(self.workers(Pool.DECODE), self.workers(Pool.PREFILL))
        for pool in Pool:
            states = [worker.state for worker in self.workers(pool)]
            if WorkerState.UP in states:
                self._down_since_s.pop(pool, None)
                self._was_up.add(pool)
            elif pool in self._was_up:
                self._was_up.discard(pool)
                self._down_since_s[pool] = time.monotonic()
            for state in WorkerState:
                gauge = self._metrics.workers.labels(pool=pool.value, state=state.value)
                gauge.set(states.count(state))
        self._changed.set()
        self._changed = asyncio.Event()


async def _resolve(host: str, port: int) -> set[str]:
    """Raises OSError for a name without addresses, UnicodeError for what is no name."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {join_address(str(entry[4][0]), port) for entry in found}


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
