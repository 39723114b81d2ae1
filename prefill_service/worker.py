"""One prompt from arrival to the last acknowledged row."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from kvbraid.engine.events import PromptSent, TokensReady
from kvbraid.engine.sequence import EngineRequest, SequenceKey
from kvbraid.errors import InvalidRequestError
from kvbraid.kv.kv_layout import check_compatible
from kvbraid.request import RequestRef, SamplingParams, TokenChunk
from kvbraid.transport.grants import Grant
from kvbraid.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to compute and where its KV goes. token_ids ends with earlier attempts' tokens."""

    ref: RequestRef
    index: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of the prompt; num_cached_tokens of the prompt were not computed."""

    chunk: TokenChunk
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptHandedOver:
    """Every row is in the decode worker's pools."""

    sent: PromptSent


class PrefillWorker:
    """Runs prompts on the engine."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def prefill(self, prompt: Prompt) -> AsyncGenerator[FirstToken | PromptHandedOver]:
        """The first token as soon as it is known, then the end of the handoff.

        A first token that finishes the generation is the only event: nothing needs the KV.
        Leaving the iterator early stops the push and frees the pages. Raises IncompatibleError
        when the grant's layout cannot take this worker's rows.
        """
        check_compatible(self._worker.layout, prompt.grant.layout)
        if prompt.grant.end_position != len(prompt.token_ids):
            raise InvalidRequestError(
                f"grant ends at position {prompt.grant.end_position}, the prompt has "
                f"{len(prompt.token_ids)} tokens",
                field="grant",
            )
        request = EngineRequest(
            key=SequenceKey(prompt.ref.request_id, prompt.ref.attempt, prompt.index),
            token_ids=prompt.token_ids,
            num_prompt_tokens=prompt.num_prompt_tokens,
            sampling=self._worker.sampling_for(
                prompt.sampling, prompt.token_ids, prompt.num_prompt_tokens
            ),
            cache_salt=prompt.cache_salt,
            destination=prompt.grant,
        )
        with self._worker.counted_handoff_failures("out"):
            async with self._worker.streams.open(request) as events:
                async for event in events:
                    if isinstance(event, TokensReady):
                        yield FirstToken(event.chunk, event.num_cached_tokens)
                    elif isinstance(event, PromptSent):
                        self._worker.observe_sent(event, prompt.grant)
                        yield PromptHandedOver(event)
