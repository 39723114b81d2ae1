"""One request through the real services: equality, handoff, cancel, deadline, leases, drain."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kvbraid.v1 import decode_pb2, decode_pb2_grpc

LONG = 58  # 1289 prompt tokens
MIDDLE = 47  # 176 prompt tokens
SHORT = 6


@pytest.fixture(scope="module")
def cluster(cluster_of: Callable, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    directory = tmp_path_factory.mktemp("cluster")
    chunked = "tp=1,dcp=1,prefill_chunk_tokens=64,max_num_batched_tokens=256"
    with cluster_of(directory, prefill=(chunked,), decode=("tp=3,dcp=3",)) as started:
        yield started


def metric(address: str, pattern: str) -> float:
    """Sum of the samples whose line matches."""
    text = urllib.request.urlopen(f"http://{address}/metrics").read().decode()
    values = re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in values)


async def test_answers_equal_the_reference_and_leave_nothing_behind(
    cluster, support, references
) -> None:
    async with support.client(cluster.coordinator.grpc) as client:
        wanted = [r for r in references.values() if len(r.prompt_ids) < 1000][:8]
        answers = await asyncio.gather(
            *(client.all_tokens(r.prompt_ids, min(24, len(r.output_ids))) for r in wanted)
        )
        for reference, tokens in zip(wanted, answers, strict=True):
            assert tokens == reference.output_ids[:24]
    await support.leak_free([report.grpc for report in cluster.workers.values()])


async def test_every_row_was_handed_over_and_decode_computed_no_prompt_token(
    cluster, support, references
) -> None:
    prefill, decode = cluster.workers["prefill-0"], cluster.workers["decode-0"]
    sent = r'kvbraid_handoff_bytes_total\{direction="out",mover="[a-z_]+"\}'
    before = metric(prefill.metrics, sent), metric(decode.metrics, computed_tokens())
    reference = references[LONG]
    async with support.client(cluster.coordinator.grpc) as client:
        assert await client.all_tokens(reference.prompt_ids, 8) == reference.output_ids[:8]
    row_bytes, layers = 80 * 4, 6
    moved = metric(prefill.metrics, sent) - before[0]
    assert moved == len(reference.prompt_ids) * row_bytes * layers
    assert metric(decode.metrics, computed_tokens()) == before[1], "no prompt token on decode"


def computed_tokens() -> str:
    return "kvbraid_engine_prompt_tokens_total"


async def test_rows_that_decode_holds_are_not_sent_again(cluster, support, references) -> None:
    prefill = cluster.workers["prefill-0"]
    sent = r'kvbraid_handoff_bytes_total\{direction="out",mover="[a-z_]+"\}'
    reference = references[MIDDLE]
    async with support.client(cluster.coordinator.grpc) as client:
        first = await client.all_tokens(reference.prompt_ids, 4)
        before = metric(prefill.metrics, sent)
        again = await client.all_tokens(reference.prompt_ids, 4)
    assert again == first == reference.output_ids[:4]
    moved = metric(prefill.metrics, sent) - before
    held = (len(reference.prompt_ids) // 64 * 64) // 12 * 12  # whole pages of whole hash blocks
    assert moved == (len(reference.prompt_ids) - held) * 80 * 4 * 6


async def test_a_cancelled_request_frees_its_pages_and_the_next_is_served(
    cluster, support, references
) -> None:
    workers = [report.grpc for report in cluster.workers.values()]
    async with support.client(cluster.coordinator.grpc) as client:
        for wait_for_token in (True, False):
            call = client.start(references[LONG].prompt_ids, 100, ignore_eos=True)
            stream = client.tokens(call)
            if wait_for_token:
                await anext(stream)
            else:
                await asyncio.sleep(0)
            call.cancel()
            await support.leak_free(workers, seconds=5)
        assert (await client.all_tokens(references[SHORT].prompt_ids, 5))[:5] == references[
            SHORT
        ].output_ids[:5]
    decode = cluster.workers["decode-0"].metrics
    assert metric(decode, "kvbraid_engine_cancel_to_free_seconds_count") >= 1


async def test_a_deadline_ends_the_request_everywhere(cluster, support, references) -> None:
    async with support.client(cluster.coordinator.grpc) as client:
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.all_tokens(
                references[SHORT].prompt_ids, 1500, timeout=1.0, ignore_eos=True
            )
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - began < 3
    await support.leak_free([report.grpc for report in cluster.workers.values()])


async def test_a_vanished_client_frees_its_pages(cluster, support, references) -> None:
    client = support.client(cluster.coordinator.grpc)
    async with client:
        stream = client.tokens(client.start(references[SHORT].prompt_ids, 1500, ignore_eos=True))
        await anext(stream)
    await support.leak_free([report.grpc for report in cluster.workers.values()], seconds=5)


async def test_every_worker_says_what_it_is(cluster, support) -> None:
    async with support.client(cluster.workers["decode-0"].grpc) as client:
        info = await client.info(with_rows=True)
    assert info.role == "decode"
    assert (info.layout.tp_size, info.layout.dcp_size, info.layout.page_size) == (3, 3, 4)
    assert info.attention_backend == "torch"
    assert info.communicator == "shared_memory"
    assert len(info.rows_per_rank) == 3
    assert info.num_pool_tokens >= 4096
    assert info.incarnation != 0


async def test_sigterm_lets_the_running_request_finish(
    cluster_of: Callable, support, references, tmp_path: Path
) -> None:
    reference = references[SHORT]
    with cluster_of(tmp_path) as cluster:
        async with support.client(cluster.coordinator.grpc) as client:
            stream = client.tokens(client.start(reference.prompt_ids, 40))
            tokens = [await anext(stream)]
            decode = cluster.children["decode-0"]
            decode.terminate()
            tokens += [token async for token in stream]
            assert tokens == reference.output_ids[:40]

            async def has_ended() -> bool:
                return not decode.is_running

            await support.wait_for(has_ended, 10, "the drained worker ends")
            assert decode.exit_code == 0


async def test_a_lease_without_rows_ends_and_frees_the_pages(
    cluster_of: Callable, support, references, tmp_path: Path
) -> None:
    with cluster_of(tmp_path, decode=("tp=2,dcp=2,lease_seconds=0.5",)) as cluster:
        address = cluster.workers["decode-0"].grpc
        async with grpc.aio.insecure_channel(address) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            request = decode_pb2.DecodeRequest(
                token_ids=references[SHORT].prompt_ids,
                num_prompt_tokens=len(references[SHORT].prompt_ids),
                expect_handoff=True,
            )
            request.ref.request_id = "nobody pushes"
            request.sampling.seed = 1
            call = stub.Decode(request, timeout=20)
            assert (await call.read()).WhichOneof("event") == "grant"
            began = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.ABORTED
            assert time.monotonic() - began < 5
        await support.leak_free([address])


async def test_a_prompt_that_queues_for_longer_than_its_lease_is_served(
    cluster_of: Callable, support, references, tmp_path: Path
) -> None:
    slow = "tp=1,dcp=1,max_num_seqs=1,prefill_chunk_tokens=4,max_num_batched_tokens=4"
    decode = "tp=2,dcp=2,lease_seconds=1.5"
    with cluster_of(tmp_path, prefill=(slow,), decode=(decode,)) as cluster:
        async with support.client(cluster.coordinator.grpc) as client:
            wanted = [references[number] for number in (58, 74, 60)]
            answers = await asyncio.gather(
                *(client.all_tokens(r.prompt_ids, 4, timeout=100) for r in wanted)
            )
        assert answers == [r.output_ids[:4] for r in wanted]
        lost = r'kvbraid_handoff_failures_total\{direction="in",reason="LEASE_LOST"\}'
        assert metric(cluster.workers["decode-0"].metrics, lost) == 0
        await support.leak_free([report.grpc for report in cluster.workers.values()])
