"""Round trip of a drafting step without its compute, and what the taps cost before it.

python -m benchmarks.draft_wire --json benchmarks/results/draft_wire.json

A proposer that answers at once is asked as a decode worker's engine thread asks: embedded, in a
service of the same host (local socket, shared memory for many rows), over a TCP socket on loopback,
and by gRPC over the same. Services run in processes of their own; the wires take turns. Bar of the
round trip by a socket: 0.35 ms p50 for one sequence with one row of 576 float32 numbers. The tap
(fc over three layers, and keeping and reading the rows) is timed alone; on this machine's CPU it is
the product that counts.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.report import BenchmarkRow, write_report
from draft_service.batcher import Batcher
from draft_service.config import DraftSettings
from draft_service.local_door import LocalDoor
from draft_service.servicer import DraftServicer
from draft_service.socket_listener import SocketListener
from draft_service.tcp_door import TcpDoor
from draft_service.worker import DraftWorker
from kvbraid.kv.slots import LogicalSlots
from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings, SpeculativeSettings, TlsSettings
from kvbraid.speculative.fused_rows import FusedRows
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal
from kvbraid.telemetry.metrics import DraftServiceMetrics
from kvbraid.telemetry.speculation_metrics import SpeculationMetrics
from kvbraid.transport.draft_rows import RowFormat
from kvbraid.transport.draft_terms import DraftPeer, DraftTerms
from kvbraid.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from kvbraid.worker.remote_drafting import RemoteDrafting

BAR_S = 0.35e-3
NUM_DRAFTS = 7
VOCAB = 49152
NUM_WARM, NUM_ROUNDS, NUM_STEPS = 100, 10, 100
NUM_TAPS, NUM_TAPPED = 3, 100
PAGE = 16

WIRES: tuple[Literal["local_socket", "tcp", "grpc"], ...] = ("local_socket", "tcp", "grpc")
NAMES = {"local_socket": "same host", "tcp": "loopback TCP", "grpc": "gRPC"}
Step = Callable[[Sequence[DraftTask]], Sequence[Answer | None]]


class Size(NamedTuple):
    """What one step brings: rows of each sequence, each of `hidden` numbers."""

    sequences: int
    rows: int
    hidden: int

    @property
    def dtype(self) -> str:
        """As the models of these widths run."""
        return "float32" if self.hidden == 576 else "bfloat16"

    @property
    def case(self) -> str:
        """Its name."""
        return f"{self.sequences} x {self.rows} rows of {self.hidden} {self.dtype}"


HIDDENS = (576, 4096)
SHAPES = ((1, 1), (1, 4), (1, 8), (8, 1), (8, 4), (8, 8))
WITH_BAR = Size(1, 1, 576)
# gRPC is the way that is left where a socket cannot be had.
WITHOUT_BAR = ("tap", "grpc")


class Idle:
    """A proposer that answers without computing."""

    num_sequences, num_evicted, num_free_tokens = 0, 0, 1 << 20

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer]:
        """The same drafts for every task."""
        return [Proposal(tuple(range(task.num_wanted)), (0.5,) * task.num_wanted) for task in tasks]

    def drop(self, key: str) -> None:
        """Nothing is held."""


class FirstTaps:
    """fc of a drafter with three taps."""

    tap_layers = (1, 14, 26)

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        self.fused_width = size.hidden
        self._fc = torch.randn(size.hidden, NUM_TAPS * size.hidden, dtype=dtype)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """See Fusion."""
        return torch.nn.functional.linear(taps.flatten(1), self._fc)


def terms(hidden: int) -> DraftTerms:
    """Those of a drafter of this width."""
    return DraftTerms(
        epoch=1,
        drafter_kind="dspark",
        drafter_digest="d",
        target_digest="t",
        hidden_size=hidden,
        row_dtype=Size(1, 1, hidden).dtype,
        tap_layers=(1, 14, 26),
        max_draft_tokens=NUM_DRAFTS,
        predicts_from_anchor=True,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        max_rows_per_message=1024,
        max_sequences=128,
        max_position=8192,
    )


async def serve(address_file: Path, hidden: int) -> None:
    """Serve until killed."""
    metrics, settings = DraftServiceMetrics(), DraftSettings()
    batcher = Batcher(
        Idle(), window_s=0.3e-3, max_batch=128, max_chunk_rows=1024, metrics=metrics.draft
    )
    worker = DraftWorker(
        terms=terms(hidden), settings=settings, batcher=batcher, metrics=metrics.draft
    )
    server = RpcServer(role="draft", settings=ServerSettings(), metrics=metrics.rpc)
    local = SocketListener(LocalDoor(worker.terms))
    tcp = SocketListener(TcpDoor(ServerSettings(), 0))
    local.start()
    tcp.start()
    servicer = DraftServicer(
        worker,
        lease_s=20.0,
        address=lambda: server.address,
        inbox=batcher.inbox,
        listeners=(local, tcp),
    )
    server.add(add_DraftServiceServicer_to_server, servicer, "kvbraid.v1.DraftService")
    await server.start()
    threading.Thread(target=batcher.run, daemon=True).start()
    partial = address_file.with_suffix(".partial")
    partial.write_text(server.address)
    partial.rename(address_file)
    await server.wait_stopped()


@contextmanager
def service(hidden: int) -> Iterator[str]:
    """The address of a service in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        address_file = Path(directory) / "address"
        command = [sys.executable, "-m", "benchmarks.draft_wire", "--serve", str(address_file)]
        with subprocess.Popen([*command, "--hidden", str(hidden)]) as process:
            try:
                while not address_file.exists():
                    if process.poll() is not None:
                        raise RuntimeError("the service ended before it served")
                    time.sleep(0.02)
                yield address_file.read_text()
            finally:
                process.kill()


