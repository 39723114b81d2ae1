"""The network lets no prefill worker through to a decode worker: requests are answered anyway."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

PROMPT = 58  # 1289 prompt tokens, 128 greedy tokens


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def metrics_of(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


async def test_prompts_that_cannot_be_handed_over_are_computed_by_the_decode_worker(
    cluster_of: Callable, support, references, tmp_path: Path
) -> None:
    """The decode worker gives peers an address where nobody listens."""
    reference, port = references[PROMPT], free_port()
    with cluster_of(
        tmp_path,
        decode=(f"tp=1,dcp=1,port={port},advertise_host=127.0.0.9",),
        coordinator=(f"--decode-workers=127.0.0.1:{port}",),
    ) as cluster:
        async with support.client(cluster.coordinator.grpc) as client:
            tokens = await client.all_tokens(reference.prompt_ids, 16)
        assert tokens == reference.output_ids[:16]
        fell_back = 'kvbraid_process_fallbacks_total{reason="handoffs_failed"} 1.0'
        assert fell_back in metrics_of(cluster.coordinator.metrics)
        await support.leak_free([f"127.0.0.1:{port}", cluster.workers["prefill-0"].grpc])
