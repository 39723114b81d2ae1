"""Greedy generation by a worker that does not serve yet."""

from __future__ import annotations

from collections.abc import Sequence

from kvbraid.engine.events import TokensReady
from kvbraid.engine.sequence import EngineRequest, SequenceKey
from kvbraid.request import SamplingParams, TokenChunk
from kvbraid.worker.worker import Worker


async def generate_to_the_end(
    worker: Worker, key: SequenceKey, prompt: Sequence[int], max_tokens: int
) -> list[TokenChunk]:
    """Exactly max_tokens tokens behind `prompt`. Nothing that this caches matches a client's
    prompt: key.request_id is the salt."""
    token_ids = tuple(prompt)
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
    request = EngineRequest(
        key=key,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=worker.sampling_for(sampling, token_ids, len(token_ids)),
        cache_salt=key.request_id,
    )
    async with worker.streams.open(request) as events:
        return [event.chunk async for event in events if isinstance(event, TokensReady)]
