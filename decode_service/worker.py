"""One request from admission to its last token."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from kvbraid.engine.events import GrantReady, RowsReceived, TokensReady
from kvbraid.engine.sequence import EngineRequest, SequenceKey, Source
from kvbraid.request import RequestRef, SamplingParams
from kvbraid.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate. token_ids ends with earlier attempts' tokens.

    expect_handoff: a prefill worker pushes the KV and `start` brings the first token; otherwise
    the prompt is computed here.
    """

    ref: RequestRef
    index: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str
    expect_handoff: bool


class DecodeWorker:
    """Runs generations on the engine."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def generate(self, generation: Generation) -> AsyncGenerator[GrantReady | TokensReady]:
        """The grant first when a handoff is expected, then tokens up to a finish reason.

        Leaving the iterator early frees the pages.
        """
        request = EngineRequest(
            key=_key(generation.ref, generation.index),
            token_ids=generation.token_ids,
            num_prompt_tokens=generation.num_prompt_tokens,
            sampling=self._worker.sampling_for(
                generation.sampling, generation.token_ids, generation.num_prompt_tokens
            ),
            cache_salt=generation.cache_salt,
            source=Source.HANDOFF if generation.expect_handoff else Source.COMPUTE,
        )
        with self._counted(generation):
            async with self._worker.streams.open(request) as events:
                async for event in events:
                    if isinstance(event, RowsReceived):
                        self._worker.observe_received(event)
                    elif isinstance(event, GrantReady | TokensReady):
                        yield event

    def _counted(self, generation: Generation) -> AbstractContextManager[None]:
        if not generation.expect_handoff:
            return nullcontext()
        return self._worker.counted_handoff_failures("in")

    def start(self, ref: RequestRef, index: int, transfer_id: bytes, token_id: int) -> None:
        """The first token of a handed-off request; one that has ended is ignored."""
        self._worker.check_token_id(token_id)
        self._worker.streams.engine.start_received(_key(ref, index), transfer_id, token_id)

    async def abort(self, ref: RequestRef, index: int) -> bool:
        """End a request; returns, once its pages are free, whether there was one."""
        return await self._worker.streams.abort(_key(ref, index))


def _key(ref: RequestRef, index: int) -> SequenceKey:
    return SequenceKey(ref.request_id, ref.attempt, index)
