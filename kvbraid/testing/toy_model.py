"""A model that is a hash: its next token depends on every token before, and on nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvbraid.request import (
    FinishReason,
    PositionLogprobs,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)
from kvbraid.sampling_key import sampling_key


class ToyModel:
    """Deterministic and sensitive: one lost, repeated or changed token changes all that follow."""

    def __init__(self, vocab_size: int = 4096, first_id: int = 8, model_len: int = 2048) -> None:
        """Tokens are drawn from [first_id, vocab_size), so special ids below are never made."""
        self.vocab_size = vocab_size
        self.max_model_len = model_len
        self._first_id = first_id

    def next_token(self, token_ids: Sequence[int], sampling: SamplingParams, index: int) -> int:
        """The token after `token_ids`; greedy when the temperature is 0, else by seed and index."""
        key = 0 if sampling.is_greedy else sampling_key(sampling.seed or 0, index)
        tokens = np.asarray(token_ids, dtype="<u4").tobytes()
        digest = hashlib.blake2b(tokens, key=key.to_bytes(8, "little"), digest_size=8).digest()
        span = self.vocab_size - self._first_id
        return self._first_id + int.from_bytes(digest, "little") % span

    def next_chunk(
        self, token_ids: Sequence[int], num_new: int, sampling: SamplingParams, index: int
    ) -> TokenChunk:
        """One token as a worker sends it; num_new: tokens of this attempt with it."""
        token_id = self.next_token(token_ids, sampling, index)
        reason = None
        if token_id in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif num_new >= (sampling.max_tokens or 1):
            reason = FinishReason.LENGTH
        logprobs: tuple[PositionLogprobs, ...] = ()
        if sampling.top_logprobs is not None:
            top = [TokenLogprob(token_id + i, -0.5 - i) for i in range(sampling.top_logprobs)]
            logprobs = (PositionLogprobs(TokenLogprob(token_id, -0.5), tuple(top)),)
        return TokenChunk((token_id,), logprobs, reason)

    def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, index: int = 0
    ) -> list[int]:
        """All tokens of an undisturbed generation: what every test compares with."""
        tokens = list(prompt_ids)
        while True:
            num_new = len(tokens) - len(prompt_ids) + 1
            chunk = self.next_chunk(tokens, num_new, sampling, index)
            tokens.extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                return tokens[len(prompt_ids) :]
