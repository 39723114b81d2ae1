"""Round trip of a drafting step without its compute: the engine's thread to the service and back.

python -m benchmarks.draft_wire --json benchmarks/results/draft_wire.json

A draft service whose proposer answers at once runs in a process of its own; `RemoteDrafting.step`
is timed in a thread beside the I/O loop, as a decode worker calls it. Bar: 0.35 ms p50 for one
sequence with one row of 576 float32 numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from benchmarks.report import BenchmarkRow, write_report
from draft_service.batcher import Batcher
from draft_service.config import DraftSettings
from draft_service.servicer import DraftServicer
from draft_service.worker import DraftWorker
from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings, SpeculativeSettings
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal
from kvbraid.telemetry.metrics import DraftServiceMetrics
from kvbraid.telemetry.speculation_metrics import SpeculationMetrics
from kvbraid.transport.draft_terms import DraftPeer, DraftTerms
from kvbraid.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from kvbraid.worker.remote_drafting import RemoteDrafting

BAR_S = 0.35e-3
NUM_DRAFTS = 7
HIDDEN = 576
NUM_WARM, NUM_TIMED = 300, 3000
# (sequences, rows of each): one accepted and four accepted tokens a step; the first has the bar.
SIZES = ((1, 1), (8, 1), (8, 4), (64, 4))
VOCAB = 49152


class Idle:
    """A proposer that answers without computing."""

    num_sequences = 0

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer]:
        """The same drafts for every task."""
        return [Proposal(tuple(range(task.num_wanted)), (0.5,) * task.num_wanted) for task in tasks]

    def drop(self, key: str) -> None:
        """Nothing is held."""


def terms() -> DraftTerms:
    """Those of the 135M model's drafter."""
    return DraftTerms(
        epoch=1,
        drafter_kind="dspark",
        drafter_digest="d",
        target_digest="t",
        hidden_size=HIDDEN,
        row_dtype="float32",
        tap_layers=(1, 14, 26),
        max_draft_tokens=NUM_DRAFTS,
        predicts_from_anchor=True,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        max_rows_per_message=1024,
        max_sequences=128,
        max_position=8192,
    )


async def serve(address_file: Path) -> None:
    """Serve until killed."""
    metrics, settings = DraftServiceMetrics(), DraftSettings()
    batcher = Batcher(
        Idle(), window_s=0.3e-3, max_batch=128, max_chunk_rows=1024, metrics=metrics.draft
    )
    worker = DraftWorker(terms=terms(), settings=settings, batcher=batcher, metrics=metrics.draft)
    server = RpcServer(role="draft", settings=ServerSettings(), metrics=metrics.rpc)
    servicer = DraftServicer(worker, lease_s=20.0)
    server.add(add_DraftServiceServicer_to_server, servicer, "kvbraid.v1.DraftService")
    await server.start()
    threading.Thread(target=batcher.run, daemon=True).start()
    partial = address_file.with_suffix(".partial")
    partial.write_text(server.address)
    partial.rename(address_file)
    await server.wait_stopped()


def timed_steps(drafting: RemoteDrafting, num_sequences: int, num_rows: int) -> np.ndarray:
    """Seconds of each step. Raises RuntimeError when a step was not answered."""
    rows = torch.randn(num_rows, HIDDEN)
    ids = tuple(range(num_rows))
    found = []
    for _ in range(NUM_WARM + NUM_TIMED):
        tasks = [
            DraftTask(f"request-{i}/0/0", 100, rows, ids, ids[-1], NUM_DRAFTS)
            for i in range(num_sequences)
        ]
        began = time.perf_counter()
        answers = drafting.step(tasks)
        found.append(time.perf_counter() - began)
        if None in answers:
            raise RuntimeError("a step was not answered")
    return np.array(found[NUM_WARM:])


async def measure(address: str) -> list[BenchmarkRow]:
    """Every size."""
    rows = []
    async with ChannelPool(ServerSettings()) as pool:
        drafting = RemoteDrafting(
            address=address,
            peer=DraftPeer(1, "t", "d", VOCAB, NUM_DRAFTS),
            settings=SpeculativeSettings(draft_timeout_ms=1000, draft_timeout_fraction=1e6),
            channels=pool.channel,
            metrics=SpeculationMetrics(CollectorRegistry()),
        )
        drafting.start()
        while drafting.is_away:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        for index, (num_sequences, num_rows) in enumerate(SIZES):
            seconds = await asyncio.to_thread(timed_steps, drafting, num_sequences, num_rows)
            p50, p99 = np.quantile(seconds, [0.5, 0.99])
            num_bytes = num_sequences * num_rows * HIDDEN * 4
            case = f"{num_sequences} sequences x {num_rows} rows ({num_bytes} bytes)"
            bar = 1.0 if index == 0 else None
            ratio = float(p50 / BAR_S)
            holds = bar is None or ratio <= bar
            rows.append(BenchmarkRow(f"{case}: p50 (s)", float(p50), BAR_S, ratio, bar, holds))
            rows.append(
                BenchmarkRow(f"{case}: p99 (s)", float(p99), BAR_S, float(p99 / BAR_S), None, True)
            )
        await drafting.stop()
    return rows


def main() -> int:
    """Measure, print and write; exit code 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        asyncio.run(serve(options.serve))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        address_file = Path(directory) / "address"
        command = [sys.executable, "-m", "benchmarks.draft_wire", "--serve", str(address_file)]
        with subprocess.Popen(command) as service:
            try:
                while not address_file.exists():
                    if service.poll() is not None:
                        raise RuntimeError("the service ended before it served")
                    time.sleep(0.02)
                rows = asyncio.run(measure(address_file.read_text()))
            finally:
                service.kill()
    for row in rows:
        sys.stdout.write(f"{row.case}: {row.ours * 1e3:.3f} ms\n")
    if options.json:
        write_report(options.json, "draft_wire", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