def tasks_of(size: Size) -> list[DraftTask]:
    """One step."""
    rows = torch.randn(size.rows, size.hidden, dtype=RowFormat(size.hidden, size.dtype).dtype)
    ids = tuple(range(size.rows))
    return [
        DraftTask(f"request-{i}/0/0", 100, rows, ids, ids[-1], NUM_DRAFTS)
        for i in range(size.sequences)
    ]


def timed(step: Step, size: Size, num: int) -> list[float]:
    """Seconds of each of `num` steps. Raises RuntimeError when one was not answered."""
    found = []
    for _ in range(num):
        tasks = tasks_of(size)
        began = time.perf_counter()
        answers = step(tasks)
        found.append(time.perf_counter() - began)
        if None in answers:
            raise RuntimeError("a step was not answered")
    return found


def timed_in_turns(steps: dict[str, Step], size: Size) -> dict[str, list[float]]:
    """Seconds of the steps of each wire."""
    for step in steps.values():
        timed(step, size, NUM_WARM)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(NUM_ROUNDS):
        for name, step in steps.items():
            found[name] += timed(step, size, NUM_STEPS)
    return found


def timed_taps(size: Size) -> list[float]:
    """Seconds that fusing the taps of a step, keeping and reading its rows take."""
    dtype, num = RowFormat(size.hidden, size.dtype).dtype, size.sequences * size.rows
    fusion = FirstTaps(size, dtype)
    kept = FusedRows(size.hidden, num_slots=1024, logical_page_size=PAGE, dtype=dtype)
    slots = LogicalSlots(np.arange(PAGE, PAGE + num))
    taps = torch.randn(num, NUM_TAPS, size.hidden, dtype=dtype)
    found = []
    for _ in range(NUM_TAPPED):
        began = time.perf_counter()
        kept.take(slots, fusion.fuse(taps))
        kept.read(slots)
        found.append(time.perf_counter() - began)
    return found[NUM_TAPPED // 10 :]


def rows_of(name: str, size: Size, seconds: Sequence[float]) -> list[BenchmarkRow]:
    """p50 and p99."""
    p50, p99 = (float(x) for x in np.quantile(seconds, [0.5, 0.99]))
    bar = 1.0 if size == WITH_BAR and name not in WITHOUT_BAR else None
    holds = bar is None or p50 / BAR_S <= bar
    case = f"{NAMES.get(name, name)}, {size.case}"
    return [
        BenchmarkRow(f"{case}: p50 (s)", p50, BAR_S, p50 / BAR_S, bar, holds),
        BenchmarkRow(f"{case}: p99 (s)", p99, BAR_S, p99 / BAR_S, None, True),
    ]


async def measure(hidden: int, addresses: dict[str, str]) -> list[BenchmarkRow]:
    """Every size of this width."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(ChannelPool(ServerSettings()))
        steps: dict[str, Step] = {"embedded": Idle().step}
        for wire in WIRES:
            drafting = RemoteDrafting(
                address=addresses[wire],
                peer=DraftPeer(1, "t", "d", VOCAB, NUM_DRAFTS),
                settings=SpeculativeSettings(
                    draft_timeout_ms=1000, draft_timeout_fraction=1e6, draft_wire=wire
                ),
                channels=pool.channel,
                tls=TlsSettings(),
                metrics=SpeculationMetrics(CollectorRegistry()),
            )
            drafting.start()
            stack.push_async_callback(drafting.stop)
            while drafting.is_away:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
            steps[wire] = drafting.step
        found = []
        for sequences, rows in SHAPES:
            size = Size(sequences, rows, hidden)
            seconds = await asyncio.to_thread(timed_in_turns, steps, size)
            seconds["tap"] = timed_taps(size)
            for name, values in seconds.items():
                found += rows_of(name, size, values)
        return found


def main() -> int:
    """Measure, print and write; exit code 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--hidden", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        uvloop.run(serve(options.serve, options.hidden))
        return 0
    rows = []
    for hidden in HIDDENS:
        with ExitStack() as stack:
            # One for each wire: a service waits for steps of other streams that are active.
            addresses = {str(wire): stack.enter_context(service(hidden)) for wire in WIRES}
            rows += uvloop.run(measure(hidden, addresses))
    for row in rows:
        verdict = "" if row.bar is None else f" {'holds' if row.holds else 'MISSED'}"
        sys.stdout.write(f"{row.case[:-4]}: {row.ours * 1e3:.3f} ms{verdict}\n")
    if options.json:
        write_report(options.json, "draft_wire", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
