"""Greedy tokens equal the reference through the services with decode workers of eight ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

NUM_TOKENS = 16
LAYOUTS = [(8, 8, "a2a"), (8, 8, "ag_rs"), (8, 4, "a2a"), (8, 2, "ag_rs"), (4, 4, "a2a")]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("tp", "dcp", "exchange"), LAYOUTS)
async def test_answers_equal_the_reference(
    cluster_of: Callable, tmp_path: Path, support, references, tp, dcp, exchange
) -> None:
    decode = f"tp={tp},dcp={dcp},exchange={exchange},poison_kv=true"
    wanted = [r for r in references.values() if len(r.prompt_ids) < 1000][:8]
    with cluster_of(tmp_path, decode=(decode,)) as cluster:
        async with support.client(cluster.coordinator.grpc) as client:
            answers = await asyncio.gather(
                *(
                    client.all_tokens(r.prompt_ids, min(NUM_TOKENS, len(r.output_ids)), timeout=120)
                    for r in wanted
                )
            )
        await support.leak_free([report.grpc for report in cluster.workers.values()])
    for reference, tokens in zip(wanted, answers, strict=True):
        assert tokens == reference.output_ids[:NUM_TOKENS]
