"""One completion as the client sees it: what was emitted is never taken back or repeated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.messages import SequenceRequest
from kvbraid.detokenizer import Detokenizer
from kvbraid.errors import RequestCancelledError
from kvbraid.request import FinishReason, GenerateRequest, RequestRef, TokenChunk, Usage
from kvbraid.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """New tokens and text of completion `index`; text may lag behind the tokens.

    usage: on the last one, with chunk.finish_reason.
    """

    index: int
    chunk: TokenChunk
    text: str
    usage: Usage | None = None


class Completion:
    """Tokens and text of one completion over all its attempts."""

    def __init__(self, request: GenerateRequest, index: int, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.request = request
        self.index = index
        self.emitted: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._num_cached_tokens = 0
        self._num_drafts = 0
        self._num_accepted = 0
        self._first_attempt: int | None = None
        self._max_tokens = sampling.max_tokens or 1
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._text = Detokenizer(tokenizer, sampling.stop, min_tokens=sampling.min_tokens)

    def next_request(self, attempt: int, incarnation: int) -> SequenceRequest:
        """What to ask of workers now: the prompt goes on behind the emitted tokens."""
        request = self.request
        remaining = self._max_tokens - len(self.emitted)
        return SequenceRequest(
            ref=RequestRef(request.request_id, attempt, incarnation),
            index=self.index,
            token_ids=request.prompt_ids + tuple(self.emitted),
            num_prompt_tokens=len(request.prompt_ids),
            # Stop strings and n are ours: workers know tokens of one sequence only.
            sampling=replace(request.sampling, max_tokens=remaining, stop=(), n=1),
            cache_salt=request.cache_salt,
        )

    @property
    def is_finished(self) -> bool:
        """Whether the last delta was made."""
        return self.finish_reason is not None

    def add(self, chunk: TokenChunk, attempt: int, num_cached_tokens: int) -> CompletionDelta:
        """Takes tokens of a worker; what lies behind a stop string or max_tokens is dropped.

        num_cached_tokens: cached prompt tokens of this attempt. Only the attempt that answers the
        first token counts: a later one finds in caches what that one left there.
        """
        if self._first_attempt is None:
            self._first_attempt = attempt
        if attempt == self._first_attempt:
            self._num_cached_tokens = num_cached_tokens
        if chunk.finish_reason is FinishReason.ABORT:
            raise RequestCancelledError("the request was aborted on its worker")
        text, num_taken = self._take(chunk)
        self.finish_reason = self._reason(chunk, num_taken)
        if self.finish_reason is not None:
            text += self._text.finish()
        taken = chunk.cut(num_taken, self.finish_reason)
        self._num_drafts += taken.num_drafts
        self._num_accepted += taken.num_accepted
        return CompletionDelta(self.index, taken, text, self._usage())

    def _take(self, chunk: TokenChunk) -> tuple[str, int]:
        """Text of the chunk's tokens up to the one that ends the completion, and their number."""
        text = ""
        num_taken = 0
        for token_id in chunk.token_ids:
            num_taken += 1
            self.emitted.append(token_id)
            is_last = num_taken == len(chunk.token_ids)
            if not (is_last and self._is_stop_token(token_id, chunk.finish_reason)):
                text += self._text.push(token_id)
            if self._text.stopped or len(self.emitted) >= self._max_tokens:
                break
        return text, num_taken

    def _is_stop_token(self, token_id: int, reason: FinishReason | None) -> bool:
        return reason is FinishReason.STOP and token_id in self._stop_token_ids

    def _reason(self, chunk: TokenChunk, num_taken: int) -> FinishReason | None:
        if self._text.stopped:
            return FinishReason.STOP
        if chunk.finish_reason is not None and num_taken == len(chunk.token_ids):
            return chunk.finish_reason
        return FinishReason.LENGTH if len(self.emitted) >= self._max_tokens else None

    def _usage(self) -> Usage | None:
        if self.finish_reason is None:
            return None
        return Usage(
            num_prompt_tokens=len(self.request.prompt_ids),
            num_completion_tokens=len(self.emitted),
            num_cached_tokens=min(self._num_cached_tokens, len(self.request.prompt_ids)),
            num_draft_tokens=self._num_drafts,
            num_accepted_tokens=self._num_accepted,
        )
