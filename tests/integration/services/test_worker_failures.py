"""Processes die or freeze under a running request; nobody loses a token or a page.

Two decode workers striped over two ranks and two prefill workers. The victim is a rank, a worker
or the coordinator; SIGKILL is seen at once, SIGSTOP through keepalives and heartbeats.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
import pytest

PROMPT = 58  # 1289 prompt tokens, 128 greedy tokens
SHORT = 6  # 6 prompt tokens, 128 greedy tokens


def ranks_of(pid: int) -> list[int]:
    """Process ids of a worker's ranks, rank 0 first."""
    return [pid, *sorted(child.pid for child in psutil.Process(pid).children())]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("victim", [0, 1], ids=["rank 0", "another rank"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
async def test_a_lost_decode_rank_costs_no_token(
    cluster_of: Callable, support, references, tmp_path: Path, victim: int, number: signal.Signals
) -> None:
    reference = references[SHORT]
    with cluster_of(tmp_path, decode=("tp=2,dcp=2", "tp=2,dcp=2")) as cluster:
        async with support.client(cluster.coordinator.grpc) as client:
            call = client.start(reference.prompt_ids, len(reference.output_ids))
            tokens, struck_at, last, longest_gap = [], 0.0, 0.0, 0.0
            lost = ""
            async for token in client.tokens(call):
                now = time.monotonic()
                if struck_at:
                    longest_gap = max(longest_gap, now - last)
                last = now
                tokens.append(token)
                if len(tokens) == 10:
                    lost = await support.busy_worker(cluster, "decode")
                    ranks = ranks_of(cluster.children[lost].pid)
                    assert len(ranks) == 2
                    os.kill(ranks[victim], number)
                    struck_at = last = time.monotonic()
            assert tokens == reference.output_ids
            assert longest_gap < 5.0
            for rank in ranks:

                async def has_ended(rank: int = rank) -> bool:
                    return is_gone(rank)

                await support.wait_for(has_ended, 5, f"process {rank} of the lost worker ends")
            survivors = [r.grpc for n, r in cluster.workers.items() if n != lost]
            await support.leak_free(survivors)
            again = await client.all_tokens(reference.prompt_ids, 20)
            assert again == reference.output_ids[:20]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
async def test_a_lost_prefill_worker_costs_no_token(
    cluster_of: Callable, support, references, tmp_path: Path, number: signal.Signals
) -> None:
    reference = references[PROMPT]
    slow = "tp=1,dcp=1,prefill_chunk_tokens=8,max_num_batched_tokens=8"
    with cluster_of(tmp_path, prefill=(slow, slow)) as cluster:
        async with support.client(cluster.coordinator.grpc) as client:
            call = asyncio.ensure_future(client.all_tokens(reference.prompt_ids, 24, timeout=60))
            lost = await support.busy_worker(cluster, "prefill")
            struck_at = time.monotonic()
            os.kill(cluster.children[lost].pid, number)
            assert await call == reference.output_ids[:24]
            assert time.monotonic() - struck_at < 45
            survivors = [r.grpc for n, r in cluster.workers.items() if n != lost]
            await support.leak_free(survivors)
            cluster.children[lost].kill()


async def test_without_another_decode_worker_the_client_gets_unavailable_within_5_s(
    cluster_of: Callable, support, references, tmp_path: Path
) -> None:
    reference = references[SHORT]
    options = ("--recovery-seconds=1",)
    with cluster_of(tmp_path, coordinator=options) as cluster:
        async with support.client(cluster.coordinator.grpc) as client:
            call = client.start(reference.prompt_ids, 128)
            stream = client.tokens(call)
            assert await anext(stream) == reference.output_ids[0]
            os.kill(cluster.children["decode-0"].pid, signal.SIGKILL)
            struck_at = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - struck_at < 5
            await support.leak_free([cluster.workers["prefill-0"].grpc])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
async def test_a_lost_coordinator_leaves_no_page_behind(
    cluster_of: Callable, support, references, tmp_path: Path, number: signal.Signals
) -> None:
    reference = references[PROMPT]
    slow = "tp=1,dcp=1,prefill_chunk_tokens=8,max_num_batched_tokens=8"
    with cluster_of(tmp_path, prefill=(slow,)) as cluster:
        workers = [report.grpc for report in cluster.workers.values()]
        async with support.client(cluster.coordinator.grpc) as client:
            decoding = client.start(references[SHORT].prompt_ids, 128, ignore_eos=True)
            stream = client.tokens(decoding)
            await anext(stream)
            prefilling = asyncio.ensure_future(client.all_tokens(reference.prompt_ids, 100))
            await support.busy_worker(cluster, "prefill")
            os.kill(cluster.children["coordinator"].pid, number)
            await support.leak_free(workers, seconds=8)
            if number == signal.SIGKILL:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await prefilling
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            prefilling.cancel()
            cluster.children["coordinator"].kill()
